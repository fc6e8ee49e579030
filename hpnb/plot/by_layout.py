"""One loss curve, coloured by the layout that trained each part of it, over the curve of one process.

Where a colour ends a checkpoint was saved, and another layout went on from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure
from hpnb.plot.grammar import INK, RULE, SERIES, SOFT, OpStyle

ONE = OpStyle("#C3CAD3", "", "one process")


def by_layout(
    legs: Sequence[tuple[str, Sequence[float]]],
    alone: Sequence[float] = (),
    title: str | None = None,
    caption: str = "",
    whose: str = "one process",
    run: str = "the run, in the colour of its layout",
) -> Figure:
    """Draw the losses of `legs` one behind the other.

    Args:
        legs: (words for the layout, the loss of each of its steps), in order.
        alone: the losses of one process, drawn beneath.
        caption: a sentence beneath the axes.
        whose: what `alone` is called, where it is of another run.
        run: what the legend calls the run, where legs are no layouts.

    Raises:
        ValueError: nothing to draw, a loss that is not finite, or another number of losses for one process.
    """
    series = [loss for _, losses in legs for loss in losses]
    if not legs or not all(len(losses) for _, losses in legs):
        raise ValueError(f"{len(legs)} legs hold {len(series)} losses; each needs one or more")
    if alone and len(alone) != len(series):
        raise ValueError(f"one process has {len(alone)} losses, and the legs together {len(series)}")
    if not all(math.isfinite(loss) for loss in (*series, *alone)):
        raise ValueError("a loss is not finite, and cannot be drawn")
    keys = [Key(OpStyle(INK, "", run), "line")]
    if alone:
        keys.append(Key(ONE, "line", whose))
    heading = title if title is not None else "one run, several layouts"
    fig, (ax,) = new_figure([2.3], title=heading, legend=keys, caption=caption, left=0.72, head=0.62)
    if alone:
        (line,) = ax.plot(
            range(1, len(alone) + 1), alone, color=ONE.color, linewidth=6.0, solid_capstyle="round"
        )
        line.set_label(whose)
    starts = list(accumulate((len(losses) for _, losses in legs), initial=0))
    for i, (name, losses) in enumerate(legs):
        color, _, style = SERIES[i % len(SERIES)]
        # From the last step of the leg before: a curve has no gaps.
        joined = [*series[max(0, starts[i] - 1) : starts[i]], *losses]
        xs = range(starts[i] + 1 - (len(joined) - len(losses)), starts[i + 1] + 1)
        (line,) = ax.plot(xs, joined, color=color, linestyle=style, linewidth=2.0)
        line.set_label(name)
        said = name.replace(": ", ":\n").replace(", ", ",\n")
        ax.text((starts[i] + starts[i + 1]) / 2 + 0.5, 1.03, said, size=SMALL, color=color, weight="bold",
                ha="center", va="bottom", transform=ax.get_xaxis_transform())  # fmt: skip
    for border in starts[1:-1]:
        rule = ax.axvline(border + 0.5, color=SOFT, linestyle=":", linewidth=1.4)
        rule.set(label="saved and resumed", zorder=1.8)
    ax.set_xlim(0.5, len(series) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.grid(True, color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlabel("step", size=TEXT, color=INK)
    ax.set_ylabel("loss")
    return fig
