"""Two candidates on the same ranks take turns, so that a busy moment falls on both.

A step is timed from a barrier to the last rank's end. Who is built first, and so gets memory first, can be
slower by a percent: benchmarks build them both ways round, half of the pairs each.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpnb.bench.report import Row, table

Step = Callable[[], object]
WARM_UP = 5  # steps of each before a clock counts


@dataclass(frozen=True)
class Measured:
    """What one rank saw of one candidate: seconds of its steps, and by how many bytes memory rises in one."""

    seconds: tuple[float, ...]
    rise: int

    def __add__(self, other: Measured) -> Measured:
        return Measured(self.seconds + other.seconds, max(self.rise, other.rise))


def take_turns(build: Sequence[Callable[[], Step]], pairs: int, last_first: bool) -> list[Measured]:
    """On a rank: what was measured of two candidates. The order in a pair alternates.

    Args:
        build: makes each; the second one is made first if `last_first`.
    """
    made = {which: build[which]() for which in ((1, 0) if last_first else (0, 1))}
    steps = [made[0], made[1]]
    for _ in range(WARM_UP):
        for step in steps:
            step()
    rises = [_rise(step) for step in steps]
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            seconds[which].append(timed(steps[which]))
    return [Measured(tuple(s), rise) for s, rise in zip(seconds, rises, strict=True)]


def pair_table(title: str, names: Sequence[str], measured: Sequence[Measured]) -> str:
    """hpnb's and torch's rows as text, and what decides: the ratio of each pair, and that of memory."""
    rows = [Row(who, m.seconds) for who, m in zip(names, measured, strict=True)]
    ours, theirs = measured
    pairs = Row("", tuple(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)))
    low, high = pairs.quartiles
    lines = [table(title, rows)]
    lines.append(f"hpnb / torch, pair by pair: median {pairs.median:.3f}, quartiles {low:.3f} to {high:.3f}")
    if ours.rise:
        lines.append(
            f"memory rises in a step by {ours.rise / 2**30:.2f} and {theirs.rise / 2**30:.2f} GiB: "
            f"ratio {ours.rise / theirs.rise:.3f}"
        )
    return "\n".join(lines)


def timed(step: Step) -> float:
    """Seconds from a barrier to the last rank's end. Garbage is collected before, and not meanwhile: Python
    may do it in the step of either, and hpnb's pipelines switch it off."""
    gc.collect(1)
    collects = gc.isenabled()
    gc.disable()
    try:
        dist.barrier()
        _synchronize()
        begin = time.perf_counter()
        step()
        _synchronize()
        taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    finally:
        if collects:
            gc.enable()
    if torch.cuda.is_initialized():
        taken = taken.cuda()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


@contextmanager
def nothing_left() -> Iterator[None]:
    """Hooks tie models to their wrappers in cycles; the next contest needs the memory."""
    gc.collect()
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _rise(step: Step) -> int:
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
