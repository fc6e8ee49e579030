"""Names beside dots that may stand in a crowd.

Every name has many places, at its dot or further away with a line that leads to it. A place costs what it
covers, what it may be mistaken for, and its distance; two places that overlap or whose lines cross cost most.
One name after the other takes its cheapest place, in several orders, and the cheapest outcome is drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import offset_copy
from numpy.typing import NDArray

from hpnb.plot.canvas import SMALL, text_inches
from hpnb.plot.grammar import INK, SOFT

_FAR = 120  # points that a picked name may be from its dot, at least
_APART = 14.0  # points between two names on a line, or they read as one
_LONG = 24  # characters of a name, with more of which it is in two lines
_PLACES = 150  # for a name, of which one is chosen
_ORDERS = 16  # in which names choose
_COVERS = 1.0  # what a name costs for each mark that it covers

Array = NDArray[Any]
Point = tuple[float, float]
Rect = tuple[float, float, float, float]  # left, low, right, high


def along(start: Point, end: Point) -> list[Point]:
    """Points of a straight line."""
    return [
        (start[0] + k / 40 * (end[0] - start[0]), start[1] + k / 40 * (end[1] - start[1])) for k in range(41)
    ]


def name_dots(
    ax: Axes,
    points: Mapping[str, Point],
    series: tuple[Mapping[str, Point], Mapping[str, Point]],
    marks: Sequence[Point],
    picks: Mapping[str, str],
    reach: float,
    wall: float | None,
) -> None:
    """Write the names beside their dots.

    Args:
        points: {name: where its dot is}, of the first series, or of any dot under a name that no series has.
        series: all dots, and where there are, those that a line joins with the dots of the same name.
        marks: what names should not cover.
        picks: {name: what it was picked as}, in bold above its name; these have rings.
        reach: points that a name may be from its dot. With a short one a name without room is left out.
        wall: an x; a name stays on its dot's side.
    """
    (left, right), (low, high), place = ax.get_xlim(), ax.get_ylim(), ax.get_position()
    fig_inches = ax.figure.get_size_inches()  # type: ignore[union-attr]
    wide, tall = place.width * fig_inches[0] * 72, place.height * fig_inches[1] * 72

    def in_points(mark: Point) -> Point:
        return (mark[0] - left) / (right - left) * wide, (mark[1] - low) / (high - low) * tall

    dots = {name: in_points(point) for name, point in points.items()}
    taken: list[Rect] = [(x - 5, y - 4, x + 5, y + 4) for x, y in map(in_points, marks)]
    for x, y in (dots[name] for name in picks):  # the rings
        turns = [math.pi * k / 8 for k in range(16)]
        around = [(x + 8 * math.cos(turn), y + 8 * math.sin(turn)) for turn in turns]
        taken += [(a - 1, b - 1, a + 1, b + 1) for a, b in around]
    border = None if wall is None else in_points((wall, low))[0]
    first, second = series
    lines = [(in_points(first[n]), in_points(second[n])) for n in first.keys() & second.keys()]
    texts, spots = {}, {}
    for name in points:
        words, length, depth = _words_of(name, picks)
        near = (max(reach, _FAR), 12) if name in picks else (reach, 7)
        others = [in_points(side[n]) for side in series for n in side if n != name]
        if name not in first:  # its dot is in a series under another name
            others = [other for other in others if other != dots[name]]
        best = _spots(dots[name], (length, depth), near, (wide, tall), taken, others, lines, border)
        if best is not None:
            texts[name], spots[name] = words, best
    for name, k in _choose_spots(spots, dots).items():
        at = spots[name]
        if at.cost[k] >= _COVERS and name not in picks and reach < _FAR:
            continue  # no room: the table has it
        (x, y), (box_left, box_low, *_) = dots[name], at.boxes[k]
        where = offset_copy(ax.transData, ax.figure, box_left - x, box_low - y, units="points")  # type: ignore[arg-type]
        weight, color = ("bold", INK) if name in picks else ("normal", SOFT)
        ax.text(*points[name], texts[name], size=SMALL, weight=weight, color=color, zorder=6,
                transform=where, linespacing=1.1, va="bottom").set_gid(f"name of {name}")  # fmt: skip
        if at.threads[k]:
            stop = 1 - 2 / math.dist((x, y), at.ends[k])  # it ends before the words
            end = [a + stop * (b - a) for a, b in zip((x, y), at.ends[k], strict=True)]
            far = (left + end[0] / wide * (right - left), low + end[1] / tall * (high - low))
            ax.plot(*zip(points[name], far, strict=True), color=SOFT, linewidth=0.7, zorder=2)


def _words_of(name: str, picks: Mapping[str, str]) -> tuple[str, float, float]:
    """The words of a dot, in lines, and how long and tall they are, in points."""
    pieces = name.split(", ") if name in picks else name.rsplit(", ", 1)
    words = ",\n".join(pieces) if len(name) > (14 if name in picks else _LONG) else name
    words = f"{picks[name]}:\n{words}" if picks.get(name) else words
    weight = "bold" if name in picks else "normal"
    length = max(72 * text_inches(line, SMALL, weight) for line in words.split("\n"))
    return words, length, 10.3 * (1 + words.count("\n")) + 1


@dataclass(frozen=True)
class _Spots:
    """Where the words of one dot may be: `boxes` (n, 4), and `ends` (n, 2) where a line from the dot would
    meet them.

    `threads` (n,) says whether they are so far away that they need the line, and `cost` (n,) what they and
    their line cover or may be mistaken for, and the distance.
    """

    boxes: Array
    ends: Array
    threads: Array
    cost: Array


def _spots(
    dot: Point,
    size: Point,
    near: Point,
    room: Point,
    taken: Sequence[Rect],
    others: Sequence[Point],
    lines: Sequence[tuple[Point, Point]],
    border: float | None,
) -> _Spots | None:
    """The best places for words of `size` within reach (`near`, and what the dot fills) and inside the axes.
    They should keep off what is `taken`, off `others`, dots of other names, and off `lines` between dots."""
    x, (length, depth) = dot[0], size
    flush = [] if border is None else [border - 4 - length - x if x < border else border + 4 - x]
    corners = np.asarray(_offsets(length, depth, *near, flush)) + dot
    boxes = np.concatenate([corners, corners + size], 1)
    inside = (boxes[:, :2] > 0).all(1) & (boxes[:, 2] < room[0] + 10) & (boxes[:, 3] < room[1] + 4)
    boxes = boxes[inside]
    if not len(boxes):
        return None
    ends = np.clip(dot, boxes[:, :2], boxes[:, 2:])
    gap = np.linalg.norm(ends - dot, axis=1)
    threads = gap > near[1] + 5
    cost = _COVERS * _overlaps(boxes, taken).sum(1) + 0.08 * gap + np.where(threads, 2.0, 0.0)
    if others:
        dots = np.asarray(others)
        nearest = np.clip(dots[None], boxes[:, None, :2], boxes[:, None, 2:])
        apart = np.linalg.norm(nearest - dots[None], axis=2).min(1)
        mistaken = np.where(threads, apart < 10, apart < gap + 3)
        along = _points_of(dot, ends)  # (n, 41, 2)
        passed = np.linalg.norm(along[:, :, None] - dots, axis=3).min(1) < 5  # (n, others)
        cost += 40.0 * mistaken + 20.0 * (passed.sum(1) * threads)
    for a, b in lines:
        if min(math.dist(dot, a), math.dist(dot, b)) > 1:  # not of this dot
            cost += 4.0 * (threads & _cross(dot, ends, a, np.asarray(b)))
        else:  # of this dot, and a line to its name would lie on it
            beside = np.linalg.norm(_points_of(dot, ends) - np.asarray(b), axis=2).min(1) < 6
            cost += 10.0 * (threads & beside)
    if border is not None:
        beyond = boxes[:, 2] > border if x < border else boxes[:, 0] < border
        cost += 20.0 * beyond
    best = np.argsort(cost, kind="stable")[:_PLACES]
    return _Spots(boxes[best], ends[best], threads[best], cost[best])


def _choose_spots(spots: Mapping[str, _Spots], dots: Mapping[str, Point]) -> dict[str, int]:
    """A place for each: one after the other in several orders, then again as long as that helps."""
    clashes: dict[tuple[str, str, int], Array] = {}

    def clash(name: str, other: str, k: int) -> Array:
        if (name, other, k) not in clashes:
            clashes[name, other, k] = _clash(dots[name], spots[name], dots[other], spots[other], k)
        return clashes[name, other, k]

    order, shuffle = list(spots), random.Random(0).shuffle
    best: tuple[float, dict[str, int]] = (math.inf, {})
    for _ in range(_ORDERS if len(spots) > 1 else 1):
        chosen: dict[str, int] = {}
        total, before = math.inf, math.inf
        for _ in range(4):
            total = 0.0
            for name in order:
                costs = spots[name].cost + sum(clash(name, n, k) for n, k in chosen.items() if n != name)
                chosen[name] = int(costs.argmin())
                total += float(costs.min())
            if total >= before:
                break
            before = total
        if total < best[0]:
            best = total, dict(chosen)
        shuffle(order)
    return best[1]


def _clash(dot: Point, spots: _Spots, other_dot: Point, other: _Spots, k: int) -> Array:
    """What each of `spots` costs beside the chosen words of another dot, and their line: words over words
    cannot be read, and lines that cross lead astray."""
    margin = np.array([-_APART, -1.0, _APART, 1.0])
    cost = 1000.0 * _overlaps(spots.boxes + margin, [other.boxes[k]])[:, 0]
    along = _points_of(dot, spots.ends)
    cost += 500.0 * (spots.threads & _inside(along, other.boxes[k] + margin / 5).any(1))
    if other.threads[k]:
        line = _points_of(other_dot, other.ends[k][None])
        cost += 500.0 * _inside(line, spots.boxes[:, None] + margin / 5).any(1)
        cost += 500.0 * (spots.threads & _cross(dot, spots.ends, other_dot, other.ends[k]))
    return cost


def _points_of(start: Point, ends: Array) -> Array:
    """(n, 41, 2): points of the lines from `start` to each of `ends` (n, 2)."""
    share = np.linspace(0, 1, 41)[None, :, None]
    return np.asarray(start) + share * (ends[:, None] - start)


def _inside(points: Array, boxes: Array) -> Array:
    """Which points (n, 41, 2) are in the box, or in their row's."""
    inside: Array = (points > boxes[..., :2]) & (points < boxes[..., 2:])
    return np.asarray(inside.all(-1))


