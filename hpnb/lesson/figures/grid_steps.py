"""A matrix product on a grid of ranks, step by step: who sends to whom, read off recorded traffic.

    a cell    a rank at its place in the grid, filled if it is the root of what goes along its row or column
    a line    a collective: from its root to the others (broadcast), from them to it (reduce), or among equals

A grid of three dims is drawn as its layers, one beneath the other; what joins them goes from layer to layer.
Messages of one axis and op are numbered in the order in which a rank made them: the k-th of each are step k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from hpnb.plot.canvas import SMALL, TEXT, WIDTH, Key, new_figure
from hpnb.plot.grammar import CARD, INK, SERIES, SOFT, Line, OpStyle, mix, style_of
from hpnb.plot.units import byte_count
from hpnb.record import Message

ROOTED = ("broadcast", "reduce", "gather", "scatter")
LINES: dict[str, Line] = {
    "reduce": "--",
    "gather": "--",
    "reduce_scatter": "--",
    "all_reduce": ":",
}  # others are solid
COLORS = {0: SERIES[1][0], 1: SERIES[0][0], 2: SERIES[2][0]}  # down a column, across a row, between layers
MOST = 5  # steps in a row
LANES = (0.14, -0.16, 0.3)  # of a cell, from its middle
APART = 0.55  # cells between two layers
Place = tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    """One collective in one step: `root` is a rank, or -1 among equals."""

    axis: str
    op: str
    group: tuple[int, ...]
    root: int


def grid_steps(
    messages: Sequence[Sequence[Message]],
    shape: Sequence[int],
    names: Callable[[Message], str] | None = None,
    title: str | None = None,
    caption: str = "",
    *,
    by: Literal["panel", "call"] = "panel",
    root: Callable[[Message, int], int] | None = None,
) -> Figure:
    """Draw a grid of ranks for each step, with the bytes that leave a rank in it.

    Args:
        messages: `Traffic.messages` of each rank, 0 up; those of one product, say.
        shape: sides of the grid, such as (2, 2) or (2, 2, 2); the last axis runs across, the one before down.
        names: what a message carries, for the legend, such as "panels of X"; by default its axis.
        title: a headline.
        caption: a sentence beneath the grids.
        by: "panel": step k has the k-th message of each axis and op; "call": the k-th message at all.
        root: of the k-th message of an axis and op, the place in its group of its root; for records that do
            not say it (`peer` is -1).

    Raises:
        ValueError: messages that do not fit the grid, ranks that do not agree, a root that nobody knows, or
            nothing to draw.
    """
    sides = (1, *shape) if len(shape) == 2 else tuple(shape)
    if len(sides) != 3 or prod(sides) != len(messages):
        told = " x ".join(map(str, shape))
        raise ValueError(f"a grid of {told} has {prod(shape)} ranks, and {len(messages)} have messages")
    steps, left = _steps(messages, by, root)
    kinds = _kinds(messages, sides)
    lanes = {kind: [k for k in kinds if kinds[k] == kinds[kind]].index(kind) for kind in kinds}
    keys = []
    for axis, op in kinds:
        first = next(m for row in messages for m in row if (m.axis, m.op) == (axis, op))
        look = OpStyle(COLORS[kinds[axis, op]], "", "", "", LINES.get(op, "-"))
        keys.append(Key(look, "line", f"{names(first) if names else axis}: {style_of(op).label}"))
    columns = min(MOST, len(steps))
    cells = sides[0] * sides[1] + (sides[0] - 1) * APART
    between = 0.35
    wide = (WIDTH - 0.5 - between * (columns - 1)) / columns
    cell = min(0.62, wide / sides[2], 3.4 / cells)  # inches
    heading = title if title is not None else "who sends to whom, step by step"
    fig, axes = new_figure(
        [cells * cell] * -(-len(steps) // columns), title=heading, legend=keys, caption=caption,
        columns=columns, left=0.25, right=0.25, bottom=0.3, gap=0.6, head=0.34, between=between,
    )  # fmt: skip
    for k, ax in enumerate(axes):
        ax.set_axis_off()
        if k >= len(steps):
            continue
        half = (wide / cell - sides[2]) / 2
        ax.set_xlim(-half, sides[2] + half)
        ax.set_ylim(cells, 0)
        _cells(ax, sides, steps[k], kinds)
        for call in steps[k]:
            _line(ax, sides, call, kinds[call.axis, call.op], LANES[lanes[call.axis, call.op] % len(LANES)])
        for words, y, size, color in ((f"step {k}", 1, TEXT, INK), (left[k], 0, SMALL, SOFT)):
            ax.annotate(words, (0.5, y), (0, 5 if y else -5), "axes fraction", "offset points", size=size,
                        color=color, ha="center", va="bottom" if y else "top")  # fmt: skip
    return fig


# --- what happened ---------------------------------------------------------------------------------


def _steps(
    messages: Sequence[Sequence[Message]], by: str, root: Callable[[Message, int], int] | None
) -> tuple[list[list[_Call]], list[str]]:
    """The collectives of each step, each once, and what leaves a rank in it, in words."""
    calls: list[dict[_Call, set[int]]] = []  # and who took part
    sent: list[dict[int, float]] = []
    for rank, own in enumerate(messages):
        seen: Counter[tuple[str, str]] = Counter()
        for i, m in enumerate(own):
            kth = seen[m.axis, m.op]
            seen[m.axis, m.op] += 1
            step = kth if by == "panel" else i
            while len(calls) <= step:
                calls.append({})
                sent.append(dict.fromkeys(range(len(messages)), 0.0))
            place = m.peer
            if m.op in ROOTED and place < 0:
                if root is None:
                    raise ValueError(
                        f"message {i} of rank {rank}, a {m.op} along {m.axis}, does not say its root; pass "
                        "root=lambda message, k: ..., the place in the group of the k-th one's"
                    )
                place = m.group[root(m, kth)]
            call = _Call(m.axis, m.op, m.group, place if m.op in ROOTED else -1)
            calls[step].setdefault(call, set()).add(rank)
            sent[step][rank] += m.bytes
    if not calls:
        raise ValueError("no rank has sent anything; record a product with hpnb.record.traffic()")
    for k, found in enumerate(calls):
        for call, ranks in found.items():
            if absent := set(call.group) - ranks:
                raise ValueError(
                    f"in step {k}, ranks {sorted(ranks)} take part in a {call.op} along {call.axis}, and "
                    f"{sorted(absent)} of its group do not; give the same messages of all ranks"
                )
    words = []
    for one in sent:
        least, most = min(one.values()), max(one.values())
        words.append(byte_count(most) if least == most else f"{byte_count(least)} to {byte_count(most)}")
    return [list(found) for found in calls], [f"{each} leave a rank" for each in words]


def _kinds(messages: Sequence[Sequence[Message]], sides: Sequence[int]) -> dict[tuple[str, str], int]:
    """{(axis, op): 0 down a column, 1 across a row, 2 between layers}, in order of first use."""
    found: dict[tuple[str, str], int] = {}
    for own in messages:
        for m in own:
            places = [_place(rank, sides) for rank in m.group if rank < prod(sides)]
            differ = [dim for dim in range(3) if len({place[dim] for place in places}) > 1]
            if len(places) < len(m.group) or len(differ) != 1:
                raise ValueError(
                    f"the {m.op} along {m.axis} of ranks {m.group} is no line of a grid of "
                    f"{' x '.join(map(str, sides[sides[0] == 1 :]))}"
                )
            found.setdefault((m.axis, m.op), {0: 2, 1: 0, 2: 1}[differ[0]])
    return found


def _place(rank: int, sides: Sequence[int]) -> Place:
    """(layer, row, column)."""
    rest, column = divmod(rank, sides[2])
    return (*divmod(rest, sides[1]), column)


# --- how it is drawn -------------------------------------------------------------------------------


def _middle(rank: int, sides: Sequence[int]) -> tuple[float, float]:
    layer, row, column = _place(rank, sides)
    return column + 0.5, layer * (sides[1] + APART) + row + 0.5


def _cells(ax: Axes, sides: Sequence[int], calls: Sequence[_Call], kinds: dict[tuple[str, str], int]) -> None:
    for rank in range(prod(sides)):
        x, y = (v - 0.45 for v in _middle(rank, sides))
        roots = sorted({kinds[call.axis, call.op] for call in calls if call.root == rank})
        faces = [mix(COLORS[kind], CARD, 0.62) for kind in roots]
        box = Rectangle(
            (x, y), 0.9, 0.9, facecolor=faces[0] if faces else CARD, edgecolor=SOFT, linewidth=1.0
        )
        box.set_label(f"rank {rank}")
        ax.add_patch(box)
        if len(faces) > 1:  # of both: one half each
            half = Polygon(
                [(x, y), (x + 0.9, y), (x + 0.9, y + 0.9)], closed=True, facecolor=faces[1], linewidth=0
            )
            half.set_label(f"half {rank}")
            ax.add_patch(half)
        ax.text(x + 0.08, y + 0.07, str(rank), size=TEXT, weight="bold", color=INK, va="top", zorder=4)


def _line(ax: Axes, sides: Sequence[int], call: _Call, kind: int, lane: float) -> None:
    """A line through the group, with an arrowhead at whoever receives."""
    points = np.array([_middle(rank, sides) for rank in call.group])  # (p, 2)
    if kind == 2:  # between layers it passes the rows below: beside those of their own
        lane = 0.26 + 0.14 * _place(call.group[0], sides)[1] / max(1, sides[1] - 1)
    points += (0.0, lane) if kind == 1 else (lane, 0.0)
    style, color = LINES.get(call.op, "-"), COLORS[kind]
    (line,) = ax.plot(points[:, 0], points[:, 1], linestyle=style, color=color, linewidth=1.8, zorder=3)
    line.set_label(f"{call.op} {call.axis} {call.group} root {call.root}")
    along = 0 if kind == 1 else 1
    for rank, point in zip(call.group, points, strict=True):
        marker = "o"
        if call.root >= 0:
            home = points[call.group.index(call.root)]
            to_root = call.op in ("reduce", "gather")
            if (rank == call.root) == to_root:  # this one receives
                towards = (points.mean(0) if to_root else home)[along] < point[along]
                marker = (">" if towards else "<") if along == 0 else ("v" if towards else "^")
        ax.plot(*point, marker=marker, color=color, markersize=6.5 if marker != "o" else 5, zorder=4,
                markeredgecolor=CARD, markeredgewidth=0.6)  # fmt: skip
