"""The memory of a step on one rank, by the allocator; `measured_plan_memory.py` compares it with the plan.

    first step     makes the optimizer's state, and compiles blocks
    second step    torch.cuda.max_memory_allocated, phase by phase: to each loss, to the update, to the end

Without a GPU nothing is compiled, and hpnb.record.memory says what was alive at the peak of the second step.
On a GPU matmuls have workspaces, which the peaks include; they are measured by a matmul of their own, forward
and backward.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

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
        peak: bytes at the peak of a step, by the allocator; on a CPU, of all tensors.
        parts: {category: bytes} at the peak. On a GPU those at the start of its phase, and what is allocated
            in it is temporary.
        operator, tensors: on a CPU, where the peak was seen, and the largest groups of tensors then:
            category, text, bytes.
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


def measure_rank(name: str, case: MemoryCase) -> RankMemory:
    """Build a case, take its steps, and drop it. Every rank calls it.

    Args:
        name: of the model, as `hpnb plan` takes it.
    """
    _release()
    dist.barrier()
    try:
        measured = _measure(name, case)
    finally:
        _release()
    dist.barrier()  # not after an exception, when others may be in another call
    return measured


def _measure(name: str, case: MemoryCase) -> RankMemory:
    if device().type == "cuda":
        return _measure_allocator(name, case)
    training = build_training(name, case.task(name), case.parallel, case.dtype, optimized=True)
    training.step()
    with training.recording() as recorder:
        training.step()
    parts = _by_category(recorder.profile().at_peak)
    largest = tuple((one.category, str(one), one.nbytes) for one in recorder.tensors_at_peak()[:LARGEST])
    return RankMemory(sum(parts.values()), parts, recorder.peak_operator, largest)


def _measure_allocator(name: str, case: MemoryCase) -> RankMemory:
    leftover, workspaces = torch.cuda.memory_allocated(), _measure_workspaces()
    phases: list[Phase] = []
    watched: list[dict[str, int]] = []  # bytes in use at the last moment, in the step that is measured

    def look(moment: str) -> None:
        if watched:
            phases.append(Phase(moment, watched[-1], torch.cuda.max_memory_allocated() - leftover))
            watched.append(_bytes_in_use(training, leftover))  # resets the peak

    training = build_training(name, case.task(name), case.parallel, case.dtype, True, look)
    training.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    watched.append(_bytes_in_use(training, leftover))
    training.step()
    watched.clear()
    reserved = torch.cuda.memory_reserved()
    fullest = max(phases, key=lambda phase: phase.peak)
    parts = {**fullest.at_start, "temporary": fullest.peak - sum(fullest.at_start.values())}
    return RankMemory(fullest.peak, parts, "", (), tuple(phases), leftover, reserved, workspaces)


def _measure_workspaces() -> int:
    """Bytes that a matmul and its backward leave allocated."""
    before = torch.cuda.memory_allocated()
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=device(), requires_grad=True)
    (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated() - before


def _bytes_in_use(training: RankTraining, leftover: int) -> dict[str, int]:
    """Bytes in use now."""
    with training.recording() as recorder:
        pass
    parts = _by_category(recorder.profile().at_peak)
    others = parts["activations"] + parts["temporary"] - leftover
    return {**parts, "activations": others, "temporary": 0}


def _by_category(sample: MemorySample) -> dict[str, int]:
    return {category: int(getattr(sample, category)) for category in CATEGORIES}


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
