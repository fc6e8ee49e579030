"""Notebook 05: memory over a step, what each way of sharding costs and saves, what a larger batch buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title
from hpnb.plot.curves import (
    CurvePanel,
    Kind,
    Series,
    count,
    curves,
    log_ticks,
    looks,
    rule,
    set_ticks,
    write_values,
)
from hpnb.plot.grammar import ALARM, CATEGORY, INK, SOFT, STYLE, OpStyle
from hpnb.plot.memory import CAPACITY, draw_bands, draw_capacity
from hpnb.plot.units import byte_count, bytes_unit, number, seconds, time_unit
from hpnb.record import MemoryProfile

POINTS = 700  # of a panel: as many as it has pixels


def rivers(
    profiles: Mapping[str, MemoryProfile], capacity: float | None = None, title: str | None = None
) -> Figure:
    """Memory over time, one small panel for each way of sharding, against one capacity.

    All panels share the axis of bytes; each has a clock of its own, because recording slows some down more.

    Args:
        profiles: {name of the panel: what one rank held}.
        capacity: bytes, drawn through all panels; a peak above it is marked.

    Raises:
        ValueError: nothing to draw, or a profile without samples.
    """
    if not profiles or not all(p.samples for p in profiles.values()):
        raise ValueError(f"every profile needs samples; there are {', '.join(profiles) or 'none'}")
    top = max(*(p.peak for p in profiles.values()), capacity or 0.0, 1.0)
    size, unit = bytes_unit(top)
    categories = [name for name in CATEGORY if any(p.peak_of(name) for p in profiles.values())]
    keys = [Key(CATEGORY[name]) for name in reversed(categories)]
    if capacity is not None:
        keys.append(Key(CAPACITY, "line", f"budget {byte_count(capacity)}"))
    heading = title if title is not None else "who holds memory during a step"
    columns = min(2, len(profiles))
    fig, axes = new_figure([1.5] * -(-len(profiles) // columns), title=heading, legend=keys, columns=columns,
                           left=0.62, gap=0.72, between=0.3, head=0.3)  # fmt: skip
    for i, (ax, (name, profile)) in enumerate(zip(axes, profiles.items(), strict=False)):
        first, last = profile.samples[0].time, profile.samples[-1].time
        scale, clock = time_unit(last - first)
        draw_bands(ax, profile, categories, first, scale, size, POINTS)
        if capacity is not None:
            draw_capacity(ax, capacity, size)
        color = ALARM if profile.peak > (capacity or profile.peak) else INK
        ax.get_lines()[1].set_color(color)  # the mark at the peak
        panel_title(ax, name)
        ax.annotate(byte_count(profile.peak), (1, 1), (0, 4), "axes fraction", "offset points", ha="right",
                    size=SMALL, weight="bold", color=color)  # fmt: skip
        ax.set(xlim=(0, (last - first) / scale or 1.0), ylim=(0, top / size * 1.12))
        ax.set_xlabel(f"time ({clock})", labelpad=1)
        ax.set_ylabel("" if i % columns else f"memory ({unit})")
        ax.tick_params(labelleft=i % columns == 0)
    for ax in axes[len(profiles) :]:
        ax.set_visible(False)
    return fig


Points = Mapping[str, tuple[float, float]]  # {name: (seconds, bytes)}


def frontier(
    predicted: Mapping[str, Points],
    measured: Mapping[str, Points],
    capacity: float | None = None,
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Step time against peak memory: what each way of sharding costs, and what it saves.

    A family (the same way of keeping activations) has one colour and one marker; its points have names.

    Args:
        predicted, measured: {family: {name: (seconds of a step, bytes at its peak)}}.
        capacity: bytes of a device; left of it fits.
    """
    points = [point for side in (predicted, measured) for names in side.values() for point in names.values()]
    look = looks([*predicted, *measured], avoid=CAPACITY.color)
    size, unit = bytes_unit(max(held for _, held in points))
    scale, clock = time_unit(max(took for took, _ in points))
    series = []
    sides: tuple[tuple[str, Mapping[str, Points], Kind], ...] = (
        ("predicted", predicted, "hollow"),
        ("measured", measured, "line and dots"),
    )
    for side, families, kind in sides:
        for family, names in families.items():
            x, y = ([point[i] / s for point in names.values()] for i, s in ((1, size), (0, scale)))
            series.append(Series(family, x, y, look[family], kind, f"{side} {family}"))
    keys = [Key(OpStyle(look[family].color, "", family), "dot") for family in look]
    keys += [Key(OpStyle(SOFT, "", "hollow: predicted, filled: measured"), "words")]
    if capacity is not None:
        keys.append(Key(CAPACITY, "line", f"budget {byte_count(capacity)}"))
    heading = title if title is not None else "step time and peak memory"
    panel = CurvePanel(series, f"step ({clock})", height=3.1, xlabel=f"peak memory of a rank ({unit})")
    fig = curves([panel], title=heading, keys=keys, caption=caption, left=0.72, right=0.3)
    (ax,) = fig.axes
    for family, names in {**predicted, **measured}.items():
        for name, (took, held) in names.items():
            ax.annotate(name, (held / size, took / scale), (6, 6), "data", "offset points", size=SMALL,
                        color=look[family].color, zorder=6)  # fmt: skip
    right = max(*(held for _, held in points), capacity or 0.0) / size * 1.1
    ax.set(xlim=(0, right), ylim=(0, max(took for took, _ in points) / scale * 1.18))
    if capacity is not None:
        rule(ax, capacity / size, "budget", CAPACITY.color, CAPACITY.line)
        ax.axvspan(capacity / size, right, color="#FBEDE6", zorder=0, linewidth=0)
        ax.annotate("does not fit", (capacity / size, 0.03), (5, 0), ("data", "axes fraction"),
                    "offset points", size=SMALL, color=SOFT)  # fmt: skip
    return fig


