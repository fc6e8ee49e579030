"""A pipeline schedule is plain data: what every rank does, in order.

    rank 0   0F0 0F1 0B0 0B1            Action(stage, op, microbatch), written stage-op-microbatch
    rank 1   1F0 1B0 1F1 1B1

The lists determine everything else: which rank has which stage, who sends to whom, and which activations are
kept for how long. The same object is checked, simulated, drawn and executed:

    action_lists.py   the lists, and what follows from them: needs, queues, order
    check.py          proves that every rank gets through its list
    simulate.py       predicts what each rank does when
    draw_grid.py      one row per rank, one column per unit of time
    schedules.py      makes the schedules of the literature
    executor.py       runs one rank's list

There is no second description of a schedule anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hpnb.pipeline_parallel.action import Action, Op, ScheduleError
from hpnb.pipeline_parallel.action_lists import ActionLists
from hpnb.pipeline_parallel.check import check
from hpnb.pipeline_parallel.draw_grid import draw_grid
from hpnb.pipeline_parallel.simulate import Costs, replay, simulate
from hpnb.record.timeline import Source, Timeline


@dataclass(frozen=True, init=False)
class Schedule(ActionLists):
    """What every rank of a pipeline does, in order. Any lists make a Schedule; `check` proves that it runs.

    Args:
        actions: a list a rank, of Actions or of their written form: ["0F0 0B0", "1F0 1B0"].
        name: for titles.

    Raises:
        ValueError: something that is not a written action.

    >>> schedule = hpnb.pipeline_parallel.Schedule(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    >>> schedule.check()  # no rank waits forever
    >>> schedule.simulate().peak_in_flight(0)
    2
    """

    def check(self) -> None:
        """Prove that every rank gets through its list.

        Raises:
            ScheduleError: with rank, step, reason and the grid, the fault marked.
        """
        self._checked  # noqa: B018 - a cached property, so lists are checked once

    @cached_property
    def _checked(self) -> bool:
        check(self)
        return True

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """Predict what each rank does when, if actions cost `costs`; by default F, I and W 1 s, and B 2 s.

        Raises:
            ScheduleError: a schedule that cannot be run.
            ValueError: costs of another number of stages.
        """
        self.check()
        return simulate(self, Costs() if costs is None else costs)

    def replay(
        self, duration: Callable[[Action], float], transfer: float = 0, source: Source = "simulated"
    ) -> Timeline:
        """Predict what each rank does when, if each action takes `duration(action)` seconds.

        Args:
            transfer: seconds from the end of an action to when another rank can use its result.
            source: what the Timeline says that it is.

        Raises:
            ScheduleError: a schedule that cannot be run.
        """
        self.check()
        return replay(self, duration, transfer, source)

    def __str__(self) -> str:
        """A grid: one row per rank, one column per unit of time. Every action takes one unit, and starts as
        soon as it can."""
        return draw_grid(self)

    def __reduce__(self) -> tuple[type[Schedule], tuple[object, ...]]:
        return Schedule, (self.actions, self.name)  # what follows from the lists need not be sent


__all__ = ["Action", "Op", "Schedule", "ScheduleError"]
