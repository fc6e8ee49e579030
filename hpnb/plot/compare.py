"""Predicted beside measured: a hollow bar over a filled one, and the ratio of each pair.

    ratio = measured / predicted

1.00 is a prediction come true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, TEXT, Key
from hpnb.plot.grammar import ALARM, INK, SOFT, STYLE, OpStyle
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
        ValueError: the two do not have the same names, or have none, or a value is not finite.
        TypeError: no dicts of numbers.

    >>> hpnb.plot.compare({"step": 0.30}, {"step": 0.32}, unit="s").savefig("compare.png")
    """
    for which, values in (("predicted", predicted), ("measured", measured)):
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{which} is a {type(values).__name__}; plot.compare takes {{name: value}}, such as "
                '{"step": 0.30}, for each of the two'
            )
        for name, value in values.items():
            _check_number(f"{which}[{name!r}]", value)
    if not predicted or set(predicted) != set(measured):
        odd = sorted(map(str, set(predicted) ^ set(measured)))
        which = f"only one has {', '.join(odd)}" if odd else "both are empty"
        raise ValueError(f"predicted and measured must have the same names; {which}")
    rows = {
        name: [Bar({"measured": predicted[name]}, hollow=True), Bar({"measured": measured[name]})]
        for name in predicted
    }
    keys = [Key(BAR, "hollow", "predicted"), Key(BAR, "box", "measured")]
    heading = title if title is not None else "predicted beside measured"
    panel = BarPanel(rows, unit if unit not in ("s", "B") else f" {unit}", row_inches=0.5)
    fig = bars([panel], {"measured": BAR}, title=heading, keys=keys, right=1.5, head=0.4)
    (ax,) = fig.axes
    for row, name in enumerate(predicted):
        ratio = measured[name] / predicted[name] if predicted[name] else None
        off = ratio is None or not GOOD[0] <= ratio <= GOOD[1]
        ax.annotate("no ratio" if ratio is None else f"× {_two_decimals(ratio)}", (1, row), (50, 0),
                    ("axes fraction", "data"), "offset points", size=TEXT + 1, va="center",
                    weight="bold" if off else "normal", color=ALARM if off else INK)  # fmt: skip
    ax.annotate(
        "measured /\npredicted", (1, 1), (50, 3), "axes fraction", "offset points", size=SMALL, color=SOFT
    )
    ax.axvline(0, color=SOFT, linewidth=0.8)
    ax.grid(False)
    return fig


def _check_number(what: str, value: Any) -> None:
    try:
        finite = math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):  # what is no number, or several
        raise TypeError(f"{what} is a {type(value).__name__}, {value!r}; it must be one number") from None
    if not finite:
        raise ValueError(f"{what} is {value}; it must be a finite number, or leave the name out of both")


def _two_decimals(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.095 <= abs(ratio) < 100 else number(ratio)
