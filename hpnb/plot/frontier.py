"""Step time against peak memory: what each way of keeping states costs, and what it saves.

hollow   predicted        filled   measured        dashed line   what a device holds: left of it fits

A family (the same way of keeping activations) has one colour and one marker; its points carry their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, Key, new_figure
from hpnb.plot.grammar import CARD, RULE, SERIES, SOFT, OpStyle
from hpnb.plot.memory import CAPACITY
from hpnb.plot.units import byte_count, bytes_unit, time_unit

Points = Mapping[str, tuple[float, float]]  # {name: (seconds, bytes)}


def frontier(
    predicted: Mapping[str, Points],
    measured: Mapping[str, Points],
    capacity: float | None = None,
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw {family: {name: (seconds of a step, bytes at its peak)}}, measured over predicted.

    Raises:
        ValueError: nothing to draw, or a number that is not finite and above 0.
    """
    every = [(f"{family} {name}", *point) for side in (predicted, measured)
             for family, points in side.items() for name, point in points.items()]  # fmt: skip
    if not every:
        raise ValueError("neither predicted nor measured holds a point")
    for name, seconds, held in every:
        if not (0 < seconds < math.inf and 0 < held < math.inf):
            raise ValueError(f"{name} is at {seconds} s and {held} B; both must be finite and above 0")
    families = list(dict.fromkeys((*predicted, *measured)))
    others = [look for look in SERIES if look[0] != CAPACITY.color]
    looks = {family: others[i % len(others)] for i, family in enumerate(families)}
    keys = [Key(OpStyle(looks[f][0], "", f), "dot") for f in families]
    keys += [Key(OpStyle(SOFT, "", "hollow: predicted, filled: measured"), "words")]
    if capacity is not None:
        keys.append(Key(CAPACITY, "line", f"budget {byte_count(capacity)}"))
    size, unit = bytes_unit(max(held for _, _, held in every))
    scale, clock = time_unit(max(seconds for _, seconds, _ in every))
    heading = title if title is not None else "step time and peak memory"
    fig, (ax,) = new_figure([3.1], title=heading, legend=keys, caption=caption, left=0.72, right=0.3)
    for side, points_of, hollow in (("predicted", predicted, True), ("measured", measured, False)):
        for family, points in points_of.items():
            color, marker, line = looks[family]
            x, y = ([point[i] / s for point in points.values()] for i, s in ((1, size), (0, scale)))
            (artist,) = ax.plot(x, y, color=color, marker=marker, markersize=9.5 if hollow else 6.5,
                                linestyle="none" if hollow else line, linewidth=1.1, clip_on=False,
                                markerfacecolor="none" if hollow else color,
                                markeredgecolor=color if hollow else CARD,
                                markeredgewidth=1.5 if hollow else 0.8,
                                zorder=4 if hollow else 5)  # fmt: skip
            artist.set_label(f"{side} {family}")
            if not hollow or family not in measured:
                for name, at_x, at_y in zip(points, x, y, strict=True):
                    ax.annotate(name, (at_x, at_y), (6, 6), "data", "offset points", size=SMALL,
                                color=color, zorder=6)  # fmt: skip
    right = max(max(held for _, _, held in every), capacity or 0.0) / size * 1.1
    ax.set_xlim(0, right)
    ax.set_ylim(0, max(seconds for _, seconds, _ in every) / scale * 1.18)
    if capacity is not None:
        wall = ax.axvline(capacity / size, color=CAPACITY.color, linestyle=CAPACITY.line, linewidth=1.5)
        wall.set_label("budget")
        ax.axvspan(capacity / size, right, color="#FBEDE6", zorder=0, linewidth=0)
        ax.annotate("does not fit", (capacity / size, 0.03), (5, 0), ("data", "axes fraction"),
                    "offset points", size=SMALL, color=SOFT)  # fmt: skip
    ax.set_xlabel(f"peak memory of a rank ({unit})")
    ax.set_ylabel(f"step ({clock})")
    ax.grid(True, color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    return fig
