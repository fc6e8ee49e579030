"""Which mode of tensor parallelism is the cheapest: tokens a rank over hidden size, a colour for each mode.

regions   predicted, named where they lie; along a border two modes cost the same
dots      measured, in the colour and marker of the mode that really won
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator
from numpy.typing import NDArray

from hpnb.plot.canvas import SMALL, TITLE, WIDTH, Key, boxes, new_figure, panel_title
from hpnb.plot.grammar import CARD, INK, SERIES, SOFT, OpStyle, mix

MODES = ("1d", "2d", "2.5d", "3d")
LOOKS = {mode: (color, marker) for mode, (color, marker, _) in zip(MODES, SERIES, strict=False)}
AREAS = {mode: OpStyle(mix(color, CARD, 0.72), "", mode) for mode, (color, _) in LOOKS.items()}
Won = tuple[float, float, str]  # tokens, hidden, mode
_NAMED = 0.02  # of the cells: a smaller region has no room for its name
LEFT, RIGHT, TALL = 0.8, 0.3, 2.9  # inches
WIDE = WIDTH - LEFT - RIGHT


def cheapest_mode(
    tokens: Sequence[float],
    hidden: Sequence[float],
    modes: Sequence[Sequence[str]],
    measured: Sequence[Won] = (),
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw a map over both in logarithms, and say how many of the dots lie where they were predicted.

    Args:
        tokens, hidden: of the cells' middles, both ascending.
        modes: one row for each of `hidden`, as `hpnb.theory.cheapest_modes` gives them.
        measured: (tokens, hidden, the fastest mode) of each dot.
        title: a headline; it is the place for the ranks, the wire, and FLOP/s over bytes/s.
        caption: a sentence beneath the axes.

    Raises:
        ValueError: a map of another size, a mode that is not in MODES, or numbers that do not ascend above 0.
    """
    _check(tokens, hidden, modes, measured)
    table = np.array([[MODES.index(mode) for mode in row] for row in modes])  # (hidden, tokens)
    x, y = _edges(tokens), _edges(hidden)
    won = [mode for mode in MODES if any(mode == m for *_, m in measured)]
    keys = [Key(OpStyle(LOOKS[mode][0], "", f"{mode} measured fastest"), "dot") for mode in won]
    share = {mode: float(np.mean(table == i)) for i, mode in enumerate(MODES)}
    named = [mode for mode in MODES if share[mode] > _NAMED]
    keys += [Key(AREAS[m], "flat", f"{m} predicted") for m in MODES if share[m] and m not in named]
    if measured:
        keys.append(Key(OpStyle(SOFT, "", "areas: predicted cheapest"), "words"))
    heading = title if title is not None else "the cheapest mode of tensor parallelism"
    fig, (ax,) = new_figure(
        [TALL], title=heading, legend=keys, caption=caption, left=LEFT, right=RIGHT, head=0.28
    )
    for line, mode in zip((a for a in fig.artists if isinstance(a, Line2D)), won, strict=False):
        line.set_marker(LOOKS[mode][1])
    for i, mode in enumerate(MODES):
        cells = [(x[c], y[r], x[c + 1] - x[c], y[r + 1] - y[r]) for r, c in np.argwhere(table == i)]
        if cells:
            boxes(ax, cells, AREAS[mode], name=f"area {mode}", outline=False, zorder=1)
    _borders(ax, table, x, y)
    for i, mode in enumerate(MODES):
        if mode in named:
            ax.text(*_place(table == i, x, y, measured), mode, size=TITLE + 1, weight="bold",
                    color=mix(LOOKS[mode][0], INK, 0.35), ha="center", va="center", zorder=3)  # fmt: skip
    for mode in won:
        at = [(n, h) for n, h, m in measured if m == mode]
        (dots,) = ax.plot(*zip(*at, strict=True), linestyle="none", color=LOOKS[mode][0], zorder=5)
        dots.set(
            marker=LOOKS[mode][1], markersize=8, markeredgecolor=CARD, markeredgewidth=1.2, clip_on=False
        )
        dots.set_label(f"measured {mode}")
    _axes(ax, (x[0], x[-1]), (y[0], y[-1]))
    if measured:
        right = sum(predicted_at(tokens, hidden, modes, n, h) == m for n, h, m in measured)
        panel_title(ax, "", f"measured: {right} of {len(measured)} as predicted")
    return fig


