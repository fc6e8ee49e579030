"""Notebook 06: where a model is cut into stages, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.lesson.programs.step_timing import falls, median_by
from hpnb.plot.canvas import SMALL, TEXT, Box, Key, boxes, new_figure, panel_title, text_inches
from hpnb.plot.curves import CurvePanel, Look, Series, curves, note
from hpnb.plot.grammar import AXIS, INK, SERIES, SOFT, STYLE, OpStyle, mix
from hpnb.plot.lanes import Lanes, chunks, draw
from hpnb.plot.timeline import describe
from hpnb.plot.training import drift
from hpnb.plot.units import number, time_unit
from hpnb.record import Timeline

_STONE = STYLE["compute"].color
KINDS: dict[str, OpStyle] = {
    "embedding": OpStyle(mix(_STONE, "#FFFFFF", 0.55), "..", "embedding"),
    "block": OpStyle(mix(_STONE, "#FFFFFF", 0.2), "", "block"),
    "head": OpStyle(mix(_STONE, "#000000", 0.25), "//", "head"),
    "loss": OpStyle(mix(_STONE, "#000000", 0.55), "", "loss"),  # dark: idle time is pale and hatched
}
CUT = OpStyle(AXIS["pp"].color, "", "cut", AXIS["pp"].line)
_TALL, _WIDE = 0.95, 0.84  # inches of a skyline, and how much of its place a bar fills
_LEFT, _RIGHT = 0.75, 0.2


class PipelineCut(NamedTuple):
    """Layers of each stage of a model, and the step of a pipeline with these stages."""

    counts: Sequence[int]
    step: Timeline


def skyline(
    costs: Sequence[float],
    cuts: Mapping[str, PipelineCut],
    kinds: Sequence[str],
    loss: float = 0.0,
    title: str = "",
    text: bool = True,
    unit: str | None = None,
) -> Figure:
    """Layers as a skyline, cut lines through it, and beneath each cut the step of a pipeline with its stages.

    Bars are as high as a layer takes long. All skylines have one scale, and all timelines another.

    Args:
        costs: seconds of each layer, forward and backward of a microbatch; the last one's with the `loss`.
            Give what the cuts were made from, such as blocks at their median.
        title: empty for how many blocks the cuts leave beside the head.
        text: False drops numbers and hatches, for a picture that moves with a slider.
        unit: for abstract times, the name of one second ("blocks"); None picks s, ms or µs.
    """
    title = title or _cuts_title(cuts)
    longest = max(cut.step.makespan for cut in cuts.values())
    scale, step_unit = (1.0, unit) if unit else time_unit(longest)
    tall, layer_unit = (1.0, unit) if unit else time_unit(max(costs))
    lanes = [Lanes(cut.step.ranks, ()) for cut in cuts.values()]
    present = [kind for kind in KINDS if kind in kinds or (kind == "loss" and loss > 0)]
    ops = [op for op in STYLE if any(e.op == op for cut in cuts.values() for e in cut.step.events)]
    box = "box" if text else "flat"
    keys = [Key(KINDS[kind], box) for kind in present] + [Key(CUT, "line")]  # type: ignore[arg-type]
    keys += [Key(STYLE[op], box) for op in [*ops, "idle"]]  # type: ignore[arg-type]
    names = {rank: f"rank {rank}" for cut in cuts.values() for rank in cut.step.ranks}
    fig, axes = new_figure([inches for lane in lanes for inches in (_TALL, lane.height)], title=title,
                           legend=keys, left=_LEFT, right=_RIGHT, gap=0.5, head=0.27)  # fmt: skip
    inch = (fig.get_figwidth() - _LEFT - _RIGHT) / (longest / scale)
    for i, (name, cut) in enumerate(cuts.items()):
        above, below = axes[2 * i : 2 * i + 2]
        words = f"{name}: {', '.join(map(str, cut.counts))} layers"
        what = "each stage" if unit else "sums of layers timed alone"
        panel_title(above, words, f"numbers: {what}, in {layer_unit}")
        _draw_layers(above, costs, kinds, loss, tall, text)
        _draw_stages(above, costs, cut, tall)
        above.set_ylabel(layer_unit or "")
        above.xaxis.set_visible(text)  # ticks are slow to draw
        two = any(len(chunks(cut.step.by_rank[rank])) > 1 for rank in cut.step.ranks)
        words = describe(cut.step) + " · light: a rank's later stage" * two
        panel_title(below, words, f"{number(cut.step.makespan / scale)} {step_unit}")
        draw(below, cut.step, lanes[i], names, scale=scale, inch=inch, text=text, exposed=False)
        below.set_xlim(0, longest / scale)
        below.xaxis.set_visible(text or i == len(cuts) - 1)
    axes[-1].set_xlabel(f"time ({step_unit})")
    return fig


def _cuts_title(cuts: Mapping[str, PipelineCut]) -> str:
    """How many blocks each cut leaves on the last stage, beside the head; of two cuts, which one fewer."""
    beside = {name: cut.counts[-1] - 1 for name, cut in cuts.items()}
    fewest, most = (pick(beside, key=beside.__getitem__) for pick in (min, max))
    if len(cuts) == 2 and beside[fewest] < beside[most]:
        cut = f"cut {fewest}" if fewest.startswith("by ") else f"{fewest} cut"
        return f"The {cut} leaves fewer blocks beside the head: {beside[fewest]}, not {beside[most]}"
    return "Blocks beside the head: " + ", ".join(f"{name} {blocks}" for name, blocks in beside.items())


def _draw_layers(
    ax: Axes, costs: Sequence[float], kinds: Sequence[str], loss: float, tall: float, text: bool
) -> None:
    """A bar a layer, all of a kind as one artist; the loss stands on the last one."""
    last = len(costs) - 1
    bare = [*costs[:-1], costs[-1] - loss]
    places = {kind: [(i, 0.0, bare[i]) for i in range(len(costs)) if kinds[i] == kind] for kind in kinds}
    if loss > 0:
        places["loss"] = [(last, bare[last], loss)]
    for kind, layers in places.items():
        at: list[Box] = [(i + (1 - _WIDE) / 2, low / tall, _WIDE, cost / tall) for i, low, cost in layers]
        boxes(ax, at, KINDS[kind], name=kind, hatch=text)
    ax.set(xlim=(0, len(costs)), ylim=(0, 1.38 * max(costs) / tall))


def _draw_stages(ax: Axes, costs: Sequence[float], cut: PipelineCut, tall: float) -> None:
    """Cut lines, whose stage each is, and what it takes: the cut's largest stage is bold."""
    ends = list(accumulate(cut.counts, initial=0))
    tallest = max(sum(costs[start:end]) for start, end in pairwise(ends)) * (1 - 1e-9)
    room = (ax.figure.get_figwidth() - _LEFT - _RIGHT) / len(costs)  # type: ignore[union-attr]
    rank_of = {e.stage: e.rank for e in cut.step.events}
    ax.vlines(ends[1:-1], 0, 1.06 * max(costs) / tall, colors=CUT.color, linestyles=CUT.line, linewidth=1.8)
    labels = []
    for stage, (start, end) in enumerate(pairwise(ends)):
        load, wide = sum(costs[start:end]), (end - start) * room
        words = number(load / tall)
        size = TEXT if text_inches(words, TEXT, "bold") < wide else SMALL - 1.0
        ax.annotate(words, ((start + end) / 2, 1.32 * max(costs) / tall), ha="center", va="top", size=size,
                    color=INK, weight="bold" if load >= tallest else "normal",
                    annotation_clip=False)  # fmt: skip
        rank = f"rank {rank_of.get(stage, stage)}"
        labels.append(rank if text_inches(rank) + 0.08 < wide else rank.replace("rank ", "r"))
    ax.set_xticks([(start + end) / 2 for start, end in pairwise(ends)], labels)
    ax.tick_params(axis="x", length=0)


