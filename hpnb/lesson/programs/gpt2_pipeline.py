"""What notebook 06 measures on its ranks, and how it says what came out.

`layer_times.py` times single layers, from which a step is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

import hpnb
from hpnb.lesson.programs import layer_times, vit_pipeline
from hpnb.lesson.programs.device_timing import all_ranks, random_tokens, timing_gpt2
from hpnb.lesson.programs.layer_times import (
    LayerTimes,
    on_busy_cores,
    ranges_overlap,
    spread_words,
    token_loss,
)
from hpnb.lesson.programs.layer_times import time_layers as time_layers  # notebook 06 finds it here
from hpnb.lesson.programs.step_timing import median_by
from hpnb.lesson.programs.vit_tensor import mean_seconds
from hpnb.lesson.tables import present
from hpnb.lesson.values import claim, record, slug
from hpnb.models import GPT2Size
from hpnb.pipeline_parallel import Schedule
from hpnb.pipeline_parallel.partition import balanced
from hpnb.record import Timeline
from hpnb.theory import even_split, stage_loads

PartitionedSchedule = tuple[Schedule, Sequence[int]]  # what to run, and how many layers each stage has


# Why a claim may not hold.
FEW_TOKENS = "A block of few tokens takes longer to launch than to compute on a fast GPU."


@dataclass(frozen=True)
class StepRepeats:
    """One or more repeats of a step, with their makespans in seconds."""

    timelines: Sequence[Timeline]

    @property
    def seconds(self) -> list[float]:
        """The makespans, ascending."""
        return sorted(tl.makespan for tl in self.timelines)

    @property
    def median(self) -> Timeline:
        """The repeat with the median makespan."""
        return median_by(self.timelines, lambda tl: tl.makespan)

    @property
    def source(self) -> str:
        """ "measured"; or "replayed" where ranks share cores or a GPU."""
        return self.median.source.split()[0]

    @property
    def fastest(self) -> float:
        return self.seconds[0]

    @property
    def slowest(self) -> float:
        return self.seconds[-1]

    def overlaps(self, other: StepRepeats) -> bool:
        """Whether the ranges of both overlap, so that their difference is no finding."""
        return ranges_overlap(self.seconds, other.seconds)


def step_repeats(device: str | None = None) -> int:
    """How often a step is timed: 5 times, on a CPU 3 times. `device` is by default this rank's."""
    return 3 if (device or hpnb.device().type) == "cpu" else 5


def fastest_of(runs: Mapping[Any, StepRepeats]) -> list[Any]:
    """The run with the least median step, then those whose repeats overlap with its own, by median."""
    best, *others = sorted(runs, key=lambda name: runs[name].median.makespan)
    return [best, *(name for name in others if runs[name].overlaps(runs[best]))]


def fastest_in_words(runs: Mapping[str, StepRepeats]) -> dict[str, str]:
    """For prose: the name of the run with the least median step ("first"), and which "others" overlap."""
    first, *others = fastest_of(runs)
    whose = f"the repeats of {' and '.join(others)}" if others else "no other repeats"
    return {"first": first, "others": f"{whose} overlap with its own"}


def claim_order(
    statement: str,
    less: Sequence[float],
    more: Sequence[float],
    otherwise: str = "",
    unit: str = "",
    key: str = "",
) -> None:
    """Claim that all repeats of `less` are below all of `more`. If they overlap, say "not decided".

    `unit` is that of the numbers, and `key` records for the prose, in words, whether all repeats agree.
    """
    if key:
        words = "all repeats agree" if max(less) < min(more) else "all repeats say the opposite"
        undecided = "the repeats overlap, so this run doesn't decide that"
        record(key, undecided if ranges_overlap(less, more) else words)
    if ranges_overlap(less, more):
        text = f"Not decided whether {statement}: the repeats overlap"
        present(f"<p>{text}</p>", text)
    else:
        claim(statement, (max(less), "<", min(more)), otherwise, unit)


def claim_faster(runs: Mapping[str, StepRepeats], fast: str, slow: str, page: str = "06") -> None:
    """`claim_order` of the seconds of two runs, recorded as "06.order.zb-h1-faster-than-1f1b"."""
    statement = f'every repeat of "{fast}" is faster than "{slow}"'
    key = f"{page}.order.{slug(f'{fast} faster than {slow}')}"
    claim_order(statement, runs[fast].seconds, runs[slow].seconds, FEW_TOKENS, "s", key)


