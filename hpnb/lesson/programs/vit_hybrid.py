"""What notebook 04 runs on its ranks: steps along one axis, copies compared, a run whose layout changes.

    hybrid.race(pool, SIZE, 32, torch.float32, 8, card)            {axis: a step along that axis alone}
    pool.run(hybrid.leg, recipe, 1, "run", {"tp_size": 2})         epoch 1, and then
    pool.run(hybrid.leg, recipe, 2, "run", {"pp_size": 2})         epoch 2 of the same run, on another layout

Nothing here imports matplotlib before it draws.
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
from hpnb.lesson.programs import device_timing, step_timing, vit_pipeline, vit_tensor
from hpnb.lesson.programs.replay import replay
from hpnb.mesh import Layout, Mesh
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import schedules
from hpnb.placement import placement_of
from hpnb.record import Timeline
from hpnb.tensor_parallel import parallelize
from hpnb.theory import Link, bytes_sent, exposed_seconds, seconds

_BUCKETS = 8  # of a gradient, at least: with one alone nothing could be hidden
_ROUNDS = 3


def images(pool: hpnb.Ranks) -> int:
    """How many images a batch has: on GPUs of ViT-L/16 what fits along any axis, on a CPU 32."""
    least = min(pool.run(_memory))
    return 32 if not least else 256 if least > 60e9 else 64  # two ranks need 13 GB for 64


def _memory() -> int:
    """Bytes of this rank's GPU; 0 on a CPU."""
    device = hpnb.device()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


