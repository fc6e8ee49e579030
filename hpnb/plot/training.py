"""Curves over steps: a loss above distances between replicas, a loss by what trained it, loads of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpnb.plot.canvas import SMALL, Key
from hpnb.plot.curves import CurvePanel, Look, Series, curves, looks, rule, set_ticks
from hpnb.plot.grammar import CARD, INK, SERIES, OpStyle

MARK = OpStyle(INK, "", "mark", ":")  # no series has its colour
UNCROSSED = {"facecolor": CARD, "edgecolor": "none", "pad": 1.0}  # no mark runs through such words
SERIAL = OpStyle("#C3CAD3", "", "one process")


def drift(
    losses: Mapping[str, Sequence[float]],
    distances: Mapping[str, Sequence[float]],
    marks: Sequence[int] = (),
    mark: str = "",
    title: str | None = None,
    between: str = "replicas",
) -> Figure:
    """Replicas that diverge while the loss falls: the loss above, the distance between replicas beneath it.

        distance = || w_r - w_0 || / || w_0 ||        the largest over the ranks r

    Equal replicas have distance 0, which has no logarithm: those points lie on the foot of the lower panel.

    Args:
        losses: {run: the loss of each step}.
        distances: {run: the distance between replicas after each step}, of the same runs.
        marks: steps at which something happened, drawn through both panels.
        mark: what happened, for the legend.
        between: whose distance it is, for the lower panel: "ranks' copies" where tensor parallelism has them.

    Raises:
        ValueError: the two do not have the same runs and steps, or a distance is negative.
    """
    if {run: len(loss) for run, loss in losses.items()} != {run: len(d) for run, d in distances.items()}:
        raise ValueError(f"losses are of {', '.join(losses)}, distances of {', '.join(distances)}: "
                         "every run needs as many of one as of the other")  # fmt: skip
    values = [d for series in distances.values() for d in series]
    if min(values, default=0.0) < 0:
        raise ValueError(f"a distance of {min(values)} cannot be; it must be 0 or more")
    positive = [d for d in values if 0 < d < math.inf] or [1e-8]
    foot, top = (10.0 ** (math.floor(math.log10(f(positive))) + add) for f, add in ((min, -1), (max, 1)))
    look = looks(losses)
    above, below = [], []
    for run, loss in losses.items():
        x, floored = range(1, len(loss) + 1), [max(d, foot) for d in distances[run]]
        above.append(Series(run, x, loss, look[run], label=f"loss {run}"))
        below.append(Series(run, x, floored, look[run], label=f"distance {run}"))
    keys = [Key(OpStyle(MARK.color, "", mark or "mark", MARK.line), "line")] if len(marks) else []
    heading = title if title is not None else f"the loss, and how far apart {between} are"
    words = f"relative distance between {between}"
    fig = curves([CurvePanel(above, height=1.35, title="loss"),
                  CurvePanel(below, log="y", height=1.55, title=words, xlabel="step")],
                 title=heading, more_keys=keys)  # fmt: skip
    steps = max(map(len, losses.values()))
    for ax in fig.axes:
        for step in marks:
            rule(ax, step, "mark", MARK.color, MARK.line)
        _step_axis(ax, steps)
    loss_ax, distance_ax = fig.axes
    loss_ax.tick_params(labelbottom=False)
    distance_ax.set_ylim(foot, top)
    for line in distance_ax.get_lines():
        line.set_clip_on(False)
    decades = range(round(math.log10(foot)), round(math.log10(top)) + 1)
    set_ticks(distance_ax.yaxis, [10.0**k for k in decades[:: -(-len(decades) // 6)]],
              lambda y: "0" if y <= foot * 1.01 else f"{y:.0e}")  # fmt: skip
    if min(values) == 0:
        distance_ax.annotate("0: equal bit for bit", (1, 0), (-4, 5), "axes fraction", "offset points",
                             size=SMALL, color=INK, ha="right",
                             bbox=UNCROSSED if len(marks) else None)  # fmt: skip
    return fig


def by_layout(
    legs: Mapping[str, Sequence[float]] | Sequence[tuple[str, Sequence[float]]],
    alone: Sequence[float] = (),
    title: str | None = None,
    whose: str = "one process",
    run: str = "the run, in the colour of its layout",
) -> Figure:
    """One loss curve, coloured by the layout that trained each part of it, over the curve of one process.

    Where a colour ends a checkpoint was saved, and another layout resumed from it.

    Args:
        legs: (words for the layout, the loss of each of its steps), in order; or a dict of them.
        alone: the losses of one process, drawn beneath.
        whose: what `alone` is called, where it is of another run.
        run: what the legend calls the run, where legs are no layouts; "" leaves it out.

    Raises:
        ValueError: nothing to draw, or another number of losses for one process.
        TypeError: a loss is no number.
    """
    parts, alone = list(legs.items()) if isinstance(legs, Mapping) else legs, list(alone)
    for name, leg in parts:
        _check_losses(f"of {name}", leg)
    _check_losses(f"of {whose}", alone)
    losses = [loss for _, leg in parts for loss in leg]
    if alone and len(alone) != len(losses):
        raise ValueError(f"one process has {len(alone)} losses, and the legs together {len(losses)}")
    starts = list(accumulate((len(leg) for _, leg in parts), initial=0))
    series = [Series(whose, range(1, len(alone) + 1), alone, Look(SERIAL.color))] if alone else []
    for i, (name, leg) in enumerate(parts):
        first = max(0, starts[i] - 1) if leg else starts[i]  # a curve has no gaps: from the last step before
        x = range(first + 1, starts[i + 1] + 1)
        series.append(Series(name, x, losses[first : starts[i + 1]], Look(*SERIES[i % len(SERIES)])))
    keys = ([Key(OpStyle(INK, "", run), "line")] if run else []) + (
        [Key(SERIAL, "line", whose)] if alone else []
    )
    heading = title if title is not None else "one run, several layouts"
    fig = curves([CurvePanel(series, "loss", height=2.3, xlabel="step")], title=heading, keys=keys,
                 left=0.72, head=0.62)  # fmt: skip
    (ax,) = fig.axes
    if alone:
        ax.get_lines()[0].set(linewidth=6.0, solid_capstyle="round", zorder=2)
    for i, (name, _) in enumerate(parts):
        words = name.replace(": ", ":\n").replace(", ", ",\n")
        ax.text((starts[i] + starts[i + 1]) / 2 + 0.5, 1.03, words, size=SMALL, weight="bold", va="bottom",
                ha="center", color=SERIES[i % len(SERIES)][0],
                transform=ax.get_xaxis_transform())  # fmt: skip
    for border in starts[1:-1]:
        rule(ax, border + 0.5, "saved and resumed")
    _step_axis(ax, len(losses))
    return fig


def expert_loads(imbalances: Mapping[str, Sequence[float]], title: str | None = None) -> Figure:
    """The busiest expert's tokens over the mean, of each step; at 1 no rank waits.

    Args:
        imbalances: {run: a number a step}, such as `hpnb.expert_parallel.ExpertLoads.imbalances`.

    Raises:
        ValueError: no steps, or an imbalance below 1.
    """
    low = min((value for run in imbalances.values() for value in run), default=0.0)
    if low < 1:
        raise ValueError(f"an imbalance of {low} cannot be: the busiest expert has 1 mean load or more")
    look = looks(imbalances)
    series = [
        Series(run, range(1, len(values) + 1), values, look[run], label=f"imbalance {run}")
        for run, values in imbalances.items()
    ]
    fig = curves(
        [CurvePanel(series, "busiest expert / mean", xlabel="step")],
        title="the busiest expert sets the pace of its layer" if title is None else title,
    )
    fig.axes[0].set_ylim(bottom=0.9)
    return fig


def _check_losses(whose: str, losses: Sequence[float]) -> None:
    for step, loss in enumerate(losses, 1):
        try:
            float(loss)
        except (TypeError, ValueError, RuntimeError):  # what is no number, or several
            raise TypeError(
                f"loss {step} {whose} is {loss!r}, a {type(loss).__name__}; plot.by_layout takes a number "
                "for each step, as the ranks of the last stage return it"
            ) from None


def _step_axis(ax: Axes, steps: int) -> None:
    ax.set_xlim(0.5, steps + 0.5)
    ax.set_xticks([t for t in MaxNLocator(10, integer=True).tick_values(1, steps) if 1 <= t <= steps])
