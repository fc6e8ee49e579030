"""A traffic atlas: who sends to whom, how much, along which axis, and what leaves a host.

    row      a sender            square      the axis of what goes from one to the other, in its colour
    column   a receiver          depth       bytes, in logarithms: the darker, the more
    block    on the diagonal what stays on a host, elsewhere what crosses a border

Two ranks that are neighbours along an axis differ in that coordinate alone, so a square has one axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hpnb.mesh import AXES
from hpnb.plot.canvas import SMALL, WIDTH, Box, Key, boxes, new_figure
from hpnb.plot.grammar import AXIS, CARD, INK, SOFT, STYLE, OpStyle, axis_style, ink_on, mix
from hpnb.plot.units import byte_count, number, time_unit

Flows = Mapping[tuple[int, int], Mapping[str, float]]
"""{(sender, receiver): {axis: bytes}}"""
BETWEEN = OpStyle("#E4E8ED", "", "between hosts")
PARTS: dict[str, OpStyle] = {
    "compute": STYLE["compute"],
    "tp": OpStyle(AXIS["tp"].color, "..", "tp, in line"),
    "bubble": OpStyle(mix(STYLE["idle"].color, STYLE["compute"].color, 0.12), "///", "bubble"),
    "pp": OpStyle(AXIS["pp"].color, "\\\\", "pp, hops"),
    "dp": OpStyle(AXIS["dp"].color, "xx", "dp, exposed"),
}
MOST_WITH_WORDS = 10  # ranks: in smaller squares nothing can be read
_PALEST = 0.22
_CONTROL = 1024.0  # bytes: less is counted, and drawn as palest


def atlas(
    panels: Mapping[str, Flows],
    host: int,
    parts: Mapping[str, float] | None = None,
    title: str | None = None,
    caption: str = "",
    *,
    text: bool = True,
) -> Figure:
    """Draw a square of senders and receivers for each of `panels`, all in one scale of bytes.

    Args:
        panels: {words above: what was sent}; one to three.
        host: consecutive ranks of each host.
        parts: seconds of a step, of some of PARTS; drawn as one bar beneath.
        caption: a sentence beneath all.
        text: write into squares which axis they are.

    Raises:
        ValueError: no panel or more than three, nothing sent, or a host of no ranks.
    """
    if not 1 <= len(panels) <= 3:
        raise ValueError(f"an atlas has one to three panels, not {len(panels)}")
    if host < 1:
        raise ValueError(f"host={host} is no count of ranks; use 8 for hosts with 8 devices")
    if not all(panels.values()):
        raise ValueError("an atlas needs bytes that were sent; one of its panels has none")
    if strange := [name for name in parts or {} if name not in PARTS]:
        raise ValueError(f"a step has no part {strange[0]!r}; there are {', '.join(PARTS)}")
    sizes = {name: 1 + max(max(pair) for pair in flows) for name, flows in panels.items()}
    amounts = [sum(by.values()) for flows in panels.values() for by in flows.values()]
    low, high = math.log(max(min(amounts), _CONTROL)), math.log(max(*amounts, 2 * _CONTROL))
    used = [axis for axis in AXES if any(axis in by for flows in panels.values() for by in flows.values())]
    keys = [Key(OpStyle(AXIS[axis].color, "", axis), "box") for axis in used]
    keys += [Key(BETWEEN, "box"), Key(OpStyle(INK, "", "border of a host"), "line")]
    least, most = byte_count(math.exp(low)), byte_count(math.exp(high))
    keys.append(Key(OpStyle(SOFT, "", f"pale {least} or less, full {most}"), "words"))
    columns, between = len(panels), 0.42
    side = min(2.5, (WIDTH - 0.75 - between * (columns - 1)) / columns)
    right = WIDTH - 0.55 - side * columns - between * (columns - 1)
    fig, axes = new_figure(
        [side], title=title if title is not None else "who sends to whom", legend=keys, caption=caption,
        columns=columns, left=0.55, right=right, bottom=0.62 if parts is None else 1.3, head=0.32,
        between=between,
    )  # fmt: skip
    for k, (ax, (name, flows)) in enumerate(zip(axes, panels.items(), strict=True)):
        _squares(ax, flows, sizes[name], low, high, text and sizes[name] <= MOST_WITH_WORDS)
        _frame(ax, sizes[name], host, 16 if columns == 1 else 8)
        ax.annotate(name, (0, 1), (0, 5), "axes fraction", "offset points", size=SMALL + 0.5, color=INK)
        ax.set_xlabel(_crossing(flows, host), size=SMALL + 0.5)
        if k == 0:
            ax.set_ylabel("sender", size=SMALL + 0.5)
    if parts is not None:
        _bar(fig, parts)
    return fig


def _squares(ax: Axes, flows: Flows, ranks: int, low: float, high: float, words: bool) -> None:
    at: list[Box] = []
    colors = []
    for (a, b), by in flows.items():
        axis, nbytes = max(by, key=lambda name: by[name]), sum(by.values())
        depth = _PALEST + (1 - _PALEST) * (math.log(max(nbytes, math.exp(low))) - low) / (high - low or 1)
        at.append((b, a, 1, 1))
        colors.append(mix(CARD, axis_style(axis).color, min(depth, 1.0)))
        if words:
            ax.text(b + 0.5, a + 0.53, axis.split(".")[0], size=SMALL - 0.5, color=ink_on(colors[-1]),
                    ha="center", va="center", zorder=5)  # fmt: skip
    boxes(ax, at, OpStyle(SOFT, "", "bytes"), name="bytes", colors=colors, zorder=3, outline=False)


def _frame(ax: Axes, ranks: int, host: int, most: int) -> None:
    """Ground of what lies between hosts, borders of hosts, and numbers of ranks, `most` at most."""
    ax.set_xlim(0, ranks)
    ax.set_ylim(ranks, 0)
    ax.set_facecolor(BETWEEN.color)
    ax.patch.set_visible(True)
    own: list[Box] = []
    borders = []
    for first in range(0, ranks, host):
        tall = min(host, ranks - first)
        own.append((first, first, tall, tall))
        borders += [[(first, 0), (first, ranks)], [(0, first), (ranks, first)]]
    boxes(ax, own, OpStyle(CARD, "", "host"), name="hosts", zorder=1, outline=False)
    borders += [[(ranks, 0), (ranks, ranks)], [(0, ranks), (ranks, ranks)]]
    ax.add_collection(LineCollection(borders, colors=INK, linewidths=1.4, zorder=4, clip_on=False))
    every = max(1, -(-ranks // most))
    shown = range(0, ranks, every)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([r + 0.5 for r in shown], [str(r) for r in shown])
        axis.set_tick_params(length=0, labelsize=SMALL, pad=2)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _crossing(flows: Flows, host: int) -> str:
    """How much of it leaves a host."""
    whole = sum(sum(by.values()) for by in flows.values())
    over = sum(sum(by.values()) for (a, b), by in flows.items() if a // host != b // host)
    return f"receiver\n{byte_count(over)} of {byte_count(whole)} cross"


def _bar(fig: Figure, parts: Mapping[str, float]) -> None:
    """One lying bar: what a step is made of."""
    width, height = fig.get_size_inches()
    ax = fig.add_axes((0.55 / width, 0.42 / height, (WIDTH - 0.85) / width, 0.3 / height))
    total = sum(parts.values())
    scale, unit = time_unit(total)
    x, words = 0.0, []
    for name, style in PARTS.items():
        took = parts.get(name, 0.0) / scale
        if took > 0:
            boxes(ax, [(x, 0.0, took, 1.0)], style, name=name)
            words.append(f"{style.label} {number(took)}")
            x += took
    ax.set_xlim(0, x)
    ax.set_ylim(0, 1)
    ax.set_axis_off()
    told = f"a step, {unit}: {' · '.join(words)}"
    ax.annotate(told, (0, 0), (0, -4), "axes fraction", "offset points", size=SMALL, color=INK, va="top")