def copies_of_a_tied_weight(
    losses: Mapping[str, Sequence[float]], distances: Mapping[str, Sequence[float]]
) -> Figure:
    """`hpnb.plot.drift` of training with and without the sum of a tied weight's gradients.

    Args:
        losses, distances: {"summed" or "never summed": the loss and the distance between both copies of each
            step}. The title says that losses fall and copies diverge only if they do.
    """
    fall = all(map(falls, losses.values()))
    apart = distances["never summed"]
    diverge = max(distances["summed"]) == 0 and apart[-1] > max(apart[0], 0.01)
    title = {
        (True, True): "Both losses fall; unsummed copies diverge",
        (True, False): "Both losses fall",
        (False, True): "Unsummed copies diverge",
        (False, False): "Losses, and the distance between the two copies",
    }[fall, diverge]
    return drift(losses, distances, between="the two copies", title=title)


def _last_cut_title(runs: Mapping[int, Sequence[float]]) -> str:
    best, most = min(runs, key=lambda blocks: median_by(runs[blocks], float)), max(runs)
    if best == most:
        return f"By the median, the most blocks beside the head, {most}, are fastest"
    if min(runs[most]) > max(runs[best]):
        return "Too many blocks beside the head slow every repeat"
    return f"Repeats with {most} and with {best} blocks beside the head overlap"


