"""Layouts by what they hold and how fast they are: the frontier to choose from, and what was chosen.

hollow   predicted       filled   measured       ring   a choice       dashed line   what a device holds

A layout is on the frontier if no other one is faster and holds less; the line joins these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, Key, new_figure, text_inches
from hpnb.plot.grammar import ALARM, CARD, INK, RULE, SERIES, SOFT, OpStyle
from hpnb.plot.memory import CAPACITY
from hpnb.plot.units import byte_count, bytes_unit

Points = Mapping[str, tuple[float, float]]  # {layout: (bytes, tokens a second)}
_MANY = 12  # dots, with more of which not all can have their names
_FILLED, _HOLLOW = SERIES[0][0], SERIES[2][0]


def choices(
    measured: Points,
    predicted: Points | None = None,
    chosen: Mapping[str, str] | None = None,
    capacity: float | None = None,
    title: str | None = None,
    caption: str = "",
    text: bool = True,
    labels: tuple[str, str] = ("measured", "predicted"),
) -> Figure:
    """Draw memory against tokens a second.

    Args:
        measured, predicted: {layout: (bytes at its peak, tokens a second)}.
        chosen: {layout: whose choice, for its label}.
        capacity: bytes of a device.
        text: False names nothing but what was chosen. Where there are many, the frontier alone has names.
        labels: of the two series, for the legend.

    Raises:
        ValueError: nothing to draw, numbers that are not finite and above 0, or a choice that is not there.
    """
    told, picks = predicted or {}, chosen or {}
    if not measured:
        raise ValueError("there is no layout to draw")
    for name, point in (*measured.items(), *told.items()):
        if not all(0 < value < math.inf for value in point):
            raise ValueError(f"{name} is at {point}; bytes and tokens a second must be finite and above 0")
    if strange := [name for name in picks if name not in measured]:
        raise ValueError(f"{', '.join(strange)} is not among {', '.join(measured)}")
    size, unit = bytes_unit(max(held for held, _ in (*measured.values(), *told.values())))
    most = max(rate for _, rate in (*measured.values(), *told.values()))
    scale, prefix = next(
        (s, p) for s, p in ((1e6, "million "), (1e3, "thousand "), (1.0, "")) if most >= s or s == 1
    )
    keys = [Key(OpStyle(_FILLED, "", labels[0]), "dot")]
    keys += [Key(OpStyle(_HOLLOW, "", labels[1]), "hollow")] if told else []
    keys += [Key(OpStyle(_FILLED, "", "frontier"), "line")]
    keys += [Key(OpStyle(ALARM, "", "chosen"), "hollow")] if picks else []
    keys += [Key(CAPACITY, "line", f"capacity {byte_count(capacity)}")] if capacity else []
    heading = title if title is not None else "memory and speed of layouts"
    fig, (ax,) = new_figure([3.2], title=heading, legend=keys, caption=caption, left=0.75, right=0.3)
    ax.set_xlim(
        0, max(*(held for held, _ in (*measured.values(), *told.values())), capacity or 0.0) / size * 1.12
    )
    ax.set_ylim(0, most / scale * 1.18)
    for name, (held, rate) in told.items():
        if name in measured:
            x, y = measured[name]
            ax.plot([held / size, x / size], [rate / scale, y / scale], color=RULE, linewidth=1.2, zorder=2)
        ax.plot([held / size], [rate / scale], marker="s", markersize=6.5, markerfacecolor="none",
                markeredgecolor=_HOLLOW, markeredgewidth=1.3, linestyle="none", zorder=3)  # fmt: skip
    front = frontier_of(measured)
    xs, ys = ([measured[name][i] / s for name in front] for i, s in ((0, size), (1, scale)))
    (line,) = ax.plot(xs, ys, color=_FILLED, linewidth=1.2, zorder=2.5)
    line.set_label("frontier")
    for name, (held, rate) in measured.items():
        (dot,) = ax.plot([held / size], [rate / scale], marker="o", markersize=7, color=_FILLED,
                         markeredgecolor=CARD, markeredgewidth=0.8, linestyle="none", zorder=4)  # fmt: skip
        dot.set_label(name)
        if name in picks:
            (ring,) = ax.plot([held / size], [rate / scale], marker="o", markersize=15, linestyle="none",
                              markerfacecolor="none", markeredgecolor=ALARM, markeredgewidth=2.0)  # fmt: skip
            ring.set_label(f"chosen: {name}")
    shown = {n: (h / size, r / scale) for n, (h, r) in measured.items()}
    marks = [*shown.values(), *((h / size, r / scale) for h, r in told.values())]
    if len(shown) > _MANY:  # only what there is to choose from
        shown = {name: point for name, point in shown.items() if name in front or name in picks}
    _name(ax, shown, marks, picks, text)
    if capacity:
        wall = ax.axvline(capacity / size, color=CAPACITY.color, linestyle=CAPACITY.line, linewidth=1.5)
        wall.set_label("capacity")
        ax.axvspan(capacity / size, ax.get_xlim()[1], color="#FBEDE6", zorder=0, linewidth=0)
    ax.set_xlabel(f"peak memory of the fullest rank ({unit})")
    ax.set_ylabel(f"{prefix}tokens a second")
    ax.grid(True, color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    return fig


def frontier_of(points: Points) -> list[str]:
    """Layouts than which no other is at least as fast and holds less, from the leanest to the fastest."""
    found: list[str] = []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1])):
        if not found or points[name][1] > points[found[-1]][1]:
            found.append(name)
    return found


def _name(
    ax: Axes,
    points: Mapping[str, tuple[float, float]],
    marks: Sequence[tuple[float, float]],
    picks: Mapping[str, str],
    text: bool,
) -> None:
    """Words beside the dots, each where it covers no other: above, else below, else further, with a line."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    fig = ax.figure
    wide = ax.get_position().width * fig.get_figwidth() * 72  # type: ignore[union-attr]
    tall = ax.get_position().height * fig.get_figheight() * 72  # type: ignore[union-attr]
    taken: list[tuple[float, float, float, float]] = []

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - left) / (right - left) * wide, (y - low) / (high - low) * tall

    at = {name: place(*point) for name, point in points.items()}
    for x, y in (place(*mark) for mark in marks):
        taken.append((x - 5, y - 5, x + 5, y + 5))
    for name in sorted(points, key=lambda n: n not in picks):
        if not text and name not in picks:
            continue
        words = f"{name} ({picks[name]})" if picks.get(name) else name
        x, y = at[name]
        bold = name in picks
        length = 72 * text_inches(words, SMALL, "bold" if bold else "normal")
        spots = [(7, 5), (7, -13), (-7 - length, 5), (-7 - length, -13), (7, 17), (7, -25), (-7 - length, 17),
                 (-7 - length, -25), (7, 29), (7, -37), (-7 - length, 29)]  # fmt: skip
        for dx, dy in spots:
            box = (x + dx, y + dy, x + dx + length, y + dy + 10)
            inside = box[0] > 0 and box[2] < wide + 10 and box[1] > 0 and box[3] < tall + 4
            if inside and not any(_overlap(box, other) for other in taken):
                break
        else:
            continue  # no room: the table has it
        taken.append(box)
        behind = {"facecolor": CARD, "edgecolor": "none", "alpha": 0.7, "pad": 0.6}
        far = {"arrowstyle": "-", "color": RULE, "linewidth": 0.7} if abs(dy) > 13 else None
        ax.annotate(words, points[name], (dx, dy), "data", "offset points", size=SMALL, arrowprops=far,
                    color=INK if bold else SOFT, weight="bold" if bold else "normal",
                    zorder=6, bbox=behind)  # fmt: skip


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
