"""`%%ranks`: a cell that runs on every rank, in processes that stay. `%%ranks?` prints the help below."""

from __future__ import annotations

import keyword
import math
import re
import shlex
import sys
import types
from argparse import ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class

from hpnb.ranks.call_checks import limit_in_seconds, wrong_members
from hpnb.ranks.cell_syntax import FLAGS, python_of_cell
from hpnb.ranks.devices import choose_device, default_ranks
from hpnb.ranks.forkserver import START_TIMEOUT
from hpnb.ranks.pool import HANG_TIMEOUT, Ranks


def _limit(text: str) -> float:
    try:
        return math.inf if text.lower() == "none" else float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of seconds, such as 30, and not none") from None


_parser = ArgumentParser(prog="%%ranks", add_help=False, exit_on_error=False)
_parser.add_argument("who", nargs="?", default="")
_parser.add_argument("--device", default="auto")
_parser.add_argument("--timeout", type=_limit, default=None)
_parser.add_argument("--hang-timeout", type=_limit, default=HANG_TIMEOUT)
_parser.add_argument("--start-timeout", type=_limit, default=START_TIMEOUT)
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
        """Run this cell on every rank: processes that stay between cells, with their variables.

            %%ranks 4                     four ranks; they are started, unless four are there
            %%ranks                       all ranks that are there
            %%ranks 0,2                   two of them ("0," is rank 0 alone)
            %%ranks 4 --out losses        put the value of the last line, one per rank, into `losses`, and do
                                          not print it

            --device cpu                  or cuda; by default GPUs, shared if there are too few
            --timeout 30                  seconds that the cell may take; by default any time
            --hang-timeout 300            seconds in which no rank computes or prints, after which the cell
                                          ends (none: never). Ranks may wait for one that computes.
            --start-timeout 300           seconds that new ranks have to import and to find each other

        Inside the cell a process group is up, and hpnb.rank(), hpnb.world_size() and hpnb.device() answer.
        What a rank prints, and the value of the last line, appear under its number. Figures of matplotlib
        appear as pictures when the cell ends, those of rank 0, or of the first that runs the cell; one of
        hpnb.plot is shown by hpnb.plot.show(figure, alt="...").

        Variables. If the cell uses a variable of the notebook, each rank gets a copy, and a fresh copy
        whenever the notebook reassigns it. In-place changes, such as list.append, are not sent. A variable
        that the cell assigns stays on that rank; `--out` brings values back. Another number of ranks,
        another device, an interrupt at which no Trainer saves, a hang and a rank that dies, or raises while
        others wait for it or compute for more than 5 seconds, end the ranks. Their variables are gone then,
        and so is what they have changed in their copies of the notebook's, such as a model that they have
        trained; the next cell names both. If one rank raises and the others finish the cell, all of them keep
        their variables.

        Modules. A rank imports a module once. If the notebook reloads it by importlib.reload, the ranks do
        too, before their next cell; if its file was only edited, a line says so, once. %autoreload changes
        functions in the notebook alone.

        `await` and `!command` work, on every rank. Other magics belong into cells of their own: what %cd,
        %env and %pip change is there in the next %%ranks cell. Ranks have no keyboard: input() and
        breakpoint() are refused.
        """
        try:
            who_in_one_word = re.sub(r"(?<=\d)\s*,\s*(?=\d)", ",", line)
            options, unknown = _parser.parse_known_args(shlex.split(who_in_one_word))
        except (ArgumentError, ValueError) as error:
            raise ValueError(f"%%ranks {line}: {error}") from None
        if unknown:
            raise ValueError(f"%%ranks does not know {' '.join(unknown)}; see %%ranks?")
        if options.out and (not options.out.isidentifier() or keyword.iskeyword(options.out)):
            raise ValueError(f"%%ranks --out {options.out}: give the name of a variable, as in --out losses")
        count, members = _who(options.who)
        # Line 1 is the magic itself, so lines count as they stand in the cell.
        text = python_of_cell("\n" + cell, self.shell.input_transformer_manager.transform_cell)
        filename = self.shell.compile.cache(text, self._number())
        compile(text, filename, "exec", FLAGS, dont_inherit=True)  # a SyntaxError starts and ends no ranks
        limits = [("--hang-timeout", options.hang_timeout), ("--start-timeout", options.start_timeout)]
        limits += [("--timeout", options.timeout)] if options.timeout is not None else []
        hang_timeout, *_ = [limit_in_seconds(name, limit) for name, limit in limits]  # before ranks end
        pool = self._pool(count, members, options.device, options.start_timeout)
        pool.hang_timeout = hang_timeout
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

    def _pool(
        self, count: int | None, members: tuple[int, ...] | None, device: str, start_timeout: float
    ) -> Ranks:
        """The ranks that are there, or new ones. What is refused leaves those before as they are."""
        pool = self.pool
        fits = pool is not None and pool.alive and count in (None, pool.size)
        if pool is not None and fits and device in ("auto", pool.choice.device):
            return pool
        count = count or self._size or default_ranks()
        if members is not None and not set(members) <= set(range(count)):
            needed = max(members) + 1
            advice = f"; %%ranks {needed} starts {needed} of them" if needed > count else ""
            raise ValueError(wrong_members(members, count) + advice)
        choose_device(device, count)
        lost = _lost(pool, count)
        if pool is not None:
            pool.close()
        started = Ranks(count, device, start_timeout=start_timeout)
        print(f"started {started.choice}{lost}")
        self.pool, self._size = started, started.size
        return started


def _lost(pool: Ranks | None, count: int) -> str:
    """Which variables end with the ranks before, now that `count` others start, and which are the notebook's
    again."""
    if pool is None:
        return ""
    notebook = vars(sys.modules["__main__"])
    code = types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type  # which cells do not change
    copies = [name for name in pool.sent if name in notebook and not isinstance(notebook[name], code)]
    lost = ""
    if gone := _some(pool.assigned):
        how = "are stopped" if pool.alive else "have ended"
        lost += f"\nthe {pool.size} ranks before them {how}, and their variables are gone: {gone}"
    if count < pool.size and pool.alive and lost:
        lost += f"\nrank {count} alone of the {pool.size} would have been %%ranks {count}, with a comma"
    if again := _some(copies):
        lost += f"\nthe notebook's copy again, without what ranks have changed in it: {again}"
    return lost


def _some(names: Iterable[str]) -> str:
    """The latest names, and how many more there are."""
    shown = [name for name in reversed([*names]) if not name.startswith("_")]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


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
