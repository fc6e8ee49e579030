"""Ten silhouettes under CIFAR-10's ten class names, for where the photographs cannot be had.

The names are CIFAR's, so that labels, heads and reports look alike; the images are shapes, chosen so that a
reader can remember them (a wheel for a car, an ear for a cat, a hull for a ship). A shape is turned a little,
moved, scaled, and filled with a colour that says nothing about its class. The background is lighter or
darker.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from hpnb.data.synthetic_texture import Colour, Pixels, Point, canvas, finish, noise

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _circle(x: float = 0.0, y: float = 0.0, r: float = 1.0, start: int = 0, stop: int = 36) -> list[Point]:
    turns = [2 * math.pi * i / 36 for i in range(start, stop + 1)]
    return [(x + r * math.cos(t), y + r * math.sin(t)) for t in turns]


def _star() -> list[Point]:
    turns = [math.pi * i / 5 - math.pi / 2 for i in range(10)]
    return [((1.1, 0.45)[i % 2] * math.cos(t), (1.1, 0.45)[i % 2] * math.sin(t)) for i, t in enumerate(turns)]


def _cross(a: float = 0.32) -> list[Point]:
    return [(-a, -1), (a, -1), (a, -a), (1, -a), (1, a), (a, a), (a, 1), (-a, 1),
            (-a, a), (-1, a), (-1, -a), (-a, -a)]  # fmt: skip


Layer = tuple[list[Point], bool]  # a polygon within radius 1.1 of the centre, y downwards; False cuts a hole
SILHOUETTES: tuple[list[Layer], ...] = (
    [(_cross(), True)],
    [(_circle(), True), (_circle(r=0.55), False)],
    [([(-1, -0.7), (0, 0.15), (1, -0.7), (1, 0.0), (0, 0.85), (-1, 0.0)], True)],
    [([(0, -1), (1, 0.8), (-1, 0.8)], True)],
    [(_star(), True)],
    [
        ([(-0.7, -0.22), (0.7, -0.22), (0.7, 0.22), (-0.7, 0.22)], True),
        *((_circle(x, y, 0.34), True) for x in (-0.74, 0.74) for y in (-0.3, 0.3)),
    ],
    [(_circle(r=0.92), True)],
    [
        *((_circle(), True), (_circle(r=0.55), False)),
        ([(-0.42, 0), (0.42, 0), (0.75, 1.2), (-0.75, 1.2)], False),
    ],
    [([(x, y - 0.45) for x, y in _circle(r=1.1, stop=18)], True)],
    [([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)], True)],
)


def draw_shape(label: int, rng: np.random.Generator, size: int) -> Image.Image:
    """An RGB image of `size` x `size` pixels of shape `label` (an index into CLASSES)."""
    side = canvas(size)
    turn, scale = rng.uniform(-0.35, 0.35), rng.uniform(0.25, 0.38)
    x0, y0 = 0.5 + rng.uniform(-1, 1, 2) * (0.46 - scale)
    c, s = math.cos(turn) * scale, math.sin(turn) * scale
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    for points, solid in SILHOUETTES[label]:
        placed = [((x0 + c * x - s * y) * side, (y0 + s * x + c * y) * side) for x, y in points]
        draw.polygon(placed, fill=255 if solid else 0)

    dark, light = _colours(rng)
    front, back = (dark, light) if rng.integers(2) else (light, dark)
    ground = Image.fromarray(_stripes(rng, noise(rng, side, back, spread=20, cells=5)))
    ground.paste(Image.fromarray(noise(rng, side, front, spread=14, cells=4)), mask=mask)
    return finish(ground, rng, size)


def _colours(rng: np.random.Generator) -> tuple[Colour, Colour]:
    """Two random colours whose brightness differs by at least 90 of 255."""
    weights = np.array((0.299, 0.587, 0.114))
    low = rng.uniform(35, 95)
    colours = []
    for brightness in (low, low + rng.uniform(90, 120)):
        tint = rng.uniform(-55, 55, 3)
        colours.append(brightness + tint - tint @ weights)
    return colours[0], colours[1]


def _stripes(rng: np.random.Generator, ground: Pixels) -> Pixels:
    """The ground with a faint grating, of random direction and width."""
    side = len(ground)
    turn, waves = rng.uniform(0, math.pi), rng.uniform(2, 6)
    along = np.arange(side) * (2 * math.pi * waves / side)
    wave = np.sin(along[:, None] * math.sin(turn) + along * math.cos(turn) + rng.uniform(0, 6))
    lit: Pixels = np.clip(ground + 9 * wave[..., None], 0, 255).astype(np.uint8)
    return lit
