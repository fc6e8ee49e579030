"""What notebook 06 runs on its ranks: a GPT-2's layers timed one by one, and pipelines partitioned by them.

    times = pool.run(gpt2_pipeline.time_layers, SIZE, 2, torch.float32)[0]                    a LayerTimes
    times.step(schedule, counts)                                                              a Timeline,
    simulated pool.run(gpt2_pipeline.time_cuts, SIZE, 16, torch.float32, {"a": (schedule, counts)})[0]["a"]
    one that ran

Where ranks share cores everything is in CPU time, of layers and of actions alike (see `hpnb.Pipeline`).
Schedules and cuts that are to be compared take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb.hybrid.model_loss import causal
from hpnb.lesson.programs.device_timing import Batch, all_ranks, random_tokens, timing_gpt2, warmup_steps
from hpnb.lesson.programs.vit_pipeline import median_step
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Costs, Schedule
from hpnb.pipeline_parallel.executor import contended
from hpnb.pipeline_parallel.layers import Layer, layers
from hpnb.record import Timeline
from hpnb.theory import stage_loads

PartitionedSchedule = tuple[Schedule, Sequence[int]]  # what to run, and how many layers each stage has


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer for one microbatch: embedding, block, block, ..., head.

    Attributes:
        kinds: of each layer.
        forward, backward: of each layer; the head's include the loss's.
        loss: how many seconds of the head's are the loss's.
    """

    kinds: tuple[str, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    loss: float

    @property
    def costs(self) -> list[float]:
        """Forward and backward of each layer."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @property
    def smooth(self) -> list[float]:
        """The costs with equal blocks at their median, because a cut should not follow noise."""
        median, pairs = self.block, zip(self.kinds, self.costs, strict=True)
        return [median if kind == "block" else cost for kind, cost in pairs]

    @property
    def block(self) -> float:
        """Seconds of a block, the median."""
        return statistics.median(c for kind, c in zip(self.kinds, self.costs, strict=True) if kind == "block")

    @property
    def head(self) -> float:
        """What the head and the loss take, in blocks."""
        return self.costs[-1] / self.block

    def stage_costs(self, counts: Sequence[int]) -> Costs:
        """Of the stages of a cut: F as measured, I and W half a backward each."""
        half = [b / 2 for b in stage_loads(self.backward, counts)]
        return Costs(stage_loads(self.forward, counts), half, half, 0.0)

    def step(self, schedule: Schedule, counts: Sequence[int]) -> Timeline:
        """A step of stages that take what their layers take; "simulated"."""
        return schedule.simulate(self.stage_costs(counts))


# --- on a rank ---------------------------------------------------------------------------------------


def token_loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    """The mean cross entropy of the next token, as a Pipeline takes it; of 16-bit logits in float32."""
    return causal(outputs, inputs["labels"])


def time_layers(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 7) -> LayerTimes:
    """Time each layer of a microbatch of `rows`, as medians of `repeats`.

    Every rank calls it and measures, so that they share cores and memory as they will in a step.
    """
    batch, hidden = random_tokens(size, rows), None
    warmup = warmup_steps()
    medians: list[dict[str, float]] = []
    all_layers = layers(timing_gpt2(size, dtype))
    for layer in all_layers:
        times = [_time_layer(layer, hidden, batch) for _ in range(warmup + repeats)][warmup:]
        medians.append({op: statistics.median(each[op] for each in times) for op in times[0]})
        with torch.no_grad():
            hidden = layer.run(hidden, batch) if layer.kind != "head" else None
    loss = medians[-1]["loss F"] + medians[-1]["loss B"]
    return LayerTimes(
        tuple(layer.kind for layer in all_layers),
        tuple(took["F"] + took.get("loss F", 0.0) for took in medians),
        tuple(took["B"] + took.get("loss B", 0.0) for took in medians),
        loss,
    )


def _time_layer(layer: Layer, hidden: torch.Tensor | None, batch: Batch) -> dict[str, float]:
    """{"F" | "B" | "loss F" | "loss B": seconds} of one layer, once; its gradients are dropped."""
    cpu: dict[str, float] = {}
    with hpnb.record.timeline() as recorder:

        def timed(op: str, work: Callable[[], Any]) -> Any:
            began = time.thread_time()
            with recorder.span(op):
                result = work()
            cpu[op] = time.thread_time() - began
            return result

        x = None if hidden is None else hidden.detach().requires_grad_()
        out = timed("F", lambda: layer.run(x, batch))
        if layer.kind == "head":
            logits = out.logits
            out.logits = logits.detach().requires_grad_()
            value = timed("loss F", lambda: token_loss(out, batch))
            timed("loss B", value.backward)
            seed = out.logits.grad
        else:
            logits, seed = out, torch.ones_like(out)
        timed("B", lambda: logits.backward(seed))
    for part in layer.parts:
        part.module.zero_grad()
    return cpu if contended() else {e.op: e.duration for e in recorder.events()}


def time_cuts(
    size: GPT2Size,
    rows: int,
    dtype: torch.dtype,
    runs: Mapping[Any, PartitionedSchedule],
    repeats: int = 3,
) -> dict[Any, Timeline]:
    """Train a few steps by each of `runs` in turn: {name: the median step}, computing alone.

    Every rank calls it.

    Args:
        rows: of the whole batch.
        repeats: steps of each that count.
    """
    batch = random_tokens(size, rows)
    pipes = {name: _pipeline(size, dtype, run) for name, run in runs.items()}
    timelines: dict[Any, list[Timeline]] = {name: [] for name in runs}
    warmup = warmup_steps()
    for step in range(warmup + repeats):
        for name, pipe in pipes.items():
            tl = pipe.step(batch, return_outputs=False).timeline.select("FIWB")
            timelines[name] += [tl] if step >= warmup else []
            pipe.zero_grad()
    return {name: median_step(tls, runs[name][0]) for name, tls in timelines.items()}


def peak_activations(size: GPT2Size, rows: int, dtype: torch.dtype, run: PartitionedSchedule) -> float:
    """Bytes that this rank holds at the peak of a step, besides weights and gradients.

    They are what autograd keeps for the backward, and what I has put aside for W.
    """
    pipe, batch = _pipeline(size, dtype, run), random_tokens(size, rows)
    pipe.step(batch, return_outputs=False, record=False)
    with hpnb.record.memory(pipe.module) as recorder:
        pipe.step(batch, return_outputs=False, record=False)
    return float(max(now.activations + now.temporary for now in recorder.profile().samples))


def count_bytes(size: GPT2Size, rows: int, dtype: torch.dtype, run: PartitionedSchedule) -> dict[str, float]:
    """Bytes that this rank sends in a step: {"activations": between stages, "tie": for the tied weight}."""
    pipe, batch = _pipeline(size, dtype, run), random_tokens(size, rows)
    pipe.step(batch, return_outputs=False, record=False)  # the first step also sends shapes
    with hpnb.record.traffic() as t:
        pipe.step(batch, return_outputs=False, record=False).loss.item()
    ops = {"activations": "send", "tie": "all_reduce"}
    return {name: float(sum(m.bytes for m in t.messages if m.op == op)) for name, op in ops.items()}


def _pipeline(size: GPT2Size, dtype: torch.dtype, run: PartitionedSchedule) -> hpnb.Pipeline:
    schedule, counts = run
    return hpnb.Pipeline(timing_gpt2(size, dtype), all_ranks("pp"), schedule, token_loss, cut=counts)
