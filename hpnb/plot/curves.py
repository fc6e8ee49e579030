"""The builder of figures with an axis of x and an axis of y: named series, as lines and as dots.

    line     a law, a simulation, or a run from step to step
    hollow   predicted for one x
    dots     measured, counted or run

`curves` draws panels beneath each other and returns the figure; a page adds its own notes to `fig.axes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, NullFormatter, NullLocator

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure, panel_title
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, Line, OpStyle

Kind = Literal["line", "dots", "hollow", "line and dots", "line and hollow"]
SHADE = "#EEF3F8"


class Look(NamedTuple):
    """How a series looks; its marker and line style repeat what its colour says."""

    color: str
    marker: str = "o"
    line: Line = "-"


def looks(names: Iterable[str], avoid: str = "") -> dict[str, Look]:
    """{name: its look}, in the order of the grammar; no series gets the colour `avoid`."""
    free = [Look(*series) for series in SERIES if series[0] != avoid]
    return {name: free[i % len(free)] for i, name in enumerate(dict.fromkeys(names))}


@dataclass(frozen=True)
class Series:
    """Points of one name. `label` names the artist, where `name` is not enough to find it again."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look
    kind: Kind = "line"
    label: str = ""

    @property
    def key(self) -> Key:
        kind: Literal["dot", "hollow", "line"] = "line"
        if self.kind in ("dots", "hollow"):
            kind = "dot" if self.kind == "dots" else "hollow"
        marker = "" if self.kind == "line" else self.look.marker
        return Key(OpStyle(self.look.color, "", self.name, self.look.line), kind, marker=marker)


@dataclass(frozen=True)
class CurvePanel:
    """One pair of axes.

    Attributes:
        log: which axes are logarithmic, "", "x", "y" or "xy".
        height: inches.
        title: words above it; "" for none.
    """

    series: Sequence[Series]
    ylabel: str = ""
    log: Literal["", "x", "y", "xy"] = ""
    height: float = 2.6
    title: str = ""
    xlabel: str = ""


def curves(
    panels: Sequence[CurvePanel],
    *,
    title: str,
    keys: Sequence[Key] | None = None,
    more_keys: Sequence[Key] = (),
    left: float = 0.8,
    right: float = 0.25,
    gap: float = 0.42,
    head: float = 0.22,
    bottom: float = 0.5,
) -> Figure:
    """Draw the panels beneath each other.

    Args:
        keys: the legend; by default an entry for each name, as its first series is drawn.
        more_keys: entries after those.
        left, right, gap, head, bottom: inches, as for `new_figure`.

    Raises:
        ValueError: nothing to draw, series of unequal length, or numbers that the axes cannot show.
    """
    series = [curve for panel in panels for curve in panel.series]
    if not series:
        raise ValueError("there is no series to draw")
    for panel in panels:
        for curve in panel.series:
            _check(curve, panel.log)
    if keys is None:
        keys = legend_of(series)
    fig, axes = new_figure(
        [panel.height for panel in panels], title=title, legend=[*keys, *more_keys],
        left=left, right=right, gap=gap, bottom=bottom, head=0.3 if panels[0].title else head,
    )  # fmt: skip
    for ax, panel in zip(axes, panels, strict=True):
        for letter, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
            if letter in panel.log:
                (ax.set_xscale if letter == "x" else ax.set_yscale)("log")
                axis.set_major_formatter(PlainLogFormatter())
                axis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(1.0, 0.4)))
        for curve in panel.series:
            draw_series(ax, curve)
        ax.grid(True, which="major", color=RULE, linewidth=0.7)
        ax.set_axisbelow(True)
        ax.set_xlabel(panel.xlabel, size=TEXT, color=INK)
        ax.set_ylabel(panel.ylabel, size=TEXT, color=INK)
        if panel.title:
            panel_title(ax, panel.title)
    return fig


def legend_of(series: Sequence[Series]) -> list[Key]:
    """An entry for each name: the line of its series if one has a line, and the marker if one has dots."""
    keys: dict[str, Key] = {}
    for curve in series:
        key = keys.setdefault(curve.name, curve.key)
        kind = "line" if "line" in (key.kind, curve.key.kind) else key.kind
        kind = "dot" if {"dot", "hollow"} == {key.kind, curve.key.kind} else kind
        keys[curve.name] = replace(key, kind=kind, marker=key.marker or curve.key.marker)
    return list(keys.values())


