"""Two computations take turns: while the all-to-all of one travels, the other computes.

    forward     [ attention ][ dispatch ~~~~~~ ][ experts ][ combine ~~~~~~~ ][ ...
    backward                 [ combine's grads ]~~~~~~~~~~ [ experts' grads  ]~~~ ...

This is how DualPipe hides the all-to-all of experts: the forward of one microbatch runs with the backward of
another (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1). Neither needs the other, so the order in which
they compute is free.

Each side is a thread, and only one of them runs at a time. It hands the turn over at `wait_for(message)` and
nowhere else, so the order of all messages follows from the program. It is the same on all ranks, and no rank
waits for a message that another one starts later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Segments:
    """What one action computes between its messages.

    Attributes:
        compute: seconds of computing before the first message, between any two, and after the last.
        nbytes: bytes of each message that leave this rank; one fewer than `compute`.
    """

    compute: tuple[float, ...]
    nbytes: tuple[float, ...]


def wait_for(message: dist.Work | None, nbytes: float = 0.0) -> None:
    """Wait until `message` has arrived; inside a pair, let the other side compute meanwhile.

    Args:
        message: that of a collective with async_op=True.
        nbytes: bytes that leave this rank, for `recording_segments`.
    """
    side = threading.get_ident()
    if (marks := _open_marks.get(_side_of(side))) is not None:
        marks.append((time.thread_time(), nbytes))
    if _pair is not None:
        _pair.switch(side)
    assert message is not None
    message.wait()
    if marks is not None:
        marks.append((time.thread_time(), 0.0))


def run_pair(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Run both, `first` on this thread and `second` on another. They take turns at each `wait_for`.

    What fails in one of them stops the other at its next turn, and is raised here.
    """
    global _pair
    if _pair is not None:
        raise RuntimeError("two pairs cannot overlap; run one after the other")
    pair = _Pair(threading.get_ident())
    results: dict[str, Any] = {}
    in_context = _context_of_this_thread()

    def run_second() -> None:
        try:
            pair.await_turn(False)
            with in_context():
                results["second"] = second()
        except BaseException as error:
            pair.fail(error)
        finally:
            pair.leave(False)

    thread = threading.Thread(target=run_second, name="hpnb-second-of-pair", daemon=True)
    _pair = pair
    try:
        thread.start()
        try:
            results["first"] = first()
        except BaseException as error:
            pair.fail(error)
        finally:
            pair.leave(True)
        thread.join()
    finally:
        _pair = None
    if pair.error is not None:
        raise pair.error
    return results["first"], results["second"]


@contextmanager
def recording_segments(key: Hashable, into: dict[Any, Segments]) -> Iterator[None]:
    """Note the CPU seconds of this thread between its messages as `into[key]`."""
    marks, side = [(time.thread_time(), 0.0)], _side_of(threading.get_ident())
    _open_marks[side] = marks
    try:
        yield
    finally:
        del _open_marks[side]
        marks.append((time.thread_time(), 0.0))
        starts, ends = marks[0::2], marks[1::2]
        compute = tuple(end - start for (start, _), (end, _) in zip(starts, ends, strict=True))
        into[key] = Segments(compute, tuple(nbytes for _, nbytes in ends[:-1]))


class _Stopped(Exception):
    """The other side has failed."""


@dataclass(eq=False)
class _Pair:
    """Whose turn it is. `first` is the thread that made the pair; all others are the second side, because
    autograd may run a backward on a thread of its own."""

    first: int
    error: BaseException | None = None
    _turn_of_first: bool = True
    _left: set[bool] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def switch(self, thread: int) -> None:
        """Hand the turn over, and come back when the other side does."""
        is_first = thread == self.first
        with self._changed:
            if (not is_first) not in self._left:
                self._turn_of_first = not is_first
                self._changed.notify_all()
        self.await_turn(is_first)

    def await_turn(self, is_first: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn_of_first == is_first)
            if self.error is not None:
                raise _Stopped

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, _Stopped):
            self.error = self.error or error

    def leave(self, is_first: bool) -> None:
        """This side has ended: the other one keeps the turn."""
        with self._changed:
            self._left.add(is_first)
            self._turn_of_first = not is_first
            self._changed.notify_all()


_pair: _Pair | None = None
_open_marks: dict[bool, list[tuple[float, float]]] = {}  # by whether it is the first side's


def _side_of(thread: int) -> bool:
    return _pair is None or thread == _pair.first


def _context_of_this_thread() -> Callable[[], AbstractContextManager[object]]:
    """What the second thread must share with this one: autocast, whether gradients are recorded, what watches
    operators (`hpnb.record.traffic` counts bytes so), and on a GPU the device and the stream."""
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    gradients = torch.is_grad_enabled()
    stream = torch.cuda.current_stream() if kind == "cuda" else None
    watching = _get_current_dispatch_mode_stack()

    @contextmanager
    def share() -> Iterator[None]:
        with (
            torch.set_grad_enabled(gradients),
            torch.autocast(kind, dtype, enabled) if enabled else nullcontext(),
            nullcontext() if stream is None else torch.cuda.stream(stream),
            ExitStack() as modes,
        ):
            for mode in watching:
                modes.enter_context(mode)
            yield

    return share
