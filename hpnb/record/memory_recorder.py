"""Fills a MemoryProfile: watches every storage that the operators of a block allocate, keep and free.

    with hpnb.record.memory(model, optimizer) as recorder:
        step()
    profile = recorder.profile()

Why a storage is alive is often known only later (a gradient is one once it has been accumulated). So storages
are logged as they come and go, and sorted into categories when the block is over:

    parameters   of the model, and its buffers
    gradients    every .grad, seen when a gradient has been accumulated
    optimizer    the optimizer's state, seen after its step, and the master weights or gradient shards that
                 an optimizer with a method tensors_by_category() lists
    activations  what autograd saved for the backward
    temporary    the rest: short-lived tensors, and parameters that are gathered for a block

On the CPU the bytes are those of the tensors, exactly. On CUDA they are rounded up as the allocator does,
each sample takes the peak that the allocator reached during its operator, and what no tensor accounts for
(rounding of large blocks, kernels' workspaces) is temporary; so the parts add up to the allocator's peak.

A view counts all of its storage. What a non-reentrant checkpoint recomputes in the backward is temporary.
With a `budget` the block is stopped by an OutOfBudget where it needs more than that, or than the device has.

Blocks may be nested. PyTorch calls the hooks for saved tensors of the innermost block only, and resetting the
allocator's peak in one block resets it for all, so a recorder passes both on to those of the other blocks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from hpnb.ranks.current_rank import device as this_device
from hpnb.ranks.current_rank import rank
from hpnb.record.memory_budget import OutOfBudget, Survivors, group_survivors
from hpnb.record.memory_profile import CATEGORIES, MemoryProfile, MemorySample
from hpnb.record.memory_snapshot import write_memory_snapshot

_CUDA_BLOCK = 512  # the allocator's granularity, bytes
_of_thread = threading.local()  # .recorders: of the blocks that it is in, the outermost first
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# A storage that is several things is the first of these.
_PRIORITY = {name: place for place, name in enumerate(CATEGORIES)}


@contextmanager
def memory(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    budget: float | None = None,
) -> Iterator[MemoryRecorder]:
    """Record who holds memory on `device` (default: the model's) while the block runs.

    Watching every operator slows the block down. On CUDA the allocator's peak counters are reset.

    Args:
        budget: bytes that may be in use.

    Raises:
        OutOfBudget: more than `budget` is in use, at the start or after an operator; or the device is full
            before that. Without a budget that stays a torch.OutOfMemoryError.
        ValueError: a budget that is not above 0, or a device that is not here.
        TypeError: no module or pipeline, or no optimizer.

    >>> model = torch.nn.Linear(8, 8, bias=False)
    >>> with hpnb.record.memory(model) as recorder:
    ...     model(torch.ones(2, 8)).sum().backward()
    >>> profile = recorder.profile()
    >>> profile.peak_of("parameters"), profile.peak_of("gradients")
    (256, 256)
    """
    if isinstance(budget, str):
        raise TypeError(f"budget={budget!r} is a text; give bytes as a number, such as 1e9 for 1 GB")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget={budget!r} bytes hold nothing; it must be above 0, or None for no limit")
    modules = _modules_of(model)
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "state")):
        raise TypeError(
            f"{_name_of(optimizer)} is no optimizer; record.memory(model, optimizer) takes the optimizer "
            "itself, or None"
        )
    if device is not None:
        device = _checked_device(device)
    first = next((p for module in modules for p in module.parameters()), None)
    device_of_model = this_device() if first is None else first.device
    where = device_of_model if device is None else torch.device(device)
    recorder = MemoryRecorder(modules, optimizer, where, budget)
    with recorder._watching():
        yield recorder


def _modules_of(model: Any) -> tuple[torch.nn.Module, ...]:
    several = isinstance(model, Iterable) and not isinstance(model, torch.nn.Module | str | Mapping)
    models = tuple(model) if several else (model,)
    # An hpnb.Pipeline has its stages as .module.
    modules = tuple(m if isinstance(m, torch.nn.Module) else getattr(m, "module", m) for m in models)
    if wrong := [m for m in modules if isinstance(m, type) or not hasattr(m, "buffers")]:
        raise TypeError(
            f"{_name_of(wrong[0])} is no model; record.memory takes a torch.nn.Module, or a list of them, "
            "not parameters or a name"
        )
    return modules


def _name_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError):
        gpus = torch.cuda.device_count()
        others = f" or 'cuda:0' to 'cuda:{gpus - 1}'" if gpus else ""
        raise ValueError(f"device={device!r} is not here; use 'cpu'{others}") from None
    return checked


class MemoryRecorder(TorchDispatchMode):
    """Logs storages. Made by `memory()`; read with `profile()` or as a file: `to_memory_snapshot()`."""

    def __init__(
        self,
        modules: tuple[torch.nn.Module, ...],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        budget: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules, self._optimizer, self._device = modules, optimizer, device
        self._on_cuda = device.type == "cuda"
        self._begin = time.perf_counter()
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # id of a storage -> its number
        self._bytes: list[int] = []  # by number, as they are now
        self._category: list[str] = []  # by number
        self._form: list[tuple[tuple[int, ...], str]] = []  # shape and dtype by number, as first seen
        self._budget, self._in_use = budget, 0
        # What happened, in order: (time, number, bytes gained) or (time, -1, the allocator's peak).
        self._log: list[tuple[float, int, int]] = []
        self._watches = False
        self._nested: list[MemoryRecorder] = []  # the recorders that are at work, this one among them
        self._highest, self._peak_seen = 0, ("", "")  # the peak, and the operator before or after it
        self._peak = 0  # of the allocator since the last look, as another of them has read it

    def profile(self) -> MemoryProfile:
        """What was recorded in the block."""
        usage, samples = dict.fromkeys(CATEGORIES, 0), []
        for when, number, change in self._log:
            if number >= 0:
                usage[self._category[number]] += change
            if not self._on_cuda:
                samples.append(MemorySample(when, **usage))
            elif number < 0:
                tracked = sum(usage.values()) - usage["temporary"]
                samples.append(MemorySample(when, **{**usage, "temporary": change - tracked}))
        return MemoryProfile(tuple(samples), rank(), self._device.type)

    def tensors_at_peak(self) -> tuple[Survivors, ...]:
        """The tensors that were alive at the peak, in groups of one category, shape and dtype, the largest
        group first; on CUDA at the first look after it."""
        levels, in_use = [0], 0  # after every entry of the log
        for _, number, change in self._log:
            in_use += change if number >= 0 else 0
            levels.append(change if number < 0 else 0 if self._on_cuda else in_use)
        alive = [0] * len(self._bytes)
        for _, number, change in self._log[: levels.index(max(levels))]:
            if number >= 0:
                alive[number] += change
        kinds = zip(self._category, self._form, alive, strict=True)
        return group_survivors([(category, *form, size) for category, form, size in kinds if size])

    def to_memory_snapshot(self, path: str | Path) -> Path:
        """Write each tensor's memory as a file that https://pytorch.org/memory_viz shows. Its active memory
        timeline has exact bytes of tensors; addresses are made up. `memory_snapshot.py` has the format.

        >>> with hpnb.record.memory(model := torch.nn.Linear(8, 8)) as recorder:
        ...     model(torch.ones(2, 8)).sum().backward()
        >>> recorder.to_memory_snapshot("rank0.pickle").name
        'rank0.pickle'
        """
        changes = [(when, number, change) for when, number, change in self._log if number >= 0]
        kinds = zip(self._category, self._form, strict=True)
        labels = [f"{category} {shape} {dtype}" for category, (shape, dtype) in kinds]
        return write_memory_snapshot(changes, labels, path)

    # --- watching ---------------------------------------------------------------------------

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if not hasattr(_of_thread, "recorders"):
            _of_thread.recorders = []
        self._nested = _of_thread.recorders
        parameters = [p for module in self._modules for p in module.parameters()]
        for recorder in self._nested:  # the allocator's peak is reset below
            recorder._sample()
        self._watches = True
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._mark(tensor, "parameters")
        self._mark_gradients(parameters)
        self._mark_state(self._optimizer)
        self._sample()
        self._begin, self._log = time.perf_counter(), [(0.0, n, change) for _, n, change in self._log]
        try:
            self._keep_to_budget("", "before the first operator")
        except OutOfBudget:
            self._watches = False
            raise
        trained = [p for p in parameters if p.requires_grad]
        grown = lambda p: self._mark_gradients([p])  # noqa: E731
        handles = [p.register_post_accumulate_grad_hook(grown) for p in trained]
        if self._optimizer is not None:  # before a step, for gradients that were set by hand

            def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                self._mark_gradients(parameters)
                self._mark_state(optimizer)

            handles.append(self._optimizer.register_step_pre_hook(before_step))
            handles.append(self._optimizer.register_step_post_hook(lambda opt, *_: self._mark_state(opt)))
        self._nested.append(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, _restore), self:
                yield
        finally:
            self._nested.remove(self)
            for handle in handles:
                handle.remove()
            self._mark_gradients(parameters)
            self._mark_state(self._optimizer)
            self._sample()
            self._watches = False  # what is freed later does not belong to the block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor's operator comes again, on the tensors that it is made of
        self._sample(before=True)
        self._note_peak("before ", func)
        full = False
        try:
            result = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            if self._budget is None:
                raise
            full = True  # raised below: as the cause of another error its frames would keep tensors alive
        if full:
            self._sample()
            in_use = self._level if self._on_cuda else self._in_use
            raise self._out_of_budget(in_use, "before ", func, full=True)
        for value in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value)
        self._sample()
        self._note_peak("after ", func)
        if self._budget is not None:
            self._keep_to_budget("after ", func)
        return result

    @property
    def peak_operator(self) -> str:
        """ "after aten.mm.default": where the peak was seen; "" before the first operator."""
        return "".join(map(str, self._peak_seen))

    def _note_peak(self, when: str, operator: Any) -> None:
        level = self._level_peak if self._on_cuda else self._in_use
        if level > self._highest:
            self._highest, self._peak_seen = level, (when, operator)

    def _keep_to_budget(self, when: str, operator: Any) -> None:
        in_use = max(self._in_use, self._level_peak) if self._on_cuda else self._in_use
        if self._budget is not None and in_use > self._budget:
            raise self._out_of_budget(in_use, when, operator)

    def _out_of_budget(self, in_use: int, when: str, operator: Any, full: bool = False) -> OutOfBudget:
        assert self._budget is not None
        where = when + (str(operator).rpartition(".")[0] or str(operator))  # "after aten.mm"
        budget, self._budget = self._budget, None  # once: what runs on the way out is not stopped
        self._mark_state(self._optimizer)
        alive = [(self._category[n], *self._form[n], size) for n, size in enumerate(self._bytes) if size]
        by_category = dict.fromkeys(CATEGORIES, 0)
        for category, _, _, size in alive:
            by_category[category] += size
        by_category["temporary"] += in_use - sum(by_category.values())
        sample = MemorySample(time.perf_counter() - self._begin, **by_category)
        return OutOfBudget(budget, sample, where, group_survivors(alive), full)

    def _see(self, tensor: torch.Tensor) -> list[int]:
        """The numbers of the tensor's storages, assigned on first sight; none if it is not on the device."""
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            return [n for part in inner if isinstance(part, torch.Tensor) for n in self._see(part)]
        if tensor.device.type != self._device.type or tensor.layout is not torch.strided:
            return []
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if self._on_cuda:
            size = -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
        known = self._alive.get(id(storage))
        if known is not None and known[1]() is storage:
            if size != self._bytes[known[0]]:  # storages can be resized, as FSDP does to free parameters
                self._grow(known[0], size - self._bytes[known[0]])
            return [known[0]]
        number = len(self._bytes)
        self._bytes.append(0)
        self._category.append("temporary")
        self._form.append((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        # A storage's Python object lives as long as the storage itself.
        gone = weakref.ref(storage, lambda _: self._grow(number, -self._bytes[number]))
        self._alive[id(storage)] = number, gone
        self._grow(number, size)
        return [number]

    def _grow(self, number: int, change: int) -> None:
        self._bytes[number] += change
        self._in_use += change
        self._write(number, change)

    def _mark(self, tensor: torch.Tensor, category: str) -> None:
        for number in self._see(tensor):
            if _PRIORITY[category] < _PRIORITY[self._category[number]]:
                self._category[number] = category

    def _mark_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            if p.grad is not None:
                self._mark(p.grad, "gradients")

    def _mark_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            return
        by_category: list[dict[str, Iterable[Any]]] = [{"optimizer": tree_leaves(dict(optimizer.state))}]
        list_tensors = getattr(optimizer, "tensors_by_category", None)
        if callable(list_tensors):
            by_category.append(list_tensors())
        for tensors in by_category:
            for category, values in tensors.items():
                for value in values:
                    if isinstance(value, torch.Tensor):
                        self._mark(value, category)

    def _save(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        # Parameters that are not the model's are gathered ones: they are freed, and gathered again.
        if not isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            for recorder in self._nested:
                recorder._mark(tensor, "activations")
        # A leaf goes through as it is. Another tensor must not be kept by the hook, or a graph would hold
        # itself alive; and autograd then cannot see that it was changed in place, so `_restore` looks.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    def _sample(self, before: bool = False) -> None:
        """Write the allocator's peak since the last look; before an operator only if it has risen."""
        if not self._on_cuda:
            return
        allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        peak = max(allocated["peak"], self._peak)
        if not before or peak > self._level:
            self._write(-1, peak)
            self._level_peak = peak
        self._level, self._peak = allocated["current"], 0
        for recorder in self._nested:
            if recorder is not self and recorder._device == self._device:
                recorder._peak = max(recorder._peak, allocated["peak"])
        torch.cuda.reset_peak_memory_stats(self._device)

    _level = _level_peak = 0  # bytes allocated at the last look, and the most before it

    def _write(self, number: int, change: int) -> None:
        if self._watches:
            self._log.append((time.perf_counter() - self._begin, number, change))


def _restore(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was modified by an inplace "
            f"operation: it is at version {tensor._version}, and {version} was saved"
        )
    return tensor
