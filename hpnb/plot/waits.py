"""Waiting is not moving: a collective's time on one rank is split at the arrival of the last rank.

    wait = arrival of the last rank - own arrival        move = end - arrival of the last rank

The culprit has the shortest collective: everybody else waits for it, and it waits for nobody.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hpnb.plot.canvas import TEXT, Key, new_figure
from hpnb.plot.grammar import INK, STYLE, ink_on, style_of
from hpnb.plot.units import number, time_unit
from hpnb.record import Timeline

PARTS = ("compute", "wait", "move")


def waits(tl: Timeline, op: str = "all_reduce", title: str | None = None) -> Figure:
    """Draw where each rank's time went, and name the rank that the others waited for.

    Args:
        tl: compute events, and either "wait" and "move" or the whole collectives named `op`, which are
            then split by `Timeline.split_waits`.
        op: the collective.

    Raises:
        ValueError: the timeline holds neither.
    """
    split = tl if _is_split(tl) else tl.split_waits(op)
    if not _is_split(split):
        found = ", ".join(sorted({e.op for e in tl.events})) or "nothing"
        raise ValueError(
            f'waits needs events "wait" and "move", or {op!r} to split; this timeline has {found}'
        )
    spent = totals(split)
    most = max(sum(parts.values()) for parts in spent.values())
    scale, unit = time_unit(most)
    culprit, words = verdict(spent)
    heading = title if title is not None else f"waiting is not moving: {style_of(op).label} · {tl.source}"
    keys = [Key(STYLE[part]) for part in PARTS]
    fig, (ax,) = new_figure([0.42 * len(spent) + 0.1], title=heading, legend=keys, caption=words)
    for row, (rank, parts) in enumerate(spent.items()):
        at = 0.0
        for part in PARTS:
            style, wide = STYLE[part], parts[part] / scale
            (bar,) = ax.barh([row], [wide], left=[at], height=0.68, linewidth=0.6, hatch=style.hatch or None,
                             facecolor=style.color, edgecolor=style.edge)  # fmt: skip
            bar.set_label(f"{part} {rank}")
            if wide > 0.09 * most / scale:
                ax.text(at + wide / 2, row, number(wide), size=TEXT, weight="bold", ha="center", va="center",
                        color=ink_on(style.color),
                        bbox={"facecolor": style.color, "edgecolor": "none", "pad": 1.5})  # fmt: skip
            at += wide
        if rank == culprit:
            ax.annotate("◀ waits least", (at, row), (5, 0), "data", "offset points", size=TEXT, weight="bold",
                        color=INK, va="center", annotation_clip=False)  # fmt: skip
    ax.set_yticks(range(len(spent)), [f"rank {rank}" for rank in spent])
    ax.set_ylim(len(spent) - 0.45, -0.55)
    ax.set_xlim(0, most / scale * 1.22)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time ({unit})")
    return fig


def _is_split(tl: Timeline) -> bool:
    return any(e.op in ("wait", "move") for e in tl.events)


def totals(tl: Timeline) -> dict[int, dict[str, float]]:
    """{rank: seconds of "compute", "wait" and "move"}."""
    spent = {rank: dict.fromkeys(PARTS, 0.0) for rank in tl.ranks}
    for e in tl.events:
        part = "compute" if e.is_compute else e.op
        if part in PARTS:
            spent[e.rank][part] += e.duration
    return spent


def verdict(spent: dict[int, dict[str, float]]) -> tuple[int | None, str]:
    """(the rank that the others waited for, a sentence); None where nobody stands out."""
    by_wait = sorted(spent, key=lambda rank: spent[rank]["wait"])
    least, most = by_wait[0], by_wait[-1]
    apart = spent[most]["wait"] - spent[least]["wait"]
    whole = max(sum(parts.values()) for parts in spent.values())
    scale, unit = time_unit(whole)

    def say(rank: int, part: str) -> str:
        return f"{number(spent[rank][part] / scale)} {unit}"

    if len(spent) < 2 or apart < 0.05 * whole:
        return None, f"Nobody stands out: the waits differ by {number(apart / scale)} {unit} at most."
    slowest = max(spent, key=lambda rank: spent[rank]["compute"])
    if slowest == least:
        why = f"because it computes longest, {say(least, 'compute')}"
    else:
        why = f"though rank {slowest} computes longest: it arrives late for another reason"
    return least, (
        f"Rank {least} waits least, {say(least, 'wait')}, {why}. The others wait up to {say(most, 'wait')}."
    )
