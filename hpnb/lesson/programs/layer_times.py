"""Seconds of single layers on the ranks of a page, and of calls that take turns.

Where ranks share cores all times are CPU times, as those of actions are (see `hpnb.Pipeline`). As many ranks
measure there as there are cores, so that the cores are as busy as in a step, and the others wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

import hpnb
from hpnb.hybrid.model_loss import causal
from hpnb.lesson.programs.device_timing import Batch, random_tokens, timing_gpt2, warmup_steps
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Costs, Schedule
from hpnb.pipeline_parallel.executor import contended
from hpnb.pipeline_parallel.layers import Layer, layers
from hpnb.record import Timeline
from hpnb.theory import pipeline_seconds, stage_loads

T = TypeVar("T")


def ranges_overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the ranges of two lists of repeats overlap."""
    return min(a) <= max(b) and min(b) <= max(a)


def spread_words(a: Sequence[float], b: Sequence[float]) -> str:
    """For prose: how the difference of two lists of repeats compares with their spread."""
    return f"{'within' if ranges_overlap(a, b) else 'beyond'} the spread of the repeats"


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each layer for one microbatch: embedding, block, block, ..., head.

    Attributes:
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
        return [f + b for f, b in zip(self._level(self.forward), self._level(self.backward), strict=True)]

    @property
    def block(self) -> float:
        """Seconds of a block: the median of all forwards, and that of all backwards."""
        return self.smooth[self.kinds.index("block")]

    @property
    def head(self) -> float:
        """What the head and the loss take, in blocks."""
        return self.costs[-1] / self.block

    def misjudged(self, flops: float) -> float:
        """By what share `flops`, the head in blocks by FLOPs, is off: with the loss or without, the worse."""
        matmuls = (self.costs[-1] - self.loss) / self.block
        return max(abs(blocks / flops - 1) for blocks in (matmuls, self.head))

    def chunks_in_words(self, stages: int) -> dict[str, float]:
        """How many blocks each of `stages` "equal" stages would take, and the "limit", the `best_speedup` of
        any cut.
        """
        return {"equal": sum(self.smooth) / (stages * self.block), "limit": self.best_speedup()}

    def stage_costs(self, counts: Sequence[int]) -> Costs:
        """Of the stages of a cut, from `smooth` layers: F as measured, I and W half a backward each."""
        half = [b / 2 for b in stage_loads(self._level(self.backward), counts)]
        return Costs(stage_loads(self._level(self.forward), counts), half, half, 0.0)

    def bubble(self, counts: Sequence[int], microbatches: int) -> float:
        """The idle share by sum t + (m - 1) max t, where t are what the stages of a cut take."""
        loads = stage_loads(self.smooth, counts)
        return 1 - microbatches * sum(loads) / (len(loads) * pipeline_seconds(loads, microbatches))

    def best_speedup(self) -> float:
        """How many times as fast as one rank any cut can be at most, as the longest layer stays in one."""
        return sum(self.smooth) / max(self.smooth)

    def padded(self, odd: Sequence[float], padded: Sequence[float]) -> dict[str, Any]:
        """For prose: how many times as long the head's matmuls take with an odd vocabulary ("gain"), how that
        compares with the "spread", and the "head" and loss in blocks if its matmuls gained as much.
        """
        gain = statistics.median(odd) / statistics.median(padded)
        head = ((self.costs[-1] - self.loss) / gain + self.loss) / self.block
        return {"gain": gain, "spread": spread_words(odd, padded), "head": (head, "blocks")}

    def step(self, schedule: Schedule, counts: Sequence[int]) -> Timeline:
        """A step of stages that take what their layers take; "simulated"."""
        return schedule.simulate(self.stage_costs(counts))

    def _level(self, seconds: Sequence[float]) -> list[float]:
        """`seconds` of each layer, with all blocks at their median."""
        pairs = list(zip(self.kinds, seconds, strict=True))
        median = statistics.median(value for kind, value in pairs if kind == "block")
        return [median if kind == "block" else value for kind, value in pairs]


def token_loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    """The mean cross entropy of the next token, as a Pipeline takes it; of 16-bit logits in float32."""
    return causal(outputs, inputs["labels"])


def time_layers(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 7) -> LayerTimes:
    """Time each layer of a microbatch of `rows`, as medians of `repeats`. Every rank calls it and measures,
    so that they share cores and memory as they will in a step; where there are more ranks than cores, all
    return what rank 0 has measured.
    """
    return on_busy_cores(lambda: _time_layers(size, rows, dtype, repeats))


def on_busy_cores(measure: Callable[[], T]) -> T:
    """What `measure` returns, which communicates nothing where ranks share cores. Every rank calls it.

    Where there are more ranks than cores, as many ranks as cores measure, and all return what rank 0 has
    measured. If all of them measured, they would only take turns.
    """
    if not contended():
        return measure()
    measured = [measure() if hpnb.rank() < hpnb.ranks.usable_cores() else None]
    dist.broadcast_object_list(measured, 0)
    return cast(T, measured[0])


def _time_layers(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int) -> LayerTimes:
    batch, hidden = random_tokens(size, rows), None
    warmup = warmup_steps()
    medians: list[dict[str, float]] = []
    all_layers = layers(timing_gpt2(size, dtype))
    for layer in all_layers:
        times = [_time_layer(layer, hidden, batch) for _ in range(warmup + repeats)][warmup:]
        medians.append({op: statistics.median(took[op] for took in times) for op in times[0]})
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
    with nullcontext() if contended() else hpnb.record.timeline() as recorder:

        def timed(op: str, work: Callable[[], Any]) -> Any:
            began = time.thread_time()
            with nullcontext() if recorder is None else recorder.span(op):
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
    return cpu if recorder is None else {e.op: e.duration for e in recorder.events()}


def seconds_alone(call: Callable[[], object]) -> float:
    """Seconds of a call on this rank's device; CPU time where ranks share cores."""
    if contended():
        began = time.thread_time()
        call()
        return time.thread_time() - began
    with hpnb.record.timeline() as recorder, recorder.span("F"):
        call()
    return recorder.events()[0].duration


def seconds_in_turn(calls: Mapping[Any, Callable[[], object]], repeats: int = 7) -> dict[Any, list[float]]:
    """{name: seconds of each repeat, ascending} of calls that take turns: A B C A B C ..."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    warmup = warmup_steps()
    for repeat in range(warmup + repeats):
        for name, call in calls.items():
            took = seconds_alone(call)
            if repeat >= warmup:
                seconds[name].append(took)
    return {name: sorted(times) for name, times in seconds.items()}
