"""Notebook 08: where each millisecond of a step went, and which layouts there are to choose from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, Key, text_inches
from hpnb.plot.curves import CurvePanel, Kind, Look, Series, curves, rule
from hpnb.plot.grammar import ALARM, AXIS, CARD, INK, RULE, SERIES, SOFT, STYLE, OpStyle
from hpnb.plot.memory import CAPACITY
from hpnb.plot.units import byte_count, bytes_unit, seconds

STEP: Mapping[str, OpStyle] = {
    "computing": OpStyle(STYLE["F"].color, "", "computing"),
    "bubble": OpStyle(STYLE["idle"].color, STYLE["idle"].hatch, "bubble"),
    "exposed tp": OpStyle(AXIS["tp"].color, "", "exposed tp"),
    "exposed dp": OpStyle(AXIS["dp"].color, "..", "exposed dp"),
    "optimizer": OpStyle(STYLE["W"].color, "\\\\", "optimizer"),
}


def waterfall(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Where each millisecond of a step went, a bar a layout: measured parts, with predicted ones as ticks.

        |==computing==|//bubble//|tp|dp|opt|        bar    measured (or replayed), mean over the ranks
                     ^           ^  ^  ^   ^        ticks  where each of them ends by the prediction

    The last tick, which is longer, is the whole predicted step.

    Args:
        measured: {layout: {part of STEP: seconds}}.
        predicted: the same; layouts that it lacks have no ticks.
    """
    present = [part for part in STEP if any(parts.get(part) for parts in measured.values())]
    rows = {}
    for name, parts in measured.items():
        told = (predicted or {}).get(name)
        ticks = list(accumulate(told.get(part, 0.0) for part in present)) if told else []
        rows[name] = [Bar(parts, words=seconds(sum(parts.values())), ticks=ticks)]
    keys = [Key(OpStyle(INK, "", "where each part ends, predicted"), "line")] if predicted else []
    heading = title if title is not None else "where each millisecond of a step went"
    panel = BarPanel(rows, "s", "a step ({unit}), mean over the ranks", row_inches=0.3)
    return bars([panel], STEP, title=heading, more_keys=keys, caption=caption, right=0.75)


Points = Mapping[str, tuple[float, float]]  # {layout: (bytes, tokens a second)}
_MANY = 12  # dots, with more of which not all can have their names
_MEASURED, _PREDICTED = Look(SERIES[0][0], "o"), Look(SERIES[2][0], "s")


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
    """Layouts by memory and speed: the frontier to choose from, and what was chosen.

    A layout is on the frontier if no other one is faster and holds less; the line joins these.

    Args:
        measured, predicted: {layout: (bytes at its peak, tokens a second)}, filled and hollow dots.
        chosen: {layout: whose choice, for its label}, in a ring.
        capacity: bytes of a device, a dashed line.
        text: False names nothing but what was chosen. Where there are many, the frontier alone has names.
        labels: of the two series, for the legend.

    Raises:
        ValueError: a choice that is not among the layouts, or nothing to draw.
    """
    told, picks = predicted or {}, chosen or {}
    if strange := [name for name in picks if name not in measured]:
        raise ValueError(f"{', '.join(strange)} is not among {', '.join(measured)}")
    every = [*measured.values(), *told.values()]
    if not measured or min(min(point) for point in every) <= 0:
        raise ValueError("every layout needs bytes and tokens a second above 0")
    size, unit = bytes_unit(max(held for held, _ in every))
    most = max(rate for _, rate in every)
    scale, prefix = next(
        (s, p) for s, p in ((1e6, "million "), (1e3, "thousand "), (1.0, "")) if most >= s or s == 1
    )
    at, hollow = ({n: (h / size, r / scale) for n, (h, r) in side.items()} for side in (measured, told))
    front = frontier_of(measured)

    def series_of(
        name: str, points: Collection[tuple[float, float]], look: Look, kind: Kind = "line"
    ) -> Series:
        return Series(name, [x for x, _ in points], [y for _, y in points], look, kind)

    series = [series_of("frontier", [at[name] for name in front], _MEASURED),
              series_of(labels[0], at.values(), _MEASURED, "dots")]  # fmt: skip
    series += [series_of(labels[1], hollow.values(), _PREDICTED, "hollow")] if told else []
    keys = [each.key for each in (*series[1:], series[0])]
    keys += [Key(OpStyle(ALARM, "", "chosen"), "hollow")] if picks else []
    keys += [Key(CAPACITY, "line", f"capacity {byte_count(capacity)}")] if capacity else []
    heading = title if title is not None else "memory and speed of layouts"
    panel = CurvePanel(series, f"{prefix}tokens a second", height=3.2,
                       xlabel=f"peak memory of the fullest rank ({unit})")  # fmt: skip
    fig = curves([panel], title=heading, keys=keys, caption=caption, left=0.75, right=0.3)
    (ax,) = fig.axes
    right = max(*(held for held, _ in every), capacity or 0.0) / size * 1.12
    ax.set(xlim=(0, right), ylim=(0, most / scale * 1.18))
    for name in told.keys() & measured.keys():
        ax.plot(*zip(at[name], hollow[name], strict=True), color=RULE, linewidth=1.2, zorder=2)
    for name in picks:
        (ring,) = ax.plot(*at[name], marker="o", markersize=15, linestyle="none", markerfacecolor="none")
        ring.set(markeredgecolor=ALARM, markeredgewidth=2.0, label=f"chosen: {name}")
    few = len(at) <= _MANY
    shown = {n: at[n] for n in at if n in picks or (text and (few or n in front))}
    _name_points(ax, shown, [*at.values(), *hollow.values()], picks)
    if capacity:
        rule(ax, capacity / size, "capacity", CAPACITY.color, CAPACITY.line)
        ax.axvspan(capacity / size, right, color="#FBEDE6", zorder=0, linewidth=0)
    return fig


