"""The builder of lying bars: a row a name, one bar or several a row, each bar made of parts.

    row     ▇▇▇▇▇▇▒▒▒▒▒░░░|  12.3      filled   measured        |   a tick: where it should end
            ▭▭▭▭▭▭▭▭▭▭▭▭▭    11.9      hollow   predicted

All bars of one part are one artist, so that an explorer redraws them quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Box, Key, boxes, new_figure, panel_title, text_inches
from hpnb.plot.grammar import CARD, INK, RULE, SOFT, OpStyle, ink_on
from hpnb.plot.units import bytes_unit, number, time_unit

_UNITS = {"s": time_unit, "B": bytes_unit}


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        parts: {part: how long}, from the left.
        hollow: drawn as an outline, for what is predicted.
        words: at its end; None writes its length, "" nothing.
        ticks: upright lines through it; the last one is longer.
    """

    parts: Mapping[str, float]
    hollow: bool = False
    words: str | None = None
    ticks: Sequence[float] = ()

    @property
    def length(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class BarPanel:
    """Rows under one scale.

    Attributes:
        rows: {name: its bars, from the top}.
        unit: "s" or "B", for which a fitting one is chosen, or any other word; of all values.
        xlabel: words beneath; {unit} stands for the unit.
        reach: where the axis ends at the latest; longer bars run out of the picture.
        inside: write into each part, where there is room, its "length" or its "share" of the bar.
    """

    rows: Mapping[str, Sequence[Bar]]
    unit: str = ""
    xlabel: str = "{unit}"
    title: str = ""
    reach: float | None = None
    inside: Literal["", "length", "share"] = ""
    row_inches: float = 0.4
    named: bool = True

    @cached_property  # it is read for every bar
    def longest(self) -> float:
        """The length of the axis, in `unit`."""
        bars = [bar for row in self.rows.values() for bar in row]
        longest = max(max(bar.length, *bar.ticks, 0.0) if bar.ticks else bar.length for bar in bars)
        return min(longest, self.reach or longest) if longest > 0 else 1.0

    @property
    def scale(self) -> float:
        """How many of `unit` one unit of the axis is."""
        return _UNITS[self.unit](self.longest)[0] if self.unit in _UNITS else 1.0

    @property
    def unit_name(self) -> str:
        return _UNITS[self.unit](self.longest)[1] if self.unit in _UNITS else self.unit


def bars(
    panels: Sequence[BarPanel],
    looks: Mapping[str, OpStyle],
    *,
    title: str,
    more_keys: Sequence[Key] = (),
    keys: Sequence[Key] | None = None,
    caption: str = "",
    left: float | None = None,
    right: float = 0.7,
    head: float | None = None,
    text: bool = True,
) -> Figure:
    """Draw the panels beneath each other.

    Args:
        looks: {part: how it looks}, for the parts that occur and perhaps others; its order is the legend's.
        keys: the legend; by default each part that has a length, and then `more_keys`.
        text: False leaves out numbers and hatches, for a picture that moves.

    Raises:
        ValueError: a part has no look, and would be missing from its bar; a row has no bars.
    """
    drawn = [bar for panel in panels for row in panel.rows.values() for bar in row]
    if empty := [name for panel in panels for name, row in panel.rows.items() if not row]:
        raise ValueError(f"row {empty[0]!r} has no bars; leave it out")
    if not drawn:
        raise ValueError("there are no rows to draw")
    if strange := [part for bar in drawn for part in bar.parts if part not in looks]:
        raise ValueError(f"there is no part {strange[0]!r}; there are {', '.join(looks)}")
    present = [part for part in looks if any(bar.parts.get(part) for bar in drawn)]
    if keys is None:
        keys = [Key(looks[part], "box", looks[part].label or part) for part in present]
    names = [name for panel in panels if panel.named for name in panel.rows]
    if left is None:
        left = 0.3 + max((text_inches(line) for name in names for line in name.split("\n")), default=0.0)
    fig, axes = new_figure(
        [panel.row_inches * len(panel.rows) + 0.1 for panel in panels], title=title,
        legend=[*keys, *more_keys], caption=caption, left=left, right=right, gap=0.85,
        head=head if head is not None else 0.32 if panels[0].title else 0.14,
    )  # fmt: skip
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, {part: looks[part] for part in present}, text)
    return fig


