"""What notebook 08 runs on its ranks: one GPT-2 on many layouts, and where each millisecond of a step went.

    rates = pool.run(gpt2_hybrid.measure_rates, SIZE, 2, 4, torch.float32)[0]     what one rank alone takes
    task = gpt2_hybrid.layout_task(SIZE, 16, torch.float32, rates, link)          for predictions
    run = gpt2_hybrid.run_layout(pool, SIZE, 16, torch.float32, layout, link)     a LayoutRun

With a GPU, or a core, for each rank the parts are read off a recorded step (`step_breakdown`). With fewer,
the step is replayed from the time of each action alone and of every message on a link.
"""

# ruff: noqa: E402
from __future__ import annotations

from hpnb.ranks.forkserver import start_ahead

start_ahead("hpnb.hybrid.booster", "hpnb.hybrid.training.trainer")  # imported once for all ranks

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import hpnb
from hpnb import theory
from hpnb.hybrid.model_loss import causal
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.lesson.programs.device_timing import (
    Batch,
    bytes_kept_for_timing,
    random_tokens,
    timing_gpt2,
    warmup_steps,
)
from hpnb.lesson.programs.layer_times import on_busy_cores
from hpnb.lesson.programs.rank_rates import MIN_BUCKETS
from hpnb.lesson.programs.rank_rates import layout_task as layout_task
from hpnb.lesson.programs.rank_rates import measure_rates as measure_rates
from hpnb.lesson.programs.rank_rates import time_undivided as time_undivided
from hpnb.lesson.programs.step_breakdown import RankRecord, replay_step, split_step
from hpnb.lesson.programs.step_timing import median_by, relative_distance
from hpnb.lesson.programs.vit_tensor import ExclusiveRecorder
from hpnb.mesh import Axis, ParallelLayout
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Action, Schedule, full_state_dict, schedules
from hpnb.pipeline_parallel.executor import contended
from hpnb.ranks.gpu_turns import gpu_turns
from hpnb.record import Timeline
from hpnb.record.recorder import recording
from hpnb.theory import Link

_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_LEAST_BYTES = 1024.0  # smaller messages are counts and losses
_FREE = Link(0.0, 1e30)
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True)
class LayoutRun:
    """A training step of all ranks on one layout.

    `bytes` that a rank sends are a mean over the ranks, in messages of 1 kB or more; `peak` is of the fullest
    rank. On a CPU both are recorded by one rank of each stage. Where the step is replayed, messages are
    modelled on `link`.
    """

    layout: ParallelLayout
    records: Sequence[RankRecord]
    schedule: Schedule
    link: Link
    bytes: float
    peak: float

    @property
    def source(self) -> str:
        """ "measured", or "replayed" where ranks share cores or a GPU."""
        return "measured" if self.records[0].timelines else "replayed"

    @property
    def parts(self) -> dict[str, float]:
        """{one of STEP_PARTS: seconds}, mean over the ranks; their sum is the step."""
        return split_step(self.timeline) if self.records[0].timelines else self.parts_on(self.link)

    @property
    def losses(self) -> list[float]:
        """The loss of each step: of the steps that warm up, too."""
        return max((record.losses for record in self.records), key=len)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def seconds_of_repeats(self) -> list[float]:
        """Seconds of each timed step: recorded, or replayed from that step's actions alone."""
        if timelines := self.records[0].timelines:
            return [sum(split_step(tl).values()) for tl in timelines]
        took = []
        for k in range(min(len(record.actions) for record in self.records)):
            step = [replace(r, actions=r.actions[k : k + 1], optimizer=r.optimizer[k : k + 1])
                    for r in self.records]  # fmt: skip
            took.append(sum(replay_step(step, self.layout, self.schedule, self.link)[0].values()))
        return took

    @property
    def timeline(self) -> Timeline:
        """The step with the median makespan, as it was recorded; or the computing of one pipeline, replayed
        from the median of each action."""
        if timelines := self.records[0].timelines:
            return median_by(timelines, lambda tl: tl.makespan)
        return replay_step(self.records, self.layout, self.schedule, self.link)[1]

    @property
    def collective_seconds(self) -> float:
        """CPU time that a step's collectives of tp take of their rank, mean over the ranks; 0 where computing
        is not CPU time."""
        return statistics.mean(statistics.median(r.collectives or [0.0]) for r in self.records)

    @property
    def forward_share(self) -> float:
        """Of a step's computing, messages of tp included, what forwards take; 0 to 1."""
        took = {op: sum(e.duration for e in self.timeline.events if e.op == op) for op in "FIWB"}
        return took["F"] / sum(took.values())

    def parts_on(self, link: Link) -> dict[str, float]:
        """The parts of the same step with another link: replayed."""
        if self.records[0].timelines:
            return split_step(theory.replay(self.timeline, link))
        return replay_step(self.records, self.layout, self.schedule, link)[0]


