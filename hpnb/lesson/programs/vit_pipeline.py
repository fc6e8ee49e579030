"""Training steps of a ViT that is partitioned into stages: timed under schedules, activations measured.

Schedules that are compared run in turn, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import copy
import gc
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import hpnb
from hpnb.lesson import ledger
from hpnb.lesson.machine_card import hardware_name
from hpnb.lesson.programs.device_timing import Batch, all_ranks, vit_and_batch, warmup_steps
from hpnb.lesson.programs.step_timing import compute_seconds, median_by, relative_distance, rounds_in_turn
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import Action, Costs, Schedule, schedules
from hpnb.pipeline_parallel.executor import contended
from hpnb.pipeline_parallel.layer_costs import seconds_of
from hpnb.pipeline_parallel.layers import layers
from hpnb.pipeline_parallel.partition import How, balanced, cut
from hpnb.record import Timeline
from hpnb.theory import Link, seconds

PUBLISHED = SimpleNamespace(
    model="6.2B", stages=8, microbatches=24, costs=Costs(29.718, 29.444, 19.927, 0.527),
    rates={"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698},
)  # fmt: skip
"""One row of tables 5 and 9 of Qi et al. 2024 (arXiv 2401.10241), measured on A100s: costs of a stage in
milliseconds, and {schedule: bubble rate}, (span - work) / span of the rank with the longest span."""


# --- on a rank -------------------------------------------------------------------------------------


def microbatch_loss(outputs: Any, inputs: Batch) -> torch.Tensor:
    """The mean cross entropy of a microbatch, as a Pipeline takes it; of 16-bit logits in float32."""
    logits = outputs.logits
    return cross_entropy(logits.float() if logits.dtype.itemsize == 2 else logits, inputs["labels"])


def fresh_vit_and_batch(size: ViTSize, images: int, dtype: torch.dtype) -> tuple[Any, Batch]:
    """`vit_and_batch`; on a CPU a copy of what an earlier call drew, because drawing weights takes longer."""
    if hpnb.device().type != "cpu":
        return vit_and_batch(size, images, dtype)
    model, batch = _drawn(size, images, dtype)
    return copy.deepcopy(model), dict(batch)


_drawn = lru_cache(maxsize=1)(vit_and_batch)


def small_models_and_batch(dataset: Any) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module, Batch]:
    """Three equal ViTs (17 tokens of 64 numbers) and 16 images, the same on every rank, in float64."""
    device = hpnb.device()
    first, second, third = (
        hpnb.models.vit("laptop", classes=3, dtype=torch.float64, device=device) for _ in range(3)
    )
    transform = hpnb.data.ImageTransform(32, device=device)
    batch = next(iter(hpnb.data.Loader(dataset, 16, transform=transform)))
    return first, second, third, {**batch, "pixel_values": batch["pixel_values"].double()}


def step_and_zero(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Update the weights, then set gradients to 0; the .grad of layers on other ranks stays None."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def distances_from(reference: torch.nn.Module, **models: torch.nn.Module) -> dict[str, dict[str, float]]:
    """{name: {"weights": relative distance}} of the weights that this rank has trained."""
    distances = {}
    for name, model in models.items():
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        here, there = zip(*((p, q) for p, q in pairs if p.grad is not None), strict=True)
        distances[name] = {"weights": relative_distance(here, there)}
    return distances


def time_schedules(
    size: ViTSize, images: int, dtype: torch.dtype, schedules: Mapping[str, Schedule], *args: Any, **kw: Any
) -> dict[str, Timeline]:
    """{name: the median step of `time_rounds`}."""
    return median_steps(time_rounds(size, images, dtype, schedules, *args, **kw), schedules)


def time_rounds(
    size: ViTSize,
    images: int,
    dtype: torch.dtype,
    schedules: Mapping[Any, Schedule],
    cuts: Mapping[Any, How] | None = None,
    repeats: int = 3,
) -> dict[Any, list[Timeline]]:
    """Train a few steps under each schedule in turn: {name: its steps, without communication events}.

    `images` are of the whole batch, and `cuts` partition the model, "uniform" for names that are missing;
    `repeats` steps of each schedule count, after the warm-up.
    """
    gc.collect()  # what an earlier cell built may still be there
    pipes, timelines = {}, {}
    for name, schedule in schedules.items():
        model, batch = fresh_vit_and_batch(size, images, dtype)
        how = (cuts or {}).get(name, "uniform")
        pipes[name] = hpnb.Pipeline(model, all_ranks("pp"), schedule, microbatch_loss, cut=how, example=batch)
        timelines[name] = list[Timeline]()
    for pipe in [*pipes.values()] * warmup_steps():  # not recorded: ranks that share a GPU would take turns
        pipe.step(batch, return_outputs=False, record=False)
        pipe.zero_grad()
    for _ in range(repeats):
        for name, pipe in pipes.items():
            result = pipe.step(batch, return_outputs=False)
            timelines[name].append(result.timeline.select("FIWB"))  # sends are recorded on GPUs alone
            pipe.zero_grad()
    return timelines


def time_graphs(
    size: ViTSize, images: int, dtype: torch.dtype, schedules: Mapping[Any, Schedule], repeats: int = 3
) -> tuple[dict[Any, list[Timeline]], list[str]]:
    """({name: its steps with CUDA graphs}, which stages ran without graphs, and why); no step on a CPU."""
    if hpnb.device().type == "cpu":
        return {}, []
    return time_captured(size, images, dtype, schedules, repeats)


def time_captured(
    size: ViTSize, images: int, dtype: torch.dtype, schedules: Mapping[Any, Schedule], repeats: int
) -> tuple[dict[Any, list[Timeline]], list[str]]:
    """`time_graphs` on any device. One pipeline at a time, because graphs keep their activations' memory."""
    rounds = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, schedule in schedules.items():
            model, batch = vit_and_batch(size, images, dtype)
            pipe = hpnb.Pipeline(model, all_ranks("pp"), schedule, microbatch_loss, cuda_graphs=True)
            timelines = []
            for _ in range(GRAPH_WARM_UP + repeats):
                timelines.append(pipe.step(batch, return_outputs=False).timeline.select("FIWB"))
                pipe.zero_grad()
            rounds[name] = timelines[GRAPH_WARM_UP:]
            del model, pipe
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    of_graphs = [str(w.message) for w in caught if "CUDA graphs" in str(w.message)]
    for w in caught:
        if "CUDA graphs" not in str(w.message):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    by_rank: list[list[str]] = [[]] * hpnb.world_size()
    dist.all_gather_object(by_rank, of_graphs)
    return rounds, list(dict.fromkeys(message for rank in by_rank for message in rank))