def _draw(ax: Axes, panel: BarPanel, looks: Mapping[str, OpStyle], text: bool) -> None:
    """All bars of a panel: part by part, then ticks and words bar by bar."""
    filled: dict[str, list[Box]] = {part: [] for part in looks}
    hollow: dict[str, list[Box]] = {part: [] for part in looks}
    shortest = min((bar.length for row in panel.rows.values() for bar in row), default=0.0)
    for row, row_bars in enumerate(panel.rows.values()):
        pitch = 0.76 / len(row_bars)
        for i, bar in enumerate(row_bars):
            y, x = row - 0.38 + pitch * (i + 0.5), 0.0
            for part in (part for part in looks if part in bar.parts):
                wide = bar.parts[part] / panel.scale
                (hollow if bar.hollow else filled)[part].append((x, y - 0.42 * pitch, wide, 0.84 * pitch))
                if panel.inside and text and wide > 0:
                    share = f"{100 * bar.parts[part] / bar.length:.0f} %"
                    words = share if panel.inside == "share" else number(wide)
                    _write_inside(ax, x, y, wide, words, looks[part], panel)
                x += wide
            for k, tick in enumerate(bar.ticks):
                last = k == len(bar.ticks) - 1
                reach = 0.46 if last else 0.38
                ax.plot([tick / panel.scale] * 2, [y - reach, y + reach], color=INK, zorder=5,
                        linewidth=2.3 if last else 0.9, label=f"tick {k}")  # fmt: skip
            at_end = number(x) if bar.words is None else bar.words
            if text and at_end:
                end = min(max(x, *(t / panel.scale for t in bar.ticks), 0.0) if bar.ticks else max(x, 0.0),
                          1.04 * panel.longest / panel.scale)  # fmt: skip
                ax.annotate(at_end, (end, y), (5, 0), "data", "offset points", size=SMALL, va="center",
                            color=SOFT if bar.hollow else INK, annotation_clip=False)  # fmt: skip
    for part, style in looks.items():
        if filled[part]:
            boxes(ax, filled[part], style, name=part, hatch=text)
        if hollow[part]:
            outlines = boxes(ax, hollow[part], style, name=f"predicted {part}", hatch=False)
            outlines.set(facecolor=CARD, edgecolor=style.color, linewidth=1.5)
    ax.set_ylim(len(panel.rows) - 0.5, -0.5)
    ax.set_xlim(min(0.0, 1.05 * shortest / panel.scale), 1.04 * panel.longest / panel.scale)
    ax.set_yticks(range(len(panel.rows)), list(panel.rows) if panel.named else [""] * len(panel.rows))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlabel(panel.xlabel.format(unit=panel.unit_name), size=TEXT, labelpad=1)
    if panel.title:
        panel_title(ax, panel.title)


def _write_inside(
    ax: Axes, x: float, y: float, wide: float, words: str, style: OpStyle, panel: BarPanel
) -> None:
    """The length of a part in its middle, on a patch of its own colour where it is hatched."""
    inches = ax.get_position().width * ax.figure.get_figwidth()  # type: ignore[union-attr]
    if wide / (1.04 * panel.longest / panel.scale) * inches > text_inches(words, TEXT, "bold") + 0.06:
        ax.text(x + wide / 2, y, words, size=TEXT, weight="bold", ha="center", va="center", zorder=6,
                color=ink_on(style.color),
                bbox={"facecolor": style.color, "edgecolor": "none", "pad": 1.5})  # fmt: skip