# --- one axis at a time -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A training step of all ranks along one axis alone.

    Attributes:
        seconds: as it ran.
        computing: of it, mean over the ranks.
        bytes: that a rank sends, mean over the ranks.
        told: the same, predicted.
        predicted: seconds on a link, from one rank's share of the batch measured alone.
        on: seconds of the recorded step on a link; simulated.
    """

    seconds: float
    computing: float
    bytes: float
    told: float
    predicted: Callable[[Link], float]
    on: Callable[[Link], float]


def race(
    pool: hpnb.Ranks, size: ViTSize, images: int, dtype: torch.dtype, microbatches: int, card: MachineCard
) -> dict[str, Step]:
    """A step of the same `images` with all ranks of `pool` along dp, then pp, then tp.

    Args:
        images: of the whole batch, a multiple of ranks and microbatches.
        microbatches: of the pipeline, 1F1B.
        card: of as many ranks.
    """
    n, value = len(pool.members), dtype.itemsize
    whole = value * size.parameters(classes=3)
    activation = images * size.tokens * size.hidden * value
    buckets = max(_BUCKETS, math.ceil(whole / 25e6))
    schedule = schedules.make("1f1b", n, microbatches)
    by_dp, by_pp, by_tp = [], [], []
    for turn in range(_ROUNDS):  # in turns, so that a machine that slows down slows all of them
        by_dp.append(pool.run(_replicas, size, images // n, dtype, whole / buckets / 2**20, turn == 0)[0])
        by_pp.append(
            pool.run(vit_pipeline.timed, size, images, dtype, {"1f1b": schedule}, None, 1)[0]["1f1b"]
        )
        by_tp.append(pool.run(_matrices, size, images, dtype, turn == 0)[0])
    alone = _middle([alone for alone, _, _ in by_dp], lambda step: step.end)
    replicas, pipeline, matrices = (
        _middle(tls, lambda tl: tl.makespan)
        for tls in ([tl for _, tl, _ in by_dp], by_pp, [tl for tl, _ in by_tp])
    )
    sent_dp, sent_tp = by_dp[0][2], by_tp[0][1]
    sent_pp = sum(each for _, each, _ in pool.run(vit_pipeline.held, size, images, dtype, schedule)) / n
    share = alone.end  # seconds of an n-th of the batch, forward and backward
    message, sums = activation / microbatches, 4 * size.layers
    turns = (microbatches + n - 1) / microbatches
    return {
        "dp": Step(
            replicas.makespan,
            step_timing.computing(replicas),
            sent_dp,
            bytes_sent("all_reduce", whole, n),
            lambda link: share + exposed_seconds(2 / 3 * share, whole, buckets, n, link),
            lambda link: share + alone.exposed(link, n),
        ),
        "pp": Step(
            pipeline.makespan,
            vit_pipeline.busy(pipeline),
            sent_pp,
            2 * (n - 1) / n * activation,
            lambda link: turns * share + 2 * (n - 1) * seconds("send", message, 2, link),
            lambda link: vit_pipeline.on_wire(pipeline, schedule, link, message).makespan,
        ),
        "tp": Step(
            matrices.makespan,
            vit_tensor.spent(matrices, "FIW"),
            sent_tp,
            sums * bytes_sent("all_reduce", activation, n),
            lambda link: share + sums * seconds("all_reduce", activation, n, link),
            lambda link: replay(matrices, link).makespan,
        ),
    }


def _middle(found: Sequence[Any], seconds_of: Callable[[Any], float]) -> Any:
    return sorted(found, key=seconds_of)[len(found) // 2]


def _replicas(
    size: ViTSize, images: int, dtype: torch.dtype, bucket_mb: float, count: bool
) -> tuple[step_timing.Backward, Timeline, float]:
    """On a rank: its step alone, a recorded step of data parallelism, and bytes that leave it in one.

    Bytes take one more step, the same in each turn: without `count` they are 0.
    """
    model, loss = device_timing.vit_and_loss(size, images, dtype)
    alone = step_timing.backward(model, lambda: loss(model), bucket_mb, 1)
    wrapped = hpnb.DataParallel(model, Mesh(Layout(dp=hpnb.world_size())).dp, bucket_mb)
    tl = step_timing.record(wrapped, lambda: loss(wrapped), 1)
    return alone, tl, _sent(lambda: loss(wrapped)) if count else 0.0


def _matrices(size: ViTSize, images: int, dtype: torch.dtype, count: bool) -> tuple[Timeline, float]:
    """On a rank: a recorded step of tensor parallelism and, with `count`, bytes that leave it in one."""
    model, batch = vit_pipeline.vit_and_batch(size, images, dtype)
    parallelize(model, vit_tensor.tensor_axis())
    tl = vit_tensor.record(model, lambda: model(**batch).loss, 1)
    return tl, _sent(lambda: model(**batch).loss) if count else 0.0


def _sent(loss: Callable[[], torch.Tensor]) -> float:
    with hpnb.record.traffic() as counted:
        loss().backward()
    return counted.total


def write_down(raced: Mapping[str, Step], name: str, card: MachineCard) -> None:
    """A row of the ledger for each axis."""
    layouts = {"dp": Layout(dp=card.ranks), "pp": Layout(pp=card.ranks), "tp": Layout(tp=card.ranks)}
    for axis, step in raced.items():
        took = (step.predicted(card.link), step.seconds)
        quantities = {"sent (B)": (step.told, step.bytes), "step (s)": took}
        ledger.add("04", layouts[axis], name, quantities, card.hardware)


# --- a batch, dealt out -----------------------------------------------------------------------------


def leaf_batch(leaves: Any, rows: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The first `rows` of a data set of leaves, on this rank's device."""
    place = ImageTransform(32, device=hpnb.device())
    batch: dict[str, torch.Tensor] = next(iter(hpnb.data.Loader(leaves, rows, transform=place)))
    return {**batch, "pixel_values": batch["pixel_values"].to(dtype)}


def share(batch: Mapping[str, torch.Tensor], axis: hpnb.Axis) -> dict[str, torch.Tensor]:
    """The rows that belong to this rank's place on `axis`."""
    return {name: comm.split(rows, axis, 0) for name, rows in batch.items()}


