"""What notebook 04 runs on its ranks: steps along one axis each, batches of leaves, a model evaluated."""

# ruff: noqa: E402
from __future__ import annotations

from hpnb.ranks.forkserver import start_ahead

start_ahead("hpnb.hybrid.booster", "hpnb.hybrid.training.trainer")  # imported once for all ranks

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import hpnb
from hpnb import comm
from hpnb.data import Dataset, ImageTransform, Loader
from hpnb.lesson import field_guide, ledger
from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs import vit_pipeline, vit_tensor
from hpnb.lesson.programs.device_timing import all_ranks, one_axis, vit_and_batch, vit_and_loss
from hpnb.lesson.programs.paraphrases import StepLog
from hpnb.lesson.programs.step_timing import (
    Backward,
    fall_in_words,
    median_by,
    record_step,
    relative_distance,
    time_backward,
)
from hpnb.lesson.programs.vit_pipeline_words import listed
from hpnb.lesson.tables import number
from hpnb.lesson.values import record
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import Schedule, schedules
from hpnb.placement import Placement, placement_of
from hpnb.record import Timeline
from hpnb.tensor_parallel import parallelize
from hpnb.theory import REPLAY_LINK, Link, replay

SMALL = ViTSize(hidden=48, layers=2, heads=4, mlp=192, patch=8, image=32)  # trained by 8 ranks of a CPU
_ROUNDS, _REPEATS = 3, 3  # the first recorded step of a new model can take longer, so medians count


@dataclass(frozen=True)
class AxisSteps:
    """Training steps of the same batch, with all ranks along dp, pp and tp in turn.

    Attributes:
        timelines: {axis: the median step}. Where ranks share a GPU, dp's and pp's are replayed over
            `theory.REPLAY_LINK`, and tp's is "measured by turns".
        alone: forward and backward of one rank's share of the batch, in which nothing is sent.
        sent: {axis: bytes that leave a rank in a step, mean over the ranks}.
        message: bytes of the hidden states of one microbatch of the pipeline.
    """

    timelines: Mapping[str, Timeline]
    alone: Backward
    sent: Mapping[str, float]
    schedule: Schedule
    message: float

    @property
    def source(self) -> str:
        """Of `seconds`: "measured"; "replayed", as where ranks share a GPU; or "measured, pp replayed"."""
        replayed = list(self.by_source.get("replayed", ()))
        if len(replayed) in (0, len(self.timelines)):
            return "replayed" if replayed else "measured"
        return f"measured, {listed(replayed)} replayed"

    @property
    def by_source(self) -> dict[str, dict[str, float]]:
        """{"measured" | "replayed": {axis: seconds of the step}}, without what is empty."""
        sources = {axis: "measured" if tl.source == "measured" else "replayed"
                   for axis, tl in self.timelines.items()}  # fmt: skip
        return {source: {axis: s for axis, s in self.seconds.items() if sources[axis] == source}
                for source in dict.fromkeys(sources.values())}  # fmt: skip

    @property
    def seconds(self) -> dict[str, float]:
        """{axis: seconds of the step}."""
        return {axis: _makespan(tl) for axis, tl in self.timelines.items()}

    def simulate(self, link: Link) -> dict[str, float]:
        """{axis: seconds of the step on `link`}, with the compute that was recorded."""
        ranks = len(self.timelines["tp"].ranks)
        pipeline = vit_pipeline.replay_on_link(self.timelines["pp"], self.schedule, link, self.message)
        return {
            "dp": self.alone.end + self.alone.exposed(link, ranks),
            "pp": pipeline.makespan,
            "tp": replay(self.timelines["tp"], link).makespan,
        }


