"""What every rank of a pipeline does, in order, as plain data; and what follows from it.

    rank 0   0F0 0F1 0B0 0B1            Action(stage, op, microbatch), written stage-op-microbatch
    rank 1   1F0 1B0 1F1 1B1

    F   forward                          needs the activation of the stage before
    I   gradient of the stage's input    needs the gradient from the stage after, and F of this stage
    W   gradient of its weights          needs I of this stage
    B   both at once

The lists determine everything else: which rank has which stage, who sends to whom, and which activations are
kept for how long.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

Op = Literal["F", "I", "W", "B"]
_WRITTEN = re.compile(r"(\d+)([FIWB])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a stage on one microbatch."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, written: str) -> Action:
        """ "2F0" -> Action(2, "F", 0).

        Raises:
            ValueError: anything else.
        """
        match = _WRITTEN.fullmatch(written.strip())
        if match is None:
            raise ValueError(
                f"{written!r} is no action; write stage, F, I, W or B, and microbatch, such as 2F0"
            )
        return cls(int(match[1]), cast(Op, match[2]), int(match[3]))


class ScheduleError(ValueError):
    """A schedule that cannot be run: at `.rank`, in `.step` of its list, for `.reason`; `.grid` shows it."""

    def __init__(self, rank: int, step: int, reason: str, grid: str = "") -> None:
        super().__init__(f"rank {rank}, step {step}: {reason}" + (f"\n{grid}" if grid else ""))
        self.rank, self.step, self.reason, self.grid = rank, step, reason, grid

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[object, ...]]:
        return ScheduleError, (self.rank, self.step, self.reason, self.grid)


@dataclass(frozen=True)
class ActionLists:
    """The actions of every rank, in order: the data of a `Schedule`."""

    actions: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    def __init__(self, actions: Iterable[str | Iterable[Action | str]], name: str = "custom") -> None:
        lists = (of_rank.split() if isinstance(of_rank, str) else of_rank for of_rank in actions)
        parsed = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in one) for one in lists)
        object.__setattr__(self, "actions", parsed)
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
        if (cached := self._needs_cache.get(action)) is not None:
            return cached
        source = self.source(action)
        needs = () if source is None else (source,)
        if action.op != "F":
            needs = (Action(action.stage, "I" if action.op == "W" else "F", action.microbatch), *needs)
        self._needs_cache[action] = needs
        return needs

    @cached_property
    def _needs_cache(self) -> dict[Action, tuple[Action, ...]]:
        return {}  # check and simulation ask for the same actions again and again

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
