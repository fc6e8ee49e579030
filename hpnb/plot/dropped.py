"""Dropout masks as bitmaps: what each of two ranks drops, and where they differ.

    one row a run, for each place: rank 0 | rank 1 | XOR

Black is dropped. An XOR is empty where two ranks agree, and half full where they draw apart with p = 1/2. One
that is not as it should be has a red frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure
from hpnb.plot.grammar import ALARM, CARD, INK, RULE, SOFT, OpStyle

SHOWN = 40  # elements each way
_COLORS = ("#F1F3F5", CARD, INK)  # not computed, kept, dropped
_APART = ("#F1F3F5", CARD, "#882255")


@dataclass(frozen=True)
class Masks:
    """What two ranks drop of one activation.

    Attributes:
        first, second: (n, m) each: 1 dropped, 0 kept, -1 not computed.
        alike: whether they should be.
    """

    first: ArrayLike
    second: ArrayLike
    alike: bool

    @property
    def differ(self) -> float:
        """Share of the elements that only one of them drops."""
        a, b = (np.asarray(each) for each in (self.first, self.second))
        seen = (a >= 0) & (b >= 0)
        return float((a != b)[seen].mean())

    @property
    def right(self) -> bool:
        return (self.differ == 0) == self.alike


def dropped(
    runs: Mapping[str, Sequence[Masks]],
    places: Sequence[str],
    ranks: tuple[str, str] = ("rank 0", "rank 1"),
    title: str | None = None,
) -> Figure:
    """Draw a corner of each mask, SHOWN x SHOWN elements at most.

    Args:
        runs: {run: masks of each place}.
        places: what the activations are, in words; the columns.

    Raises:
        ValueError: no run, masks that are not one a place, or two that differ in shape.
    """
    if not runs or not places:
        raise ValueError("masks of no run, or of no place, show nothing")
    for name, found in runs.items():
        if len(found) != len(places):
            raise ValueError(f"{name} has masks of {len(found)} places, and there are {len(places)}")
        for place, one in zip(places, found, strict=True):
            shapes = np.asarray(one.first).shape, np.asarray(one.second).shape
            if shapes[0] != shapes[1] or len(shapes[0]) != 2:
                raise ValueError(
                    f"{name}, {place}: masks of shapes {shapes[0]} and {shapes[1]}; two equal (n, m)"
                )
    keys = [Key(OpStyle(_COLORS[2], "", "dropped")), Key(OpStyle(_APART[2], "", "dropped by one of the two")),
            Key(OpStyle(ALARM, "", "not as it should be"), "hollow")]  # fmt: skip
    heading = title if title is not None else "who drops what"
    columns = 3 * len(places)
    side = (7.0 - 1.15 - 0.15 - 0.1 * (columns - 1)) / columns
    fig, axes = new_figure([side] * len(runs), title=heading, legend=keys, columns=columns, left=1.15,
                           right=0.15, bottom=0.28, gap=0.3, head=0.5, between=0.1)  # fmt: skip
    for row, (name, found) in enumerate(runs.items()):
        own = axes[row * columns : (row + 1) * columns]
        own[0].annotate(_lines(name), (0, 0.5), (-7, 0), "axes fraction", "offset points", size=TEXT,
                        color=INK, ha="right", va="center")  # fmt: skip
        for k, (place, one) in enumerate(zip(places, found, strict=True)):
            a, b = (np.asarray(each)[:SHOWN, :SHOWN] for each in (one.first, one.second))
            apart = np.where((a < 0) | (b < 0), -1, a != b)
            words = (*ranks, "XOR")
            for j, (values, colors) in enumerate(((a, _COLORS), (b, _COLORS), (apart, _APART))):
                ax = own[3 * k + j]
                _bitmap(ax, values, colors)
                if row == 0:
                    ax.annotate(words[j], (0.5, 1), (0, 3), "axes fraction", "offset points", size=SMALL,
                                color=SOFT, ha="center")  # fmt: skip
            if row == 0:
                own[3 * k].annotate(
                    place, (0, 1), (0, 16), "axes fraction", "offset points", size=TEXT, color=INK
                )
            _judge(own[3 * k + 2], one)
    return fig


def _bitmap(ax: Axes, values: NDArray[np.generic], colors: Sequence[str]) -> None:
    ax.imshow(
        values, cmap=ListedColormap(list(colors)), vmin=-1, vmax=1, interpolation="nearest", aspect="auto"
    )
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(visible=True, color=RULE, linewidth=0.8)


def _judge(ax: Axes, one: Masks) -> None:
    """How many differ, beneath the XOR; a frame where that is wrong."""
    words = f"{100 * one.differ:.0f} % differ" if one.differ else "equal"
    ax.set_xlabel(words, size=SMALL, color=INK if one.right else ALARM, labelpad=2)
    if not one.right:
        ax.xaxis.label.set_fontweight("bold")
        for spine in ax.spines.values():
            spine.set(color=ALARM, linewidth=2.2)


def _lines(name: str) -> str:
    return name.replace(", ", ",\n")