class PluginWithSchedule(HybridParallelPlugin):
    """A plugin whose pipeline runs a schedule from elsewhere, such as the reader's."""

    reader_schedule: Schedule | None = None

    def schedule(self, microbatches: int) -> Schedule:
        if self.reader_schedule is not None and self.reader_schedule.microbatches == microbatches:
            return self.reader_schedule
        return super().schedule(microbatches)


def boost_layout(
    layout: ParallelLayout, model: Any, optimizer: Any, schedule: Schedule | None = None
) -> tuple[hpnb.Booster, Any, Any]:
    """(booster, model, optimizer) that train on `layout` in the model's dtype. Every rank calls it."""
    weight = next(model.parameters())
    gradient = weight.itemsize * sum(p.numel() for p in model.parameters()) / layout.pp / layout.tp
    plugin = PluginWithSchedule(
        tp_size=layout.tp, pp_size=layout.pp, cp_size=layout.cp, context_parallel=layout.context_parallel,
        zero_stage=layout.zero_stage, pp_style=layout.schedule, num_model_chunks=layout.chunks,
        num_microbatches=layout.num_microbatches,
        activation_checkpointing=layout.recomputation, precision=_PRECISIONS[weight.dtype], seed=0,
        enable_sequence_parallelism=layout.sequence_parallel,
        ddp_bucket_cap_mb=min(25.0, gradient / MIN_BUCKETS / 2**20),
        zero_bucket_size_in_m=min(12.0, gradient / weight.itemsize / MIN_BUCKETS / 1e6),
    )  # fmt: skip
    plugin.reader_schedule = schedule
    booster = hpnb.Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    return booster, boosted, optimizer


def _build(
    size: GPT2Size, dtype: torch.dtype, layout: ParallelLayout, schedule: Schedule | None
) -> tuple[hpnb.Booster, Any, Any]:
    """(booster, model, optimizer) of a new GPT-2. A rank keeps nothing of other ranks' stages."""
    model = timing_gpt2(size, dtype)
    adam: Any = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    return boost_layout(layout, model, adam, schedule)


def _record_rank(
    size: GPT2Size,
    samples: int,
    dtype: torch.dtype,
    layout: ParallelLayout,
    schedule: Schedule | None,
    repeats: int,
    batches: Sequence[Batch],
) -> RankRecord:
    gc.collect()  # what earlier layouts have left is not this one's memory
    on_cpu = hpnb.device().type == "cpu"
    occupied = bytes_kept_for_timing(size, dtype) if on_cpu else torch.cuda.memory_allocated()
    record = RankRecord({})
    by_action = contended() or gpu_turns() is not None  # actions are measured one by one, and then replayed

    def train_step(recorder: Any = None) -> None:
        optimizer.zero_grad()
        result = booster.execute_pipeline(data, boosted, None, optimizer, record=recorder is not None)
        record.losses += [] if result["loss"] is None else [float(result["loss"])]
        if recorder is None:
            optimizer.step()
        elif by_action:
            record.optimizer.append(_seconds_of_turn(optimizer.step))
        else:
            with recorder.span("optimizer"):
                optimizer.step()

    began = time.perf_counter()
    place = layout.mesh_layout.coordinates(hpnb.rank())
    # On a CPU only what is allocated inside counts, so gradient buckets have to be made inside, too. There
    # recording doubles a step, so one rank of each stage records: the first of dp, cp and tp, whose shards
    # are the largest, and who sends what the others send.
    records = not on_cpu or place["dp"] == place.get("cp", 0) == place["tp"] == 0
    with hpnb.record.memory([]) if records else nullcontext() as memory:
        booster, boosted, optimizer = _build(size, dtype, layout, schedule)
        gc.collect()  # other ranks' stages
        mesh = booster.plugin.mesh
        record.coordinates = mesh.layout.coordinates(hpnb.rank())
        *parts, random = (
            {name: x.chunk(layout.dp)[mesh.dp.rank] for name, x in batch.items()}
            for batch in (*batches, random_tokens(size, samples))
        )
        data = chain(parts, repeat(random))
        with hpnb.record.traffic() if records else nullcontext() as traffic:
            train_step()
        built = time.perf_counter() - began
        train_step()
    for _ in range(warmup_steps() - 2):  # two have warmed up
        train_step()
    if traffic is not None:
        record.messages = [m for m in traffic.messages if m.bytes >= _LEAST_BYTES]
    if memory is not None:
        record.peak = max(s.total for s in memory.profile().samples if s.time >= built) - occupied
    for _ in range(repeats):
        recorder = ExclusiveRecorder()
        with recording(recorder), _timed_collectives(mesh.tp) as spent:
            train_step(recorder)
        if contended():
            record.collectives.append(sum(spent))
        if by_action:
            events = boosted.last_step.replayed(_FREE).events
            record.actions.append({Action(e.stage, e.op, e.microbatch): e.duration for e in events})
        else:
            record.timelines.append(recorder.gather().shifted())
    return record


