"""Where the seconds of a recorded step went: of a Timeline of all ranks, or replayed from times of actions.

Seconds are by `hpnb.theory.STEP_PARTS`, mean over the ranks, and add up to the step. "exposed dp" has all
sums of gradients: over replicas and ranks of cp, and of a tied weight over the stages that have it. In a
replayed step no message of cp overlaps with computing, so its "exposed cp" is the most that it can be.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpnb.mesh import ParallelLayout
from hpnb.pipeline_parallel import Action, Schedule
from hpnb.record import Message, Timeline, ring_bytes
from hpnb.theory import STEP_PARTS, Link, seconds


@dataclass
class RankRecord:
    """What one rank recorded of its steps.

    Attributes:
        actions, optimizer: seconds of each step that this rank computed, where ranks share cores or a GPU.
        collectives: CPU seconds of each step's collectives of tp, where ranks share cores.
        timelines: of each step, where they do not share cores or a GPU.
        messages, peak: of one step; bytes.
    """

    coordinates: dict[str, int]
    actions: list[dict[Action, float]] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    peak: float = 0.0
    losses: list[float] = field(default_factory=list)


def split_step(tl: Timeline) -> dict[str, float]:
    """A recorded step of all ranks by STEP_PARTS: what computing does not cover is tp, cp, dp, or idle."""
    from hpnb.plot.lanes import exposed_parts

    working, stepping = tl.select("FIWB"), tl.select(["optimizer"])
    both = tl.select([*"FIWB", "optimizer"])
    busy = tl.select([*"FIWB", "optimizer", "compute"])  # packing of messages, too
    parts = dict.fromkeys(STEP_PARTS, 0.0)
    for rank, on_rank in tl.by_rank.items():
        inner = [e for e in on_rank if e.axis.startswith(("tp", "cp"))]
        sums = [e for e in on_rank if e.axis.startswith("dp") or (e.axis, e.op) == ("pp", "all_reduce")]
        for e, start, end in exposed_parts([*busy.by_rank.get(rank, ()), *inner, *sums]):
            axis = e.axis[:2] if e.axis.startswith(("tp", "cp")) else "dp"
            parts[f"exposed {axis}"] += end - start
        parts["computing"] += working.work(rank)
        parts["optimizer"] += stepping.work(rank)
        parts["exposed dp"] += busy.work(rank) - both.work(rank)
    mean = {part: took / len(tl.ranks) for part, took in parts.items()}
    return {**mean, "bubble": max(0.0, tl.makespan - sum(mean.values()))}


def replay_step(
    records: Sequence[RankRecord], layout: ParallelLayout, schedule: Schedule, link: Link
) -> tuple[dict[str, float], Timeline]:
    """(parts, one pipeline's timeline) of a step in which actions take what they took, with every recorded
    message on `link`."""
    p, last = layout.pp, schedule.microbatches - 1
    by_place = [[record for record in records if record.coordinates["pp"] == place] for place in range(p)]
    took: dict[Action, list[float]] = {}
    # a rank's steps have the actions of all stages of its pipeline
    for step in (step for record in records for step in record.actions):
        for action, cost in step.items():
            took.setdefault(action, []).append(cost)
    medians = {action: statistics.median(costs) for action, costs in took.items()}
    tp = [statistics.mean(_seconds(record, "tp", link) for record in group) for group in by_place]
    cp = [statistics.mean(_seconds(record, "cp", link) for record in group) for group in by_place]
    # their messages are spread evenly over a rank's forwards and backwards
    per_action = [(tp[r] + cp[r]) / sum(a.op != "W" for a in schedule.actions[r]) for r in range(p)]
    in_line = {a: per_action[r] for r in range(p) for a in schedule.actions[r] if a.op != "W"}
    sends = [m.bytes for record in records for m in record.messages if m.axis == "pp" and m.op == "send"]
    hop = seconds("send", max(sends), 2, link) if sends else 0.0

    source = f"replayed over {link.name}" if link.name else "replayed"
    tl = schedule.replay(lambda action: medians[action] + in_line.get(action, 0.0), hop, source)
    ends = []
    for place, group in enumerate(by_place):
        events = tl.by_rank[place]
        backward = sum(e.duration for e in events if e.op in "IWB" and e.microbatch == last)
        tied = statistics.mean(_seconds(record, "pp", link) for record in group)  # sums of the tied table
        exposed = tied + statistics.mean(_exposed_dp(record, layout, backward, link) for record in group)
        ends.append(max(e.end for e in events) + exposed)
    computing, mean_tp, mean_cp = sum(medians.values()) / p, sum(tp) / p, sum(cp) / p
    steps = [statistics.mean(statistics.median(r.optimizer) for r in group) for group in by_place]
    optimizer = sum(steps) / p
    parts = {
        "computing": computing,
        "bubble": max(0.0, tl.makespan - computing - mean_tp - mean_cp) + max(steps) - optimizer,
        "exposed tp": mean_tp,
        "exposed cp": mean_cp,
        "exposed dp": max(0.0, max(ends) - tl.makespan),
        "optimizer": optimizer,
    }
    return parts, tl


def _seconds(record: RankRecord, axis: str, link: Link, ops: tuple[str, ...] = ()) -> float:
    """Seconds of this rank's collectives along `axis`, and of a ring's sends along cp, one by one."""
    total = 0.0
    for m in record.messages:
        ranks, wanted = len(m.group), not ops or m.op in ops
        hop = m.op == "receive" or (m.op == "send" and axis != "cp")
        if m.axis.startswith(axis) and wanted and ranks > 1 and not hop:
            total += seconds(m.op, m.bytes / ring_bytes(m.op, 1.0, ranks), ranks, link)
    return total


def _exposed_dp(record: RankRecord, layout: ParallelLayout, backward: float, link: Link) -> float:
    """Seconds of dp's messages that a backward of `backward` seconds leaves exposed."""
    if layout.dp * layout.cp == 1:
        return 0.0
    reductions = ("all_reduce", "reduce_scatter")
    count = max(1, sum(m.axis.startswith("dp") and m.op in reductions for m in record.messages))
    reduced = _seconds(record, "dp", link, reductions)
    gathered = _seconds(record, "dp", link, ("all_gather",))
    if layout.zero_stage == 3:  # a gather of each unit overlaps with the unit before, forward and backward;
        # units are reduced when the backward has ended
        return reduced + gathered / count + max(0.0, gathered - 1.5 * backward)
    return max(reduced / count, reduced - (count - 1) * backward / count) + gathered