def claim_less_idle(runs: Mapping[str, StepRepeats], less: str, more: str, page: str = "06") -> None:
    """`claim_order` of the bubbles of two runs, recorded as "06.order.zb-h1-less-idle-than-1f1b"."""
    bubbles = bubble_percents(runs)
    statement = f'every repeat of "{less}" has a smaller bubble than "{more}"'
    key = f"{page}.order.{slug(f'{less} less idle than {more}')}"
    claim_order(statement, bubbles[less], bubbles[more], unit="%", key=key)


def faster(runs: Mapping[str, StepRepeats], fast: str, slow: str) -> dict[str, float | str]:
    """For prose: how many times as fast as `slow` the run `fast` is by the median ("gain"), and in words
    whether all repeats agree ("sure")."""
    a, b = runs[fast], runs[slow]
    word = "faster" if a.slowest < b.fastest else "slower"
    words = f"all of its repeats are {word} than all of the {slow} cut's"
    if a.overlaps(b):
        words = "their repeats overlap, so this run doesn't decide which is faster"
    return {"gain": b.median.makespan / a.median.makespan, "sure": words}


def compare(
    runs: Mapping[str, StepRepeats], predicted: Mapping[str, float], name: str, base: str
) -> dict[str, float | str]:
    """How long the step of `name` is beside `base`'s: "simulated", "run" by the median, and the "spread"."""
    return {
        "simulated": predicted[name] / predicted[base],
        "run": runs[name].median.makespan / runs[base].median.makespan,
        "spread": spread_words(runs[name].seconds, runs[base].seconds),
    }


def ratio_range(measured: Mapping[Any, float], predicted: Mapping[Any, float]) -> dict[str, float]:
    """The "least" and the "most" of measured / predicted."""
    ratios = [measured[name] / predicted[name] for name in predicted]
    return {"least": min(ratios), "most": max(ratios)}


def unequal_ranks(source: str, busy: Mapping[str, float]) -> dict[str, Any]:
    """For prose: the "source" of what ranks take for a microbatch, how many times as long as the others the
    last one takes ("slower"), and the bubble that stays with "endless" microbatches, by sum t + (m-1) max t.
    """
    *others, last = busy.values()
    endless = 1 - sum(busy.values()) / (len(busy) * max(busy.values()))
    return {"source": source, "slower": last * len(others) / sum(others), "endless": (100 * endless, "%")}


def beside(base: float, **values: float) -> dict[str, str]:
    """For prose: {name: "0.18 lower"}, how far each value is below or above `base`."""

    def compared(value: float) -> str:
        if value == base:
            return "no higher"
        gap = f"{abs(value - base):.2f}"
        return f"{'less than 0.01' if gap == '0.00' else gap} {'lower' if value < base else 'higher'}"

    return {name: compared(value) for name, value in values.items()}


def last_cut_in_words(positions: Mapping[int, StepRepeats], by_time: int) -> dict[str, Any]:
    """For prose: how many blocks beside the head are fastest by the median ("first"), how the cut by time,
    which leaves `by_time` there, compares with that ("by-time"), the "most" blocks, and how many times as
    long their fastest repeat takes as the slowest one of "first" ("by").
    """
    first, most = fastest_of(positions)[0], max(positions)
    ratio = positions[by_time].median.makespan / positions[first].median.makespan
    spread = spread_words(positions[by_time].seconds, positions[first].seconds)
    words = f"The cut by time leaves {by_time}, and its step takes {ratio:.2f} times as long"
    words = f"{words}, a difference {spread}"
    if by_time == first:
        words = "The cut by time leaves the same number"
    edge = ", the fewest that ran" if first == min(positions) > 0 else ""
    by = positions[most].fastest / positions[first].slowest
    return {"first": f"{first}{edge}", "by-time": words, "most": most, "by": by}


def cuts_in_words(same: bool, versus: Mapping[str, Any]) -> str:
    """For prose: how the step cut by FLOPs `compare`s with the one cut by time; equal cuts are one run."""
    if same:
        return "it is one cut, which ran once, so the run cannot tell the two apart"
    return f"the step cut by FLOPs takes {versus['run']:.2f} times as long, a difference {versus['spread']}"


def schedules_in_words(runs: Mapping[str, StepRepeats], base: str) -> dict[str, str]:
    """For prose: `fastest_in_words`; {run: how its bubble's difference from `base`'s compares with the
    spread of both}; and of how many pairs the repeats don't overlap ("decided")."""
    bubbles = bubble_percents(runs)
    words = {name: spread_words(shares, bubbles[base]) for name, shares in bubbles.items() if name != base}
    pairs = list(combinations(runs.values(), 2))
    decided = sum(not a.overlaps(b) for a, b in pairs)
    return fastest_in_words(runs) | words | {"decided": f"{decided} of the {len(pairs)}"}


