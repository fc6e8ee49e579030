"""What notebook 05 measures on its ranks: steps of a GPT-2 under each ZeRO stage, in seconds and bytes.

    program = gpt2_zero.build_program(SIZE, 2, torch.float32, ZeroConfig(3))       on a rank
    runs = gpt2_zero.measure_in_turn(pool, SIZE, 2, torch.float32, configs, 25.0)
    gpt2_zero.predict_memory(SIZE, 2, torch.float32, ZeroConfig(3), ranks=2)       by `theory.step_memory`

Tokens are random, because bytes and seconds hardly depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpnb
from hpnb import theory
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.device_timing import Batch, all_ranks, random_gpt2, random_tokens, warmup_steps
from hpnb.mesh import Axis
from hpnb.models import GPT2Size, anatomy
from hpnb.record import Event, MemoryProfile, MemoryRecorder, Timeline
from hpnb.theory import REPLAY_LINK, Link, StepMemory

CPU_MEMORY_RATE = 100e9  # bytes/s, of which Adam moves 28 a parameter
_PHASES = {"F": "forward", "B": "backward", "update": "update"}


@dataclass(frozen=True)
class ZeroConfig:
    """How states and activations are kept.

    Attributes:
        stage: of ZeRO; 0 is plain data parallelism.
        recompute: blocks that are recomputed in the backward; -1 is all of them.
        offload: shards are in CPU memory (ZeRO stage 1 or higher, on a GPU).
    """

    stage: int = 0
    recompute: int = 0
    offload: bool = False

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}"]
        if self.recompute:
            words.append("recompute" if self.recompute < 0 else f"recompute {self.recompute}")
        return " + ".join([*words, *(["offload"] if self.offload else [])])

    def recomputed_blocks(self, size: GPT2Size) -> int:
        return size.layers if self.recompute < 0 else self.recompute


@dataclass(frozen=True)
class StepMeasurement:
    """One configuration on one rank.

    Attributes:
        steps: the timed steps, the fastest first, each as seconds by part: "forward", "backward" and "update"
            compute; "exposed" and "exposed after the update" are communication that nothing overlaps with.
        profile: the memory of a step, if it was recorded.
        source: of the seconds, "measured"; or "replayed" where ranks share a GPU: then computing is measured
            by turns, and communication is predicted for `theory.REPLAY_LINK`.
    """

    steps: tuple[Mapping[str, float], ...]
    profile: MemoryProfile
    source: str = "measured"

    @property
    def parts(self) -> Mapping[str, float]:
        """Of the median step; of an even number, the faster of the middle two."""
        return self.steps[(len(self.steps) - 1) // 2]

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Of the fastest, the median and the slowest step."""
        fastest, middle, slowest = (
            sum(step.values()) for step in (self.steps[0], self.parts, self.steps[-1])
        )
        return fastest, middle, slowest

    def joined(self, other: StepMeasurement) -> StepMeasurement:
        """This measurement with the steps of another round."""
        return replace(self, steps=_fastest_first([*self.steps, *other.steps]))


def _fastest_first(steps: Sequence[Mapping[str, float]]) -> tuple[Mapping[str, float], ...]:
    return tuple(sorted(steps, key=lambda parts: sum(parts.values())))


# --- on a rank -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingProgram:
    """A model in training on this rank; `wrapped` is what is called.

    In float16 the loss is scaled, and ranks of `axes` that find an overflow skip the update together.
    """

    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    scaler: hpnb.precision.LossScaler | None = None
    axes: tuple[Axis, ...] = ()

    def step(self) -> None:
        """Forward, backward and update."""
        self.optimizer.zero_grad()
        self.backward(self.wrapped(**self.batch).loss)
        self.update()

    def step_with_outputs(self) -> Any:
        """A step that returns the model's outputs, logits included."""
        self.optimizer.zero_grad()
        outputs = self.wrapped(**self.batch)
        self.backward(outputs.loss)
        self.update()
        return outputs

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            hpnb.precision.step(self.optimizer, self.axes, scaler=self.scaler)

    def recording(self, budget: float | None = None) -> AbstractContextManager[MemoryRecorder]:
        return hpnb.record.memory(self.model, self.optimizer, hpnb.device(), budget)


