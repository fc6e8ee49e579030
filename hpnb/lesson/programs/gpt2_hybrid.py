"""What notebook 08 runs on its ranks: one GPT-2 on many layouts, and where each millisecond of a step went.

    rates = pool.run(contest.rates, SIZE, 2, 32, torch.float32)[0]      what one rank alone takes
    task = contest.task(SIZE, 32, torch.float32, rates, card.link)      for predictions
    contest.run(pool, SIZE, 32, torch.float32, plan, card.link)         Ran: seconds by part, bytes, memory

**Measured.** With a core, or a GPU, for each rank the parts are read off a recorded step, whose spans of
computing end where the rank itself carries a communication (notebook 03): what is not covered by computing is
tp's, dp's, or idle, in that order.

**Replayed.** With fewer cores than ranks a clock would show who got a core. There each action's CPU time is
taken, of the same step, and put together by the simulator of schedules; every message that was recorded
travels on `link`. Then computing and the optimizer are measured, and messages are not.

Nothing here imports matplotlib before it draws.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb.hybrid import HybridParallelPlugin
from hpnb.lesson.programs import gpt2_pipeline
from hpnb.lesson.programs.step_breakdown import Seen, parts_of, replayed
from hpnb.lesson.programs.vit_tensor import _Apart
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Action, Schedule, schedules
from hpnb.pipeline_parallel.executor import contended
from hpnb.record.recorder import recording
from hpnb.theory import LayerCost, LayoutTask, Link

_WARM = {"cpu": 1, "cuda": 3}  # steps before the first that counts
_LEAST = 1024.0  # bytes: smaller messages are counts and losses
_BUCKETS = 4  # of a gradient, at least: with one alone nothing could be hidden


@dataclass(frozen=True)
class Rates:
    """What one rank alone takes, while the others do the same: see `hpnb.theory.LayoutTask`."""

    each: LayerCost
    ends: LayerCost
    parameter: float
    matmul: float


@dataclass(frozen=True)
class Ran:
    """A training step of all ranks on one layout.

    Attributes:
        parts: {one of STEP_PARTS: seconds}, mean over the ranks; their sum is the step.
        bytes: that a rank sends, mean over the ranks, in messages of 1 kB or more.
        peak: bytes, of the fullest rank.
        source: "measured" or "replayed from measured CPU time".
    """

    plan: ParallelLayout
    parts: Mapping[str, float]
    bytes: float
    peak: float
    source: str

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


# --- what one rank alone takes -----------------------------------------------------------------------


def rates(size: GPT2Size, few: int, many: int, dtype: torch.dtype) -> Rates:
    """Times of layers for `few` rows and for `many`, and a line through the two. Every rank calls it."""
    found = [gpt2_pipeline.measured(size, rows, dtype, repeats=3) for rows in (few, many)]
    blocks = [sky.block for sky in found]
    ends = [sky.costs[0] + sky.costs[-1] for sky in found]
    optimizer = _optimizer_seconds(size, dtype)
    return Rates(_line(few, many, blocks), _line(few, many, ends), optimizer, _matmul(size, many, dtype))


def _line(few: int, many: int, took: Sequence[float]) -> LayerCost:
    row = max((took[1] - took[0]) / (many - few), took[1] / many * 0.5)  # noise must not turn it over
    return LayerCost(max(0.0, took[0] - row * few), row)


def _optimizer_seconds(size: GPT2Size, dtype: torch.dtype) -> float:
    """Seconds of AdamW, a parameter: of one block's."""
    model: Any = gpt2_pipeline.gpt2(size, dtype)
    block = model.transformer.h[0]
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True)
    if dtype.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    took = [_timed(optimizer.step) for _ in range(6)][1:]
    return statistics.median(took) / sum(int(p.numel()) for p in block.parameters())


def _matmul(size: GPT2Size, rows: int, dtype: torch.dtype) -> float:
    """FLOP/s of the largest product of a block."""
    m, k, n = rows * size.length, size.hidden, size.mlp
    a, b = (torch.randn(*shape, device=hpnb.device()).to(dtype) for shape in ((m, k), (k, n)))
    took = [_timed(lambda: a @ b) for _ in range(12)][2:]
    return 2 * m * k * n / min(took)


