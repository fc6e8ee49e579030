"""Turns on a GPU that ranks share, so that what one of them measures is not what the others compute.

Four ranks that compute on one GPU at once each take four times as long and more, so a clock would show how
the GPU is divided and not what an action costs. While a step is recorded, every rank computes in turns:

    with turns.turn() as turn:       # waits until no other rank computes on this GPU
        ...
    turn.seconds                     # GPU time from the first kernel to the last, measured alone

A turn is interrupted where the rank waits for another (`released`), which could otherwise never go on. The
turns of a GPU are a lock on a file that all its ranks open; the system frees it when a process dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpnb.ranks.current_rank import current


class Turn:
    """One rank's time alone on the GPU: pairs of CUDA events around what it computed.

    Attributes:
        seconds: GPU time of all parts together; right once the turn is over.
        waiting: threads that have interrupted it, and wait for another rank.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds, self.waiting = 0.0, 0

    def begin(self) -> None:
        self._parts.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._parts[-1][0].record()

    def end(self) -> None:
        start, end = self._parts[-1]
        end.record()
        end.synchronize()
        self.seconds += float(start.elapsed_time(end)) / 1e3


class GpuTurns:
    """The turns of this process on `device`.

    Attributes:
        active: whether turns are taken at all: while this rank records. Otherwise `released` and
            `for_copy` do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        name = f"hpnb-{os.getuid()}-gpu-{torch.cuda.get_device_properties(device).uuid}.lock"
        self._file = os.open(os.path.join(tempfile.gettempdir(), name), os.O_RDWR | os.O_CREAT, 0o600)
        self._device = device
        self._in_process = threading.Lock()  # the threads that copy for communications take turns as well
        self._state = threading.Lock()
        self._turn: Turn | None = None
        self.active = 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Until the block ends, compute in turns."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Compute alone on the GPU. A turn inside a turn is a part of it; inside a turn that is interrupted,
        where other ranks may compute, it is one of its own."""
        outer = self._turn
        if outer is not None and not outer.waiting:
            yield outer
            return
        torch.cuda.synchronize(self._device)
        self._acquire()
        turn = self._turn = Turn()
        turn.begin()
        try:
            yield turn
        finally:
            self._turn = outer
            try:
                turn.end()
            finally:
                self._release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Wait for another rank inside: this rank's turn, if it has one, is interrupted."""
        turn = self._turn
        if turn is None:
            yield
            return
        with self._state:
            turn.waiting += 1
            if turn.waiting == 1:
                turn.end()
                self._release()
        try:
            yield
        finally:
            with self._state:
                turn.waiting -= 1
                if turn.waiting == 0:
                    self._acquire()
                    turn.begin()

    @contextmanager
    def for_copy(self) -> Iterator[None]:
        """Copy for a communication, in a turn of its own if turns are taken."""
        if not self.active:
            yield
            return
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        self._in_process.acquire()
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def _release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._in_process.release()


_turns: dict[torch.device, GpuTurns] = {}


def gpu_turns() -> GpuTurns | None:
    """The turns of this rank on its GPU; None unless ranks share GPUs."""
    if current.device is None or not current.shares_gpu:
        return None
    if current.device not in _turns:
        _turns[current.device] = GpuTurns(current.device)
    return _turns[current.device]
