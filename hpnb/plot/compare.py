"""Predicted beside measured: one pair of bars a quantity, hollow for predicted, filled for measured.

    ratio = measured / predicted

1.00 is a prediction come true.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure, text_inches
from hpnb.plot.grammar import ALARM, CARD, INK, SOFT, STYLE, OpStyle
from hpnb.plot.units import number

GOOD = (0.8, 1.25)  # outside, a model of time owes an explanation
BAR = OpStyle(STYLE["compute"].color, "", "measured")


def compare(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    unit: str = "",
    title: str | None = None,
) -> Figure:
    """Draw both numbers of every name, and their ratio; a ratio outside 0.8 to 1.25 stands out.

    Args:
        predicted, measured: {name: value}, of the same names and in `unit`.

    Raises:
        ValueError: the two do not have the same names, or have none.
    """
    if not predicted or set(predicted) != set(measured):
        odd = sorted(set(predicted) ^ set(measured))
        which = f"only one has {', '.join(odd)}" if odd else "both are empty"
        raise ValueError(f"predicted and measured must have the same names; {which}")
    names = list(predicted)
    left = 0.3 + max(text_inches(name) for name in names)
    fig, (ax,) = new_figure(
        [0.5 * len(names) + 0.1],
        title=title if title is not None else "predicted beside measured",
        legend=[Key(BAR, "hollow", "predicted"), Key(BAR, "box", "measured")],
        left=left,
        right=1.5,
        head=0.4,
    )
    most = max([*predicted.values(), *measured.values(), 0.0]) or 1.0
    low = min([*predicted.values(), *measured.values(), 0.0])
    for row, name in enumerate(names):
        for value, y, hollow in ((predicted[name], row - 0.19, True), (measured[name], row + 0.19, False)):
            face = CARD if hollow else BAR.color
            (bar,) = ax.barh(
                [y],
                [value],
                height=0.32,
                facecolor=face,
                edgecolor=BAR.edge,
                linewidth=1.4 if hollow else 0.6,
            )
            bar.set_label(f"{'predicted' if hollow else 'measured'} {name}")
            ax.annotate(number(value), (max(value, 0.0), y), (4, 0), "data", "offset points",
                        size=SMALL, color=SOFT if hollow else INK, va="center")  # fmt: skip
        ratio = measured[name] / predicted[name] if predicted[name] else None
        off = ratio is None or not GOOD[0] <= ratio <= GOOD[1]
        ax.annotate("no ratio" if ratio is None else f"× {_two(ratio)}", (1, row), (50, 0),
                    ("axes fraction", "data"), "offset points", size=TEXT + 1, va="center",
                    weight="bold" if off else "normal", color=ALARM if off else INK)  # fmt: skip
    ax.annotate(
        "measured /\npredicted", (1, 1), (50, 3), "axes fraction", "offset points", size=SMALL, color=SOFT
    )
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.set_xlim(low * 1.05, most * 1.02)
    ax.tick_params(axis="y", length=0)
    ax.axvline(0, color=SOFT, linewidth=0.8)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(unit)
    return fig


def _two(ratio: float) -> str:
    """Two decimals, where they say something."""
    return f"{ratio:.2f}" if 0.095 <= abs(ratio) < 100 else number(ratio)
