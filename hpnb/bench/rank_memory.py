"""The memory of a step on one rank, by the allocator: `plan_memory.py` compares it with what was predicted.

    first step     makes the optimizer's state, and compiles blocks
    second step    torch.cuda.max_memory_allocated, phase by phase: to each loss, to the update, to the end
    third step     what was alive at the peak: by hpnb.record.memory where nothing is compiled, since it would
                   run compiled blocks uncompiled; else, if asked for, by the allocator's history, under
                   which compiled steps failed on torch 2.11 (`--trace` in plan_memory.py)

Without a GPU the third step alone counts. On a GPU matmuls have workspaces, which the peaks include; they are
measured by a matmul of their own, forward and backward.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpnb.hybrid.plan_command.layout_code import parse_layout_code
from hpnb.hybrid.plan_command.logical_rank import RankTraining, build_training
from hpnb.hybrid.plan_command.main import make_task
from hpnb.hybrid.plan_command.read_model import read_model
from hpnb.mesh import ParallelLayout
from hpnb.ranks.current_rank import device
from hpnb.record import CATEGORIES, MemorySample
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.plan_task import PlanTask

LARGEST = 10  # groups of tensors that are listed


@dataclass(frozen=True)
class MemoryCase:
    """A model, a layout as `layout_code` writes it, its microbatches and its precision."""

    model: str
    layout: str
    microbatches: int
    dtype: str

    @property
    def parallel(self) -> ParallelLayout:
        return parse_layout_code(self.layout)

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        layout = self.parallel
        return layout.dp * (layout.microbatch_size or 1) * self.microbatches

    def task(self, name: str) -> PlanTask:
        """
        Args:
            name: of the model, as `hpnb plan` takes it.
        """
        gpus = self.parallel.world_size
        task = make_task(read_model(name), find_gpu("h100"), gpus, self.batch, None)
        return replace(task, value_bytes=4 if self.dtype == "fp32" else 2)

    def __str__(self) -> str:
        return f"{self.model} {self.layout} x {self.microbatches} {self.dtype}"


@dataclass(frozen=True)
class Phase:
    """Until a moment of a step: bytes in use at its start by category, and at most.

    `at_start` counts what is neither a weight nor a gradient nor optimizer state as activations.
    """

    until: str
    at_start: dict[str, int]
    peak: int


@dataclass(frozen=True)
class RankMemory:
    """What one rank took.

    Attributes:
        peak: bytes at the peak of a step, by the allocator; on a CPU and counted, of all tensors.
        parts: {category: bytes} at the peak. Where blocks are compiled, those at the start of its phase, and
            what is allocated in it is temporary.
        operator, tensors: where the peak was seen, and the largest groups of tensors then: category, text,
            bytes.
        phases: of the step, on a GPU.
        leftover: bytes that earlier cases have left, which peaks do not include.
        reserved: bytes that the allocator took from the GPU.
        workspaces: bytes of matmuls, which stay once they are allocated.
    """

    peak: int
    parts: dict[str, int]
    operator: str = ""
    tensors: tuple[tuple[str, str, int], ...] = ()
    phases: tuple[Phase, ...] = ()
    leftover: int = 0
    reserved: int = 0
    workspaces: int = 0

    @property
    def kept(self) -> int:
        """Bytes in use after the last backward that are neither states nor workspaces: the gradient buckets
        of replicas, and weights of other stages if something still refers to them."""
        return self.phases[-1].at_start["activations"] - self.workspaces if self.phases else 0


def measure_rank(name: str, case: MemoryCase, optimized: bool, trace: bool = False) -> RankMemory:
    """Build a case, take its three steps, and drop it. Every rank calls it.

    Args:
        name: of the model, as `hpnb plan` takes it.
        optimized: with `enable_all_optimization`, as the plan assumes.
        trace: record the allocator's history where blocks are compiled. On torch 2.11 these steps raise
            SystemError under it.
    """
    _release()
    dist.barrier()
    try:
        measured = _measure(name, case, optimized, trace)
    finally:
        _release()
    dist.barrier()  # not after an exception, when others may be in another call
    return measured


def _measure(name: str, case: MemoryCase, optimized: bool, trace: bool) -> RankMemory:
    on_gpu = device().type == "cuda"
    leftover = torch.cuda.memory_allocated() if on_gpu else 0
    workspaces = _measure_workspaces()
    phases: list[Phase] = []
    watched: list[dict[str, int]] = []  # bytes in use at the last moment, in the step that is measured

    def look(moment: str) -> None:
        if watched:
            phases.append(Phase(moment, watched[-1], torch.cuda.max_memory_allocated() - leftover))
            watched.append(_bytes_in_use(training, leftover))  # resets the peak

    training = build_training(name, case.task(name), case.parallel, case.dtype, optimized, look)
    training.step()
    reserved = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        watched.append(_bytes_in_use(training, leftover))
        training.step()
        watched.clear()
        reserved = torch.cuda.memory_reserved()
    operator, groups = "", tuple[tuple[str, str, int], ...]()
    if on_gpu and optimized:
        if trace:
            operator, groups = _trace(training)
        fullest = max(phases, key=lambda phase: phase.peak)
        parts = {**fullest.at_start, "temporary": fullest.peak - sum(fullest.at_start.values())}
    else:
        with training.recording() as recorder:
            training.step()
        parts = by_category(recorder.profile().at_peak, leftover)
        operator = recorder.peak_operator
        groups = tuple((one.category, str(one), one.nbytes) for one in recorder.tensors_at_peak()[:LARGEST])
    peak = max((phase.peak for phase in phases), default=sum(parts.values()))
    return RankMemory(peak, parts, operator, groups, tuple(phases), leftover, reserved, workspaces)


def _measure_workspaces() -> int:
    """Bytes that a matmul and its backward leave allocated."""
    if device().type != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=device(), requires_grad=True)
    (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated() - before


def _bytes_in_use(training: RankTraining, leftover: int) -> dict[str, int]:
    """Bytes in use now."""
    with training.recording() as recorder:
        pass
    parts = by_category(recorder.profile().at_peak, leftover)
    return {**parts, "activations": parts["activations"] + parts["temporary"], "temporary": 0}


def by_category(sample: MemorySample, leftover: int = 0) -> dict[str, int]:
    parts = {category: int(getattr(sample, category)) for category in CATEGORIES}
    return {**parts, "temporary": parts["temporary"] - leftover}


def _trace(training: RankTraining) -> tuple[str, tuple[tuple[str, str, int], ...]]:
    """A step under the allocator's history: where its peak was, and the largest of what it had allocated."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    try:
        training.step()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return alive_at_peak(trace)


