"""What a slower wire does to each axis: how many times slower, against the step, in logarithms.

line     the recorded step on that wire, simulated
dot      as it ran, on the wire at hand
foot     what computing alone would take
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from hpnb.plot.canvas import TEXT, WIDTH, Key, new_figure, text_inches
from hpnb.plot.grammar import INK, RULE, SOFT, OpStyle, axis_style
from hpnb.plot.units import number, time_unit


def slow_wire(
    slower: Sequence[float],
    steps: Mapping[str, Sequence[float]],
    measured: Mapping[str, float] | None = None,
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw a line for each axis over how many times slower the wire is.

    Args:
        slower: 1 and up, ascending.
        steps: {axis: seconds, one for each of `slower`}.
        measured: {axis: seconds} of the steps as they ran, at 1.
        caption: a sentence beneath the axes.

    Raises:
        ValueError: nothing to draw, or numbers that have no logarithm or do not fit.
    """
    if len(slower) < 2 or not steps or any(not 0 < x < math.inf for x in slower):
        raise ValueError(
            f"{len(steps)} axes over {list(slower)} times: two numbers above 0 or more are needed"
        )
    for name, values in steps.items():
        if len(values) != len(slower) or not all(0 < v < math.inf for v in values):
            raise ValueError(
                f"{name} holds {list(values)} for {len(slower)} wires: seconds above 0, one each"
            )
    scale, unit = time_unit(max(max(values) for values in steps.values()))
    keys = [Key(axis_style(name), "line", name) for name in steps]
    if measured:
        keys.append(Key(OpStyle(SOFT, "", "as it ran"), "dot"))
    right = 0.35 + max(text_inches(f"tp  {number(slower[-1])}x") for _ in steps)
    heading = title if title is not None else "a step on a slower wire"
    fig, (ax,) = new_figure(
        [2.5], title=heading, legend=keys, caption=caption, left=0.8, right=right, head=0.2
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ends = []
    for name, values in steps.items():
        style = axis_style(name)
        (line,) = ax.plot(slower, [v / scale for v in values], color=style.color, linestyle=style.line)
        line.set(label=name, linewidth=2.4)
        ends.append((values[-1] / scale, f"{name}  {number(values[-1] / values[0])}x", style.color))
        if measured and name in measured:
            (dot,) = ax.plot([slower[0]], [measured[name] / scale], "o", color=style.color, markersize=6.5)
            dot.set(label=f"{name} as it ran", clip_on=False, zorder=4)
    tops = [v / scale for values in steps.values() for v in values]
    tops += [v / scale for v in (measured or {}).values()]
    low, high = min(tops) / 1.25, max(tops) * 1.25
    ax.set_xlim(slower[0], slower[-1])
    ax.set_ylim(low, high)
    inches = fig.get_figheight() * ax.get_position().height
    last = -math.inf
    for value, words, color in sorted(ends):  # words at the ends of lines, never one on the other
        y = max(math.log(value / low) / math.log(high / low) * inches, last + 0.16)
        last = y
        ax.annotate(words, (1, y / inches), (6, 0), "axes fraction", "offset points", size=TEXT, color=color,
                    weight="bold", va="center", annotation_clip=False)  # fmt: skip
    powers = [
        10.0**k for k in range(math.floor(math.log10(slower[0])), math.ceil(math.log10(slower[-1])) + 1)
    ]
    ax.xaxis.set_major_locator(FixedLocator([p for p in powers if slower[0] <= p <= slower[-1]]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "this wire" if x == 1 else f"1/{x:,.0f}"))
    span = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**k for k in span for m in (1, 1.5, 2, 3, 5, 7)]
    ticks = [t for t in ticks if low <= t <= high]
    if len(ticks) > 6:
        ticks = [t for t in ticks if f"{t:e}"[0:3] in ("1.0", "2.0", "5.0")]
    ax.yaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 7)]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    ax.grid(True, color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlabel("bandwidth of the wire between ranks", size=TEXT, color=INK)
    ax.set_ylabel(f"step ({unit})")
    assert fig.get_figwidth() == WIDTH
    return fig
