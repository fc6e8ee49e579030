"""The lists of actions of a pipeline schedule, and what follows from them.

    rank 0   0F0 0F1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1

    rank_of   {0: 0, 1: 1}                 stage 1 is on rank 1
    needs     1B0 -> 1F0;  0B0 -> 0F0 1B0
    queues    {(0, 1): 0F0 0F1, (1, 0): 1B0 1B1}: the messages of each route, in the sender's order
    order     of all actions, each after what it needs

`Schedule` (schedule.py) adds what is done with them. check.py, draw_grid.py and simulate.py read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hpnb.pipeline_parallel.action import Action


@dataclass(frozen=True)
class ActionLists:
    """What every rank of a pipeline does, in order: arguments and errors of `Schedule`."""

    actions: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    def __init__(self, actions: Iterable[str | Iterable[Action | str]], name: str = "custom") -> None:
        lists = (of_rank.split() if isinstance(of_rank, str) else of_rank for of_rank in actions)
        parsed = ([Action.parse(a) if isinstance(a, str) else a for a in of_rank] for of_rank in lists)
        object.__setattr__(self, "actions", tuple(map(tuple, parsed)))
        object.__setattr__(self, "name", name)

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

        Between two stages of one rank nothing is sent. What carries the messages is in `transfers.py`.
        """
        by_route: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for source, actions in enumerate(self.actions):
            for action in actions:
                stage = self.receiving_stage(action)
                if stage is not None and (target := self.rank_of.get(stage, source)) != source:
                    by_route[source, target].append(action)
        return {route: tuple(by_route[route]) for route in sorted(by_route)}

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
