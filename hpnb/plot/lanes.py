"""The rows of a timeline: a compute lane for every rank, and beneath it a thin lane for every mesh axis.

    row = | compute                       the events of one op are one artist, so that a redraw is short
          | dp    thin, on a line in the axis's colour and style
          | pp

The vertical axis of a panel is in inches, so that lanes look alike in every figure.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from hpnb.plot.canvas import SMALL, TEXT, Box, boxes, panel_title, text_inches
from hpnb.plot.grammar import CATEGORY, INK, RULE, STYLE, OpStyle, axis_style, ink_on, mix, styles_of
from hpnb.record import Event, Timeline

EXPOSED = OpStyle("#000000", "////", "exposed communication: not overlapped by this rank's compute")
BETWEEN, LANE = 0.05, 0.14  # inches between rows, and of one communication lane
TOUCH = 0.018  # inches, about a pixel: gaps below it are no gaps to the eye
STRIP = 0.66  # inches at the right of a strip, for "peak 12"


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the rows of one panel lie, in inches from its top."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def compute(self) -> float:
        return max(0.15, min(0.31, 3.0 / len(self.ranks)))

    @property
    def row(self) -> float:
        return self.compute + LANE * len(self.axes) + BETWEEN

    @property
    def height(self) -> float:
        return self.row * len(self.ranks)

    @property
    def strip_height(self) -> float:
        return len(self.ranks) * max(0.14, min(0.24, 2.0 / len(self.ranks)))

    def top(self, row: int, axis: str | None = None) -> float:
        """Top of the compute lane, or of the lane of `axis`."""
        start = row * self.row + BETWEEN / 2
        return start if axis is None else start + self.compute + LANE * self.axes.index(axis)


def draw(
    ax: Axes,
    tl: Timeline,
    lanes: Lanes,
    labels: Mapping[int, str],
    *,
    scale: float,
    inch: float,
    text: bool,
    exposed: bool,
    styles: Mapping[str, OpStyle] | None = None,
) -> None:
    """Draw one panel: `scale` seconds are one unit of time, which is `inch` inches wide.

    Args:
        styles: {op: its style}, where panels must agree; by default those of `tl`.
    """
    styles = styles_of(tl.events) if styles is None else styles
    ax.set_ylim(lanes.height, 0)
    middles = [lanes.top(row) + lanes.compute / 2 for row in range(len(tl.ranks))]
    _name_rows(ax, tl, labels, middles)
    at: dict[str, list[Box]] = defaultdict(list)
    colors: dict[str, list[str]] = defaultdict(list)
    pads: list[Box] = []
    pad_colors: list[str] = []
    bare: list[Box] = []

    def box(start: float, end: float, row: int, axis: str | None) -> Box:
        x, wide = (start - tl.start) / scale, (end - start) / scale
        if axis is None:
            return x, lanes.top(row), wide, lanes.compute
        return x, lanes.top(row, axis) + 0.035, wide, LANE - 0.045

    for row, rank in enumerate(tl.ranks):
        events = tl.by_rank[rank]
        rank_chunks = chunks(events)
        for e in events:
            color = styles[e.op].color
            where = box(e.start, e.end, row, None if e.is_compute else e.axis)
            if e.is_compute and len(rank_chunks) > 1 and e.stage in rank_chunks:
                color = mix(color, "#FFFFFF", 0.62 * rank_chunks.index(e.stage) / (len(rank_chunks) - 1))
            at[e.op].append(where)
            colors[e.op].append(color)
            if not (text and e.is_compute and e.microbatch >= 0):
                continue
            size, wide = _fit(str(e.microbatch), where[2] * inch)
            if size:
                x, y = where[0] + where[2] / 2, middles[row]
                ax.text(x, y, str(e.microbatch), size=size, weight="bold", color=ink_on(color),
                        ha="center", va="center_baseline")  # fmt: skip
                if styles[e.op].hatch:  # a clear patch, so that no hatch runs through a digit
                    pads.append((x - wide / inch / 2, y - 0.075, wide / inch, 0.15))
                    pad_colors.append(color)
        if exposed:
            bare += [box(start, end, row, axis) for axis, start, end in _joined(events, TOUCH * scale / inch)]

    spans = [box(tl.start, tl.end, row, None) for row in range(len(tl.ranks))]
    idle = boxes(ax, spans, STYLE["idle"], name="idle", hatch=text, zorder=1, outline=False)
    idle.set_edgecolor(mix(RULE, "#FFFFFF", 0.25))
    for op, where_all in at.items():
        boxes(ax, where_all, styles[op], name=op, colors=colors[op], hatch=text)
    if pads:
        boxes(ax, pads, STYLE["idle"], name="pads", colors=pad_colors, hatch=False, zorder=2.5, outline=False)
    if bare:
        boxes(ax, bare, EXPOSED, name="exposed", hatch=text, zorder=2.5).set_facecolor("none")
    for axis in lanes.axes:
        style = axis_style(axis)
        ys = [lanes.top(row, axis) + LANE - 0.005 for row in range(len(tl.ranks))]
        rules = [[(0.0, y), (tl.makespan / scale, y)] for y in ys]
        ax.add_collection(
            LineCollection(rules, colors=style.color, linestyles=style.line, linewidths=1.1), False
        )
        for y in ys if axis else ():
            ax.annotate(axis, (0, y), (-4, 0), "data", "offset points", size=7.0, color=style.color,
                        ha="right", va="bottom", annotation_clip=False)  # fmt: skip


def draw_in_flight(ax: Axes, tl: Timeline, labels: Mapping[int, str], *, scale: float) -> None:
    """A step curve a rank: activations in flight, all to one scale, with the peaks in numbers.

    They count in chunks, which are microbatches if ranks have one chunk.
    """
    ax.set_ylim(len(tl.ranks), 0)
    _name_rows(ax, tl, labels, [row + 0.6 for row in range(len(tl.ranks))])
    most = max(tl.peak_in_flight(rank) for rank in tl.ranks) or 1
    outlines = []
    for row, rank in enumerate(tl.ranks):
        base, count = row + 0.95, 0
        curve = tl.in_flight(rank)
        points = [(0.0, base)]
        for i, (time, now) in enumerate(curve):
            if i + 1 < len(curve) and curve[i + 1][0] - time <= 1e-9 * tl.makespan:
                continue  # one is freed as the next is taken: no notch of zero width
            x = (time - tl.start) / scale
            points += [(x, base - 0.85 * count / most), (x, base - 0.85 * now / most)]
            count = now
        outlines.append([*points, (points[-1][0], base)])
        ax.annotate(f"peak {tl.peak_in_flight(rank)}", (1, row + 0.6), (5, 0), ("axes fraction", "data"),
                    "offset points", size=TEXT, color=INK, va="center")  # fmt: skip
    style = CATEGORY["activations"]
    pale = mix(style.color, "#FFFFFF", 0.35)
    filled = PolyCollection(outlines, facecolors=pale, edgecolors=style.edge, linewidths=0.9)
    filled.set_label("in flight")
    ax.add_collection(filled, autolim=False)
    pieces = any(len(chunks(tl.by_rank[rank])) > 1 for rank in tl.ranks)
    panel_title(ax, f"activations in flight ({'chunks' if pieces else 'microbatches'})")


def chunks(events: Sequence[Event]) -> list[int]:
    """Stages that a rank computes, in order: more than one where its share of the model is in chunks."""
    return sorted({e.stage for e in events if e.is_compute and e.stage >= 0})


def exposed_parts(events: Sequence[Event]) -> list[tuple[Event, float, float]]:
    """(communication, start, end) of every part during which the same rank computes nothing.

    A second communication at the same time hides behind the first, so no time counts twice.
    """
    starts: list[float] = []  # of disjoint busy intervals, in order of time
    ends: list[float] = []

    def add(start: float, end: float) -> list[tuple[float, float]]:
        """Make this interval busy; which parts of it were not."""
        first, last = bisect.bisect_left(ends, start), bisect.bisect_right(starts, end)
        gaps, at = [], start
        for busy_from, busy_until in zip(starts[first:last], ends[first:last], strict=True):
            if busy_from > at:
                gaps.append((at, busy_from))
            at = max(at, busy_until)
        if at < end:
            gaps.append((at, end))
        starts[first:last] = [min([start, *starts[first:last]])]
        ends[first:last] = [max([end, *ends[first:last]])]
        return gaps

    for e in events:
        if e.is_compute:
            add(e.start, e.end)
    return [(e, *gap) for e in events if not e.is_compute for gap in add(e.start, e.end)]


def _joined(events: Sequence[Event], gap: float) -> list[tuple[str, float, float]]:
    """(axis, start, end): exposed parts of one axis, as one where at most `gap` seconds lie between them.

    Outlines of hundreds of small parts would leave nothing of the hatch.
    """
    joined: list[tuple[str, float, float]] = []
    for e, start, end in sorted(exposed_parts(events), key=lambda part: (part[0].axis, part[1])):
        if joined and joined[-1][0] == e.axis and start - joined[-1][2] <= gap:
            axis, first, last = joined.pop()
            joined.append((axis, first, max(last, end)))
        else:
            joined.append((e.axis, start, end))
    return joined


def _name_rows(ax: Axes, tl: Timeline, labels: Mapping[int, str], middles: Sequence[float]) -> None:
    ax.set_yticks(middles, [labels.get(rank, f"rank {rank}") for rank in tl.ranks])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _fit(words: str, inches: float) -> tuple[float, float]:
    """(points, inches) of `words` in a rectangle `inches` wide; (0, 0) where they do not fit."""
    for size in (SMALL, 6.5):
        wide = text_inches(words, size, "bold") + 0.03
        if wide <= inches:
            return size, wide
    return 0.0, 0.0
