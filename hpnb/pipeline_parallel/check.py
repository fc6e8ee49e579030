"""Prove that a schedule can be run, by going through its lists.

The executor's promises keep the proof short. From each rank to each other there is one queue, in the order of
the sender's list. Sending never blocks. Before an action, its rank posts all receives of a queue up to the
one that it needs. So everything that is sent arrives, and only the lists can be wrong:

    a stage is on two ranks; an action is missing, and with it a message that nobody sends or nobody receives;
    an action comes twice; one comes before what it needs on the same rank;
    or ranks wait for each other in a circle, a deadlock
"""

from __future__ import annotations

from collections.abc import Collection

from hpnb.pipeline_parallel.action import Action, ScheduleError
from hpnb.pipeline_parallel.action_lists import ActionLists
from hpnb.pipeline_parallel.draw_grid import Position, draw_lists


def check(schedule: ActionLists) -> None:
    """Prove that every rank gets through its list.

    Raises:
        ScheduleError: with rank, step, reason and the lists, the fault marked.
    """
    for test in (
        _check_actions,
        _check_stages,
        _check_once,
        _check_complete,
        _check_order_on_rank,
        _check_no_circle,
    ):
        test(schedule)


def _error(
    schedule: ActionLists, position: Position, reason: str, also_marked: Collection[Position] = ()
) -> ScheduleError:
    return ScheduleError(*position, reason, draw_lists(schedule, {position, *also_marked}))


def _check_actions(schedule: ActionLists) -> None:
    if not schedule.ranks:
        raise ScheduleError(0, 0, "the schedule has no ranks")
    for rank, actions in enumerate(schedule.actions):
        if not actions:
            raise _error(schedule, (rank, 0), "this rank has nothing to do; leave it out or give it a stage")
        for step, a in enumerate(actions):
            if a.op not in ("F", "I", "W", "B") or a.stage < 0 or a.microbatch < 0:
                reason = f"{a} is no action: op is F, I, W or B, and stages and microbatches count from 0"
                raise _error(schedule, (rank, step), reason)


def _check_stages(schedule: ActionLists) -> None:
    first: dict[int, Position] = {}
    for rank, actions in enumerate(schedule.actions):
        for step, a in enumerate(actions):
            other_rank, at = first.setdefault(a.stage, (rank, step))
            if other_rank != rank:
                reason = f"{a} is of stage {a.stage}, which is on rank {other_rank} (from step {at})"
                raise _error(schedule, (rank, step), reason, [(other_rank, at)])
    for stage in range(schedule.stages):
        if stage not in first:
            after = min(s for s in first if s > stage)
            reason = f"stage {after} is here and stage {stage} on no rank; number the stages without a gap"
            raise _error(schedule, first[after], reason)


def _check_once(schedule: ActionLists) -> None:
    for rank, actions in enumerate(schedule.actions):
        seen: dict[tuple[int, str, int], tuple[int, Action]] = {}
        for step, a in enumerate(actions):
            for part in "IW" if a.op == "B" else a.op:
                before, same = seen.setdefault((a.stage, part, a.microbatch), (step, a))
                if before != step:
                    what = "comes twice" if same == a else f"computes again what {same} does"
                    reason = f"{a} {what}, first at step {before}"
                    raise _error(schedule, (rank, step), reason, [(rank, before)])


def _check_complete(schedule: ActionLists) -> None:
    positions = schedule.positions
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            f, i, w, b = (Action(stage, op, k) for op in ("F", "I", "W", "B"))
            if f in positions and (b in positions or (i in positions and w in positions)):
                continue
            missing = f if f not in positions else w if i in positions else i if w in positions else b
            has = [a for a in ((i,) if missing == w else (f, b, i, w)) if a in positions]
            rank = schedule.rank_of[stage]
            position = positions[has[0]] if has else (rank, len(schedule.actions[rank]))
            here = f"{has[0]} is here, and {missing} is missing" if has else f"{missing} is missing"
            raise _error(schedule, position, here + _describe_partner(schedule, missing))


def _describe_partner(schedule: ActionLists, missing: Action) -> str:
    """Who sends to, or waits for, an action that is missing, in words."""
    if missing.op == "W":
        return ": nobody computes that weight gradient"
    ops: tuple[str, ...] = ("F",) if missing.op == "F" else ("I", "B")
    onward = 1 if missing.op == "F" else -1
    for stage, words in (
        (missing.stage - onward, "nobody receives what {} sends"),
        (missing.stage + onward, "nobody sends what {} waits for"),
    ):
        for action in (Action(stage, op, missing.microbatch) for op in ops):  # type: ignore[arg-type]
            if action in schedule.positions:
                rank, step = schedule.positions[action]
                return f": {words.format(f'{action} (rank {rank}, step {step})')}"
    return ""


def _check_order_on_rank(schedule: ActionLists) -> None:
    for rank, actions in enumerate(schedule.actions):
        for step, a in enumerate(actions):
            for need in schedule.needs(a):
                other_rank, later = schedule.positions[need]
                if other_rank == rank and later > step:
                    reason = f"{a} needs {need}, which this rank does later, at step {later}"
                    raise _error(schedule, (rank, step), reason, [(rank, later)])


def _check_no_circle(schedule: ActionLists) -> None:
    steps = schedule.steps_done
    rank = next((r for r, actions in enumerate(schedule.actions) if steps[r] < len(actions)), None)
    if rank is None:
        return
    waits: dict[int, tuple[Action, Action]] = {}  # {rank: (the action that waits, what for)}
    while rank not in waits:  # who waits, waits for one who waits: follow that until it comes round
        action = schedule.actions[rank][steps[rank]]
        for need in schedule.needs(action):
            other_rank, step = schedule.positions[need]
            if step >= steps[other_rank]:
                waits[rank] = action, need
        rank = schedule.positions[waits[rank][1]][0]
    circle = list(waits)[list(waits).index(rank) :]
    start = circle.index(min(circle))
    circle = circle[start:] + circle[:start]
    words = []
    for r in circle:
        action, need = waits[r]
        other, step = schedule.positions[need]
        where = f"rank {other}'s step {step}"
        words.append(f"rank {r} waits at step {steps[r]} with {action} for {need}, {where}")
    marked = [(r, steps[r]) for r in circle]
    raise _error(schedule, marked[0], f"a circle: {'; '.join(words)}", marked)
