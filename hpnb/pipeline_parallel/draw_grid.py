"""A schedule as text: a row a rank, a column a step.

step    0   1   2   3   4   5   6   7
rank 0 0F0 0F1  .  0B0 0F2 0B1  .  0B2
rank 1  .  1F0 1B0 1F1 1B1 1F2 1B2  .
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpnb.pipeline_parallel.action_lists import ActionLists
from hpnb.pipeline_parallel.simulate import replay

Position = tuple[int, int]  # (rank, step of its list)
_WIDTH = 160  # characters that a grid may have before its middle is left out


def draw_grid(schedule: ActionLists) -> str:
    """A row a rank, a column a step, if each action takes one step and starts as soon as it can.

    Where ranks wait for each other for ever: the lists side by side, marked where each rank waits.
    """
    steps = schedule.steps_done
    if stuck := {(r, steps[r]) for r, row in enumerate(schedule.actions) if steps[r] < len(row)}:
        return draw_lists(schedule, stuck)
    events = replay(schedule, lambda action: 1).events
    cells = {(e.rank, int(e.start)): f"{e.stage}{e.op}{e.microbatch}" for e in events}
    return _table(cells, schedule.ranks, max((int(e.end) for e in events), default=0), idle=".")


def draw_lists(schedule: ActionLists, marks: Collection[Position]) -> str:
    """The lists side by side, a column a step of the list; what is marked in brackets."""
    cells = {(rank, step): str(a) for rank, row in enumerate(schedule.actions) for step, a in enumerate(row)}
    for mark in marks:
        cells[mark] = f"[{cells.get(mark, ' ')}]"
    columns = 1 + max((step for _, step in cells), default=0)
    return _table(cells, schedule.ranks, columns, idle="", keep=[step for _, step in marks])


def _table(cells: dict[Position, str], ranks: int, columns: int, idle: str, keep: Sequence[int] = ()) -> str:
    """Rows of cells under their column's number; with too many columns, "..." instead of some."""
    width = max([len(str(columns)), *map(len, cells.values())])
    label = len(f"rank {ranks - 1}")
    shown = _choose_columns(columns, (_WIDTH - label) // (width + 1), keep)

    def line(name: str, cell: dict[int, str]) -> str:
        texts = ["..." if c is None else cell.get(c, idle).center(width) for c in shown]
        return f"{name:<{label}} {' '.join(texts)}".rstrip()

    rows: list[dict[int, str]] = [{} for _ in range(ranks)]
    for (rank, column), text in cells.items():
        rows[rank][column] = text
    head = line("step", {c: str(c) for c in range(columns)})
    return "\n".join([head, *(line(f"rank {rank}", row) for rank, row in enumerate(rows))])


def _choose_columns(columns: int, room: int, keep: Sequence[int]) -> list[int | None]:
    """The columns to show: all, or both ends and what is near those to keep. None is a gap."""
    if columns <= room:
        return list(range(columns))
    ends = room // (3 if keep else 2)
    near = ends // (2 * len(keep)) if keep else 0
    chosen = {*range(ends), *range(columns - ends, columns)}
    for column in keep:
        chosen |= set(range(max(0, column - near), min(columns, column + near + 1)))
    shown: list[int | None] = []
    for column in sorted(chosen):
        if column and column - 1 not in chosen:
            shown.append(None)
        shown.append(column)
    return shown
