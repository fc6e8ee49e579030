"""A trade-off in one picture: a step's time, split into parts, over a number that one may choose.

    bars    measured: the parts of a step, its total above, that of the shortest in bold
    line    predicted, hollow dots
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Key, boxes, new_figure
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, STYLE, OpStyle, mix
from hpnb.plot.units import number, time_unit

PARTS: dict[str, OpStyle] = {
    "ideal": OpStyle(STYLE["compute"].color, "", "ideal"),
    "small kernels": OpStyle(mix(STYLE["compute"].color, "#FFFFFF", 0.5), "..", "small kernels"),
    "bubble": OpStyle(mix(STYLE["idle"].color, STYLE["compute"].color, 0.12), "///", "bubble"),
}
_WIDE = 0.62  # of a bar, where 1 is the distance between two


def u_curve(
    choices: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    predicted: Sequence[float] | None = None,
    xlabel: str = "microbatches",
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw a stacked bar for each of `choices`, evenly spaced, from the first of PARTS up.

    Args:
        choices: such as 1, 2, 4, 8 microbatches.
        parts: {"ideal" | "small kernels" | "bubble": seconds, one for each choice}.
        predicted: seconds of the whole step.
        caption: a sentence beneath the axes.

    Raises:
        ValueError: nothing to draw, a part that is not in PARTS, or as many numbers as there are not choices.
    """
    series = {**parts, **({} if predicted is None else {"predicted": predicted})}
    if not choices or not parts or not set(parts) <= set(PARTS):
        told = ", ".join(parts) or "nothing"
        raise ValueError(f"{told} over {len(choices)} choices: the parts are {', '.join(PARTS)}")
    for name, values in series.items():
        if len(values) != len(choices) or not all(math.isfinite(v) and v >= 0 for v in values):
            raise ValueError(f"{name} holds {list(values)} for {len(choices)} choices: seconds, one each")
    names = [name for name in PARTS if name in parts]
    totals = [sum(parts[name][i] for name in names) for i in range(len(choices))]
    scale, unit = time_unit(max(*totals, *(predicted or [0.0])))
    color, marker, line = SERIES[0]
    keys = [Key(PARTS[name], "box") for name in names]
    if predicted is not None:
        keys.append(Key(OpStyle(color, "", "predicted", "", line), "line"))
    heading = title if title is not None else "a step, and what it is made of"
    fig, (ax,) = new_figure([2.7], title=heading, legend=keys, caption=caption, left=0.72, head=0.22)
    floor = [0.0] * len(choices)
    for name in names:
        at = [(i - _WIDE / 2, floor[i], _WIDE, parts[name][i] / scale) for i in range(len(choices))]
        boxes(ax, at, PARTS[name], name=name)
        floor = [low + tall for low, (*_, tall) in zip(floor, at, strict=True)]
    best = totals.index(min(totals))
    for i, total in enumerate(totals):
        top = max(total, predicted[i] if predicted is not None else 0.0) / scale
        ax.annotate(number(total / scale), (i, top), (0, 3 if predicted is None else 7), "data",
                    "offset points", size=SMALL, color=INK, ha="center", zorder=6,
                    weight="bold" if i == best else "normal")  # fmt: skip
    if predicted is not None:
        (dots,) = ax.plot(range(len(choices)), [p / scale for p in predicted], color=color, linestyle=line)
        dots.set(marker=marker, markersize=6.5, markerfacecolor=CARD, markeredgewidth=1.5, linewidth=1.4)
        dots.set_zorder(5)
        dots.set_label("predicted")
    ax.set_xlim(-0.6, len(choices) - 0.4)
    ax.set_ylim(0, 1.1 * max(*totals, *(predicted or [0.0])) / scale)
    ax.set_xticks(range(len(choices)), [f"{choice:,}" for choice in choices])
    ax.get_xticklabels()[best].set_fontweight("bold")
    ax.tick_params(axis="x", length=0)
    ax.grid(True, axis="y", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlabel(xlabel, size=TEXT)
    ax.set_ylabel(f"step ({unit})")
    return fig
