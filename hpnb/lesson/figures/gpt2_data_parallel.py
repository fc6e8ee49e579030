"""Notebook 05: memory over a step, and step time by configuration, tokens and link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from statistics import median
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from hpnb.lesson.programs.gpt2_zero_predictions import ZeroConfig, gather_timeline
from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title
from hpnb.plot.curves import CurvePanel, Series, count, curves, log_ticks, looks, note, rule
from hpnb.plot.grammar import ALARM, CATEGORY, INK, SOFT, STYLE, OpStyle, mix
from hpnb.plot.memory import CAPACITY, draw_bands, draw_capacity
from hpnb.plot.timeline import timeline
from hpnb.plot.units import byte_count, bytes_unit, seconds, time_unit
from hpnb.record import MemoryProfile
from hpnb.theory import LINKS, GatherTimeline

MARKED_LINKS = ("Ethernet 100 Gb", "InfiniBand NDR")
POINTS = 700  # of a panel: as many as it has pixels


def _rivers_title(profiles: Mapping[ZeroConfig, MemoryProfile]) -> str:
    """Whether each higher ZeRO stage has fewer bytes of states, and whether recomputation has fewer of
    activations, of pairs of configurations that are otherwise the same.
    """
    most = {
        c: {
            "states": max(s.parameters + s.gradients + s.optimizer for s in profile.samples),
            "activations": profile.peak_of("activations"),
        }
        for c, profile in profiles.items()
    }
    pairs = [(a, b) for a, b in permutations(profiles, 2) if a.offload == b.offload]
    sharded = [(a, b) for a, b in pairs if a.stage < b.stage and a.recompute == b.recompute]
    recomputed = [(a, b) for a, b in pairs if a.stage == b.stage and b.recompute and not a.recompute]
    shrinks = {
        "ZeRO": bool(sharded) and all(most[b]["states"] < most[a]["states"] for a, b in sharded),
        "recomputation": bool(recomputed)
        and all(most[b]["activations"] < most[a]["activations"] for a, b in recomputed),
    }
    if all(shrinks.values()):
        return "ZeRO shrinks states, recomputation activations · measured"
    if shrinks["ZeRO"]:
        return "ZeRO shrinks states · measured"
    return "Recomputation shrinks activations · measured" if shrinks["recomputation"] else "Memory · measured"


def rivers(profiles: Mapping[ZeroConfig, MemoryProfile], capacity: float | None = None) -> Figure:
    """Memory over time of one rank, one small panel for each configuration, against one capacity in bytes.

    All panels share the axis of bytes and the unit of time; each has a clock of its own, because recording
    slows some down more. A peak above the capacity is marked. The title says what ZeRO and recomputation
    shrink, if they do so for every pair of configurations that differ in nothing else.
    """
    top = max(*(p.peak for p in profiles.values()), capacity or 0.0, 1.0)
    size, unit = bytes_unit(top)
    categories = [name for name in CATEGORY if any(p.peak_of(name) for p in profiles.values())]
    keys = [Key(CATEGORY[name]) for name in reversed(categories)]
    keys.append(Key(OpStyle(SOFT, "", "triangle: the peak, in orange above the budget"), "words"))
    if capacity is not None:
        keys.append(Key(CAPACITY, "line", f"budget {byte_count(capacity)}"))
    columns = min(2, len(profiles))
    scale, clock = time_unit(max(p.samples[-1].time - p.samples[0].time for p in profiles.values()))
    fig, axes = new_figure([1.5] * -(-len(profiles) // columns), title=_rivers_title(profiles), legend=keys,
                           columns=columns, left=0.62, gap=0.72, between=0.3, head=0.3)  # fmt: skip
    for i, (ax, (config, profile)) in enumerate(zip(axes, profiles.items(), strict=False)):
        first, last = profile.samples[0].time, profile.samples[-1].time
        draw_bands(ax, profile, categories, first, scale, size, POINTS)
        if capacity is not None:
            draw_capacity(ax, capacity, size)
        color = ALARM if profile.peak > (capacity or profile.peak) else INK
        mark = ax.get_lines()[1]  # at the peak, lifted so that its tip stands on it
        mark.set_color(color)
        mark.set_transform(ax.transData + ScaledTranslation(0, 4 / 72, fig.dpi_scale_trans))
        panel_title(ax, str(config))
        ax.annotate(byte_count(profile.peak), (1, 1), (0, 4), "axes fraction", "offset points", ha="right",
                    size=SMALL, weight="bold", color=color)  # fmt: skip
        ax.set(xlim=(0, (last - first) / scale or 1.0), ylim=(0, top / size * 1.15))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.set_xlabel(f"time ({clock})", labelpad=1)
        ax.set_ylabel("" if i % columns else f"memory ({unit})")
        ax.tick_params(labelleft=i % columns == 0)
    for ax in axes[len(profiles) :]:
        ax.set_visible(False)
    return fig


def zero_frontier(
    peaks: Mapping[Any, float],
    took: Mapping[Any, tuple[float, float, float]],
    capacity: float,
    source: str = "measured",
) -> Figure:
    """Step time against peak memory of ZeRO configurations, one colour for each way to keep activations.

    `took` has seconds of the fastest, the median and the slowest step. Left of the capacity, a GPU's, fits.
    """
    size, unit = bytes_unit(max(peaks.values()))
    scale, clock = time_unit(max(slowest for *_, slowest in took.values()))
    families: dict[str, list[Any]] = {}
    for config in took:
        family = "activations stored"
        if config.recompute:
            family = "recomputed and offloaded" if config.offload else "activations recomputed"
        families.setdefault(family, []).append(config)
    look = looks(families, avoid=CAPACITY.color)
    series = []
    for name, configs in families.items():
        x, y = [peaks[c] / size for c in configs], [took[c][1] / scale for c in configs]
        series.append(Series(name, x, y, look[name], "dots"))
    marks = "number: ZeRO stage, line: fastest to slowest step, unless the mark hides it"
    more = [
        Key(OpStyle(SOFT, "", marks), "words"),
        Key(CAPACITY, "line", f"budget {byte_count(capacity)}"),
    ]
    low, high = (edge(s for spread in took.values() for s in spread) / scale for edge in (min, max))
    log: Literal["y", ""] = "y" if high > 3 * low else ""  # else quick steps would lie on each other
    words = f"step ({clock}), log scale" if log else f"step ({clock})"
    panel = CurvePanel(series, words, log, 2.9, xlabel=f"peak memory of a rank ({unit})")
    title = f"Peak memory and median step time of every configuration · {source}"
    fig = curves([panel], title=title, more_keys=more, left=0.72, right=0.3)
    (ax,) = fig.axes
    for family, configs in families.items():
        above = family == "activations stored"  # the others have their numbers beneath
        for c in configs:
            fastest, _, slowest = (s / scale for s in took[c])
            at, color = peaks[c] / size, look[family].color
            ax.vlines(at, fastest, slowest, color=color, linewidth=1.2, zorder=2.5)
            end, offset, side = (slowest, (-4, 2), "bottom") if above else (fastest, (4, -2), "top")
            ax.annotate(str(c.stage), (at, end), offset, "data", "offset points", ha="center", va=side,
                        size=SMALL, color=color, zorder=6)  # fmt: skip
    right = max(*peaks.values(), capacity) / size * 1.1
    ax.set(xlim=(0, right), ylim=(low / 1.3, high * 1.2) if log else (0, high * 1.15))
    if log:
        log_ticks(ax.yaxis, "{:g}".format, (1, 1.5, 2, 3, 5, 7))
    rule(ax, capacity / size, "budget", CAPACITY.color, CAPACITY.line)
    ax.axvspan(capacity / size, right, color="#FBEDE6", zorder=0, linewidth=0)
    ax.annotate("does not fit", (capacity / size, 0.03), (5, 0), ("data", "axes fraction"), "offset points",
                size=SMALL, color=SOFT)  # fmt: skip
    return fig


SPENT: Mapping[str, OpStyle] = {
    "computing": OpStyle(STYLE["F"].color, "", "computing"),
    "recomputation": OpStyle(STYLE["I"].color, "//", "recomputation"),
    "exposed": OpStyle(STYLE["all_reduce"].color, "", "exposed communication"),
    "optimizer step": OpStyle(STYLE["W"].color, "..", "update"),
    "offload": OpStyle(STYLE["send"].color, "xx", "offload"),
}


PARTS: Mapping[str, OpStyle] = {
    "before the update": OpStyle(STYLE["F"].color, "", "forward, backward and communication"),
    "update": OpStyle(STYLE["W"].color, "..", "update"),
    "exposed after the update": OpStyle(
        mix(STYLE["send"].color, INK, 0.35), "xx", "exposed after the update"
    ),
}


def step_parts(
    predicted: Mapping[Any, Mapping[str, float]],
    measured: Mapping[Any, Mapping[str, float]],
    source: str = "measured",
) -> Figure:
    """Seconds before, in and after the update, a row a configuration: predicted, hollow, under measured.

    Before the update, a rank's exposed communication contains waiting for other ranks. So it is drawn as one
    part with forward and backward. The title names the stages that are exposed after every update, for over
    2 % of the step. `predicted` and `measured` are {ZeroConfig: the parts of a `StepMeasurement`}.
    """

    def joined(parts: Mapping[str, float]) -> dict[str, float]:
        late = {name: took for name, took in parts.items() if name in PARTS and took}
        return {"before the update": sum(parts.values()) - sum(late.values()), **late}

    rows = {
        str(name): [Bar(joined(parts)), Bar(joined(predicted[name]), hollow=True)]
        for name, parts in measured.items()
    }
    keys = [Key(OpStyle(SOFT, "", f"filled: {source}, hollow: predicted"), "words")]
    late: dict[int, bool] = {}
    for config, parts in measured.items():
        waits = parts.get("exposed after the update", 0.0) > 0.02 * sum(parts.values())
        late[config.stage] = late.get(config.stage, True) and waits
    names = [f"ZeRO-{stage}" for stage, waits in late.items() if waits]
    title = f"{' and '.join(names)} communicate{'s' * (len(names) == 1)} after the update"
    title = title if names else "Steps before, in and after the update"
    return bars([BarPanel(rows, "s", "a step ({unit})")], PARTS, more_keys=keys, title=title)


def launch_floor(
    took: Mapping[int, Sequence[float]], floor: float, slope: float, chosen: float, adds: bool
) -> Figure:
    """Seconds of a forward and backward over the tokens of a rank: a floor, then a line.

    Args:
        took: {tokens: seconds of every repeat}; the median is a point, the range a line through it.
        floor: seconds to launch all operators, whatever the tokens.
        slope: seconds a token that the device computes.
        chosen: tokens that the page trains with.
        adds: whether launching and computing add up, as on a CPU, where their sum is a line, too; on a GPU
            the longer one counts, which is the upper line.

    The title says that launching sets the time of small steps if four times the fewest tokens, or more, take
    at most a quarter longer than the floor; and that computing sets that of large ones if the last point
    takes over twice the floor.
    """
    tokens, medians = list(took), [median(seconds) for seconds in took.values()]
    scale, unit = time_unit(max(medians))
    x = np.geomspace(min(tokens), max(tokens), 80)
    total = "launching + computing"
    upper = "" if adds else "; a step takes about the longer of both, or more"
    lines = f"lines: from the lowest and the last point{upper}"
    fit = Key(OpStyle(SOFT, "", lines), "words")
    ranges = Key(OpStyle(SOFT, "", "bars: fastest to slowest repeat"), "words")
    computes = medians[-1] > 2 * floor  # else the last point does not show how long computing takes
    line = "computing" if computes else "computing, at most"
    look = looks(["measured", "launching", line, *([total] if adds else [])])
    series = [
        Series("measured", tokens, [t / scale for t in medians], look["measured"], "dots"),
        *([Series(total, x.tolist(), ((floor + slope * x) / scale).tolist(), look[total])] if adds else []),
        Series("launching", x.tolist(), [floor / scale] * len(x), look["launching"]),
        Series(line, x.tolist(), (slope * x / scale).tolist(), look[line]),
    ]
    panel = CurvePanel(
        series, f"forward and backward ({unit})", log="xy", height=2.2, xlabel="tokens of a rank"
    )
    flat = [n for n, middle in zip(tokens, medians, strict=True) if middle <= 1.25 * floor]
    launches = max(flat, default=0) >= 4 * min(tokens)
    title = {
        (True, True): "Launching sets the time of small steps, computing that of large ones",
        (True, False): "Launching sets the time of small steps",
        (False, True): "Computing sets the time of large steps",
        (False, False): "Forward and backward over the tokens of a rank",
    }[launches, computes]
    fig = curves([panel], title=title, more_keys=[fit, ranges])
    (ax,) = fig.axes
    rule(ax, chosen, "this page", SOFT)
    note(ax, "this page", chosen, 0.04, (-4, 0), "right", SOFT)
    low, high = ([edge(seconds) / scale for seconds in took.values()] for edge in (min, max))
    color = look["measured"].color
    ax.vlines(tokens, low, high, color=color, linewidth=1.2, zorder=2.5)
    ends = low + high  # marked, so that they are seen on the rule, too
    ax.scatter(tokens * 2, ends, marker="_", s=40, color=color, linewidths=1.2, zorder=2.5)
    ax.set_ylim(min(low) / 2)
    log_ticks(ax.yaxis, count, (1, 2, 5))
    log_ticks(ax.xaxis, count, (1, 2, 5))
    return fig


def prefetch_steps(
    steps: Mapping[str, GatherTimeline],
    uses: Sequence[int],
    title: str = "",
) -> Figure:
    """Simulated steps of ZeRO-3 with the same `uses`, beneath each other: computing over all-gathers.

    Without a `title` it names the steps in which only the first gather is exposed.
    """
    fitting = [name for name, step in steps.items() if step.stall <= 1e-9 * step.ends[-1]]
    names = " and ".join(fitting).capitalize()
    exposing = f"{names}, only the first gather is exposed" if fitting else "Later gathers are exposed, too"
    title = title or exposing
    timelines = [gather_timeline(step, uses, 8) for step in steps.values()]
    labels = {0: "each rank"}
    return timeline(
        *timelines, names=tuple(steps), exposed=True, bubble=None, axis_labels=labels, title=title
    )


def exposed_by_link(
    bandwidths: Sequence[float], exposed: Mapping[str, Sequence[float]], fast: float
) -> Figure:
    """Exposed communication of a step over the bandwidth of the link, a line for each ZeRO stage.

    Args:
        bandwidths: bytes/s.
        exposed: {ZeRO stage: seconds at each bandwidth}; the first bandwidth, in ascending order, at which
            the last one exposes less than the one before is marked; the title says on which links it does.
        fast: bytes/s at which the gather of a block takes as long as its forward.
    """
    scale, unit = time_unit(float(np.median([s for line in exposed.values() for s in line])))
    look = looks(exposed)
    gigabytes = [b / 1e9 for b in bandwidths]
    series = [
        Series(name, gigabytes, [s / scale for s in line], look[name]) for name, line in exposed.items()
    ]
    panel = CurvePanel(series, f"exposed ({unit})", log="xy", height=2.5,
                       xlabel="bandwidth of the link (GB/s)")  # fmt: skip
    *_, before, last = exposed
    less = [b < a for a, b in zip(exposed[before], exposed[last], strict=True)]
    where = {(True, True): "every link", (False, False): "no link"}.get((all(less), any(less)), "fast links")
    where = where if less == sorted(less) else "some links"  # fast: from one bandwidth on
    fig = curves([panel], title=f"XL, 8 GPUs: {last} exposes less than {before} on {where} · simulated")
    (ax,) = fig.axes
    crossing = {"crossing": bandwidths[less.index(True)]} if any(less) else {}
    rule(ax, fast / 1e9, "gather = forward", SOFT, "--")
    note(ax, "dashed: a gather takes", fast / 1e9, 0.9, (24, 0), color=SOFT)
    note(ax, "as long as a block's forward", fast / 1e9, 0.83, (24, 0), color=SOFT)
    for words, bandwidth in {**crossing, **{n: LINKS[n].bandwidth for n in MARKED_LINKS}}.items():
        rule(ax, bandwidth / 1e9, words, SOFT)
        right = bandwidth > crossing.get("crossing", fast)
        note(ax, words, bandwidth / 1e9, 0.06, (4 if right else -4, 0), "left" if right else "right", SOFT)
    log_ticks(ax.yaxis, count, (1,))
    log_ticks(ax.xaxis, count, (1,))
    return fig


def step_bill(
    usage: Mapping[str, float],
    spent: Mapping[str, float],
    capacity: float | None = None,
    title: str = "",
    text: bool = True,
) -> Figure:
    """Two bars for a step: bytes by category of memory at the fullest moment against a GPU's capacity, and
    seconds by part of SPENT, or "optimizer". `text` writes numbers into the bars, which takes time.
    """
    spent = {"optimizer step" if part == "optimizer" else part: took for part, took in spent.items()}
    keys = [Key(CAPACITY, "line", f"capacity {byte_count(capacity)}")] if capacity else []
    total, took = sum(usage.values()), sum(spent.values())
    most, words = max(total, capacity or 0.0), f"memory of a rank at its fullest, {byte_count(total)}"
    panels = [
        BarPanel({"": [Bar(usage, words="")]}, "B", "memory ({unit})", title=words, reach=most,
                 inside="share", named=False),
        BarPanel({"": [Bar(spent, words="")]}, "s", "time ({unit})", inside="share", named=False,
                 title=f"seconds of a step, {seconds(took)}"),
    ]  # fmt: skip
    fig = bars(panels, {**CATEGORY, **SPENT}, title=title, more_keys=keys, left=0.25, right=0.2, text=text)
    memory = fig.axes[0]
    if capacity:
        scale = panels[0].scale
        rule(memory, capacity / scale, "capacity", CAPACITY.color, CAPACITY.line, 2.0).set_zorder(6)
        memory.set_xlim(0, most / scale * 1.06)
    return fig