def seeded_gpt2(size: GPT2Size, dtype: torch.dtype = torch.float32) -> Any:
    """A GPT-2 on this rank's device, with the same weights on every rank."""
    model = hpnb.models.gpt2(size, dtype=dtype, device=hpnb.device())
    model.loss_type = "ForCausalLM"  # else transformers says on stderr that it guesses this
    return model


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
    model, batch = random_gpt2(size, dtype), random_tokens(size, rows)
    recompute_blocks(model, config.recomputed_blocks(size))
    adam: dict[str, Any] = {"lr": 1e-4, "fused": True}
    scaler = _scaler(dtype)
    if config.stage in (1, 2):
        optimizer: torch.optim.Optimizer = hpnb.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, axis, stage=config.stage, bucket_mb=bucket_mb,
            cpu_offload=config.offload, **adam,
        )  # fmt: skip
        return TrainingProgram(model, model, optimizer, batch, scaler, (axis,))
    if config.stage == 3:
        wrapped: nn.Module = hpnb.fully_shard(model, axis, cpu_offload=config.offload)
    else:
        wrapped = hpnb.DataParallel(model, axis, bucket_mb)
    return TrainingProgram(model, wrapped, adamw(model, dtype), batch, scaler, (axis,))


def serial_program(size: GPT2Size, rows: int, dtype: torch.dtype) -> TrainingProgram:
    """The model on this rank alone: nothing is sent."""
    model = random_gpt2(size, dtype)
    return TrainingProgram(model, model, adamw(model, dtype), random_tokens(size, rows), _scaler(dtype))


def _scaler(dtype: torch.dtype) -> hpnb.precision.LossScaler | None:
    return hpnb.precision.LossScaler() if dtype == torch.float16 else None


