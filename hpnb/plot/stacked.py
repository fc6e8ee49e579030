"""Rows of bars, each made of parts, with a tick where something else says that it should end.

    row     ▇▇▇▇▇▇▒▒▒▒▒░░░|  12.3 GB

For what ranks compute, and for what a rank keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Key, boxes, new_figure
from hpnb.plot.grammar import ALARM, INK, RULE, SOFT, OpStyle
from hpnb.plot.units import bytes_unit, number, time_unit

PARTS = (
    OpStyle("#44539A", "", ""),
    OpStyle("#88CCEE", "//", ""),
    OpStyle("#DDCC77", "..", ""),
    OpStyle("#CC6677", "\\\\", ""),
    OpStyle("#BBBBBB", "xx", ""),
)  # none is an operation's
_UNITS = {"s": time_unit, "B": bytes_unit}


def stacked(
    rows: Mapping[str, Mapping[str, float]],
    ticks: Mapping[str, float] | None = None,
    unit: str = "B",
    tick: str = "measured",
    limit: float | None = None,
    reach: float | None = None,
    chosen: str = "",
    title: str | None = None,
    caption: str = "",
    text: bool = True,
) -> Figure:
    """Draw one bar a row.

    Args:
        rows: {row: {part: how much}}, at most five parts in all; a part may be missing.
        ticks: {row: where a tick stands}, and `tick` says what it is.
        unit: "B" or "s".
        limit: a line across all rows.
        reach: the most that is drawn; longer bars run out of the picture, with their number.
        chosen: a row whose name is bold.
        text: numbers at the ends; False is quicker.

    Raises:
        ValueError: no rows, too many parts, or an amount that is negative or not finite.
    """
    names = list(dict.fromkeys(part for parts in rows.values() for part in parts))
    if not rows or not names or len(names) > len(PARTS):
        raise ValueError(
            f"{len(rows)} rows of {len(names)} parts; use 1 row or more, of 1 to {len(PARTS)} parts"
        )
    ticks = dict(ticks or {})
    for row, parts in (*rows.items(), ("ticks", ticks)):
        if not all(math.isfinite(v) and v >= 0 for v in parts.values()):
            raise ValueError(f"{row} holds {dict(parts)}: each must be a number of {unit}, 0 or more")
    totals = {row: sum(parts.values()) for row, parts in rows.items()}
    most = max(*totals.values(), *ticks.values(), limit or 0.0, 1e-12)
    most = min(most, reach or most)
    scale, name = _UNITS[unit](most)
    looks = {part: OpStyle(PARTS[i].color, PARTS[i].hatch, part) for i, part in enumerate(names)}
    keys = [Key(look) for look in looks.values()]
    if ticks:
        keys.append(Key(OpStyle(INK, "", tick), "line"))
    if limit is not None:
        keys.append(Key(OpStyle(ALARM, "", "the limit", "", "--"), "line"))
    left = 0.35 + 0.075 * max(max(map(len, line.split("\n"))) for line in rows)
    fig, (ax,) = new_figure(
        [0.36 * len(rows)], title=title or "", legend=keys, caption=caption, left=left, right=0.7
    )
    for part, look in looks.items():
        bars = []
        for y, parts in enumerate(rows.values()):
            before = sum(v for other, v in parts.items() if names.index(other) < names.index(part))
            bars.append((before / scale, y - 0.34, parts.get(part, 0.0) / scale, 0.68))
        boxes(ax, bars, look, name=part, hatch=text)
    for y, row in enumerate(rows):
        if row in ticks:
            ax.plot([ticks[row] / scale] * 2, [y - 0.44, y + 0.44], color=INK, linewidth=2.4, label=tick)
        if text:
            end = min(max(totals[row], ticks.get(row, 0.0)), 1.04 * most) / scale
            ax.annotate(number(totals[row] / scale), (end, y), (5, 0), "data", "offset points", size=SMALL,
                        color=INK, va="center", annotation_clip=False)  # fmt: skip
    if limit is not None:
        ax.axvline(limit / scale, color=ALARM, linestyle="--", linewidth=1.6)
    ax.set_xlim(0, 1.04 * most / scale)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), list(rows), size=TEXT)
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == chosen else "normal")
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines["left"].set_color(SOFT)
    ax.set_xlabel(name, size=TEXT)
    return fig
