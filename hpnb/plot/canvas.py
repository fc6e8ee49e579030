"""A card to draw on: sizes in inches, a title and a legend that cannot collide with the axes.

Layout engines measure every text at every draw, which costs more than a slider may take. Here the header's
height is known before the axes are placed, so nothing is measured twice and a redraw stays short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from hpnb.plot.grammar import CARD, DPI, INK, RULE, SOFT, TITLE_ID, OpStyle
from hpnb.plot.show import alt_of, bundle

WIDTH = 7.0  # inches: 700 CSS pixels at DPI
TITLE, TEXT, SMALL = 10.5, 9.0, 8.0  # points; SMALL is 11 px on a page
LINE = 0.15  # inches: one more line of a panel title
_LEAST = 7.0  # points, to which a panel title shrinks

Box = tuple[float, float, float, float]  # left, bottom, width, height


class Card(Figure):
    """A figure that a notebook shows as a picture where it is the value of a cell's last line. Jupyter shows
    another Figure as text, unless matplotlib was set up for the notebook."""

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return bundle(self, alt_of(self))


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a swatch of `style` as a box, a line or a dot, or words alone.

    With a `marker` a line carries it in its middle, and a dot, filled or hollow, has its shape.
    """

    style: OpStyle
    kind: Literal["box", "line", "dot", "flat", "hollow", "hatch", "words"] = "box"
    label: str = ""
    marker: str = ""

    @property
    def words(self) -> str:
        return self.label or self.style.label


@lru_cache(maxsize=4096)
def text_inches(text: str, size: float = TEXT, weight: str = "normal") -> float:
    """Width of `text` in inches, without a renderer."""
    font = FontProperties(size=size, weight=weight)
    points, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return float(points) / 72.0


