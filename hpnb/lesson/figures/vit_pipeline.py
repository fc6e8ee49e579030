"""Notebook 02: a step and its parts over the number of microbatches; timelines with fewer numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from hpnb.plot.canvas import Box, Key, boxes
from hpnb.plot.curves import CurvePanel, Series, curves, looks, write_values
from hpnb.plot.grammar import STYLE, OpStyle, mix
from hpnb.plot.units import number, time_unit
from hpnb.record import Timeline

PARTS: dict[str, OpStyle] = {
    "ideal": OpStyle(STYLE["compute"].color, "", "ideal"),
    "small kernels": OpStyle(mix(STYLE["compute"].color, "#FFFFFF", 0.5), "..", "launches, small kernels"),
    "bubble": OpStyle(mix(STYLE["idle"].color, STYLE["compute"].color, 0.12), "///", "bubble"),
    "host wait": OpStyle(STYLE["host_wait"].color, STYLE["host_wait"].hatch, "host wait, transfers"),
}
_WIDE = 0.62  # of a bar, where 1 is the distance between two


def u_curve(
    choices: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    predicted: Sequence[float],
    title: str | None = None,
    source: str = "measured",
) -> Figure:
    """A trade-off: a stacked bar of a step for each choice, and the predicted step as a line.

    Args:
        choices: such as 1, 2, 4, 8 microbatches.
        parts: {part of PARTS: seconds, one for each choice}, from the first of PARTS up.
        predicted: seconds of the step by the formula, whose T and c come from the work in the first
            and in the last bar.
        source: where the bars come from: "measured", or "replayed".
    """
    if strange := [part for part in parts if part not in PARTS]:
        raise ValueError(f"there is no part {strange[0]!r}; there are {', '.join(PARTS)}")
    present = [part for part in PARTS if any(parts.get(part, ()))]
    totals = [sum(values) for values in zip(*(parts[part] for part in present), strict=True)]
    scale, unit = time_unit(max(*totals, *predicted))
    places = range(len(choices))
    formula = f"formula; T and c from the work at m = {choices[0]} and {choices[-1]}"
    line = Series(formula, places, [p / scale for p in predicted], looks([formula])[formula],
                  "line and hollow")  # fmt: skip
    heading = title if title is not None else "a step, and what it is made of"
    keys = [*(Key(PARTS[part]) for part in present), line.key]
    panel = CurvePanel([line], f"{source} step ({unit})", height=2.7, xlabel="number of microbatches")
    fig = curves([panel], title=heading, keys=keys, left=0.72)
    (ax,) = fig.axes
    floor = [0.0] * len(choices)
    for part in present:
        at: list[Box] = [(i - _WIDE / 2, floor[i], _WIDE, parts[part][i] / scale) for i in places]
        visible = [box for box in at if box[3] > 1e-6 * max(totals) / scale]  # else an outline would show
        boxes(ax, visible, PARTS[part], name=part)
        floor = [low + tall for low, (*_, tall) in zip(floor, at, strict=True)]
    best = totals.index(min(totals))
    tops = [max(pair) / scale for pair in zip(totals, predicted, strict=True)]
    write_values(ax, places, tops, [number(total / scale) for total in totals], best)
    ax.set(xlim=(-0.6, len(choices) - 0.4), ylim=(0, 1.1 * max(tops)))
    ax.set_xticks(places, [f"{choice:,}" for choice in choices])
    ax.get_xticklabels()[best].set_fontweight("bold")
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    steps = (
        f"{number(total / scale)} {unit} at {choice:,}" for choice, total in zip(choices, totals, strict=True)
    )
    fig.set_label(f"The bars end at {', '.join(steps)}")  # for the alt text
    return fig


def without_numbers(tl: Timeline, op: str) -> Timeline:
    """The timeline whose actions `op` belong to no microbatch: a figure leaves their numbers out.

    Weight gradients are short and stand side by side, where their numbers would touch.
    """
    return replace(tl, events=tuple(replace(e, microbatch=-1) if e.op == op else e for e in tl.events))