@contextmanager
def _timed_collectives(axis: Axis) -> Iterator[list[float]]:
    """CPU time of each collective that this rank starts along `axis`; messages of fewer bytes included."""
    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            work = call(*args, **options)
            if any(value is axis.group for value in (*args, *options.values())):
                spent.append(time.thread_time() - began)
            return work

        return run

    with ExitStack() as stack:
        for name in _COLLECTIVES if axis.size > 1 else ():
            stack.enter_context(patch.object(dist, name, timed(getattr(dist, name))))
        yield spent


def _seconds_of_turn(work: Callable[[], Any]) -> float:
    """CPU time, or on a shared GPU the time of a turn."""
    if (turns := gpu_turns()) is not None:
        with turns.turn() as turn:
            work()
        return turn.seconds
    began = time.thread_time()
    work()
    return time.thread_time() - began


def run_layout(
    pool: hpnb.Ranks,
    size: GPT2Size,
    samples: int,
    dtype: torch.dtype,
    layout: ParallelLayout,
    link: Link,
    schedule: Schedule | None = None,
    repeats: int = 3,
    batches: Sequence[Batch] = (),
) -> LayoutRun:
    """Train a few steps of `samples` samples on one layout.

    Args:
        link: on which messages are modelled where the step is replayed.
        schedule: of layout.pp ranks and the layout's number of microbatches, instead of the library's.
        repeats: steps that are timed; two go before them, on a GPU three.
        batches: of all ranks, for the first steps; the others train random tokens, the same on any layout.
    """
    records: list[RankRecord] = pool.run(
        _record_rank, size, samples, dtype, layout, schedule, repeats, batches
    )
    if pool.choice.device == "cpu":  # there one rank of each stage has recorded messages
        of_stage = {record.coordinates["pp"]: record.messages for record in records if record.messages}
        for record in records:
            record.messages = of_stage.get(record.coordinates["pp"], [])
    sent = sum(m.bytes for record in records for m in record.messages) / len(records)
    peak = max(record.peak for record in records)
    v, m = layout.chunks_per_rank, layout.count_microbatches(samples // layout.dp)
    ran = schedule or schedules.make(layout.schedule, layout.pp * v, m, v)
    return LayoutRun(layout, records, ran, link, sent, peak)


def compare_with_library(
    model: Any, layout: ParallelLayout, size: GPT2Size, batch: Batch, steps: int, lr: float
) -> dict[str, dict[str, float]]:
    """{"by hand" | "by Booster": {"weights": relative distance}} from one process's weights, of the shards in
    `model` on all ranks and of Booster's. Booster and one process train `steps` steps of SGD on `batch` here.
    """
    like: dict[str, Any] = {"dtype": next(model.parameters()).dtype, "device": hpnb.device()}
    library = hpnb.models.gpt2(size, **like)
    sgd: Any = torch.optim.SGD(library.parameters(), lr)
    booster, boosted, optimizer = boost_layout(layout, library, sgd)
    mesh = booster.plugin.mesh
    local = {name: x.chunk(layout.dp)[mesh.dp.rank] for name, x in batch.items()}
    for _ in range(steps):
        optimizer.zero_grad()
        booster.execute_pipeline(iter([local]), boosted, None, optimizer)
        optimizer.step()

    def train_alone() -> dict[str, torch.Tensor]:
        serial = hpnb.models.gpt2(size, **like)
        sgd = torch.optim.SGD(serial.parameters(), lr)
        for _ in range(steps):
            sgd.zero_grad()
            causal(serial(input_ids=batch["input_ids"]), batch["labels"]).backward()
            sgd.step()
        return dict(serial.state_dict())

    serial_weights = on_busy_cores(train_alone)
    by_hand, weights = dict(model.named_parameters(remove_duplicate=False)), {}
    for way in ("by Booster", "by hand"):
        if way == "by hand":
            for name, p in boosted.named_parameters():
                p.data.copy_(by_hand[name])
        full = full_state_dict(boosted.unwrap(), mesh.pp, [mesh.dp, mesh.tp])
        expected = [serial_weights[name] for name in full]
        weights[way] = relative_distance(full.values(), expected)
    return {way: {"weights": weights[way]} for way in ("by hand", "by Booster")}
