"""What notebook 05 measures on its ranks: steps of a GPT-2 under each ZeRO stage, in seconds and bytes.

gpt2_zero_predictions.py predicts the same; the page finds its functions here, too. Tokens are random, because
bytes and seconds hardly depend on them.
"""

# ruff: noqa: E402
from __future__ import annotations

from hpnb.ranks.forkserver import start_ahead

start_ahead("hpnb.models.gpt2_model")  # ranks build models; this process needs no transformers for them

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpnb
from hpnb.lesson.programs.device_timing import (
    Batch,
    all_ranks,
    matmul_workspace,
    random_gpt2,
    random_tokens,
    warmup_steps,
)
from hpnb.lesson.programs.gpt2_zero_predictions import BANDWIDTHS as BANDWIDTHS
from hpnb.lesson.programs.gpt2_zero_predictions import ZeroConfig, communication_parts, predict_memory
from hpnb.lesson.programs.gpt2_zero_predictions import exposed_by_bandwidth as exposed_by_bandwidth
from hpnb.lesson.programs.gpt2_zero_predictions import gather_bandwidth as gather_bandwidth
from hpnb.lesson.programs.gpt2_zero_predictions import predict_memories as predict_memories
from hpnb.lesson.programs.gpt2_zero_predictions import predict_parts as predict_parts
from hpnb.lesson.programs.gpt2_zero_predictions import price_of_bytes as price_of_bytes
from hpnb.lesson.programs.gpt2_zero_predictions import record_links as record_links
from hpnb.lesson.programs.gpt2_zero_predictions import record_prices as record_prices
from hpnb.lesson.programs.step_timing import median_by
from hpnb.mesh import Axis
from hpnb.models import GPT2Size
from hpnb.record import MemoryProfile, MemoryRecorder, Timeline
from hpnb.theory import REPLAY_LINK

_PHASES = {"F": "forward", "B": "backward", "update": "update"}


@dataclass(frozen=True)
class StepMeasurement:
    """One configuration on one rank.

    Attributes:
        steps: the timed steps, the fastest first, each as seconds by part: "forward", "backward" and "update"
            compute; "exposed" and "exposed after the update" are communication that nothing overlaps with.
        source: of the seconds, "measured"; or "replayed" where ranks share a GPU: then computing is measured
            by turns, and communication is predicted for `theory.REPLAY_LINK`.
    """

    steps: tuple[Mapping[str, float], ...]
    profile: MemoryProfile
    source: str = "measured"

    @property
    def parts(self) -> Mapping[str, float]:
        """Of the median step."""
        return median_by(self.steps, lambda parts: sum(parts.values()))

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
    for part in hpnb.models.anatomy(model).blocks[:count]:
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
    repeats: int = 3,
    memory: bool = True,
) -> StepMeasurement:
    """Seconds of `repeats` steps after the warm-up, and the memory of another. Every rank calls it."""
    program = build_program(size, rows, dtype, config, bucket_mb)
    steps = time_steps(program, repeats)
    profile = MemoryProfile(())
    if memory:
        with program.recording() as recorder:
            program.step()
        profile = recorder.profile()
    source = "replayed" if steps[0].source == "measured by turns" else "measured"
    parts = [step_parts(tl) for tl in steps]
    if source == "replayed":
        for step in parts:  # only computing was measured
            computing = step["forward"], step["backward"]
            ranks = hpnb.world_size()
            step |= communication_parts(size, dtype, config, computing, ranks, REPLAY_LINK, bucket_mb)
    return StepMeasurement(_fastest_first(parts), profile, source)