def last_cut(
    runs: Mapping[int, Sequence[float]],
    predicted: Sequence[float],
    marks: Mapping[str, int] | None = None,
    source: str = "measured",
) -> Figure:
    """Seconds of a step over the number of blocks on the last stage, beside the head.

    Every repeat is a small dot beside the median, so that a difference can be compared with the spread of
    the repeats. The title says whether every repeat with the most blocks is slower than every repeat of the
    fastest cut.

    `runs` are {number of blocks, ascending: seconds of each repeat}, and `marks` {a way to cut: how many
    blocks it leaves there}, of which those beyond the positions are left out.
    """
    positions = list(runs)
    repeats = [(x, seconds) for x, times in runs.items() for seconds in times]
    scale, unit = time_unit(max(*predicted, *(seconds for _, seconds in repeats)))
    medians = [median_by(times, float) / scale for times in runs.values()]  # as in StepRepeats
    look = Look(*SERIES[1])
    span = positions[-1] - positions[0] + 1
    aside = [x + 0.022 * span for x, times in runs.items() for _ in times]
    series = [
        Series("simulated from the layers", positions, [s / scale for s in predicted], Look(*SERIES[0])),
        Series(f"{source}, median", positions, medians, look, "dots"),  # a line would hide repeats
        Series("each repeat, beside its median", aside, [s / scale for _, s in repeats],
               Look(look.color, ".", look.line), "dots", "each repeat"),
    ]  # fmt: skip
    words = "blocks on the last stage, beside the head"
    panel = CurvePanel(series, f"step ({unit})", height=2.5, xlabel=words)
    fig = curves([panel], title=_last_cut_title(runs), left=0.72)
    (ax,) = fig.axes
    fastest, slowest = (pick([*(s for _, s in repeats), *predicted]) / scale for pick in (min, max))
    room = slowest - fastest
    bottom, top = fastest - 0.3 * room, slowest + 0.08 * room
    ax.set(xlim=(positions[0] - 0.04 * span, positions[-1] + 0.05 * span), ylim=(bottom, top))
    ax.set_xticks(positions)
    ax.grid(False, axis="x")
    at: dict[int, list[str]] = {}
    for name, position in (marks or {}).items():
        if positions[0] <= position <= positions[-1]:
            at.setdefault(position, []).append(name)
    foot = (fastest - 0.06 * room - bottom) / (top - bottom)  # beneath everything that is drawn
    low, high = ax.get_xlim()
    inch = ax.get_position().width * fig.get_figwidth() / (high - low)  # of a block
    taken: list[tuple[float, float, int]] = []  # left, right and top of each label, in inches and lines
    for position, ways in at.items():
        ax.axvline(position, 0, foot, color=SOFT, linestyle=":", linewidth=1.0, zorder=1.8)
        on_right = position > (positions[0] + positions[-1]) / 2
        wide = max(text_inches(way, SMALL) for way in ways) + 0.1
        left = position * inch - wide * on_right
        line = max((top for start, end, top in taken if start < left + wide and left < end), default=0)
        taken.append((left, left + wide, line + len(ways)))
        offset = (-3 if on_right else 3, 3 + 12 * line)
        note(ax, "\n".join(ways), position, 0, offset, "right" if on_right else "left")
    return fig
