"""A save that is written while training continues.

    training    step   [copy]  step      step      step
    files                 `-- write, in a thread, with messages among CPUs -- rename

Its messages are those of one group, so whatever else this process saves or loads, also by another Booster,
waits for it first (`finish_running`).

What the next step would change is copied at once, and a thread writes the copies. On a GPU most copies are
made on a separate stream, and the optimizer's next step waits for them on the device. Buffers and averages
may change before that step, so the current stream copies them. In both cases the host does not wait.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from hpnb.ranks.current_rank import finish_before_return

_Kind = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether it comes from a GPU


class HostCopies:
    """Copies of tensors in CPU memory, for a thread that writes them while training continues.

    Touching new memory takes seven times as long as copying into memory that was touched before, and pinning
    it longer still. So a save reuses the memory of the `previous` one, which is done: a run that saves in the
    background keeps the size of its checkpoint in CPU memory."""

    def __init__(self, device: torch.device, previous: HostCopies | None = None) -> None:
        if previous is not None:
            previous.wait()  # it is done, unless an error has ended its save
        self._free: dict[_Kind, list[torch.Tensor]] = {} if previous is None else previous._used
        self._used: dict[_Kind, list[torch.Tensor]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._events: list[torch.cuda.Event] = []

    def copy(self, tensor: torch.Tensor, soon: bool = False) -> torch.Tensor:
        """A copy, which on a GPU is complete after `wait`. Where the tensor may change `soon`, before the
        optimizer's next step, as buffers do in a forward, that stream copies it."""
        tensor = tensor.detach()
        copy = self._memory_for(tensor)
        if self._stream is None or not tensor.is_cuda:
            return copy.copy_(tensor)
        with torch.cuda.stream(torch.cuda.current_stream() if soon else self._stream):
            copy.copy_(tensor, non_blocking=True)
        if not soon:
            tensor.record_stream(self._stream)
        return copy

    def finish_before_step_of(self, optimizer: Optimizer | None) -> None:
        """All copies are requested: let `optimizer` not step before they are made."""
        self._free = {}
        if self._stream is None:
            return
        self._events = [torch.cuda.current_stream().record_event(), self._stream.record_event()]
        if optimizer is None:
            torch.cuda.current_stream().wait_event(self._events[-1])
            return

        def before_step(*_: Any) -> None:
            torch.cuda.current_stream().wait_event(self._events[-1])
            handle.remove()

        handle = optimizer.register_step_pre_hook(before_step)

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = tuple(tensor.shape), tensor.dtype, tensor.is_cuda
        free = self._free.get(kind)
        pinned = tensor.is_cuda and self._stream is not None
        memory = free.pop() if free else torch.empty(kind[0], dtype=kind[1], pin_memory=pinned)
        self._used.setdefault(kind, []).append(memory)
        return memory

    def wait(self) -> None:
        """Until all copies are made."""
        for event in self._events:
            event.synchronize()


class Saving:
    """A save that is in progress, or done. In the `background` a thread does it, which a launched function or
    a cell waits for before it returns, and other processes before they end."""

    def __init__(self, work: Callable[[], None], background: bool, path: Path) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not background:
            work()
            return

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="hpnb-save")
        if not _unfinished:
            finish_before_return(_finish_all)
        _unfinished.append(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Until it is on the disk; what went wrong is raised once. All ranks call it."""
        if self._thread is not None:
            self.join()
            self._thread = None
            _unfinished.remove(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Until it is on the disk, when nobody will wait for it any more: what went wrong is a warning."""
        try:
            self.wait()
        except BaseException as error:
            warnings.warn(
                f"the save of {self.path} in the background failed, and nobody waited for it: {error}; call "
                "booster.wait() before the function that saves returns, and before destroy_process_group()",
                stacklevel=2,
            )


_unfinished: list[Saving] = []  # those in the background that nobody has waited for


def _finish_all() -> None:
    """Wait for all; what went wrong first is raised. A Booster that a global or a closure keeps is not
    dropped when a launched function returns, and its rank would end in the midst of the save."""
    while _unfinished:
        _unfinished[0].wait()


def finish_running() -> None:
    """Until the save in the background is done, whichever Booster began it; its `wait` raises errors."""
    for saving in _unfinished:
        saving.join()
