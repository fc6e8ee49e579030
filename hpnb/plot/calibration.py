"""Published speeds beside predicted ones: on the diagonal a prediction is right, in the band nearly so.

hollow   the run that the prediction was fitted to, which proves nothing
filled   runs that it had not seen
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from hpnb.plot.canvas import TEXT, Key, new_figure, panel_title
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle


def calibration(
    points: Mapping[str, tuple[float, float]],
    fitted: str,
    band: float = 0.1,
    unit: str = "TFLOP/s a GPU",
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw each point, the diagonal, and a band of `band` about it.

    Args:
        points: {name: (published, predicted)}.
        fitted: the name of the one that was fitted.

    Raises:
        ValueError: no such point, or a value that is not above 0.
    """
    if fitted not in points:
        raise ValueError(f"{fitted!r} is no point; there are {', '.join(points)}")
    if wrong := [name for name, pair in points.items() if not min(pair) > 0]:
        raise ValueError(f"{wrong[0]} is {points[wrong[0]]}; both must be above 0")
    color = SERIES[0][0]
    others = [pair for name, pair in points.items() if name != fitted]
    within = sum(abs(predicted / published - 1) <= band for published, predicted in others)
    keys = [
        Key(OpStyle(color, "", "predicted blind"), "dot"),
        Key(OpStyle(color, "", "fitted"), "hollow"),
        Key(OpStyle(RULE, "", f"within {100 * band:.0f} %"), "flat"),
    ]
    heading = title if title is not None else "published and predicted"
    fig, (ax,) = new_figure([3.0], title=heading, legend=keys, caption=caption, head=0.3, right=1.7)
    low = 0.9 * min(min(pair) for pair in points.values())
    high = 1.08 * max(max(pair) for pair in points.values())
    line = np.array([low, high])
    ax.fill_between(line, line * (1 - band), line * (1 + band), color=RULE, zorder=1).set_label("band")
    ax.plot(line, line, color=SOFT, linewidth=1.0, zorder=2)
    for name, (published, predicted) in points.items():
        (dot,) = ax.plot([published], [predicted], "o", color=color, markersize=8, zorder=4)
        dot.set(markeredgecolor=color, markeredgewidth=1.6, markerfacecolor=CARD if name == fitted else color)
        dot.set_label(name)
    # names stand in a column at the right, in the order of their heights, so that none covers another
    rows = sorted(points, key=lambda name: points[name][1])
    heights = np.linspace(low + 0.1 * (high - low), high - 0.12 * (high - low), len(rows))
    for name, height in zip(rows, heights, strict=True):
        published, predicted = points[name]
        words = f"{name}, fitted" if name == fitted else f"{name}, ratio {published / predicted:.3f}"
        ax.annotate(words, (published, predicted), (high * 1.012, height), "data", "data", size=TEXT,
                    color=INK, va="center", annotation_clip=False, zorder=3,
                    arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.7, "shrinkB": 5,
                                "relpos": (0.0, 0.5)})  # fmt: skip
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    ax.set_xlabel(f"published, {unit}")
    ax.set_ylabel(f"predicted, {unit}")
    panel_title(ax, f"{within} of {len(others)} blind ones within {100 * band:.0f} %")
    return fig
