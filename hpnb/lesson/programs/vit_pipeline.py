"""What notebook 02 runs on its ranks: a ViT cut into stages, and schedules that take turns.

    pool.run(pipelines.timed, SIZE, 16, torch.float32, {"1f1b": schedule})[0]["1f1b"]      a Timeline
    pool.run(pipelines.held, SIZE, 16, torch.float32, schedule)                            bytes, a rank

Schedules that are to be compared run in turns, so that a machine that slows down slows all of them. Nothing
here imports matplotlib before it draws.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hpnb
from hpnb.lesson.machine_card import hardware_name
from hpnb.lesson.programs import device_timing
from hpnb.mesh import Axis, Layout, Mesh
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import Action, Costs, Schedule
from hpnb.pipeline_parallel.executor import contended
from hpnb.pipeline_parallel.layer_costs import seconds_of
from hpnb.pipeline_parallel.layers import Layer, layers
from hpnb.pipeline_parallel.partition import How, balanced, cut
from hpnb.pipeline_parallel.simulate import run
from hpnb.record import Timeline
from hpnb.theory import Link, exposed_seconds, seconds

Batch = Mapping[str, torch.Tensor]
_WARM = {"cpu": 1, "cuda": 3}  # steps before the first that counts


_ROOM = 200e6  # bytes of a ViT-L/16's activations for one image, over all its stages, with what comes on top


def images(pool: hpnb.Ranks) -> int:
    """How many images a batch has here: on GPUs 1,024, 512 or 256 of ViT-L/16, what GPipe can hold at once.

    Kernels of a few images are done before the host has launched the next ones, and then it is the host that
    keeps ranks waiting.
    """
    least = min(pool.run(_memory))
    if not least:
        return 16
    return next((n for n in (1024, 512) if n * _ROOM / len(pool.members) < least), 256)


def _memory() -> int:
    """Bytes of this rank's GPU; 0 on a CPU."""
    device = hpnb.device()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


@dataclass(frozen=True)
class Published:
    """One row of tables 5 and 9 of Qi et al. 2024 (arXiv 2401.10241), measured on A100s.

    Milliseconds of a stage's F, I and W and of a hop between stages; `rates` are their bubble rates:
    (span - work) / span of the rank with the longest own span.
    """

    model: str
    stages: int
    microbatches: int
    costs: Costs
    rates: Mapping[str, float]


PUBLISHED = Published(
    "6.2B", 8, 24, Costs(29.718, 29.444, 19.927, 0.527), {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698}
)


# --- on a rank -------------------------------------------------------------------------------------


def vit_and_batch(size: ViTSize, images: int, dtype: torch.dtype) -> tuple[torch.nn.Module, Batch]:
    """A ViT of three classes and random pictures with labels, on this rank's device; for timing."""
    model, _ = device_timing.vit_and_loss(size, 1, dtype)
    where = hpnb.device()
    pixels = torch.randn(images, 3, size.image, size.image, device=where, dtype=dtype)
    return model, {"pixel_values": pixels, "labels": torch.arange(images, device=where) % 3}


def loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    """The mean cross entropy of a microbatch, as a Pipeline takes it; of 16-bit logits in float32."""
    logits = outputs.logits
    return cross_entropy(logits.float() if logits.dtype.itemsize == 2 else logits, inputs["labels"])


def my_layers(model: torch.nn.Module, axis: Axis) -> tuple[Layer, ...]:
    """This rank's share of the layers of `model`: `y = layer.run(x, batch)`, x None for the first."""
    return cut(layers(model), axis.size)[axis.rank]


def timed(
    size: ViTSize,
    images: int,
    dtype: torch.dtype,
    schedules: Mapping[str, Schedule],
    cuts: Mapping[str, How] | None = None,
    repeats: int = 3,
) -> dict[str, Timeline]:
    """Train a few steps by each of `schedules` in turn: {name: the typical step}, computing alone.

    Every rank calls it.

    Args:
        images: of the whole batch.
        cuts: {name: where to cut}, "uniform" where it says nothing.
        repeats: steps of each that count.
    """
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    gc.collect()  # what an earlier cell built may still be there
    pipes, found = {}, {}
    for name, schedule in schedules.items():
        model, batch = vit_and_batch(size, images, dtype)
        how = (cuts or {}).get(name, "uniform")
        pipes[name] = hpnb.Pipeline(model, axis, schedule, loss, cut=how, example=batch)
        found[name] = list[Timeline]()
    warm = _WARM[hpnb.device().type]
    for step in range(warm + repeats):
        for name, pipe in pipes.items():
            result = pipe.step(batch, return_outputs=False)
            tl = result.timeline.select("FIWB")  # sends are on record for GPUs alone
            found[name] += [tl] if step >= warm else []
            pipe.zero_grad()
    return {name: typical(tls, schedules[name]) for name, tls in found.items()}


