"""Where each rank was last seen: a page of memory that a rank writes ten times a second.

A rank that is stuck in a collective cannot answer, and one that was killed cannot speak. So every rank
notes the stack of its threads on a page that the caller shares, and the caller reads it when something
has gone wrong. A note costs some tens of microseconds. The page has two halves written in turn, so a
rank that dies while writing leaves the previous note whole.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from types import FrameType

_HALF = 1 << 17
_HEADER = struct.Struct("=qq")  # which half, its length
_DEPTH = 120
PERIOD = 0.1

Frame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Note:
    """Stacks of a rank's threads, innermost frame last; `age` in seconds when it was read."""

    age: float
    threads: dict[str, list[Frame]]


def new_page() -> int:
    """A descriptor of shared memory without a name, so nothing stays behind."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hpnb")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _HEADER.size + 2 * _HALF)
    return fd


def read(fd: int) -> Note:
    """The last whole note on the page."""
    half, size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    if not size:
        return Note(0.0, {})
    body = json.loads(os.pread(fd, size, _HEADER.size + half * _HALF))
    threads = {name: [(f, n, where) for f, n, where in frames] for name, frames in body["threads"].items()}
    return Note(max(0.0, time.monotonic() - body["time"]), threads)


class Writer:
    """The rank's side: a thread that notes where all other threads are."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _HEADER.size + 2 * _HALF)
        self._half = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="hpnb last seen", daemon=True)
        self._thread.start()

    def note(self) -> None:
        """Write down where every thread is now."""
        names = {t.ident: t.name for t in threading.enumerate()}
        threads = {
            names.get(ident, str(ident)): _frames(frame)
            for ident, frame in sys._current_frames().items()
            if ident != self._thread.ident
        }
        body = json.dumps({"time": time.monotonic(), "threads": threads}).encode()
        if len(body) > _HALF:
            return
        with self._lock:
            self._half = 1 - self._half
            start = _HEADER.size + self._half * _HALF
            self._page[start : start + len(body)] = body
            self._page[: _HEADER.size] = _HEADER.pack(self._half, len(body))

    def _loop(self) -> None:
        while True:
            time.sleep(PERIOD)
            self.note()


def _frames(frame: FrameType | None) -> list[Frame]:
    found: list[Frame] = []
    while frame is not None and len(found) < _DEPTH:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]
