"""A collective in pictures: what each rank held before, and what it holds after, perhaps after several.

A number keeps its colour, so the eye finds where it went; a sum has a colour of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpnb.plot.canvas import TEXT, WIDTH, new_figure, panel_title, text_inches
from hpnb.plot.grammar import CARD, INK, RULE, SOFT, ink_on, mix

Rows = Sequence[Sequence[float]]


def tensors(
    before: Rows, after: Rows, *more: Rows, names: Sequence[str] | None = None, title: str | None = None
) -> Figure:
    """Draw one row of cells a rank, before and after, coloured by value on one scale.

    Args:
        before, after, more: one sequence of numbers a rank; they may differ in length, and be empty.
        names: one for each of them; by default "before", "after", "after 2", ...

    Raises:
        ValueError: they have different numbers of ranks, or nobody holds anything.
    """
    stages = [[[float(v) for v in row] for row in stage] for stage in (before, after, *more)]
    if len({len(stage) for stage in stages}) > 1 or not stages[0]:
        counts = " and ".join(str(len(stage)) for stage in stages[1:])
        raise ValueError(
            f"before has {len(stages[0])} ranks and after {counts}; give one row a rank to both"
        )
    values = [v for stage in stages for row in stage for v in row]
    if not values:
        raise ValueError("no rank holds a number, before or after; there is nothing to draw")
    told = list(names) if names else ["before", "after", *(f"after {i}" for i in range(2, len(stages)))]
    low, high = min(values), max(values)
    longest = max(len(row) for stage in stages for row in stage)
    ranks, count = len(stages[0]), len(stages)
    between = 0.75 if count < 4 else 0.45
    fig, axes = new_figure(
        [0.4 * ranks], title=title or "", columns=count, between=between, left=0.7, bottom=0.15, head=0.28
    )
    side_width = (WIDTH - 0.7 - 0.2 - between * (count - 1)) / count
    cell = min(0.6, side_width / longest)
    words = {v: f"{v:.4g}" for v in values}
    wide = max(text_inches(w) for w in words.values())
    size = min(TEXT, TEXT * (cell - 0.06) / wide) if wide else TEXT

    for place, (ax, rows, name) in enumerate(zip(axes, stages, told, strict=True)):
        for rank, row in enumerate(rows):
            if not row:
                box = Rectangle((0, rank + 0.12), cell, 0.76, facecolor=CARD, edgecolor=RULE, linestyle="--")
                box.set_label("empty")
                ax.add_patch(box)
                ax.text(
                    cell + 0.06, rank + 0.5, "nothing", size=TEXT, color=SOFT, va="center", style="italic"
                )
            for i, value in enumerate(row):
                color = shade(value, low, high)
                box = Rectangle(
                    (i * cell, rank + 0.12), cell, 0.76, facecolor=color, edgecolor=CARD, linewidth=1.2
                )
                box.set_label(f"{name} {rank} {i}")
                ax.add_patch(box)
                if size >= 6.0:
                    ax.text((i + 0.5) * cell, rank + 0.5, words[value], size=size, color=ink_on(color),
                            ha="center", va="center")  # fmt: skip
        _plain(ax, ranks, side_width, labels=place == 0)
        panel_title(ax, name)
        if place:
            far, near = -0.8 * between / side_width, -0.36 * between / side_width
            ax.annotate("", (near, 0.5), (far, 0.5), "axes fraction", "axes fraction",
                        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.6})  # fmt: skip
    return fig


def shade(value: float, low: float, high: float) -> str:
    """Colour of a value: cividis, which reads the same to every eye, made a little paler."""
    share = (value - low) / (high - low) if high > low else 0.5
    return mix(to_hex(colormaps["cividis"](float(np.clip(0.12 + 0.88 * share, 0, 1)))), "#FFFFFF", 0.12)


def _plain(ax: Axes, ranks: int, width: float, labels: bool) -> None:
    ax.set_xlim(0, width)
    ax.set_ylim(ranks, 0)
    ax.set_xticks([])
    ax.set_yticks(
        [i + 0.5 for i in range(ranks)], [f"rank {i}" for i in range(ranks)] if labels else [""] * ranks
    )
    ax.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
