"""What notebook 05 runs on its ranks: a GPT-2 whose states are sharded, its memory measured, its steps timed.

    model, batch = gpt2_zero.gpt2_and_batch(SIZE, 2, torch.float32)               on a rank
    pool.run(gpt2_zero.measure_step, SIZE, 2, torch.float32, ZeroConfig(3))[0]     seconds, and memory
    gpt2_zero.predict_memory(SIZE, 2, torch.float32, ZeroConfig(3), 2)             by `theory.step_memory`

Tokens are random, because bytes and seconds hardly depend on them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpnb
from hpnb import theory
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.device_timing import Batch, all_ranks, random_gpt2, random_tokens, warmup_steps
from hpnb.models import GPT2Size, anatomy
from hpnb.record import Event, MemoryProfile, MemoryRecorder, Timeline
from hpnb.theory import StepMemory

HOST_RATE = 100e9  # bytes/s of a host's memory, of which Adam moves 28 a parameter


@dataclass(frozen=True)
class ZeroConfig:
    """How states and activations are kept.

    Attributes:
        stage: of ZeRO; 0 is plain data parallelism.
        again: blocks that are recomputed in the backward; -1 is all of them.
        offload: shards lie in the host's memory (ZeRO stage 1 or higher, on a GPU).
    """

    stage: int = 0
    again: int = 0
    offload: bool = False

    def __str__(self) -> str:
        words = [f"stage {self.stage}"]
        if self.again:
            words.append("again" if self.again < 0 else f"{self.again} again")
        return " + ".join([*words, *(["offload"] if self.offload else [])])

    def recomputed_blocks(self, size: GPT2Size) -> int:
        return size.layers if self.again < 0 else self.again


@dataclass(frozen=True)
class StepMeasurement:
    """One configuration on one rank: seconds of a step, and its memory."""

    seconds: float
    profile: MemoryProfile


# --- on a rank -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingProgram:
    """A model in training on this rank; `wrapped` is what is called."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.wrapped(**self.batch).loss.backward()
        self.optimizer.step()

    def recording(self, budget: float | None = None) -> AbstractContextManager[MemoryRecorder]:
        return hpnb.record.memory(self.model, self.optimizer, hpnb.device(), budget)


def gpt2_and_batch(size: GPT2Size, rows: int, dtype: torch.dtype) -> tuple[Any, Batch]:
    """A GPT-2 on this rank's device, drawn there, and random tokens."""
    return random_gpt2(size, dtype), random_tokens(size, rows)


def recompute_blocks(model: nn.Module, count: int) -> None:
    """Let the first `count` blocks drop their activations, and recompute them in the backward."""
    for part in anatomy(model).blocks[:count]:
        forward = part.module.forward
        part.module.forward = partial(checkpoint, forward, use_reentrant=False)


def build_program(
    size: GPT2Size, rows: int, dtype: torch.dtype, config: ZeroConfig, bucket_mb: float
) -> TrainingProgram:
    """The model of `config`. Every rank calls it."""
    axis = all_ranks("dp")
    model, batch = gpt2_and_batch(size, rows, dtype)
    recompute_blocks(model, config.recomputed_blocks(size))
    adam: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if config.stage in (1, 2):
        optimizer: torch.optim.Optimizer = hpnb.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, axis, stage=config.stage, bucket_mb=bucket_mb,
            cpu_offload=config.offload, **adam,
        )  # fmt: skip
        return TrainingProgram(model, model, optimizer, batch)
    if config.stage == 3:
        wrapped: nn.Module = hpnb.fully_shard(model, axis, cpu_offload=config.offload)
    else:
        wrapped = hpnb.DataParallel(model, axis, bucket_mb)
    return TrainingProgram(model, wrapped, _adamw(model, dtype), batch)


def serial_program(size: GPT2Size, rows: int, dtype: torch.dtype) -> TrainingProgram:
    """The model on this rank alone: nothing is sent."""
    model, batch = gpt2_and_batch(size, rows, dtype)
    return TrainingProgram(model, model, _adamw(model, dtype), batch)