def record_axes(
    pool: hpnb.Ranks, size: ViTSize, images: int, dtype: torch.dtype, schedule: Schedule, buckets: int
) -> AxisSteps:
    """Record a step of `images` along each axis. Axes take turns, so that a busy machine slows all of them.

    `images` is a multiple of ranks and microbatches, and `schedule` has a stage for each rank. The gradient
    has about equally large `buckets` under data parallelism.
    """
    n = len(pool.members)
    bucket_mb = dtype.itemsize * size.parameters(classes=3) / buckets / 2**20
    alone: list[Backward] = []
    timelines: dict[str, list[Timeline]] = {"dp": [], "pp": [], "tp": []}
    for _ in range(_ROUNDS):
        backward, timeline = pool.run(_data_parallel, size, images // n, dtype, bucket_mb)[0]
        alone.append(backward)
        # By turns, buckets are not sent beside the backward. So the step alone is taken, and their overlap.
        by_turns = timeline.source != "measured"
        timelines["dp"].append(backward.on(REPLAY_LINK, n) if by_turns else timeline)
        steps = pool.run(vit_pipeline.time_schedules, size, images, dtype, {"pp": schedule}, None, _REPEATS)
        timelines["pp"].append(steps[0]["pp"])
        timelines["tp"].append(pool.run(_tensor_parallel, size, images, dtype)[0])
    sent = pool.run(_count_bytes, size, images, dtype, schedule)
    return AxisSteps(
        {axis: median_by(recorded, _makespan) for axis, recorded in timelines.items()},
        median_by(alone, lambda step: step.end),
        {axis: sum(on_rank[axis] for on_rank in sent) / n for axis in timelines},
        schedule,
        images / schedule.microbatches * size.tokens * size.hidden * dtype.itemsize,
    )


def _makespan(tl: Timeline) -> float:
    return vit_tensor.replay_turns(tl).makespan


def add_to_ledger(
    model: str, card: MachineCard, steps: AxisSteps, sent: Mapping[str, float], predicted: Mapping[str, float]
) -> None:
    """A row of the ledger for each axis, with predicted bytes and seconds of a step."""
    for axis, measured in steps.seconds.items():
        quantities = {"step (s)": (predicted[axis], measured), "sent (B)": (sent[axis], steps.sent[axis])}
        ledger.add("04", one_axis(axis, card.ranks), model, quantities, card.hardware)


def record_added(simulated: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], ...]:
    """Record and return by how many seconds slower links prolong each axis's step: simulated on the slowest
    link less simulated on the first (04.added), and on the middle link less on the first (04.tenth-added).

    Args:
        simulated: {axis: seconds on each link}, the measured one first and the slowest last.
    """
    added = {axis: seconds[-1] - seconds[0] for axis, seconds in simulated.items()}
    middle = {axis: seconds[len(seconds) // 2] - seconds[0] for axis, seconds in simulated.items()}
    for name, seconds in (("added", added), ("tenth-added", middle)):
        record(f"04.{name}", seconds, "s")
    record("04.added-least", min(added, key=added.__getitem__))
    return added, middle


def record_ratios(
    predicted: Mapping[str, float], measured: Mapping[str, float], simulated: Mapping[str, Sequence[float]]
) -> tuple[dict[str, float], ...]:
    """Record and return measured over predicted (04.ratio), and simulated here over measured (04.near)."""
    ratio = {axis: measured[axis] / predicted[axis] for axis in simulated}
    near = {axis: seconds[0] / measured[axis] for axis, seconds in simulated.items()}
    for name, ratios in (("ratio", ratio), ("near", near)):
        record(f"04.{name}", ratios)
    record("04.near.fastest", min(measured, key=measured.__getitem__))
    return ratio, near


def record_steps(card: MachineCard, steps: AxisSteps) -> dict[str, float]:
    """Record the link and where its numbers are from, a step of one rank alone, what the steps along each
    axis took, and along pp a microbatch on all ranks but the busiest one (04.others); return {axis: seconds
    that the busiest rank computes}."""
    ranks = steps.timelines["tp"].ranks
    work = {axis: [tl.work(rank) for rank in ranks] for axis, tl in steps.timelines.items()}
    busy = {axis: max(seconds) for axis, seconds in work.items()}
    record("04.others", (sum(work["pp"]) - busy["pp"]) / steps.schedule.microbatches, "s")
    shares_gpu = steps.timelines["tp"].source == "measured by turns"
    link = {"latency": (card.latency, "s"), "bandwidth": (card.bandwidth, "B/s")}
    record("04.link", {"from": "assumed" if shares_gpu else "measured as in notebook 00", **link})
    record("04.source", steps.source)
    of_axis = {axis: source for source, axes in steps.by_source.items() for axis in axes}
    record("04.source-of", of_axis)
    record("04.predicted", {"share": steps.alone.end}, "s")
    record("04.busy", busy, "s")
    record("04.axes", {axis: {"measured": seconds} for axis, seconds in steps.seconds.items()}, "s")
    return busy


def record_rest(
    share: float,
    bubble: float,
    busy: Mapping[str, float],
    predicted: Mapping[str, float],
    simulated: Mapping[str, Sequence[float]],
    measured: Mapping[str, float],
) -> dict[str, float]:
    """Record under 04.rest a step along pp and along tp three times, and what is not compute of the busiest
    rank; return {axis: measured less predicted seconds of that}.

    Args:
        share, busy: predicted and recorded seconds of this compute; a simulated step has the recorded one.
        bubble: predicted seconds of pp's rest that a rank is idle.
    """
    record("04.rest.bubble", bubble, "s")
    off = {}
    for axis in ("pp", "tp"):
        steps = {"predicted": predicted[axis], "simulated": simulated[axis][0], "measured": measured[axis]}
        rest = {source: step - (share if source == "predicted" else busy[axis])
                for source, step in steps.items()}  # fmt: skip
        for source, step in steps.items():
            record(f"04.rest.{axis}.{source}", {"step": step, "rest": rest[source]}, "s")
        off[axis] = rest["measured"] - rest["predicted"]
    errors = {axis: (busy[axis] - share, off[axis]) for axis in ("tp", "pp")}
    record("04.rest.signs", _errors_in_words(errors))
    return off


def _errors_in_words(errors: Mapping[str, tuple[float, float]]) -> str:
    said = []
    for axis, pair in errors.items():
        compute, rest = (f"{number(abs(s), 's')} {'longer' if s > 0 else 'shorter'}" for s in pair)
        said.append(f"Along {axis}, compute is {compute} than predicted and the rest {rest}.")
    cancel = [axis for axis, (compute, rest) in errors.items() if compute * rest < 0]
    if cancel:
        said.append(f"Along {' and '.join(cancel)} the two errors partly cancel in the ratio.")
    return " ".join(said)


def _data_parallel(
    size: ViTSize, images: int, dtype: torch.dtype, bucket_mb: float
) -> tuple[Backward, Timeline]:
    """On a rank: its step alone, and a recorded step of data parallelism."""
    model, loss = vit_and_loss(size, images, dtype)
    alone = time_backward(model, lambda: loss(model), bucket_mb, 1)
    replica = hpnb.DataParallel(model, all_ranks("dp"), bucket_mb)
    return alone, record_step(replica, lambda: loss(replica), _REPEATS)


def _tensor_parallel(size: ViTSize, images: int, dtype: torch.dtype) -> Timeline:
    """On a rank: a recorded step of tensor parallelism."""
    model, batch = vit_and_batch(size, images, dtype)
    parallelize(model, all_ranks("tp"))
    return vit_tensor.record_step(model, lambda: model(**batch).loss, _REPEATS)


def _count_bytes(size: ViTSize, images: int, dtype: torch.dtype, schedule: Schedule) -> dict[str, float]:
    """On a rank: {axis: bytes that leave it in a step along this axis}."""
    share = images // hpnb.world_size()
    model, loss = vit_and_loss(size, share, dtype)
    replica = hpnb.DataParallel(model, all_ranks("dp"))
    sharded, batch = vit_and_batch(size, images, dtype)
    parallelize(sharded, all_ranks("tp"))
    steps: dict[str, Callable[[], Any]] = {
        "dp": lambda: loss(replica).backward(),
        "tp": lambda: sharded(**batch).loss.backward(),
    }
    sent = {"pp": vit_pipeline.measure_activations(size, images, dtype, schedule)[1]}
    for axis, step in steps.items():
        with hpnb.record.traffic() as traffic:
            step()
        sent[axis] = traffic.total
    return sent


class RankParts(NamedTuple):
    """What a rank of a mesh stores of the small ViT and of a batch: `samples` are its first sample, the one
    after its last, and how many the batch has; `placements` are those of all parameters of its stage.
    """

    samples: tuple[int, int, int]
    placements: list[Placement]


def stored_parts(layout: hpnb.Layout, batch_size: int = 32) -> RankParts:
    """On a rank: what it stores after `parallelize` and `Pipeline`."""
    mesh = hpnb.Mesh(layout)
    model = parallelize(hpnb.models.vit(SMALL, classes=3, dtype=torch.float64), mesh.tp)
    schedule = schedules.make("1f1b", mesh.pp.size, 2)
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, vit_pipeline.microbatch_loss)
    samples = local_samples({"samples": torch.arange(batch_size)}, mesh.dp)["samples"].tolist()
    placements = [placement_of(p, name) for name, p in pipe.module.named_parameters()]
    return RankParts((samples[0], samples[-1] + 1, batch_size), placements)


def local_samples(batch: Mapping[str, torch.Tensor], dp: hpnb.Axis) -> dict[str, torch.Tensor]:
    """The samples of this rank's replica."""
    return {name: comm.split(samples, dp, 0) for name, samples in batch.items()}


def gradient_distance(module: torch.nn.Module, serial: torch.nn.Module) -> float:
    """Relative distance of this rank's gradients to the same shards of a serial model's."""
    trained = {n: p for n, p in module.named_parameters() if p.grad is not None}
    full: dict[str, Any] = {n: serial.get_parameter(n).grad for n in trained}
    shards = [placement_of(p).take(full[n]) for n, p in trained.items()]
    return relative_distance([p.grad for p in trained.values() if p.grad is not None], shards)


def in_memory(leaves: Dataset) -> Dataset:
    """The same samples, drawn or decoded once. Otherwise each rank does it in each epoch."""
    return Dataset(list(leaves), leaves.source, leaves.classes, leaves.noun)


def leaf_batches(
    leaves: Dataset, samples: int, dp: hpnb.Axis | None = None, epochs: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of `samples` for all replicas, in float64 on the CPU, shuffled in each epoch; each rank of `dp`
    gets its share. What is left over at the end of an epoch is dropped.
    """
    share = samples // (1 if dp is None else dp.size)
    loader = Loader(leaves, share, dp, drop_last=True, transform=ImageTransform(32))
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            yield {**batch, "pixel_values": batch["pixel_values"].double()}


def evaluate(size: ViTSize, weights: Mapping[str, torch.Tensor], leaves: Dataset) -> tuple[float, float]:
    """(loss, accuracy in per cent) of a float64 ViT with these weights, in one process."""
    model: Any = hpnb.models.vit(size, classes=3, dtype=torch.float64)
    model.load_state_dict(weights)
    batch = next(leaf_batches(leaves, len(leaves)))
    with torch.no_grad():
        outputs = model.eval()(**batch)
    right = outputs.logits.argmax(-1) == batch["labels"]
    return float(outputs.loss), 100 * float(right.double().mean())


def record_guess(leaves: Dataset) -> float:
    """Record under 04.guess the accuracy in per cent of always guessing the most common class; return it."""
    accuracy = 100 * max(Counter(int(leaf["labels"]) for leaf in leaves).values()) / len(leaves)
    record("04.guess", accuracy, "%")
    return accuracy


def layouts_title(off: float) -> str:
    """What losses say that are at most so far, relatively, from one process's."""
    stays = "stays" if off < 1e-6 else "is not"
    return f"Layouts change, the loss curve {stays} that of one process"


def grows_most_title(simulated: Mapping[str, Sequence[float]]) -> str:
    """The title of a figure of {axis: seconds on each link}, the fastest link first."""
    added = {axis: seconds[-1] - seconds[0] for axis, seconds in simulated.items()}
    most = max(added, key=added.__getitem__)
    return f"Simulated: on slower links, {most}'s step grows by the most seconds"


def swapped_title(losses: Mapping[str, Sequence[float]], distances: Mapping[str, Sequence[float]]) -> str:
    """The title of a figure of {"correct" | "swapped": losses, and distances of copies}."""
    fall, diverge = fall_in_words(losses), distances["swapped"][-1] > 0.01
    but = "but" if diverge and fall.startswith("Both") else "and"
    return f"{fall}, {but} swapped copies {'diverge' if diverge else 'do not diverge'}"


LossLog = StepLog


def add_to_field_guide() -> None:
    """Add the page's row, and show it."""
    field_guide.add(
        "the loss falls, but not as far as it should",
        "copies of norms and embeddings, which must stay equal; the traffic atlas",
        "the process groups of dp and tp are swapped",
        "04",
    )
    field_guide.show("04")
