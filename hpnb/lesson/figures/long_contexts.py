"""Notebook 10: a ring step by step, causal work of each rank, exposed times, and rows that are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator

from hpnb.plot.canvas import SMALL, TEXT, Key, new_figure
from hpnb.plot.curves import CurvePanel, Look, Series, count, curves, log_ticks, looks, rule
from hpnb.plot.grammar import CARD, INK, RULE, SERIES, SOFT, STYLE, OpStyle, ink_on, mix
from hpnb.plot.units import time_unit

RANKS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#882255")
_STRIP = 0.2  # of a panel's height, for crosses
_HIDDEN = "#F1F3F5"  # pairs that a causal mask hides


def ring_steps(steps: Sequence[Sequence[tuple[int, float]]], title: str = "") -> Figure:
    """Whose keys each rank has in each step, and which share of the pairs its queries see: for each rank, for
    each step, (the rank that the keys come from, the share).
    """
    forward, idle = STYLE["F"], STYLE["idle"]
    keys = [Key(OpStyle(forward.color, "", "all pairs visible")),
            Key(OpStyle(mix(forward.color, CARD, 0.5), "", "about half")),
            Key(OpStyle(idle.color, idle.hatch, "none: all keys come later"))]  # fmt: skip
    fig, (ax,) = new_figure([0.45 * len(steps)], title=title, legend=keys, left=0.75, bottom=0.45)
    for rank, row in enumerate(steps):
        for step, (source, share) in enumerate(row):
            color = mix(CARD, forward.color, share) if share else idle.color
            ax.barh(rank, 0.94, 0.8, step + 0.03, color=color, edgecolor=SOFT, linewidth=0.6,
                    hatch="" if share else idle.hatch)  # fmt: skip
            card = None if share else {"facecolor": idle.color, "edgecolor": "none", "pad": 1}
            ax.text(step + 0.5, rank, f"keys of rank {source}: {100 * share:.0f} %", size=SMALL, ha="center",
                    va="center", color=ink_on(color), bbox=card)  # fmt: skip
    ax.set(xlim=(0, len(steps[0])), ylim=(len(steps) - 0.5, -0.5))
    ax.set_yticks(range(len(steps)), [f"rank {rank}" for rank in range(len(steps))])
    ax.set_xticks([step + 0.5 for step in range(len(steps[0]))], [f"step {k}" for k in range(len(steps[0]))])
    ax.tick_params(length=0)
    rows = ("; ".join(f"step {k}, keys of rank {source}, {100 * share:.0f} % visible"
                      for k, (source, share) in enumerate(row)) for row in steps)  # fmt: skip
    fig.set_label(" ".join(f"Rank {rank}: {text}." for rank, text in enumerate(rows)))
    return fig


def causal_work(assignments: Mapping[str, Sequence[int]], title: str = "") -> Figure:
    """Which rank works on which pair of a query and a key, for {way: the rank of each token}."""
    ranks = 1 + max(max(owners) for owners in assignments.values())
    keys = [Key(OpStyle(RANKS[rank], "", f"query of rank {rank}")) for rank in range(ranks)]
    keys.append(Key(OpStyle(_HIDDEN, "", "not visible")))
    columns = len(assignments)
    side = (7.0 - 0.75 - 0.2 - 0.45 * (columns - 1)) / columns
    fig, axes = new_figure([min(side, 2.4)], title=title, legend=keys, columns=columns, left=0.75, head=0.3,
                           bottom=0.82, between=0.45)  # fmt: skip
    said = []
    for ax, (way, owners) in zip(axes, assignments.items(), strict=True):
        n = len(owners)
        visible = np.tril(np.ones((n, n), dtype=bool))
        cells = np.where(visible, np.asarray(owners)[:, None], -1)
        colors = ListedColormap([_HIDDEN, *RANKS[:ranks]])
        ax.imshow(cells, cmap=colors, vmin=-1, vmax=ranks - 1, interpolation="nearest", aspect="auto")
        work = work_per_rank(owners)
        ax.set_title(way, size=TEXT, color=INK, loc="left", pad=4)
        pairs = ", ".join(f"{n:,}" for n in work)
        ax.set_xlabel(f"key\nvisible pairs of each rank:\n{pairs}", size=SMALL, color=INK)
        ax.set_ylabel("query" if ax is axes[0] else "", size=SMALL, color=INK)
        ax.set_xticks([0, n - 1])
        ax.set_yticks([0, n - 1] if ax is axes[0] else [])
        ax.tick_params(length=0)
        said.append(f"{way}: ranks 0 to {ranks - 1} work on {', '.join(map(str, work))} pairs")
        for spine in ax.spines.values():
            spine.set(visible=True, color=RULE)
    fig.set_label("; ".join(said))
    return fig


def work_per_rank(owners: Sequence[int]) -> list[int]:
    """Pairs of a query and a key that it sees, for each rank; token i sees i + 1 keys."""
    work = [0] * (1 + max(owners))
    for place, rank in enumerate(owners):
        work[rank] += place + 1
    return work


def exposed_times(
    lengths: Sequence[float],
    predicted: Mapping[str, Sequence[float]],
    replayed: Mapping[str, Sequence[float]] | None = None,
    dots_at: Sequence[float] = (),
    quartiles: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    computing: Sequence[float] = (),
    marked: float | None = None,
    marked_as: str = "",
    title: str = "",
    text: bool = True,
) -> Figure:
    """Exposed seconds of one attention over the sequence length, both axes logarithmic.

    Args:
        predicted: {way: seconds for each length}, lines.
        replayed: {way: seconds for each of `dots_at`}, dots.
        quartiles: {way: (low, high) for each of `dots_at`}, upright bars; dots and bars of different ways
            then stand side by side.
        computing: a rank's seconds of computing for each length, a thin line.
        marked, marked_as: a sequence length with an upright rule, and what it is, for the legend.
    """
    look = looks(predicted)
    kind = "" if replayed else ", exposed"
    series = [Series(f"{way}{kind}", lengths, values, look[way]) for way, values in predicted.items()]
    beside = {way: [x * 1.06 ** (k - 1) for x in dots_at] if quartiles else dots_at
              for k, way in enumerate(replayed or {})}  # fmt: skip
    for way, values in (replayed or {}).items():
        series.append(Series(way, beside[way], values, look[way], "dots", f"{way}, replayed"))
    if computing:
        series.append(Series("computing", lengths, computing, Look(SOFT, "", "-")))
    kinds = [Key(OpStyle(SOFT, "", "predicted", "-"), "line"),
             Key(OpStyle(SOFT, "", "replayed"), "dot", marker="o")]  # fmt: skip
    keys = [Key(OpStyle(SOFT, "", marked_as, ":"), "line")] if marked is not None and marked_as else []
    if quartiles:
        kinds.append(Key(OpStyle(SOFT, "", "quartiles"), "dot", marker="|"))
    keys = [*(kinds if replayed else ()), *keys]
    what = "time of one attention" if computing else "exposed time of one attention"
    panel = CurvePanel(series, what, "xy", xlabel="sequence length, on all ranks (tokens)")
    fig = curves([panel], title=title, more_keys=keys, left=0.85)
    (ax,) = fig.axes
    dots = [line for line in ax.lines if str(line.get_label()).endswith(", replayed")]
    for size, line in zip((10, 8, 6), dots, strict=False):  # so that no dot hides one beneath it
        line.set(markersize=size)
    for way, bars in (quartiles or {}).items():
        low, high = zip(*bars, strict=True)
        ax.vlines(beside[way], low, high, color=look[way].color, linewidth=1.6, zorder=3)
    if marked is not None:
        rule(ax, marked, "sequence")
    first, last = (int(np.log2(length)) for length in (min(lengths), max(lengths)))
    powers = [2.0**k for k in range(first, last + 1, 1 + (last - first) // 8)]
    ax.xaxis.set_major_locator(FixedLocator(powers))
    ax.xaxis.set_major_formatter(lambda value, _: count(value))
    ax.xaxis.set_minor_formatter(lambda *_: "")
    values = [value for curve in series for value in curve.y]
    within_two_decades = max(values) < 100 * min(values)
    log_ticks(ax.yaxis, _seconds, (1.0, 2.0, 5.0) if within_two_decades else (1.0,))
    return fig


def _seconds(value: float) -> str:
    scale, unit = time_unit(value)
    return f"{value / scale:g} {unit}"


def losses_above(
    losses: Mapping[str, Sequence[float]],
    look: Mapping[str, Look],
    lower: CurvePanel,
    title: str,
    more_keys: Sequence[Key],
) -> Figure:
    """{run: loss of each step} of two runs, whose dots can coincide, above another panel of the same runs."""
    upper = [
        Series(run, range(1, len(y) + 1), y, look[run], "line and dots", f"loss, {run},")
        for run, y in losses.items()
    ]
    panels = [CurvePanel(upper, height=1.3, title="loss", xlabel="step"), lower]
    fig = curves(panels, title=title, more_keys=more_keys, gap=0.75)
    fig.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for size, line in zip((9, 4.5), fig.axes[0].get_lines(), strict=False):
        line.set_markersize(size)
    return fig


def losses_and_rows(
    losses: Mapping[str, Sequence[float]], norms: Mapping[str, Sequence[float]], title: str = ""
) -> Figure:
    """Losses over steps, above {run: the gradient's norm of each row of the table of positions}.

    A row that nothing trains has norm 0, and a cross in a strip below the axis.
    """
    look = dict(zip(losses, (Look(*SERIES[k]) for k in (0, 1)), strict=True))
    rows = {run: [k for k, norm in enumerate(y) if norm > 0] for run, y in norms.items()}
    lower = [Series(run, rows[run], [y[k] for k in rows[run]], look[run], "dots",
                    label=f"gradient's norm, {run},") for run, y in norms.items()]  # fmt: skip
    panel = CurvePanel(
        lower, log="y", height=1.3, xlabel="position", title="norm of the gradient of each row of wpe"
    )
    cross = Key(OpStyle(INK, "", "a row without a gradient, in the colour of its run"), "dot", marker="x")
    fig = losses_above(losses, look, panel, title, [cross])
    ax = fig.axes[1]
    sizes = [norm for curve in lower for norm in curve.y]
    decades = np.log10(max(sizes) / min(sizes))
    log_ticks(ax.yaxis, lambda value: f"{value:g}", (1.0,) if decades > 1.5 else (1.0, 2.0, 5.0))
    low, high = ax.get_ylim()
    ax.set_ylim(low / (high / low) ** 0.3, high)  # space for the crosses
    ax.add_patch(Rectangle((0, 0), 1, _STRIP, color=_HIDDEN, linewidth=0, transform=ax.transAxes))
    ax.set_yticks([tick for tick in ax.get_yticks() if tick >= low])
    ax.set_yticks([], minor=True)
    for height, (run, y) in zip((_STRIP / 3, 2 * _STRIP / 3), norms.items(), strict=True):
        missing = [k for k, norm in enumerate(y) if norm <= 0]
        ax.plot(missing, [height] * len(missing), "x", color=look[run].color, markersize=5,
                transform=ax.get_xaxis_transform(), label=f"_no gradient, {run}")  # fmt: skip
    trained = (f"{run}: {sum(norm > 0 for norm in row)} of {len(row)} rows get a gradient"
               for run, row in norms.items())  # fmt: skip
    fig.set_label("; ".join(trained))
    return fig
