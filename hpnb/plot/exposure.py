"""When is communication free: tokens a rank against the share of a step in which nothing is computed.

    line      the law, in one stroke
    hollow    predicted for one number of tokens, from a backward that was measured alone
    filled    measured
    knee      tokens from which on a backward covers its gradients' all-reduce

Series of one name (one way of reducing) have one colour, whether predicted or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hpnb.plot.canvas import SMALL, Key, new_figure
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
    if predicted:
        keys.append(Key(OpStyle(SOFT, "", "hollow: predicted"), "words"))
    if measured:
        keys.append(Key(OpStyle(SOFT, "", "filled: measured"), "words"))
    heading = title if title is not None else "exposed communication"
    fig, (ax,) = new_figure([2.8], title=heading, legend=keys, caption=caption, left=0.72, right=0.25)
    for kind, series in kinds.items():
        for name, (tokens, shares) in series.items():
            color, marker, line = looks[name]
            (artist,) = ax.plot(tokens, [100 * share for share in shares], color=color, clip_on=False)
            artist.set_label(f"{kind} {name}")
            if kind == "law":
                artist.set(linestyle=line, linewidth=1.8, zorder=3)
            else:
                hollow = kind == "predicted"
                artist.set(linestyle="none", marker=marker, markersize=7.5, zorder=4 if hollow else 5,
                           markerfacecolor=CARD if hollow else color,
                           markeredgecolor=color if hollow else CARD,
                           markeredgewidth=1.6 if hollow else 0.8)  # fmt: skip
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
    low, high = ax.get_xlim()
    few = high / low < 30  # powers of ten alone would leave one tick or two
    ticks = LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9).tick_values(low, high)
    ax.set_xticks([tick for tick in ticks if low <= tick <= high])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    )


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