def slowest_stages(
    flops: Sequence[float], times: LayerTimes, ranks: Sequence[int]
) -> tuple[dict[str, dict[str, float]], dict[str, float | str]]:
    """Columns of a table, a row for each number of ranks, and the worst of them beside what FLOPs misjudge.

    The columns are the seconds of the slowest stage of the cut by FLOPs and of the cut by time, and their
    ratio. Of the largest difference there are the "ratio" and the "excess" in blocks, and `error_in_blocks`,
    of which the "ends" are never less than the excess.
    """
    columns: dict[str, dict[str, float]] = {}
    for way, weights in {"by flops": flops, "by time": times.smooth}.items():
        loads = {f"{p} ranks": max(stage_loads(times.smooth, balanced(weights, p))) for p in ranks}
        columns[f"sum of layers, {way} (s)"] = loads
    by_flops, by_time = columns.values()
    columns["ratio"] = {row: by_flops[row] / by_time[row] for row in by_time}
    excess = max(by_flops[row] - by_time[row] for row in by_time) / times.block
    worst = {"ratio": max(columns["ratio"].values()), "excess": round(excess, 6)}
    return columns, {**worst, **error_in_blocks(flops, times)}


def cut_by_last(blocks: int, stages: int, last: int) -> tuple[int, ...]:
    """Layers of each stage, with `last` of all blocks beside the head and the others spread evenly.

    >>> cut_by_last(13, 4, 1)
    (5, 4, 4, 2)
    """
    first, *between = even_split(blocks - last, stages - 1)
    return (first + 1, *between, last + 1)  # the embedding and the head