def predicted_at(
    tokens: Sequence[float], hidden: Sequence[float], modes: Sequence[Sequence[str]], n: float, h: float
) -> str:
    """The mode of the cell nearest to n tokens and hidden size h."""
    column = min(range(len(tokens)), key=lambda i: abs(math.log(tokens[i] / n)))
    row = min(range(len(hidden)), key=lambda i: abs(math.log(hidden[i] / h)))
    return modes[row][column]


def _check(
    tokens: Sequence[float], hidden: Sequence[float], modes: Sequence[Sequence[str]], measured: Sequence[Won]
) -> None:
    for name, values in (("tokens", tokens), ("hidden", hidden)):
        if len(values) < 2 or values[0] <= 0 or any(b <= a for a, b in pairwise(values)):
            raise ValueError(f"{name} {list(values)} must be two numbers or more, above 0 and ascending")
    if len(modes) != len(hidden) or any(len(row) != len(tokens) for row in modes):
        rows = ", ".join(map(str, sorted({len(row) for row in modes})))
        raise ValueError(
            f"modes has {len(modes)} rows of {rows or 0}; it needs {len(hidden)} of {len(tokens)}: one for "
            "each hidden size, one mode for each number of tokens"
        )
    if strange := ({m for row in modes for m in row} | {m for *_, m in measured}) - set(MODES):
        raise ValueError(f"no mode {', '.join(sorted(strange))}; there are {', '.join(MODES)}")
    for n, h, mode in measured:
        if not (n > 0 and h > 0):
            raise ValueError(f"{mode} was measured at {n} tokens and hidden {h}, which have no logarithm")


def _edges(middles: Sequence[float]) -> NDArray[np.float64]:
    """Borders of cells whose middles these are, in logarithms: one more than there are cells."""
    logs = np.log(np.asarray(middles, dtype=float))
    between = (logs[1:] + logs[:-1]) / 2
    first, last = 2 * logs[0] - between[0], 2 * logs[-1] - between[-1]
    found: NDArray[np.float64] = np.exp(np.concatenate([[first], between, [last]]))
    return found


def _borders(ax: Axes, table: NDArray[np.int64], x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """A line wherever two neighbouring cells differ."""
    upright = [
        [(x[c + 1], y[r]), (x[c + 1], y[r + 1])] for r, c in np.argwhere(table[:, 1:] != table[:, :-1])
    ]
    level = [[(x[c], y[r + 1]), (x[c + 1], y[r + 1])] for r, c in np.argwhere(table[1:] != table[:-1])]
    lines = LineCollection(upright + level, colors=CARD, linewidths=2.0, capstyle="projecting", zorder=2)
    lines.set_label("borders")
    ax.add_collection(lines, autolim=False)


def _place(
    region: NDArray[np.bool_], x: NDArray[np.float64], y: NDArray[np.float64], dots: Sequence[Won]
) -> tuple[float, float]:
    """Where the name of `region` is furthest from its border, and from dots: tokens and hidden size."""
    wide, tall = np.log(x[-1] / x[0]) / WIDE, np.log(y[-1] / y[0]) / TALL  # logarithms in an inch
    middles = np.sqrt(x[1:] * x[:-1]), np.sqrt(y[1:] * y[:-1])
    cell = min(WIDE / len(middles[0]), TALL / len(middles[1]))  # inches
    room, left = np.zeros(region.shape), region
    while left.any():  # peel it: what goes later lies deeper
        room += cell * left
        padded = np.pad(left, 1)
        left = left & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    for n, h, _ in dots:
        across, up = np.log(middles[0] / n) / wide, np.log(middles[1] / h) / tall
        room = np.minimum(room, np.where(region, np.hypot(across[None, :], up[:, None]), 0.0))
    best = np.argwhere(room >= 0.999 * room.max())  # of equals the one in their middle
    row, column = best[np.abs(best - best.mean(0)).sum(1).argmin()]
    return float(middles[0][column]), float(middles[1][row])


def _axes(ax: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(*x)
    ax.set_ylim(*y)
    for axis, (low, high), most in ((ax.xaxis, x, 8), (ax.yaxis, y, 7)):
        powers = [2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
        ticks = powers[:: max(1, -(-len(powers) // most))]
        axis.set_ticks(ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("tokens a rank")
    ax.set_ylabel("hidden size", size=SMALL + 1)
