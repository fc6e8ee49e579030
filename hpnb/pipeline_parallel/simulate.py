"""Simulate a schedule: what each rank does when, given how long each action takes.

    start(a) = max( end of the rank's action before,
                    end(n) + transfer  for every n that `a` needs,  transfer 0 on the same rank )
    end(a)   = start(a) + duration(a)

F needs F of the stage before. I and B need F of their stage, and I or B of the stage after. W needs its I.
A transfer delays the action that needs it and costs the ranks nothing; messages do not slow each other down.
The closed forms in `schedules.py` come out exactly, with costs that are Fractions or ints.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpnb.pipeline_parallel.action import Action
from hpnb.pipeline_parallel.action_lists import ActionLists
from hpnb.record.timeline import Event, Source, Timeline

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds of one stage for one microbatch. A chunk is a stage, so two chunks on a rank take twice that.

    Args:
        forward: seconds of a forward (F); one number, or a list or tuple with one per stage.
        input_grad: seconds of the gradient of a stage's input (I), given in the same way.
        weight_grad: seconds of the gradients of its weights (W). A backward that is not split (B) costs both.
        transfer: seconds from the end of an action to when another rank can use its result.

    Raises:
        ValueError: a cost that is negative or not a number, or several in anything but a list or tuple.

    >>> schedule = hpnb.pipeline_parallel.schedules.make("gpipe", stages=2, microbatches=2)
    >>> schedule.simulate(hpnb.pipeline_parallel.Costs(forward=1.0, input_grad=1.0, weight_grad=1.0)).makespan
    9.0
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    transfer: float = 0

    def __post_init__(self) -> None:
        for name, cost in vars(self).copy().items():
            several = isinstance(cost, Sequence) and name != "transfer"
            for value in cost if several else [cost]:
                if not _is_cost(value):
                    raise ValueError(f"{name}={cost!r}: a cost is a number of seconds, 0 or more")
            if several:
                object.__setattr__(self, name, tuple(cost))

    def seconds(self, action: Action) -> float:
        """Seconds of `action`."""
        i, w = self.input_grad, self.weight_grad
        parts = {"F": (self.forward,), "I": (i,), "W": (w,), "B": (i, w)}[action.op]
        return sum(_cost_of(cost, action.stage) for cost in parts)

    def check_stages(self, stages: int) -> None:
        """Make sure that there is one cost per stage, or one for all.

        Raises:
            ValueError: costs of another number of stages.
        """
        for name, cost in vars(self).items():
            if isinstance(cost, Sequence) and len(cost) != stages:
                raise ValueError(
                    f"{name} has {len(cost)} costs and the schedule {stages} stages; "
                    f"give {stages}, or one number for all of them"
                )

    @classmethod
    def measured(cls, timeline: Timeline, transfer: float = 0) -> Costs:
        """The median of each stage's recorded F, I and W, in seconds.

        Where a stage never splits its backward, all of B counts as `input_grad`, and `weight_grad` is 0. Do
        not simulate a schedule with W with such costs: its W would look free.

        Raises:
            ValueError: a stage of which no forward or no backward is recorded.
        """
        durations: dict[tuple[int, str], list[float]] = defaultdict(list)
        for event in timeline.events:
            if event.op in ("F", "I", "W", "B") and event.stage >= 0:
                durations[event.stage, event.op].append(event.duration)
        if not durations:
            raise ValueError("the timeline has no F, I, W or B of any stage, so there is nothing to measure")
        median = {key: statistics.median(seconds) for key, seconds in durations.items()}
        stages = range(1 + max(stage for stage, _ in durations))
        for stage in stages:
            if (stage, "F") not in median or not {(stage, "I"), (stage, "B")} & median.keys():
                raise ValueError(f"the timeline lacks a forward or a backward of stage {stage}")
        return cls(
            [median[s, "F"] for s in stages],
            [median.get((s, "I"), median.get((s, "B"), 0.0)) for s in stages],
            [median.get((s, "W"), 0.0) for s in stages],
            transfer,
        )


def simulate(schedule: ActionLists, costs: Costs) -> Timeline:
    """The Timeline of `schedule`, if its actions cost `costs`. Deadlocks: see `replay`."""
    costs.check_stages(schedule.stages)
    return replay(schedule, costs.seconds, costs.transfer)


def replay(
    schedule: ActionLists,
    duration: Callable[[Action], float],
    transfer: float = 0,
    source: Source = "simulated",
) -> Timeline:
    """The Timeline of `schedule`, if each action takes `duration(action)` seconds.

    A schedule that deadlocks is replayed up to where all ranks wait, and nothing is raised. `Schedule.replay`
    and `Schedule.simulate` check first, and raise ScheduleError.
    """
    # Zeros are ints here and in the defaults of `transfer`, so that Fractions stay exact.
    free_at: list[float] = [0] * schedule.ranks
    ends: dict[Action, float] = {}
    events = []
    for rank, _, action in schedule.order:  # every action comes after what it needs
        start = free_at[rank]
        for need in schedule.needs(action):
            delay = 0 if schedule.rank_of[need.stage] == rank else transfer
            start = max(start, ends[need] + delay)
        free_at[rank] = ends[action] = start + duration(action)
        events.append(Event(rank, action.stage, action.op, action.microbatch, start, ends[action]))
    return Timeline(tuple(events), source)


def _cost_of(cost: PerStage, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


def _is_cost(value: Any) -> bool:
    try:
        return math.isfinite(value) and bool(value >= 0)
    except (TypeError, ValueError, RuntimeError):  # the last two of tensors: several values, or none (meta)
        return False
