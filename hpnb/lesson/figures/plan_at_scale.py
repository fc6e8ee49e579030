"""Notebook 09: a planner beside published runs, a map of layouts, and what failures leave of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpnb.plot.canvas import SMALL, TEXT, Key, boxes, new_figure
from hpnb.plot.curves import CurvePanel, Look, Series, count, curves, log_ticks, looks, rule
from hpnb.plot.grammar import ALARM, CARD, INK, RULE, SERIES, SOFT, OpStyle, ink_on, mix
from hpnb.plot.units import number

_BAND, _UNIT = 0.1, "TFLOP/s per GPU"


def calibration(
    points: Mapping[str, tuple[float, float]], fitted: str, title: str = "published and predicted"
) -> Figure:
    """Published speeds beside predicted ones: on the diagonal a prediction is right, in the band nearly so.

    The run that the prediction was fitted to is hollow, because it proves nothing.

    Args:
        points: {name: (published, predicted)}.
        fitted: the name of the one that was fitted.

    Raises:
        ValueError: no such point.
    """
    if fitted not in points:
        raise ValueError(f"{fitted!r} is no point; there are {', '.join(points)}")
    look = Look(SERIES[0][0])
    others = [pair for name, pair in points.items() if name != fitted]
    within = sum(abs(predicted / published - 1) <= _BAND for published, predicted in others)
    series = [
        Series("fitted" if name == fitted else "predicted", [published], [predicted], look,
               "hollow" if name == fitted else "dots", name)
        for name, (published, predicted) in points.items()
    ]  # fmt: skip
    keys = [Key(OpStyle(look.color, "", "predicted"), "dot"),
            Key(OpStyle(look.color, "", "fitted"), "hollow"),
            Key(OpStyle(RULE, "", f"within {100 * _BAND:.0f} %"), "flat")]  # fmt: skip
    words = f"{within} of {len(others)} that were not fitted are within {100 * _BAND:.0f} %"
    panel = CurvePanel(series, f"predicted, {_UNIT}", height=3.0, title=words, xlabel=f"published, {_UNIT}")
    fig = curves([panel], title=title, keys=keys, right=1.7, left=0.75)
    (ax,) = fig.axes
    low = 0.9 * min(min(pair) for pair in points.values())
    high = 1.08 * max(max(pair) for pair in points.values())
    line = np.array([low, high])
    ax.fill_between(line, line * (1 - _BAND), line * (1 + _BAND), color=RULE, zorder=1).set_label("band")
    ax.plot(line, line, color=SOFT, linewidth=1.0, zorder=2)
    ax.grid(False)
    # Names stand in a column at the right, in the order of their heights, so that none covers another.
    names = sorted(points, key=lambda name: points[name][1])
    heights = np.linspace(low + 0.1 * (high - low), high - 0.12 * (high - low), len(names))
    for name, height in zip(names, heights, strict=True):
        published, predicted = points[name]
        words = f"{name}, fitted" if name == fitted else f"{name}, ratio {published / predicted:.3f}"
        ax.annotate(words, (published, predicted), (high * 1.012, height), "data", "data", size=TEXT,
                    color=INK, va="center", annotation_clip=False, zorder=3,
                    arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.7, "shrinkB": 5,
                                "relpos": (0.0, 0.5)})  # fmt: skip
    ax.set(xlim=(low, high), ylim=(low, high))
    return fig


Curve = tuple[Sequence[float], Sequence[float]]


def goodput(
    above: Mapping[str, Curve],
    below: Mapping[str, Curve],
    simulated: Mapping[str, Curve],
    marks: Mapping[str, float],
    title: str = "what failures leave of the time",
) -> Figure:
    """How much of a run's time trains it: over the number of GPUs, and over the seconds between saves.

    Args:
        above: {name: (GPUs, share that trains)}, predicted exactly.
        below: {name: (seconds between saves, share that trains)}.
        simulated: the same as `below`, simulated failure by failure; names as there.
        marks: {name: seconds}, the formula's choice for each of `below`.

    Raises:
        ValueError: a name that is not in `below`.
    """
    if strange := (set(simulated) | set(marks)) - set(below):
        raise ValueError(f"{', '.join(sorted(strange))} is no curve below; there are {', '.join(below)}")
    look = looks([*above, *below])

    def series(shares: Mapping[str, Curve], kind: str = "") -> list[Series]:
        return [
            Series(name, x, [100 * share for share in y], look[name], "dots" if kind else "line", kind + name)
            for name, (x, y) in shares.items()
        ]

    keys = [Key(OpStyle(SOFT, "", "dots: simulated failure by failure"), "words")]
    say = "training, % of time"
    panels = [
        CurvePanel(series(above), say, "x", 1.6, "saving as often as is best, predicted", "GPUs"),
        CurvePanel(series(below) + series(simulated, "simulated: "), say, "x", 1.6,
                   "saving more and less often, predicted and simulated",
                   "seconds of training between saves; dotted: sqrt(2 D M)"),
    ]  # fmt: skip
    fig = curves(panels, title=title, more_keys=keys, gap=0.75)
    for ax in fig.axes:
        ax.set_ylim(0, 100)
        log_ticks(ax.xaxis, count)
    for name, seconds in marks.items():
        rule(fig.axes[1], seconds, "best by the formula", look[name].color)
    return fig


Cells = Mapping[tuple[int, int], tuple[float, bool]]
"""{(pp, tp): (seconds of a step, whether it fits)}"""

_FAST, _SLOW, _ABSENT = "#FFF3D6", "#8A3B12", "#FFFFFF"
_WORST = 2.0  # times the best: whatever is slower has the darkest colour
_ROW = 0.26  # inches


def layout_map(cells: Cells, node: int, title: str = "seconds of a step", text: bool = True) -> Figure:
    """A map of layouts: stages upwards, tp to the right, a step's time in each cell.

    A cell is the darker, the longer its step takes than the fastest that fits, which has a ring. Hatched
    cells do not fit in memory. At the dashed line a node ends: right of it tp's rings go from node to node.

    Args:
        node: ranks of a node.
        text: False leaves the numbers out, for a redraw that must be quick.

    Raises:
        ValueError: no cells.
    """
    if not cells:
        raise ValueError("a map of no layouts: nothing can be run")
    stages, widths = (sorted({at[i] for at in cells}) for i in (0, 1))
    fitting = {at: seconds for at, (seconds, fits) in cells.items() if fits}
    best = min(fitting, key=lambda at: fitting[at]) if fitting else None
    least = fitting[best] if best else min(seconds for seconds, _ in cells.values())
    keys = [
        Key(OpStyle(_FAST, "", "the fastest"), "flat"),
        Key(OpStyle(_SLOW, "", f"{_WORST:g} times as long, or more"), "flat"),
        Key(OpStyle(SOFT, "////", "out of memory"), "hatch"),
        Key(OpStyle(ALARM, "", f"a node of {node} ends", "", "--"), "line"),
    ]
    fig, (ax,) = new_figure([_ROW * max(4, len(stages))], title=title, legend=keys, head=0.16, left=0.8)
    places = [(widths.index(t), stages.index(p), 1.0, 1.0) for p, t in cells]
    slowness = [(seconds / least - 1) / (_WORST - 1) for seconds, _ in cells.values()]
    colors = [mix(_FAST, _SLOW, min(1.0, max(0.0, slow))) for slow in slowness]
    boxes(ax, places, OpStyle(_FAST, "", ""), name="layouts", colors=colors, outline=False, zorder=1)
    full = [place for place, (_, fits) in zip(places, cells.values(), strict=True) if not fits]
    if full:
        hatched = boxes(ax, full, OpStyle(_ABSENT, "////", ""), name="out of memory", zorder=2)
        hatched.set(facecolor="none", edgecolor=SOFT, linewidth=0.4)
    for (at, (seconds, fits)), (x, y, *_), color in zip(cells.items(), places, colors, strict=True):
        if text:
            box = None if fits else {"facecolor": color, "edgecolor": "none", "pad": 0.8}
            ax.text(x + 0.5, y + 0.47, number(seconds), size=SMALL, color=ink_on(color), ha="center",
                    va="center", zorder=4, bbox=box, weight="bold" if at == best else "normal")  # fmt: skip
    border = sum(t <= node for t in widths)
    ax.axvline(border, color=ALARM, linestyle="--", linewidth=1.6, zorder=3, label="a node ends")
    ax.set(xlim=(0, len(widths)), ylim=(0, len(stages)), facecolor=CARD)
    ax.set_xticks([i + 0.5 for i in range(len(widths))], [str(t) for t in widths], size=TEXT)
    ax.set_yticks([i + 0.5 for i in range(len(stages))], [str(p) for p in stages], size=TEXT)
    ax.tick_params(length=0)
    ax.set_xlabel("tp, ranks that share a layer")
    ax.set_ylabel("pp, stages")
    beyond = min((seconds for (_, t), seconds in fitting.items() if t > node), default=None)
    if best:
        p, t = best
        ax.add_patch(Rectangle((widths.index(t), stages.index(p)), 1, 1, fill=False, edgecolor=INK,
                               linewidth=2.4, zorder=5, label="fastest that fits"))  # fmt: skip
        words = f"the fastest that fits is pp {best[0]} x tp {best[1]}, {number(least)} s"
        fig.set_label(words + (f", and beyond the node {number(beyond)} s" if beyond else ""))
    return fig
