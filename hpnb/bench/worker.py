"""On a rank: programs that live side by side, and what is asked of them. The parent decides who and when."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import hpnb
from hpnb.bench import hpnb_programs, torch_data_parallel, torch_precision, torch_programs
from hpnb.bench.harness import nothing_left, timed
from hpnb.bench.layouts import Shape
from hpnb.bench.profile_step import profiled
from hpnb.bench.program import Candidate, Program
from hpnb.bench.tasks import Task, What

WARM_UP = 5  # steps, each with a batch of its own, whose losses are compared
_live: dict[str, Program] = {}


@dataclass(frozen=True)
class ProgramStart:
    """What a rank says of a program that is warm.

    Attributes:
        losses: of its first steps.
        held: bytes between steps; `peak`: the most in a step; of this program alone, 0 without a GPU.
        total: bytes of this GPU's memory.
        refused: why there is none, if this layout or machine cannot have it; all ranks agree on it.
    """

    losses: tuple[float, ...] = ()
    held: int = 0
    peak: int = 0
    total: int = 0
    refused: str = ""


def candidates(what: What, shape: Shape) -> dict[str, Candidate]:
    """All that contend in a layout by name, hpnb's in front."""
    found = [*hpnb_programs.candidates(shape), *torch_programs.candidates(what, shape)]
    return {one.name: one for one in found}


def begin(task: Task, shape: Shape, name: str, warm_up: int = WARM_UP) -> ProgramStart:
    """Build a program and warm it up; it stays until `drop`."""
    candidate, gpu = candidates(task.what, shape)[name], torch.cuda.is_initialized()
    torch._dynamo.config.recompile_limit = 64  # counted by code object, which several programs here share
    with nothing_left():
        before = torch.cuda.memory_allocated() if gpu else 0
    try:
        program = candidate.build(task, shape)
    except ValueError as refused:
        return ProgramStart(refused=str(refused))
    losses = _first(program, warm_up)
    if apart := _apart(program):
        return ProgramStart(refused=apart)
    _live[name] = program
    if not gpu:
        return ProgramStart(tuple(losses))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    program.step()
    torch.cuda.synchronize()
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    return ProgramStart(tuple(losses), held, peak, torch.cuda.mem_get_info()[1])


def _apart(program: Program) -> str:
    """A sentence about replicas that differ: losses are means over all ranks, and would hardly show it. All
    ranks get one, or none; pipelines compare stage by stage."""
    held = [torch_precision.local(tensor.detach()).double().sum() for tensor in program.replicas()]
    low, high = (torch.stack(held) if held else torch.zeros(1, device=hpnb.device()) for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN, group=program.among)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=program.among)
    counts = torch.stack([(low != high).sum(), torch.tensor(len(held), device=low.device)])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    apart, known = counts.tolist()
    return f"{apart} of {known} weights differ between ranks: gradients were not summed" if apart else ""


def reference(task: Task, steps: int = WARM_UP) -> list[float]:
    """The first losses of the plain model: every rank takes the whole batch, and nobody sends anything."""
    drop()
    return _first(torch_data_parallel.alone("blocks", task, Shape()), steps)


def drop(kept: tuple[str, ...] = ()) -> None:
    """Let all programs go but `kept`."""
    for name in [name for name in _live if name not in kept]:
        del _live[name]
    if not _live:
        torch.compiler.reset()
    gc.collect()  # hooks tie models to their wrappers in cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def one_step(name: str) -> float:
    """Seconds from a barrier to the last rank's end."""
    return timed(_live[name].step)


def retries() -> int:
    """How often the allocator has run out of memory and let go of what it kept, which costs time."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_initialized() else 0


def bubble(name: str) -> tuple[float, float] | None:
    """Measured and simulated idle share of a step, if it can be recorded."""
    found = _live[name].bubble
    return None if found is None else found()


def profile(name: str, title: str, path: str) -> str:
    """The longest kernels of a step; rank 0 writes its trace."""
    return profiled(title, _live[name].step, Path(path) if hpnb.rank() == 0 else None)


def losses(task: Task, shape: Shape, name: str, steps: int, backwards: bool = False) -> list[float]:
    """Of a program from its first step on, each with a batch of its own.

    Args:
        backwards: rows of every batch in the opposite order, which changes nothing but the order of sums.
    """
    drop()
    program = candidates(task.what, shape)[name].build(task, shape)
    program.feed.backwards = backwards
    return _first(program, steps)


def _first(program: Program, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        program.feed.turn(step)
        program.step()
        found.append(program.loss())
    return found


def matmul_rate(bits: int) -> float:
    """FLOP/s of large square products on this device, all ranks at once: the median of 7 bursts."""
    gpu = torch.cuda.is_initialized()
    n, times, dtype = _products(gpu, bits)
    a, b = (torch.randn(n, n, device=hpnb.device(), dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def burst() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    burst()
    rates = []
    for _ in range(7):
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        burst()
        if gpu:
            torch.cuda.synchronize()
        rates.append(2 * n**3 * times / (time.perf_counter() - begin))
    return statistics.median(rates)


def _products(gpu: bool, bits: int) -> tuple[int, int, torch.dtype]:
    """Their size, how many there are in a burst, and of what."""
    return *((8192, 16) if gpu else (512, 4)), torch.bfloat16 if bits == 16 else torch.float32


def device_name() -> str:
    """Of a table's head."""
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return "CPU"
