"""A map of layouts: stages upwards, tp to the right, a step's time in each cell.

colour    how much longer a step takes than the fastest that fits, on a scale of twice
hatch     does not fit in memory: its time is what it would take
line      a host ends here: right of it tp's rings go from host to host
ring      the fastest that fits; a second one is what the figure is asked to show beside it
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpnb.plot.canvas import SMALL, TEXT, Key, boxes, new_figure
from hpnb.plot.grammar import ALARM, CARD, INK, SOFT, OpStyle, ink_on, mix
from hpnb.plot.units import number

Cells = Mapping[tuple[int, int], tuple[float, bool]]
"""{(pp, tp): (seconds of a step, whether it fits)}"""

_FAST, _SLOW, _ABSENT = "#FFF3D6", "#8A3B12", "#FFFFFF"
_WORST = 2.0  # times the best: whatever is slower has the darkest colour
_ROW = 0.26  # inches


def layout_map(
    cells: Cells,
    host: int,
    also: Mapping[str, tuple[int, int]] | None = None,
    title: str | None = None,
    caption: str = "",
    text: bool = True,
) -> Figure:
    """Draw one map.

    Args:
        host: ranks of a host.
        also: {name: (pp, tp)} of cells to ring besides the fastest.
        text: False leaves the numbers out, for a redraw that must be quick.

    Raises:
        ValueError: no cells, or none at a place of `also`.
    """
    if not cells:
        raise ValueError("a map of no layouts: nothing can be run")
    if missing := [name for name, at in (also or {}).items() if at not in cells]:
        raise ValueError(f"{missing[0]} is at pp x tp {(also or {})[missing[0]]}, where no layout can be run")
    stages, cuts = (sorted({at[i] for at in cells}) for i in (0, 1))
    able = {at: seconds for at, (seconds, fits) in cells.items() if fits}
    best = min(able, key=lambda at: able[at]) if able else None
    least = able[best] if best else min(seconds for seconds, _ in cells.values())
    keys = [
        Key(OpStyle(_FAST, "", "the fastest"), "flat"),
        Key(OpStyle(_SLOW, "", f"{_WORST:g} times as long, or more"), "flat"),
        Key(OpStyle(SOFT, "////", "out of memory"), "hatch"),
        Key(OpStyle(ALARM, "", f"a host of {host} ends", "", "--"), "line"),
    ]
    heading = title if title is not None else "seconds of a step"
    fig, (ax,) = new_figure(
        [_ROW * max(4, len(stages))], title=heading, legend=keys, caption=caption, head=0.16, left=0.8
    )
    at = list(cells)
    places = [(cuts.index(t), stages.index(p), 1.0, 1.0) for p, t in at]
    colors = [
        mix(_FAST, _SLOW, min(1.0, max(0.0, (cells[one][0] / least - 1) / (_WORST - 1)))) for one in at
    ]
    boxes(ax, places, OpStyle(_FAST, "", ""), name="layouts", colors=colors, outline=False, zorder=1)
    full = [place for one, place in zip(at, places, strict=True) if not cells[one][1]]
    if full:
        found = boxes(ax, full, OpStyle(_ABSENT, "////", ""), name="out of memory", zorder=2)
        found.set(facecolor="none", edgecolor=SOFT, linewidth=0.4)
    if text:
        for one, (x, y, *_), color in zip(at, places, colors, strict=True):
            seconds, fits = cells[one]
            box = None if fits else {"facecolor": color, "edgecolor": "none", "pad": 0.8}
            ax.text(x + 0.5, y + 0.47, number(seconds), size=SMALL, color=ink_on(color), ha="center",
                    va="center", zorder=4, bbox=box, weight="bold" if one == best else "normal")  # fmt: skip
    rings = ({f"fastest that fits, {number(least)} s": best} if best else {}) | dict(also or {})
    for i, (name, (p, t)) in enumerate(rings.items()):
        color, line = (ALARM, (0, (2, 1))) if i or not best else (INK, "-")
        ring = Rectangle((cuts.index(t), stages.index(p)), 1, 1, fill=False, edgecolor=color, linewidth=2.4,
                         zorder=5, linestyle=line)  # fmt: skip
        ring.set_label(name)
        ax.add_patch(ring)
    inside = sum(t <= host for t in cuts)
    ax.axvline(inside, color=ALARM, linestyle="--", linewidth=1.6, zorder=3, label="a host ends")
    ax.set_xlim(0, len(cuts))
    ax.set_ylim(0, len(stages))
    ax.set_xticks([i + 0.5 for i in range(len(cuts))], [str(t) for t in cuts], size=TEXT)
    ax.set_yticks([i + 0.5 for i in range(len(stages))], [str(p) for p in stages], size=TEXT)
    ax.tick_params(length=0)
    ax.set_facecolor(CARD)
    ax.set_xlabel("tp, ranks that share a layer")
    ax.set_ylabel("pp, stages")
    return fig
