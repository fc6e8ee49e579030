"""Notebook 05: steps and samples to a loss over the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import log
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, text_inches
from hpnb.plot.curves import (
    CurvePanel,
    Series,
    count,
    curves,
    log_ticks,
    looks,
    note,
    rule,
    set_ticks,
    write_values,
)
from hpnb.plot.grammar import CARD, SOFT
from hpnb.plot.units import number


def _wall_title(measured: Mapping[int, float], target: float) -> str:
    """Whether each larger batch took fewer steps, and whether it took more samples."""
    pairs = list(pairwise(sorted(measured.items())))
    fewer = all(steps > fewer for (_, steps), (_, fewer) in pairs)
    more = all(a * steps < b * fewer for (a, steps), (b, fewer) in pairs)
    words = ["fewer steps"] * fewer + ["more samples"] * more
    if not words:
        return f"Steps and samples to a test loss of {target:g}, over the batch size"
    return f"To a test loss of {target:g}, larger batches take {' and '.join(words)}"


def batch_wall(
    measured: Mapping[int, float],
    laws: Mapping[str, tuple[float, float]],
    target: float,
    estimates: Mapping[str, float] | None = None,
) -> Figure:
    """Steps to a loss `target` over the batch size, and beneath them the samples that they take.

        steps = fewest (1 + noise / batch)

    Left of the noise scale a doubled batch halves the steps. Right of it steps hardly fall, and samples rise
    with the batch. The title says of the measured steps and samples what holds for every larger batch.

    Args:
        measured: {batch: steps}.
        laws: {name: (fewest steps, noise scale in samples)}, drawn as lines with the scale marked.
        estimates: {name: a noise scale that gradients gave}, marked in the lower panel.
    """
    look = looks(["measured", *laws])
    batches, steps = list(measured), list(measured.values())
    low, high = min(batches) / 1.3, max(batches) * 1.3
    x = np.geomspace(low, high, 80)
    panels = []
    for height, words, power in ((1.6, "steps to the loss", 0), (1.3, "samples to the loss", 1)):
        dots = [s * b**power for s, b in zip(steps, batches, strict=True)]
        series = [Series("measured", batches, dots, look["measured"], "dots")]
        series += [
            Series(name, x.tolist(), (fewest * (1 + noise / x) * x**power).tolist(), look[name])
            for name, (fewest, noise) in laws.items()
        ]
        panels.append(CurvePanel(series, log="xy", height=height, title=words))
    fig = curves(panels, title=_wall_title(measured, target), gap=0.35)

    marks = [noise for _, noise in laws.values()]

    def beside(ax: Axes, words: str, at: float, height: float, color: str) -> None:
        """Words left of an upright line if there is room up to the next one, else right of it if there is
        room there, on paper of their own.
        """
        before = max((mark for mark in marks if low < mark < at), default=low)
        behind = min((mark for mark in marks if at < mark < high), default=high)
        inch = log(high / low) / (fig.get_figwidth() * ax.get_position().width)
        needed = (max(text_inches(line, SMALL) for line in words.split("\n")) + 0.1) * inch
        right = log(at / before) < needed <= log(behind / at)
        side: Literal["left", "right"] = "left" if right else "right"
        note(ax, words, at, height, (5, 0) if right else (-5, 0), side, color)
        ax.texts[-1].set_verticalalignment("bottom")
        ax.texts[-1].set_bbox({"facecolor": CARD, "edgecolor": "none", "pad": 0.8})

    for ax in fig.axes:
        for name, (_, noise) in laws.items():
            if low < noise < high:
                rule(ax, noise, "fitted noise scale", look[name].color)
                if ax is fig.axes[0]:
                    beside(ax, f"fitted noise scale {noise:.3g}", noise, 0.9, look[name].color)
        ax.set_xlim(low, high)
        set_ticks(ax.xaxis, batches, lambda b: number(b) if b % 1 else f"{b:,.0f}")
        log_ticks(ax.yaxis, count, (1, 2, 5))
    above, below = fig.axes
    marks += (estimates or {}).values()
    for name, scale in (estimates or {}).items():
        rule(below, scale, name, SOFT, "--")
        beside(below, f"{name}: {scale:.3g}".replace(", ", ",\n"), scale, 0.03, SOFT)
    above.set_ylim(min(steps) / 1.5, max(steps) * 1.6)
    below.set_ylim(bottom=below.get_ylim()[0] / (2.5 if estimates else 1.0))  # room for their names
    for batch, taken in measured.items():  # on the side of the point that the first law leaves free
        under = any(taken < fewest * (1 + noise / batch) for fewest, noise in list(laws.values())[:1])
        write_values(above, [batch], [taken], [f"{taken:,.1f}".removesuffix(".0")], offset=-7 if under else 7)
    above.tick_params(labelbottom=False)
    below.set_xlabel("samples in a batch, over all ranks")
    return fig
