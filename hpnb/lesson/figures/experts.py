"""Notebook 11: rows that move to their experts, what a capacity drops, and gradients of unused experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from hpnb.lesson.figures import ranks_and_collectives
from hpnb.lesson.figures.long_contexts import RANKS, losses_above
from hpnb.lesson.programs.expert_timing import wait_for_slowest
from hpnb.plot.canvas import SMALL, Key, new_figure, panel_title
from hpnb.plot.curves import CurvePanel, Look, Series, curves, looks
from hpnb.plot.grammar import CARD, INK, SERIES, OpStyle


def dispatched_rows(chosen: Sequence[Sequence[Sequence[int]]], num_experts: int, title: str = "") -> Figure:
    """Tokens x experts as a matrix, and its marked cells as rows on the ranks that have the experts.

    A row keeps the colour of the rank that its token is on. `chosen` has for each of at most 8 ranks, for
    each of its tokens, the experts that it goes to.
    """
    ranks, tokens = len(chosen), len(chosen[0])
    keys = [Key(OpStyle(RANKS[rank], "", f"token of rank {rank}")) for rank in range(ranks)]
    height = 0.088 * ranks * tokens
    fig, (left, right) = new_figure(
        [height], title=title, legend=keys, columns=2, left=0.75, bottom=0.5, head=0.36, between=0.95
    )
    cells = np.full((ranks * tokens, num_experts), -1)
    for rank, rows in enumerate(chosen):
        for token, experts in enumerate(rows):
            cells[rank * tokens + token, list(experts)] = rank
    colors = ListedColormap(["#F1F3F5", *RANKS[:ranks]])
    left.imshow(cells, cmap=colors, vmin=-1, vmax=ranks - 1, interpolation="nearest", aspect="auto")
    local = num_experts // ranks
    for expert in range(1, num_experts):  # so that neighbouring marks are two
        left.axvline(expert - 0.5, color=CARD, linewidth=1.2)
    for line in range(ranks * tokens):
        left.axhline(line - 0.5, color=CARD, linewidth=0.4)
    for rank in range(1, ranks):
        left.axhline(rank * tokens - 0.5, color=INK, linewidth=0.8)
        left.axvline(rank * local - 0.5, color=INK, linewidth=0.8)
    middles = [tokens * (rank + 0.5) - 0.5 for rank in range(ranks)]
    left.set_yticks(middles, [f"rank {rank}" for rank in range(ranks)])
    left.set_xticks(range(num_experts))
    left.set_xlabel("expert", size=SMALL, color=INK)
    panel_title(left, "each token marks its experts")
    loads = _draw_received(right, chosen, num_experts)
    panel_title(right, "on the experts' ranks, grouped by expert")
    for ax in (left, right):
        ax.tick_params(length=0)
    busiest = max(range(ranks), key=loads.__getitem__)
    fig.set_label(
        f"{ranks * tokens} tokens mark {sum(loads)} cells of a matrix of tokens and {num_experts} experts. "
        f"After the all-to-all ranks 0 to {ranks - 1} have {', '.join(map(str, loads))} rows; rank {busiest} "
        "has most."
    )
    return fig


def _draw_received(ax: Axes, chosen: Sequence[Sequence[Sequence[int]]], num_experts: int) -> list[int]:
    """One bar of cells for each expert; returns the rows of each rank."""
    ranks = len(chosen)
    local = num_experts // ranks
    sources = [[rank for rank, rows in enumerate(chosen) for experts in rows if expert in experts]
               for expert in range(num_experts)]  # fmt: skip
    longest = max(map(len, sources))
    for expert, of_expert in enumerate(sources):
        for place, source in enumerate(of_expert):
            ax.add_patch(Rectangle((place, expert + 0.12), 1, 0.76, facecolor=RANKS[source],
                                   edgecolor=CARD, linewidth=0.5))  # fmt: skip
        ax.text(
            len(of_expert) + 0.4,
            expert + 0.5,
            f"expert {expert}: {len(of_expert)}",
            size=SMALL,
            va="center",
            color=INK,
        )
    loads = [sum(map(len, sources[rank * local : (rank + 1) * local])) for rank in range(ranks)]
    ax.set(xlim=(0, 1.42 * longest), ylim=(num_experts, 0))
    for rank in range(1, ranks):
        ax.axhline(rank * local, color=INK, linewidth=0.8)
    ax.set_yticks([local * (rank + 0.5) for rank in range(ranks)],
                  [f"rank {rank}:\n{loads[rank]} rows" for rank in range(ranks)])  # fmt: skip
    ax.set_xlabel("rows of each expert", size=SMALL, color=INK)
    return loads


def computing_and_waiting(seconds: Sequence[float], title: str = "") -> Figure:
    """How long each rank computes, `seconds`, and then waits until the slowest has finished."""
    return ranks_and_collectives.waits(wait_for_slowest(seconds), title)


def capacity(
    factors: Sequence[float], dropped: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]],
    title: str = "",
) -> Figure:  # fmt: skip
    """What a capacity drops, {model: share of rows, 0 to 1}, and what that costs, {model: loss less the one
    without a capacity}, over the capacity of an expert / mean load.
    """
    look = looks(dropped)
    upper = [Series(run, factors, [100 * share for share in y], look[run], "line and dots")
             for run, y in dropped.items()]  # fmt: skip
    lower = [Series(run, factors, y, look[run], "line and dots", f"loss, {run},")
             for run, y in losses.items()]  # fmt: skip
    panels = [CurvePanel(upper, "%", height=1.25, title="rows that are dropped"),
              CurvePanel(lower, "change of loss", height=1.5, title="how much that changes the loss",
                         xlabel="capacity of an expert / mean load")]  # fmt: skip
    fig = curves(panels, title=title, gap=0.5)
    for ax in fig.axes:
        for size, line in zip((9, 4.5), ax.get_lines(), strict=False):  # no dot hides one beneath
            line.set(markersize=size)
    return fig


def losses_and_experts(
    losses: Mapping[str, Sequence[float]], norms: Mapping[str, Sequence[float]], tokens: Sequence[int],
    title: str = "",
) -> Figure:  # fmt: skip
    """{run: loss of each step} above {run: norm of each expert's gradient} in a step of a few tokens.

    `tokens` are of each expert in that step; experts without one are shaded.
    """
    look = dict(zip(losses, (Look(*SERIES[k]) for k in (0, 1)), strict=True))
    aside = dict(zip(norms, (-0.13, 0.13), strict=True))  # so that equal norms stand side by side
    lower = [Series(run, [e + aside[run] for e in range(len(y))], y, look[run], "dots",
                    label=f"gradient's norm, {run},") for run, y in norms.items()]  # fmt: skip
    heading = "each expert's gradient in a step of a few tokens, both runs side by side"
    panel = CurvePanel(lower, "norm", height=1.3, xlabel="expert", title=heading)
    unused = Key(OpStyle("#FBE3D6", "", "expert without a token"))
    fig = losses_above(losses, look, panel, title, [unused])
    fig.axes[0].yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    ax = fig.axes[1]
    for expert, count in enumerate(tokens):
        if not count:
            ax.axvspan(expert - 0.4, expert + 0.4, color="#FBE3D6", zorder=0, linewidth=0)
    ax.set_xticks(range(len(tokens)))
    ax.set_xlim(-0.6, len(tokens) - 0.4)
    ax.set_ylim(top=1.15 * max(norm for of_run in norms.values() for norm in of_run) or 1.0)
    empty = [e for e, count in enumerate(tokens) if not count]
    words = (f"{run}: {sum(norm[e] > 0 for e in empty)} of {len(empty)} experts without a token get one"
            for run, norm in norms.items())  # fmt: skip
    fig.set_label("; ".join(words))
    return fig
