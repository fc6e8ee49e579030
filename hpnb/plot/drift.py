"""Replicas that part while the loss falls: the loss above, the distance between replicas beneath it.

    distance = || w_r - w_0 || / || w_0 ||        the largest over the ranks r

Equal replicas have distance 0, which has no logarithm: those points lie on the foot of the lower panel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title
from hpnb.plot.grammar import INK, RULE, SERIES, OpStyle

MARK = OpStyle(INK, "", "mark", "", ":")  # no series has its colour


def drift(
    losses: Mapping[str, Sequence[float]],
    distances: Mapping[str, Sequence[float]],
    marks: Sequence[int] = (),
    mark: str = "",
    title: str | None = None,
    between: str = "replicas",
) -> Figure:
    """Draw two panels over the same steps, a line a run.

    Args:
        losses: {run: the loss of each step}.
        distances: {run: the distance between replicas after each step}, of the same runs.
        marks: steps at which something happened, drawn through both panels.
        mark: what, for the legend, which shows it word for word wherever there are marks, however few.
        between: whose distance it is, for the lower panel: "ranks' copies" where tensor parallelism has them.

    Raises:
        ValueError: the two do not have the same runs and steps, or a number that cannot be drawn.
    """
    if not losses or set(losses) != set(distances):
        raise ValueError(
            f"losses are of {', '.join(losses) or 'nothing'}, distances of {', '.join(distances)}"
        )
    for name in losses:
        if len(losses[name]) != len(distances[name]) or not len(losses[name]):
            raise ValueError(f"{name} has {len(losses[name])} losses and {len(distances[name])} distances")
        if not all(math.isfinite(x) for x in (*losses[name], *distances[name])) or min(distances[name]) < 0:
            raise ValueError(f"{name} holds a loss or a distance that cannot be drawn; both must be finite")
    keys = [Key(OpStyle(SERIES[i % len(SERIES)][0], "", n, "", SERIES[i % len(SERIES)][2]), "line")
            for i, n in enumerate(losses)]  # fmt: skip
    if len(marks):
        keys.append(Key(OpStyle(MARK.color, "", mark or "mark", "", MARK.line), "line"))
    heading = title if title is not None else f"the loss, and how far apart {between} are"
    fig, (above, below) = new_figure([1.35, 1.55], title=heading, legend=keys, gap=0.42, head=0.3, left=0.8)
    for i, name in enumerate(losses):
        color, _, line = SERIES[i % len(SERIES)]
        for ax, series, what in ((above, losses[name], "loss"), (below, distances[name], "distance")):
            (artist,) = ax.plot(range(1, len(series) + 1), series, color=color, linestyle=line, linewidth=2.0)
            artist.set_label(f"{what} {name}")
    steps = max(map(len, losses.values()))
    panel_title(above, "loss")
    panel_title(below, f"distance between {between}, relative norm")
    _logarithmic(below, [d for series in distances.values() for d in series])
    for ax in (above, below):
        for step in marks:
            rule = ax.axvline(step, color=MARK.color, linestyle=MARK.line, linewidth=1.4)
            rule.set(label="mark", zorder=1.8)  # above the grid, which has 1.5, and beneath the series at 2
        ax.grid(True, which="major", color=RULE, linewidth=0.7)
        ax.set_xlim(0.5, steps + 0.5)
        ax.set_xticks([t for t in MaxNLocator(10, integer=True).tick_values(1, steps) if 1 <= t <= steps])
    above.tick_params(labelbottom=False)
    below.set_xlabel("step")
    return fig


def _logarithmic(ax: Axes, distances: Sequence[float]) -> None:
    """A logarithmic axis whose foot stands for 0."""
    above = [d for d in distances if d > 0]
    low, high = (min(above), max(above)) if above else (1e-8, 1e-8)
    low, high = 10 ** (math.floor(math.log10(low)) - 1), 10 ** (math.floor(math.log10(high)) + 1)
    ax.set_yscale("log")
    for line in ax.get_lines():
        line.set_ydata(np.maximum(np.asarray(line.get_ydata(), dtype=float), low))
        line.set_clip_on(False)
    ax.set_ylim(low, high)
    decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
    ax.set_yticks([10.0**k for k in decades[:: -(-len(decades) // 6)]])
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "0" if y <= low * 1.01 else f"{y:.0e}"))
    if len(above) < len(distances):
        ax.annotate("0: equal bit for bit", (1, 0), (-4, 5), "axes fraction", "offset points",
                    size=SMALL, color=INK, ha="right")  # fmt: skip
