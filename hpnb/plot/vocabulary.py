"""Bytes that a loss sends, over the vocabulary: logits put together, or three numbers a token.

lines     predicted
markers   counted
dotted    vocabularies that have a name
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, OpStyle
from hpnb.plot.units import byte_count


def vocabulary(
    words: Sequence[int],
    predicted: Mapping[str, Sequence[float]],
    counted: Mapping[str, Mapping[int, float]],
    marks: Mapping[str, int] | None = None,
    title: str | None = None,
    caption: str = "",
) -> Figure:
    """Draw bytes over words, both logarithmic.

    Args:
        words: where `predicted` is drawn.
        predicted: {way: bytes at each of `words`}.
        counted: {way: {words: bytes}}, of the same ways.
        marks: {name: words}.

    Raises:
        ValueError: ways that differ, or numbers that have no logarithm.
    """
    if not predicted or set(predicted) != set(counted):
        raise ValueError(
            f"predicted are {', '.join(predicted) or 'none'}, counted {', '.join(counted) or 'none'}"
        )
    for way, series in predicted.items():
        every = [*words, *series, *counted[way], *counted[way].values()]
        if len(series) != len(words) or not all(math.isfinite(v) and v > 0 for v in every):
            raise ValueError(
                f"{way} has {len(series)} predictions for {len(words)} vocabularies; all above 0"
            )
    looks = [OpStyle(SERIES[i][0], "", way, "", SERIES[i][2]) for i, way in enumerate(predicted)]
    keys = [Key(look, "line") for look in looks] + [Key(OpStyle(INK, "", "counted"), "dot")]
    fig, (ax,) = new_figure([2.6], title=title or "", legend=keys, caption=caption, left=0.85, head=0.3)
    for i, (way, look) in enumerate(zip(predicted, looks, strict=True)):
        ax.plot(words, predicted[way], color=look.color, linestyle=look.line, linewidth=1.8, label=way)
        at = counted[way]
        (dots,) = ax.plot(list(at), list(at.values()), linestyle="", color=look.color)
        dots.set(marker=SERIES[i][1], markersize=6.5, markeredgecolor=CARD, label=f"{way}, counted")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(min(words) / 1.2, max(words) * 1.2)
    low = min(v for series in predicted.values() for v in series)
    high = max(v for series in predicted.values() for v in series)
    ax.set_ylim(low / 3, high * 2)
    for name, place in (marks or {}).items():
        ax.axvline(place, color=SOFT, linestyle=":", linewidth=1.0, zorder=1)
        ax.annotate(name, (place, 1), (0, 3), ("data", "axes fraction"), "offset points", size=SMALL,
                    color=INK, ha="center")  # fmt: skip
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: byte_count(y)))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.grid(True, which="major", color=RULE, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlabel("words", size=TEXT)
    ax.set_ylabel("bytes a token that leave a rank", size=TEXT)
    return fig
