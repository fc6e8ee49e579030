"""Who is how fast: bars in groups, ours in colour above the others in grey, with words in a column beside.

    dp4   ▇▇ ours ▇▇▇▇▇▇▇▇▇▇▇▇      |   482   69% of what could be
          ░░ another's ░░░░░░░░     |   416   1.171 [1.151, 1.191]

A name stands on its bar, however short that is, so a long name costs the bars no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, WIDTH, Key, new_figure, text_inches, wrap
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle, mix
from hpnb.plot.units import number

OURS = OpStyle(SERIES[0][0], "", "ours")
OTHERS = OpStyle(mix(SOFT, CARD, 0.62), "", "others")
CEILING = OpStyle(INK, "", "ceiling", ":")

_ROW, _TALL, _BETWEEN = 0.185, 0.158, 0.12  # inches: from bar to bar, a bar, and from group to group
_VALUES, _WORDS = 0.5, 0.62  # inches right of the axes: where numbers end, and where words begin
_LINE = 0.17  # inches of a line above a panel


@dataclass(frozen=True, slots=True)
class Standing:
    """One row.

    Attributes:
        value: how long; None has no bar, and its name says why.
        words: in the column at the right.
    """

    name: str
    value: float | None
    words: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class StandingGroup:
    """Bars that belong together; `ceiling` is a thin line across them."""

    name: str
    bars: tuple[Standing, ...]
    ceiling: float | None = None


@dataclass(frozen=True, slots=True)
class StandingPanel:
    """Groups under one heading; `notes` are lines beneath it, wrapped."""

    title: str
    groups: tuple[StandingGroup, ...]
    notes: tuple[str, ...] = ()


def standings(
    panels: Sequence[StandingPanel],
    unit: str = "",
    column: str = "",
    legend: tuple[str, str, str] = ("ours", "others", "ceiling"),
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw a row a bar, in the order given; all panels have one scale, and the card is as tall as it must be.

    Args:
        unit: of the values, above their column.
        column: what stands above the words at the right.
        legend: what our bars, the others and the ceiling are called.
    """
    groups = [group for panel in panels for group in panel.groups]
    ceilings = [group.ceiling for group in groups if group.ceiling is not None]
    values = [bar.value for group in groups for bar in group.bars if bar.value is not None]
    keys = [Key(OURS, "box", legend[0]), Key(OTHERS, "box", legend[1])]
    if ceilings:
        keys.append(Key(CEILING, "line", legend[2]))
    notes = [[line for note in panel.notes for line in wrap(note, WIDTH - 0.35, SMALL)] for panel in panels]
    head = _LINE * (2 + max(map(len, notes))) + 0.12  # a heading, notes, and what the columns are
    heights = [sum(_tall(group) for group in panel.groups) for panel in panels]
    words = [column, *(bar.words for group in groups for bar in group.bars)]
    right = _WORDS + max(text_inches(text, SMALL) for text in words) + 0.12
    fig, axes = new_figure(
        heights, title=title or "", legend=keys, caption=caption, head=head, gap=head + 0.22, bottom=0.34,
        left=0.3 + max(text_inches(group.name, TEXT, "bold") for group in groups), right=right,
    )  # fmt: skip
    most = max([*values, *ceilings, 0.0]) or 1.0
    for ax, panel, lines in zip(axes, panels, notes, strict=True):
        ax.set_xlim(0, most * 1.015)
        _above(fig, ax, panel.title, lines, (unit, column))
        at = 0.0
        for group in panel.groups:
            _draw(ax, group, at)
            at += _tall(group)
        ax.set_ylim(at, 0)
        ax.set_yticks([])
        ax.grid(True, axis="x", color=mix(RULE, CARD, 0.4), linewidth=0.7)
        ax.set_axisbelow(True)
        ax.spines["bottom"].set_visible(False)
        ax.tick_params(axis="x", length=0, labelsize=SMALL, labelcolor=SOFT, pad=2)
    return fig


def _tall(group: StandingGroup) -> float:
    return _ROW * len(group.bars) + _BETWEEN


def _draw(ax: Axes, group: StandingGroup, top: float) -> None:
    """A group from `top` on; y is in inches, downwards."""
    inches = ax.get_position().width * ax.figure.get_figwidth() / ax.get_xlim()[1]  # type: ignore[union-attr]
    top += _BETWEEN / 2
    if top > _BETWEEN / 2:
        ax.axhline(top - _BETWEEN / 2, color=RULE, linewidth=0.7)
    ax.annotate(group.name, (0, top + _ROW / 2), (-7, 0), "data", "offset points", size=TEXT, weight="bold",
                color=INK, ha="right", va="center_baseline")  # fmt: skip
    for row, bar in enumerate(group.bars):
        y = top + _ROW * (row + 0.5)
        style, weight = (OURS, "bold") if bar.ours else (OTHERS, "normal")
        beside, ink = 0.0, INK
        if bar.value is None:
            ink = SOFT
        else:
            (drawn,) = ax.barh([y], [bar.value], height=_TALL, facecolor=style.color, linewidth=0)
            drawn.set_label(f"{group.name}, {bar.name}")
            _right(ax, y, _VALUES, number(bar.value), "right", weight)
        if bar.ours and bar.value is not None:  # dark: a name that is too long for it stands behind it
            fits = text_inches(bar.name, SMALL, weight) + 0.12 < bar.value * inches
            beside, ink = (0.0, CARD) if fits else (bar.value, style.color)
        ax.annotate(bar.name, (beside, y), (5, 0), "data", "offset points", size=SMALL, weight=weight,
                    color=ink, va="center_baseline")  # fmt: skip
        _right(ax, y, _WORDS, bar.words, "left", "normal", SOFT if bar.ours else INK)
    if group.ceiling is not None:
        ends = [top, top + _ROW * len(group.bars)]
        (line,) = ax.plot([group.ceiling] * 2, ends, color=CEILING.color, linestyle=CEILING.line)
        line.set(label=f"{group.name}, ceiling", linewidth=1.3, zorder=1.8)


def _right(ax: Axes, y: float, inches: float, text: str, side: str, weight: str, ink: str = INK) -> None:
    ax.annotate(text, (1, y), (72 * inches, 0), ("axes fraction", "data"), "offset points", size=SMALL,
                weight=weight, color=ink, ha=side, va="center_baseline", annotation_clip=False)  # fmt: skip


def _above(fig: Figure, ax: Axes, title: str, notes: Sequence[str], heads: tuple[str, str]) -> None:
    """A panel's heading and notes from the card's left, and the names of the columns just above them."""
    width, height = fig.get_size_inches()
    y = ax.get_position().y1 * height + 0.09
    for text, inches, side in zip(heads, (_VALUES, _WORDS), ("right", "left"), strict=True):
        ax.annotate(text, (1, 1), (72 * inches, 72 * 0.05), "axes fraction", "offset points", size=SMALL,
                    color=SOFT, ha=side)  # fmt: skip
    for line in reversed(notes):
        y += _LINE
        fig.text(0.15 / width, y / height, line, size=SMALL, color=SOFT, va="center_baseline")
    y += _LINE + 0.02
    fig.text(0.15 / width, y / height, title, size=TEXT, weight="bold", color=INK, va="center_baseline")