def measure_in_turn(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    configs: Sequence[ZeroConfig],
    bucket_mb: float,
) -> tuple[dict[ZeroConfig, StepMeasurement], tuple[float, float, float]]:
    """Measure five steps of each configuration; on a CPU three, in two rounds, so that a busy moment hits
    several configurations.

    Memory is recorded in the first round. Each round also has a step that sends nothing: a machine's speed
    changes in minutes, and predictions are made of that step. On GPUs, where it takes long to build the
    models again, one round has five steps; three where an optimizer is offloaded, whose steps are the
    slowest, and where ranks share a GPU and compute by turns, which nothing disturbs.

    Returns:
        ({configuration: its steps}, seconds of forward, backward and update without messages).
    """
    choice = pool.choice
    steps_of_rounds = (2, 1) if choice.device == "cpu" else (3,) if choice.shares_gpus else (5,)
    runs: dict[ZeroConfig, StepMeasurement] = {}
    without_messages: list[tuple[float, float, float]] = []
    for k, steps in enumerate(steps_of_rounds):
        for config in configs:
            repeats = min(3, steps) if config.offload else steps
            run = pool.run(measure_step, size, rows, dtype, config, bucket_mb, repeats, k == 0)[0]
            runs[config] = runs[config].joined(run) if k else run
        without_messages.append(pool.run(time_serial_step, size, rows, dtype, 3)[0])
    forward, backward, update = (mean(values) for values in zip(*without_messages, strict=True))
    return runs, (forward, backward, update)


def time_steps(program: TrainingProgram, repeats: int) -> list[Timeline]:
    """Steps after the warm-up, each with its forward "F", backward "B" and "update"."""
    for _ in range(warmup_steps()):  # not recorded: ranks that share a GPU would take turns
        program.step()
    steps = []
    for _ in range(repeats):
        program.optimizer.zero_grad()
        with hpnb.record.timeline() as recorder:
            with recorder.span("F"):
                loss = program.wrapped(**program.batch).loss
            with recorder.span("B"):
                program.backward(loss)
            with recorder.span("update"):
                program.update()
        steps.append(recorder.gather())
    return steps


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


def peak_of_second_step(
    size: GPT2Size, rows: int, dtype: torch.dtype, config: ZeroConfig, bucket_mb: float
) -> float:
    """The peak of a step when all states exist, in bytes. Every rank calls it.

    No step is stopped at a budget: a rank that stopped alone would leave the others waiting.
    """
    program = build_program(size, rows, dtype, config, bucket_mb)
    program.step()
    with program.recording() as recorder:
        program.step()
    return recorder.profile().peak


def time_serial_step(
    size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 5
) -> tuple[float, float, float]:
    """Seconds of forward, backward and update of a rank that sends nothing, each the median of its repeats.

    Every rank calls it, so that they share cores and memory as they will later.
    """
    steps = [step_parts(step) for step in time_steps(serial_program(size, rows, dtype), repeats)]
    forward, backward, update = (median(s[name] for s in steps) for name in _PHASES.values())
    return forward, backward, update


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

    The predicted depth runs first. Its peak and the predicted bytes of a block say where to go on.
    """
    predicted, measured = {}, {}
    ranks, workspace = pool.choice.ranks, max(pool.run(matmul_workspace))
    for config in configs:

        def peak(layers: int, config: ZeroConfig = config) -> float:
            shape = replace(size, layers=layers)
            return predict_memory(shape, rows, dtype, config, ranks, bucket_mb, workspace).peak

        @lru_cache
        def measured_peak(layers: int, config: ZeroConfig = config) -> float:
            shape = replace(size, layers=layers)
            return max(pool.run(peak_of_second_step, shape, rows, dtype, config, bucket_mb))

        def fits(layers: int, measured_peak: Callable[[int], float] = measured_peak) -> bool:
            return measured_peak(layers) <= budget

        predicted[config] = next(count for count in itertools.count() if peak(count + 1) > budget)
        start = max(predicted[config], 1)
        spare = budget - measured_peak(start)
        near = max(1, start + math.floor(spare / (peak(start + 1) - peak(start))))
        measured[config] = _last_that_fits(fits, near)
    return predicted, measured


def _last_that_fits(fits: Callable[[int], bool], start: int) -> int:
    """The largest count that fits, searched from `start` in steps that double and then halve."""
    stride = 1
    if fits(start):
        most = start
        while fits(most + stride):
            most, stride = most + stride, 2 * stride
        too_many = most + stride
    else:
        too_many = start
        while too_many > stride and not fits(too_many - stride):
            too_many, stride = too_many - stride, 2 * stride
        most = max(0, too_many - stride)
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(middle) else (most, middle)
    return most
