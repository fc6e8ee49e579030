"""Can a schedule be run? A proof by doing it, on paper.

What the executor promises keeps the proof short. From each rank to each other there is one queue, in the
order of the sender's list. A send is complete only when it is received, but nobody waits for that; and before
an action its rank posts all receives of the queue up to the one that the action needs. So what has been sent
arrives, and what is left that can go wrong is in the lists:

    a stage on two ranks; an action that is missing, and with it a message that nobody sends or nobody
    receives; an action that comes twice; one that comes before what it needs on the same rank;
    and ranks that wait for each other in a circle
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpnb.pipeline_parallel.schedule import Action, Schedule, ScheduleError

_WIDTH = 160  # characters that a grid may have before its middle is left out
Place = tuple[int, int]  # (rank, step of its list)


def check(schedule: Schedule) -> None:
    """Prove that every rank gets through its list.

    Raises:
        ScheduleError: with rank, step, reason and the lists, the fault marked.
    """
    for test in (_are_actions, _have_one_rank, _come_once, _are_all_there, _are_in_order, _meet):
        test(schedule)


def _error(schedule: Schedule, place: Place, reason: str, also: Collection[Place] = ()) -> ScheduleError:
    return ScheduleError(*place, reason, _lists(schedule, {place, *also}))


def _are_actions(schedule: Schedule) -> None:
    if not schedule.ranks:
        raise ScheduleError(0, 0, "the schedule has no ranks")
    for rank, row in enumerate(schedule.actions):
        if not row:
            raise _error(schedule, (rank, 0), "this rank has nothing to do; leave it out or give it a stage")
        for step, a in enumerate(row):
            if a.op not in ("F", "I", "W", "B") or a.stage < 0 or a.microbatch < 0:
                reason = f"{a} is no action: op is F, I, W or B, and stages and microbatches count from 0"
                raise _error(schedule, (rank, step), reason)


def _have_one_rank(schedule: Schedule) -> None:
    first: dict[int, Place] = {}
    for rank, row in enumerate(schedule.actions):
        for step, a in enumerate(row):
            home, at = first.setdefault(a.stage, (rank, step))
            if home != rank:
                reason = f"{a} is of stage {a.stage}, which is on rank {home} (from step {at})"
                raise _error(schedule, (rank, step), reason, [(home, at)])
    for stage in range(schedule.stages):
        if stage not in first:
            after = min(s for s in first if s > stage)
            reason = f"stage {after} is here and stage {stage} on no rank; number the stages without a gap"
            raise _error(schedule, first[after], reason)


def _come_once(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        seen: dict[tuple[int, str, int], tuple[int, Action]] = {}
        for step, a in enumerate(row):
            for part in "IW" if a.op == "B" else a.op:
                before, same = seen.setdefault((a.stage, part, a.microbatch), (step, a))
                if before != step:
                    what = "comes twice" if same == a else f"computes again what {same} does"
                    reason = f"{a} {what}, first at step {before}"
                    raise _error(schedule, (rank, step), reason, [(rank, before)])


def _are_all_there(schedule: Schedule) -> None:
    where = schedule.where
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            f, i, w, b = (Action(stage, op, k) for op in ("F", "I", "W", "B"))
            if f in where and (b in where or (i in where and w in where)):
                continue
            missing = f if f not in where else w if i in where else i if w in where else b
            has = [a for a in ((i,) if missing == w else (f, b, i, w)) if a in where]
            rank = schedule.rank_of[stage]
            place = where[has[0]] if has else (rank, len(schedule.actions[rank]))
            here = f"{has[0]} is here, and {missing} is missing" if has else f"{missing} is missing"
            raise _error(schedule, place, here + _left_alone(schedule, missing))


def _left_alone(schedule: Schedule, missing: Action) -> str:
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
            if action in schedule.where:
                rank, step = schedule.where[action]
                return f": {words.format(f'{action} (rank {rank}, step {step})')}"
    return ""


def _are_in_order(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for step, a in enumerate(row):
            for need in schedule.needs(a):
                home, later = schedule.where[need]
                if home == rank and later > step:
                    reason = f"{a} needs {need}, which this rank does later, at step {later}"
                    raise _error(schedule, (rank, step), reason, [(rank, later)])


def _meet(schedule: Schedule) -> None:
    steps = _steps_done(schedule)
    rank = next((r for r, row in enumerate(schedule.actions) if steps[r] < len(row)), None)
    if rank is None:
        return
    waits: dict[int, tuple[Action, Action]] = {}  # {rank: (the action that waits, what for)}
    while rank not in waits:  # who waits, waits for one who waits: follow that until it comes round
        action = schedule.actions[rank][steps[rank]]
        for need in schedule.needs(action):
            home, step = schedule.where[need]
            if step >= steps[home]:
                waits[rank] = action, need
        rank = schedule.where[waits[rank][1]][0]
    circle = list(waits)[list(waits).index(rank) :]
    start = circle.index(min(circle))
    circle = circle[start:] + circle[:start]
    words = []
    for r in circle:
        action, need = waits[r]
        home, step = schedule.where[need]
        words.append(f"rank {r} waits at step {steps[r]} with {action} for {need}, rank {home}'s step {step}")
    places = [(r, steps[r]) for r in circle]
    raise _error(schedule, places[0], f"a circle: {'; '.join(words)}", places)


def _steps_done(schedule: Schedule) -> list[int]:
    """How far each rank gets."""
    steps = [0] * schedule.ranks
    for rank, step, _ in schedule.order:
        steps[rank] = step + 1
    return steps


# --- the grid --------------------------------------------------------------------------------------


def grid(schedule: Schedule) -> str:
    """A row a rank, a column a step: each action takes one step and starts as soon as it can.

    Where ranks wait for each other for ever: the lists side by side, marked where each rank waits.
    """
    steps = _steps_done(schedule)
    if stuck := {(r, steps[r]) for r, row in enumerate(schedule.actions) if steps[r] < len(row)}:
        return _lists(schedule, stuck)
    free, ends = [0] * schedule.ranks, dict[Action, int]()
    cells: dict[Place, str] = {}
    for rank, _, action in schedule.order:
        start = max([free[rank], *(ends[need] for need in schedule.needs(action))])
        cells[rank, start] = str(action)
        free[rank] = ends[action] = start + 1
    return _table(cells, schedule.ranks, max(free, default=0), idle=".")


def _lists(schedule: Schedule, marks: Collection[Place]) -> str:
    """The lists side by side, a column a step of the list; what is marked in brackets."""
    cells = {(rank, step): str(a) for rank, row in enumerate(schedule.actions) for step, a in enumerate(row)}
    for mark in marks:
        cells[mark] = f"[{cells.get(mark, ' ')}]"
    columns = 1 + max((step for _, step in cells), default=0)
    return _table(cells, schedule.ranks, columns, idle="", keep=[step for _, step in marks])


def _table(cells: dict[Place, str], ranks: int, columns: int, idle: str, keep: Sequence[int] = ()) -> str:
    """Rows of cells under their column's number; with too many columns, "..." instead of some."""
    width = max([len(str(columns)), *map(len, cells.values())])
    label = len(f"rank {ranks - 1}")
    shown = _shown(columns, (_WIDTH - label) // (width + 1), keep)

    def line(name: str, cell: dict[int, str]) -> str:
        texts = ["..." if c is None else cell.get(c, idle).center(width) for c in shown]
        return f"{name:<{label}} {' '.join(texts)}".rstrip()

    rows: list[dict[int, str]] = [{} for _ in range(ranks)]
    for (rank, column), text in cells.items():
        rows[rank][column] = text
    head = line("step", {c: str(c) for c in range(columns)})
    return "\n".join([head, *(line(f"rank {rank}", row) for rank, row in enumerate(rows))])


def _shown(columns: int, room: int, keep: Sequence[int]) -> list[int | None]:
    """The columns to show: all, or both ends and what is near those to keep. None is a gap."""
    if columns <= room:
        return list(range(columns))
    part = room // (3 if keep else 2)
    near = part // (2 * len(keep)) if keep else 0
    chosen = {*range(part), *range(columns - part, columns)}
    for column in keep:
        chosen |= set(range(max(0, column - near), min(columns, column + near + 1)))
    shown: list[int | None] = []
    for column in sorted(chosen):
        if column and column - 1 not in chosen:
            shown.append(None)
        shown.append(column)
    return shown
