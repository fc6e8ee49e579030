"""What notebook 05 runs on its ranks: a GPT-2 whose states are dealt out, weighed and timed.

    model, batch = shards.gpt2_and_batch(SIZE, 2, torch.float32)           on a rank
    pool.run(shards.weighed, SIZE, 2, torch.float32, shards.Way(3))[0]     seconds, and who holds memory
    shards.predicted(SIZE, 2, torch.float32, shards.Way(3), 2)             the same by `theory.step_memory`

Tokens are drawn: bytes and seconds hardly ask which. Nothing here imports matplotlib before it draws.
"""

from __future__ import annotations

import gc
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
from hpnb.mesh import Axis, Layout, Mesh
from hpnb.models import GPT2Size, anatomy, roles
from hpnb.record import Event, MemoryProfile, MemoryRecorder, Timeline
from hpnb.theory import StepMemory

_WARM = {"cpu": 1, "cuda": 3}  # steps before the first that counts


@dataclass(frozen=True)
class Way:
    """How states and activations are kept.

    Attributes:
        stage: of ZeRO; 0 is plain data parallelism.
        again: blocks whose forward is computed again in the backward; -1 is all of them.
        offload: the shares lie in the host's memory (stage 1 or higher, on a GPU).
    """

    stage: int = 0
    again: int = 0
    offload: bool = False

    def __str__(self) -> str:
        words = [f"stage {self.stage}"]
        if self.again:
            words.append("again" if self.again < 0 else f"{self.again} again")
        return " + ".join([*words, *(["offload"] if self.offload else [])])

    def blocks(self, size: GPT2Size) -> int:
        """How many blocks are computed again."""
        return size.layers if self.again < 0 else self.again


@dataclass(frozen=True)
class Weighed:
    """One way on one rank: seconds of a step, and its memory."""

    seconds: float
    profile: MemoryProfile


# --- on a rank -------------------------------------------------------------------------------------


