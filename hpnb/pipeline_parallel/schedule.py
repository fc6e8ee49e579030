"""A pipeline schedule is plain data: what every rank does, in order.

    rank 0   0F0 0F1 0B0 0B1            Action(stage, op, microbatch), written stage-op-microbatch
    rank 1   1F0 1B0 1F1 1B1

The lists determine everything else: which rank has which stage, who sends to whom, and which activations are
kept for how long. The same object is checked, simulated, drawn and executed:

    check.py          proves that every rank gets through its list
    simulate.py       predicts what each rank does when
    draw_grid.py      a row a rank, a column a step
    schedules.py      makes the schedules of the literature
    executor.py       runs one rank's list

There is no second description of a schedule anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from hpnb.pipeline_parallel.action import Action, Op, ScheduleError
from hpnb.pipeline_parallel.check import check
from hpnb.pipeline_parallel.draw_grid import draw_grid
from hpnb.pipeline_parallel.simulate import Costs, replay, simulate
from hpnb.record.timeline import Source, Timeline


@dataclass(frozen=True)
class Schedule:
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

    actions: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    def __init__(self, actions: Iterable[str | Iterable[Action | str]], name: str = "custom") -> None:
        lists = (of_rank.split() if isinstance(of_rank, str) else of_rank for of_rank in actions)
        parsed = ([Action.parse(a) if isinstance(a, str) else a for a in of_rank] for of_rank in lists)
        object.__setattr__(self, "actions", tuple(map(tuple, parsed)))
        object.__setattr__(self, "name", name)

    # --- what is done with it -----------------------------------------------------------------------------

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
        """Predict what each rank does when, if actions cost `costs`; by default 1 s each.

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
        """A grid: a row a rank, a column a step in which all that can is done, if each action takes one."""
        return draw_grid(self)

    def __reduce__(self) -> tuple[type[Schedule], tuple[object, ...]]:
        return Schedule, (self.actions, self.name)  # what follows from the lists need not be sent

    # --- what follows from the lists -----------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @cached_property
    def stages(self) -> int:
        return 1 + max((a.stage for actions in self.actions for a in actions), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((a.microbatch for actions in self.actions for a in actions), default=-1)

    @cached_property
    def positions(self) -> dict[Action, tuple[int, int]]:
        """{action: (its rank, its step in the rank's list)}."""
        return {
            action: (rank, step)
            for rank, actions in enumerate(self.actions)
            for step, action in enumerate(actions)
        }

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """{stage: its rank}."""
        return {a.stage: rank for rank, actions in enumerate(self.actions) for a in actions}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(sorted({a.stage for a in self.actions[rank]}))

    @cached_property
    def chunks(self) -> int:
        """The most stages that a rank has."""
        return max((len(self.stages_of(rank)) for rank in range(self.ranks)), default=0)

    @cached_property
    def splits(self) -> bool:
        """Whether backwards are split into I and W."""
        return any(a.op == "I" for actions in self.actions for a in actions)

    def source(self, action: Action) -> Action | None:
        """The action whose message `action` takes: F of the stage before, or the backward of the stage after.
        None for W, and at both ends of the pipeline.

        The stage after may do B where this one does I, or the other way round: either sends the gradient.
        """
        stage, m = action.stage, action.microbatch
        if action.op == "F":
            return Action(stage - 1, "F", m) if stage else None
        if action.op == "W" or stage + 1 >= self.stages:
            return None
        same = Action(stage + 1, action.op, m)
        return same if same in self.positions else Action(stage + 1, "I" if action.op == "B" else "B", m)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that come before `action`: one of its own stage, unless it is F, and its `source`."""
        source = self.source(action)
        needs = () if source is None else (source,)
        if action.op == "F":
            return needs
        return (Action(action.stage, "I" if action.op == "W" else "F", action.microbatch), *needs)

    def receiving_stage(self, action: Action) -> int | None:
        """The stage that takes the result of `action`: the one after for F, the one before for I and B."""
        if action.op == "W":
            return None
        stage = action.stage + (1 if action.op == "F" else -1)
        return stage if 0 <= stage < self.stages else None

    @cached_property
    def queues(self) -> dict[tuple[int, int], tuple[Action, ...]]:
        """{(source rank, destination rank): the actions whose results are sent, in the sender's order}.

        Between two stages of one rank nothing is sent.
        """
        queues: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for source, actions in enumerate(self.actions):
            for action in actions:
                stage = self.receiving_stage(action)
                if stage is not None and (target := self.rank_of.get(stage, source)) != source:
                    queues[source, target].append(action)
        return {pair: tuple(queues[pair]) for pair in sorted(queues)}

    @cached_property
    def order(self) -> tuple[tuple[int, int, Action], ...]:
        """Every (rank, step, action) in an order in which they can be done, each rank keeping to its list.

        Ends early where all the ranks that have something left wait for each other.
        """
        order: list[tuple[int, int, Action]] = []
        done: set[Action] = set()
        steps = [0] * self.ranks
        waiting: dict[Action, list[int]] = {}  # {the action to be done first: the ranks that wait for it}
        runnable = list(range(self.ranks))
        while runnable:
            rank = runnable.pop()
            while steps[rank] < len(self.actions[rank]):
                action = self.actions[rank][steps[rank]]
                missing = next((need for need in self.needs(action) if need not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                order.append((rank, steps[rank], action))
                done.add(action)
                steps[rank] += 1
                runnable += waiting.pop(action, ())
        return tuple(order)

    @cached_property
    def steps_done(self) -> tuple[int, ...]:
        """How many actions of its list each rank gets through."""
        steps = [0] * self.ranks
        for rank, step, _ in self.order:
            steps[rank] = step + 1
        return tuple(steps)


__all__ = ["Action", "Op", "Schedule", "ScheduleError"]
