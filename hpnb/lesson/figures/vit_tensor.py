"""Notebook 03: where a gradient goes wrong, and which mode of tensor parallelism is the cheapest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hpnb.plot.canvas import SMALL, TITLE, WIDTH, Key, boxes, new_figure, text_inches
from hpnb.plot.curves import CurvePanel, Series, count, curves, looks, rule, set_ticks
from hpnb.plot.grammar import ALARM, CARD, INK, RULE, SERIES, SOFT, OpStyle, mix

FOOT = 1e-17  # below any error that float64 can have but 0
EDGE = 1e-9  # halfway, in logarithms, between rounding and an error of everything
_LARGEST = 1e4  # a gradient that is NaN or infinitely far off is drawn there
_LEFT, _RIGHT = 0.75, 0.2
_LONGEST = 1.0  # inches of a name
_LEAST = 0.125  # inches from one name to the next


def gradient_cliff(errors: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Modules in the order in which the backward reaches them, over the relative error of their gradients.

        error = || g - g_right || / || g_right ||        of all parameters of a module, in float64

    A backward works from the loss down. Up to a fault everything is right to rounding, 1e-16; what a wrong
    gradient has passed through is wrong by as much as it is itself. So one fault is one cliff, and the module
    at its edge is the first whose own gradient, or what came to it, was wrong.

    Args:
        errors: {run: {module: relative error}}, modules by their full names from the loss down to the input,
            the same in every run. The foot of the logarithmic axis stands for 0. A run with an error above
            EDGE, which is no rounding, has its cliff marked.
    """
    modules = list(next(iter(errors.values())))
    names, blocks = shorten(modules)
    room = (WIDTH - _LEFT - _RIGHT) / (len(modules) + 1)
    longest = max(text_inches(name, SMALL) for name in names) if room >= _LEAST else 0.0
    look = looks(errors)
    series = []
    for run, by_module in errors.items():
        heights = [min(max(error, FOOT), _LARGEST) for error in by_module.values()]
        series.append(Series(run, range(len(modules)), heights, look[run], "line and dots"))
    panel = CurvePanel(series, "relative error of the gradient", "y", xlabel="from the loss  →  to the input")
    fig = curves([panel], title=title, left=_LEFT, right=_RIGHT, head=0.3,
                 bottom=0.4 + (longest + 0.06 if longest else 0.0))  # fmt: skip
    (ax,) = fig.axes
    for i, line in enumerate(reversed(ax.get_lines())):
        line.set_markersize(5 + 4 * i)  # runs that agree would cover each other
    every = [error for run in errors.values() for error in run.values()]
    top = math.ceil(math.log10(max(1.0, min(_LARGEST, max(every)))) + 0.3)
    ax.set(xlim=(-1, len(modules)), ylim=(FOOT / 2, 10.0**top))
    ticks = [10.0**k for k in range(-16, top + 1, 4)]
    set_ticks(ax.yaxis, [FOOT, *ticks] if 0 in every else ticks, _power)
    ax.grid(False, axis="x")
    _name_modules(ax, names if longest else [], blocks)
    wrong = {first for run in errors.values() if (first := find_cliff(run)) is not None}
    for i, at in enumerate(sorted(modules.index(module) for module in wrong)):
        layer = next(part for part, start, stop in blocks if start <= at < stop)
        words = f"layer {layer}, {names[at]}" if layer else names[at]
        rule(ax, at - 0.5, "cliff", ALARM)  # just before the first wrong module
        right = at > len(modules) / 2
        ax.annotate(f"wrong from {words} on", (at - 0.5, EDGE * 10.0 ** (4 * i - 1)), (-6 if right else 6, 0),
                    "data", "offset points", size=SMALL, color=ALARM, weight="bold", va="center",
                    ha="right" if right else "left")  # fmt: skip
    return fig


def find_cliff(errors: Mapping[str, float]) -> str | None:
    """The first module, from the loss down, whose error is above EDGE; None if there is none."""
    return next((module for module, error in errors.items() if error > EDGE), None)


def shorten(modules: Sequence[str]) -> tuple[list[str], list[tuple[str, int, int]]]:
    """(names that are short enough for an axis, the layers that they lie in: name, from, up to).

    "vit.layers.3.mlp.fc1" is "mlp.fc1" of "3". A long name keeps as many of its last words as fit.
    """
    names, layers = [], []
    for module in modules:
        inside = re.match(r"(?:.*?\.)?(\d+)\.(.+)", module)
        layers.append(inside[1] if inside else "")
        words = (inside[2] if inside else module).split(".")
        fitting = (".".join(words[i:]) for i in range(len(words)))
        names.append(next((name for name in fitting if text_inches(name, SMALL) <= _LONGEST), words[-1]))
    blocks, start = [], 0
    for layer, members in groupby(layers):
        stop = start + len(list(members))
        blocks.append((layer, start, stop))
        start = stop
    return names, blocks


def _power(value: float) -> str:
    return "0" if value < 2 * FOOT else f"{value:.0e}".replace("e-0", "e-").replace("1e+00", "1")


def _name_modules(ax: Axes, names: Sequence[str], blocks: Sequence[tuple[str, int, int]]) -> None:
    """The modules' names on end, and above them the layers that they lie in, every other one shaded."""
    ax.set_xticks(range(len(names)), names, rotation=90, size=SMALL)
    ax.tick_params(axis="x", length=2, pad=2)
    left, right = ax.get_xlim()
    module_inches = (WIDTH - _LEFT - _RIGHT) / (right - left)
    for i, (layer, start, stop) in enumerate(blocks):
        if i:
            rule(ax, start - 0.5, "border", RULE, "-", 0.8)
        if layer and i % 2:
            shade = ax.axvspan(start - 0.5, stop - 0.5, color="#EEF1F5", linewidth=0, zorder=0)
            shade.set_label(f"shade {layer}")
        fitting = (w for w in (f"layer {layer}", layer)
                   if layer and text_inches(w, SMALL) + 0.06 <= (stop - start) * module_inches)  # fmt: skip
        if words := next(fitting, ""):
            ax.annotate(words, ((start + stop - 1) / 2, 1), (0, 4), ("data", "axes fraction"),
                        "offset points", size=SMALL, color=SOFT, ha="center")  # fmt: skip