def by_cut(
    size: ViTSize, images: int, dtype: torch.dtype, schedule: Schedule, cuts: Mapping[str, How]
) -> tuple[dict[str, Timeline], dict[str, list[int]]]:
    """A step of each of `cuts`, and of one by time: ({name: its step}, {name: layers of each stage}).

    Every rank calls it. The first one measures each layer, forward and backward of a microbatch, while the
    others wait; balanced, these seconds are the cut called "by time". Where ranks share cores noise is larger
    than what a cut gains: there equal blocks count as their median, and all steps are simulated.
    """
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model, batch = vit_and_batch(size, images // schedule.microbatches, dtype)
    all_layers = layers(model)
    box: list[Any] = [seconds_of(all_layers, batch) if axis.rank == 0 else None]
    dist.broadcast_object_list(box, src=axis.ranks[0], group=axis.group)
    each: list[float] = box[0]
    if contended():
        blocks = [layer.kind == "block" for layer in all_layers]
        middle = statistics.median(t for t, block in zip(each, blocks, strict=True) if block)
        each = [middle if block else t for t, block in zip(each, blocks, strict=True)]
    counts = {name: [len(stage) for stage in cut(all_layers, axis.size, how)] for name, how in cuts.items()}
    counts["by time"] = list(balanced(each, axis.size))
    if not contended():
        return timed(size, images, dtype, dict.fromkeys(counts, schedule), counts), counts
    return {name: from_layers(schedule, each, stages) for name, stages in counts.items()}, counts


def held(size: ViTSize, images: int, dtype: torch.dtype, schedule: Schedule) -> tuple[float, float, int]:
    """Of one step on this rank: bytes of activations at their peak, bytes sent, and messages sent."""
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model, batch = vit_and_batch(size, images, dtype)
    pipe = hpnb.Pipeline(model, axis, schedule, loss)
    pipe.step(batch, record=False)
    with hpnb.record.traffic() as t:
        pipe.step(batch, record=False)
    sends = [message for message in t.messages if message.op == "send"]
    with hpnb.record.memory(pipe.module) as recorder:
        pipe.step(batch, record=False)
    peak = recorder.profile().peak_of("activations")
    return float(peak), sum(message.bytes for message in sends), len(sends)


# --- over timelines ----------------------------------------------------------------------------------


def typical(timelines: Sequence[Timeline], schedule: Schedule) -> Timeline:
    """The one with the median makespan; of replayed ones, the replay of each action's median."""
    if timelines[0].source == "measured":
        return sorted(timelines, key=lambda tl: tl.makespan)[len(timelines) // 2]
    times: dict[Action, list[float]] = {}
    for e in (e for tl in timelines for e in tl.events):
        times.setdefault(Action(e.stage, e.op, e.microbatch), []).append(e.duration)  # type: ignore[arg-type]
    middle = {action: statistics.median(each) for action, each in times.items()}
    return run(schedule, middle.__getitem__, source=timelines[0].source)


def from_layers(schedule: Schedule, each: Sequence[float], counts: Sequence[int]) -> Timeline:
    """The step simulated from seconds of each layer's forward and backward, a third of them forward."""
    ends = list(accumulate(counts, initial=0))
    loads = [sum(each[start:end]) for start, end in pairwise(ends)]
    return schedule.simulate(Costs([load / 3 for load in loads], [load * 2 / 3 for load in loads], 0.0))


def input_over_weight(tl: Timeline) -> float:
    """How many times as long as its weight gradients a step's input gradients take."""
    took = {op: sum(e.duration for e in tl.events if e.op == op) for op in "IW"}
    return took["I"] / took["W"]


def stage_costs(tl: Timeline, chunks: int = 1, transfer: float = 0.0) -> Costs:
    """The recorded costs of stages, and each of them in `chunks` equal chunks, I and W half a backward each.

    Args:
        tl: one chunk a rank, backwards not split.
        chunks: as many to a rank; the costs are then those of a mean chunk, the same for all.
    """
    found = Costs.measured(tl, transfer)
    assert isinstance(found.forward, tuple)
    assert isinstance(found.input_grad, tuple)
    forward, backward = list(found.forward), list(found.input_grad)
    if chunks > 1:
        many = chunks * len(forward)
        forward, backward = [sum(forward) / many] * many, [sum(backward) / many] * many
    half = [each / 2 for each in backward]
    return Costs(forward, half, half, transfer)


def stage_seconds(tl: Timeline) -> list[float]:
    """Forward and backward of one microbatch in each stage: medians, in seconds."""
    found = Costs.measured(tl)
    stages = 1 + max(e.stage for e in tl.events)
    return [found.seconds(Action(s, "F", 0)) + found.seconds(Action(s, "B", 0)) for s in range(stages)]


def busy(tl: Timeline) -> float:
    """Seconds that a rank computes, mean over the ranks."""
    return sum(tl.work(rank) for rank in tl.ranks) / len(tl.ranks)


def most_in_flight(tl: Timeline, chunks: int = 1) -> float:
    """Microbatches whose activations some rank holds at once, counted in a rank's whole share."""
    return max(tl.peak_in_flight(rank) for rank in tl.ranks) / chunks


def on_wire(tl: Timeline, schedule: Schedule, link: Link, message: float) -> Timeline:
    """The recorded step with messages of `message` bytes on `link`; "simulated"."""
    took = {(e.stage, e.op, e.microbatch): e.duration for e in tl.events}
    hop = seconds("send", message, 2, link)
    return run(schedule, lambda a: took[a.stage, a.op, a.microbatch], hop)


def data_parallel_seconds(compute: float, gradient: float, ranks: int, link: Link) -> float:
    """Seconds of a step in which the ranks hold replicas: `compute`, and what 25 MB buckets leave exposed.

    Args:
        compute: forward and backward of a rank's share of the batch; the backward is two thirds of it.
        gradient: bytes of the whole model's.
    """
    buckets = max(4, round(gradient / 25e6))
    return compute + exposed_seconds(compute * 2 / 3, gradient, buckets, ranks, link)


def hardware(ranks: int) -> str:
    """What this page's ranks run on, for the ledger: "4 x NVIDIA H200"."""
    return hardware_name(hpnb.ranks.choose_device("auto", ranks).device, ranks)
