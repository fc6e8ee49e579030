"""Which forwards and backwards of a schedule may run as a pair, and how much all-to-all that leaves exposed.

    dualpipe-v, steady state    F0 B1 | F1 B0 | F0 B1 | ...        a pair: two actions that overlap

In a list F comes first and B directly after it. The two may overlap if no rank then waits for itself: B must
not need what F gives, be it by way of other ranks. `overlapped_pairs` proves it by going through all lists
with each pair as one action.

How long is a pair? One rank computes one thing at a time and its messages travel one after the other, so we
go through the segments of both sides as `hpnb.overlapped_pair` runs them:

    compute    [ F ][ B ][ F ]. . [ B ]            exposed: the dots, in which this rank waits
    messages        [~~~~ F ~~~~~][~~~ B ~~~]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpnb.overlapped_pair import Segments
from hpnb.pipeline_parallel.schedule import Action, Schedule
from hpnb.pipeline_parallel.simulate import Costs

Pairs = tuple[frozenset[int], ...]
"""Of each rank, the steps whose F overlaps the backward after it."""


def overlapped_pairs(schedule: Schedule) -> Pairs:
    """Which F can overlap the B or I directly after them. `schedule` is one that runs.

    All returned pairs can overlap in the same step. No pair could be added to them in the schedules of
    `schedules.py`. In lists that are written by hand one could in rare cases, because pairs are taken out one
    by one, and the first that is taken out need not be the one that is in the way.

    The two are of different stages, so 1F1B has no pair: modules have state for one use at a time, such as
    unsharded weights, and with recomputation a backward runs those of its stage forward again.
    """
    pairs = [
        {
            step
            for step, (first, second) in enumerate(pairwise(actions))
            if first.op == "F" and second.op in ("B", "I") and first.stage != second.stage
        }
        for actions in schedule.actions
    ]
    for rank, step, group in _runnable_groups(schedule, pairs):
        if not group:  # all ranks wait: the generator goes on with this F and its backward one by one
            pairs[rank].discard(step)
    return tuple(map(frozenset, pairs))


def _runnable_groups(
    schedule: Schedule, pairs: Sequence[frozenset[int] | set[int]]
) -> Iterator[tuple[int, int, Sequence[Action]]]:
    """(rank, step, the action or the pair that it does there), in an order in which they can be done.

    Where all ranks wait, some pair has a backward that needs its forward, by way of other ranks. Then this
    gives (rank, step, no actions) of the first pair whose forward could run alone, and goes on if the caller
    takes that pair out of `pairs`.
    """
    steps, done = [0] * schedule.ranks, set[Action]()

    def group_at(rank: int) -> Sequence[Action]:
        step = steps[rank]
        return schedule.actions[rank][step : step + (2 if step in pairs[rank] else 1)]

    def can_run(group: Sequence[Action]) -> bool:
        return bool(group) and all(need in done for action in group for need in schedule.needs(action))

    while any(steps[rank] < len(actions) for rank, actions in enumerate(schedule.actions)):
        before = sum(steps)
        for rank in range(schedule.ranks):
            if can_run(group := group_at(rank)):
                yield rank, steps[rank], group
                done.update(group)
                steps[rank] += len(group)
        if sum(steps) == before:
            rank = next(r for r in range(schedule.ranks) if can_run(group_at(r)[:1]))
            yield rank, steps[rank], ()


@dataclass(frozen=True)
class ExposedTime:
    """What a step costs with its messages.

    Attributes:
        makespan: seconds.
        compute, exposed, sent: seconds of each rank: computing, waiting for its own messages, and how long
            these travel. Where nothing overlaps, `exposed` is `sent`.
    """

    makespan: float
    compute: tuple[float, ...]
    exposed: tuple[float, ...]
    sent: tuple[float, ...]


def exposed_time(
    schedule: Schedule,
    pairs: Pairs,
    segments: Mapping[Action, Segments],
    message_seconds: Callable[[float], float],
    transfer: float = 0,
) -> ExposedTime:
    """Simulate a step with its messages.

    Args:
        pairs: of `overlapped_pairs`; empty sets run one action after the other.
        message_seconds: how long a message of so many bytes travels.
        transfer: from the end of an action to when another rank can use its result.
    """
    ends = dict[Action, float]()
    free_at: list[float] = [0] * schedule.ranks  # ints, so that Fractions stay exact
    totals: dict[str, list[float]] = {name: [0] * schedule.ranks for name in ("compute", "exposed", "sent")}
    for rank, _, group in _runnable_groups(schedule, pairs):
        if not group:
            raise ValueError(
                f"{schedule.name}: with these pairs all ranks wait; use overlapped_pairs(schedule)"
            )
        start = free_at[rank]
        for need in (need for action in group for need in schedule.needs(action)):
            delay = 0 if schedule.rank_of[need.stage] == rank else transfer
            start = max(start, ends[need] + delay)
        sides = [segments[action] for action in group]
        duration = pair_seconds(sides, message_seconds)
        compute = sum(sum(side.compute) for side in sides)
        totals["compute"][rank] += compute
        totals["exposed"][rank] += duration - compute
        totals["sent"][rank] += sum(message_seconds(nbytes) for side in sides for nbytes in side.nbytes)
        free_at[rank] = start + duration
        ends.update(dict.fromkeys(group, start + duration))
    return ExposedTime(max(free_at), *(tuple(totals[name]) for name in ("compute", "exposed", "sent")))


def even_segments(schedule: Schedule, costs: Costs, layers: int, nbytes: float) -> dict[Action, Segments]:
    """Segments as a model predicts them: a stage has so many `layers` of experts, routing is even, and
    computing falls evenly between the messages.

    Args:
        nbytes: bytes that leave a rank with one dispatch, or one combine, of a microbatch: a quarter of
            `hpnb.theory.experts.experts_sent`.
    """
    segments = {}
    for action in (action for actions in schedule.actions for action in actions):
        messages = 0 if action.op == "W" else 2 * layers
        share = costs.seconds(action) / (messages + 1)
        segments[action] = Segments((share,) * (messages + 1), (nbytes,) * messages)
    return segments


def pair_seconds(sides: Sequence[Segments], message_seconds: Callable[[float], float]) -> float:
    """How long the sides take together, turn by turn as in `hpnb.overlapped_pair`; one side takes the sum of
    its segments and messages."""
    position = [0] * len(sides)
    arrived: list[float] = [0] * len(sides)
    now: float = 0
    link_free: float = 0
    side = 0
    while True:
        at = position[side]
        now = max(now, arrived[side]) + sides[side].compute[at]
        position[side] += 1
        if at < len(sides[side].nbytes):
            link_free = max(now, link_free) + message_seconds(sides[side].nbytes[at])
            arrived[side] = link_free
        others = [s for s in range(len(sides)) if s != side and position[s] < len(sides[s].compute)]
        if others:
            side = others[0]
        elif position[side] == len(sides[side].compute):
            return now