def _cross(start: Point, ends: Array, a: Point, b: Array) -> Array:
    """Which lines from `start` to each of `ends` (n, 2) cross that from `a` to `b`."""

    def side(p: Any, q: Any, r: Any) -> Any:
        (px, py), (qx, qy), (rx, ry) = (np.moveaxis(at, -1, 0) for at in (p, q, r))
        return (qx - px) * (ry - py) - (qy - py) * (rx - px)

    first, far = np.asarray(start), np.asarray(a)
    apart = side(far, b, first) * side(far, b, ends) < 0
    return np.asarray(apart & (side(first, ends, far) * side(first, ends, b) < 0))


def _offsets(length: float, depth: float, reach: float, ring: float, flush: Sequence[float]) -> list[Point]:
    """Where the lower left corner of a name of this size may be, in points from its dot, which fills
    `ring`; the nearest first. `flush` are more places from left to right, beside a wall."""
    steps = [0.0, 6.0, *range(16, int(reach), 12)]

    def gap(low: float, size: float) -> float:
        return max(low, -low - size, 0.0)

    across = [-length / 2, *flush]
    across += [left for step in steps for left in (ring + step, -ring - length - step)]
    upright = [-depth / 2, *(5 + step for step in steps), *(-3 - depth - step for step in steps)]
    places = [(dx, dy) for dx in across for dy in upright if gap(dx, length) or gap(dy, depth)]
    return sorted(places, key=lambda at: math.hypot(gap(at[0], length), gap(at[1], depth)))


def _overlaps(boxes: Array, taken: Sequence[Any]) -> Array:
    """(n, m): which of the boxes overlap which that are taken."""
    a, b = boxes[:, None], np.asarray(taken)[None]
    return np.asarray(~((a[..., :2] >= b[..., 2:]) | (b[..., :2] >= a[..., 2:])).any(-1))
