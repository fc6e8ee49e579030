"""What notebook 04 runs on its ranks: steps along one axis, copies compared, a run whose layout changes.

vit_hybrid.time_axes(pool, SIZE, 32, torch.float32, 8, card)            {axis: a step along that axis
alone} pool.run(vit_hybrid.train_leg, recipe, 1, "run", {"tp_size": 2})         epoch 1, and then
pool.run(vit_hybrid.train_leg, recipe, 2, "run", {"pp_size": 2})         epoch 2, on another layout
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hpnb
from hpnb import comm
from hpnb.data import Dataset, ImageTransform
from hpnb.hybrid.training import hooks
from hpnb.lesson import ledger
from hpnb.lesson.home import digest, load, save
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs import training_legs, vit_pipeline, vit_tensor
from hpnb.lesson.programs.device_timing import all_ranks, one_axis, vit_and_batch, vit_and_loss
from hpnb.lesson.programs.step_timing import (
    Backward,
    compute_seconds,
    median_by,
    record_step,
    relative_distance,
    time_backward,
)
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import schedules
from hpnb.placement import placement_of
from hpnb.record import Timeline
from hpnb.tensor_parallel import parallelize
from hpnb.theory import Link, bytes_sent, exposed_seconds, replay, seconds

_MIN_BUCKETS = 8  # of a gradient: a single bucket could not overlap with anything
_ROUNDS = 3
LossCurve = tuple[list[float], dict[str, Any]]  # losses of the steps, the last epoch's row of the history


# --- one axis at a time -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisStep:
    """A training step of all ranks along one axis alone.

    Attributes:
        seconds: as it ran.
        computing: of it, mean over the ranks.
        bytes: that a rank sends, mean over the ranks.
        predicted_bytes: the same, predicted.
        predicted: seconds on a link, from one rank's share of the batch measured alone.
        on: seconds of the recorded step on a link; simulated.
    """

    seconds: float
    computing: float
    bytes: float
    predicted_bytes: float
    predicted: Callable[[Link], float]
    on: Callable[[Link], float]


def time_axes(
    pool: hpnb.Ranks, size: ViTSize, images: int, dtype: torch.dtype, microbatches: int, card: MachineCard
) -> dict[str, AxisStep]:
    """A step of the same `images` with all ranks of `pool` along dp, then pp, then tp.

    Args:
        images: of the whole batch, a multiple of ranks and microbatches.
        microbatches: of the pipeline, 1F1B.
        card: of as many ranks.
    """
    n, value = len(pool.members), dtype.itemsize
    gradient = value * size.parameters(classes=3)
    activation = images * size.tokens * size.hidden * value
    buckets = max(_MIN_BUCKETS, math.ceil(gradient / 25e6))
    bucket_mb, schedule = gradient / buckets / 2**20, schedules.make("1f1b", n, microbatches)
    dp_runs, pp_runs, tp_runs = [], [], []
    for turn in range(_ROUNDS):  # in turns, so that a machine that slows down slows all of them
        count = turn == 0
        dp_runs.append(pool.run(_data_parallel, size, images // n, dtype, bucket_mb, count)[0])
        timelines = pool.run(vit_pipeline.time_schedules, size, images, dtype, {"1f1b": schedule}, None, 1)
        pp_runs.append(timelines[0]["1f1b"])
        tp_runs.append(pool.run(_tensor_parallel, size, images, dtype, count)[0])
    alone = median_by([alone for alone, _, _ in dp_runs], lambda step: step.end)
    dp, pp, tp = (
        median_by(timelines, lambda tl: tl.makespan)
        for timelines in ([tl for _, tl, _ in dp_runs], pp_runs, [tl for tl, _ in tp_runs])
    )
    sends = pool.run(vit_pipeline.measure_activations, size, images, dtype, schedule)
    share = alone.end  # seconds of an n-th of the batch, forward and backward
    message, all_reduces = activation / microbatches, 4 * size.layers
    pipeline_slots = (microbatches + n - 1) / microbatches
    return {
        "dp": AxisStep(
            dp.makespan,
            compute_seconds(dp),
            dp_runs[0][2],
            bytes_sent("all_reduce", gradient, n),
            lambda link: share + exposed_seconds(2 / 3 * share, gradient, buckets, n, link),
            lambda link: share + alone.exposed(link, n),
        ),
        "pp": AxisStep(
            pp.makespan,
            compute_seconds(pp),
            sum(sent for _, sent, _ in sends) / n,
            2 * (n - 1) / n * activation,
            lambda link: pipeline_slots * share + 2 * (n - 1) * seconds("send", message, 2, link),
            lambda link: vit_pipeline.replay_on_link(pp, schedule, link, message).makespan,
        ),
        "tp": AxisStep(
            tp.makespan,
            vit_tensor.mean_seconds(tp, "FIW"),
            tp_runs[0][1],
            all_reduces * bytes_sent("all_reduce", activation, n),
            lambda link: share + all_reduces * seconds("all_reduce", activation, n, link),
            lambda link: replay(tp, link).makespan,
        ),
    }


def _data_parallel(
    size: ViTSize, images: int, dtype: torch.dtype, bucket_mb: float, count: bool
) -> tuple[Backward, Timeline, float]:
    """On a rank: its step alone, a recorded step of data parallelism, and bytes that leave it in one.

    Counting bytes takes one more step, the same in each turn; without `count` they are 0.
    """
    model, loss = vit_and_loss(size, images, dtype)
    alone = time_backward(model, lambda: loss(model), bucket_mb, 1)
    replica = hpnb.DataParallel(model, all_ranks("dp"), bucket_mb)
    tl = record_step(replica, lambda: loss(replica), 1)
    return alone, tl, _count_bytes(lambda: loss(replica)) if count else 0.0


def _tensor_parallel(size: ViTSize, images: int, dtype: torch.dtype, count: bool) -> tuple[Timeline, float]:
    """On a rank: a recorded step of tensor parallelism and, with `count`, bytes that leave it in one."""
    model, batch = vit_and_batch(size, images, dtype)
    parallelize(model, all_ranks("tp"))
    tl = vit_tensor.record_step(model, lambda: model(**batch).loss, 1)
    return tl, _count_bytes(lambda: model(**batch).loss) if count else 0.0


def _count_bytes(loss: Callable[[], torch.Tensor]) -> float:
    with hpnb.record.traffic() as traffic:
        loss().backward()
    return traffic.total


def add_to_ledger(steps: Mapping[str, AxisStep], name: str, card: MachineCard) -> None:
    """A row of the ledger for each axis."""
    for axis, step in steps.items():
        quantities = {
            "sent (B)": (step.predicted_bytes, step.bytes),
            "step (s)": (step.predicted(card.link), step.seconds),
        }
        ledger.add("04", one_axis(axis, card.ranks), name, quantities, card.hardware)


# --- a batch, split along dp ------------------------------------------------------------------------


def leaf_batch(leaves: Any, rows: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The first `rows` of a data set of leaves, on this rank's device."""
    transform = ImageTransform(32, device=hpnb.device())
    batch: dict[str, torch.Tensor] = next(iter(hpnb.data.Loader(leaves, rows, transform=transform)))
    return {**batch, "pixel_values": batch["pixel_values"].to(dtype)}


