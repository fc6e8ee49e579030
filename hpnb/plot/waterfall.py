"""Where each millisecond of a step went, a bar a layout: measured parts end to end, predicted ones as ticks.

    |==computing==|//bubble//|tp|dp|opt|        bar    measured (or replayed), mean over the ranks
                 ^           ^  ^  ^   ^        ticks  where each of them ends by the prediction

The last tick, which is longer, is the whole predicted step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure, text_inches
from hpnb.plot.grammar import AXIS, INK, RULE, STYLE, OpStyle
from hpnb.plot.units import seconds, time_unit

STEP: Mapping[str, OpStyle] = {
    "computing": OpStyle(STYLE["F"].color, "", "computing"),
    "bubble": OpStyle(STYLE["idle"].color, STYLE["idle"].hatch, "bubble"),
    "exposed tp": OpStyle(AXIS["tp"].color, "", "exposed tp"),
    "exposed dp": OpStyle(AXIS["dp"].color, "..", "exposed dp"),
    "optimizer": OpStyle(STYLE["W"].color, "\\\\", "optimizer"),
}
_TALL = 0.3  # inches of a row


def waterfall(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    title: str | None = None,
    caption: str = "",
    text: bool = True,
) -> Figure:
    """Draw a row a layout, in the order of `measured`.

    Args:
        measured: {layout: {part of STEP: seconds}}.
        predicted: the same; layouts that it lacks have no ticks.
        text: False leaves the numbers at the bars out.

    Raises:
        ValueError: nothing to draw, a part that does not exist, or a time that is negative or not finite.
    """
    told = predicted or {}
    if not measured:
        raise ValueError("there is no layout to draw")
    for side in (measured, told):
        for name, parts in side.items():
            if strange := [part for part in parts if part not in STEP]:
                raise ValueError(f"{name} has no part {', '.join(strange)}; there are {', '.join(STEP)}")
            if not all(0 <= value < math.inf for value in parts.values()):
                raise ValueError(f"{name} takes {dict(parts)}; each part must be 0 or more, and finite")
    longest = max(sum(parts.values()) for side in (measured, told) for parts in side.values())
    scale, clock = time_unit(longest)
    present = [part for part in STEP if any(parts.get(part, 0.0) > 0 for parts in measured.values())]
    keys = [Key(STEP[part]) for part in present]
    if told:
        keys.append(Key(OpStyle(INK, "", "where each part ends, predicted"), "line"))
    left = max(text_inches(name, TEXT) for name in measured) + 0.25
    heading = title if title is not None else "where each millisecond of a step went"
    fig, (ax,) = new_figure(
        [_TALL * len(measured) + 0.1], title=heading, legend=keys, caption=caption, left=left, right=0.75
    )
    for row, (name, parts) in enumerate(measured.items()):
        at = 0.0
        for part in present:
            wide = parts.get(part, 0.0) / scale
            style = STEP[part]
            (bar,) = ax.barh([row], [wide], left=[at], height=0.62, facecolor=style.color,
                             edgecolor=style.edge, hatch=style.hatch or None, linewidth=0.6)  # fmt: skip
            bar.set_label(f"{name}, {part}")
            at += wide
        if text:
            beside = max(at, sum(told.get(name, {}).values()) / scale)  # of the bar, and of its last tick
            ax.annotate(seconds(sum(parts.values())), (beside, row), (6, 0), "data", "offset points",
                        size=SMALL, color=INK, va="center")  # fmt: skip
        if name in told:
            ends = [end / scale for end in accumulate(told[name].get(part, 0.0) for part in present)]
            for end, last in zip(ends, [False] * (len(ends) - 1) + [True], strict=True):
                reach = 0.46 if last else 0.38
                wide = 2.2 if last else 0.9
                (tick,) = ax.plot([end, end], [row - reach, row + reach], color=INK, linewidth=wide, zorder=5)
                tick.set_label(f"{name}, predicted")
    ax.set_yticks(range(len(measured)), list(measured))
    ax.set_ylim(len(measured) - 0.45, -0.55)
    ax.set_xlim(0, longest / scale * 1.03)
    ax.set_xlabel(f"a step ({clock}), mean over the ranks", labelpad=1)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    return fig


__all__ = ["STEP", "waterfall"]