def _adamw(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if dtype.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    return optimizer


def measure_step(
    size: GPT2Size, rows: int, dtype: torch.dtype, config: ZeroConfig, bucket_mb: float, repeats: int = 3
) -> StepMeasurement:
    """Seconds of a step, the median, and its memory. Every rank calls it.

    Args:
        repeats: steps that are timed, after the warm-up.
    """
    program = build_program(size, rows, dtype, config, bucket_mb)
    took = []
    for _ in range(warmup_steps() + repeats if repeats else 1):
        with hpnb.record.timeline() as recorder, recorder.span():
            program.step()
        took.append(recorder.gather().makespan)
    with program.recording() as memory:
        program.step()
    return StepMeasurement(statistics.median(took[-repeats:]) if repeats else 0.0, memory.profile())


def fits_budget(
    size: GPT2Size, rows: int, dtype: torch.dtype, config: ZeroConfig, bucket_mb: float, budget: float
) -> bool:
    """Whether a second step, when all states exist, stays within `budget` bytes. Every rank calls it.

    A step over the budget runs to its end: peaks of GPUs differ a little, and a rank that stopped alone would
    leave the others waiting.
    """
    return measure_step(size, rows, dtype, config, bucket_mb, repeats=0).profile.peak <= budget


def time_serial_step(
    size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 5
) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer of a rank that sends nothing; the slowest rank's medians.

    Every rank calls it, so that they share cores and memory as they will later.
    """
    program = serial_program(size, rows, dtype)
    took: dict[str, list[float]] = {"F": [], "B": [], "compute": []}
    for _ in range(warmup_steps() + repeats):
        with hpnb.record.timeline() as recorder:
            with recorder.span("F"):
                loss = program.model(**program.batch).loss
            with recorder.span("B"):
                loss.backward()
            with recorder.span():
                program.optimizer.step()
            program.optimizer.zero_grad()
        events = recorder.gather().events
        for op, times in took.items():
            times.append(max(e.duration for e in events if e.op == op))
    forward, backward, step = (statistics.median(times[-repeats:]) for times in took.values())
    return forward, backward, step


# --- predicted -------------------------------------------------------------------------------------


def predict_memory(
    size: GPT2Size, rows: int, dtype: torch.dtype, config: ZeroConfig, ranks: int, bucket_mb: float = 25.0
) -> StepMemory:
    """What a step holds at its fullest on each of `ranks` ranks, by `theory.step_memory`."""
    block = size.block(rows, None, dtype.itemsize)
    return theory.step_memory(
        block, size.layers, size.vocab_size, size.length, ranks, config.stage,
        recompute=config.recomputed_blocks(size), offload=config.offload, bucket_bytes=bucket_mb * 2**20,
    )  # fmt: skip


def predict_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    card: MachineCard,
    base: tuple[float, float, float],
    bucket_mb: float,
    link: float | None = None,
) -> Mapping[str, float]:
    """{part: seconds} of a step, from what one rank alone takes and the card's link.

    Args:
        base: what `time_serial_step` returned.
        link: bytes/s to the host, for what is offloaded.
    """
    block = dtype.itemsize * size.block().parameters
    return theory.zero_step_seconds(
        *base,
        block_bytes=block,
        root_bytes=dtype.itemsize * size.parameters() - size.layers * block,
        layers=size.layers,
        ranks=card.ranks,
        stage=config.stage,
        link=card.link,
        recompute=config.recomputed_blocks(size),
        bucket_bytes=bucket_mb * 2**20,
        host_bandwidth=link if config.offload else None,
        host_seconds=28.0 * size.parameters() / HOST_RATE,
    )


def gather_timeline(gathers: theory.GatherTimeline, uses: Sequence[int], ranks: int) -> Timeline:
    """A simulated step of ZeRO stage 3 on one of its ranks: computing above all-gathers."""
    half, group = len(uses) // 2, tuple(range(ranks))
    spans = zip(uses, gathers.starts, gathers.ends, strict=True)
    events = [Event(0, u, "F" if k < half else "B", -1, a, b) for k, (u, a, b) in enumerate(spans)]
    events += [Event(0, u, "all_gather", -1, a, b, "dp", 0.0, group) for u, a, b in gathers.gathers]
    return Timeline(tuple(events), "simulated")


def most_blocks_predicted(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    config: ZeroConfig,
    ranks: int,
    bucket_mb: float,
    budget: float,
) -> int:
    """The most blocks of this width that are predicted to fit."""

    def peak(layers: int) -> float:
        shape = replace(size, layers=layers)
        return predict_memory(shape, rows, dtype, config, ranks, bucket_mb).peak

    return next(count for count in itertools.count() if peak(count + 1) > budget)


def most_blocks_measured(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    config: ZeroConfig,
    bucket_mb: float,
    budget: float,
    start: int,
) -> int:
    """The most blocks that do fit: tried from `start` upwards or downwards."""

    def fits(layers: int) -> bool:
        shape = replace(size, layers=layers)
        return all(pool.run(fits_budget, shape, rows, dtype, config, bucket_mb, budget))

    count = max(start, 1)
    if fits(count):
        while fits(count + 1):
            count += 1
        return count
    while count > 1 and not fits(count - 1):
        count -= 1
    return count - 1
