"""What notebook 08 runs on its ranks: one GPT-2 on many layouts, and where each millisecond of a step went.

    rates = pool.run(gpt2_hybrid.measure_rates, SIZE, 2, 32, torch.float32)[0]      what one rank alone takes
    task = gpt2_hybrid.layout_task(SIZE, 32, torch.float32, rates, card.link)       for predictions
    gpt2_hybrid.run_layout(pool, SIZE, 32, torch.float32, layout, card.link)        a LayoutRun

**Measured.** With a core, or a GPU, for each rank the parts are read off a recorded step, whose spans of
computing end where the rank itself carries a communication (notebook 03): what is not covered by computing is
tp's, dp's, or idle, in that order.

**Replayed.** With fewer cores than ranks a clock would show who got a core. There each action's CPU time is
taken, of the same step, and put together by the simulator of schedules; every recorded message travels on
`link`. Then computing and the optimizer are measured, and messages are not.
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
from hpnb.lesson.programs.device_timing import random_tokens, timing_gpt2, warmup_steps
from hpnb.lesson.programs.gpt2_pipeline import time_layers
from hpnb.lesson.programs.step_breakdown import RankRecord, replay_step, split_step
from hpnb.lesson.programs.vit_tensor import ExclusiveRecorder
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Action, Schedule, schedules
from hpnb.pipeline_parallel.executor import contended
from hpnb.record.recorder import recording
from hpnb.theory import LayerCost, LayoutTask, Link

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_LEAST_BYTES = 1024.0  # smaller messages are counts and losses
_MIN_BUCKETS = 4  # of a gradient: a single bucket could not overlap with anything


@dataclass(frozen=True)
class RankRates:
    """What one rank alone takes, while the others do the same: see `hpnb.theory.LayoutTask`."""

    block: LayerCost
    ends: LayerCost
    parameter: float
    matmul: float


@dataclass(frozen=True)
class LayoutRun:
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


def measure_rates(size: GPT2Size, few: int, many: int, dtype: torch.dtype) -> RankRates:
    """Times of layers for `few` rows and for `many`, and a line through the two. Every rank calls it."""
    times = [time_layers(size, rows, dtype, repeats=3) for rows in (few, many)]
    block = _line(few, many, [layers.block for layers in times])
    ends = _line(few, many, [layers.costs[0] + layers.costs[-1] for layers in times])
    return RankRates(block, ends, _optimizer_seconds(size, dtype), _matmul_rate(size, many, dtype))


def _line(few: int, many: int, took: Sequence[float]) -> LayerCost:
    row = max((took[1] - took[0]) / (many - few), took[1] / many * 0.5)  # noise must not make it negative
    return LayerCost(max(0.0, took[0] - row * few), row)


def _optimizer_seconds(size: GPT2Size, dtype: torch.dtype) -> float:
    """Seconds of AdamW for each parameter of one block."""
    block = timing_gpt2(size, dtype).transformer.h[0]
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True)
    if dtype.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    took = [_timed(optimizer.step) for _ in range(6)][1:]
    return statistics.median(took) / sum(int(p.numel()) for p in block.parameters())


def _matmul_rate(size: GPT2Size, rows: int, dtype: torch.dtype) -> float:
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


def layout_task(size: GPT2Size, rows: int, dtype: torch.dtype, rates: RankRates, link: Link) -> LayoutTask:
    """For `hpnb.theory.layout_parts` and `layout_memory`."""
    block = size.block(1, None, dtype.itemsize)
    return LayoutTask(
        block, size.layers, size.vocab_size, rows, rates.block, rates.ends, rates.parameter, link,
        buckets=_MIN_BUCKETS,
    )  # fmt: skip


# --- a layout, on a rank -------------------------------------------------------------------------------


class PluginWithSchedule(HybridParallelPlugin):
    """A plugin whose pipeline runs a schedule from elsewhere, such as the reader's."""

    reader_schedule: Schedule | None = None

    def schedule(self, microbatches: int) -> Schedule:
        if self.reader_schedule is not None and self.reader_schedule.microbatches == microbatches:
            return self.reader_schedule
        return super().schedule(microbatches)


def _record_rank(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    layout: ParallelLayout,
    schedule: Schedule | None,
    repeats: int,
) -> RankRecord:
    gc.collect()  # what a layout before has built may still be there
    plugin = PluginWithSchedule(
        tp_size=layout.tp, pp_size=layout.pp, zero_stage=layout.zero_stage, pp_style=layout.schedule,
        precision=_PRECISIONS[dtype], num_microbatches=layout.num_microbatches,
        ddp_bucket_cap_mb=_bucket_mb(size, dtype, layout), seed=0,
    )  # fmt: skip
    plugin.reader_schedule = schedule
    booster = hpnb.Booster(plugin=plugin)
    model: Any = timing_gpt2(size, dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    batch = random_tokens(size, rows // layout.dp)
    record = RankRecord(plugin.mesh.layout.coordinates(hpnb.rank()))

    def step(recorder: Any = None) -> float:
        """One step; CPU seconds of the optimizer."""
        optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), boosted, None, optimizer, record=recorder is not None)
        began = time.thread_time()
        if recorder is None:
            optimizer.step()
        else:
            with recorder.span("optimizer"):
                optimizer.step()
        return time.thread_time() - began

    for _ in range(warmup_steps()):
        step()
    for _ in range(repeats):
        recorder = ExclusiveRecorder()
        with recording(recorder):
            cpu_seconds = step(recorder)
        if contended():
            events = boosted.last_step.timeline.events
            record.actions.append({Action(e.stage, e.op, e.microbatch): e.duration for e in events})
            record.optimizer.append(cpu_seconds)
        else:
            record.timelines.append(recorder.gather().shifted())
    with hpnb.record.memory(boosted, optimizer) as memory, hpnb.record.traffic() as traffic:
        step()
    record.messages = [m for m in traffic.messages if m.bytes >= _LEAST_BYTES]
    record.peak = memory.profile().peak
    return record


def _bucket_mb(size: GPT2Size, dtype: torch.dtype, layout: ParallelLayout) -> float:
    gradient = dtype.itemsize * size.parameters() / layout.pp / layout.tp
    return min(25.0, gradient / _MIN_BUCKETS / 2**20)


# --- a layout, on all ranks ----------------------------------------------------------------------------


def run_layout(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    layout: ParallelLayout,
    link: Link,
    schedule: Schedule | None = None,
    repeats: int = 2,
) -> LayoutRun:
    """Train a few steps of `rows` rows on one layout.

    Args:
        link: on which messages travel where the step is replayed.
        schedule: of layout.pp ranks and the layout's number of microbatches, instead of the library's.
    """
    records: list[RankRecord] = pool.run(_record_rank, size, rows, dtype, layout, schedule, repeats)
    sent = sum(m.bytes for record in records for m in record.messages) / len(records)
    peak = max(record.peak for record in records)
    if records[0].timelines:
        tl = sorted(records[0].timelines, key=lambda tl: tl.makespan)[(repeats - 1) // 2]
        return LayoutRun(layout, split_step(tl), sent, peak, tl.source)
    microbatches = layout.count_microbatches(rows // layout.dp)
    ran = schedule or schedules.make(layout.schedule, layout.pp, microbatches)
    parts = replay_step(records, layout, ran, link)
    return LayoutRun(layout, parts, sent, peak, "replayed from measured CPU time")