@torch.no_grad()
def spread(copies: Sequence[torch.Tensor], axis: hpnb.Axis) -> float:
    """How far ranks of `axis` are from its first one: the largest relative norm, on any rank of the world."""
    first = [t.detach().clone() for t in copies]
    hpnb.data_parallel.broadcast(first, axis)
    apart = torch.tensor(step_timing.distance(copies, first), dtype=torch.float64, device=hpnb.device())
    torch.distributed.all_reduce(apart, torch.distributed.ReduceOp.MAX)
    return float(apart)


def uncut(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters that are whole on this rank: norms, embeddings, biases of rows. A stage's count, too."""
    return [p for p in module.parameters() if not placement_of(p).axes - {"pp"}]


# --- a run whose layout changes ---------------------------------------------------------------------


class LossByStep(hooks.Hook):
    """Keeps the loss of each step, on the ranks that have it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, trainer: Any) -> None:
        if trainer.loss is not None:
            self.losses.append(float(trainer.loss))


def in_memory(leaves: Dataset) -> Dataset:
    """The same rows, drawn or decoded once. Otherwise each epoch does it anew, and so does each rank."""
    return Dataset(list(leaves), leaves.source, leaves.classes, leaves.noun)


@dataclass(frozen=True)
class Recipe:
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


def leg(
    recipe: Recipe, until: int, folder: str, knobs: Mapping[str, Any]
) -> tuple[list[float], dict[str, Any]]:
    """On a rank: train up to epoch `until` on the layout that `knobs` say, from where `folder` has left off.

    Args:
        knobs: of `hpnb.HybridParallelPlugin`.

    Returns:
        The losses of these steps, on the ranks that have them; and the last epoch's row of the history.
    """
    torch.set_num_threads(
        1
    )  # tensors are small, and threads that wait for each other take the cores of others
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=recipe.max_norm, seed=0, **knobs)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = hpnb.models.vit(recipe.size, classes=3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.05)
    place = ImageTransform(recipe.size.image, device=hpnb.device())
    deal = plugin.prepare_dataloader
    train = deal(recipe.train, recipe.batch // plugin.dp_size, shuffle=True, drop_last=True, transform=place)
    test = deal(recipe.test, 64 // plugin.dp_size, transform=place)
    total = recipe.epochs * len(train)
    scheduler = hpnb.CosineAnnealingWarmupLR(optimizer, total, warmup_steps=total // 10)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    noted = LossByStep()
    kept = hooks.CheckpointHook(folder)
    told = [noted, hooks.AccuracyHook(), kept]
    trainer = hpnb.Trainer(booster, model, optimizer, None, scheduler, told, display_progress=False)
    trainer.resume(folder, missing_ok=True)
    history = trainer.fit(train, until, evaluate=test)
    return noted.losses, dict(history[-1])


def curve(found: Iterable[tuple[list[float], dict[str, Any]]]) -> tuple[list[float], dict[str, Any]]:
    """Of what all ranks returned: the losses of one that has them."""
    return max(found, key=lambda one: len(one[0]))


def by_one(recipe: Recipe, folder: str) -> tuple[list[float], dict[str, Any]]:
    """The whole run on one process; kept under a digest of all that decides it."""
    size = vars(recipe.size)
    rows = [len(recipe.train), len(recipe.test), recipe.train.describe()]
    key = digest(size, rows, recipe.batch, recipe.epochs, recipe.lr, recipe.max_norm, str(torch.__version__))
    name = f"serial-curve-{key}.json"
    known = load(name, _parse, None)
    if known is None:
        known = curve(hpnb.launch(leg, recipe, recipe.epochs, folder, {}, ranks=1, device="cpu"))
        save(name, json.dumps(known))
    return known


def _parse(text: str) -> tuple[list[float], dict[str, Any]]:
    losses, row = json.loads(text)
    return [float(each) for each in losses], dict(row)
