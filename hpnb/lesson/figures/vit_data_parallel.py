"""Notebook 01: what communication adds to a step, and what a rank keeps in each ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from matplotlib.figure import Figure

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, WIDTH, Key, text_inches
from hpnb.plot.curves import CurvePanel, Series, count, curves, looks, rule, set_ticks
from hpnb.plot.grammar import CARD, CATEGORY, INK, SOFT, STYLE, OpStyle
from hpnb.theory import exposed_share

AFTER, DURING = "reduced after the backward", "reduced during the backward"
_LAW_POINTS = 300


def step_ratios(
    after: Mapping[float, float],
    during: Mapping[float, float],
    law_knee: float,
    measured_knee: float | None = None,
    limit: float = 1.1,
    title: str | None = None,
) -> Figure:
    """Tokens per rank against the time of a step over the time of the same step without communication.

    Args:
        after, during: {tokens: ratio} of steps that reduce after and during the backward, dots.
        law_knee: tokens at which the backward takes as long as the all-reduce; it decides the two lines.
        measured_knee: the fewest tokens from which on `during` is below `limit`; None if it never is.
        limit: below this ratio communication counts as free.

    Raises:
        ValueError: nothing to draw, or a ratio that is not above 0.
    """
    measured, tokens = {AFTER: after, DURING: during}, sorted({*after, *during})
    ratios = [ratio for points in measured.values() for ratio in points.values()]
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"step_ratios() needs ratios above 0 and has {sorted(ratios)[:1] or 'none'}")
    knees = {"the law's knee": law_knee}
    if measured_knee is not None:
        knees["measured knee"] = measured_knee
    low, high = min(tokens[0], law_knee / 2) / 1.2, max(tokens[-1], 2.5 * max(knees.values())) * 1.1
    line = [low * (high / low) ** (i / _LAW_POINTS) for i in range(_LAW_POINTS + 1)]
    look, series = looks(measured), []
    for name, points in measured.items():
        shares = (exposed_share(t / law_knee, name == DURING) for t in line)
        series.append(
            Series(name, line, [1 / (1 - share) for share in shares], look[name], "line", f"law {name}")
        )
        if points:
            x, y = list(points), list(points.values())
            series.append(Series(name, x, y, look[name], "dots", f"measured {name}"))
    keys = [Key(OpStyle(SOFT, "", words), "words") for words in ("lines: the law", "markers: measured")]
    heading = title if title is not None else "A free step needs more tokens than the law says"
    panel = CurvePanel(series, "step / step alone", "xy", 2.8, xlabel="tokens per rank")
    fig = curves([panel], title=heading, more_keys=keys)
    (ax,) = fig.axes
    bottom, top = min(0.9, 0.95 * min(ratios)), 1.15 * max(1.5, *(y for s in series for y in s.y))
    ax.set_ylim(bottom, top)
    ratios_drawn = [y for y in (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0) if y < top]
    set_ticks(ax.yaxis, ratios_drawn, "{:g}".format)
    ax.set_xlim(low, high)
    ax.axhline(limit, color=INK, linestyle=":", linewidth=1.2, zorder=1.8, label="limit")
    ax.annotate(f"{limit:g}", (0, limit), (4, 3), ("axes fraction", "data"), "offset points", size=SMALL,
                color=INK)  # fmt: skip
    for row, (words, knee) in enumerate(knees.items()):
        rule(ax, knee, words, line="--")
        at_right = math.log(knee / low) > 0.65 * math.log(high / low)
        ax.annotate(f"{words}: {count(knee)} tokens", (knee, 0.92 - 0.1 * row), (-6 if at_right else 6, 0),
                    ("data", "axes fraction"), "offset points", size=SMALL, color=INK, zorder=6,
                    ha="right" if at_right else "left",
                    bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1.0})  # fmt: skip
    set_ticks(ax.xaxis, _fitting_ticks(low, high, ax.get_position().width * WIDTH), count)
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
