"""When is communication free: tokens a rank against the share of a step in which nothing is computed.

    line      the law, in one stroke
    hollow    predicted for one number of tokens, from a backward that was measured alone
    filled    measured; where the two agree, a dot in a ring
    knee      tokens from which on a backward covers its gradients' all-reduce

Series of one name (one way of reducing) have one colour and one marker, whether predicted or measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from hpnb.plot.canvas import SMALL, WIDTH, Key, new_figure, text_inches
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle
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
    """Draw shares of a step, in per cent, over tokens a rank in logarithms.

    Args:
        measured: {way of reducing: (tokens, shares)}, filled dots.
        predicted: the same names, hollow dots.
        law: the same names, lines.
        knee: tokens a rank.
        title: a headline; it is the place to say where this was measured.
        caption: a sentence beneath the axes.

    Raises:
        ValueError: nothing to draw, series of unequal length, tokens that are not above 0, or a share
            outside 0 to 1.
    """
    kinds = {"law": law or {}, "predicted": predicted or {}, "measured": measured}
    names = list(dict.fromkeys(name for series in kinds.values() for name in series))
    if not names:
        raise ValueError("exposure needs at least one series: {name: (tokens, shares)}")
    for series in kinds.values():
        for name, (tokens, shares) in series.items():
            _check(name, tokens, shares)
    looks = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    keys = [Key(OpStyle(looks[n][0], "", n, "", looks[n][2]), "line") for n in names]
    means = {"law": "lines: the law", "predicted": "hollow: predicted", "measured": "filled: measured"}
    keys += [Key(OpStyle(SOFT, "", means[kind]), "words") for kind, series in kinds.items() if series]
    heading = title if title is not None else "exposed communication"
    fig, (ax,) = new_figure([2.8], title=heading, legend=keys, caption=caption, left=0.72, right=0.25)
    if predicted or measured:
        _mark_legend(fig, [looks[name][1] for name in names], hollow=not measured, lines=bool(law))
    for kind, series in kinds.items():
        for name, (tokens, shares) in series.items():
            color, marker, line = looks[name]
            (artist,) = ax.plot(tokens, [100 * share for share in shares], color=color, clip_on=False)
            artist.set_label(f"{kind} {name}")
            if kind == "law":
                artist.set(linestyle=line, linewidth=1.8, zorder=3)
            else:  # hollow ones are larger and have no face, so that they hide nothing
                hollow = kind == "predicted"
                artist.set(linestyle="none", marker=marker, markersize=9.5 if hollow else 6.5,
                           zorder=5 if hollow else 4, markerfacecolor="none" if hollow else color,
                           markeredgecolor=color if hollow else CARD,
                           markeredgewidth=1.5 if hollow else 0.8)  # fmt: skip
    ax.set_xscale("log")
    if knee is not None:
        _knee(ax, knee)
    _axes(ax)
    return fig


def _check(name: str, tokens: Sequence[float], shares: Sequence[float]) -> None:
    if len(tokens) != len(shares) or not len(tokens):
        raise ValueError(f"{name} has {len(tokens)} tokens and {len(shares)} shares; a point needs both")
    if min(tokens) <= 0:
        raise ValueError(f"{name} holds tokens that are not above 0, which have no logarithm")
    if not 0 <= min(shares) <= max(shares) <= 1:
        raise ValueError(f"{name} holds a share outside 0 to 1: {min(shares):g} to {max(shares):g}")


def _axes(ax: Axes) -> None:
    ax.set_ylim(0, 100)
    ax.set_xlabel("tokens a rank")
    ax.set_ylabel("exposed, share of the step (%)")
    ax.grid(True, which="major", color=RULE, linewidth=0.7)
    ticks = _ticks(*ax.get_xlim(), inches=ax.get_position().width * WIDTH)
    ax.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())


def _ticks(low: float, high: float, inches: float) -> list[float]:
    """1, 2, 5, 10, ... between the two, or the powers of ten alone, or every second one: what has room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [step * 10.0**k for k in decades for step in (1, 2, 5)]
    for thinned in (every, *(every[:: 3 * n] for n in range(1, len(decades)))):
        ticks = [tick for tick in thinned if low <= tick <= high]
        wide = [text_inches(_tokens(tick)) / 2 + 0.06 for tick in ticks]
        apart = [math.log(b / a) / math.log(high / low) * inches for a, b in pairwise(ticks)]
        if all(a + b <= room for (a, b), room in zip(pairwise(wide), apart, strict=True)):
            return ticks
    return []


def _tokens(tick: float) -> str:
    return f"{tick:,.0f}" if tick >= 1 else f"{tick:g}"


def _mark_legend(fig: Figure, markers: Sequence[str], hollow: bool, lines: bool) -> None:
    """Put each series' marker in the middle of its line in the header; of `lines` there may be none."""
    swatches = [artist for artist in fig.artists if isinstance(artist, Line2D)]
    for swatch, marker in zip(swatches, markers, strict=True):
        (left, right), (y, _) = np.asarray(swatch.get_data(), dtype=float)
        swatch.set_data([left, (left + right) / 2, right], [y] * 3)
        swatch.set(marker=marker, markevery=[1], markersize=6.5, markeredgewidth=1.5 if hollow else 0.8,
                   markerfacecolor="none" if hollow else swatch.get_color(),
                   markeredgecolor=swatch.get_color() if hollow else CARD)  # fmt: skip
        if not lines:
            swatch.set_linestyle("none")


def _knee(ax: Axes, knee: float) -> None:
    low, high = ax.get_xlim()
    low, high = min(low, knee / 3), max(high, knee * 3)  # room for the words on both sides
    ax.set_xlim(low, high)
    ax.axvspan(knee, high, color="#EEF3F8", zorder=0, linewidth=0)
    line = ax.axvline(knee, color=SOFT, linestyle="--", linewidth=1.3, zorder=2)
    line.set_label("knee")
    # On the side where the axis has more room, in logarithms.
    right = high / knee > knee / low
    ax.annotate(
        f"knee {number(knee)} tokens",
        (knee, 0.93),
        (6 if right else -6, 0),
        ("data", "axes fraction"),
        "offset points",
        size=SMALL,
        color=INK,
        ha="left" if right else "right",
    )
