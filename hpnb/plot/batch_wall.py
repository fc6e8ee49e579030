"""What a larger batch buys: steps to a loss above, and beneath them the samples that they take.

filled   measured        line   steps = fewest (1 + noise / batch), for each noise scale given

Left of the noise scale a line falls by half where the batch doubles: ranks are worth their price. Right of it
steps hardly fall, and samples rise with the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle
from hpnb.plot.units import number


def batch_wall(
    batches: Sequence[float],
    steps: Sequence[float],
    laws: Mapping[str, tuple[float, float]],
    noun: str = "rows",
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw both panels over the batch, all in logarithms.

    Args:
        batches, steps: measured.
        laws: {name: (fewest steps, noise scale in `noun`)}, drawn as lines with the scale marked.

    Raises:
        ValueError: not as many batches as steps, or one that is not above 0.
    """
    if len(batches) != len(steps) or not len(batches):
        raise ValueError(f"{len(batches)} batches and {len(steps)} counts of steps; a point needs both")
    if min(*batches, *steps, *(x for law in laws.values() for x in law)) <= 0:
        raise ValueError("a batch, a count of steps or a noise scale is not above 0, and has no logarithm")
    others = [(color, line) for color, _, line in SERIES[1:]]
    looks = [others[i % len(others)] for i in range(len(laws))]
    keys = [Key(OpStyle(SERIES[0][0], "", "measured"), "dot")]
    keys += [Key(OpStyle(color, "", name, "", line), "line")
             for name, (color, line) in zip(laws, looks, strict=True)]  # fmt: skip
    heading = title if title is not None else "what a larger batch buys"
    fig, (above, below) = new_figure([1.6, 1.3], title=heading, legend=keys, caption=caption, gap=0.35,
                                     head=0.3, left=0.78)  # fmt: skip
    low, high = min(batches) / 1.3, max(batches) * 1.3
    line_x = np.geomspace(low, high, 80)
    for ax, factor in ((above, 0.0), (below, 1.0)):
        for (name, (fewest, noise)), (color, line) in zip(laws.items(), looks, strict=True):
            (artist,) = ax.plot(line_x, fewest * (1 + noise / line_x) * line_x**factor, color=color,
                                linestyle=line, linewidth=1.8)  # fmt: skip
            artist.set_label(name)
            if low < noise < high:
                ax.axvline(noise, color=color, linestyle=":", linewidth=1.0)
        (dots,) = ax.plot(batches, [s * b**factor for s, b in zip(steps, batches, strict=True)], "o",
                          color=SERIES[0][0], markersize=7, markeredgecolor=CARD, zorder=5)  # fmt: skip
        dots.set_label("measured")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(low, high)
        ax.set_xticks(list(batches), [number(b) if b % 1 else f"{b:,.0f}" for b in batches])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.grid(True, which="both", axis="y", color=RULE, linewidth=0.6)
        ax.tick_params(which="minor", colors=SOFT)
    for batch, count in zip(batches, steps, strict=True):
        above.annotate(f"{count:,.0f}", (batch, count), (0, 7), "data", "offset points", size=SMALL,
                       ha="center", color=INK, zorder=6,
                       bbox={"facecolor": CARD, "edgecolor": "none", "pad": 0.6})  # fmt: skip
    above.tick_params(labelbottom=False)
    panel_title(above, "steps to the loss")
    panel_title(below, f"{noun} to the loss")
    below.set_xlabel(f"{noun} in a batch, over all ranks")
    return fig
