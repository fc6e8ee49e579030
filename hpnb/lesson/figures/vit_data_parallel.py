"""Notebook 01: what communication adds to a step, and what a rank keeps in each ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from matplotlib.figure import Figure

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, WIDTH, Key, text_inches
from hpnb.plot.curves import CurvePanel, Series, count, curves, looks, rule, set_ticks
from hpnb.plot.grammar import CARD, CATEGORY, INK, SOFT, STYLE, OpStyle
from hpnb.theory import exposed_share

AFTER, DURING = "reduced after the backward", "reduced during the backward"
LIMIT = 1.1  # below this ratio communication counts as free
_LAW_POINTS = 300


def medians_and_ranges(
    ratios: Mapping[int, Mapping[str, Sequence[float]]],
) -> tuple[dict[str, dict[int, float]], list[dict[int, float]], list[dict[int, float]]]:
    """(medians and ranges as columns of a table, the lowest, the highest of AFTER and of DURING).

    Args:
        ratios: {tokens: {AFTER or DURING: step / step alone in each round}}.
    """
    columns: dict[str, dict[int, float]] = {}
    lows, highs = ([{t: end(r[name]) for t, r in ratios.items()} for name in (AFTER, DURING)]
                   for end in (min, max))  # fmt: skip
    for i, (head, name) in enumerate({"after": AFTER, "during": DURING}.items()):
        columns[head] = {t: median(r[name]) for t, r in ratios.items()}
        columns |= {f"{head}, lowest": lows[i], f"{head}, highest": highs[i]}
    return columns, lows, highs


def step_ratios(
    after: Mapping[float, float],
    during: Mapping[float, float],
    law_knee: float,
    measured_knee: float | None = None,
    lows: Sequence[Mapping[float, float]] = (),
    highs: Sequence[Mapping[float, float]] = (),
) -> Figure:
    """Tokens per rank against the time of a step over the time of the same step without communication.

    Args:
        after, during: {tokens: ratio} of steps that reduce after and during the backward, dots.
        law_knee: tokens at which the backward takes as long as the all-reduce; it decides the two lines.
        measured_knee: the fewest tokens from which on `during` is below LIMIT; None if it never is.
        lows, highs: least and largest ratios of the rounds, for `after` and for `during`: upright bars.

    Markers of the two are drawn a little to the left and right of their tokens, so that none covers another.

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
    aside = {AFTER: 0.97, DURING: 1.03} if after and during else {AFTER: 1.0, DURING: 1.0}
    look, series = looks(measured), []
    for name, points in measured.items():
        shares = (exposed_share(t / law_knee, name == DURING) for t in line)
        series.append(
            Series(name, line, [1 / (1 - share) for share in shares], look[name], "line", f"law {name}")
        )
        if points:
            x, y = [t * aside[name] for t in points], list(points.values())
            series.append(Series(name, x, y, look[name], "dots", f"measured {name}"))
    words = "lines: the law; markers: measured" + ("; bars: the range of the rounds" if lows else "")
    keys = [Key(OpStyle(SOFT, "", words), "words")]
    panel = CurvePanel(series, "step / step alone", "xy", 2.8, xlabel="tokens per rank")
    fig = curves([panel], title="A free step needs more tokens than the law says", more_keys=keys)
    (ax,) = fig.axes
    ends = [ratio for points in (*lows, *highs) for ratio in points.values()]
    bottom = min(0.9, 0.95 * min([*ratios, *ends]))
    top = 1.15 * max(1.5, *ends, *(y for s in series for y in s.y))
    for name, low_ends, high_ends in zip(measured, lows, highs, strict=False):
        places = [t * aside[name] for t in low_ends]
        ax.vlines(places, list(low_ends.values()), list(high_ends.values()), look[name].color, zorder=2.2)
    ax.set_ylim(bottom, top)
    ratios_drawn = [y for y in (1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0) if y < top]
    set_ticks(ax.yaxis, ratios_drawn, "{:g}".format)
    ax.set_xlim(low, high)
    ax.axhline(LIMIT, color=INK, linestyle=":", linewidth=1.2, zorder=1.8, label="limit")
    ax.text(low * 1.04, LIMIT * 1.01, f"{LIMIT:g}", size=SMALL, color=INK, va="bottom")
    labels = [f"{words}: {count(knee)} tokens" for words, knee in knees.items()]
    for row, (label, (words, knee)) in enumerate(zip(labels, knees.items(), strict=True)):
        rule(ax, knee, words, line="--")
        at_right = math.log(knee / low) > 0.65 * math.log(high / low)
        ax.text(knee / 1.04 if at_right else knee * 1.04, 0.92 - 0.1 * row, label, size=SMALL, color=INK,
                zorder=6, ha="right" if at_right else "left", transform=ax.get_xaxis_transform(),
                bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1.0})  # fmt: skip
    fig.set_label("; ".join(labels))
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