MODES = ("1d", "2d", "2.5d", "3d")
COLORS = {mode: color for mode, (color, *_) in zip(MODES, SERIES, strict=False)}
AREAS = {mode: OpStyle(mix(color, CARD, 0.72), "", mode) for mode, color in COLORS.items()}
_NAMED = 0.01  # of the cells: a smaller region has no room for its name
_TALL, _WIDE = 2.9, WIDTH - 1.1  # inches


def map_axes() -> tuple[list[float], list[float]]:
    """(tokens, hidden sizes) of the map: powers of 2, and three sizes between each two."""
    tokens, hidden = ([2.0 ** (k / 4) for k in range(*ends)] for ends in ((16, 64), (22, 57)))
    return tokens, hidden


def cheapest_mode(
    tokens: Sequence[float],
    hidden: Sequence[float],
    modes: Sequence[Sequence[str]],
    title: str = "",
    ranks: int = 0,
) -> Figure:
    """Which mode of tensor parallelism is the cheapest: a map of tokens a rank over hidden size.

    Regions are predicted, and named where they lie; along a border two modes cost the same. `tokens` and
    `hidden` are of the cells' middles, both ascending; `modes` has a row for each of `hidden`.
    """
    table = np.array([[MODES.index(mode) for mode in row] for row in modes])  # (hidden, tokens)
    x, y = _edges(tokens), _edges(hidden)
    share = {mode: float(np.mean(table == i)) for i, mode in enumerate(MODES)}
    named = [mode for mode in MODES if share[mode] > _NAMED]
    keys = [Key(AREAS[m], "flat", f"{m.upper()} predicted") for m in MODES if share[m] and m not in named]
    fig, (ax,) = new_figure([_TALL], title=title, legend=keys, left=0.8, right=0.3, head=0.28)
    for i, mode in enumerate(MODES):
        cells = [(x[c], y[r], x[c + 1] - x[c], y[r + 1] - y[r]) for r, c in np.argwhere(table == i)]
        if cells:
            boxes(ax, cells, AREAS[mode], name=f"area {mode}", outline=False, zorder=1)
    _borders(ax, table, x, y)
    for i, mode in enumerate(MODES):
        if mode in named:
            ax.text(*_place(table == i, x, y), mode.upper(), size=TITLE + 1, weight="bold",
                    color=mix(COLORS[mode], INK, 0.35), ha="center", va="center", zorder=3)  # fmt: skip
    xlabel = f"tokens of the batch / {ranks}" if ranks else "tokens a rank"
    ax.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), xlabel=xlabel)
    for axis, edges, most in ((ax.xaxis, x, 12), (ax.yaxis, y, 9)):
        low, high = math.ceil(math.log2(edges[0])), math.floor(math.log2(edges[-1]))
        powers = [2.0**k for k in range(low, high + 1)]
        set_ticks(axis, powers[:: max(1, -(-len(powers) // most))], count)
    ax.set_ylabel("hidden size", size=SMALL + 1)
    return fig


def mode_shares(modes: Sequence[Sequence[str]]) -> dict[str, float]:
    """{mode: percent of the map's cells that it wins}."""
    cells = [mode for row in modes for mode in row]
    return {mode: 100 * cells.count(mode) / len(cells) for mode in MODES}


def _edges(middles: Sequence[float]) -> NDArray[np.float64]:
    """Borders of cells whose middles these are, in logarithms: one more than there are cells."""
    logs = np.log(np.asarray(middles, dtype=float))
    between = (logs[1:] + logs[:-1]) / 2
    first, last = 2 * logs[0] - between[0], 2 * logs[-1] - between[-1]
    edges: NDArray[np.float64] = np.exp(np.concatenate([[first], between, [last]]))
    return edges


def _borders(ax: Axes, table: NDArray[np.int64], x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """A line wherever two neighbouring cells differ."""
    upright = [
        [(x[c + 1], y[r]), (x[c + 1], y[r + 1])] for r, c in np.argwhere(table[:, 1:] != table[:, :-1])
    ]
    level = [[(x[c], y[r + 1]), (x[c + 1], y[r + 1])] for r, c in np.argwhere(table[1:] != table[:-1])]
    lines = LineCollection(upright + level, colors=CARD, linewidths=2.0, capstyle="projecting", zorder=2)
    lines.set_label("borders")
    ax.add_collection(lines, autolim=False)


def _place(region: NDArray[np.bool_], x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Where the name of `region` is furthest from its border: tokens and hidden size."""
    middles = np.sqrt(x[1:] * x[:-1]), np.sqrt(y[1:] * y[:-1])
    cell = min(_WIDE / len(middles[0]), _TALL / len(middles[1]))  # inches
    room, left = np.zeros(region.shape), region
    while left.any():  # peel it: what goes later lies deeper
        room += cell * left
        padded = np.pad(left, 1)
        left = left & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    best = np.argwhere(room >= 0.999 * room.max())  # of equals the one in their middle
    row, column = best[np.abs(best - best.mean(0)).sum(1).argmin()]
    return float(middles[0][column]), float(middles[1][row])
