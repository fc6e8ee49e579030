"""Where a gradient goes wrong: modules in the order in which the backward reaches them, over relative error.

    error = || g - g_right || / || g_right ||        of all parameters of a module, in float64

    the loss --> head --> last block --> ... --> first block --> embedding

A backward works from the loss down. Up to a fault everything is right to rounding, 1e-16; what a wrong
gradient has passed through is wrong by as much as it is itself. So one fault is one cliff, and the module at
its edge is the first whose own gradient, or what came to it, was wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from hpnb.plot.canvas import SMALL, WIDTH, Key, new_figure, text_inches
from hpnb.plot.grammar import ALARM, CARD, RULE, SERIES, SOFT, OpStyle

FOOT = 1e-17  # below any error that float64 can have but 0
EDGE = 1e-9  # halfway, in logarithms, between rounding and an error of everything
LEFT, RIGHT = 0.75, 0.2
LONGEST = 1.0  # inches of a name
LEAST = 0.125  # inches from one name to the next


def gradient_cliff(
    errors: Mapping[str, Mapping[str, float]],
    title: str | None = None,
    caption: str = "",
    *,
    edge: float = EDGE,
) -> Figure:
    """Draw a line a run over the same modules, on a logarithmic axis whose foot stands for 0.

    Args:
        errors: {run: {module: relative error}}, modules by their full names from the loss down to the input,
            the same in every run.
        title: a headline.
        caption: a sentence beneath the axes.
        edge: errors above it are no rounding; 1e-9 for float64. A run that crosses it has its cliff marked.

    Raises:
        ValueError: nothing to draw, runs over different modules, or an error that is negative or not finite.
    """
    modules = _check(errors)
    looks = {name: SERIES[i % len(SERIES)] for i, name in enumerate(errors)}
    keys = [Key(OpStyle(color, "", name, "", line), "line") for name, (color, _, line) in looks.items()]
    names, blocks = shorten(modules)
    room = (WIDTH - LEFT - RIGHT) / (len(modules) + 1)
    longest = max(text_inches(name, SMALL) for name in names) if room >= LEAST else 0.0
    heading = title if title is not None else "gradients from the loss down: where do they go wrong?"
    fig, (ax,) = new_figure(
        [2.6], title=heading, legend=keys, caption=caption, left=LEFT, right=RIGHT, head=0.3,
        bottom=0.4 + (longest + 0.06 if longest else 0.0),
    )  # fmt: skip
    top = max(1.0, *(e for run in errors.values() for e in run.values()))
    ax.set_yscale("log")
    ax.set_ylim(FOOT / 2, 10.0 ** math.ceil(math.log10(top) + 0.3))
    ax.set_xlim(-1, len(modules))
    for name, (color, marker, line) in looks.items():
        heights = [max(errors[name][module], FOOT) for module in modules]
        (artist,) = ax.plot(range(len(modules)), heights, color=color, linestyle=line, linewidth=1.8)
        artist.set(marker=marker, markersize=5.5, markeredgecolor=CARD, markeredgewidth=0.7, zorder=4)
        artist.set(clip_on=False)
        artist.set_label(name)
    _axes(ax, any(not e for run in errors.values() for e in run.values()))
    _names(ax, names if longest else [], blocks)
    wrong = {first for run in errors.values() if (first := cliff(run, edge)) is not None}
    for i, at in enumerate(sorted(modules.index(module) for module in wrong)):
        layer = next(part for part, start, stop in blocks if start <= at < stop)
        words = f"layer {layer}, {names[at]}" if layer else names[at]
        _mark(ax, at, words, len(modules), edge * 10.0 ** (4 * i - 1))
    return fig


def cliff(errors: Mapping[str, float], edge: float = EDGE) -> str | None:
    """The first module, from the loss down, whose error is above `edge`; None if there is none."""
    return next((module for module, error in errors.items() if error > edge), None)


def shorten(modules: Sequence[str]) -> tuple[list[str], list[tuple[str, int, int]]]:
    """(names that are short enough for an axis, the parts of the model that they lie in: name, from, up to).

    "vit.layers.3.mlp.fc1" is "mlp.fc1" of "3". A long name keeps as many of its last words as fit.
    """
    names, parts = [], []
    for module in modules:
        inside = re.match(r"(?:.*?\.)?(\d+)\.(.+)", module)
        parts.append(inside[1] if inside else "")
        names.append(_last(inside[2] if inside else module))
    found, at = [], 0
    for part, members in groupby(parts):
        count = len(list(members))
        found.append((part, at, at + count))
        at += count
    return names, found


def _last(name: str) -> str:
    words = name.split(".")
    fitting = (".".join(words[i:]) for i in range(len(words)))
    return next((short for short in fitting if text_inches(short, SMALL) <= LONGEST), words[-1])


def _check(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    runs = {name: list(run) for name, run in errors.items()}
    if not runs or not all(runs.values()):
        raise ValueError("gradient_cliff needs {run: {module: error}}, of one run and one module at least")
    first, *others = runs
    for name in others:
        if runs[name] != runs[first]:
            odd = sorted(set(runs[name]) ^ set(runs[first]))
            which = f"only one has {', '.join(odd[:5])}" if odd else "they stand in another order"
            raise ValueError(f"the runs {first} and {name} are not of the same modules: {which}")
    for name, run in errors.items():
        for module, error in run.items():
            if not (math.isfinite(error) and error >= 0):
                raise ValueError(f"the error of {module} in {name} is {error}; it must be finite, 0 or more")
    return runs[first]


def _axes(ax: Axes, zeros: bool) -> None:
    high = round(math.log10(ax.get_ylim()[1]))
    ticks = [10.0**k for k in range(-16, high + 1, 4)]
    ax.set_yticks([FOOT, *ticks] if zeros else ticks)
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(
        FuncFormatter(
            lambda y, _: "0" if y < 2 * FOOT else f"{y:.0e}".replace("e-0", "e-").replace("1e+00", "1")
        )
    )
    ax.set_ylabel("relative error of the gradient")
    ax.grid(True, axis="y", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)


def _names(ax: Axes, names: Sequence[str], blocks: Sequence[tuple[str, int, int]]) -> None:
    """The modules' names on end, and above the layers that they lie in, every other one shaded."""
    ax.set_xticks(range(len(names)), names, rotation=90, size=SMALL)
    ax.tick_params(axis="x", length=2, pad=2)
    ax.set_xlabel("from the loss  →  to the input")
    for i, (part, start, stop) in enumerate(blocks):
        if i % 2:
            shade = ax.axvspan(start - 0.5, stop - 0.5, color="#EEF1F5", linewidth=0, zorder=0)
            shade.set_label(f"shade {part}")
        if words := next((w for w in (f"layer {part}", part) if part and _fits(ax, w, stop - start)), ""):
            ax.annotate(words, ((start + stop - 1) / 2, 1), (0, 4), ("data", "axes fraction"),
                        "offset points", size=SMALL, color=SOFT, ha="center")  # fmt: skip


def _fits(ax: Axes, words: str, modules: int) -> bool:
    left, right = ax.get_xlim()
    inches = (WIDTH - LEFT - RIGHT) * modules / (right - left)
    return text_inches(words, SMALL) + 0.06 <= inches


def _mark(ax: Axes, at: int, words: str, count: int, height: float) -> None:
    """A line just before the first wrong module, and its name beside it, where no error is."""
    line = ax.axvline(at - 0.5, color=ALARM, linestyle=":", linewidth=1.4, zorder=2)
    line.set_label("cliff")
    right = at > count / 2
    ax.annotate(f"wrong from {words} on", (at - 0.5, height), (-6 if right else 6, 0), "data",
                "offset points", size=SMALL, color=ALARM, weight="bold", va="center",
                ha="right" if right else "left")  # fmt: skip