def wrap(text: str, inches: float, size: float = TEXT, weight: str = "normal") -> list[str]:
    """`text` in lines of at most `inches`, broken at spaces."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_inches(f"{lines[-1]} {word}", size, weight) <= inches:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def new_figure(
    heights: Sequence[float],
    *,
    title: str = "",
    legend: Sequence[Key] = (),
    caption: str = "",
    columns: int = 1,
    left: float = 0.75,
    right: float = 0.2,
    bottom: float = 0.5,
    gap: float | Sequence[float] = 0.4,
    head: float = 0.14,
    between: float = 0.3,
) -> tuple[Figure, list[Axes]]:
    """A card with one row of axes for every one of `heights`, in inches; rows first, then columns.

    Args:
        heights: of the axes in every row.
        title: one sentence, wrapped where it is too long.
        legend: entries, in as many lines as they need.
        caption: a sentence beneath the axes, wrapped.
        left, right, bottom: margins around the axes; the top follows from title and legend.
        gap, between: between rows, which may differ, and between columns.
        head: above the first row; 0.3 leaves room for a panel title.
    """
    width, room = WIDTH, WIDTH - 0.3
    titles = wrap(title, room, TITLE, "bold") if title else []
    keys = _flow(legend, room)
    captions = wrap(caption, room) if caption else []
    top = 0.12 + 0.21 * len(titles) + 0.22 * len(keys) + head
    foot = bottom + 0.19 * len(captions) + (0.05 if captions else 0.0)
    gaps = [gap] * (len(heights) - 1) if isinstance(gap, int | float) else list(gap)
    height = top + sum(heights) + sum(gaps) + foot

    fig = Card(figsize=(width, height), dpi=DPI, facecolor=CARD, edgecolor=RULE, linewidth=1.5)
    FigureCanvasAgg(fig)
    y = height - 0.12
    for line in titles:
        text = fig.text(0.15 / width, (y - 0.09) / height, line, size=TITLE, weight="bold", va="center")
        text.set(color=INK, gid=TITLE_ID)
        y -= 0.21
    for row in keys:
        _legend_row(fig, row, (y - 0.11) / height)
        y -= 0.22
    for i, line in enumerate(reversed(captions)):
        fig.text(0.15 / width, (0.17 + 0.19 * i) / height, line, size=TEXT, color=INK, va="center")

    column_width = (width - left - right - between * (columns - 1)) / columns
    axes, y = [], height - top
    for tall, below in zip(heights, [*gaps, 0.0], strict=True):
        y -= tall
        for column in range(columns):
            x = left + column * (column_width + between)
            place = (x / width, y / height, column_width / width, tall / height)
            axes.append(_plain(fig.add_axes(place)))
        y -= below
    return fig, axes


def boxes(
    ax: Axes,
    at: Sequence[Box],
    style: OpStyle,
    *,
    name: str,
    hatch: bool = True,
    colors: Sequence[str] | None = None,
    zorder: float = 2.0,
    outline: bool = True,
) -> PolyCollection:
    """All rectangles of one kind as one artist, which is what makes a redraw fast; `name` is its label."""
    x, y, w, h = np.asarray(at, dtype=float).reshape(-1, 4).T
    corners = np.stack([np.stack([x, y], 1), np.stack([x + w, y], 1), np.stack([x + w, y + h], 1),
                        np.stack([x, y + h], 1)], 1)  # (n, 4, 2)  # fmt: skip
    polygons = PolyCollection(
        list(corners),
        facecolors=list(colors) if colors is not None else style.color,
        edgecolors=style.edge,
        linewidths=0.6 if outline else 0.0,
        hatch=(style.hatch or None) if hatch else None,
        zorder=zorder,
    )
    polygons.set_label(name)
    ax.add_collection(polygons, autolim=False)
    return polygons


def panel_title(ax: Axes, text: str, right: str = "") -> None:
    """Words just above the axes: `text` from the left, shrunk if it must, and `right` at the other end. Of
    several lines, which `title_lines` makes, the last stands beside `right`."""
    inches = ax.get_position().width * ax.figure.get_figwidth()  # type: ignore[union-attr]
    longest = max(text_inches(line) for line in text.split("\n"))
    size = max(_LEAST, min(TEXT, TEXT * _beside(right, inches) / max(longest, 1e-9)))
    words = ax.annotate(text, (0, 1), (0, 4), "axes fraction", "offset points", size=size, color=INK)
    words.set_gid(TITLE_ID)
    if right:
        ax.annotate(
            right, (1, 1), (0, 4), "axes fraction", "offset points", size=TEXT, color=SOFT, ha="right"
        )


def title_lines(text: str, right: str, inches: float) -> list[str]:
    """The lines of a panel title above axes of this width: one if `text` fits when it is shrunk, otherwise so
    many that no line has to be. They break at " · ", and at spaces where that is not enough."""
    room = _beside(right, inches)
    if text_inches(text) * _LEAST / TEXT <= room:
        return [text]
    lines: list[str] = []
    for part in text.split(" · "):
        if lines and text_inches(f"{lines[-1]} · {part}") <= room:
            lines[-1] += f" · {part}"
        else:
            lines += wrap(part, room)
    return lines


def _beside(right: str, inches: float) -> float:
    """What `right` leaves of the width."""
    return inches - (text_inches(right) + 0.3 if right else 0.0)


def _plain(ax: Axes) -> Axes:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(SOFT)
        ax.spines[side].set_linewidth(0.8)
    ax.tick_params(labelsize=TEXT, colors=SOFT, labelcolor=INK, length=3, width=0.8)
    ax.xaxis.label.set(size=TEXT, color=INK)
    ax.yaxis.label.set(size=TEXT, color=INK)
    ax.patch.set_visible(False)
    return ax


def _flow(legend: Sequence[Key], room: float) -> list[list[tuple[float, Key]]]:
    """Lines of (inches from the left, entry)."""
    rows: list[list[tuple[float, Key]]] = []
    x = room
    for key in legend:
        wide = text_inches(key.words) + (0.0 if key.kind == "words" else 0.31)
        if not rows or x + wide > room:
            rows.append([])
            x = 0.0
        rows[-1].append((x, key))
        x += wide + 0.18
    return rows


def _legend_row(fig: Figure, row: Sequence[tuple[float, Key]], y: float) -> None:
    width, height = fig.get_size_inches()
    for x, key in row:
        at = 0.15 + x
        if key.kind != "words":
            _swatch(fig, key, at, y * height)
            at += 0.31
        fig.text(at / width, y, key.words, size=TEXT, color=INK, va="center_baseline")


def _swatch(fig: Figure, key: Key, x: float, y: float) -> None:
    """The sample of one entry, its left middle at (x, y) inches of the card."""
    width, height = fig.get_size_inches()
    wide, tall = 0.24, 0.13  # inches
    style = key.style
    if key.kind in ("line", "dot") or key.marker:
        line = Line2D([x / width, (x + wide / 2) / width, (x + wide) / width], [y / height] * 3)
        line.set(color=style.color, linestyle=style.line if key.kind == "line" else "none")
        line.set_linewidth(1.4 if style.line == "-." else 2.2)  # a dash and a dot have to fit
        line.set(marker=key.marker or ("o" if key.kind == "dot" else ""), markevery=[1], markersize=6.5)
        line.set(markerfacecolor="none" if key.kind == "hollow" else style.color)
        fig.add_artist(line)
        return
    hollow = key.kind in ("hollow", "hatch")
    box = Rectangle((x / width, (y - tall / 2) / height), wide / width, tall / height)
    box.set_facecolor(CARD if hollow else style.color)
    box.set_edgecolor(style.color if key.kind == "hatch" else style.edge)
    box.set_linewidth(1.2 if hollow else 0.6)
    if style.hatch and key.kind not in ("hollow", "flat"):
        box.set_hatch(style.hatch)
    fig.add_artist(box)