def draw_series(ax: Axes, series: Series) -> Line2D:
    """One series as one artist. Hollow dots are larger than filled ones, so that neither hides the other."""
    (artist,) = ax.plot(series.x, series.y, color=series.look.color, label=series.label or series.name)
    artist.set(linestyle=series.look.line if "line" in series.kind else "none", linewidth=2.0, zorder=3)
    if series.kind == "hollow":
        artist.set(marker=series.look.marker, markersize=9.5, markerfacecolor="none", markeredgewidth=1.5)
        artist.set(zorder=5, clip_on=False)
    elif series.kind == "line and hollow":
        artist.set(marker=series.look.marker, markersize=6.5, markerfacecolor=CARD, markeredgewidth=1.5)
        artist.set(zorder=5)
    elif series.kind != "line":
        artist.set(marker=series.look.marker, markersize=6.5, markeredgecolor=CARD, markeredgewidth=0.8)
        artist.set(zorder=4, clip_on=False)
    return artist


def _check(series: Series, log: str) -> None:
    if len(series.x) != len(series.y) or not len(series.x):
        raise ValueError(f"{series.name} has {len(series.x)} x and {len(series.y)} y; a point needs both")
    for axis, values in (("x", series.x), ("y", series.y)):
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"{series.name} holds a number that is not finite, and cannot be drawn")
        if axis in log and min(values) <= 0:
            raise ValueError(f"{series.name} holds {min(values)}, which has no logarithm")


# --- axes, rules and notes ---------------------------------------------------------------------------


def set_ticks(axis: Axis, ticks: Sequence[float], say: Callable[[float], str]) -> None:
    """Exactly these ticks, in words, and no minor ones."""
    axis.set_ticks(list(ticks), [say(tick) for tick in ticks])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def log_ticks(axis: Axis, say: Callable[[float], str], subs: Sequence[float] = (1.0,)) -> None:
    """Ticks of a logarithmic axis at `subs` times powers of ten, at most nine of them, in words."""
    axis.set_major_locator(LogLocator(subs=tuple(subs), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    axis.set_minor_formatter(NullFormatter())


class PlainLogFormatter(LogFormatter):
    """Ticks of a logarithmic axis as "1,000": the exponent of a power is too small to read at 700 px."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The words of a tick, or nothing where matplotlib has none for it."""
        return (count(x) if 1e-4 <= x < 1e7 else f"{x:.0e}") if super().__call__(x, pos) else ""


def count(value: float) -> str:
    """A count in words: "12,800", or "0.5"."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def rule(ax: Axes, x: float, label: str, color: str = SOFT, line: Line = ":", width: float = 1.4) -> Line2D:
    """An upright line at x, above the grid and beneath the series."""
    return ax.axvline(x, color=color, linestyle=line, linewidth=width, zorder=1.8, label=label)


def note(
    ax: Axes,
    words: str,
    x: float,
    height: float,
    offset: tuple[float, float] = (6, 0),
    side: Literal["left", "right", "center"] = "left",
    color: str = INK,
) -> None:
    """Small words at x and at a share of the axes' height, moved by `offset` points."""
    ax.annotate(words, (x, height), offset, ("data", "axes fraction"), "offset points", size=SMALL,
                color=color, ha=side)  # fmt: skip


def write_values(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    words: Sequence[str],
    bold: int | None = None,
    offset: float = 7,
) -> None:
    """Words above points, or beneath them where `offset` is negative; the one at `bold` is bold."""
    for i, (at, top, text) in enumerate(zip(x, y, words, strict=True)):
        ax.annotate(text, (at, top), (0, offset), "data", "offset points", size=SMALL, color=INK, ha="center",
                    va="bottom" if offset > 0 else "top", weight="bold" if i == bold else "normal",
                    zorder=6, bbox={"facecolor": CARD, "edgecolor": "none", "pad": 0.6})  # fmt: skip
