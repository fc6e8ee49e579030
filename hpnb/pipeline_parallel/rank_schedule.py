"""What one rank does of a schedule: its actions, and the messages between it and other ranks.

A batch with fewer samples takes fewer microbatches, and so another list of actions. Stages, routes and known
shapes stay: they depend on which rank has which stage, and not on the number of microbatches.
"""

from __future__ import annotations

from functools import cached_property

from hpnb.mesh import MICROBATCHES_PER_STAGE, Axis
from hpnb.pipeline_parallel import schedules
from hpnb.pipeline_parallel.overlapped_pairs import overlapped_pairs
from hpnb.pipeline_parallel.schedule import Schedule


class RankSchedule:
    """What one rank does under a schedule, whatever the batch.

    Attributes:
        message_index: {an action whose result is sent: (its route, its index among the route's messages)}.
        correction_microbatch: the microbatch whose gradient carries the loss's correction: the first that
            goes back after the last stage has done all its forwards. -1 if there are only forwards.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.actions = schedule, rank, schedule.actions[rank]
        by_route = schedule.queues
        self.message_index = {a: (route, i) for route, sent in by_route.items() for i, a in enumerate(sent)}
        last = schedule.stages - 1
        of_last = [a for a in schedule.actions[schedule.rank_of[last]] if a.stage == last]
        last_forward = max(i for i, a in enumerate(of_last) if a.op == "F")
        backwards = (a.microbatch for a in of_last[last_forward:] if a.op in ("I", "B"))
        self.correction_microbatch = next(backwards, -1)

    @property
    def last_stage(self) -> int:
        return self.schedule.stages - 1

    @cached_property
    def overlapped_positions(self) -> frozenset[int]:
        """Where in its list a forward may overlap the backward after it."""
        return overlapped_pairs(self.schedule)[self.rank]


class RankSchedules:
    """The rank schedules of all schedules that a pipeline follows, one schedule after another.

    Attributes:
        train, forward_only: what this rank does of `schedule`, with backwards and without.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._rank, self._may_split = rank, schedule.splits
        self._rank_schedules: dict[Schedule, tuple[RankSchedule, RankSchedule]] = {}
        self._select(schedule)

    def follow(self, other: Schedule) -> None:
        """Follow `other` from the next step on."""
        current = self.schedule
        if other is current:
            return
        if other not in self._rank_schedules:
            other.check()
            if reason := self._why_not(other):
                raise ValueError(
                    f"{other.name} with {other.stages} stages cannot take the place of {current.name} with "
                    f"{current.stages}, because {reason}: make another Pipeline for it"
                )
        self._select(other)

    def _why_not(self, other: Schedule) -> str:
        """Why this pipeline cannot follow `other`; empty if it can."""
        if other.rank_of != self.schedule.rank_of:
            return "its stages are others, or on other ranks"
        if other.queues.keys() != self.schedule.queues.keys():
            return "it sends between other ranks"
        if other.splits and not self._may_split:
            return "it splits backwards, and the first schedule of this Pipeline does not"
        return ""

    def _select(self, schedule: Schedule) -> None:
        if schedule not in self._rank_schedules:
            forwards = RankSchedule(_only_forwards(schedule), self._rank)
            self._rank_schedules[schedule] = RankSchedule(schedule, self._rank), forwards
        self.schedule = schedule
        self.train, self.forward_only = self._rank_schedules[schedule]


def schedule_on(axis: Axis, schedule: Schedule | str) -> Schedule:
    """`schedule`, checked for the ranks of `axis`; of a name the one with `MICROBATCHES_PER_STAGE` a rank,
    and two stages a rank if it interleaves them."""
    if isinstance(schedule, str):
        chunks = schedules.default_chunks(schedule)
        count = MICROBATCHES_PER_STAGE * axis.size
        schedule = schedules.make(schedule, axis.size * chunks, count, chunks)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule={schedule!r} is none; use schedules.make, or a name as '1f1b'")
    schedule.check()
    if schedule.ranks != axis.size:
        raise ValueError(
            f"{schedule.name} with {schedule.stages} stages is for {schedule.ranks} ranks, and axis "
            f"{axis.name} has {axis.size}; make it with stages={axis.size * schedule.chunks}"
        )
    return schedule


def _only_forwards(schedule: Schedule) -> Schedule:
    lists = [[action for action in actions if action.op == "F"] for actions in schedule.actions]
    return Schedule(lists, f"{schedule.name}, forward only")