def time_cuts(
    size: ViTSize, images: int, dtype: torch.dtype, schedule: Schedule, cuts: Mapping[str, How]
) -> tuple[dict[str, list[Timeline]], dict[str, list[int]]]:
    """Steps of each partition, and of one balanced by time: ({name: steps}, {name: layers of each stage}).

    Rank 0 measures forward and backward of a microbatch in each layer; the partition that balances these
    seconds is "by time". Where ranks share cores, noise is larger than what a partition gains: there every
    block counts as the median block, and one step of each partition is simulated.
    """
    axis = all_ranks("pp")
    model, batch = vit_and_batch(size, images // schedule.microbatches, dtype)
    all_layers = layers(model)
    message: list[Any] = [seconds_of(all_layers, batch) if axis.rank == 0 else None]
    dist.broadcast_object_list(message, src=axis.ranks[0], group=axis.group)
    costs: list[float] = message[0]
    if contended():
        blocks = [layer.kind == "block" for layer in all_layers]
        median = statistics.median(t for t, block in zip(costs, blocks, strict=True) if block)
        costs = [median if block else t for t, block in zip(costs, blocks, strict=True)]
    counts = {name: [len(stage) for stage in cut(all_layers, axis.size, how)] for name, how in cuts.items()}
    counts["by time"] = list(balanced(costs, axis.size))
    if not contended():
        return time_rounds(size, images, dtype, dict.fromkeys(counts, schedule), counts), counts
    return {name: [simulate_layers(schedule, costs, stages)] for name, stages in counts.items()}, counts


GRAPH_WARM_UP = 4  # steps before the first that counts: two eager ones, one that captures, one replay
IN_ONE_PIECE, SPLIT = "backward in one piece", "split backward"


def time_split_backward(
    size: ViTSize,
    images: int,
    dtype: torch.dtype,
    stages: int,
    microbatches: int,
    repeats: int | None = None,
) -> dict[str, list[float]]:
    """{IN_ONE_PIECE: seconds of each round, SPLIT: ...} of a step of one rank, with the blocks of one stage.

    Launch it with one rank, which has no neighbours: it never idles, so a longer step has more to compute.
    `repeats` are 15 rounds, on a CPU 9.
    """
    if hpnb.device().type == "cpu":
        torch.set_num_threads(1)  # as on ranks that share the machine
        repeats = repeats or 9
    stage = replace(size, layers=max(1, size.layers // stages))
    steps = {}
    for way, name in ((IN_ONE_PIECE, "1f1b"), (SPLIT, "zb-h1")):
        model, batch = vit_and_batch(stage, images, dtype)
        schedule = schedules.make(name, 1, microbatches)
        pipe = hpnb.Pipeline(model, all_ranks("pp"), schedule, microbatch_loss, example=batch)
        steps[way] = partial(pipe.step, batch, return_outputs=False, record=False)
    return rounds_in_turn(steps, repeats or 15)


def measure_activations(
    size: ViTSize, images: int, dtype: torch.dtype, schedule: Schedule
) -> tuple[float, float, int]:
    """Of one step on this rank: bytes of activations at their peak, bytes sent, and messages sent."""
    model, batch = fresh_vit_and_batch(size, images, dtype)
    pipe = hpnb.Pipeline(model, all_ranks("pp"), schedule, microbatch_loss)
    pipe.step(batch, record=False)
    with hpnb.record.traffic() as t, hpnb.record.memory(pipe.module) as recorder:
        pipe.step(batch, record=False)
    sends = [message for message in t.messages if message.op == "send"]
    peak = recorder.profile().peak_of("activations")
    return float(peak), sum(message.bytes for message in sends), len(sends)


# --- over timelines --------------------------------------------------------------------------------


def median_step(timelines: Sequence[Timeline], schedule: Schedule) -> Timeline:
    """The step with the median makespan; of replayed steps, the replay of each action's median."""
    if timelines[0].source == "measured":
        return median_by(timelines, lambda tl: tl.makespan)
    durations: dict[Action, list[float]] = {}
    for e in (e for tl in timelines for e in tl.events):
        action = Action(e.stage, e.op, e.microbatch)  # type: ignore[arg-type]
        durations.setdefault(action, []).append(e.duration)
    medians = {action: statistics.median(times) for action, times in durations.items()}
    transfer = statistics.median(_transfer_seconds(tl) for tl in timelines)
    return schedule.replay(medians.__getitem__, transfer, timelines[0].source)


def _transfer_seconds(replayed: Timeline) -> float:
    """What a message took in a replay: the second stage waits for the first one's result, of some microbatch
    for nothing else."""
    forwards = {(e.stage, e.microbatch): e for e in replayed.events if e.op == "F"}
    waits = [
        e.start - forwards[0, m].end
        for (stage, m), e in forwards.items()
        if stage == 1 and e.rank != forwards[0, m].rank
    ]
    return min(waits, default=0.0)


def median_steps(
    rounds: Mapping[Any, Sequence[Timeline]], schedules: Mapping[Any, Schedule]
) -> dict[Any, Timeline]:
    """{name: the `median_step` of its rounds}."""
    return {name: median_step(tls, schedules[name]) for name, tls in rounds.items()}


def spread_of(timelines: Sequence[Timeline]) -> float:
    """Seconds between the longest and the shortest of several steps."""
    makespans = [tl.makespan for tl in timelines]
    return max(makespans) - min(makespans)


def work_and_bubble(steps: Mapping[str, Timeline]) -> dict[str, dict[str, float]]:
    """Two columns of a table: the mean time for which a rank computes, and the idle share."""
    return {
        "work (s)": {name: compute_seconds(tl) for name, tl in steps.items()},
        "bubble (%)": {name: 100 * tl.bubble_fraction for name, tl in steps.items()},
    }


def seconds_without_waits(tl: Timeline, schedule: Schedule) -> float:
    """The recorded step if each action started as soon as its rank and its input are ready."""
    duration = {event.label: event.duration for event in tl.events}  # {"0F0": seconds}
    return schedule.replay(lambda action: duration[str(action)]).makespan


def step_parts(
    steps: Mapping[Any, Timeline], schedules: Mapping[Any, Schedule], ideal: float
) -> dict[str, list[float]]:
    """Each of `steps` in parts: {part: its seconds in every step}.

    `ideal` is the work of a rank if a microbatch cost nothing extra; at most what the rank works is taken.
    """
    parts: dict[str, list[float]] = {"ideal": [], "small kernels": [], "bubble": [], "host wait": []}
    for name, tl in steps.items():
        work, replay = compute_seconds(tl), seconds_without_waits(tl, schedules[name])
        least = min(ideal, work)
        waits = max(0.0, tl.makespan - replay)  # 0 in replays whose messages take no time
        for part, part_seconds in zip(parts, (least, work - least, replay - work, waits), strict=True):
            parts[part].append(part_seconds)
    return parts


def simulate_layers(schedule: Schedule, costs: Sequence[float], counts: Sequence[int]) -> Timeline:
    """The step simulated from seconds of each layer's forward and backward, a third of them forward."""
    ends = list(accumulate(counts, initial=0))
    loads = [sum(costs[start:end]) for start, end in pairwise(ends)]
    return schedule.simulate(Costs([load / 3 for load in loads], [load * 2 / 3 for load in loads], 0.0))


def input_over_weight(tl: Timeline) -> float:
    """Seconds of all input gradients over seconds of all weight gradients of a step."""
    total = {op: sum(e.duration for e in tl.events if e.op == op) for op in "IW"}
    return total["I"] / total["W"]


def stage_costs(tl: Timeline, chunks: int = 1) -> Costs:
    """The recorded costs of stages, one a rank and backwards not split; I and W take half a backward each.

    With more than one of a rank's `chunks`, every chunk has the mean cost.
    """
    measured = Costs.measured(tl)
    assert isinstance(measured.forward, tuple)
    assert isinstance(measured.input_grad, tuple)
    forward, backward = list(measured.forward), list(measured.input_grad)
    if chunks > 1:
        count = chunks * len(forward)
        forward, backward = [sum(forward) / count] * count, [sum(backward) / count] * count
    half = [cost / 2 for cost in backward]
    return Costs(forward, half, half, 0.0)


def stage_seconds(tl: Timeline) -> list[float]:
    """Forward and backward of one microbatch in each stage: medians, in seconds."""
    costs = Costs.measured(tl)
    stages = 1 + max(e.stage for e in tl.events)
    return [costs.seconds(Action(s, "F", 0)) + costs.seconds(Action(s, "B", 0)) for s in range(stages)]


def slowest_over_mean(tl: Timeline) -> float:
    """The slowest forward plus the slowest backward, on any stages, over those of the mean stage."""
    costs, stages = Costs.measured(tl), range(1 + max(e.stage for e in tl.events))
    slowest = sum(max(costs.seconds(Action(s, op, 0)) for s in stages) for op in ("F", "B"))
    return slowest / statistics.mean(stage_seconds(tl))


def peak_in_flight(tl: Timeline, chunks: int = 1) -> float:
    """The most in-flight microbatches of any rank; a chunk counts as its share of one."""
    return max(tl.peak_in_flight(rank) for rank in tl.ranks) / chunks


def replay_on_link(tl: Timeline, schedule: Schedule, link: Link, message: float) -> Timeline:
    """The recorded step with messages of `message` bytes on `link`; "simulated"."""
    duration = {(e.stage, e.op, e.microbatch): e.duration for e in tl.events}
    return schedule.replay(lambda a: duration[a.stage, a.op, a.microbatch], seconds("send", message, 2, link))


def add_to_ledger(
    name: str, predicted: Mapping[str, float], steps: Mapping[str, Timeline], notebook: str = "02"
) -> None:
    """Add a row to the ledger for each schedule: its predicted step in seconds, and the step that was run."""
    for schedule, tl in steps.items():
        ranks = len(tl.ranks)
        result = {
            "step (s)": (predicted[schedule], tl.makespan),
            "bubble (%)": (None, 100 * tl.bubble_fraction),
        }
        ledger.add(notebook, hpnb.Layout(pp=ranks), f"{name}, {schedule}", result, hardware(ranks))


def hardware(ranks: int) -> str:
    """What this page's ranks run on, for the ledger: "4 x NVIDIA H200"."""
    return hardware_name(hpnb.ranks.choose_device("auto", ranks))