def gpt2_and_batch(size: GPT2Size, rows: int, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """A GPT-2 on this rank's device, drawn there, and tokens; for timing and weighing."""
    where = hpnb.device()
    gc.collect()  # hooks tie replicas into cycles: what an earlier cell built may still be there
    model: Any = hpnb.models.gpt2(size, dtype=dtype, device="meta").to_empty(device=where)
    model.tie_weights()  # a meta tensor that is given memory is a new one
    model.loss_type = "ForCausalLM"  # else transformers says on stderr that it guesses this
    known = roles(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            role = known[name]
            if role.bias or role.kind == "norm":
                parameter.fill_(0.0 if role.bias else 1.0)
            else:
                parameter.normal_(std=0.02)
    ids = torch.randint(size.vocab_size, (rows, size.length), device=where)
    return model, {"input_ids": ids, "labels": ids}


def compute_again(model: nn.Module, count: int) -> None:
    """Let the first `count` blocks drop what their forward made, and make it again in the backward."""
    for part in anatomy(model).blocks[:count]:
        plain = part.module.forward
        part.module.forward = partial(checkpoint, plain, use_reentrant=False)


def build(size: GPT2Size, rows: int, dtype: torch.dtype, way: Way, bucket_mb: float) -> Built:
    """Every rank calls it."""
    axis = _axis()
    model, batch = gpt2_and_batch(size, rows, dtype)
    compute_again(model, way.blocks(size))
    adam: dict[str, Any] = {"lr": 1e-4, "fused": True}
    wrapped: nn.Module = model
    optimizer: torch.optim.Optimizer
    if way.stage in (1, 2):
        optimizer = hpnb.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, axis, stage=way.stage, bucket_mb=bucket_mb,
            cpu_offload=way.offload, **adam,
        )  # fmt: skip
    else:
        if way.stage == 3:
            wrapped = hpnb.fully_shard(model, axis, cpu_offload=way.offload)
        else:
            wrapped = hpnb.DataParallel(model, axis, bucket_mb)
        optimizer = torch.optim.AdamW(model.parameters(), **adam)
        if dtype.itemsize == 2:
            hpnb.precision.Masters(optimizer)

    return Built(model, wrapped, optimizer, batch)


def by_itself(size: GPT2Size, rows: int, dtype: torch.dtype) -> Built:
    """In training on this rank alone: nothing is sent."""
    model, batch = gpt2_and_batch(size, rows, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if dtype.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    return Built(model, model, optimizer, batch)


@dataclass(frozen=True)
class Built:
    """A model in training on this rank; `wrapped` is what is called."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Mapping[str, torch.Tensor]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.wrapped(**self.batch).loss.backward()
        self.optimizer.step()

    def recording(self, budget: float | None = None) -> AbstractContextManager[MemoryRecorder]:
        return hpnb.record.memory(self.model, self.optimizer, hpnb.device(), budget)


def weighed(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    way: Way,
    bucket_mb: float,
    repeats: int = 3,
) -> Weighed:
    """Seconds of a step, the median, and its memory. Every rank calls it.

    Args:
        repeats: steps that are timed, after the first ones.
    """
    built = build(size, rows, dtype, way, bucket_mb)
    took = []
    for _ in range(_WARM[hpnb.device().type] + repeats if repeats else 1):
        with hpnb.record.timeline() as recorder, recorder.span():
            built.step()
        took.append(recorder.gather().makespan)
    with built.recording() as watcher:
        built.step()
    return Weighed(statistics.median(took[-repeats:]) if repeats else 0.0, watcher.profile())


def fits(size: GPT2Size, rows: int, dtype: torch.dtype, way: Way, bucket_mb: float, budget: float) -> bool:
    """Whether a second step stays within `budget` bytes: all states are there. Every rank calls it.

    It is not stopped where it does not: peaks of GPUs differ a little, and who stops leaves others waiting.
    """
    return weighed(size, rows, dtype, way, bucket_mb, repeats=0).profile.peak <= budget


def alone(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 5) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer of a rank that sends nothing; the slowest rank's medians.

    Every rank calls it, so that they share cores and memory as they will later.
    """
    built = by_itself(size, rows, dtype)
    took: dict[str, list[float]] = {"F": [], "B": [], "compute": []}
    for _ in range(_WARM[hpnb.device().type] + repeats):
        with hpnb.record.timeline() as recorder:
            with recorder.span("F"):
                loss = built.model(**built.batch).loss
            with recorder.span("B"):
                loss.backward()
            with recorder.span():
                built.optimizer.step()
            built.optimizer.zero_grad()
        events = recorder.gather().events
        for op, times in took.items():
            times.append(max(e.duration for e in events if e.op == op))
    forward, backward, step = (statistics.median(times[-repeats:]) for times in took.values())
    return forward, backward, step


def _axis() -> Axis:
    return Mesh(Layout(dp=hpnb.world_size())).dp


# --- predicted -------------------------------------------------------------------------------------


def predicted(
    size: GPT2Size, rows: int, dtype: torch.dtype, way: Way, ranks: int, bucket_mb: float = 25.0
) -> StepMemory:
    """What a step holds at its fullest on each of `ranks` ranks, by `theory.step_memory`."""
    return theory.step_memory(
        size.block(rows, None, dtype.itemsize), size.layers, size.vocab_size, size.length, ranks, way.stage,
        recompute=way.blocks(size), offload=way.offload, bucket_bytes=bucket_mb * 2**20,
    )  # fmt: skip


def predicted_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    way: Way,
    card: MachineCard,
    base: tuple[float, float, float],
    bucket_mb: float,
    link: float | None = None,
) -> Mapping[str, float]:
    """{part: seconds} of a step, from what one rank alone takes and the card's link.

    Args:
        base: what `alone` gave.
        link: bytes/s to the host, for what is offloaded.
    """
    block = dtype.itemsize * size.block().parameters
    return theory.shard_seconds(
        *base,
        block_bytes=block,
        root_bytes=dtype.itemsize * size.parameters() - size.layers * block,
        layers=size.layers,
        ranks=card.ranks,
        stage=way.stage,
        link=card.link,
        recompute=way.blocks(size),
        bucket_bytes=bucket_mb * 2**20,
        host_bandwidth=link if way.offload else None,
        host_seconds=28.0 * size.parameters() / HOST_RATE,
    )


def gather_timeline(found: theory.GatherTimeline, uses: Sequence[int], ranks: int) -> Timeline:
    """A simulated step of stage 3 as one of its ranks has it: computing above gathers."""
    half, group = len(uses) // 2, tuple(range(ranks))
    spans = zip(uses, found.starts, found.ends, strict=True)
    events = [Event(0, u, "F" if k < half else "B", -1, a, b) for k, (u, a, b) in enumerate(spans)]
    events += [Event(0, u, "all_gather", -1, a, b, "dp", 0.0, group) for u, a, b in found.gathers]
    return Timeline(tuple(events), "simulated")


HOST_RATE = 100e9  # bytes/s of a host's memory, of which Adam moves 28 a parameter


def largest(
    size: GPT2Size, rows: int, dtype: torch.dtype, way: Way, ranks: int, bucket_mb: float, budget: float
) -> int:
    """The most blocks of this width that are predicted to fit."""
    count = 0
    while predicted(replace(size, layers=count + 1), rows, dtype, way, ranks, bucket_mb).peak <= budget:
        count += 1
    return count


def largest_found(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    way: Way,
    bucket_mb: float,
    budget: float,
    start: int,
) -> int:
    """The most blocks that do fit: tried from `start` upwards or downwards."""

    def able(layers: int) -> bool:
        made = replace(size, layers=layers)
        return all(pool.run(fits, made, rows, dtype, way, bucket_mb, budget))

    count = max(start, 1)
    if able(count):
        while able(count + 1):
            count += 1
        return count
    while count > 1 and not able(count - 1):
        count -= 1
    return count - 1
