"""Whether a rank waits for other ranks, by where its threads were last seen (`last_seen.py`).

A thread that waits is usually in a function of torch.distributed, or in a line such as `work.wait()`. hpnb's
collectives in the background call C from functions of hpnb instead, which are listed here. Where the main
thread waits for another thread of its process, that one counts.
"""

from __future__ import annotations

import linecache
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hpnb.ranks.last_seen import Frame, Note

Place = tuple[str, str]  # a file below hpnb/, and a function

# A thread whose innermost frame of hpnb is one of these waits until other ranks have sent something.
IN_COLLECTIVE: frozenset[Place] = frozenset(
    {
        ("background.py", "wait_all"),
        ("overlapped_pair.py", "wait_for"),
        ("ranks/copy_thread.py", "_wait"),
    }
)
# It waits for another thread of its process, of this name.
FOR_THREAD: dict[Place, str] = {
    ("overlapped_pair.py", "run_pair"): "hpnb-second-of-pair",
    ("overlapped_pair.py", "await_turn"): "hpnb-second-of-pair",
    ("hybrid/checkpoint/background_save.py", "join"): "hpnb-save",
}

_HPNB = str(Path(__file__).parents[1]) + os.sep
_WAITS = re.compile(r"\.wait\(")
_WAITS_FOR_GPU = re.compile(r"\.(item|tolist|cpu|numpy|wait)\(|synchronize\(")
# Of a collective that was started before: work.wait(), self._work.wait(), but not network.wait().
_WAITS_FOR_WORK = re.compile(r"(?<![^\W_])(work|handle|req)\w*\.wait\(")
_COLLECTIVES = dist.distributed_c10d.__file__
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_WAITING_OF_OTHERS = (threading.__file__, torch.futures.__file__)  # functions of hpnb call them to wait
_RUNS_BACKWARD = (torch.autograd.graph.__file__, "_engine_run_backward")


def waits_for_others(note: Note) -> bool:
    """True if the rank is inside torch.distributed, or waits for a result from the GPU, which may be a
    collective's: such a rank is not to blame."""
    frames = _frames_that_count(note)
    if any(file.startswith(_DISTRIBUTED) for file, _, _ in frames[-6:]) or _in_collective(frames):
        return True
    pattern = _WAITS_FOR_GPU if note.on_gpu else _WAITS  # on a CPU, `.item()` only computes
    return bool(pattern.search(_innermost_line(frames)))


def stands_in_collective(note: Note) -> bool:
    """True if the rank is inside a collective, a send or a receive, of torch.distributed itself or of hpnb.

    Stricter than `waits_for_others`: a rank that writes a checkpoint with torch.distributed, or waits for
    kernels of its GPU, may be at work.
    """
    return _in_collective(_frames_that_count(note))


def _in_collective(frames: Sequence[Frame]) -> bool:
    if not frames:
        return False
    in_torch = frames[-1][0] == _COLLECTIVES or bool(_WAITS_FOR_WORK.search(_innermost_line(frames)))
    return in_torch or _place(frames) in IN_COLLECTIVE


def _frames_that_count(note: Note) -> list[Frame]:
    """The frames of the main thread, or of the thread that it waits for."""
    frames = note.threads.get("MainThread", [])
    for _ in range(2):  # the second side of a pair may wait for autograd's thread
        if (thread := FOR_THREAD.get(_place(frames))) is not None:
            frames = note.threads.get(thread, [])
        elif frames and (frames[-1][0], frames[-1][2]) == _RUNS_BACKWARD:
            # On a GPU a backward runs on a thread of autograd, which has frames while it is in a hook.
            in_hooks = (t for name, t in note.threads.items() if name.isdigit() or name.startswith("Dummy-"))
            frames = next(in_hooks, frames)
    return frames


def _place(frames: Sequence[Frame]) -> Place:
    """Where in hpnb a thread stands: in a function, or in what this calls to wait. ("", "") elsewhere."""
    for file, _, function in reversed(frames):
        if file not in _WAITING_OF_OTHERS:
            below = file.removeprefix(_HPNB)
            return ("", "") if below == file else (below.replace(os.sep, "/"), function)
    return "", ""


def _innermost_line(frames: Sequence[Frame]) -> str:
    return linecache.getline(frames[-1][0], frames[-1][1]) if frames else ""
