"""Threads that copy for the communications of ranks that share a GPU, and the `Work` that callers get."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpnb.ranks.gpu_turns import gpu_turns


class CopyWork(dist.Work):
    """A communication that a thread does. `wait` returns when it is done, and raises what it raised, or a
    RuntimeError when its timeout is over."""

    def __init__(self, future: torch.futures.Future[Any], source: int = -1) -> None:
        super().__init__()
        self._future, self._source = future, source

    def wait(self, timeout: timedelta | None = None) -> bool:
        turns = gpu_turns()
        if turns is None or self._future.done():
            self._wait(timeout)
        else:
            with turns.released():
                self._wait(timeout)
        return True

    def _wait(self, timeout: timedelta | None) -> None:
        if timeout:  # 0 is torch's word for none
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                raise RuntimeError(f"a communication has not ended within {timeout.total_seconds():g} s")
        self._future.wait()

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def is_success(self) -> bool:
        if not self._future.done():
            return False
        try:
            self._future.value()
        except Exception:
            return False
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._future.value()

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank


class GlooWork(dist.Work):
    """gloo's work, for which a rank interrupts its turn on the GPU."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        turns = gpu_turns()
        limit = () if timeout is None else (timeout,)
        if turns is None:
            return self._work.wait(*limit)
        with turns.released():
            return self._work.wait(*limit)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def result(self) -> Any:
        return self._work.result()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    source_rank = _source_rank


class CopyThread:
    """A thread that does what it is given, in order. It starts with the first of it."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stream: torch.cuda.Stream | None = None

    def do(self, task: Callable[[], None], tensors: list[torch.Tensor], source: int = -1) -> CopyWork:
        """Do `task` once what was launched so far on the caller's stream is done."""
        cuda = self._device.type == "cuda"
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device] if cuda else None)
        launched = torch.cuda.Event(blocking=True) if cuda else None
        if launched is not None:
            launched.record()

        def run() -> None:
            try:
                if launched is not None:
                    launched.synchronize()
                task()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(tensors)

        self._tasks.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        return CopyWork(future, source)

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self.stream = torch.cuda.Stream(self._device)
            torch.cuda.set_stream(self.stream)
        with torch.inference_mode():  # or tensors of callers who are in it could not be written
            while True:
                self._tasks.get()()

    def wait_for_copies(self) -> None:
        """Wait until what this thread has launched is done. It sleeps meanwhile and does not spin."""
        if self.stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(self.stream)
            done.synchronize()
