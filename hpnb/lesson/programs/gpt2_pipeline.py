"""What notebook 06 runs on its ranks: a GPT-2 whose layers are timed one by one, and pipelines cut of it.

    seen = pool.run(skylines.measured, SIZE, 2, torch.float32)[0]                    a Skyline
    seen.step(schedule, counts)                                                      a Timeline, simulated
    pool.run(skylines.timed, SIZE, 16, torch.float32, {"a": (schedule, counts)})[0]["a"]       one that ran

Where ranks share cores everything is in CPU time, of layers and of actions alike (see `hpnb.Pipeline`).
Schedules and cuts that are to be compared take turns. Nothing here imports matplotlib before it draws.
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
from hpnb.hybrid.model_loss import causal
from hpnb.lesson.programs.vit_pipeline import typical
from hpnb.mesh import Layout, Mesh
from hpnb.models import GPT2Size, roles
from hpnb.models import gpt2 as build
from hpnb.pipeline_parallel import Costs, Schedule
from hpnb.pipeline_parallel.executor import contended
from hpnb.pipeline_parallel.layers import Layer, layers
from hpnb.record import Timeline
from hpnb.theory import loads

Batch = Mapping[str, torch.Tensor]
Run = tuple[Schedule, Sequence[int]]  # what to run, and how many layers each stage has
_WARM = {"cpu": 1, "cuda": 3}  # steps, and repeats of a layer, before the first that counts


@dataclass(frozen=True)
class Skyline:
    """Seconds of each layer for one microbatch: embedding, block, block, ..., head.

    Attributes:
        kinds: of each layer.
        forward, backward: of each; the head's hold the loss's.
        loss: how many seconds of the head's both are the loss's.
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
        """The same with blocks, which are equal, at their median: a cut should not follow noise."""
        middle = self.block
        return [
            middle if kind == "block" else cost for kind, cost in zip(self.kinds, self.costs, strict=True)
        ]

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
        half = [b / 2 for b in loads(self.backward, counts)]
        return Costs(loads(self.forward, counts), half, half, 0.0)

    def step(self, schedule: Schedule, counts: Sequence[int]) -> Timeline:
        """A step of stages that take what their layers take; "simulated"."""
        return schedule.simulate(self.stage_costs(counts))


# --- on a rank ---------------------------------------------------------------------------------------


def gpt2(size: GPT2Size, dtype: torch.dtype) -> torch.nn.Module:
    """A GPT-2 on this rank's device, for timing: on a GPU its weights are drawn there, which is quick."""
    where = hpnb.device()
    gc.collect()  # what an earlier cell built may still be there
    made: torch.nn.Module = build(size, dtype=dtype) if where.type == "cpu" else drawn_on(size, dtype, where)
    return made


def drawn_on(size: GPT2Size, dtype: torch.dtype, where: torch.device) -> torch.nn.Module:
    """A GPT-2 whose weights are drawn on `where`; other values than `hpnb.models.gpt2` draws."""
    model = build(size, dtype=dtype, device="meta").to_empty(device=where)
    model.lm_head.weight = model.transformer.wte.weight  # `to_empty` has made two of the one
    known = roles(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if known[name].bias or known[name].kind == "norm":
                parameter.fill_(0.0 if known[name].bias else 1.0)
            else:
                parameter.normal_(std=0.02)
    found: torch.nn.Module = model
    return found


def words(size: GPT2Size, rows: int) -> Batch:
    """`rows` of `size.length` random words, on this rank's device; for timing."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocab_size, (rows, size.length), generator=made).to(hpnb.device())
    return {"input_ids": ids, "labels": ids}


def loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    """The mean cross entropy of the next word, as a Pipeline takes it; of 16-bit logits in float32."""
    return causal(outputs, inputs["labels"])


def measured(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 7) -> Skyline:
    """Time each layer of a microbatch of `rows`, as medians of `repeats`.

    Every rank calls it and measures, so that they share cores and memory as they will in a step.
    """
    batch, hidden = words(size, rows), None
    warm = _WARM[hpnb.device().type]
    found: list[dict[str, float]] = []
    whole = layers(gpt2(size, dtype))
    for layer in whole:
        times = [_one(layer, hidden, batch) for _ in range(warm + repeats)][warm:]
        found.append({op: statistics.median(each[op] for each in times) for op in times[0]})
        with torch.no_grad():
            hidden = layer.run(hidden, batch) if layer.kind != "head" else None
    own = [each.get("loss F", 0.0) + each.get("loss B", 0.0) for each in found]
    return Skyline(
        tuple(layer.kind for layer in whole),
        tuple(each["F"] + each.get("loss F", 0.0) for each in found),
        tuple(each["B"] + each.get("loss B", 0.0) for each in found),
        own[-1],
    )


def _one(layer: Layer, hidden: torch.Tensor | None, batch: Batch) -> dict[str, float]:
    """{"F" | "B" | "loss F" | "loss B": seconds} of one layer, once; its gradients are dropped."""
    cpu: dict[str, float] = {}
    with hpnb.record.timeline() as recorder:

        def spanned(op: str, work: Callable[[], Any]) -> Any:
            began = time.thread_time()
            with recorder.span(op):
                made = work()
            cpu[op] = time.thread_time() - began
            return made

        given = None if hidden is None else hidden.detach().requires_grad_()
        out = spanned("F", lambda: layer.run(given, batch))
        if layer.kind == "head":
            logits = out.logits
            out.logits = logits.detach().requires_grad_()
            value = spanned("loss F", lambda: loss(out, batch))
            spanned("loss B", value.backward)
            seed = out.logits.grad
        else:
            logits, seed = out, torch.ones_like(out)
        spanned("B", lambda: logits.backward(seed))
    for part in layer.parts:
        part.module.zero_grad()
    return cpu if contended() else {e.op: e.duration for e in recorder.events()}


def timed(
    size: GPT2Size, rows: int, dtype: torch.dtype, runs: Mapping[Any, Run], repeats: int = 3
) -> dict[Any, Timeline]:
    """Train a few steps by each of `runs` in turn: {name: the typical step}, computing alone.

    Every rank calls it.

    Args:
        rows: of the whole batch.
        repeats: steps of each that count.
    """
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    batch = words(size, rows)
    pipes = {
        name: hpnb.Pipeline(gpt2(size, dtype), axis, schedule, loss, cut=counts)
        for name, (schedule, counts) in runs.items()
    }
    found: dict[Any, list[Timeline]] = {name: [] for name in runs}
    warm = _WARM[hpnb.device().type]
    for step in range(warm + repeats):
        for name, pipe in pipes.items():
            tl = pipe.step(batch, return_outputs=False).timeline.select("FIWB")
            found[name] += [tl] if step >= warm else []
            pipe.zero_grad()
    return {name: typical(tls, runs[name][0]) for name, tls in found.items()}


def held(size: GPT2Size, rows: int, dtype: torch.dtype, run: Run) -> float:
    """Bytes that this rank holds at the peak of a step, besides weights and gradients.

    What autograd keeps for the backward, and what I has put aside for W.
    """
    schedule, counts = run
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    pipe = hpnb.Pipeline(gpt2(size, dtype), axis, schedule, loss, cut=counts)
    batch = words(size, rows)
    pipe.step(batch, return_outputs=False, record=False)
    with hpnb.record.memory(pipe.module) as recorder:
        pipe.step(batch, return_outputs=False, record=False)
    return float(max(now.activations + now.temporary for now in recorder.profile().samples))
