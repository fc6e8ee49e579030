"""Where a model is cut, and what comes of it: layers as a skyline, cut lines through it, a timeline beneath.

    skyline    a bar a layer, as high as it takes long; above each stage what its layers take together
    timeline   the step of a pipeline that is cut there

Several cuts stand under each other, all skylines on one scale and all timelines on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Box, Key, boxes, new_figure, panel_title, text_inches
from hpnb.plot.grammar import ALARM, AXIS, INK, STYLE, OpStyle, mix
from hpnb.plot.lanes import Lanes, draw
from hpnb.plot.timeline import describe
from hpnb.plot.units import number, time_unit
from hpnb.record import Timeline

_STONE = STYLE["compute"].color
KINDS: dict[str, OpStyle] = {
    "embedding": OpStyle(mix(_STONE, "#FFFFFF", 0.55), "..", "embedding"),
    "block": OpStyle(mix(_STONE, "#FFFFFF", 0.2), "", "block"),
    "head": OpStyle(mix(_STONE, "#000000", 0.25), "//", "head"),
    "loss": OpStyle(mix(_STONE, "#FFFFFF", 0.8), "xx", "loss"),
    "layer": OpStyle(mix(_STONE, "#FFFFFF", 0.2), "", "layer"),
}
CUT = OpStyle(AXIS["pp"].color, "", "cut", "", AXIS["pp"].line)
_TALL, _WIDE = 0.95, 0.84  # inches of a skyline, and how much of its place a bar fills
_LEFT, _RIGHT = 0.75, 0.2


class Built(NamedTuple):
    """One cut, and the step that it gives.

    Attributes:
        counts: layers of each stage.
        step: of a pipeline with these stages.
    """

    counts: Sequence[int]
    step: Timeline


def skyline(
    costs: Sequence[float],
    cuts: Mapping[str, Built],
    kinds: Sequence[str] = (),
    loss: float = 0.0,
    title: str | None = None,
    caption: str = "",
    text: bool = True,
    unit: str | None = None,
) -> Figure:
    """Draw each of `cuts` through the same skyline, and its step beneath.

    Args:
        costs: seconds of each layer, forward and backward of a microbatch; the last one's with the loss.
        kinds: of each layer, of KINDS; "layer" where nothing is said.
        loss: how many seconds of the last layer are the loss.
        caption: a sentence beneath everything.
        text: False drops numbers and hatches, for a picture that moves with a slider.
        unit: for abstract times, the name of one second ("blocks"); None picks s, ms or µs.

    Raises:
        ValueError: no cut, or one that is not of these layers; a kind that is not in KINDS.
    """
    kinds = list(kinds) or ["layer"] * len(costs)
    _check(costs, cuts, kinds, loss)
    scale, unit_of_step = (
        (1.0, unit) if unit else time_unit(max(built.step.makespan for built in cuts.values()))
    )
    tall, unit_of_layer = (1.0, unit) if unit else time_unit(max(costs))
    lanes = [Lanes(built.step.ranks, ()) for built in cuts.values()]
    heights = [each for lane in lanes for each in (_TALL, lane.height)]
    present = [kind for kind in KINDS if kind in kinds or (kind == "loss" and loss > 0)]
    ops = [op for op in STYLE if any(e.op == op for built in cuts.values() for e in built.step.events)]
    keys = [Key(KINDS[kind], "box" if text else "flat") for kind in present] + [Key(CUT, "line")]
    keys += [Key(STYLE[op], "box" if text else "flat") for op in [*ops, "idle"]]
    names = {rank: f"rank {rank}" for built in cuts.values() for rank in built.step.ranks}
    fig, axes = new_figure(heights, title=title or "", legend=keys, caption=caption, left=_LEFT, right=_RIGHT,
                           gap=0.5, head=0.27)  # fmt: skip
    most = max(sum(costs[a:b]) for built in cuts.values() for a, b in pairwise(_ends(built.counts)))
    longest = max(built.step.makespan for built in cuts.values()) / scale
    inch = (fig.get_figwidth() - _LEFT - _RIGHT) / longest
    for i, (name, built) in enumerate(cuts.items()):
        above, below = axes[2 * i : 2 * i + 2]
        panel_title(above, f"{name}: {_layers(built.counts)}", f"above: each stage, in {unit_of_layer}")
        _city(above, costs, kinds, loss, tall, text)
        _stages(above, costs, built, tall, most)
        above.set_ylabel(unit_of_layer)
        above.xaxis.set_visible(text)  # ticks are slow to draw
        panel_title(below, describe(built.step), f"{number(built.step.makespan / scale)} {unit_of_step}")
        draw(below, built.step, lanes[i], names, scale=scale, inch=inch, text=text, exposed=False)
        below.set_xlim(0, longest)
        below.tick_params(labelbottom=i == len(cuts) - 1)
        below.xaxis.set_visible(text or i == len(cuts) - 1)
    axes[-1].set_xlabel(f"time ({unit_of_step})")
    return fig


def _check(costs: Sequence[float], cuts: Mapping[str, Built], kinds: Sequence[str], loss: float) -> None:
    if not cuts:
        raise ValueError("a skyline without a cut shows nothing: cuts={'uniform': (counts, timeline)}")
    if len(kinds) != len(costs) or not set(kinds) <= KINDS.keys():
        raise ValueError(
            f"kinds {', '.join(kinds)} are not one for each of {len(costs)} layers, of {', '.join(KINDS)}"
        )
    for name, built in cuts.items():
        if sum(built.counts) != len(costs) or min(built.counts) < 1:
            raise ValueError(
                f"{name} cuts {sum(built.counts)} layers as {list(built.counts)}, and there are {len(costs)}"
            )
    if not 0 <= loss <= costs[-1]:
        raise ValueError(f"a loss of {loss} s is no part of the last layer's {costs[-1]} s")


def _ends(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def _layers(counts: Sequence[int]) -> str:
    return f"{', '.join(map(str, counts))} layers"


def _city(
    ax: Axes, costs: Sequence[float], kinds: Sequence[str], loss: float, tall: float, text: bool
) -> None:
    """A bar a layer, all of a kind as one artist; the loss stands on the last one."""
    last = len(costs) - 1
    for kind in dict.fromkeys(kinds):
        at: list[Box] = []
        for i, cost in enumerate(costs):
            if kinds[i] == kind:
                own = cost - loss if i == last else cost
                at.append((i + (1 - _WIDE) / 2, 0.0, _WIDE, own / tall))
        boxes(ax, at, KINDS[kind], name=kind, hatch=text)
    if loss > 0:
        top = (costs[-1] - loss) / tall
        boxes(ax, [(last + (1 - _WIDE) / 2, top, _WIDE, loss / tall)], KINDS["loss"], name="loss", hatch=text)
    ax.set_xlim(0, len(costs))
    ax.set_ylim(0, 1.35 * max(costs) / tall)


def _stages(ax: Axes, costs: Sequence[float], built: Built, tall: float, most: float) -> None:
    """Cut lines, whose stage each is, and what it takes; the largest of all in the colour of alarm."""
    ends = _ends(built.counts)
    room = (ax.figure.get_figwidth() - _LEFT - _RIGHT) / len(costs)  # type: ignore[union-attr]
    rank_of = {e.stage: e.rank for e in built.step.events}
    ax.vlines(ends[1:-1], 0, 1.3 * max(costs) / tall, colors=CUT.color, linestyles=CUT.line, linewidth=1.8)
    labels = []
    for stage, (start, end) in enumerate(pairwise(ends)):
        load, wide = sum(costs[start:end]), (end - start) * room
        largest = load >= most * (1 - 1e-9)
        words = number(load / tall)
        size = TEXT if text_inches(words, TEXT, "bold") < wide else SMALL - 1.0
        ax.annotate(words, ((start + end) / 2, 1.32 * max(costs) / tall), ha="center", va="top", size=size,
                    color=ALARM if largest else INK, weight="bold" if largest else "normal",
                    annotation_clip=False)  # fmt: skip
        whose = f"rank {rank_of.get(stage, stage)}"
        labels.append(whose if text_inches(whose) + 0.08 < wide else whose.removeprefix("rank "))
    ax.set_xticks([(start + end) / 2 for start, end in pairwise(ends)], labels)
    ax.tick_params(axis="x", length=0)
