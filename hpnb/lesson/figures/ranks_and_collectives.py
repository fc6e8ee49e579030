"""Notebook 00: the time of a message, who waits for whom in a collective, and what each rank holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpnb.lesson.machine_card import MachineCard
from hpnb.plot import units
from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import TEXT, WIDTH, new_figure, panel_title, text_inches
from hpnb.plot.curves import SHADE, CurvePanel, Look, Series, curves, log_ticks, looks, note, rule
from hpnb.plot.grammar import CARD, INK, RULE, SOFT, STYLE, ink_on, mix
from hpnb.plot.units import number, time_unit
from hpnb.record import Timeline

Curve = tuple[Sequence[float], Sequence[float]]
Rows = Sequence[Sequence[float]]
PARTS = ("compute", "wait", "move")
_CLEAR = 0.92  # of all pairs of steps
_LAUNCH_BOUND = 0.9  # of a time, spent in starting the work


def costs(
    sizes: Sequence[float],
    seconds: Sequence[float],
    fit: Curve | None = None,
    knee: float | None = None,
    more: Mapping[str, Curve] | None = None,
    title: str = "",
    *,
    label: str = "measured",
    text: bool = True,
) -> Figure:
    """Bytes against seconds, both logarithmic: seconds = latency + n / bandwidth.

    Left of the knee the time hardly depends on the size; right of it twice the bytes take twice the time.

    Args:
        sizes, seconds: bytes and seconds of the dots; empty where `more` is all there is.
        knee: bytes at which latency and bandwidth cost the same.
        more: {name: (bytes, seconds)}, such as one curve for each algorithm.
        label: of the dots; "simulated" where nothing was timed.
        text: False leaves out the minor ticks, for a picture that moves.
    """
    dots = {label: (sizes, seconds)} if len(sizes) else {}
    look = looks(more or dots)
    look |= {label: Look(INK)} if more else {}  # a dot among curves looks like none of them
    series = [Series(name, *curve, look[name], "dots") for name, curve in dots.items()]
    series += [Series(name, *curve, look[name]) for name, curve in (more or {}).items()]
    series += [Series("fit", *fit, Look(INK))] if fit is not None else []
    panel = CurvePanel(series, "time", "xy", 2.9, xlabel="size of the tensor")
    fig = curves([panel], title=title, right=0.5)  # half of the last tick is outside
    (ax,) = fig.axes
    low, high = ax.get_ylim()  # powers of ten alone would leave one tick of a short axis, or none
    log_ticks(ax.xaxis, lambda value: _short(units.byte_count(value)))
    log_ticks(ax.yaxis, lambda value: _short(units.seconds(value)), (1, 2, 5) if high / low < 300 else (1,))
    if fit is not None:
        ax.get_lines()[-1].set_zorder(2.5)  # beneath all others
    if more or not text:  # few of many decades, and most of the time that drawing takes
        ax.minorticks_off()
    if knee is not None:
        left, right = ax.get_xlim()
        ax.set_xlim(min(left, knee / 30), max(right, knee * 30))  # room for the words on both sides
        ax.set_ylim(low, high * (high / low) ** 0.12)  # and above the dots
        ax.axvspan(ax.get_xlim()[0], knee, color=SHADE, zorder=0, linewidth=0)
        rule(ax, knee, "knee", line="--")
        note(ax, "latency-bound", knee, 1, (-7, -11), "right", SOFT)
        note(ax, "bandwidth-bound", knee, 1, (7, -11), "left", SOFT)
        note(ax, f"knee {units.byte_count(knee)}", knee, 0, (6, 6))
    return fig


def _short(words: str) -> str:
    """ "1.00 kB" as "1 kB": a tick is a power of ten."""
    value, _, unit = words.partition(" ")
    return f"{float(value.replace(',', '')):g} {unit}"


def waits(tl: Timeline, title: str = "", steps: int = 1) -> Figure:
    """Where each rank's time went: a collective's time is split where the last rank arrives.

        wait = arrival of the last rank - this rank's arrival        move = end - arrival of the last rank

    The straggler has the shortest collective: the others wait for it, and it waits for nobody. `tl` has
    compute events, and all-reduces, split or not; of several `steps`, bars are the medians of their parts.
    """
    split = tl if any(e.op == "wait" for e in tl.events) else tl.split_waits("all_reduce")
    spent = time_by_part(split, steps)
    straggler, verdict = find_straggler(spent)
    rows = {
        f"rank {rank}": [Bar(parts, words="◀ waits least" if rank == straggler else "")]
        for rank, parts in spent.items()
    }
    if steps > 1 and (moves := [e.duration for e in split.events if e.op == "move"]):  # too thin to read off
        verdict += f" The move takes {units.seconds(median(moves))}, the median of all ranks and steps."
    of = f" of a step, medians of {steps}" if steps > 1 else ""
    panel = BarPanel(rows, "s", f"time{of} ({{unit}})", inside="length")
    looks = {part: STYLE[part] for part in PARTS}
    fig = bars([panel], looks, title=title, caption=verdict, right=1.1)
    fig.set_label(verdict)
    return fig


def time_by_part(tl: Timeline, steps: int = 1) -> dict[int, dict[str, float]]:
    """{rank: seconds of "compute", "wait" and "move"}; of several equal steps, each part's sum in a step, and
    the median of these sums. A step ends with a move, and all have equally many.
    """
    spent = {}
    for rank, events in tl.by_rank.items():
        moves = sorted(e.end for e in events if e.op == "move")
        ends = moves[len(moves) // steps - 1 :: max(1, len(moves) // steps)] if steps > 1 else []
        sums = {part: [0.0] * steps for part in PARTS}
        for e in events:
            part = "compute" if e.is_compute else e.op
            if part in PARTS:
                sums[part][min(bisect_left(ends, e.end), steps - 1)] += e.duration
        spent[rank] = {part: median(of_steps) for part, of_steps in sums.items()}
    return spent


def compare_moves(steps: Timeline, others: Timeline, cause: str = "the pause") -> dict[str, float | str]:
    """In how many pairs of steps an all-reduce moves longer in `others`, which have a `cause`, and in words.

    A step's move is the median of its ranks. If 23 of 25 pairs say the same, it is chance with a probability
    of 3 % (a rank-sum test of five steps each).
    """
    early, late = (_moves(tl) for tl in (steps, others))
    longer, pairs = sum(a < b for a in early for b in late), len(early) * len(late)
    shorter = sum(a > b for a in early for b in late)
    words = f"noise could explain that, so this run cannot tell whether {cause} matters"
    if max(longer, shorter) >= _CLEAR * pairs:
        words = f"in this run moves after {cause} are {'longer' if longer > shorter else 'shorter'}"
    return {"longer": longer, "pairs": pairs, "words": words}


def describe_arrivals(tl: Timeline, wait: float, move: float) -> dict[str, str]:
    """Which rank comes last to the all-reduces, and in how many of them: "rank 3 in 4 of 5 steps"; and how a
    wait compares with a move."""
    calls = tl.select(["all_reduce"])
    starts = zip(*([e.start for e in calls.by_rank[rank]] for rank in calls.ranks), strict=True)
    last = [calls.ranks[step.index(max(step))] for step in map(list, starts)]
    rank = max(calls.ranks, key=last.count)
    return {
        "last": f"rank {rank} in {last.count(rank)} of {len(last)} steps",
        "wait-is": compare_times(wait, move),
    }


def compare_times(seconds: float, others: float) -> str:
    """ "longer than", "shorter than", or "about as long as" within a tenth."""
    if abs(seconds - others) <= 0.1 * others:
        return "about as long as"
    return "longer than" if seconds > others else "shorter than"


def describe_calls(
    predicted: Mapping[str, float], measured: Mapping[str, float], started: float, card: MachineCard
) -> dict[str, object]:
    """Seconds of one of a hundred calls, how they compare with latency, and what bounds them, in words.

    Args:
        measured: {name: seconds} of one call, then of a hundred with the same bytes together.
        started: seconds until the process had started all of the hundred.
    """
    _, together = measured.values()
    call, share = together / 100, started / together
    latency = 2 * (card.ranks - 1) * card.latency
    if card.device == "cpu":
        words = "On CPUs a call returns when it is done, so this run cannot time its start apart"
    elif share >= _LAUNCH_BOUND:
        words = (
            f"The process needed {units.seconds(started)} only to start the hundred, so here starting calls, "
            "not the link, sets the time"
        )
    else:
        words = (
            f"The process had started the hundred after {units.seconds(started)}, so starting calls does not "
            "set the time here"
        )
    return {
        "call": (call, "s"),
        "latency": (latency, "s"),
        "than": compare_times(call, latency),
        "started": words,
    }


def _moves(tl: Timeline) -> list[float]:
    """Seconds in which each all-reduce moves, in order; medians over the ranks."""
    split = tl.split_waits("all_reduce").select(["move"])
    by_rank = ([e.duration for e in split.by_rank[rank]] for rank in split.ranks)
    return [median(step) for step in zip(*by_rank, strict=True)]


def find_straggler(spent: dict[int, dict[str, float]]) -> tuple[int | None, str]:
    """(the rank that the others waited for, a sentence); None where nobody stands out."""
    by_wait = sorted(spent, key=lambda rank: spent[rank]["wait"])
    least, most = by_wait[0], by_wait[-1]
    difference = spent[most]["wait"] - spent[least]["wait"]
    longest = max(sum(parts.values()) for parts in spent.values())
    scale, unit = time_unit(longest)

    def say(rank: int, part: str) -> str:
        return f"{number(spent[rank][part] / scale)} {unit}"

    if len(spent) < 2 or difference < 0.05 * longest:
        return None, f"Nobody stands out: the waits differ by {number(difference / scale)} {unit} at most."
    slowest = max(spent, key=lambda rank: spent[rank]["compute"])
    if slowest == least:
        why = f"because it computes longest, {say(least, 'compute')}"
    else:
        why = f"though rank {slowest} computes longest: it arrives late for another reason"
    words = f"Rank {least} waits least, {say(least, 'wait')}, {why}."
    return least, f"{words} The others wait up to {say(most, 'wait')}."


def tensors(
    before: Rows, after: Rows, *more: Rows, names: Sequence[str] = ("before", "after"), title: str = ""
) -> Figure:
    """What each rank holds before a collective and after it, a row of cells a rank, coloured by value.

    A number keeps its colour, so the eye finds where it went; a sum has a colour of its own.
    """
    stages = [[[float(v) for v in row] for row in stage] for stage in (before, after, *more)]
    values = [v for stage in stages for row in stage for v in row]
    order = {v: float(place) for place, v in enumerate(sorted(set(values)))}
    longest = max(len(row) for stage in stages for row in stage)
    ranks, columns = len(stages[0]), len(stages)
    between = 0.75 if columns < 4 else 0.45
    fig, axes = new_figure(
        [0.4 * ranks], title=title, columns=columns, between=between, left=0.7, bottom=0.15, head=0.28
    )
    inches = (WIDTH - 0.7 - 0.2 - between * (columns - 1)) / columns
    cell = min(0.6, inches / longest)
    words = {v: f"{v:.4g}" for v in values}
    size = min(TEXT, TEXT * (cell - 0.06) / max(text_inches(w) for w in words.values()))
    for place, (ax, rows, name) in enumerate(zip(axes, stages, names, strict=True)):
        for rank, row in enumerate(rows):
            if not row:
                _cell(ax, 0, rank, cell, CARD, "empty", edgecolor=RULE, linestyle="--")
                ax.text(
                    cell + 0.06, rank + 0.5, "nothing", size=TEXT, color=SOFT, va="center", style="italic"
                )
            for i, value in enumerate(row):
                color = _shade(order[value], 0, len(order) - 1)
                _cell(ax, i * cell, rank, cell, color, f"{name} {rank} {i}", edgecolor=CARD, linewidth=1.2)
                if size >= 6.0:
                    ax.text((i + 0.5) * cell, rank + 0.5, words[value], size=size, color=ink_on(color),
                            ha="center", va="center")  # fmt: skip
        ax.set(xlim=(0, inches), ylim=(ranks, 0), xticks=[])
        ax.set_yticks([i + 0.5 for i in range(ranks)], [f"rank {i}" * (place == 0) for i in range(ranks)])
        ax.tick_params(axis="y", length=0)
        ax.spines[["left", "bottom"]].set_visible(False)
        panel_title(ax, name)
        if place:
            far, near = -0.8 * between / inches, -0.36 * between / inches
            ax.annotate("", (near, 0.5), (far, 0.5), "axes fraction", "axes fraction",
                        arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.6})  # fmt: skip
    fig.set_label(" ".join(map(_in_words, names, stages)))
    return fig


def _in_words(name: str, rows: list[list[float]]) -> str:
    """What each rank holds at one stage, for the alt text."""
    ranks = (
        f"rank {rank} holds {', '.join(f'{v:g}' for v in row) or 'nothing'}" for rank, row in enumerate(rows)
    )
    return f"{name}: {'; '.join(ranks)}."


def _cell(ax: Axes, x: float, rank: int, wide: float, color: str, label: str, **style: object) -> None:
    ax.add_patch(Rectangle((x, rank + 0.12), wide, 0.76, facecolor=color, label=label, **style))  # type: ignore[arg-type]


def _shade(value: float, low: float, high: float) -> str:
    """Colour of a value: cividis, which reads the same to every eye, made a little paler."""
    share = (value - low) / (high - low) if high > low else 0.5
    return mix(to_hex(colormaps["cividis"](float(np.clip(0.12 + 0.88 * share, 0, 1)))), "#FFFFFF", 0.25)
