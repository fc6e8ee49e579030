"""Two or more programs on the same ranks take turns, so that a busy moment falls on all of them.

    A B C | B C A | C A B | ...      rounds: each program takes one step, and another one begins each time

A step is timed from a barrier to the last rank's end. Ratios are taken within a round. Who is built first
gets memory first, and can be slower by a percent, so half of the rounds are taken with the last one built
first.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hpnb

Step = Callable[[], Any]  # trains a step; it may return the loss
WARM_UP = 5  # steps of each program before a clock counts


@dataclass(frozen=True)
class Samples:
    """What was measured again and again: seconds, or ratios."""

    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def over(self, other: Samples) -> Samples:
        """The ratios, round by round."""
        return Samples("", tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def __str__(self) -> str:
        """As a table shows ratios: "1.032 [1.020, 1.041]"."""
        return f"{self.median:.3f} [{self.quartiles[0]:.3f}, {self.quartiles[1]:.3f}]"


@dataclass(frozen=True)
class Measurement:
    """What one rank measured of one program.

    Attributes:
        seconds: of its steps, one a round.
        losses: of its first steps, if its steps return them.
        peak: the most bytes of the GPU that it has allocated in a step; 0 without a GPU.
        rise: how far that is above what it holds between steps.
        sent: bytes that leave this rank in a step, if they were counted.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...] = ()
    peak: int = 0
    rise: int = 0
    sent: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """By program: what one rank measured, or why the program was left out; and profiles, as text."""

    measured: dict[str, Measurement] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    profiles: tuple[str, ...] = ()


# --- on a rank ---------------------------------------------------------------------------------------------


def compare(
    builders: Mapping[str, Callable[[], Step]],
    rounds: int,
    last_first: bool,
    *,
    count_bytes: bool = False,
    check: Callable[[Mapping[str, Sequence[float]]], object] = lambda losses: None,
    profile: Callable[[Mapping[str, Step], Mapping[str, Measurement]], tuple[str, ...]] | None = None,
) -> Comparison:
    """Build the programs, warm them up, and let them take turns. All ranks call it.

    Args:
        builders: {name: makes the program}; a ValueError leaves it out. All ranks get one, or none.
        last_first: build the last one first.
        count_bytes: measure `sent`, by a step of its own.
        check: gets the losses of the first steps, and may raise.
        profile: gets the programs at the end, and returns texts.
    """
    left_out: dict[str, str] = {}
    started: dict[str, tuple[Step, Measurement]] = {}
    with free_memory():
        for name in reversed(list(builders)) if last_first else builders:
            try:
                started[name] = _start(builders[name])
            except ValueError as refused:
                left_out[name] = str(refused)
        steps = {name: started[name][0] for name in builders if name in started}
        check({name: started[name][1].losses for name in steps})
        sent = {name: _count_bytes(step) if count_bytes else 0.0 for name, step in steps.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        order = list(steps)
        for _ in range(rounds):
            for name in order:
                seconds[name].append(time_step(steps[name]))
            order.append(order.pop(0))
        measured = {
            name: replace(started[name][1], seconds=tuple(seconds[name]), sent=sent[name]) for name in steps
        }
        profiles = () if profile is None else profile(steps, measured)
        steps.clear()
        started.clear()
    return Comparison(measured, left_out, profiles)


def _start(build: Callable[[], Step]) -> tuple[Step, Measurement]:
    """A program that is warm, and what is known of it before a clock counts.

    Raises:
        ValueError: it cannot be built, or take a step.
    """
    gpu = torch.cuda.is_initialized()
    with free_memory():
        before = torch.cuda.memory_allocated() if gpu else 0
    step = build()
    losses = [_number(step()) for _ in range(WARM_UP)]
    known = tuple(loss for loss in losses if loss is not None)
    if not gpu:
        return step, Measurement((), known)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    between = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return step, Measurement((), known, peak - before, peak - between)


def _number(loss: Any) -> float | None:
    if loss is None:
        return None
    return float(loss.full_tensor()) if isinstance(loss, DTensor) else float(loss)


def _count_bytes(step: Step) -> float:
    with hpnb.record.traffic() as traffic:
        step()
    return traffic.total


def time_step(step: Step) -> float:
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
        taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    finally:
        if collects:
            gc.enable()
    if torch.cuda.is_initialized():
        taken = taken.cuda()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
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


# --- for all ranks -----------------------------------------------------------------------------------------


def compare_both_orders(
    pool: hpnb.Ranks, measure: Callable[..., Comparison], rounds: int, *args: Any
) -> list[list[Comparison]]:
    """Comparisons by half of the rounds and by rank; `measure(rounds, last_first, *args)` runs on the ranks.

    Raises:
        ValueError: no rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} measures nothing; use 1 or more")
    halves = [pool.run(measure, rounds - rounds // 2, False, *args)]
    if rounds > 1:
        halves.append(pool.run(measure, rounds // 2, True, *args))
    return halves


def samples_of(halves: Sequence[Sequence[Comparison]]) -> dict[str, Samples]:
    """The seconds of all rounds, by program."""
    first = halves[0][0].measured
    return {n: Samples(n, sum((half[0].measured[n].seconds for half in halves), ())) for n in first}


def table(title: str, rows: Sequence[Samples]) -> str:
    """Rows as text; the ratio says how many times as long as the first row each one took."""
    width = max(len(row.name) for row in rows)
    lines = [title, f"{'':{width}}  {'median':>10}  {'quartiles':>21}  {'ratio':>7}"]
    for row in rows:
        low, high = row.quartiles
        span = f"{low * 1e3:.2f} to {high * 1e3:.2f}"
        ratio = row.median / rows[0].median
        lines.append(f"{row.name:{width}}  {row.median * 1e3:7.2f} ms  {span:>18} ms  {ratio:7.2f}")
    return "\n".join(lines)


def pair_table(title: str, halves: Sequence[Sequence[Comparison]]) -> str:
    """hpnb's and torch's rows as text, and what decides: the ratio of each pair, and that of memory."""
    rows = list(samples_of(halves).values())
    ratios = rows[0].over(rows[1])
    low, high = ratios.quartiles
    lines = [table(title, rows)]
    lines.append(f"hpnb / torch, pair by pair: median {ratios.median:.3f}, quartiles {low:.3f} to {high:.3f}")
    ours, theirs = (max(half[0].measured[row.name].rise for half in halves) for row in rows)
    if ours:
        lines.append(
            f"memory rises in a step by {ours / 2**30:.2f} and {theirs / 2**30:.2f} GiB: "
            f"ratio {ours / theirs:.3f}"
        )
    return "\n".join(lines)
