"""`%%ranks`: a cell that runs on every rank, in processes that stay.

    %%ranks 4                     four ranks; they are started, unless four are there
    %%ranks 0,2 --timeout 30      two of them ("0," is rank 0 alone)
    %%ranks                       all ranks that are there
    %%ranks 4 --out losses        also put the values of the last line, one per rank, into `losses`
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentError, ArgumentParser
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class

from hpnb.ranks.pool import Ranks

_parser = ArgumentParser(prog="%%ranks", add_help=False, exit_on_error=False)
_parser.add_argument("who", nargs="?", default="")
_parser.add_argument("--device", default="auto")
_parser.add_argument("--timeout", type=float, default=None)
_parser.add_argument("--out", default=None)


@magics_class
class RanksMagics(Magics):  # type: ignore[misc]
    """Holds the ranks that the cells of one notebook share."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.pool: Ranks | None = None
        self._size: int | None = None  # of the last pool, which may have ended

    @cell_magic  # type: ignore[untyped-decorator]
    def ranks(self, line: str, cell: str) -> None:
        """Run this cell on ranks. See the module's first lines for what the line may say."""
        try:
            options, unknown = _parser.parse_known_args(shlex.split(line))
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"%%ranks {line}: {error}") from None
        if unknown:
            raise ValueError(f"%%ranks does not know {' '.join(unknown)}; see %%ranks?")
        count, members = _who(options.who)
        pool = self._pool(count, options.device)
        text = "\n" + cell  # line 1 is the magic itself, so lines count as they stand in the cell
        filename = self.shell.compile.cache(text, self._number())
        results = pool.run_cell(text, filename, members, options.timeout, wanted=bool(options.out))
        if options.out:
            self.shell.user_ns[options.out] = results

    def _number(self) -> int:
        """The number of the cell that is running, as its prompt shows it."""
        frame = sys._getframe(1)
        while frame is not None:
            kind, name = self.shell.compile.format_code_name(frame.f_code.co_filename) or ("", "")
            if kind == "Cell" and (number := re.search(r"\d+", name)):
                return int(number[0])
            frame = frame.f_back  # type: ignore[assignment]
        return int(self.shell.execution_count)

    def _pool(self, count: int | None, device: str) -> Ranks:
        pool = self.pool
        fits = pool is not None and pool.alive and count in (None, pool.size)
        if pool is not None and fits and device in ("auto", pool.choice.device):
            return pool
        if pool is not None:
            pool.close()
        self.pool = started = Ranks(count or self._size, device)
        self._size = started.size
        print(f"started {started.choice}")
        return started


def _who(text: str) -> tuple[int | None, tuple[int, ...] | None]:
    """(how many ranks, which of them), None where the line leaves it open."""
    if not text:
        return None, None
    try:
        if "," in text:
            return None, tuple(int(part) for part in text.split(",") if part.strip())
        count = int(text)
    except ValueError:
        raise ValueError(f"%%ranks {text}: give a count, as in 4, or members, as in 0,2") from None
    if count < 1:
        raise ValueError(f"%%ranks {text}: at least 1 rank is needed; rank 0 alone is written '0,'")
    return count, None
