"""What a rank keeps, by category: for each way of keeping it a predicted bar over a measured one.

hollow   predicted        filled   measured        length = bytes on one rank
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from hpnb.plot.canvas import SMALL, Key, new_figure, text_inches
from hpnb.plot.grammar import CARD, CATEGORY, INK, SOFT, STYLE, OpStyle
from hpnb.plot.units import bytes_unit, number

Kept = Mapping[str, Mapping[str, float]]  # {name: {category: bytes}}


def states(predicted: Kept, measured: Kept, title: str | None = None) -> Figure:
    """Draw two stacked bars a name, such as a ZeRO stage, categories in the order and colours of `memory`.

    Raises:
        ValueError: the two do not have the same names, have none, or name a category that does not exist.
    """
    if not predicted or set(predicted) != set(measured):
        odd = sorted(set(predicted) ^ set(measured))
        which = f"only one has {', '.join(odd)}" if odd else "both are empty"
        raise ValueError(f"predicted and measured must have the same names; {which}")
    if strange := {c for kept in (predicted, measured) for parts in kept.values() for c in parts} - set(
        CATEGORY
    ):
        raise ValueError(f"no category {', '.join(sorted(strange))}; there are {', '.join(CATEGORY)}")
    used = [
        c for c in CATEGORY if any(parts.get(c) for kept in (predicted, measured) for parts in kept.values())
    ]
    most = max(sum(parts.values()) for kept in (predicted, measured) for parts in kept.values()) or 1.0
    size, unit = bytes_unit(most)
    keys = [Key(CATEGORY[c]) for c in used]
    keys += [Key(OpStyle(STYLE["compute"].color, "", "predicted"), "hollow")]
    left = 0.3 + max(text_inches(name) for name in predicted)
    heading = title if title is not None else "what a rank keeps"
    fig, (ax,) = new_figure([0.52 * len(predicted) + 0.1], title=heading, legend=keys, left=left, right=0.25)
    for row, name in enumerate(predicted):
        for parts, y, hollow in ((predicted[name], row - 0.2, True), (measured[name], row + 0.2, False)):
            at = 0.0
            for category in used:
                wide, style = parts.get(category, 0.0) / size, CATEGORY[category]
                (bar,) = ax.barh([y], [wide], left=[at], height=0.34, linewidth=1.6 if hollow else 0.6,
                                 hatch=None if hollow else style.hatch or None,
                                 facecolor=CARD if hollow else style.color,
                                 edgecolor=style.color if hollow else style.edge)  # fmt: skip
                bar.set_label(f"{'predicted' if hollow else 'measured'} {category} {name}")
                at += wide
            ax.annotate(number(at), (at, y), (5, 0), "data", "offset points", size=SMALL,
                        color=SOFT if hollow else INK, va="center")  # fmt: skip
    ax.set_yticks(range(len(predicted)), list(predicted))
    ax.set_ylim(len(predicted) - 0.45, -0.55)
    ax.set_xlim(0, most / size * 1.12)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"bytes on one rank ({unit})")
    return fig
