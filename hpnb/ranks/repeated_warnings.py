"""A warning that several ranks give is shown once: ranks run the same lines, and warn alike.

    [rank 0] cell-1:2: UserWarning: all of us
    [rank 0]   warnings.warn("all of us")
    [rank 0] 3 other ranks gave the warning of cell-1:2

The lowest rank of the call shows it. What another one warns of alone is shown before its next line, or after
two seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

_WARNING = re.compile(r"(?P<place>.+:\d+): \w*Warning: ")
_LONGEST = 8  # lines of a message and its source, below the first
HOLD = 2.0  # seconds for which a warning waits for the first rank to give it, too
Line = tuple[int, str]  # rank, text


class RepeatedWarnings:
    """Leaves out of the ranks' lines what another rank has said already.

    Args:
        first: the rank that shows what several say; None is the one that says it first.
    """

    def __init__(self, first: int | None = None) -> None:
        self._first = first
        self._shown: dict[str, tuple[int, list[str]]] = {}  # warning: who showed it, and the lines below it
        self._held: dict[int, dict[str, list[str]]] = {}  # of a rank: warnings that the first may give, too
        self._held_since: dict[int, float] = {}  # time.monotonic() of the first of them
        self._others: dict[str, set[int]] = {}  # who else gave one that was shown

    @property
    def holds(self) -> bool:
        """Whether a warning waits."""
        return any(self._held.values())

    def filter(self, rank: int, lines: list[str]) -> list[Line]:
        """What to show of lines that `rank` has written."""
        shown: list[Line] = []
        for lead, below in _blocks(lines):
            if _WARNING.match(lead) is None:
                shown += [*self._release(rank), (rank, lead)]
            elif lead in self._shown:
                who, known = self._shown[lead]
                if rank != who and below == known:
                    self._others.setdefault(lead, set()).add(rank)
                else:
                    shown += [(rank, line) for line in (lead, *below)]
            elif rank == self._first or self._first is None:
                self._show(rank, lead, below)
                shown += [(rank, line) for line in (lead, *below)]
            else:
                delayed = self._held.setdefault(rank, {})
                if delayed.get(lead, below) != below:  # the same line warns of something else
                    shown += [*self._release(rank), *((rank, line) for line in (lead, *below))]
                    continue
                if not delayed:
                    self._held_since[rank] = time.monotonic()
                delayed[lead] = below
        return shown

    def late(self) -> list[Line]:
        """Warnings that have waited for `HOLD` seconds."""
        now = time.monotonic()
        ranks = [rank for rank, held in self._held.items() if held and now - self._held_since[rank] >= HOLD]
        return [line for rank in ranks for line in self._release(rank)]

    def finish(self) -> list[Line]:
        """What is left to show at the end."""
        shown = [line for rank in sorted(self._held) for line in self._release(rank)]
        for lead, ranks in self._others.items():
            match = _WARNING.match(lead)
            assert match is not None
            many = "1 other rank" if len(ranks) == 1 else f"{len(ranks)} other ranks"
            shown.append((self._shown[lead][0], f"{many} gave the warning of {match['place']}"))
        self._others = {}
        return shown

    def _show(self, rank: int, lead: str, below: list[str]) -> None:
        self._shown[lead] = rank, below
        for other, held in self._held.items():
            if held.get(lead) == below:
                del held[lead]
                self._others.setdefault(lead, set()).add(other)

    def _release(self, rank: int) -> Iterator[Line]:
        """Warnings of `rank` that the first has not given so far."""
        for lead, below in self._held.pop(rank, {}).items():
            self._show(rank, lead, below)
            yield rank, lead
            yield from ((rank, line) for line in below)


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each warning with the rest of its message and the line of source below it; any other line by itself."""
    i = 0
    while i < len(lines):
        below: list[str] = []
        if _WARNING.match(lines[i]):
            near = lines[i + 1 : i + 1 + _LONGEST]
            source = next((j for j, line in enumerate(near) if line.startswith("  ")), None)
            below = [] if source is None else near[: source + 1]
        yield lines[i], below
        i += 1 + len(below)