def alive_at_peak(trace: Sequence[dict[str, Any]]) -> tuple[str, tuple[tuple[str, str, int], ...]]:
    """Where the peak was, and the largest groups that were alive then and allocated within the trace.

    Args:
        trace: of one device, as `torch.cuda.memory._snapshot()` has it: actions in order of time.
    """
    level = highest = 0
    alive, at_peak, where = dict[int, dict[str, Any]](), list[dict[str, Any]](), ""
    sizes, position = dict[int, int](), 0
    for i, entry in enumerate(trace):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            level += entry["size"]
            if level > highest:
                highest, position = level, i
        elif entry["action"] == "free_completed":
            level -= sizes.pop(entry["addr"], entry["size"])
    for entry in trace[: position + 1]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
            where = _place(entry)
        elif entry["action"] == "free_completed":
            alive.pop(entry["addr"], None)
    at_peak = list(alive.values())
    groups: dict[tuple[str, int], int] = {}
    for entry in at_peak:
        kind = _place(entry), entry["size"]
        groups[kind] = groups.get(kind, 0) + 1
    largest = sorted(groups, key=lambda kind: -kind[1] * groups[kind])[:LARGEST]
    return where, tuple(
        ("allocated", f"{groups[place, size]} x {size:,} B {place}", size * groups[place, size])
        for place, size in largest
    )


def _place(entry: dict[str, Any]) -> str:
    """The innermost line outside of torch that allocated; of compiled code the line of the graph."""
    frames = entry.get("frames", [])
    for frame in frames:
        if "/torch/" not in frame["filename"] or "/torchinductor" in frame["filename"]:
            return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return f"{frames[0]['name']} in torch" if frames else "no Python frame, as in a backward"


def _release() -> None:
    """Return what an earlier case allocated, compiled code and the workspaces of matmuls included."""
    torch.compiler.reset()
    for _ in range(2):  # what a finalizer drops is collected in the second round
        gc.collect()
    if device().type == "cuda":
        torch.cuda.synchronize()
        if (clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)) is not None:
            clear()
        torch.cuda.empty_cache()
