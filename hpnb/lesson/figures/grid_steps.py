"""Notebook 03: a matrix product by SUMMA on a grid of ranks, step by step, read off recorded traffic.

    a cell    a rank at its place in the grid, filled if it is the root of what goes along its row or column
    a line    a broadcast, from its root to the others

Broadcasts of one axis are numbered in the order in which a rank sends them: the k-th of both axes are step k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from hpnb.plot.canvas import SMALL, TEXT, WIDTH, Key, new_figure
from hpnb.plot.grammar import CARD, INK, SERIES, SOFT, OpStyle, mix, style_of
from hpnb.plot.units import byte_count
from hpnb.record import Message

DOWN = "tp.0"  # the axis of columns, along which blocks of W go; blocks of x go across
COLORS = {True: SERIES[1][0], False: SERIES[0][0]}  # down, across
FILLS = {down: mix(color, CARD, 0.62) for down, color in COLORS.items()}
MOST = 5  # steps in a row
LANE = 0.14  # of a cell, from its middle
BETWEEN = 0.35  # inches from grid to grid


class _Broadcast(NamedTuple):
    axis: str
    group: tuple[int, ...]
    root: int


def summa_steps(messages: Sequence[Sequence[Message]], shape: tuple[int, int], title: str) -> Figure:
    """Draw the grid of ranks for every step of y = x W, with the bytes that leave a rank in it.

    `messages` are `Traffic.messages` of every rank, from rank 0 up, along the two axes of `Axis.split`;
    `shape` has the rows and columns of the grid.
    """
    rows, columns = shape
    steps, sent = _steps(messages)
    keys = []
    for down in dict.fromkeys(m.axis == DOWN for m in messages[0]):
        words = f"{'W down' if down else 'x across'}: {style_of('broadcast').label}"
        keys.append(Key(OpStyle(COLORS[down], "", "", "-"), "line", words))
        keys.append(Key(OpStyle(FILLS[down], "", ""), "flat", "from this rank"))
    grids = min(MOST, len(steps))
    wide = (WIDTH - 0.5 - BETWEEN * (grids - 1)) / grids
    cell = min(0.62, wide / columns, 3.4 / rows)  # inches
    fig, axes = new_figure([rows * cell] * -(-len(steps) // grids), title=title, legend=keys,
                           columns=grids, left=0.25, right=0.25, bottom=0.3, gap=0.6, head=0.34,
                           between=BETWEEN)  # fmt: skip
    margin = (wide / cell - columns) / 2
    for k, ax in enumerate(axes):
        ax.set_axis_off()
        if k < len(steps):
            ax.set(xlim=(-margin, columns + margin), ylim=(rows, 0))
            _draw_cells(ax, rows * columns, columns, steps[k])
            for broadcast in steps[k]:
                _draw_broadcast(ax, columns, broadcast)
            for words, y, size, color in ((f"step {k}", 1, TEXT, INK), (sent[k], 0, SMALL, SOFT)):
                ax.annotate(words, (0.5, y), (0, 5 if y else -5), "axes fraction", "offset points", size=size,
                            color=color, ha="center", va="bottom" if y else "top")  # fmt: skip
    return fig


def _steps(messages: Sequence[Sequence[Message]]) -> tuple[list[list[_Broadcast]], list[str]]:
    """The broadcasts of every step, each once, and in words the bytes that leave a rank in it."""
    steps: list[list[_Broadcast]] = []
    sent: list[Counter[int]] = []  # {rank: bytes} of every step
    for rank, rank_messages in enumerate(messages):
        sent_before: Counter[str] = Counter()
        for m in rank_messages:
            step = sent_before[m.axis]
            sent_before[m.axis] += 1
            if step == len(steps):
                steps.append([])
                sent.append(Counter())
            broadcast = _Broadcast(m.axis, m.group, m.peer)
            if broadcast not in steps[step]:
                steps[step].append(broadcast)
            sent[step][rank] += m.bytes  # type: ignore[assignment]
    words = []
    for by_rank in sent:
        amounts = sorted({byte_count(by_rank[rank]) for rank in range(len(messages))})
        words.append(f"{' to '.join((amounts[0], amounts[-1])[: len(amounts)])} a rank, mean")
    return steps, words


def _draw_cells(ax: Axes, ranks: int, columns: int, broadcasts: Sequence[_Broadcast]) -> None:
    for rank in range(ranks):
        x, y = rank % columns + 0.05, rank // columns + 0.05
        faces = [FILLS[down] for down in sorted({b.axis == DOWN for b in broadcasts if b.root == rank})]
        face = faces[0] if faces else CARD
        ax.add_patch(Rectangle((x, y), 0.9, 0.9, facecolor=face, edgecolor=SOFT, label=f"rank {rank}"))
        if len(faces) > 1:  # the root of both: one half each
            corners = [(x, y), (x + 0.9, y), (x + 0.9, y + 0.9)]
            half = Polygon(corners, closed=True, facecolor=faces[1], linewidth=0, label=f"half {rank}")
            ax.add_patch(half)
        ax.text(x + 0.08, y + 0.07, str(rank), size=TEXT, weight="bold", color=INK, va="top", zorder=4)


def _draw_broadcast(ax: Axes, columns: int, broadcast: _Broadcast) -> None:
    """A line through the group, with an arrowhead at every rank that receives."""
    axis, group, root = broadcast
    down = axis == DOWN
    points = np.array([(rank % columns + 0.5, rank // columns + 0.5) for rank in group])  # (p, 2)
    points += (LANE, 0.0) if down else (0.0, LANE)
    (line,) = ax.plot(points[:, 0], points[:, 1], linestyle="-", color=COLORS[down], linewidth=1.8, zorder=3)
    line.set_label(f"broadcast {axis} {group} root {root}")
    back, forth = "^v" if down else "<>"
    for rank, point in zip(group, points, strict=True):
        marker = "o" if rank == root else forth if root < rank else back
        ax.plot(*point, marker=marker, color=COLORS[down], markersize=6.5 if marker != "o" else 5, zorder=4,
                markeredgecolor=CARD, markeredgewidth=0.6)  # fmt: skip
