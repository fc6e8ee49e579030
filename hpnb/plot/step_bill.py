"""A step's two bills as two bars: bytes by category against a capacity, and seconds by what takes them."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title, text_inches
from hpnb.plot.grammar import CATEGORY, INK, STYLE, OpStyle, ink_on
from hpnb.plot.memory import CAPACITY
from hpnb.plot.units import byte_count, bytes_unit, seconds, time_unit

SPENT: Mapping[str, OpStyle] = {
    "computing": OpStyle(STYLE["F"].color, "", "computing"),
    "computing again": OpStyle(STYLE["I"].color, "//", "computing again"),
    "exposed": OpStyle(STYLE["all_reduce"].color, "", "exposed communication"),
    "optimizer": OpStyle(STYLE["W"].color, "..", "optimizer's step"),
    "offload": OpStyle(STYLE["send"].color, "xx", "offload"),
}


def step_bill(
    held: Mapping[str, float],
    spent: Mapping[str, float],
    capacity: float | None = None,
    title: str | None = None,
    text: bool = True,
) -> Figure:
    """Draw both bars.

    Args:
        held: {category of memory: bytes} at the fullest moment.
        spent: {part of SPENT: seconds}.
        capacity: bytes of the device.
        text: False leaves the numbers in the bars out, which is quicker.

    Raises:
        ValueError: a category or a part that does not exist.
    """
    for names, known in ((held, CATEGORY), (spent, SPENT)):
        if strange := [name for name in names if name not in known]:
            raise ValueError(f"no {', '.join(strange)} here; there are {', '.join(known)}")
    keys = [Key(CATEGORY[name]) for name in CATEGORY if held.get(name)]
    keys += [Key(CAPACITY, "line", f"capacity {byte_count(capacity)}")] if capacity else []
    keys += [Key(SPENT[name]) for name in SPENT if spent.get(name)]
    heading = title if title is not None else "a step: what it holds, and what it takes"
    fig, (above, below) = new_figure([0.5, 0.5], title=heading, legend=keys, left=0.25, gap=0.85, head=0.32)
    size, unit = bytes_unit(max(sum(held.values()), capacity or 0.0, 1.0))
    scale, clock = time_unit(sum(spent.values()))
    _bar(above, {n: (held[n] / size, CATEGORY[n]) for n in CATEGORY if held.get(n)}, text)
    _bar(below, {n: (spent[n] / scale, SPENT[n]) for n in SPENT if spent.get(n)}, text)
    above.set_xlim(0, max(sum(held.values()), capacity or 0.0) / size * 1.06)
    if capacity:
        line = above.axvline(capacity / size, color=CAPACITY.color, linestyle=CAPACITY.line, linewidth=2.0)
        line.set_label("capacity")
    panel_title(above, f"memory of a rank at its fullest, {byte_count(sum(held.values()))}")
    panel_title(below, f"seconds of a step, {seconds(sum(spent.values()))}")
    above.set_xlabel(unit, labelpad=1)
    below.set_xlabel(clock, labelpad=1)
    return fig


def _bar(ax: Axes, parts: Mapping[str, tuple[float, OpStyle]], text: bool) -> None:
    at, whole = 0.0, sum(wide for wide, _ in parts.values()) or 1.0
    for name, (wide, style) in parts.items():
        (bar,) = ax.barh([0], [wide], left=[at], height=0.8, facecolor=style.color, edgecolor=style.edge,
                         hatch=style.hatch or None, linewidth=0.6)  # fmt: skip
        bar.set_label(name)
        words = f"{100 * wide / whole:.0f} %"
        if text and wide / whole * 6.0 > text_inches(words, SMALL) + 0.2:
            box = {"facecolor": style.color, "edgecolor": "none", "pad": 1.2} if style.hatch else None
            ax.annotate(words, (at + wide / 2, 0), size=SMALL, ha="center", va="center", bbox=box,
                        color=ink_on(style.color) if box is None else INK)  # fmt: skip
        at += wide
    ax.set_yticks([])
    ax.set_ylim(-0.5, 0.5)
    ax.set_xlim(0, at * 1.06 or 1.0)
    ax.spines["left"].set_visible(False)
