"""A figure never travels without its words: `show` displays a small picture and its alt text as one.

A figure that is the last line of a cell is displayed in the same way, with its titles as alt text.
Renderers of notebooks drop the metadata in which Jupyter keeps alt text, so it is written into an <img>.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping
from html import escape

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from hpnb.plot.grammar import DPI, TITLE_ID
from hpnb.ranks.cell_figures import keep_value

COLORS = 64  # flat colours, and the shades at the edges of letters


def show(fig: Figure, alt: str | None = None) -> None:
    """Display `fig` in a notebook, with `alt` for who cannot see it, or when a `%%ranks` cell ends, without
    `alt`; outside of both do nothing.

    Args:
        alt: a sentence or two that say what it shows; by default its titles.

    Raises:
        ValueError: alt is empty.
    """
    alt = alt_of(fig) if alt is None else alt
    if not alt.strip():
        raise ValueError("a figure needs alt text: say in a sentence or two what it shows, alt='...'")
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        keep_value(fig)  # where a %%ranks cell draws, the notebook shows it when the cell ends
        return
    ipython.display.display(bundle(fig, alt), raw=True)


def alt_of(fig: Figure) -> str:
    """The titles of `fig` as alt text, for want of a better one."""
    titles = [" ".join(text.get_text() for text in fig.texts if text.get_gid() == TITLE_ID)]  # its lines
    for ax in fig.axes:
        titles += [ax.get_title(), *(text.get_text() for text in ax.texts if text.get_gid() == TITLE_ID)]
    what = "; ".join(" ".join(title.split("\n")) for title in titles if title)
    return f"A figure: {what}" if what else f"A figure of {len(fig.axes)} axes"


def bundle(fig: Figure, alt: str) -> dict[str, str]:
    """{MIME type: data} of one display, as the notebook format has it."""
    data = base64.b64encode(png(fig)).decode("ascii")
    width = round(fig.get_figwidth() * DPI)
    image = (
        f'<img alt="{escape(alt, quote=True)}" src="data:image/png;base64,{data}" '
        f'width="{width}" style="max-width:100%;height:auto">'
    )
    return {"text/html": image, "image/png": data, "text/plain": alt}


def png(fig: Figure, scale: float = 1.6, small: bool = True, text: Mapping[str, str] | None = None) -> bytes:
    """`fig` as PNG, `scale` device pixels a CSS pixel.

    Args:
        small: reduce it to a palette, a third of the bytes; False is quicker, for a picture that moves.
        text: {keyword: words} that travel inside the file, where nobody sees them.
    """
    before = fig.dpi
    fig.set_dpi(DPI * scale)
    try:
        canvas = FigureCanvasAgg(fig)
        canvas.draw()  # type: ignore[no-untyped-call]
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]  # (H, W, 3), opaque
    finally:
        fig.set_dpi(before)
    out, inside = io.BytesIO(), PngInfo()
    for keyword, words in (text or {}).items():
        inside.add_text(keyword, words)
    if small:
        _flat(pixels).save(out, "PNG", optimize=True, pnginfo=inside)
    else:
        Image.fromarray(np.ascontiguousarray(pixels)).save(out, "PNG", compress_level=1, pnginfo=inside)
    return out.getvalue()


def _flat(pixels: NDArray[np.uint8]) -> Image.Image:
    """`pixels` (H, W, 3) in COLORS of its own colours, each other one as the nearest of those.

    A colour is chosen for being frequent and far from those chosen before. Pillow's quantisers average
    instead, and a thin line in a rare colour then takes its neighbour's.
    """
    wide = pixels.astype(np.uint32)
    codes = wide[..., 0] << 16 | wide[..., 1] << 8 | wide[..., 2]  # (H, W)
    colors, place, count = np.unique(codes, return_inverse=True, return_counts=True)
    rgb = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], axis=1).astype(np.int64)  # (colors, 3)
    kept: list[int] = []
    nearest = np.zeros(len(colors), dtype=np.uint8)  # which of the kept
    apart = np.full(len(colors), 3 * 255**2, dtype=np.int64)  # and how far, squared
    while len(kept) < COLORS and apart.any():
        kept.append(int(np.argmax(count * apart)))
        away = ((rgb - rgb[kept[-1]]) ** 2).sum(1)
        nearest[away < apart] = len(kept) - 1
        apart = np.minimum(apart, away)
    image = Image.fromarray(nearest[place.reshape(codes.shape)])
    image.putpalette(rgb[kept].astype(np.uint8).tobytes())
    return image
