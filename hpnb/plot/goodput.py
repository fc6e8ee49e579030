"""How much of a run's time trains it: over the number of GPUs, and over the seconds between saves.

lines   predicted exactly            dots   played through, failure by failure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hpnb.plot.canvas import Key, new_figure, panel_title
from hpnb.plot.grammar import CARD, RULE, SERIES, SOFT, OpStyle

Curve = tuple[Sequence[float], Sequence[float]]


def goodput(
    above: Mapping[str, Curve],
    below: Mapping[str, Curve],
    played: Mapping[str, Curve],
    marks: Mapping[str, float],
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw both panels, shares of time as percent.

    Args:
        above: {name: (GPUs, share that trains)}.
        below: {name: (seconds between saves, share that trains)}.
        played: the same as `below`, simulated; names as there.
        marks: {name: seconds}, the formula's choice for each of `below`.

    Raises:
        ValueError: a curve with other lengths, or a name that is not in `below`.
    """
    for name, (x, y) in [*above.items(), *below.items(), *played.items()]:
        if len(x) != len(y) or not len(x):
            raise ValueError(f"{name} has {len(x)} places and {len(y)} shares; a curve needs both")
    if strange := (set(played) | set(marks)) - set(below):
        raise ValueError(f"{', '.join(sorted(strange))} is no curve below; there are {', '.join(below)}")
    names = list(dict.fromkeys([*above, *below]))
    look = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    keys = [Key(OpStyle(look[name][0], "", name, "", look[name][2]), "line") for name in names]
    keys.append(Key(OpStyle(SOFT, "", "dots: played through"), "words"))
    heading = title if title is not None else "what failures leave of the time"
    fig, (top, bottom) = new_figure(
        [1.6, 1.6], title=heading, legend=keys, caption=caption, gap=0.75, head=0.3, left=0.8
    )
    for ax, curves in ((top, above), (bottom, below)):
        for name, (x, y) in curves.items():
            color, _, line = look[name]
            ax.plot(x, [100 * share for share in y], color=color, linestyle=line, linewidth=1.8, label=name)
        ax.set_xscale("log")
        ax.set_ylim(0, 100)
        ax.grid(True, axis="y", color=RULE, linewidth=0.6)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        ax.set_ylabel("training, % of time")
    for name, (x, y) in played.items():
        (dots,) = bottom.plot(x, [100 * share for share in y], "o", color=look[name][0], markersize=6)
        dots.set(markeredgecolor=CARD, zorder=5, label=f"played through: {name}")
    for name, seconds in marks.items():
        bottom.axvline(seconds, color=look[name][0], linestyle=":", linewidth=1.4)
    top.set_xlabel("GPUs")
    bottom.set_xlabel("seconds of training between saves; dotted: the square root's choice")
    panel_title(top, "saving as often as is best")
    panel_title(bottom, "saving more and less often")
    return fig
