"""Notebook 02: a step and its parts over the number of microbatches; timelines with fewer numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
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
_BELOW = "the same steps with CUDA graphs, on another scale"
_WIDE = 0.62  # of a bar, where 1 is the distance between two


def u_curve(
    choices: Sequence[int],
    parts: Mapping[str, Sequence[float]],
    predicted: Sequence[float],
    title: str = "",
    source: str = "measured",
    graphs: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """A trade-off: a stacked bar of a step for each choice, and the predicted step as a line.

    Args:
        parts: {part of PARTS: seconds, one for each choice}, from the first of PARTS up.
        predicted: seconds of the step by the formula, whose T and c come from the work in the first
            and in the last bar.
        graphs: the parts of the same steps with CUDA graphs, for a panel below with an axis of its own.
    """
    both = [parts] if graphs is None else [parts, graphs]
    present = [part for part in PARTS if any(any(panel.get(part, ())) for panel in both)]
    totals = [_totals(panel, len(choices)) for panel in both]
    scale, unit = time_unit(min(total for steps in totals for total in steps))  # as prose has the best step
    places = range(len(choices))
    formula = f"formula; T and c from the work at m = {choices[0]} and {choices[-1]}"
    line = Series(formula, places, [p / scale for p in predicted], looks([formula])[formula],
                  "line and hollow")  # fmt: skip
    keys = [*(Key(PARTS[part]) for part in present), line.key]
    ylabel, xlabel = f"{source} step ({unit})", "number of microbatches"
    panels = [CurvePanel([line], ylabel, height=2.7, xlabel=xlabel)]
    if graphs is not None:
        panels = [
            replace(panels[0], title="kernels launched from Python"),
            CurvePanel([], ylabel, height=2.2, title=_BELOW, xlabel=xlabel),
        ]
    fig = curves(panels, title=title, keys=keys, left=0.72, gap=0.85)
    ends = []
    for ax, panel, steps in zip(fig.axes, both, totals, strict=True):
        _stack_bars(ax, choices, {part: panel.get(part, [0.0] * len(choices)) for part in present}, scale)
        best = steps.index(min(steps))
        line_tops = _tops_of_line(predicted) if panel is parts else steps  # below there is no line
        tops = [max(pair) / scale for pair in zip(steps, line_tops, strict=True)]
        write_values(ax, places, tops, [number(step / scale) for step in steps], best)
        ax.set(xlim=(-0.6, len(choices) - 0.4), ylim=(0, 1.14 * max(tops)))
        ax.set_xticks(places, [f"{choice:,}" for choice in choices])
        ax.get_xticklabels()[best].set_fontweight("bold")
        ax.tick_params(axis="x", length=0)
        ax.grid(False, axis="x")
        pairs = zip(choices, steps, strict=True)
        ends.append(", ".join(f"{number(step / scale)} {unit} at {choice:,}" for choice, step in pairs))
    fig.set_label("The bars end at " + "; with CUDA graphs at ".join(ends))  # for the alt text
    return fig


def _tops_of_line(values: Sequence[float]) -> list[float]:
    """The highest points of a line through `values` across each label, which a steep line would cross."""
    ends = (values[0], *values, values[-1])
    return [
        max(at, at + (before - at) / 4, at + (after - at) / 4)
        for before, at, after in zip(ends, ends[1:], ends[2:], strict=False)
    ]


def _totals(parts: Mapping[str, Sequence[float]], count: int) -> list[float]:
    """The seconds of each step, all parts together."""
    return [sum(values[i] for values in parts.values() if len(values)) for i in range(count)]


def _stack_bars(ax: Axes, choices: Sequence[int], parts: Mapping[str, Sequence[float]], scale: float) -> None:
    """A bar for each choice, from the first part up."""
    floor = [0.0] * len(choices)
    tallest = max(_totals(parts, len(choices)))
    for part, values in parts.items():
        at: list[Box] = [
            (i - _WIDE / 2, floor[i], _WIDE, seconds / scale) for i, seconds in enumerate(values)
        ]
        visible = [box for box in at if box[3] > 1e-6 * tallest / scale]  # else an outline would show
        boxes(ax, visible, PARTS[part], name=part)
        floor = [low + tall for low, (*_, tall) in zip(floor, at, strict=True)]


def without_numbers(tl: Timeline, op: str) -> Timeline:
    """The timeline whose actions `op` belong to no microbatch: a figure leaves their numbers out.

    Weight gradients are short and stand side by side, where their numbers would touch.
    """
    return replace(tl, events=tuple(replace(e, microbatch=-1) if e.op == op else e for e in tl.events))
