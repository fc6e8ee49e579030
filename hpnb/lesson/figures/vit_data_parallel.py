"""Notebook 01: when communication is free, and what a rank keeps in each stage of ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import WIDTH, Key, text_inches
from hpnb.plot.curves import SHADE, CurvePanel, Kind, Series, count, curves, looks, note, rule, set_ticks
from hpnb.plot.grammar import CATEGORY, SOFT, STYLE, OpStyle
from hpnb.plot.units import number

Points = tuple[Sequence[float], Sequence[float]]  # tokens, shares from 0 to 1


def exposure(
    measured: Mapping[str, Points],
    predicted: Mapping[str, Points] | None = None,
    law: Mapping[str, Points] | None = None,
    knee: float | None = None,
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Tokens a rank against the share of a step in which nothing is computed, in per cent.

    Args:
        measured: {way of reducing: (tokens, shares)}, filled dots.
        predicted, law: the same names, as hollow dots and as lines.
        knee: tokens from which on a backward covers its gradients' all-reduce.

    Raises:
        ValueError: nothing to draw, or a share outside 0 to 1.
    """
    kinds: dict[str, tuple[Mapping[str, Points], Kind, str]] = {
        "law": (law or {}, "line", "lines: the law"),
        "predicted": (predicted or {}, "hollow", "hollow: predicted"),
        "measured": (measured, "dots", "filled: measured"),
    }
    look = looks(name for points, _, _ in kinds.values() for name in points)
    series = []
    for means, (points, kind, _) in kinds.items():
        for name, (tokens, shares) in points.items():
            if not all(0 <= share <= 1 for share in shares):
                raise ValueError(f"{name} holds shares outside 0 to 1: {list(shares)}")
            percent = [100 * share for share in shares]
            series.append(Series(name, tokens, percent, look[name], kind, f"{means} {name}"))
    keys = [Key(OpStyle(SOFT, "", words), "words") for points, _, words in kinds.values() if points]
    heading = title if title is not None else "exposed communication"
    panel = CurvePanel(series, "exposed, share of the step (%)", "x", 2.8, xlabel="tokens a rank")
    fig = curves([panel], title=heading, more_keys=keys, caption=caption)
    (ax,) = fig.axes
    if knee is not None:
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, knee / 3), max(high, knee * 3))  # room for the words on both sides
        low, high = ax.get_xlim()
        ax.axvspan(knee, high, color=SHADE, zorder=0, linewidth=0)
        rule(ax, knee, "knee", line="--")
        offset, side = (6, "left") if high / knee > knee / low else (-6, "right")
        note(ax, f"knee {number(knee)} tokens", knee, 0.93, (offset, 0), side)  # type: ignore[arg-type]
    ax.set_ylim(0, 100)
    set_ticks(ax.xaxis, _fitting_ticks(*ax.get_xlim(), ax.get_position().width * WIDTH), count)
    return fig


def _fitting_ticks(low: float, high: float, inches: float) -> list[float]:
    """1, 2, 5, 10, ... between the two, or the powers of ten alone, or every second one: what has room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [step * 10.0**k for k in decades for step in (1, 2, 5)]
    for thinned in (every, *(every[:: 3 * n] for n in range(1, len(decades)))):
        ticks = [tick for tick in thinned if low <= tick <= high]
        wide = [text_inches(count(tick)) / 2 + 0.06 for tick in ticks]
        apart = [math.log(b / a) / math.log(high / low) * inches for a, b in pairwise(ticks)]
        if all(a + b <= room for (a, b), room in zip(pairwise(wide), apart, strict=True)):
            return ticks
    return []


Kept = Mapping[str, Mapping[str, float]]  # {name: {category: bytes}}


def states(predicted: Kept, measured: Kept, title: str | None = None) -> Figure:
    """What a rank keeps, by category: for each ZeRO stage a predicted bar over a measured one.

    Raises:
        ValueError: the two do not have the same names, have none, or name a category that does not exist.
    """
    if set(predicted) != set(measured):
        odd = ", ".join(sorted(set(predicted) ^ set(measured)))
        raise ValueError(f"predicted and measured must have the same names; only one has {odd}")
    rows = {name: [Bar(predicted[name], True), Bar(measured[name])] for name in predicted}
    outline = Key(OpStyle(STYLE["compute"].color, "", "predicted"), "hollow")
    heading = title if title is not None else "what a rank keeps"
    panel = BarPanel(rows, "B", "bytes on one rank ({unit})", row_inches=0.52)
    return bars([panel], CATEGORY, title=heading, more_keys=[outline], right=0.65)
