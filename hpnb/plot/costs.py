"""Bytes against seconds, both in logarithms: a message costs a latency, then a bandwidth.

    seconds(n) = latency + n / bandwidth        knee = latency * bandwidth, where the two are equal

Left of the knee a message's size is free; right of it twice the bytes take twice the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hpnb.plot import units
from hpnb.plot.canvas import SMALL, Key, new_figure
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle

Curve = tuple[Sequence[float], Sequence[float]]
FIT = OpStyle(INK, "", "fit", "", "-")


def costs(
    sizes: Sequence[float],
    seconds: Sequence[float],
    fit: Curve | None = None,
    knee: float | None = None,
    more: Mapping[str, Curve] | None = None,
    title: str | None = None,
    *,
    label: str = "measured",
    text: bool = True,
) -> Figure:
    """Draw measured points, a fitted curve, its knee, and further series by name.

    Args:
        sizes, seconds: bytes and seconds of the points; empty where `more` is all there is.
        fit: (bytes, seconds) of a curve.
        knee: bytes at which latency and bandwidth cost the same.
        more: {name: (bytes, seconds)}, such as one curve for each algorithm.
        title: None says what is drawn.
        label: of the points; "simulated" where nothing was timed.
        text: False leaves out the minor ticks, for a picture that moves.

    Raises:
        ValueError: nothing to draw, pairs of unequal length, or a number that has no logarithm.
    """
    dots = label if len(sizes) else None
    series = {**({dots: (sizes, seconds)} if dots else {}), **(more or {})}
    curves = series if fit is None else {**series, "fit": fit}
    if not curves:
        raise ValueError("costs needs at least one point, a fit or a series in `more`")
    for name, (xs, ys) in curves.items():
        if len(xs) != len(ys) or not len(xs):
            raise ValueError(f"{name} has {len(xs)} sizes and {len(ys)} times; a point needs both")
        if min(*xs, *ys) <= 0:
            raise ValueError(f"{name} holds a size or a time that is not above 0, which has no logarithm")
    keys = []
    styles = itertools.cycle(SERIES)
    looks = {name: next(styles) for name in series}
    for name, (color, _, line) in looks.items():
        keys.append(Key(OpStyle(color, "", name, "", line), "dot" if name == dots else "line"))
    if fit is not None:
        keys.append(Key(FIT, "line", "fit"))
    heading = title if title is not None else f"cost of a message: {', '.join(curves)}"
    fig, (ax,) = new_figure([2.9], title=heading, legend=keys, left=0.8, right=0.25)
    for name, (color, marker, line) in looks.items():
        (artist,) = ax.plot(*series[name], color=color, linestyle=line, linewidth=2.0, zorder=4)
        if name == dots:
            artist.set(linestyle="none", marker=marker, markersize=6.5, markeredgecolor=CARD)
        artist.set_label(name)
    if fit is not None:
        (artist,) = ax.plot(*fit, color=FIT.color, linewidth=1.4, zorder=3)
        artist.set_label("fit")
    ax.set_xscale("log")
    ax.set_yscale("log")
    _axes(ax)
    if not text:
        ax.minorticks_off()
    if knee is not None:
        _knee(ax, knee)
    return fig


def _axes(ax: Axes) -> None:
    ax.set_xlabel("size (bytes)")
    ax.set_ylabel("time")
    ax.grid(True, which="major", color=RULE, linewidth=0.7)
    for axis, words in ((ax.xaxis, units.byte_count), (ax.yaxis, units.seconds)):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _, say=words: _short(say(value))))
    low, high = ax.get_ylim()
    if high / low < 30:  # powers of ten alone would leave one tick or none
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))


def _short(words: str) -> str:
    """ "1.00 kB" as "1 kB": a tick is a power of ten."""
    value, _, unit = words.partition(" ")
    return f"{float(value.replace(',', '')):g} {unit}"


def _knee(ax: Axes, knee: float) -> None:
    low, high = ax.get_xlim()
    low, high = min(low, knee / 30), max(high, knee * 30)  # room for the words on both sides
    ax.set_xlim(low, high)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top * (top / bottom) ** 0.12)  # and above the points
    ax.axvspan(low, knee, color="#EEF3F8", zorder=0, linewidth=0)
    line = ax.axvline(knee, color=SOFT, linestyle="--", linewidth=1.3, zorder=2)
    line.set_label("knee")
    _note(ax, "latency-bound", (knee, 1), (-7, -11), "right", SOFT)
    _note(ax, "bandwidth-bound", (knee, 1), (7, -11), "left", SOFT)
    _note(ax, f"knee {units.byte_count(knee)}", (knee, 0), (6, 6), "left", INK)


def _note(
    ax: Axes,
    words: str,
    at: tuple[float, float],
    off: tuple[float, float],
    side: Literal["left", "right"],
    color: str,
) -> None:
    """Words at a size of message and a height of the axes, moved by `off` points."""
    ax.annotate(words, at, off, ("data", "axes fraction"), "offset points", size=SMALL, color=color, ha=side)