def frontier_of(points: Points) -> list[str]:
    """Layouts than which no other is at least as fast and holds less, from the leanest to the fastest."""
    frontier: list[str] = []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1])):
        if not frontier or points[name][1] > points[frontier[-1]][1]:
            frontier.append(name)
    return frontier


Rect = tuple[float, float, float, float]  # left, low, right, high


def _name_points(
    ax: Axes,
    points: Mapping[str, tuple[float, float]],
    marks: Sequence[tuple[float, float]],
    picks: Mapping[str, str],
) -> None:
    """Words beside the dots, each where it covers no other: above, else below, else further, with a line."""
    (left, right), (low, high), place = ax.get_xlim(), ax.get_ylim(), ax.get_position()
    fig_inches = ax.figure.get_size_inches()  # type: ignore[union-attr]
    wide, tall = place.width * fig_inches[0] * 72, place.height * fig_inches[1] * 72

    def in_points(mark: tuple[float, float]) -> tuple[float, float]:
        return (mark[0] - left) / (right - left) * wide, (mark[1] - low) / (high - low) * tall

    taken: list[Rect] = [(x - 5, y - 5, x + 5, y + 5) for x, y in map(in_points, marks)]
    for name in sorted(points, key=lambda n: n not in picks):
        words = f"{name} ({picks[name]})" if picks.get(name) else name
        weight = "bold" if name in picks else "normal"
        length = 72 * text_inches(words, SMALL, weight)
        x, y = in_points(points[name])
        for dx, dy in (
            (dx, dy) for dy in (5, -13, 17, -25, 29, -37, 41, -49, 53, -61) for dx in (7, -7 - length)
        ):
            box = (x + dx, y + dy, x + dx + length, y + dy + 10)
            inside = box[0] > 0 and box[2] < wide + 10 and box[1] > 0 and box[3] < tall + 4
            if inside and not any(_overlap(box, other) for other in taken):
                break
        else:
            continue  # no room: the table has it
        taken.append(box)
        far = {"arrowstyle": "-", "color": RULE, "linewidth": 0.7} if abs(dy) > 13 else None
        ax.annotate(words, points[name], (dx, dy), "data", "offset points", size=SMALL, weight=weight,
                    arrowprops=far, color=INK if name in picks else SOFT, zorder=6,
                    bbox={"facecolor": CARD, "edgecolor": "none", "alpha": 0.7, "pad": 0.6})  # fmt: skip


def _overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
