"""Leaves that nobody photographed: healthy, with rust, or with angular leaf spot.

A leaf is drawn in its own coordinates, s along the midrib from base to tip and v across it from margin
to margin, so that what grows on a leaf follows its veins:

    midrib    v = 0, slightly bent
    veins     from (s_i, 0) to the margin at (s_i + rise, ±1)
    rust      small round pustules: a yellow halo, an orange-brown core
    angular   brown polygons between two veins, with straight edges where a vein stops them

All geometry is in units of the picture's side: a leaf is the same leaf at every size.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from hpnb.data.synthetic_texture import Colour, Point, canvas, finish, jitter, noise

CLASSES = ("angular_leaf_spot", "bean_rust", "healthy")


class Leaf:
    """The shape of one leaf: maps (s, v) to points of the picture."""

    def __init__(self, rng: np.random.Generator) -> None:
        angle = rng.uniform(0, 2 * math.pi)
        self.length, self.width = rng.uniform(0.86, 1.02), rng.uniform(0.30, 0.40)
        self.along = (math.cos(angle), math.sin(angle))
        self.across = (-self.along[1], self.along[0])
        self.bend = rng.uniform(-0.07, 0.07)
        shift = rng.uniform(-0.04, 0.04, 2)
        self.base = tuple(0.5 + shift[i] - 0.48 * self.length * self.along[i] for i in (0, 1))
        self.rise = rng.uniform(0.16, 0.24)
        count = int(rng.integers(5, 8))
        self.starts = [0.04 + 0.74 * i / count for i in range(count + 1)]  # where veins leave the midrib

    def point(self, s: float, v: float) -> Point:
        s = min(max(s, 0.0), 1.0)
        half = self.width * 2.05 * s**0.5 * (1 - s) ** 0.85  # broad below the middle, pointed at the tip
        side = v * half + self.bend * 4 * s * (1 - s)
        return (
            self.base[0] + s * self.length * self.along[0] + side * self.across[0],
            self.base[1] + s * self.length * self.along[1] + side * self.across[1],
        )

    def outline(self) -> list[Point]:
        steps = [(i / 24) ** 1.5 for i in range(25)]  # closer together at the round base
        return [self.point(s, 1) for s in steps] + [self.point(s, -1) for s in reversed(steps)]


def draw_leaf(label: int, rng: np.random.Generator, size: int) -> Image.Image:
    """An RGB image of `size` x `size` pixels of a leaf of class `label` (an index into CLASSES)."""
    shape, side = Leaf(rng), canvas(size)
    ground = np.array([(96, 74, 52), (58, 78, 44), (120, 112, 98), (42, 48, 40)][rng.integers(4)])
    back = Image.fromarray(noise(rng, side, ground + rng.uniform(-12, 12, 3), spread=26, cells=7))

    green = np.array((rng.uniform(70, 118), rng.uniform(138, 176), rng.uniform(48, 74)))
    front = Image.fromarray(noise(rng, side, green, spread=13, cells=6))
    draw = ImageDraw.Draw(front)
    _veins(draw, shape, green, side)
    name = CLASSES[label]
    if name == "bean_rust":
        _rust(draw, shape, rng, side)
    elif name == "angular_leaf_spot":
        _angular(draw, shape, rng, side)

    mask = Image.new("L", (side, side))
    ImageDraw.Draw(mask).polygon(_pixels(shape.outline(), side), fill=255)
    back.paste(front, mask=mask)
    return finish(back, rng, size)


def _veins(draw: ImageDraw.ImageDraw, shape: Leaf, green: Colour, side: int) -> None:
    pale, shade = _colour(green + np.array((34, 30, 26))), _colour(green - np.array((16, 18, 10)))
    thick = max(1, round(0.011 * side))
    midrib = _pixels([shape.point(i / 12, 0) for i in range(13)], side)
    for start in shape.starts:
        for sign in (-1, 1):
            line = [shape.point(start + shape.rise * u, sign * u) for u in (0, 0.35, 0.7, 0.96)]
            draw.line([(x + thick, y + thick) for x, y in _pixels(line, side)], shade, thick)
            draw.line(_pixels(line, side), pale, thick)
    draw.line(midrib, pale, 2 * thick)


def _rust(draw: ImageDraw.ImageDraw, shape: Leaf, rng: np.random.Generator, side: int) -> None:
    spots = []
    for _ in range(int(rng.integers(20, 44))):
        centre = shape.point(rng.uniform(0.08, 0.9), rng.uniform(-0.88, 0.88))
        spots.append((centre, 0.010 + 0.012 * rng.random() ** 2))  # many small ones, few large
    for centre, core in spots:
        _disc(draw, centre, core * rng.uniform(1.8, 2.3), _colour(jitter(rng, (196, 194, 74), 22, 6)), side)
    for centre, core in spots:
        _disc(draw, centre, core, _colour(jitter(rng, (158, 76, 26), 22, 6)), side)


def _angular(draw: ImageDraw.ImageDraw, shape: Leaf, rng: np.random.Generator, side: int) -> None:
    count = len(shape.starts) - 1
    for _ in range(int(rng.integers(7, 15))):
        i, sign = int(rng.integers(count)), (-1, 1)[rng.integers(2)]
        low, high = shape.starts[i] + 0.012, shape.starts[i + 1] - 0.012  # the veins on either side
        if rng.random() < 0.4:  # a spot that has not reached the next vein
            high -= 0.35 * (high - low)
        inner = rng.uniform(0.05, 0.62)
        outer = inner + rng.uniform(0.14, 0.34)
        kinks = rng.uniform(-0.09, 0.09, 3)
        corners = [(low, inner), (low, outer), ((low + high) / 2, outer + kinks[0]), (high, outer + kinks[1]),
                   (high, inner + kinks[2])]  # fmt: skip
        polygon = _pixels([shape.point(s + shape.rise * u, sign * u) for s, u in corners], side)
        brown = jitter(rng, (118, 86, 50), 20, 6)
        draw.polygon(polygon, _colour(brown), _colour(brown * 0.6), max(1, round(0.009 * side)))


def _disc(draw: ImageDraw.ImageDraw, centre: Point, radius: float, fill: tuple[int, ...], side: int) -> None:
    (x, y), r = (side * c for c in centre), radius * side
    draw.ellipse((x - r, y - r, x + r, y + r), fill)


def _pixels(points: list[Point], side: int) -> list[Point]:
    return [(x * side, y * side) for x, y in points]


def _colour(rgb: Colour) -> tuple[int, ...]:
    return tuple(int(c) for c in np.clip(rgb, 0, 255))
