"""The one page of notation: every swatch of the grammar, its name and what it means."""

from __future__ import annotations

from matplotlib.figure import Figure

from hpnb.plot.canvas import TEXT, TITLE, Key, new_figure, swatch
from hpnb.plot.compare import BAR
from hpnb.plot.grammar import AXIS, CATEGORY, INK, SOFT, STYLE
from hpnb.plot.lanes import EXPOSED

COMPUTE = ("F", "I", "W", "B", "compute", "idle")
ROW = 0.235  # inches
Row = tuple[str, Key, str]  # letter, swatch and name, meaning


def notation() -> Figure:
    """Draw the notation that every figure of the series shares."""
    compute = [(op if len(op) == 1 else "", Key(STYLE[op]), STYLE[op].meaning) for op in COMPUTE]
    talk = [("", Key(style), style.meaning) for op, style in STYLE.items() if op not in COMPUTE]
    sections: dict[str, list[Row]] = {
        "compute: the upper lane of a rank": compute,
        "communication: the thin lanes beneath": [
            *talk,
            ("", Key(EXPOSED, "hatch", "exposed"), "over any of these: its rank computes nothing meanwhile"),
        ],
        "axes of the mesh": [("", Key(style, "line"), style.meaning) for style in AXIS.values()],
        "memory of a rank": [("", Key(style), style.meaning) for style in CATEGORY.values()],
        "two sides of a comparison": [
            ("", Key(BAR, "hollow", "predicted"), "by a formula or a simulation"),
            ("", Key(BAR, "box", "measured"), "by a recorder, on this machine"),
        ],
    }
    height = sum(0.36 + ROW * len(rows) for rows in sections.values())
    fig, (ax,) = new_figure(
        [height], title="Notation of every figure", left=0.15, right=0.15, bottom=0.1, head=0
    )
    ax.set_axis_off()
    ax.set_xlim(0, 6.7)
    ax.set_ylim(height, 0)
    y = 0.2
    for heading, rows in sections.items():
        ax.text(0.0, y, heading, size=TITLE - 0.5, weight="bold", color=INK, va="center")
        y += 0.26
        for letter, key, meaning in rows:
            swatch(fig, key, 0.2, height - y + 0.1, 0.34, 0.15)
            ax.text(0.5, y, letter, size=TEXT, weight="bold", color=INK, va="center", ha="left")
            ax.text(0.75, y, key.words, size=TEXT, color=INK, va="center")
            ax.text(2.3, y, meaning, size=TEXT, color=SOFT, va="center")
            y += ROW
        y += 0.1
    return fig
