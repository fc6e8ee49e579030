"""Notebook 03: a matrix product on a grid of ranks, step by step, read off recorded traffic.

    a cell    a rank at its place in the grid, filled if it is the root of what goes along its row or column
    a line    a collective: from its root to the others (broadcast), or from them to it (reduce)

Messages of one axis and op are numbered in the order in which a rank sends them: the k-th of every axis and
op make up step k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from hpnb.plot.canvas import SMALL, TEXT, WIDTH, Key, new_figure
from hpnb.plot.grammar import CARD, INK, SERIES, SOFT, Line, OpStyle, mix, style_of
from hpnb.plot.units import byte_count
from hpnb.record import Message

LINES: dict[str, Line] = {"reduce": "--", "gather": "--", "reduce_scatter": "--", "all_reduce": ":"}
COLORS = {"down": SERIES[1][0], "across": SERIES[0][0]}
MOST = 5  # steps in a row
LANE = 0.14  # of a cell, from its middle
BETWEEN = 0.35  # inches from grid to grid


@dataclass(frozen=True)
class _Call:
    """One collective in one step: `root` is a rank, or -1 among equals."""

    axis: str
    op: str
    group: tuple[int, ...]
    root: int


def grid_steps(
    messages: Sequence[Sequence[Message]],
    shape: tuple[int, int],
    names: Callable[[Message], str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the grid of ranks for every step, with the bytes that leave a rank in it.

    Args:
        messages: `Traffic.messages` of every rank, from rank 0 up, of one product.
        shape: rows and columns of the grid.
        names: what a message carries, for the legend, such as "panels of X"; by default its axis.

    Raises:
        ValueError: messages that do not fit the grid, or ranks that do not agree.
    """
    rows, columns = shape
    if rows * columns != len(messages):
        raise ValueError(f"a grid of {rows} x {columns} has {prod(shape)} ranks, not {len(messages)}")
    steps, sent = _steps(messages)
    directions = _directions(messages, columns)
    keys = []
    for (axis, op), direction in directions.items():
        first = next(m for sent_by_rank in messages for m in sent_by_rank if (m.axis, m.op) == (axis, op))
        look = OpStyle(COLORS[direction], "", "", LINES.get(op, "-"))
        keys.append(Key(look, "line", f"{names(first) if names else axis}: {style_of(op).label}"))
        if any(call.root >= 0 for calls in steps for call in calls if (call.axis, call.op) == (axis, op)):
            root = "from" if op in ("broadcast", "scatter") else "to"
            fill = OpStyle(mix(COLORS[direction], CARD, 0.62), "", "")
            keys.append(Key(fill, "flat", f"{root} this rank"))
    grids = min(MOST, len(steps))
    wide = (WIDTH - 0.5 - BETWEEN * (grids - 1)) / grids
    cell = min(0.62, wide / columns, 3.4 / rows)  # inches
    heading = title if title is not None else "who sends to whom, step by step"
    fig, axes = new_figure([rows * cell] * -(-len(steps) // grids), title=heading, legend=keys,
                           columns=grids, left=0.25, right=0.25, bottom=0.3, gap=0.6, head=0.34,
                           between=BETWEEN)  # fmt: skip
    margin = (wide / cell - columns) / 2
    for k, ax in enumerate(axes):
        ax.set_axis_off()
        if k < len(steps):
            ax.set(xlim=(-margin, columns + margin), ylim=(rows, 0))
            _draw_cells(ax, rows * columns, columns, steps[k], directions)
            for call in steps[k]:
                _draw_call(ax, columns, call, directions[call.axis, call.op])
            for words, y, size, color in ((f"step {k}", 1, TEXT, INK), (sent[k], 0, SMALL, SOFT)):
                ax.annotate(words, (0.5, y), (0, 5 if y else -5), "axes fraction", "offset points", size=size,
                            color=color, ha="center", va="bottom" if y else "top")  # fmt: skip
    return fig


def summa_steps(messages: Sequence[Sequence[Message]], shape: tuple[int, int], title: str) -> Figure:
    """`grid_steps` of y = x W by SUMMA, whose axes come from `Axis.split`: blocks of W go along tp.0."""
    return grid_steps(messages, shape, lambda m: "W down" if m.axis == "tp.0" else "x across", title)


def _steps(messages: Sequence[Sequence[Message]]) -> tuple[list[list[_Call]], list[str]]:
    """The collectives of every step, each once, and in words the bytes that leave a rank in it."""
    members: list[dict[_Call, set[int]]] = []  # {collective: ranks that recorded it} of every step
    sent: list[Counter[int]] = []  # {rank: bytes} of every step
    for rank, rank_messages in enumerate(messages):
        sent_before: Counter[tuple[str, str]] = Counter()
        for m in rank_messages:
            step = sent_before[m.axis, m.op]
            sent_before[m.axis, m.op] += 1
            if step == len(members):
                members.append({})
                sent.append(Counter())
            members[step].setdefault(_Call(m.axis, m.op, m.group, m.peer), set()).add(rank)
            sent[step][rank] += m.bytes  # type: ignore[assignment]
    if not members:
        raise ValueError("no rank has sent anything; record a product with hpnb.record.traffic()")
    for step, calls in enumerate(members):
        for call, ranks in calls.items():
            if absent := set(call.group) - ranks:
                raise ValueError(
                    f"in step {step}, ranks {sorted(absent)} have no {call.op} along {call.axis}, which "
                    f"{sorted(ranks)} of their group have"
                )
    words = []
    for by_rank in sent:
        amounts = sorted({byte_count(by_rank[rank]) for rank in range(len(messages))})
        words.append(f"{' to '.join((amounts[0], amounts[-1])[: len(amounts)])} a rank, mean")
    return [list(calls) for calls in members], words


def _directions(messages: Sequence[Sequence[Message]], columns: int) -> dict[tuple[str, str], str]:
    """{(axis, op): "down" a column or "across" a row}, in order of first use."""
    directions: dict[tuple[str, str], str] = {}
    for rank_messages in messages:
        for m in rank_messages:
            in_rows, in_columns = {r // columns for r in m.group}, {r % columns for r in m.group}
            if (len(in_rows) == 1) == (len(in_columns) == 1) or max(m.group) >= len(messages):
                raise ValueError(f"the {m.op} along {m.axis} of ranks {m.group} is no line of the grid")
            directions.setdefault((m.axis, m.op), "across" if len(in_rows) == 1 else "down")
    return directions


def _draw_cells(
    ax: Axes, ranks: int, columns: int, calls: Sequence[_Call], directions: dict[tuple[str, str], str]
) -> None:
    for rank in range(ranks):
        x, y = rank % columns + 0.05, rank // columns + 0.05
        roots = sorted({directions[call.axis, call.op] for call in calls if call.root == rank})
        faces = [mix(COLORS[direction], CARD, 0.62) for direction in roots]
        face = faces[0] if faces else CARD
        ax.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=face, edgecolor=SOFT, label=f"rank {rank}"))
        if len(faces) > 1:  # the root of both: one half each
            corners = [(x, y), (x + 0.9, y), (x + 0.9, y + 0.9)]
            half = Polygon(corners, closed=True, facecolor=faces[1], linewidth=0, label=f"half {rank}")
            ax.add_patch(half)
        ax.text(x + 0.08, y + 0.07, str(rank), size=TEXT, weight="bold", color=INK, va="top", zorder=4)


def _draw_call(ax: Axes, columns: int, call: _Call, direction: str) -> None:
    """A line through the group, with an arrowhead at every rank that receives."""
    points = np.array([(rank % columns + 0.5, rank // columns + 0.5) for rank in call.group])  # (p, 2)
    points += (0.0, LANE) if direction == "across" else (LANE, 0.0)
    style, color = LINES.get(call.op, "-"), COLORS[direction]
    (line,) = ax.plot(points[:, 0], points[:, 1], linestyle=style, color=color, linewidth=1.8, zorder=3)
    line.set_label(f"{call.op} {call.axis} {call.group} root {call.root}")
    along, (back, forth) = (0, "<>") if direction == "across" else (1, "^v")
    for rank, point in zip(call.group, points, strict=True):
        marker = "o"
        to_root = call.op in ("reduce", "gather")
        if call.root >= 0 and (rank == call.root) == to_root:  # this rank receives
            origin = points.mean(0) if to_root else points[call.group.index(call.root)]
            marker = forth if origin[along] < point[along] else back
        ax.plot(*point, marker=marker, color=color, markersize=6.5 if marker != "o" else 5, zorder=4,
                markeredgecolor=CARD, markeredgewidth=0.6)  # fmt: skip