def slide_last_cut(
    times: LayerTimes,
    schedule: Schedule,
    marked: Mapping[int, Sequence[int]],
) -> dict[int, tuple[int, ...]]:
    """{blocks beside the head, ascending: layers of each stage}: those of `marked`, and others around them.

    The largest number is the first one above `marked` whose simulated step takes 1.6 times as long as the
    shortest, so that the spread of repeats does not bury the difference. Below the smallest of `marked` there
    are three more, and one above, because the fastest may be there. Between that one and the largest there
    are about three more, or one if the model is small, as it is on a CPU.
    """
    blocks, stages = times.kinds.count("block"), schedule.stages
    low, near, last = max(0, min(marked) - 3), min(marked) + 1, blocks - stages + 1

    def seconds(number: int) -> float:
        return times.step(schedule, cut_by_last(blocks, stages, number)).makespan

    shortest = min(seconds(number) for number in range(low, max(marked) + 1))
    above = range(max(marked) + 1, last + 1)
    high = next((number for number in above if seconds(number) >= 1.6 * shortest), last)
    stride = max(1, -(-(high - near) // (4 if blocks > 16 else 2)))
    numbers = (*range(low, near), *range(near, high, stride), high)
    slid = {number: cut_by_last(blocks, stages, number) for number in numbers}
    return dict(sorted((slid | {number: tuple(counts) for number, counts in marked.items()}).items()))


def error_in_blocks(flops: Sequence[float], times: LayerTimes) -> dict[str, float | str]:
    """By how many blocks FLOPs misjudge the ends of the model: the "head", and the embedding and the head
    together ("ends"), which is the most by which their cut's slowest stage can exceed the best one.

    Also in "word" whether they "overrate" or "underrate" the head.
    """
    head = flops[-1] / flops[1] - times.head
    embedding = flops[0] / flops[1] - times.costs[0] / times.block
    word = "overrate" if head > 0 else "underrate"
    return {"head": abs(head), "ends": round(abs(head) + abs(embedding), 6), "word": word}


def range_columns(runs: Mapping[Any, StepRepeats]) -> dict[str, dict[Any, float]]:
    """Columns of a table: the fastest and the slowest repeat of each run."""
    return {
        "fastest (s)": {name: repeats.fastest for name, repeats in runs.items()},
        "slowest (s)": {name: repeats.slowest for name, repeats in runs.items()},
    }


def bubble_percents(runs: Mapping[Any, StepRepeats]) -> dict[Any, list[float]]:
    """{run: the bubble of each repeat, ascending, in percent}."""
    shares = {name: sorted(tl.bubble_fraction for tl in repeats.timelines) for name, repeats in runs.items()}
    return {name: [100 * share for share in of_run] for name, of_run in shares.items()}


def bubble_columns(runs: Mapping[Any, StepRepeats]) -> dict[str, dict[Any, float]]:
    """Columns of a table: the bubble of the repeat with the median step, and the lowest and the highest."""
    bubbles = bubble_percents(runs)
    return {
        "of the median step (%)": {name: 100 * runs[name].median.bubble_fraction for name in runs},
        "lowest (%)": {name: of_run[0] for name, of_run in bubbles.items()},
        "highest (%)": {name: of_run[-1] for name, of_run in bubbles.items()},
    }


def memory_columns(
    peaks: Mapping[str, Sequence[float]], steps: Mapping[str, Timeline], chunks: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Columns of a table: bytes kept and microbatches in flight, at the peak of the first and the last rank.

    A microbatch in flight on one of two stages of a rank, as `chunks` has them, counts as half.
    """
    columns: dict[str, dict[str, float]] = {}
    ends = {rank for step in steps.values() for rank in (min(step.ranks), max(step.ranks))}
    for rank in sorted(ends):
        columns[f"kept on rank {rank} (B)"] = {name: peaks[name][rank] for name in steps}
    for rank in sorted(ends):
        counts = {name: step.peak_in_flight(rank) / chunks[name] for name, step in steps.items()}
        columns[f"in flight on rank {rank}"] = counts
    return columns


def w_over_i(steps: Mapping[str, Timeline]) -> dict[str, float]:
    """{schedule: the duration of all its W over that of all its I}, of those that split the backward."""
    split = {name: step for name, step in steps.items() if any(e.op == "W" for e in step.events)}
    return {name: 1 / vit_pipeline.input_over_weight(step) for name, step in split.items()}


def seconds_per_rank(steps: Mapping[str, Timeline], ops: str) -> dict[str, float]:
    """{schedule: how long the actions of `ops` take, mean over the ranks}."""
    return {name: mean_seconds(step, ops) for name, step in steps.items()}


def add_to_ledger(model: str, predicted: Mapping[str, float], steps: Mapping[str, Timeline]) -> None:
    """`vit_pipeline.add_to_ledger` of notebook 06."""
    vit_pipeline.add_to_ledger(model, predicted, steps, notebook="06")


def peaks_by_run(
    pool: hpnb.Ranks, size: GPT2Size, rows: int, dtype: torch.dtype, runs: Mapping[str, PartitionedSchedule]
) -> dict[str, list[float]]:
    """{schedule: `peak_activations` of each rank}; on a CPU the first and the last rank have numbers."""
    return {name: pool.run(peak_activations, size, rows, dtype, run) for name, run in runs.items()}


# --- on a rank ---------------------------------------------------------------------------------------


def time_in_turn(calls: Mapping[Any, Callable[[], object]], repeats: int = 7) -> dict[Any, list[float]]:
    """`layer_times.seconds_in_turn` of calls that communicate nothing and are the same on every rank, so that
    `on_busy_cores` can leave them to some of the ranks.
    """
    return on_busy_cores(lambda: layer_times.seconds_in_turn(calls, repeats))


def share_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that computes with the memory of the model's weights, and has gradients of its own: pipelines
    that take turns need one model's memory, as long as they only read the weights.
    """
    shared: dict[int, torch.Tensor] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        shared[id(parameter)] = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
    return deepcopy(model, shared)


def peak_activations(size: GPT2Size, rows: int, dtype: torch.dtype, run: PartitionedSchedule) -> float:
    """Bytes that this rank holds at the peak of a step, besides weights and gradients: what autograd keeps
    for the backward, and what I has put aside for W.

    On a CPU, where watching takes as long as the step, the ranks between the first and the last return NaN;
    and a few tokens warm up, because gradients are as large with them.
    """
    (schedule, counts), axis, batch = run, all_ranks("pp"), random_tokens(size, rows)
    on_cpu = hpnb.device().type == "cpu"
    pipe = hpnb.Pipeline(timing_gpt2(size, dtype), axis, schedule, token_loss, cut=counts)
    few = random_tokens(replace(size, length=4), schedule.microbatches) if on_cpu else batch
    pipe.step(few, return_outputs=False, record=False)
    if on_cpu and 0 < axis.rank < axis.size - 1:
        pipe.step(batch, return_outputs=False, record=False)
        return math.nan
    with hpnb.record.memory(pipe.module) as recorder:
        pipe.step(batch, return_outputs=False, record=False)
    return float(max(now.activations + now.temporary for now in recorder.profile().samples))
