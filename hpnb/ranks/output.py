r"""What ranks print, shown as they print it: complete lines under their label, progress bars in place.

A line that a rank has ended is shown at once, a warning perhaps two seconds later (`repeated_warnings.py`).
A row that it rewinds with "\r" is a bar: in a notebook all bars of a call share one output that is updated in
place, so a stored notebook keeps their last state; in a terminal the latest bar stays on the last line;
elsewhere only a bar's last state is printed.
"""

from __future__ import annotations

import codecs
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from hpnb.ranks.notebook import in_notebook
from hpnb.ranks.repeated_warnings import HOLD, RepeatedWarnings

_TOKENS = re.compile(r"(\r?\n|\r|\x1b\[A)")
_REDRAW_EVERY = 0.1  # seconds; as tqdm does


class Output:
    """Shows the output of the ranks of one call, in the cell that made the call.

    Args:
        first: the lowest rank of the call, which shows the warnings that several give.
    """

    def __init__(self, first: int | None = None) -> None:
        self._warnings = RepeatedWarnings(first)
        self._rows: dict[int, _RankTerminal] = {}
        self._screen = _choose_screen()
        self._drawn = 0.0

    def feed(self, rank: int, data: bytes) -> None:
        """Take bytes that `rank` has written and show what is complete."""
        rows = self._rows.setdefault(rank, _RankTerminal())
        if lines := self._warnings.filter(rank, rows.feed(data)):
            self._show(lines)
        if rows.bars_changed and time.monotonic() - self._drawn > _REDRAW_EVERY:
            self._draw()

    @property
    def soonest(self) -> float:
        """Seconds after which there is something to show, if no rank writes before."""
        return HOLD if self._warnings.holds else math.inf

    def show_held_warnings(self) -> None:
        """Show what the first rank has not warned of for a while."""
        if late := self._warnings.late():
            self._show(late)

    def finish(self) -> None:
        """The call is over: show unfinished lines and the last state of every bar."""
        for rank, rows in sorted(self._rows.items()):
            if rest := rows.rest():
                self._show(self._warnings.filter(rank, [rest]))
        if left := self._warnings.finish():
            self._show(left)
        self._draw()
        self._screen.end()
        self._rows.clear()

    def _show(self, lines: Sequence[tuple[int, str]]) -> None:
        self._screen.lines([f"[rank {rank}] {line}" for rank, line in lines])

    def _draw(self) -> None:
        bars = [f"[rank {rank}] {bar}" for rank, rows in sorted(self._rows.items()) for bar in rows.bars]
        if bars or any(rows.bars_changed for rows in self._rows.values()):
            self._screen.bars(bars)
        for rows in self._rows.values():
            rows.bars_changed = False
        self._drawn = time.monotonic()


def show_figures(rank: int, figures: Sequence[bytes]) -> None:
    """Show the PNGs that a rank has drawn, below what it has printed."""
    if figures:
        from IPython.display import Image, display

        for png in figures:
            display(Image(data=png, format="png", alt=f"figure of rank {rank}"))


class _RankTerminal:
    """A very small terminal: it tells a finished line from a progress bar that will be redrawn."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._bars: dict[int, str] = {}  # row -> text, for rows that were rewound
        self._row = 0
        self._column: int | None = None  # in a bar that is being written; None: writing a line
        self._line: list[str] = []  # parts of it: a long line without an end is not copied with each
        self._carriage_return = ""
        self.bars_changed = False

    @property
    def bars(self) -> list[str]:
        return [text.rstrip() for _, text in sorted(self._bars.items()) if text.strip()]

    def feed(self, data: bytes) -> list[str]:
        """Lines that are now complete."""
        lines = []
        text = self._carriage_return + self._decode.decode(data)
        self._carriage_return = "\r" if text.endswith("\r") else ""  # it may be the half of a line's end
        for token in _TOKENS.split(text[: len(text) - len(self._carriage_return)]):
            if token == "\r":
                self._rewind()
            elif token == "\x1b[A":
                self._row, self._column = max(0, self._row - 1), None
            elif token.endswith("\n"):
                if self._line or self._row not in self._bars:
                    lines.append(self.rest())
                else:  # a bar's row is left, downwards
                    self._row += 1
                self._column = None
            elif token:
                self._write(token)
        return lines

    def rest(self) -> str:
        """The line that is not complete yet, which is then empty."""
        rest = "".join(self._line)
        self._line = []
        return rest

    def _rewind(self) -> None:
        if self._row not in self._bars:
            self._bars[self._row] = self.rest()
        self._column = 0

    def _write(self, text: str) -> None:
        if self._column is None:  # printed between two states of a bar: a separate line
            self._line.append(text)
            return
        old = self._bars[self._row]
        end = self._column + len(text)
        self._bars[self._row] = old[: self._column] + text + old[end:]
        self._column = end
        self.bars_changed = True


class _Plain:
    """Not a terminal: lines as they come, bars once at the end."""

    def __init__(self) -> None:
        self._last: list[str] = []

    def lines(self, texts: list[str]) -> None:
        _write("".join(text + "\n" for text in texts))

    def bars(self, bars: list[str]) -> None:
        self._last = bars

    def end(self) -> None:
        self.lines(self._last)


class _Terminal(_Plain):
    """The latest bar stays on the last line."""

    def lines(self, texts: list[str]) -> None:
        if texts:
            super().lines(["\r\x1b[2K" + texts[0], *texts[1:]])

    def bars(self, bars: list[str]) -> None:
        super().bars(bars)
        if bars:
            _write("\r\x1b[2K" + bars[-1])


class _Notebook(_Plain):
    """All bars of the call in one output that is updated."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def bars(self, bars: list[str]) -> None:
        from IPython.display import DisplayHandle

        sys.stdout.flush()
        content = {"text/plain": "\n".join(bars)}
        if self._handle is None:
            self._handle = DisplayHandle()
            self._handle.display(content, raw=True)
        else:
            self._handle.update(content, raw=True)

    def end(self) -> None:
        pass


def _write(text: str) -> None:
    """Write to the caller's standard output, with escapes for characters that its encoding lacks."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError as error:
        sys.stdout.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    sys.stdout.flush()


def _choose_screen() -> _Plain:
    if in_notebook():
        return _Notebook()
    return _Terminal() if sys.stdout.isatty() else _Plain()