def _timed(work: Callable[[], Any]) -> float:
    """Seconds on this rank's device; CPU time where ranks share cores."""
    if contended():
        began = time.thread_time()
        work()
        return time.thread_time() - began
    with hpnb.record.timeline() as recorder, recorder.span():
        work()
    return recorder.events()[0].duration


def task(size: GPT2Size, rows: int, dtype: torch.dtype, found: Rates, link: Link) -> LayoutTask:
    """For `hpnb.theory.layout_parts` and `layout_memory`."""
    block = size.block(1, None, dtype.itemsize)
    return LayoutTask(
        block, size.layers, size.vocab_size, rows, found.each, found.ends, found.parameter, link,
        buckets=_BUCKETS,
    )  # fmt: skip


# --- a layout, on a rank -------------------------------------------------------------------------------


class _WithSchedule(HybridParallelPlugin):
    """A plugin whose pipeline runs a schedule that it is given, such as the reader's."""

    given: Schedule | None = None

    def schedule(self, microbatches: int) -> Schedule:
        if self.given is not None and self.given.microbatches == microbatches:
            return self.given
        return super().schedule(microbatches)


def _on_rank(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    plan: ParallelLayout,
    schedule: Schedule | None,
    repeats: int,
) -> Seen:
    gc.collect()  # what a layout before has built may still be there
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    plugin = _WithSchedule(
        tp_size=plan.tp, pp_size=plan.pp, zero_stage=plan.zero_stage, precision=precision,
        pp_style=plan.schedule, num_microbatches=plan.num_microbatches,
        ddp_bucket_cap_mb=_bucket_mb(size, dtype, plan), seed=0,
    )  # fmt: skip
    plugin.given = schedule
    booster = hpnb.Booster(plugin=plugin)
    model: Any = gpt2_pipeline.gpt2(size, dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = gpt2_pipeline.words(size, rows // plan.dp)
    share, cpu = contended(), [0.0]

    def step(record: bool = False, recorder: Any = None) -> None:
        optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), model, None, optimizer, record=record)
        began = time.thread_time()
        if recorder is None:
            optimizer.step()
        else:
            with recorder.span("optimizer"):
                optimizer.step()
        cpu[0] = time.thread_time() - began

    seen = Seen(plugin.mesh.layout.coordinates(hpnb.rank()), [], [], [], [], 0.0)
    for _ in range(_WARM[hpnb.device().type]):
        step()
    for _ in range(repeats):
        recorder = _Apart()
        with recording(recorder):
            step(True, recorder)
        if share:
            events = model.last_step.timeline.events
            seen.actions.append({Action(e.stage, e.op, e.microbatch): e.duration for e in events})
            seen.optimizer.append(cpu[0])
        else:
            seen.timelines.append(recorder.gather().shifted())
    with hpnb.record.memory(model, optimizer) as memory, hpnb.record.traffic() as counted:
        step()
    sent = [m for m in counted.messages if m.bytes >= _LEAST]
    return Seen(seen.coordinates, seen.actions, seen.optimizer, seen.timelines, sent, memory.profile().peak)


def _bucket_mb(size: GPT2Size, dtype: torch.dtype, plan: ParallelLayout) -> float:
    whole = dtype.itemsize * size.parameters() / plan.pp / plan.tp
    return min(25.0, whole / _BUCKETS / 2**20)


# --- a layout, on all ranks ----------------------------------------------------------------------------


def run(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    plan: ParallelLayout,
    link: Link,
    schedule: Schedule | None = None,
    repeats: int = 2,
) -> Ran:
    """Train a few steps of `rows` rows on one layout.

    Args:
        link: on which messages travel where the step is replayed.
        schedule: of plan.pp ranks and the plan's number of microbatches, in place of the library's.
    """
    seen: list[Seen] = pool.run(_on_rank, size, rows, dtype, plan, schedule, repeats)
    sent = sum(m.bytes for each in seen for m in each.messages) / len(seen)
    peak = max(each.peak for each in seen)
    if seen[0].timelines:
        tl = sorted(seen[0].timelines, key=lambda one: one.makespan)[(repeats - 1) // 2]
        return Ran(plan, parts_of(tl), sent, peak, tl.source)
    used = schedule or schedules.make(plan.schedule, plan.pp, plan.count_microbatches(rows // plan.dp))
    return Ran(plan, replayed(seen, plan, used, link), sent, peak, "replayed from measured CPU time")
