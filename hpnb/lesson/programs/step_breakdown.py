"""Where the seconds of a recorded step went: of a Timeline of all ranks, or put together from CPU times.

    step_parts.parts_of(timeline)                      {"computing": ..., "bubble": ..., ...}
    step_parts.replayed(seen, plan, schedule, link)    the same where ranks shared cores

Both give seconds by `hpnb.theory.STEP_PARTS`, mean over the ranks, which add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpnb.mesh import ParallelLayout
from hpnb.pipeline_parallel import Action, Schedule
from hpnb.pipeline_parallel.simulate import run as simulate
from hpnb.record import Event, Message, Timeline, ring_bytes
from hpnb.theory import STEP_PARTS, Link, seconds


@dataclass(frozen=True)
class Seen:
    """What one rank saw of its steps."""

    coordinates: dict[str, int]
    actions: list[dict[Action, float]]  # of each step, where ranks share cores
    optimizer: list[float]
    timelines: list[Timeline]  # of each step, where they do not
    messages: list[Message]
    peak: float


def parts_of(tl: Timeline) -> dict[str, float]:
    """A recorded step of all ranks by STEP_PARTS: what computing does not cover is tp's, dp's, or idle."""
    found = dict.fromkeys(STEP_PARTS, 0.0)
    for own in tl.by_rank.values():
        working = [e for e in own if e.op in "FIWB"]
        stepping = [e for e in own if e.op == "optimizer"]
        packing = [e for e in own if e.op == "compute"]
        busy = _union(working + stepping + packing)
        inline = _without(_union(e for e in own if e.axis.startswith("tp")), busy)
        reduced = _without(_without(_union(e for e in own if e.axis.startswith("dp")), busy), inline)
        found["computing"] += _length(_union(working))
        found["optimizer"] += _length(_union(stepping))
        found["exposed tp"] += _length(inline)
        found["exposed dp"] += _length(reduced) + _length(
            _without(_union(packing), _union(working + stepping))
        )
    mean = {part: took / len(tl.ranks) for part, took in found.items()}
    return {**mean, "bubble": max(0.0, tl.makespan - sum(mean.values()))}


def replayed(seen: Sequence[Seen], plan: ParallelLayout, schedule: Schedule, link: Link) -> dict[str, float]:
    """The parts of a step put together from CPU times, with every recorded message on `link`."""
    p, m = plan.pp, schedule.microbatches
    by_stage = [[each for each in seen if each.coordinates["pp"] == stage] for stage in range(p)]
    took: dict[Action, list[float]] = {}
    for each in seen:  # which all know the whole pipeline that they are in
        for step in each.actions:
            for action, cost in step.items():
                took.setdefault(action, []).append(cost)
    middle = {action: statistics.median(costs) for action, costs in took.items()}
    inline = [_mean(_seconds(each, "tp", link) for each in group) for group in by_stage]
    sends = [x.bytes for each in seen for x in each.messages if x.axis == "pp" and x.op == "send"]
    hop = seconds("send", max(sends), 2, link) if sends else 0.0

    def duration(action: Action) -> float:
        return middle[action] + (0.0 if action.op == "W" else inline[action.stage] / (2 * m))

    tl = simulate(schedule, duration, hop)
    ends = []
    for stage in range(p):
        own = [e for e in tl.events if e.stage == stage]
        behind = [e.duration for e in own if e.op in "IWB" and e.microbatch == m - 1]
        ends.append(
            max(e.end for e in own) + _mean(_bare(each, plan, sum(behind), link) for each in by_stage[stage])
        )
    computing = sum(middle.values()) / p
    tp = sum(inline) / p
    steps = [_mean(statistics.median(each.optimizer) for each in group) for group in by_stage]
    exposed = max(0.0, max(ends) - tl.makespan)
    optimizer = sum(steps) / p
    return {
        "computing": computing,
        "bubble": max(0.0, tl.makespan - computing - tp) + max(steps) - optimizer,
        "exposed tp": tp,
        "exposed dp": exposed,
        "optimizer": optimizer,
    }


def _seconds(seen: Seen, axis: str, link: Link, ops: tuple[str, ...] = ()) -> float:
    """Of this rank's messages along `axis`, one after the other."""
    total = 0.0
    for x in seen.messages:
        if (
            x.axis.startswith(axis)
            and (not ops or x.op in ops)
            and len(x.group) > 1
            and x.op not in ("send", "receive")
        ):
            total += seconds(x.op, x.bytes / ring_bytes(x.op, 1.0, len(x.group)), len(x.group), link)
    return total


def _bare(seen: Seen, plan: ParallelLayout, behind: float, link: Link) -> float:
    """Seconds of dp's messages that stick out of a backward of `behind` seconds."""
    if plan.dp == 1:
        return 0.0
    reduced = [x for x in seen.messages if x.axis == "dp" and x.op in ("all_reduce", "reduce_scatter")]
    total = _seconds(seen, "dp", link, ("all_reduce", "reduce_scatter"))
    gathered = _seconds(seen, "dp", link, ("all_gather",))
    n = max(1, len(reduced))
    first = max(total / n, total - (n - 1) * behind / n)
    if plan.zero_stage == 3:  # a gather of each unit hides behind the one before, forward and backward
        return total / n + gathered / n + max(0.0, total + gathered - 1.5 * behind)
    return first + gathered


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


# --- spans -----------------------------------------------------------------------------------------------

Spans = list[tuple[float, float]]


def _union(events: Iterable[Event]) -> Spans:
    found: Spans = []
    for start, end in sorted((e.start, e.end) for e in events):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _without(spans: Spans, others: Spans) -> Spans:
    """What of `spans` no other covers; both as `_union` gives them."""
    found: Spans = []
    for start, end in spans:
        for a, b in others:
            if b <= start or a >= end:
                continue
            if a > start:
                found.append((start, a))
            start = max(start, b)
        if start < end:
            found.append((start, end))
    return found


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
