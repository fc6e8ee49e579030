"""How long a step takes, over where the last cut is.

The fewer blocks the head has beside it the better, until the other stages are the largest.

    line      predicted, hollow dots
    squares   run
    ticks     who cuts there
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle
from hpnb.plot.units import number, time_unit

_PREDICTED, _RUN = SERIES[0], SERIES[1]


def last_cut(
    positions: Sequence[int],
    run: Sequence[float],
    predicted: Sequence[float],
    marks: Mapping[str, int] | None = None,
    source: str = "run",
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw seconds of a step over the number of blocks on the last stage, beside the head.

    Args:
        positions: ascending.
        run, predicted: seconds, one for each.
        marks: {a way to cut: how many blocks it leaves there}; those beyond the positions are left out.
        source: what the squares are, for the legend.

    Raises:
        ValueError: fewer than two positions, not ascending, or numbers that are not one a position.
    """
    if len(positions) < 2 or list(positions) != sorted(set(positions)):
        raise ValueError(f"positions {list(positions)} are not two or more, ascending")
    for name, values in (("run", run), ("predicted", predicted)):
        if len(values) != len(positions) or not all(math.isfinite(v) and v > 0 for v in values):
            raise ValueError(f"{name} holds {list(values)} for {len(positions)} positions: seconds, one each")
    scale, unit = time_unit(max(*run, *predicted))
    looks = ((_PREDICTED, predicted, "predicted", CARD), (_RUN, run, source, _RUN[0]))
    keys = [Key(OpStyle(color, "", words, "", line), "line") for (color, _, line), _, words, _ in looks]
    heading = title if title is not None else "a step, over where the last cut is"
    fig, (ax,) = new_figure([2.3], title=heading, legend=keys, caption=caption, left=0.72, head=0.22)
    for (color, marker, line), values, words, face in looks:
        (series,) = ax.plot(
            positions, [v / scale for v in values], color=color, linestyle=line, linewidth=1.6
        )
        series.set(marker=marker, markersize=6.5, markerfacecolor=face, markeredgewidth=1.5, label=words)
    best = min(range(len(positions)), key=lambda i: run[i])
    for i, (x, seconds) in enumerate(zip(positions, run, strict=True)):
        above = seconds >= predicted[i]
        ax.annotate(number(seconds / scale), (x, seconds / scale), (0, 7 if above else -7), "data",
                    "offset points", size=SMALL, color=INK, ha="center", va="bottom" if above else "top",
                    weight="bold" if i == best else "normal")  # fmt: skip
    top = 1.15 * max(*run, *predicted) / scale
    ax.set_ylim(0, top)
    ax.set_xlim(positions[0] - 0.5, positions[-1] + 0.5)
    ax.set_xticks(list(positions))
    ax.grid(True, axis="y", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    at: dict[int, list[str]] = {}
    for name, position in (marks or {}).items():
        if positions[0] <= position <= positions[-1]:
            at.setdefault(position, []).append(name)
    for position, names in at.items():
        ax.axvline(position, color=SOFT, linestyle=":", linewidth=1.0, zorder=1)
        ax.annotate("\n".join(names), (position, 0), (3, 3), "data", "offset points", size=SMALL, color=INK,
                    va="bottom")  # fmt: skip
    ax.set_xlabel("blocks on the last stage, beside the head", size=TEXT)
    ax.set_ylabel(f"step ({unit})")
    return fig
