"""The box of ranks, unfolded in the order in which the layout nests its axes.

The innermost axis runs along a row, the middle axis repeats it, the outermost stacks the rows. Rank
numbers then read like text, so a host, which is a run of consecutive ranks, is a run of cells: a link that
leaves a border is a link over the slow wire.
"""

from __future__ import annotations

import itertools
from math import prod

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from hpnb.mesh import AXES, Layout
from hpnb.plot.canvas import SMALL, TEXT, WIDTH, Key, new_figure
from hpnb.plot.grammar import AXIS, CARD, INK, SOFT, OpStyle

MOST_IN_ROW, MOST = 16, 128  # more cells would not be read
TALL, DEPTH = 0.62, 0.1  # inches: a cell, and a level of the links that hang beneath a row
LEFT = RIGHT = 0.3
HOST = OpStyle("#EEF1F5", "", "host")


class _Plan:
    """Where each cell lies, in inches from the left and from the top."""

    def __init__(self, layout: Layout, hosts: bool) -> None:
        used = [axis for axis in layout.order if getattr(layout, axis) > 1]
        unused = [axis for axis in layout.order if axis not in used]
        # An axis of size 1 links nothing, so it takes the place that leaves the simplest picture.
        self.order = (*used[:1], *unused, *used[1:]) if len(used) == 2 else (*unused, *used)
        self.outer, self.middle, self.inner = self.order
        n_outer, n_middle, n_inner = (getattr(layout, axis) for axis in self.order)
        if layout.world_size > MOST or n_inner > MOST_IN_ROW:
            raise ValueError(
                f"{layout} does not fit a page: {layout.world_size} ranks, {n_inner} of them in a row, "
                f"where a page holds {MOST}, {MOST_IN_ROW} in a row"
            )
        self.stacked = n_middle * n_inner > MOST_IN_ROW  # a row for each middle place, a block for each outer
        side_by_side = 1 if self.stacked else n_middle
        columns = side_by_side * n_inner
        apart = 0.3 if side_by_side > 1 else 0.0
        gap = 0.24 if columns <= 4 else 0.16 if columns <= 8 else 0.1
        room = WIDTH - LEFT - RIGHT
        self.wide = min(1.15, (room - apart * (side_by_side - 1)) / columns - gap)
        self.gap = gap
        self.ground = HOST.color if hosts else CARD
        self.hang = DEPTH * (n_inner + 0.6) if side_by_side > 1 else 0.0
        down = TALL + self.hang + (0.3 if hosts else 0.2)
        block = down * n_middle + 0.25 if self.stacked else down
        indent = (room - columns * (self.wide + gap) - apart * (side_by_side - 1)) / 2
        self.at: dict[int, tuple[float, float]] = {}
        for rank in range(layout.world_size):
            index = layout.coordinates(rank)
            column = index[self.inner] + (0 if self.stacked else index[self.middle] * n_inner)
            x = indent + (column + 0.5) * (self.wide + gap) + apart * (column // n_inner)
            y = 0.1 + block * index[self.outer] + (down * index[self.middle] if self.stacked else 0.0)
            self.at[rank] = (x, y + TALL / 2)
        self.height = 0.1 + block * n_outer - (0.25 if self.stacked else 0.0)


def mesh(layout: Layout, hosts_of: int | None = None, title: str | None = None) -> Figure:
    """Draw every rank with its coordinates, and every group as links in its axis's colour.

    Args:
        hosts_of: ranks on one host; consecutive ranks share a host, and its border is drawn.
        title: None says the layout.

    Raises:
        ValueError: hosts_of below 1, or more ranks than a page holds.
        TypeError: no layout.

    >>> hpnb.plot.mesh(hpnb.Layout(dp=2, pp=2, tp=2)).savefig("mesh.png")
    """
    if not isinstance(layout, Layout):
        raise TypeError(
            f"plot.mesh draws a layout, not {layout!r}, a {type(layout).__name__}; use "
            "plot.mesh(hpnb.Layout(dp=2, pp=2, tp=2))"
        )
    if hosts_of is not None and hosts_of < 1:
        raise ValueError(f"hosts_of={hosts_of} is not a count of ranks; use 8 for hosts with 8 devices")
    if layout.cp > 1:
        raise ValueError(f"{layout} has four axes, and the picture has room for dp, pp and tp")
    plan = _Plan(layout, bool(hosts_of))
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    keys = [Key(AXIS[axis], "line", f"{axis}: {_groups(layout, axis)}") for axis in used]
    if plan.stacked and plan.outer in used:
        i = used.index(plan.outer)
        keys[i] = Key(
            AXIS[plan.outer], "words", f"{plan.outer}: {_groups(layout, plan.outer)}, same cell in each block"
        )
    if hosts_of:
        keys.append(Key(HOST, "box", f"node of {hosts_of} rank{'s' if hosts_of > 1 else ''}"))
    heading = f"{layout} · {layout.world_size} ranks, nested {' > '.join(layout.order)}"
    fig, (ax,) = new_figure([plan.height], title=heading if title is None else title, legend=keys, left=LEFT,
                            right=RIGHT, bottom=0.05)  # fmt: skip
    ax.set_axis_off()
    ax.set_xlim(0, WIDTH - LEFT - RIGHT)
    ax.set_ylim(plan.height, 0)
    if hosts_of:
        _hosts(ax, plan, hosts_of)
    _links(ax, layout, plan)
    for rank in plan.at:
        _cell(ax, plan, rank, layout.coordinates(rank))
    return fig


def _groups(layout: Layout, axis: str) -> str:
    size = getattr(layout, axis)
    count = prod(layout.shape) // size
    return f"{count} group{'s' if count > 1 else ''} of {size}"


def _cell(ax: Axes, plan: _Plan, rank: int, index: dict[str, int]) -> None:
    (x, y), wide = plan.at[rank], plan.wide
    box = FancyBboxPatch((x - wide / 2, y - TALL / 2), wide, TALL, boxstyle="round,pad=0,rounding_size=0.05",
                         facecolor=CARD, edgecolor=INK, linewidth=1.0, zorder=4)  # fmt: skip
    box.set_label(f"rank {rank}")
    ax.add_patch(box)
    # Wide cells say it in two lines, narrow ones in four.
    roomy = wide >= 0.95
    name = f"rank {rank}" if roomy else str(rank)

    def write(dx: float, dy: float, words: str, size: float, color: str) -> None:
        ax.text(x + dx, y + dy, words, size=size, color=color, ha="center", va="center", zorder=5,
                weight="bold" if color == INK else "normal")  # fmt: skip

    write(0.0, -0.11 if roomy else -0.2, name, TEXT, INK)
    for i, axis in enumerate(AXES):
        dx, dy = ((i - 1) * wide * 0.32, 0.14) if roomy else (0.0, 0.135 * i - 0.04)
        write(dx, dy, f"{axis} {index[axis]}", SMALL if roomy else 7.0, AXIS[axis].color)


def _links(ax: Axes, layout: Layout, plan: _Plan) -> None:
    """Inner neighbours touch; the middle axis hangs beneath its row; the outer drops from row to row."""
    at, wide = plan.at, plan.wide

    def link(axis: str, xs: list[float], ys: list[float]) -> None:
        style = AXIS[axis]
        (line,) = ax.plot(xs, ys, color=style.color, linestyle=style.line, linewidth=2.2, zorder=3)
        line.set_label(axis)

    for a, b in _neighbours(layout, plan.inner):
        link(plan.inner, [at[a][0] + wide / 2, at[b][0] - wide / 2], [at[a][1]] * 2)
    drop = plan.middle if plan.stacked else plan.outer
    for a, b in _neighbours(layout, drop):
        x = at[a][0] + 0.32 * wide
        link(drop, [x, x], [at[a][1] + TALL / 2, at[b][1] - TALL / 2])
    if plan.stacked:
        return  # a drop to the next block would run through the rows between: the legend says it instead
    for a, b in _neighbours(layout, plan.middle):
        top = at[a][1] + TALL / 2
        under = top + DEPTH * (layout.coordinates(a)[plan.inner] + 1)
        start, end = at[a][0] + wide * 0.08, at[b][0] - wide * 0.08
        # A drop that crosses the line of an earlier pair interrupts it: they are two groups.
        (gap,) = ax.plot([start, start], [top, under - 0.06], color=plan.ground, zorder=3,
                         linewidth=8.0 * min(1.0, wide), solid_capstyle="butt")  # fmt: skip
        gap.set_label("gap")
        link(plan.middle, [start, start, end, end], [top, under, under, top])


def _neighbours(layout: Layout, axis: str) -> list[tuple[int, int]]:
    return [pair for group in layout.groups(axis) for pair in itertools.pairwise(group)]


def _hosts(ax: Axes, plan: _Plan, hosts_of: int) -> None:
    """A border around each run of consecutive ranks; one that breaks over unequal rows has one a row."""
    pad_x, pad_top, pad_bottom = min(0.08, plan.gap * 0.42), 0.07, 0.07 + plan.hang
    for first in range(0, len(plan.at), hosts_of):
        rows: dict[float, list[float]] = {}
        for rank in range(first, min(first + hosts_of, len(plan.at))):
            x, y = plan.at[rank]
            rows.setdefault(y, []).append(x)
        runs = [(min(xs), max(xs), y, y) for y, xs in rows.items()]
        if len({run[:2] for run in runs}) == 1:
            runs = [(*runs[0][:3], runs[-1][3])]
        for left, right, top, bottom in runs:
            corner = left - plan.wide / 2 - pad_x, top - TALL / 2 - pad_top
            wide, tall = right - left + plan.wide + 2 * pad_x, bottom - top + TALL + pad_top + pad_bottom
            box = FancyBboxPatch(corner, wide, tall, boxstyle="round,pad=0,rounding_size=0.08",
                                 facecolor=HOST.color, edgecolor=SOFT, linewidth=1.2, zorder=1)  # fmt: skip
            box.set_label(f"host {first // hosts_of}")
            ax.add_patch(box)
