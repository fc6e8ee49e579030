"""Notebook 08: where each millisecond of a step went, and which layouts there are to choose from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

from matplotlib.figure import Figure

from hpnb.lesson.figures.dot_names import along, name_dots
from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, Key
from hpnb.plot.curves import CurvePanel, Kind, Look, Series, curves, rule
from hpnb.plot.grammar import ALARM, AXIS, INK, SERIES, STYLE, OpStyle
from hpnb.plot.memory import CAPACITY
from hpnb.plot.training import by_layout
from hpnb.plot.units import byte_count, bytes_unit, seconds

STEP: Mapping[str, OpStyle] = {
    "computing": OpStyle(STYLE["F"].color, "", "computing"),
    "bubble": OpStyle(STYLE["idle"].color, STYLE["idle"].hatch, "bubble"),
    "exposed tp": OpStyle(AXIS["tp"].color, "", "exposed tp"),
    "exposed cp": OpStyle(AXIS["cp"].color, "//", "exposed cp"),
    "exposed dp": OpStyle(AXIS["dp"].color, "..", "exposed dp"),
    "optimizer": OpStyle(STYLE["W"].color, "\\\\", "optimizer"),
}


def waterfall(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
) -> Figure:
    """Where each millisecond of a step went, a bar a layout: measured parts, with predicted ones as ticks.

        |==computing==|//bubble//|tp|dp|opt|        bar    measured (or replayed), mean over the ranks
                     ^           ^  ^  ^   ^        ticks  where each of them ends by the prediction

    The last tick, which is thick, is the whole predicted step; it covers that of the optimizer. A part that
    is predicted to take no time has no tick. Both are {layout: {part of STEP: seconds}}.
    """
    present = [part for part in STEP if any(parts.get(part) for parts in measured.values())]
    rows = {}
    for name, parts in measured.items():
        predicted_parts = (predicted or {}).get(name, {})
        ticks = list(accumulate(predicted_parts[part] for part in present if predicted_parts.get(part)))
        said = f" ({seconds(ticks[-1])})" if ticks else ""
        rows[name] = [Bar(parts, words=f"{seconds(sum(parts.values()))}{said}", ticks=ticks)]
    lines = [
        "thin lines: predicted ends of the parts, in the order of the colours; a part of 0 s has none",
        "thick line: predicted end of the step; number: the bar's end (the thick line)",
    ]
    keys = [Key(OpStyle(INK, "", line), "words") for line in lines] if predicted else []
    panel = BarPanel(rows, "s", "a step ({unit}), mean over the ranks", row_inches=0.3)
    return bars([panel], STEP, title=title, more_keys=keys, right=1.3 if predicted else 0.75)


def resumed(
    legs: Sequence[tuple[str, Sequence[float]]], lost: Sequence[float], whole_run: Sequence[float], title: str
) -> Figure:
    """A run that was saved, killed and resumed, over the run that nobody killed.

    The legs are (words, losses): up to the save, and from there on by other processes. `lost` has losses of
    the steps after the save, up to the kill.
    """
    fig = by_layout(legs, whole_run, title, run="", whose="the run that nobody killed")
    (ax,) = fig.axes
    saved = len(legs[0][1])
    killed = saved + len(lost)
    (rings,) = ax.plot(range(saved + 1, killed + 1), lost, "o", markersize=11, label="steps that were lost")
    rings.set(markerfacecolor="none", zorder=6, markeredgecolor=INK, markeredgewidth=1.4)
    ax.plot(
        [killed], [lost[-1]], "x", color=ALARM, markersize=5, markeredgewidth=2.0, zorder=7, label="killed"
    )
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.14 * (high - low), high)  # room for words beneath the ring
    ax.annotate(f"killed after step {killed},\n{len(lost)} steps lost (rings)", (killed, lost[-1]), (-12, 2),
                textcoords="offset points", ha="right", va="center", size=SMALL, color=INK)  # fmt: skip
    ax.annotate(f"saved after step {saved}", (saved + 0.5, ax.get_ylim()[0]), (-5, 5),
                textcoords="offset points", ha="right", va="bottom", size=SMALL, color=INK)  # fmt: skip
    return fig


Points = Mapping[str, tuple[float, float]]  # {layout: (bytes, tokens a second)}
_MANY = 12  # dots, with more of which not all can have their names
_GOAL = OpStyle(SERIES[3][0], "", "goal", ":")
_MEASURED, _PREDICTED = Look(SERIES[0][0], "o"), Look(SERIES[2][0], "s")


def choices(
    measured: Points,
    predicted: Points | None = None,
    chosen: Mapping[str, str] | None = None,
    capacity: float | None = None,
    title: str = "",
    text: bool = True,
    labels: tuple[str, str] = ("measured", "predicted"),
    goal: tuple[float, str] | None = None,
    named_predictions: Collection[str] = (),
) -> Figure:
    """Layouts by memory and speed: the frontier to choose from, and what was chosen.

    A layout is on the frontier if no other one is faster and holds less. The line is a stair between these,
    because there is no layout between two of them.

    Args:
        measured, predicted: {layout: (bytes at its peak, tokens a second)}, filled and hollow dots.
        chosen: {layout: what it is, for its label}, in a ring.
        capacity: bytes of a device, a dashed line.
        text: False names nothing but what was chosen. Where there are many, the frontier alone has names.
        goal: (tokens a second, its words), a line across.
        named_predictions: layouts whose predicted dots have names, too.
    """
    predicted_points, picks = predicted or {}, chosen or {}
    every = [*measured.values(), *predicted_points.values()]
    size, unit = bytes_unit(max(nbytes for nbytes, _ in every))
    most = max(rate for _, rate in every)
    scale, prefix = next(
        (s, p) for s, p in ((1e6, "million "), (1e3, "thousand "), (1.0, "")) if most >= s or s == 1
    )
    at, hollow = (
        {n: (h / size, r / scale) for n, (h, r) in side.items()} for side in (measured, predicted_points)
    )
    front = frontier_of(measured)

    def series_of(
        name: str, points: Collection[tuple[float, float]], look: Look, kind: Kind = "line"
    ) -> Series:
        return Series(name, [x for x, _ in points], [y for _, y in points], look, kind)

    corners = [at[name] for name in front]
    stair = [(x, corners[max(0, i - k)][1]) for i, (x, _) in enumerate(corners) for k in (1, 0)]
    series = [series_of("frontier", stair, _MEASURED),
              series_of(labels[0], at.values(), _MEASURED, "dots")]  # fmt: skip
    series += [series_of(labels[1], hollow.values(), _PREDICTED, "hollow")] if predicted_points else []
    keys = [points.key for points in (*series[1:], series[0])]
    if predicted_points:
        keys.append(Key(OpStyle(_PREDICTED.color, "", "error of the prediction", "-"), "line"))
    keys += [Key(CAPACITY, "line", f"memory budget {byte_count(capacity)}")] if capacity else []
    keys += [Key(_GOAL, "line", goal[1])] if goal else []
    panel = CurvePanel(series, f"{prefix}tokens a second", height=5.2 if predicted_points else 3.7,
                       xlabel=f"peak memory of the fullest rank ({unit})")  # fmt: skip
    fig = curves([panel], title=title, keys=keys, left=0.75, right=0.3)
    (ax,) = fig.axes
    right = max(*(nbytes for nbytes, _ in every), capacity or 0.0) / size * 1.12
    slowest = min(rate for _, rate in every)
    low = max(0.0, slowest - 0.2 * (most - slowest)) / scale  # dots far from 0 would stand in a crowd
    ax.set(xlim=(0, right), ylim=(low, most / scale * 1.18))
    for name in predicted_points.keys() & measured.keys():
        ax.plot(*zip(at[name], hollow[name], strict=True), color=_PREDICTED.color, linewidth=1.4, zorder=2.5)
    if predicted_points:
        next(line for line in ax.get_lines() if line.get_marker() == _PREDICTED.marker).set_markersize(5.5)
    if goal:
        ax.axhline(goal[0] / scale, color=_GOAL.color, linestyle=_GOAL.line, linewidth=1.8, zorder=1)
    for name in picks:
        (ring,) = ax.plot(*at[name], marker="o", markersize=15, linestyle="none", markerfacecolor="none")
        ring.set(markeredgecolor=ALARM, markeredgewidth=2.0, label=f"chosen: {name}")
    few = len(at) <= _MANY
    shown = {n: at[n] for n in at if n in picks or (text and (few or n in front))}
    shown |= {f"{n}, {labels[1]}": hollow[n] for n in named_predictions}
    marks = [*at.values(), *hollow.values(), *(p for ends in pairwise(stair) for p in along(*ends))]
    marks += [p for name in hollow.keys() & at.keys() for p in along(at[name], hollow[name])]
    if capacity:
        marks += along((capacity / size, low), (capacity / size, most / scale * 1.18))
    wall = capacity / size if capacity else None
    name_dots(ax, shown, (at, hollow), marks, picks, 130 if few else 36, wall)
    for drawn in ax.get_lines():
        if len(drawn.get_xdata()) > 1:  # type: ignore[arg-type]
            drawn.set_label(f"_{drawn.get_label()}")  # the label of the figure says it
    names = "; ".join(f"{name} at {at[name][0]:.3g} {unit} and {at[name][1]:.3g}" for name in front)
    fig.set_label(f"On the frontier, with {prefix}tokens a second: {names}")
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
