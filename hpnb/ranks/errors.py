"""RankError: which rank failed, where, and where every other rank was at that moment."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpnb.ranks.last_seen import Frame, Note

OUT_OF_MEMORY = "OutOfMemoryError"  # of torch, on a GPU
_STARTS_A_RANK = "worker|cell_syntax|last_seen|forkserver_process"
_RANK_INTERNALS = re.compile(rf"[/\\]hpnb[/\\]ranks[/\\]({_STARTS_A_RANK})\.py$")
_PLUMBING = re.compile(r"[/\\](multiprocessing[/\\]\w+|threading)\.py$|^<string>$")
_ABOVE_HPNB = str(Path(__file__).parents[2])
_FRAME = re.compile(r"  (File \"[^\"]+\"|Cell In\[\d+\]), line \d+")
_LIBRARY = re.compile(r'  File "(torch|hpnb|numpy|transformers|torchvision|datasets|multiprocessing)/')
_LOST_RANK = re.compile(r"Connection (closed|reset) by peer|Broken pipe")
_FILE = re.compile(r'File "([^"\n]+)", line (\d+)')


class RankError(RuntimeError):
    """A call on ranks did not end well.

    Attributes:
        rank: the rank that failed first.
        traceback: that rank's traceback, with source lines; for one that died, where it was last seen.
        stacks: {rank: stack with source lines} of every rank that was alive, the failed one included.
        error: the name of the exception's type on that rank, or "died", "timed out", "hung",
            "interrupted".

    >>> try:
    ...     hpnb.launch(lambda: 1 / hpnb.rank(), ranks=2, device="cpu")
    ... except hpnb.RankError as error:
    ...     print(error.rank, error.traceback.splitlines()[-1])
    0 ZeroDivisionError: division by zero
    """

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        traceback: str = "",
        stacks: dict[int, str] | None = None,
        error: str = "",
    ) -> None:
        self.summary, self.rank, self.traceback, self.error = summary, rank, traceback, error
        self.stacks = dict(stacks or {})
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.summary]
        if self.traceback:
            parts.append(f"Rank {self.rank}:\n{folded(self.traceback).rstrip()}")
        if self.error == OUT_OF_MEMORY:
            return "\n\n".join(parts)  # it says who holds what; where the others wait does not matter
        # Ranks that raised the same come first, beside the traceback that they share.
        alike: dict[str, list[int]] = {folded(self.traceback): []} if self.traceback else {}
        for rank, stack in self.stacks.items():
            if rank != self.rank and stack:
                alike.setdefault(folded(stack), []).append(rank)
        for stack, ranks in alike.items():
            if not ranks:
                continue
            who = "Rank" if len(ranks) == 1 else "Ranks"
            same = self.traceback and stack == folded(self.traceback)
            where = f" the same as rank {self.rank}" if same else f"\n{stack.rstrip()}"
            parts.append(f"{who} {', '.join(map(str, ranks))}:{where}")
        return "\n\n".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        facts: dict[str, Any] = {"traceback": self.traceback, "stacks": self.stacks, "error": self.error}
        return partial(type(self), self.summary, rank=self.rank, **facts), ()

    def _render_traceback_(self) -> list[str]:
        """What IPython prints: the ranks' tracebacks, without the frames of this library."""
        return [f"{type(self).__name__}: {self}"]


class RankInterrupt(RankError, KeyboardInterrupt):
    """Ctrl-C while ranks were running: a RankError that `except KeyboardInterrupt` catches too.

    >>> issubclass(hpnb.RankInterrupt, KeyboardInterrupt)
    True
    """


# --- stacks as text --------------------------------------------------------------------------


def stack_text(note: Note) -> str:
    """A note as text: the main thread's stack with source lines, then busy other threads."""
    parts = []
    for name, frames in note.threads.items():
        shown = _trim(frames)
        if not shown or (name != "MainThread" and _idle(shown)):
            continue
        lines = [traceback.FrameSummary(f, n, where, lookup_line=False) for f, n, where in shown]
        text = "".join(traceback.StackSummary.from_list(lines).format())
        parts.append(text if name == "MainThread" else f"  thread {name}:\n{text}")
    if not parts:
        return ""
    age = f"  (last seen {note.age:.1f} s ago)\n" if 1.0 < note.age < math.inf else ""
    return readable(age + "".join(parts))


def tells_of_lost_rank(summary: str) -> bool:
    """Whether an error says that the process at the other end of a connection is gone."""
    return bool(_LOST_RANK.search(summary))


def readable(text: str) -> str:
    """Name cells as IPython does, and files without this machine's folders."""
    return _FILE.sub(lambda match: _name_place(match.group(1), match.group(2)), text)


def folded(text: str) -> str:
    """Drop the frames that lead through libraries, except the last one: the reader's lines stand out.

    `RankError.traceback` and `.stacks` keep every frame; the message that is printed does not.
    """
    kept: list[list[str]] = []  # blocks: a frame with its source lines, or a line between frames
    libraries = 0
    for line in text.splitlines(keepends=True):
        if _FRAME.match(line):
            library = bool(_LIBRARY.match(line))
            if library and libraries:
                kept.pop()
            libraries = libraries + 1 if library else 0
            kept.append([line])
        elif kept and line.startswith("    ") and _FRAME.match(kept[-1][0]):
            kept[-1].append(line)
        else:
            libraries = 0
            kept.append([line])
    return "".join(line for block in kept for line in block)


def is_hpnb_file(filename: str) -> bool:
    return filename.startswith(os.path.join(_ABOVE_HPNB, "hpnb") + os.sep)


def exit_reason(code: int | None) -> str:
    """What an exit code says, in words."""
    if code is None:
        return "is gone"
    if code >= 0:
        return f"exited with code {code} before it returned"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; if nobody sent it, memory ran out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _trim(frames: Sequence[Frame]) -> list[Frame]:
    """Without the frames that start a rank and that note where it is."""
    kept = [frame for frame in frames if not _RANK_INTERNALS.search(frame[0])]
    while kept and (_PLUMBING.search(kept[0][0]) or "<frozen" in kept[0][0]):
        kept.pop(0)
    return kept


def _idle(frames: Sequence[Frame]) -> bool:
    return bool(re.search(r"[/\\](threading|selectors|queue)\.py$", frames[-1][0]))


def _name_place(filename: str, line: str) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and (named := compiler.format_code_name(filename)):
        return f"{' '.join(named)}, line {line}"
    known = [p for p in (*map(str, sys.path), _ABOVE_HPNB) if p]
    folders = [p for p in known if filename.startswith(p.rstrip("/") + "/")]
    if folders:
        filename = filename[len(max(folders, key=len).rstrip("/")) + 1 :]
    return f'File "{filename}", line {line}'