def local_rows(batch: Mapping[str, torch.Tensor], axis: hpnb.Axis) -> dict[str, torch.Tensor]:
    """The rows of this rank's coordinate on `axis`."""
    return {name: comm.split(rows, axis, 0) for name, rows in batch.items()}


@torch.no_grad()
def replica_distance(copies: Sequence[torch.Tensor], axis: hpnb.Axis) -> float:
    """How far ranks of `axis` are from its first one: the largest relative norm, on any rank of the world."""
    first = [t.detach().clone() for t in copies]
    hpnb.data_parallel.broadcast(first, axis)
    distance = torch.tensor(relative_distance(copies, first), dtype=torch.float64, device=hpnb.device())
    torch.distributed.all_reduce(distance, torch.distributed.ReduceOp.MAX)
    return float(distance)


def replicated_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters that no axis but pp splits: norms, embeddings, biases of row-parallel layers."""
    return [p for p in module.parameters() if not placement_of(p).axes - {"pp"}]


# --- a run whose layout changes ---------------------------------------------------------------------


def in_memory(leaves: Dataset) -> Dataset:
    """The same rows, drawn or decoded once. Otherwise each rank does it anew in each epoch."""
    return Dataset(list(leaves), leaves.source, leaves.classes, leaves.noun)


@dataclass(frozen=True)
class LeafRecipe:
    """What is trained, whatever the layout.

    Attributes:
        size, classes: the model, in float64.
        train, test: data sets of leaves.
        batch: samples of all ranks.
        epochs: of the whole run.
        lr: the highest; it rises over a tenth of the steps and falls along a cosine.
        max_norm: to which gradients are clipped.
    """

    size: ViTSize
    train: Any
    test: Any
    batch: int = 64
    epochs: int = 4
    lr: float = 2e-3
    max_norm: float = 0.5


def train_leg(recipe: LeafRecipe, until: int, folder: str, knobs: Mapping[str, Any]) -> LossCurve:
    """On a rank: train up to epoch `until` on the layout that `knobs` say, from where `folder` has left off.

    Args:
        knobs: of `hpnb.HybridParallelPlugin`.
    """
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=recipe.max_norm, seed=0, **knobs)
    model = hpnb.models.vit(recipe.size, classes=3, dtype=torch.float64)
    transform = ImageTransform(recipe.size.image, device=hpnb.device())
    load, rows = plugin.prepare_dataloader, recipe.batch // plugin.dp_size
    train = load(recipe.train, rows, shuffle=True, drop_last=True, transform=transform)
    test = load(recipe.test, 64 // plugin.dp_size, transform=transform)
    metrics: list[hooks.Hook] = [hooks.AccuracyHook(), hooks.CheckpointHook(folder)]
    leg = training_legs.train_leg(
        plugin, model, (train, test), recipe.lr, 0.05, recipe.epochs, metrics, folder, until
    )
    return list(leg.losses), leg.last


def with_losses(curves: Iterable[LossCurve]) -> LossCurve:
    """Of what all ranks returned, the curve of a rank that has the losses."""
    return max(curves, key=lambda curve: len(curve[0]))


def serial_run(recipe: LeafRecipe, folder: str) -> LossCurve:
    """The whole run on one process; remembered under a digest of all that decides it."""
    size = vars(recipe.size)
    rows = [len(recipe.train), len(recipe.test), recipe.train.describe()]
    key = digest(size, rows, recipe.batch, recipe.epochs, recipe.lr, recipe.max_norm, str(torch.__version__))
    name = f"serial-curve-{key}.json"
    curve = load(name, _parse_curve, None)
    if curve is None:
        curve = with_losses(hpnb.launch(train_leg, recipe, recipe.epochs, folder, {}, ranks=1, device="cpu"))
        save(name, json.dumps(curve))
    return curve


def _parse_curve(text: str) -> LossCurve:
    losses, row = json.loads(text)
    return [float(loss) for loss in losses], dict(row)
