"""On a rank: programs that live side by side, and what is asked of them. The parent decides which and
when."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import profiler

import hpnb
from hpnb.bench import hpnb_programs, torch_data_parallel, torch_precision, torch_programs
from hpnb.bench.program import Candidate, Program
from hpnb.bench.tasks import TrainingTask
from hpnb.mesh import ParallelLayout

WARM_UP = 5  # steps of each program before a clock counts
_live: dict[str, Program] = {}


@dataclass(frozen=True)
class ProgramStart:
    """What a rank reports of a program that is warm.

    Attributes:
        losses: of its first steps.
        held: bytes between steps; `peak`: the most in a step; of this program alone, 0 without a GPU.
        total: bytes of this GPU's memory.
        refused: why there is no program, if this layout or machine cannot have it; all ranks agree on it.
    """

    losses: tuple[float, ...] = ()
    held: int = 0
    peak: int = 0
    total: int = 0
    refused: str = ""


def candidates(what: str, layout: ParallelLayout) -> dict[str, Candidate]:
    """All candidates for a layout by name, hpnb's in front."""
    every = [*hpnb_programs.candidates(layout), *torch_programs.candidates(what, layout)]
    return {candidate.name: candidate for candidate in every}


def start(task: TrainingTask, layout: ParallelLayout, candidate: Candidate) -> ProgramStart:
    """Build a program and warm it up; it stays until `drop`."""
    gpu, before = torch.cuda.is_initialized(), 0
    if gpu:  # nothing is compiled on a CPU, and its memory is not counted
        torch._dynamo.config.recompile_limit = 64  # counted by code object, which several programs share
        with free_memory():
            before = torch.cuda.memory_allocated() + graph_pool_bytes()
    try:
        program = candidate.build(task, layout)
    except ValueError as refused:
        return ProgramStart(refused=str(refused))
    losses = tuple(take_steps(program, WARM_UP))
    if difference := compare_replicas(program):
        return ProgramStart(refused=difference)
    _live[candidate.name] = program
    if not gpu:
        return ProgramStart(losses)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    program.step()
    torch.cuda.synchronize()
    in_pools = graph_pool_bytes()
    held = torch.cuda.memory_allocated() + in_pools - before
    peak = torch.cuda.max_memory_allocated() + in_pools - before
    return ProgramStart(losses, held, peak, torch.cuda.mem_get_info()[1])


def graph_pool_bytes() -> int:
    """Bytes that CUDA graphs keep for the tensors of a step, and which the allocator counts as free."""
    segments = torch.cuda.memory_snapshot()
    pools = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)


def compare_replicas(program: Program) -> str:
    """A sentence about replicas that differ, or "". Losses are means over all ranks and would hardly show it.
    All ranks get the same sentence; pipelines compare stage by stage."""
    sums = [torch_precision.local(tensor.detach()).double().sum() for tensor in program.replicas()]
    low, high = (torch.stack(sums) if sums else torch.zeros(1, device=hpnb.device()) for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN, group=program.dp_group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=program.dp_group)
    counts = torch.stack([(low != high).sum(), torch.tensor(len(sums), device=low.device)])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    differ, count = counts.tolist()
    return f"{differ} of {count} weights differ between ranks: gradients were not summed" if differ else ""


def reference_losses(task: TrainingTask, steps: int = WARM_UP) -> list[float]:
    """The first losses of the plain model: every rank takes the global batch, and nobody sends anything."""
    drop()
    return take_steps(torch_data_parallel.replicas("blocks", task, ParallelLayout()), steps)


def drop(kept: tuple[str, ...] = ()) -> None:
    for name in [name for name in _live if name not in kept]:
        del _live[name]
    if not _live and torch.cuda.is_initialized():  # nothing is compiled on a CPU
        torch.compiler.reset()
    gc.collect()  # hooks tie models to their wrappers in cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def time_one_step(name: str) -> float:
    return time_step(_live[name].step)


