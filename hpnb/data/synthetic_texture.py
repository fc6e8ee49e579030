"""What all generated images share: soft noise, a canvas larger than the image, a camera's grain."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

Point = tuple[float, float]
Colour = np.ndarray[Any, np.dtype[np.float64]]  # (3,) red, green, blue, 0 to 255
Pixels = np.ndarray[Any, np.dtype[np.uint8]]  # (side, side, 3)


def canvas(size: int) -> int:
    """Pixels a side to draw on. Small pictures are drawn at twice their size and shrunk: smooth edges."""
    return 2 * size if size <= 128 else size


def noise(rng: np.random.Generator, side: int, base: Colour, spread: float, cells: int) -> Pixels:
    """Blotches of brightness around the colour `base`: `cells` x `cells` numbers, drawn out smoothly."""
    grid = rng.uniform(-1, 1, (cells, cells)).astype(np.float32)
    soft = np.asarray(Image.fromarray(grid).resize((side, side), Image.Resampling.BICUBIC))
    return np.clip(base.astype(np.float32) + spread * soft[..., None], 0, 255).astype(np.uint8)


def jitter(rng: np.random.Generator, base: tuple[float, ...], spread: float, tint: float) -> Colour:
    """A colour near `base`: brighter or darker by up to `spread`, every channel off by up to `tint`."""
    return np.array(base) + rng.uniform(-spread, spread) + rng.uniform(-tint, tint, 3)


def finish(picture: Image.Image, rng: np.random.Generator, size: int) -> Image.Image:
    """Shrink to `size` x `size` and add grain."""
    if picture.width != size:
        picture = picture.reduce(picture.width // size)
    grain = rng.integers(-6, 7, (size, size, 1), dtype=np.int16)
    return Image.fromarray(np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8))
