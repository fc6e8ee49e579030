"""Notebook 04: who sends to whom across nodes, and what a slower link does to each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hpnb.lesson import tables
from hpnb.lesson.programs.rank_traffic import RankTraffic, bytes_between_nodes
from hpnb.lesson.programs.vit_hybrid import RankParts
from hpnb.mesh import AXES, Layout
from hpnb.placement import Placement
from hpnb.plot.canvas import SMALL, TEXT, WIDTH, Box, Key, boxes, new_figure, text_inches
from hpnb.plot.curves import CurvePanel, Look, Series, curves, set_ticks
from hpnb.plot.grammar import AXIS, CARD, CATEGORY, INK, SOFT, STYLE, OpStyle, axis_style, ink_on, mix
from hpnb.plot.units import byte_count, number, time_unit

BETWEEN = OpStyle("#E4E8ED", "", "between nodes")
PARTS: dict[str, OpStyle] = {
    "compute": STYLE["compute"],
    "tp": OpStyle(AXIS["tp"].color, "..", "tp, exposed"),
    "bubble": OpStyle(mix(STYLE["idle"].color, STYLE["compute"].color, 0.12), "///", "bubble"),
    "pp": OpStyle(AXIS["pp"].color, "\\\\", "pp, exposed"),
    "dp": OpStyle(AXIS["dp"].color, "xx", "dp, exposed"),
}
MOST_WITH_WORDS = 10  # ranks: in smaller squares nothing can be read
_PALEST = 0.55
_CONTROL = 1024.0  # bytes: smaller messages count, and are drawn as palest


def atlas(
    panels: Mapping[str, RankTraffic],
    node: int,
    parts: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
    *,
    text: bool = True,
) -> Figure:
    """A square of senders (down) and receivers (across) for each panel, all in one scale of bytes.

    A square has the colour of the axis along which its bytes go: two ranks that are neighbours along an axis
    differ in that coordinate alone. It is the darker, the more bytes it stands for, in logarithms. Blocks on
    the diagonal stay on a node; everything else is sent between nodes.

    Args:
        panels: {words above: what was sent}; one to three.
        node: consecutive ranks of each node.
        parts: {words: seconds of a step, of some of PARTS}; bars beneath, in one scale. What is under half a
            per cent of the longest step is left out.
    """
    steps = list((parts or {}).values())
    sizes = {name: 1 + max(max(pair) for pair in traffic) for name, traffic in panels.items()}
    amounts = [sum(by.values()) for traffic in panels.values() for by in traffic.values()]
    low, high = math.log(max(min(amounts), _CONTROL)), math.log(max(*amounts, 2 * _CONTROL))
    used = [axis for axis in AXES if any(axis in by for panel in panels.values() for by in panel.values())]
    keys = [Key(OpStyle(AXIS[axis].color, "", axis)) for axis in used]
    keys += [Key(BETWEEN), Key(OpStyle(INK, "", "border of a node"), "line")]
    least_part = 0.005 * max((sum(step.values()) for step in steps), default=0.0)
    large = [name for name in PARTS if any(step.get(name, 0.0) > least_part for step in steps)]
    keys += [Key(PARTS[name]) for name in large]
    least, most = byte_count(math.exp(low)), byte_count(math.exp(high))
    keys.append(Key(OpStyle(SOFT, "", f"shade, log scale: pale {least} or less, full {most}"), "words"))
    columns, between = len(panels), 0.42
    side = min(2.5, (WIDTH - 0.75 - between * (columns - 1)) / columns)
    right = WIDTH - 0.55 - side * columns - between * (columns - 1)
    fig, axes = new_figure(
        [side], title=title, legend=keys, columns=columns,
        left=0.55, right=right, head=0.32, between=between,
        bottom=0.62 + 0.6 * len(steps) + 0.08 * bool(steps),
    )  # fmt: skip
    words = []
    for ax, (name, traffic) in zip(axes, panels.items(), strict=True):
        _squares(ax, traffic, low, high, text and sizes[name] <= MOST_WITH_WORDS)
        _frame(ax, sizes[name], node, 16 if columns == 1 else 8)
        ax.annotate(name, (0, 1), (0, 5), "axes fraction", "offset points", size=SMALL + 0.5, color=INK)
        summary = f"{byte_count(bytes_between_nodes(traffic, node))} between nodes"
        ax.set_xlabel(f"receiver\n{summary}", size=SMALL + 0.5)
        words.append(f"{name}: {summary}")
    axes[0].set_ylabel("sender", size=SMALL + 0.5)
    fig.set_label("; ".join(words))  # for the alt text
    for i, (name, step) in enumerate((parts or {}).items()):
        longest = max(sum(other.values()) for other in steps)
        _step_bar(fig, name, step, longest, least_part, 0.42 + 0.6 * (len(steps) - 1 - i))
    return fig


def _squares(ax: Axes, traffic: RankTraffic, low: float, high: float, words: bool) -> None:
    at: list[Box] = []
    colors = []
    for (sender, receiver), by in traffic.items():
        axis, nbytes = max(by, key=lambda name: by[name]), sum(by.values())
        depth = _PALEST + (1 - _PALEST) * (math.log(max(nbytes, math.exp(low))) - low) / (high - low or 1)
        at.append((receiver, sender, 1, 1))
        colors.append(mix(CARD, axis_style(axis).color, min(depth, 1.0)))
        if words:
            ax.text(receiver + 0.5, sender + 0.53, axis.split(".")[0], size=SMALL - 0.5,
                    color=ink_on(colors[-1]), ha="center", va="center", zorder=5)  # fmt: skip
    boxes(ax, at, OpStyle(SOFT, "", "bytes"), name="bytes", colors=colors, zorder=3, outline=False)


def _frame(ax: Axes, ranks: int, node: int, most: int) -> None:
    """The ground between nodes, the borders of nodes, and numbers of ranks, `most` at most."""
    ax.set(xlim=(0, ranks), ylim=(ranks, 0), facecolor=BETWEEN.color)
    ax.patch.set_visible(True)
    firsts = range(0, ranks, node)
    nodes: list[Box] = [(f, f, min(node, ranks - f), min(node, ranks - f)) for f in firsts]
    borders = [line for f in (*firsts, ranks) for line in ([(f, 0), (f, ranks)], [(0, f), (ranks, f)])]
    boxes(ax, nodes, OpStyle(CARD, "", "node"), name="nodes", zorder=1, outline=False)
    ax.add_collection(LineCollection(borders, colors=INK, linewidths=1.4, zorder=4, clip_on=False))
    shown = range(0, ranks, max(1, -(-ranks // most)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([r + 0.5 for r in shown], [str(r) for r in shown])
        axis.set_tick_params(length=0, labelsize=SMALL, pad=2)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _step_bar(
    fig: Figure, step: str, parts: Mapping[str, float], longest: float, least: float, bottom: float
) -> None:
    """One lying bar, `bottom` inches up: what a step is made of, its parts over `least` seconds."""
    width, height = fig.get_size_inches()
    ax = fig.add_axes((0.55 / width, bottom / height, (WIDTH - 0.85) / width, 0.3 / height))
    scale, unit = time_unit(longest)
    x, words = 0.0, []
    for name, style in PARTS.items():
        if (took := parts.get(name, 0.0) / scale) > least / scale:
            boxes(ax, [(x, 0.0, took, 1.0)], style, name=name)
            words.append(f"{style.label} {number(took)}")
            x += took
    ax.set(xlim=(0, longest / scale), ylim=(0, 1))
    ax.set_axis_off()
    caption = f"a step of {step}, {unit}: {' · '.join(words)}"
    ax.annotate(caption, (0, 0), (0, -4), "axes fraction", "offset points", size=SMALL, color=INK, va="top")


def orders(steps: Mapping[str, Mapping[str, float]], goal: float, title: str) -> Figure:
    """A lying bar for each order of the axes: {part of PARTS: seconds} over its compute, all in one scale.

    A bar longer than 1.6 is cut there, and its value is written all the same. `goal` is a line.
    """
    most = 1.6
    heights = {name: sum(parts.values()) / parts["compute"] for name, parts in steps.items()}
    large = [name for name in PARTS
             if any(parts.get(name, 0.0) > 0.005 * parts["compute"] for parts in steps.values())]  # fmt: skip
    keys = [Key(PARTS[name]) for name in large]
    keys.append(Key(OpStyle(INK, "", "", ":"), "line", f"goal: {goal:g}"))
    fig, (ax,) = new_figure(
        [0.29 * len(steps)], title=title, legend=keys, left=0.3 + max(map(text_inches, steps)), right=0.75
    )
    for row, parts in enumerate(steps.values()):
        x = 0.0
        for name in large:
            took = min(parts.get(name, 0.0) / parts["compute"], most - x)
            if took > 0:
                boxes(ax, [(x, row + 0.14, took, 0.72)], PARTS[name], name=name)
                x += took
        total = sum(parts.values()) / parts["compute"]
        words = f"{total:.2f}" if total <= most else f"{total:.2f} \N{RIGHTWARDS ARROW}"
        ax.annotate(words, (most, row + 0.5), (6, 0), "data", "offset points", size=SMALL + 0.5, color=INK,
                    va="center", annotation_clip=False)  # fmt: skip
    ax.axvline(goal, color=INK, linestyle=":", linewidth=1.6, label="goal", zorder=6)
    ax.set(xlim=(0, most), ylim=(len(steps), 0))
    ax.set_yticks([row + 0.5 for row in range(len(steps))], list(steps))
    ax.tick_params(axis="y", length=0)
    ax.grid(False)
    ax.set_xlabel("step / compute")
    fig.set_label("; ".join(f"{name}: {height:.2f}" for name, height in heights.items()))  # for the alt text
    return fig


def slower_link(
    slower: Sequence[float],
    steps: Mapping[str, Sequence[float]],
    measured: Mapping[str, float],
    title: str = "",
    source: str = "measured",
) -> Figure:
    """A step of each axis over how many times slower the link is, 1 and up, both logarithmic.

    Measured steps are dots in a strip left of the curves, beside each other. A curve need not begin at its
    dot, because its messages take as long as the link says.

    Args:
        steps: {axis: simulated seconds, one for each of `slower`}.
        measured: {axis: seconds} of the steps as they ran, at 1, of which `source` says how, as in
            "measured, pp replayed".
    """
    values = [v for axis in steps.values() for v in axis] + list(measured.values())
    scale, unit = time_unit(max(values))
    series, keys, strip = [], [], slower[0] * 0.42
    at_1 = "as run" if "," in source else source  # as one word, which has room there
    for place, (axis, seconds) in enumerate(steps.items()):
        look = Look(axis_style(axis).color, "o", axis_style(axis).line)
        series.append(Series(axis, slower, [s / scale for s in seconds], look))
        keys.append(series[-1].key)
        beside = [strip * 1.2 ** (place - (len(steps) - 1) / 2)]
        series.append(Series(axis, beside, [measured[axis] / scale], look, "dots", f"{axis} {at_1}"))
    for words in (f"dots: {source}", "lines: simulated", "right: added on the slowest link"):
        keys.append(Key(OpStyle(SOFT, "", words), "words"))
    across = "bandwidth of the link between ranks"
    panel = CurvePanel(series, f"step ({unit}), log scale", "xy", 2.5, xlabel=across)
    longer = {a: f"{a}  +{tables.number(seconds[-1] - seconds[0], 's')}" for a, seconds in steps.items()}
    right = 0.35 + max(text_inches(words, TEXT, "bold") for words in longer.values())
    fig = curves([panel], title=title, keys=keys, right=right)
    (ax,) = fig.axes
    low, high = min(values) / scale / 1.25, max(values) / scale * 1.25
    ax.set(xlim=(0.2 * slower[0], slower[-1]), ylim=(low, high))
    ax.axvspan(0.2 * slower[0], slower[0], color=BETWEEN.color, linewidth=0, zorder=0)
    inches, last = fig.get_figheight() * ax.get_position().height, -math.inf
    for axis, seconds in sorted(steps.items(), key=lambda item: item[1][-1]):  # words never cover each other
        last = max(math.log(seconds[-1] / scale / low) / math.log(high / low) * inches, last + 0.16)
        ax.annotate(longer[axis], (1, last / inches), (6, 0), "axes fraction", "offset points", size=TEXT,
                    color=axis_style(axis).color, weight="bold", va="center",
                    annotation_clip=False)  # fmt: skip
    powers = [10.0**k for k in range(-12, 13)]
    set_ticks(ax.xaxis, [strip, *(p for p in powers if slower[0] <= p <= slower[-1])],
              lambda x: at_1 if x == strip else "this link" if x == 1 else f"1/{x:,.0f}")  # fmt: skip
    ticks = [p * m for p in powers for m in (1, 1.5, 2, 3, 5, 7) if low <= p * m <= high]
    if len(ticks) > 6:
        ticks = [p * m for p in powers for m in (1, 2, 5) if low <= p * m <= high]
    set_ticks(ax.yaxis, ticks[:: -(-len(ticks) // 7)], "{:g}".format)
    return fig


SHARDED = OpStyle(AXIS["tp"].color, "", "shard along tp")
IN_FULL = OpStyle(CATEGORY["parameters"].color, "", "in full")
SAMPLES = OpStyle(AXIS["dp"].color, "", "samples of the replica")
ELSEWHERE = OpStyle(STYLE["idle"].color, "", "on other ranks")
_COLUMNS = {  # {a parameter's name without its block: what a column calls it}
    "samples": "samples",
    "vit.embeddings.patch_embeddings.projection.weight": "patches",
    "vit.embeddings.position_embeddings": "positions",
    "layernorm_before.weight": "norm",
    "attention.q_proj.weight": "Q, K, V",  # three of the same shape and placement
    "attention.o_proj.weight": "out",
    "layernorm_after.weight": "norm",
    "mlp.fc1.weight": "up",
    "mlp.fc2.weight": "down",
    "vit.layernorm.weight": "norm",
    "classifier.weight": "head",
}


def stored_parts(ranks: Sequence[RankParts], layout: Layout, title: str = "") -> Figure:
    """A row for each rank of `layout`, a box for each weight of a ViT: filled is what the rank holds of it.

    A matrix is drawn as in x A, inputs down and outputs across; a norm is a line. Biases are left out, and a
    number right of the row counts all elements that the rank holds.
    """
    names = list(dict.fromkeys(p.name for rank in ranks for p in rank.placements))
    blocks = sorted({name.split(".")[2] for name in names if name.startswith("vit.layers.")}, key=int)
    groups = {"": ["samples"], "embeddings": [n for n in _COLUMNS if n.startswith("vit.embeddings")]}
    inside = [n for n in _COLUMNS if not n.startswith(("samples", "vit.", "classifier"))]
    groups |= {f"block {block}": [f"vit.layers.{block}.{name}" for name in inside] for block in blocks}
    groups["end"] = ["vit.layernorm.weight", "classifier.weight"]
    at: dict[str, float] = {}
    x = 0.2
    for members in groups.values():
        for name in members:
            at[name], x = x, x + 1.0
        x += 0.7
    pitch, between = 1.3, 0.6  # of rows, and more between replicas, in widths of a box and its gap
    tops = [pitch * r + between * layout.coordinates(r)["dp"] for r in range(len(ranks))]
    keys = [Key(style) for style in (SAMPLES, IN_FULL, SHARDED, ELSEWHERE)]
    left, right = 1.62, 0.74
    unit = (WIDTH - left - right) / x
    fig, (ax,) = new_figure(
        [unit * (tops[-1] + pitch)], title=title,
        legend=keys, left=left, right=right, head=0.84, bottom=0.12,
    )  # fmt: skip
    filled: dict[str, list[Box]] = {style.label: [] for style in (ELSEWHERE, SAMPLES, IN_FULL, SHARDED)}
    words = []
    for r, (rank, top) in enumerate(zip(ranks, tops, strict=True)):
        placed = {p.name: p for p in rank.placements}
        first, after, total = rank.samples
        for name, column in at.items():
            thin = name.endswith(("layernorm.weight", "before.weight", "after.weight"))
            box = (column, top + 0.33, 0.84, 0.18) if thin else (column, top, 0.84, 0.84)
            filled[ELSEWHERE.label].append(box)
            if name == "samples":
                filled[SAMPLES.label].append(_inside(box, (0, 1), (first / total, after / total)))
            elif name in placed:
                across, down, sharded = _stored_shares(placed[name])
                filled[(SHARDED if sharded else IN_FULL).label].append(_inside(box, across, down))
        count = sum(math.prod(p.local_shape) for p in rank.placements)
        place = ", ".join(f"{axis} {index}" for axis, index in layout.coordinates(r).items())
        _beside(ax, f"rank {r}", (0, top + 0.42), -left * 72 + 12, "left", INK)
        _beside(ax, place, (0, top + 0.42), -5, "right", SOFT)
        _beside(ax, f"{count:,}", (1, top + 0.42), right * 72 - 12, "right", INK)
        words.append(f"rank {r}: {place}, samples {first} to {after - 1}, {count} weights")
    for style in (ELSEWHERE, SAMPLES, IN_FULL, SHARDED):
        boxes(ax, filled[style.label], style, name=style.label, zorder=2 + (style is not ELSEWHERE))
    for group, members in groups.items():
        middle = (at[members[0]] + at[members[-1]] + 0.84) / 2
        _above(ax, group, middle, 46, INK)
        for name in members:
            label = next((short for end, short in _COLUMNS.items() if name.endswith(end)), "")
            _above(ax, label, at[name] + 0.42, 3, SOFT, 90)
    _beside(ax, "weights", (1, 0), right * 72 - 12, "right", SOFT, up=8)
    ax.set(xlim=(0, x), ylim=(tops[-1] + pitch, 0))
    ax.set_axis_off()
    fig.set_label("; ".join(words))  # for the alt text
    return fig


def _stored_shares(placement: Placement) -> tuple[tuple[float, float], tuple[float, float], bool]:
    """(outputs, inputs) that a rank holds of a weight, as shares from 0 to 1, and whether tp shards it."""
    shares = {0: (0.0, 1.0), 1: (0.0, 1.0)}
    cuts = [cut for cut in placement.cuts if cut.axis == "tp"]
    for cut in cuts:
        size = placement.shape[cut.dim]
        shares[cut.dim] = (cut.ranges[0][0] / size, cut.ranges[-1][1] / size)
    return shares[0], shares[1], bool(cuts)


def _inside(box: Box, across: tuple[float, float], down: tuple[float, float]) -> Box:
    x, y, w, h = box
    return (x + w * across[0], y + h * down[0], w * (across[1] - across[0]), h * (down[1] - down[0]))


def _beside(
    ax: Axes, words: str, at: tuple[float, float], points: float, ha: str, color: str, up: float = 0.0
) -> None:
    """Words in a margin: x as a share of the axes, y in its units, `points` to the right of that."""
    ax.annotate(words, at, (points, up), ax.get_yaxis_transform(), "offset points", size=SMALL, color=color,
                ha=ha, va="center", annotation_clip=False)  # fmt: skip


def _above(ax: Axes, words: str, x: float, points: float, color: str, rotation: float = 0.0) -> None:
    ax.annotate(words, (x, 1), (0, points), ax.get_xaxis_transform(), "offset points", size=SMALL,
                color=color, ha="center", va="bottom", rotation=rotation, annotation_clip=False)  # fmt: skip