SPENT: Mapping[str, OpStyle] = {
    "computing": OpStyle(STYLE["F"].color, "", "computing"),
    "computing again": OpStyle(STYLE["I"].color, "//", "computing again"),
    "exposed": OpStyle(STYLE["all_reduce"].color, "", "exposed communication"),
    "optimizer step": OpStyle(STYLE["W"].color, "..", "optimizer's step"),
    "offload": OpStyle(STYLE["send"].color, "xx", "offload"),
}


def step_bill(
    held: Mapping[str, float],
    spent: Mapping[str, float],
    capacity: float | None = None,
    title: str | None = None,
    text: bool = True,
) -> Figure:
    """A step's two bills as two bars: bytes by category against a capacity, and seconds by what takes them.

    Args:
        held: {category of memory: bytes} at the fullest moment.
        spent: {part of SPENT: seconds}; "optimizer" is its step.
        capacity: bytes of the device.
        text: False leaves the numbers in the bars out, which is quicker.
    """
    spent = {"optimizer step" if part == "optimizer" else part: took for part, took in spent.items()}
    keys = [Key(CAPACITY, "line", f"capacity {byte_count(capacity)}")] if capacity else []
    total, took = sum(held.values()), sum(spent.values())
    heading = title if title is not None else "a step: what it holds, and what it takes"
    most, words = max(total, capacity or 0.0), f"memory of a rank at its fullest, {byte_count(total)}"
    panels = [
        BarPanel({"": [Bar(held, words="")]}, "B", title=words, reach=most, inside="share", named=False),
        BarPanel({"": [Bar(spent, words="")]}, "s", title=f"seconds of a step, {seconds(took)}",
                 inside="share", named=False),
    ]  # fmt: skip
    fig = bars(panels, {**CATEGORY, **SPENT}, title=heading, more_keys=keys, left=0.25, right=0.2, text=text)
    memory = fig.axes[0]
    if capacity:
        scale = panels[0].scale
        rule(memory, capacity / scale, "capacity", CAPACITY.color, CAPACITY.line, 2.0).set_zorder(6)
        memory.set_xlim(0, most / scale * 1.06)
    return fig


def batch_wall(
    batches: Sequence[float],
    steps: Sequence[float],
    laws: Mapping[str, tuple[float, float]],
    noun: str = "rows",
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """What a larger batch buys: steps to a loss above, and beneath them the samples that they take.

        steps = fewest (1 + noise / batch)

    Left of the noise scale a line falls by half where the batch doubles: more ranks are worth their price.
    Right of it steps hardly fall, and samples rise with the batch.

    Args:
        batches, steps: measured.
        laws: {name: (fewest steps, noise scale in `noun`)}, drawn as lines with the scale marked.
    """
    look = looks(["measured", *laws])
    low, high = min(batches) / 1.3, max(batches) * 1.3
    x = np.geomspace(low, high, 80)
    panels = []
    for height, words, power in ((1.6, "steps to the loss", 0), (1.3, f"{noun} to the loss", 1)):
        dots = [s * b**power for s, b in zip(steps, batches, strict=True)]
        series = [Series("measured", batches, dots, look["measured"], "dots")]
        series += [
            Series(name, x.tolist(), (fewest * (1 + noise / x) * x**power).tolist(), look[name])
            for name, (fewest, noise) in laws.items()
        ]
        panels.append(CurvePanel(series, log="xy", height=height, title=words))
    heading = title if title is not None else "what a larger batch buys"
    fig = curves(panels, title=heading, caption=caption, gap=0.35)
    for ax in fig.axes:
        for name, (_, noise) in laws.items():
            if low < noise < high:
                rule(ax, noise, "noise scale", look[name].color)
        ax.set_xlim(low, high)
        set_ticks(ax.xaxis, batches, lambda b: number(b) if b % 1 else f"{b:,.0f}")
        log_ticks(ax.yaxis, count, (1, 2, 5))
    above, below = fig.axes
    write_values(above, batches, steps, [f"{s:,.0f}" for s in steps])
    above.tick_params(labelbottom=False)
    below.set_xlabel(f"{noun} in a batch, over all ranks")
    return fig
