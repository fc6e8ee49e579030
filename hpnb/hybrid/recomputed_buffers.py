"""Buffers of a forward that runs twice: its recomputation begins with the values that it began with.

A block may change its buffers in each forward: a norm's running mean, a codebook of moving averages, or a
counter. If the backward simply ran such a forward again, the buffers would change twice in every microbatch,
and the recomputed activations would depend on other values:

    forward 0     reads b0, writes b1
    forward 1     reads b1, writes b2
    backward 0    reads b0 again, from a copy; what it writes is dropped, and the block keeps b2
    backward 1    reads b1 again, from a copy

So each forward remembers its buffers. One copy serves all forwards until the buffer changes, which PyTorch
counts in the tensor's version. It does not count a write through `.data`. So a block's first forward is
compared by value, and a buffer that it changes without a new version is copied in each forward from then on.
Where no buffer changes, a block has one more copy of its buffers, made once.

A recomputation puts other tensors into the modules and leaves those of the block alone, because a backward
may have saved them. Other state of a module, such as a Python number, is not restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

Table = dict[str, torch.Tensor | None]  # a module's _buffers


@dataclass(frozen=True)
class Snapshot:
    """A buffer, and the value that it has in this version."""

    buffer: torch.Tensor
    version: int
    value: torch.Tensor

    @property
    def is_current(self) -> bool:
        """Whether the buffer still has this version."""
        return self.version == _version(self.buffer)


Snapshots = dict[str, Snapshot | None]  # of a module's buffers
_NO_BUFFERS: Snapshots = {}


class Repeatable(AbstractContextManager[None]):
    """A context that may be entered again, by a new one that `make` returns: the backward of a backward, as
    for a gradient penalty, recomputes once more."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


class BufferSnapshots:
    """What forwards of `block` begin with. `contexts` is a `context_fn` of PyTorch's checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._last: dict[tuple[nn.Module, str], Snapshot] = {}
        self._uncounted: set[tuple[nn.Module, str]] = set()  # buffers that change without a new version
        self._compared = False

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferSnapshots, (self.block,)  # a copy of the model starts without snapshots

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around a forward that is about to run, and around its recomputation."""
        before = [(m, self._remember(m) if m._buffers else _NO_BUFFERS) for m in self.block.modules()]
        return self._comparing_once(before), Repeatable(partial(self._restored, before))

    def _remember(self, module: nn.Module) -> Snapshots:
        snapshots: Snapshots = {}
        for name, buffer in module._buffers.items():
            snapshots[name] = None
            if buffer is None:
                continue
            last, uncounted = self._last.get((module, name)), (module, name) in self._uncounted
            if last is None or last.buffer is not buffer or not last.is_current or uncounted:
                last = Snapshot(buffer, _version(buffer), buffer.detach().clone())
            snapshots[name] = self._last[module, name] = last
        return snapshots

    @contextmanager
    def _comparing_once(self, before: list[tuple[nn.Module, Snapshots]]) -> Iterator[None]:
        """Around a forward. The first one that does not fail is compared, because that waits for the GPU."""
        yield
        if self._compared:
            return
        self._compared = True
        for module, snapshots in before:
            for name, snapshot in snapshots.items():
                if snapshot is not None and snapshot.is_current and not _is_equal(snapshot):
                    self._uncounted.add((module, name))

    @contextmanager
    def _restored(self, before: list[tuple[nn.Module, Snapshots]]) -> Iterator[None]:
        """Around a recomputation, in which modules have the buffers of `before`."""
        copies: dict[torch.Tensor, torch.Tensor] = {}  # several names may stand for one buffer
        present: list[tuple[Table, Table]] = []
        try:
            for module, snapshots in before:
                if not snapshots and not module._buffers:
                    continue
                table: Table = dict.fromkeys(snapshots)
                for name, snapshot in snapshots.items():
                    if snapshot is not None and snapshot.is_current and (module, name) not in self._uncounted:
                        table[name] = snapshot.buffer
                    elif snapshot is not None:
                        table[name] = copies.setdefault(snapshot.buffer, snapshot.value.clone())
                if list(map(id, table.values())) != list(map(id, module._buffers.values())):
                    present.append((module._buffers, dict(module._buffers)))
                    _replace(module._buffers, table)
            yield
        finally:
            for buffers, table in present:
                _replace(buffers, table)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors cannot change in training


def _is_equal(snapshot: Snapshot) -> bool:
    return snapshot.buffer.device.type == "meta" or torch.equal(snapshot.buffer, snapshot.value)


def _replace(buffers: Table, table: Table) -> None:
    buffers.clear()
    buffers.update(table)
