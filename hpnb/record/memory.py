"""Fills a MemoryProfile: watches every storage that the operators of a block create, keep and let go.

    with hpnb.record.memory(model, optimizer) as recorder:
        step()
    profile = recorder.profile()

Why a storage lives is often known only later (a gradient is one once it has been accumulated), so storages
are logged as they come and go, and sorted into categories when the block is over:

    parameters   of the model, and its buffers
    gradients    what .grad held, seen when a gradient has been accumulated
    optimizer    what the optimizer's state holds, seen after its step
    activations  what autograd saved for the backward
    temporary    the rest

On the CPU the bytes are those of the tensors, exactly. On CUDA they are rounded up as the allocator does,
each sample takes the peak that the allocator reached during its operator, and what no tensor accounts for
(rounding of large blocks, kernels' workspaces) is temporary; so the parts add up to the allocator's peak.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpnb.ranks.here import device as this_device
from hpnb.ranks.here import rank
from hpnb.record.memory_profile import CATEGORIES, MemoryProfile, MemorySample

_CUDA_BLOCK = 512  # the allocator's granularity, bytes
# A storage that is several things is the first of these.
_PRIORITY = {name: place for place, name in enumerate(CATEGORIES)}


@contextmanager
def memory(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
) -> Iterator[MemoryRecorder]:
    """Record who holds memory on `device` (default: the model's) while the block runs.

    Watching every operator slows the block down. On CUDA the allocator's peak counters are reset.
    """
    modules = (model,) if isinstance(model, torch.nn.Module) else tuple(model)
    first = next((p for module in modules for p in module.parameters()), None)
    models = this_device() if first is None else first.device
    where = models if device is None else torch.device(device)
    recorder = MemoryRecorder(modules, optimizer, where)
    with recorder._watching():
        yield recorder


class MemoryRecorder(TorchDispatchMode):
    """Logs storages. Made by `memory()`; read with `profile()`."""

    def __init__(
        self,
        modules: tuple[torch.nn.Module, ...],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules, self._optimizer, self._device = modules, optimizer, device
        self._begin = time.perf_counter()
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # id of a storage -> its number
        self._bytes: list[int] = []  # by number
        self._category: list[str] = []  # by number
        # What happened, in order: (time, number, +1 born or -1 gone) or (time, -1, allocator's peak).
        self._log: list[tuple[float, int, int]] = []

    def profile(self) -> MemoryProfile:
        """What has been recorded so far."""
        held, samples = dict.fromkeys(CATEGORIES, 0), []
        for when, number, change in self._log:
            if number >= 0:
                held[self._category[number]] += change * self._bytes[number]
            if self._device.type != "cuda":
                samples.append(MemorySample(when, **held))
            elif number < 0:
                tracked = sum(held.values()) - held["temporary"]
                samples.append(MemorySample(when, **{**held, "temporary": change - tracked}))
        return MemoryProfile(tuple(samples), rank(), self._device.type)

    # --- watching ---------------------------------------------------------------------------

    @contextmanager
    def _watching(self) -> Iterator[None]:
        parameters = [p for module in self._modules for p in module.parameters()]
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._mark(tensor, "parameters")
        for p in parameters:
            self._mark_gradient(p)
        self._mark_state(self._optimizer)
        self._sample()
        trained = [p for p in parameters if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(self._mark_gradient) for p in trained]
        if self._optimizer is not None:
            handles.append(self._optimizer.register_step_post_hook(lambda opt, *_: self._mark_state(opt)))
        try:
            # The hook must not keep the tensor that it is given, or a graph would hold itself alive.
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved), self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for p in parameters:
                self._mark_gradient(p)
            self._mark_state(self._optimizer)
            self._sample()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value)
        self._sample()
        return result

    def _see(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, given on first sight; None if it is not on the device."""
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None  # subclasses wrap tensors, and those are seen themselves
        storage = tensor.untyped_storage()
        known = self._alive.get(id(storage))
        if known is not None and known[1]() is storage:
            return known[0]
        number = len(self._bytes)
        size = storage.nbytes()
        if self._device.type == "cuda":
            size = -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
        self._bytes.append(size)
        self._category.append("temporary")
        # A storage's Python object lives as long as the storage itself.
        self._alive[id(storage)] = number, weakref.ref(storage, lambda _: self._write(number, -1))
        self._write(number, 1)
        return number

    def _mark(self, tensor: torch.Tensor, category: str) -> None:
        number = self._see(tensor)
        if number is not None and _PRIORITY[category] < _PRIORITY[self._category[number]]:
            self._category[number] = category

    def _mark_gradient(self, p: torch.Tensor) -> None:
        if p.grad is not None:
            self._mark(p.grad, "gradients")

    def _mark_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        for value in tree_leaves(dict(optimizer.state)) if optimizer is not None else ():
            if isinstance(value, torch.Tensor):
                self._mark(value, "optimizer")

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._mark(tensor, "activations")
        return tensor.detach()

    def _sample(self) -> None:
        if self._device.type == "cuda":
            allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
            self._write(-1, allocated["peak"])
            torch.cuda.reset_peak_memory_stats(self._device)

    def _write(self, number: int, change: int) -> None:
        self._log.append((time.perf_counter() - self._begin, number, change))
