"""Notebook 09: a planner beside published runs, a map of layouts, and what failures leave of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpnb.plot.canvas import SMALL, TEXT, Key, boxes, new_figure, panel_title
from hpnb.plot.curves import CurvePanel, Look, Series, count, curves, log_ticks, looks, rule
from hpnb.plot.grammar import ALARM, CARD, INK, RULE, SERIES, SOFT, OpStyle, ink_on, mix
from hpnb.plot.units import number

_BAND, _UNIT = 0.1, "TFLOP/s per GPU"


def calibration(
    points: Mapping[str, tuple[float, float]], fitted: str, title: str = "published and predicted"
) -> Figure:
    """{name: (published, predicted)} speeds of runs, with a band around the predictions.

    The prediction was fitted to the run `fitted`, which proves nothing.
    """
    x = np.arange(len(points))
    published, predicted = (np.array([pair[i] for pair in points.values()]) for i in (0, 1))
    dots, hollow = (Look(SERIES[i][0], SERIES[i][1]) for i in (0, 1))
    series = [Series("predicted", list(x), list(predicted), hollow, "hollow"),
              Series("published", list(x), list(published), dots, "dots")]  # fmt: skip
    below = f"parameters of the model; {fitted} is the one that was fitted"
    panel = CurvePanel(series, _UNIT, height=2.6, xlabel=below)
    band = Key(OpStyle(RULE, "", f"within {100 * _BAND:.0f} % of predicted"), "flat")
    fig = curves([panel], title=title, more_keys=[band])
    (ax,) = fig.axes
    low, high = predicted * (1 - _BAND), predicted * (1 + _BAND)
    ax.bar(x, high - low, 0.6, low, color=RULE, zorder=1, label="band")
    ax.set_xticks(x, list(points), size=SMALL)
    ax.set_ylim(0.97 * min(*low, *published), 1.02 * max(*high, *published))
    ax.grid(False, axis="x")
    return fig


Curve = tuple[Sequence[float], Sequence[float]]


def goodput(
    above: Mapping[str, Curve],
    below: Mapping[str, Curve],
    simulated: Mapping[str, Curve],
    marks: Mapping[str, float],
    gpus: str = "",
    title: str = "what failures leave of the time",
) -> Figure:
    """How much of a run's time trains it: over the number of GPUs, and over the seconds between saves.

    Args:
        above: {name: (GPUs, share that trains)}, predicted exactly.
        below, simulated: {name: (seconds between saves, share that trains)}, simulated failure by failure.
        marks: {name: seconds}, the formula's choice for each of `below`.
    """
    look = {name: Look(style.color) for name, style in looks([*above, *below]).items()}

    def series(shares: Mapping[str, Curve], kind: str = "") -> list[Series]:
        return [
            Series(name, x, [100 * share for share in y], look[name], "dots" if kind else "line", kind + name)
            for name, (x, y) in shares.items()
        ]

    simulated_color = next((look[name].color for name in simulated), SOFT)
    simulation = Key(OpStyle(simulated_color, "", "simulated failure by failure"), "dot", marker="o")
    keys = [Key(OpStyle(look[name].color, "", name), "line") for name in look]
    say = "training, % of time"
    panels = [
        CurvePanel(series(above), say, "x", 1.6,
                   "saving every √(2DM) seconds, predicted; dashed: half of the time is lost", "GPUs"),
        CurvePanel(series(below) + series(simulated, "simulated: "), say, "x", 1.6,
                   f"{gpus + ': ' if gpus else ''}saving more and less often, predicted and simulated",
                   "seconds of training between saves; dotted: √(2DM)"),
    ]  # fmt: skip
    fig = curves(panels, title=title, keys=[*keys, simulation], gap=0.75)
    lowest = min((100 * min(shares) for _, shares in (*below.values(), *simulated.values())), default=0.0)
    for ax, bottom in zip(fig.axes, (0, 10 * (lowest // 10)), strict=True):
        ax.set_ylim(bottom, 104 - 0.04 * bottom)
        log_ticks(ax.xaxis, count)
    fig.axes[0].axhline(50, color=INK, linestyle="--", linewidth=1.0, zorder=1, label="half")
    for name, seconds in marks.items():
        rule(fig.axes[1], seconds, "best by the formula", look[name].color)
    return fig


_FAST, _SLOW, _ABSENT = "#FFF3D6", "#8A3B12", "#FFFFFF"
_WORST, _FAR = 2.0, 4.0  # times the best: whatever is slower has the darkest colour; _FAR where most are slow
_ROW = 0.26  # inches


def layout_map(
    cells: Mapping[tuple[int, int], tuple[float, bool]],
    node: int,
    title: str = "seconds of a step",
    setting: str = "",
    text: bool = True,
    tied: float = 0.0,
) -> Figure:
    """A map of layouts: stages upwards, tp to the right, a step's time in each cell.

    A cell is the darker, the longer its step takes than the fastest that fits, which has a ring. Hatched
    cells do not fit in memory. At the dashed line a node ends: right of it tp's rings go from node to node.

    Args:
        cells: {(pp, tp): (seconds of a step, whether it fits)}.
        node: ranks of a node.
        setting: what holds for all cells, above them.
        tied: layouts that fit and take at most this share longer than the fastest have a thin frame.
        text: False leaves the numbers out, for a redraw that must be quick.
    """
    stages, widths = (sorted({at[i] for at in cells}) for i in (0, 1))
    fitting = {at: seconds for at, (seconds, fits) in cells.items() if fits}
    best = min(fitting, key=lambda at: fitting[at]) if fitting else None
    least = fitting[best] if best else min(seconds for seconds, _ in cells.values())
    times = [seconds / least for seconds, _ in cells.values()]
    darkest = _FAR if sum(time > _WORST for time in times) > len(times) / 2 else _WORST
    keys = [
        Key(OpStyle(_FAST, "", "the fastest"), "flat"),
        Key(OpStyle(_SLOW, "", f"{darkest:g} times as long, or more"), "flat"),
        Key(OpStyle(SOFT, "////", "out of memory"), "hatch"),
        Key(OpStyle(ALARM, "", f"a node of {node} ends", "--"), "line"),
    ]
    if tied:
        keys[0] = Key(OpStyle(_FAST, "", "the fastest, in a thick frame"), "flat")
        thin = f"thin frame: within {100 * tied:.0f} % of the fastest"
        keys.append(Key(OpStyle(INK, "", thin), "words"))
    fig, (ax,) = new_figure([_ROW * max(4, len(stages))], title=title, legend=keys,
                           head=0.3 if setting else 0.16, left=0.8)  # fmt: skip
    if setting:
        panel_title(ax, setting)
    places = [(widths.index(t), stages.index(p), 1.0, 1.0) for p, t in cells]
    slowness = [(time - 1) / (darkest - 1) for time in times]
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
    blank = "; blank cells cannot be run" if len(cells) < len(stages) * len(widths) else ""
    ax.set_xlabel(f"tp, ranks that share a layer{blank}")
    ax.set_ylabel("pp, stages")
    beyond = min((seconds for (_, t), seconds in fitting.items() if t > node), default=None)
    for (p, t), took in fitting.items():
        if took < (1 + tied) * least and (p, t) != best:
            ax.add_patch(Rectangle((widths.index(t) + 0.03, stages.index(p) + 0.06), 0.94, 0.88, fill=False,
                                   edgecolor=INK, linewidth=1.0, zorder=4, label="tied"))  # fmt: skip
    if best:
        p, t = best
        ax.add_patch(Rectangle((widths.index(t), stages.index(p)), 1, 1, fill=False, edgecolor=INK,
                               linewidth=2.4, zorder=5, label="fastest that fits"))  # fmt: skip
        words = f"the fastest that fits is pp {best[0]} x tp {best[1]}, {number(least)} s"
        fig.set_label(words + (f", and beyond the node {number(beyond)} s" if beyond else ""))
    return fig
