"""What one rank does under each schedule that a pipeline follows, one after the other.

A batch with fewer samples takes fewer microbatches, and so another list of actions. Stages, queues and what
has been learned of shapes stay: they depend on where stages lie, not on how many microbatches walk through.
"""

from __future__ import annotations

from hpnb.pipeline_parallel.executor import RankSchedule
from hpnb.pipeline_parallel.schedule import Schedule


class RankSchedules:
    """Made once a schedule, and kept.

    Args:
        schedule: the first one, checked.
        rank: the place on the axis.

    Attributes:
        schedule: the one that is followed.
        train, forwards: what the rank does, with backwards and without.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._rank = rank
        self._made: dict[Schedule, tuple[RankSchedule, RankSchedule]] = {}
        self._take(schedule)

    def follow(self, other: Schedule) -> None:
        """Take `other` from the next step on.

        Raises:
            ScheduleError: it cannot be run.
            ValueError: it lays the stages out otherwise.
        """
        before = self.schedule
        if other is before:
            return
        if other not in self._made:
            other.check()
            alike = other.rank_of == before.rank_of and other.queues.keys() == before.queues.keys()
            if not alike or other.splits > before.splits:
                raise ValueError(
                    f"{other.name} with {other.stages} stages cannot take the place of {before.name} with "
                    f"{before.stages}, for it lays them out otherwise: make another Pipeline for it"
                )
        self._take(other)

    def _take(self, schedule: Schedule) -> None:
        if schedule not in self._made:
            forwards = RankSchedule(_only_forwards(schedule), self._rank)
            self._made[schedule] = RankSchedule(schedule, self._rank), forwards
        self.schedule = schedule
        self.train, self.forwards = self._made[schedule]


def _only_forwards(schedule: Schedule) -> Schedule:
    rows = [[action for action in row if action.op == "F"] for row in schedule.actions]
    return Schedule(rows, f"{schedule.name}, forward only")
