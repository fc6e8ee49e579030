"""Where each rank was last seen: a page of memory that a rank writes ten times a second.

A rank that is stuck in a collective or was killed cannot be asked where it is. So every rank writes the
stacks of its threads to a page of memory shared with the caller, who reads it when something has gone wrong.
A note costs some tenths of a millisecond. The page has two halves that are written in turn, so a rank that
dies while it writes leaves the previous note intact.

A rank that computes in C without releasing the GIL cannot write notes. At a signal its faulthandler writes
behind the halves.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import mmap
import os
import re
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, starmap
from operator import attrgetter, itemgetter
from types import CodeType, FrameType

from hpnb.ranks.current_rank import current

_HALF = 1 << 17
_ANSWER = 1 << 15  # room behind the halves for faulthandler
_HEADER = struct.Struct("=qq")  # which half, its length
STOP = _HEADER.size  # where the bytes of stop_request.py lie
_HALVES = STOP + 8
_SIZE = _HALVES + 2 * _HALF + _ANSWER
_OUTWARD = ("f_back",) * 120  # steps, at most
_WHERE: Callable[[object], tuple[CodeType, int | None]] = attrgetter("f_code", "f_lineno")
PERIOD = 0.1
SIGNAL = signal.SIGUSR1

Frame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Note:
    """Stacks of a rank's threads, innermost frame last.

    `age` in seconds when it was read; for `unchanged` seconds the main thread has been where it is. `raised`
    is the last error that hpnb has raised there in this call, which the function may have caught. `on_gpu`
    says whether the rank has a GPU.
    """

    age: float
    threads: dict[str, list[Frame]]
    unchanged: float = 0.0
    raised: str = ""
    on_gpu: bool = False


def new_page() -> int:
    """A descriptor of shared memory without a name, so nothing stays behind."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hpnb")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _SIZE)
    return fd


def read(fd: int) -> Note:
    """The last complete note on the page."""
    for _ in range(3):  # a header may be read while it is written
        half, size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if not size:
            return Note(math.inf, {})
        try:
            body = json.loads(os.pread(fd, size, _HALVES + half * _HALF))
            break
        except ValueError:
            time.sleep(0.01)
    else:
        return Note(math.inf, {})
    threads = {name: [(f, n, where) for f, n, where in frames] for name, frames in body["threads"].items()}
    now = time.monotonic()
    age, unchanged = max(0.0, now - body["time"]), max(0.0, now - body["since"])
    return Note(age, threads, unchanged, body["raised"], body["on_gpu"])


def clear_answer(fd: int) -> None:
    """Make room for what the rank's faulthandler writes at SIGNAL; `read_answer` reads it."""
    start = _HALVES + 2 * _HALF
    os.pwrite(fd, bytes(_ANSWER), start)
    os.lseek(fd, start, os.SEEK_SET)  # the offset is the rank's as well: one open file, two descriptors


def read_answer(fd: int) -> Note | None:
    """What faulthandler wrote, or None as long as it has not (a stopped process writes nothing)."""
    text = os.pread(fd, _ANSWER, _HALVES + 2 * _HALF).split(b"\0")[0].decode(errors="replace")
    for block in re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE):
        frames = [(f, int(n), where) for f, n, where in re.findall(r'File "(.*)", line (\d+) in (.*)', block)]
        if any(f.endswith("worker.py") for f, _, _ in frames):  # the thread that runs calls
            return Note(0.0, {"MainThread": frames[::-1]})  # innermost last
    return None


class Writer:
    """The rank's side: a thread that notes where all other threads are."""

    def __init__(self, fd: int) -> None:
        self.page = mmap.mmap(fd, _SIZE)
        faulthandler.register(SIGNAL, file=fd, all_threads=True)
        self._half = 0
        self._lock = threading.Lock()
        self._main: list[Frame] = []
        self._since = time.monotonic()  # when the main thread came where it is
        self._thread = threading.Thread(target=self._loop, name="hpnb last seen", daemon=True)
        self._thread.start()

    def note(self) -> None:
        names = {t.ident: t.name for t in threading.enumerate()}
        names[threading.main_thread().ident] = "MainThread"  # whatever it calls itself
        threads = {
            names.get(ident, str(ident)): frames
            for ident in list(chain.from_iterable(_at_once()))
            if ident != self._thread.ident and (frames := walk(ident))
        }
        now = time.monotonic()
        if self._main != (main := threads.get("MainThread", [])):
            self._main, self._since = main, now
        on_gpu = current.device is not None and current.device.type == "cuda"
        rest = {"time": now, "since": self._since, "raised": current.raised, "on_gpu": on_gpu}
        body = json.dumps({**rest, "threads": threads}).encode()
        if len(body) > _HALF:  # hundreds of threads: keep the one that runs the call
            only = {name: frames for name, frames in threads.items() if name == "MainThread"}
            body = json.dumps({**rest, "threads": only}).encode()[:_HALF]
        with self._lock:
            self._half = 1 - self._half
            start = _HALVES + self._half * _HALF
            self.page[start : start + len(body)] = body
            self.page[: _HEADER.size] = _HEADER.pack(self._half, len(body))

    def _loop(self) -> None:
        while True:
            time.sleep(PERIOD)
            self.note()


def walk(ident: int) -> list[Frame]:
    """The frames of a running thread, innermost last; none if it has ended.

    All of it is one call into C, which no other thread interrupts. Between two steps of a Python loop the
    thread would run on, and CPython 3.11 has then followed `f_back` into memory that was freed: the note
    killed the rank. faulthandler is no alternative: it crashes on a thread that is just being created.
    """
    frames: deque[tuple[CodeType, int | None]] = deque()
    collects = gc.isenabled()
    gc.disable()  # what it finalizes may be written in Python, and lets others run
    try:
        frames.extend(map(_WHERE, accumulate(chain(map(itemgetter(ident), _at_once()), _OUTWARD), getattr)))
    except (AttributeError, KeyError):  # past the outermost frame is None; a thread that has ended has none
        pass
    finally:
        if collects:
            gc.enable()
    return [(code.co_filename, line or 0, code.co_name) for code, line in reversed(frames)]


def _at_once() -> Iterator[dict[int, FrameType]]:
    """The innermost frames of all threads by number, looked up when C asks for them and let go there."""
    return starmap(sys._current_frames, [()])