def adamw(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    """AdamW; 16-bit weights get float32 master weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if dtype.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    return optimizer


def measure_step(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    config: ZeroConfig,
    bucket_mb: float,
    repeats: int = 2,
    memory: bool = True,
) -> StepMeasurement:
    """Seconds of some steps, and the memory of another. Every rank calls it.

    Args:
        repeats: steps that are timed, after the warm-up; 0 records memory alone.
        memory: whether memory is recorded.
    """
    program = build_program(size, rows, dtype, config, bucket_mb)
    if not repeats:
        program.step()
    steps = time_steps(program, repeats) if repeats else []
    profile = MemoryProfile(())
    if memory:
        with program.recording() as recorder:
            program.step()
        profile = recorder.profile()
    if not steps:
        return StepMeasurement((), profile)
    source = "replayed" if steps[0].source == "measured by turns" else "measured"
    parts = [step_parts(step) for step in steps]
    if source == "replayed":
        parts = [_with_communication(one, size, dtype, config, bucket_mb) for one in parts]
    return StepMeasurement(_fastest_first(parts), profile, source)


def measure_in_turn(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    configs: Sequence[ZeroConfig],
    bucket_mb: float,
    rounds: int = 2,
) -> dict[ZeroConfig, StepMeasurement]:
    """Measure the configurations one after the other, in several rounds, so that a busy moment hits several.

    Memory is the same each time, and recorded in the first round.
    """

    def measure(config: ZeroConfig, first: bool) -> StepMeasurement:
        return pool.run(measure_step, size, rows, dtype, config, bucket_mb, memory=first)[0]

    runs = {config: measure(config, True) for config in configs}
    for _ in range(rounds - 1):
        runs = {config: run.joined(measure(config, False)) for config, run in runs.items()}
    return runs


def time_steps(program: TrainingProgram, repeats: int) -> list[Timeline]:
    """Steps after the warm-up, each with its forward "F", backward "B" and "update"."""
    steps = []
    for _ in range(warmup_steps() + repeats):
        program.optimizer.zero_grad()
        with hpnb.record.timeline() as recorder:
            with recorder.span("F"):
                loss = program.wrapped(**program.batch).loss
            with recorder.span("B"):
                program.backward(loss)
            with recorder.span("update"):
                program.update()
        steps.append(recorder.gather())
    return steps[-repeats:]


def step_parts(step: Timeline) -> dict[str, float]:
    """The parts of a `StepMeasurement`, of the slowest rank. By turns there is no exposed communication."""
    by_rank = []
    for rank in step.ranks:
        events = {op: [e for e in step.by_rank[rank] if e.op == op] for op in _PHASES}
        parts = {name: sum(e.duration for e in events[op]) for op, name in _PHASES.items()}
        if step.source != "measured by turns":
            start, end = (f(e.end if f is max else e.start for e in events["update"]) for f in (min, max))
            after = end - start - parts["update"]
            before = start - min(e.start for e in events["F"]) - parts["forward"] - parts["backward"]
            parts |= {"exposed": max(0.0, before), "exposed after the update": max(0.0, after)}
        by_rank.append(parts)
    return max(by_rank, key=lambda parts: sum(parts.values()))


def _with_communication(
    parts: Mapping[str, float], size: GPT2Size, dtype: torch.dtype, config: ZeroConfig, bucket_mb: float
) -> dict[str, float]:
    """Computing measured by turns, and the exposed communication that theory predicts beside it."""
    exposed = communication_parts(
        size, dtype, config, (parts["forward"], parts["backward"]), hpnb.world_size(), REPLAY_LINK, bucket_mb
    )
    return {**parts, **exposed}


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
    """Seconds of forward, backward and update of a rank that sends nothing, each the median of its repeats.

    Every rank calls it, so that they share cores and memory as they will later.
    """
    steps = [step_parts(step) for step in time_steps(serial_program(size, rows, dtype), repeats)]
    forward, backward, update = (median(s[name] for s in steps) for name in _PHASES.values())
    return forward, backward, update


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


def _step_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    alone: tuple[float, float, float],
    ranks: int,
    link: Link,
    bucket_mb: float,
    **options: Any,
) -> Mapping[str, float]:
    block = dtype.itemsize * size.block().parameters
    return theory.zero_step_seconds(
        *alone, block_bytes=block, root_bytes=dtype.itemsize * size.parameters() - size.layers * block,
        layers=size.layers, ranks=ranks, stage=config.stage, link=link, bucket_bytes=bucket_mb * 2**20,
        **options,
    )  # fmt: skip


def communication_parts(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    alone: tuple[float, float],
    ranks: int,
    link: Link,
    bucket_mb: float,
    overlap: bool = True,
) -> dict[str, float]:
    """{"exposed": .., "exposed after the update": ..} of a step, predicted for `link`.

    Args:
        alone: seconds of forward and backward, recomputation included.
        overlap: see `theory.zero_step_seconds`.
    """
    seconds = _step_seconds(size, dtype, config, (*alone, 0.0), ranks, link, bucket_mb, overlap=overlap)
    nbytes = dtype.itemsize * size.parameters()
    after = theory.seconds("all_gather", nbytes, ranks, link) if config.stage in (1, 2) else 0.0
    return {"exposed": max(0.0, seconds["exposed"] - after), "exposed after the update": after}


def predict_parts(
    size: GPT2Size,
    dtype: torch.dtype,
    config: ZeroConfig,
    card: MachineCard,
    alone: tuple[float, float, float],
    bucket_mb: float,
    cpu_link: float = 25e9,
) -> dict[str, float]:
    """The parts of a `StepMeasurement` from what one rank alone takes and the card's link.

    Args:
        alone: what `time_serial_step` returned.
        cpu_link: bytes/s between GPU and CPU, for what is offloaded.
    """
    forward, backward, update = alone
    backward += forward * config.recomputed_blocks(size) / size.layers
    share = 1 / card.ranks if config.stage else 1.0
    exposed = communication_parts(
        size, dtype, config, (forward, backward), card.ranks, card.link, bucket_mb, card.device == "cuda"
    )
    parts = {"forward": forward, "backward": backward, "update": update * share, **exposed}
    if config.offload:
        moved = dtype.itemsize * size.parameters() * share * (4 if config.stage == 3 else 2)
        parts["update"] = 28.0 * size.parameters() * share / CPU_MEMORY_RATE
        parts["exposed"] += moved / cpu_link
    return parts


def exposed_seconds(
    size: GPT2Size,
    dtype: torch.dtype,
    stage: int,
    alone: tuple[float, float, float],
    ranks: int,
    bandwidth: float,
    bucket_mb: float,
) -> float:
    """Exposed communication of a ZeRO stage on a link of `bandwidth` bytes/s, whose latency is left out."""
    link = Link(0.0, bandwidth)
    return sum(
        communication_parts(size, dtype, ZeroConfig(stage), alone[:2], ranks, link, bucket_mb).values()
    )


def exposed_by_bandwidth(
    size: GPT2Size, rows: int, stage: int, ranks: int, bandwidths: Sequence[float], flops: float = 400e12
) -> list[float]:
    """`exposed_seconds` in bfloat16 for each bandwidth, on GPUs that compute `flops` a second.

    A backward takes twice its forward, and buckets have 25 MB.
    """
    forward = size.layers * size.block(rows).forward_flops / flops
    alone = forward, 2 * forward, 0.0
    return [exposed_seconds(size, torch.bfloat16, stage, alone, ranks, b, 25.0) for b in bandwidths]


def gather_timeline(gathers: theory.GatherTimeline, uses: Sequence[int], ranks: int) -> Timeline:
    """A simulated step of ZeRO stage 3 on one of its ranks: computing above all-gathers."""
    half, group = len(uses) // 2, tuple(range(ranks))
    spans = zip(uses, gathers.starts, gathers.ends, strict=True)
    events = [Event(0, u, "F" if k < half else "B", -1, a, b) for k, (u, a, b) in enumerate(spans)]
    events += [Event(0, u, "all_gather", -1, a, b, "dp", 0.0, group) for u, a, b in gathers.gathers]
    return Timeline(tuple(events), "simulated")


# --- the largest model -----------------------------------------------------------------------------


def deepest_models(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    configs: Sequence[ZeroConfig],
    bucket_mb: float,
    budget: float,
) -> tuple[dict[ZeroConfig, int], dict[ZeroConfig, int]]:
    """({configuration: the most blocks of this width that are predicted to fit}, {..: that do fit}).

    Depths are tried from the predicted one upwards or downwards.
    """
    predicted, measured = {}, {}
    for config in configs:

        def peak(layers: int, config: ZeroConfig = config) -> float:
            shape = replace(size, layers=layers)
            return predict_memory(shape, rows, dtype, config, pool.choice.ranks, bucket_mb).peak

        def fits(layers: int, config: ZeroConfig = config) -> bool:
            shape = replace(size, layers=layers)
            return all(pool.run(fits_budget, shape, rows, dtype, config, bucket_mb, budget))

        predicted[config] = next(count for count in itertools.count() if peak(count + 1) > budget)
        measured[config] = _last_that_fits(fits, max(predicted[config], 1))
    return predicted, measured


def _last_that_fits(fits: Callable[[int], bool], start: int) -> int:
    count = start
    if fits(count):
        while fits(count + 1):
            count += 1
        return count
    while count > 1 and not fits(count - 1):
        count -= 1
    return count - 1