def count_bytes(name: str) -> float:
    """Bytes that leave this rank in a step, of the rank with most, counted as `hpnb.record.traffic` does."""
    with hpnb.record.traffic() as traffic:
        _live[name].step()
    return _maximum(traffic.total)


def count_retries() -> int:
    """How often the allocator has run out of memory and freed its cache, which costs time."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_initialized() else 0


def measure_bubble(name: str) -> tuple[float, float] | None:
    bubble = _live[name].bubble
    return None if bubble is None else bubble()


def profile(name: str, title: str, path: str) -> str:
    """The 12 kernels (on a CPU operators) that take longest in a step of rank 0, which writes its trace."""
    step, gpu = partial(time_step, _live[name].step), torch.cuda.is_initialized()
    step()  # so that all ranks are here
    if hpnb.rank():
        step()
        return ""
    kinds = profiler.ProfilerActivity
    with profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if gpu else [])]) as recorded:
        step()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(path)
    rows = []
    for event in recorded.key_averages():
        if (event.device_type.name == "CUDA") == gpu and not event.is_user_annotation:
            took = event.self_device_time_total if gpu else event.self_cpu_time_total
            rows.append((took / 1e3, event.count, event.key[:96]))
    total = sum(took for took, _, _ in rows)
    rows.sort(reverse=True)
    lines = [f"{title}: {total:.1f} ms in {'kernels' if gpu else 'operators'} of rank 0, trace in {path}"]
    lines += [f"{took:9.2f} ms  {took / total:5.1%}  {n:5d} x  {kernel}" for took, n, kernel in rows[:12]]
    return "\n".join(lines)


def losses(
    task: TrainingTask, layout: ParallelLayout, candidate: Candidate, steps: int, backwards: bool = False,
    tf32: bool = False,
) -> list[float]:  # fmt: skip
    """The losses of a program from its first step on, each with a batch of its own.

    Args:
        backwards: samples of every batch in the opposite order, which changes only the order of sums.
        tf32: matmuls of float32 on a GPU in TF32.
    """
    drop()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else before)
    try:
        program = candidate.build(task, layout)
        program.feed.backwards = backwards
        return take_steps(program, steps)
    finally:
        torch.set_float32_matmul_precision(before)


def take_steps(program: Program, steps: int) -> list[float]:
    values = []
    for step in range(steps):
        program.feed.draw(step)
        program.step()
        values.append(program.loss())
    return values


def matmul_rate(bits: int) -> float:
    """FLOP/s of large square matmuls on this device, all ranks at once: the median of 7 bursts."""
    n, times, dtype = matmul_size(torch.cuda.is_initialized(), bits)
    a, b = (torch.randn(n, n, device=hpnb.device(), dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def burst() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    burst()
    rates = []
    for _ in range(7):
        synchronize()
        begin = time.perf_counter()
        burst()
        synchronize()
        rates.append(2 * n**3 * times / (time.perf_counter() - begin))
    return statistics.median(rates)


def matmul_size(gpu: bool, bits: int) -> tuple[int, int, torch.dtype]:
    """(rows of a matrix, matmuls in a burst, dtype)."""
    return *((8192, 16) if gpu else (512, 4)), torch.bfloat16 if bits == 16 else torch.float32


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU"


# --- clocks and memory -----------------------------------------------------------------------------------


def time_step(step: Callable[[], object]) -> float:
    """Seconds from a barrier to the last rank's end.

    Garbage is collected before and not during the step: Python may collect it in the step of either program,
    and hpnb's pipelines switch collection off.
    """
    gc.collect(1)
    collects = gc.isenabled()
    gc.disable()
    try:
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        seconds = time.perf_counter() - begin
    finally:
        if collects:
            gc.enable()
    return _maximum(seconds)


def _maximum(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    tensor = tensor.cuda() if torch.cuda.is_initialized() else tensor
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def free_memory() -> Iterator[None]:
    """Free what is not needed, before and after. Hooks tie models to their wrappers in cycles."""
    gc.collect()
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
