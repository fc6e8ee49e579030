"""Notebook 01: what communication adds to a step, and what a rank keeps in each ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

import torch
from matplotlib.figure import Figure

from hpnb.lesson.machine_card import MachineCard
from hpnb.lesson.programs.launch_timing import Launch
from hpnb.lesson.programs.step_timing import (
    Spread,
    divide_rounds,
    exposed_seconds,
    measured_knee,
    subtract_rounds,
)
from hpnb.lesson.programs.vit_pipeline_words import listed
from hpnb.models import ViTSize
from hpnb.plot.bars import Bar, BarPanel, bars
from hpnb.plot.canvas import SMALL, WIDTH, Key, text_inches
from hpnb.plot.curves import CurvePanel, Series, count, curves, log_ticks, looks, rule, set_ticks
from hpnb.plot.grammar import CARD, CATEGORY, INK, SOFT, STYLE, OpStyle
from hpnb.plot.timeline import timeline
from hpnb.plot.units import seconds as in_seconds
from hpnb.record import Event, Timeline
from hpnb.theory import bytes_sent, exposed_share

ALONE, ALL_REDUCE = "step alone", "all-reduce alone"
AFTER, DURING = "reduced after the backward", "reduced during the backward"
MIDDLE = 16  # images of a rank
LIMIT = 1.1  # below this ratio communication counts as free
LAUNCH_BOUND = 0.9  # of a step, spent in launching it
FOR_MESSAGES = "work for messages"
_LAW_POINTS = 300
_OUTLINED = 100  # messages of a rank that have outlines; those of more would cover their colour


def typical_round(rounds: Mapping[str, Sequence[Timeline]]) -> dict[str, Timeline]:
    """{name: its timeline in one round}: the round whose steps are nearest to the medians of all versions.

    The distance of a round is that of the version that is furthest from its median, as a factor.
    """
    medians = {name: median(tl.makespan for tl in tls) for name, tls in rounds.items()}
    together = zip(*rounds.values(), strict=True)
    away = [
        max(abs(math.log(tl.makespan / middle)) for tl, middle in zip(tls, medians.values(), strict=True))
        for tls in together
    ]
    nearest = min(range(len(away)), key=away.__getitem__)
    return {name: tls[nearest] for name, tls in rounds.items()}


def median_steps(rounds: Mapping[str, Sequence[Timeline]]) -> tuple[dict[str, float], dict[str, float]]:
    """({name: seconds of its step}, {name: seconds of exposed communication}), medians of the rounds."""
    steps = {name: median(tl.makespan for tl in tls) for name, tls in rounds.items()}
    return steps, {name: median(map(exposed_seconds, tls)) for name, tls in rounds.items()}


def versions(timelines: Mapping[str, Timeline], buckets: Spread, overlap: Spread) -> Figure:
    """The versions above each other. The title follows the ratios: of the second version over the first,
    `buckets`, and of the third over the second, `overlap`.

    Filling buckets, starting all-reduces and what is left to do after the last of them is one kind of work.
    """
    results = {
        "faster": "Buckets save time, and overlap saves more",
        "slower": "Buckets save time; overlap costs time here",
        "cannot tell": "Buckets save time; whether overlap does, the rounds cannot tell",
    }
    title = results[overlap.verdict]
    if buckets.verdict != "faster":
        title = f"The verdict on buckets: {buckets.verdict}; on overlap: {overlap.verdict}"
    named = map(_name_work, timelines.values())
    fig = timeline(*named, names=list(timelines), exposed=True, bubble=None, title=title)
    many = _OUTLINED * len(next(iter(timelines.values())).ranks)
    for artist in (artist for ax in fig.axes for artist in ax.collections):
        if artist.get_label() == "all_reduce" and len(artist.get_paths()) > many:
            artist.set_linewidth(0)
    return fig


def _name_work(tl: Timeline) -> Timeline:
    """The timeline with FOR_MESSAGES in place of "compute" and of what a backward does after its messages."""
    ends = {rank: [e.end for e in tl.by_rank[rank] if not e.is_compute] for rank in tl.ranks}

    def name(e: Event) -> Event:
        last = max(ends[e.rank], default=math.inf)
        return replace(e, op=FOR_MESSAGES) if e.op == "compute" or (e.op == "B" and e.start >= last) else e

    return replace(tl, events=tuple(map(name, tl.events)))


def divide_versions(rounds: Mapping[str, Sequence[Timeline]]) -> list[Spread]:
    """How many times as long each version takes as the one before, divided within each round."""
    steps = [[tl.makespan for tl in tls] for tls in rounds.values()]
    return [divide_rounds(after, before) for before, after in pairwise(steps)]


def describe_versions(rounds: Mapping[str, Sequence[Timeline]]) -> dict[str, object]:
    """What each version does for its messages in the typical round, and who is late in the last version.

    "messages" counts the all-reduces of a rank, "handling" has the seconds that the slowest rank works for
    them, both under the first letters of the versions. "late" has the median seconds between the first and
    the last rank that begins its backward, and the rank that is last in most rounds.
    """
    drawn = {name[0].lower(): tl for name, tl in typical_round(rounds).items()}
    messages = {name: len(tl.select(["all_reduce"]).by_rank[tl.ranks[0]]) for name, tl in drawn.items()}
    handling = {name: (_handling_seconds(_name_work(tl)), "s") for name, tl in drawn.items()}
    *_, last = rounds.values()
    return {"messages": messages, "handling": handling, "late": _late_ranks(last)}


def _handling_seconds(tl: Timeline) -> float:
    """Seconds that the slowest rank works for messages."""
    return max(sum(e.duration for e in tl.by_rank[rank] if e.op == FOR_MESSAGES) for rank in tl.ranks)


def _late_ranks(tls: Sequence[Timeline]) -> dict[str, object]:
    begins = [
        {rank: min(e.start for e in tl.by_rank[rank] if e.op == "B") for rank in tl.ranks} for tl in tls
    ]
    last = [max(begin, key=begin.__getitem__) for begin in begins]
    rank = max(sorted(set(last)), key=last.count)
    return {
        "seconds": (median(max(begin.values()) - min(begin.values()) for begin in begins), "s"),
        "last": f"rank {rank} in {last.count(rank)} of {len(last)} rounds",
    }


def describe_launches(launches: Sequence[Launch], device: str) -> dict[str, object]:
    """The slowest of ranks with equal work and no messages, and what launching has to do with it; on a "cpu"
    the process computes itself.
    """
    rank = max(range(len(launches)), key=lambda rank: launches[rank].done)
    slowest = launches[rank]
    took = in_seconds(slowest.launched)
    if device == "cpu":
        words = "on CPUs there are no launches to time"
    elif slowest.launched >= LAUNCH_BOUND * slowest.done:
        words = f"its process needs {took} just to launch the step, so launches set the time there"
    else:
        words = f"its process has launched the step after {took}, so launches do not set the time there"
    return {"rank": f"rank {rank}", "words": words}


def range_words(value: float, measured: Spread) -> str:
    """Where a predicted ratio lies."""
    side = "below" if value < measured.low else "above" if value > measured.high else "within"
    return f"{side} this range"


def describe_ratio(measured: Spread, predicted: float) -> dict[str, float | str]:
    """A measured ratio, its verdict, and where the predicted one lies."""
    words = {"verdict": measured.verdict, "predicted-is": range_words(predicted, measured)}
    return {**measured._asdict(), "predicted": predicted, **words}


def explain_step(
    causes: Mapping[str, Sequence[float]], last: float, measured: Spread
) -> dict[str, float | str | tuple[float, str]]:
    """Whether {ALONE or a cause: seconds of each round} and `last`, the seconds of the last bucket, explain
    the `measured` ratio of a step.

    Each cause multiplies the time by a factor, the median of the ratios within rounds, and the last bucket
    adds its share of the step ALONE.
    """
    alone, others = causes[ALONE], [seconds for cause, seconds in causes.items() if cause != ALONE]
    share = last / median(alone)
    factors = Spread(
        *map(math.prod, zip(*(divide_rounds(seconds, alone) for seconds in others), strict=True))
    )
    ratio = factors.median + share
    place = range_words(ratio, measured)
    if ratio < measured.low <= factors.high + share:
        place += ", but with the upper ends of the factors' ranges it would reach it"
        meaning = "this run cannot decide"
    elif ratio > measured.high >= factors.low + share:
        place += ", but with the lower ends of the factors' ranges it would reach it"
        meaning = "this run cannot decide"
    elif measured.low <= 1 <= measured.high:
        place += ", which includes 1"
        meaning = "this run cannot decide"
    else:
        meaning = {
            "below this range": "something else costs time as well",
            "within this range": "these costs can explain the step",
            "above this range": "these costs do not simply add up",
        }[place]
    return {
        "ratio": ratio,
        "share": share,
        "lies": f"The sum lies {place}, so {meaning}",
        "alone": (median(alone), "s"),
        "last-bucket": (last, "s"),
    }


def free_words(ratios: Mapping[int, Spread]) -> str:
    """At which tokens a step is not free, at which undecided, and from where on free, in words."""
    first_free = _surely_free(ratios)
    before = [tokens for tokens in sorted(ratios) if first_free is None or tokens < first_free]
    not_free = [tokens for tokens in before if ratios[tokens].low >= LIMIT]
    undecided = [tokens for tokens in before if tokens not in not_free]
    words = [f"{verdict} at {listed(at)}" for verdict, at in
             (("not free", not_free), ("undecided", undecided)) if at]  # fmt: skip
    words += [f"free from {first_free:,} on"] if first_free is not None else []
    return ", ".join(words)


def law_words(law: float, ratios: Mapping[int, Spread]) -> str:
    """Whether a step with overlap becomes free where the law says, in words; as far as the ranges show."""
    first_free = _surely_free(ratios)
    if law <= _surely_not_free(ratios):
        return "with overlap a free step needs more tokens than the law says"
    if first_free is not None and law > first_free:
        return "with overlap a free step needs fewer tokens than the law says"
    return "the steps with overlap do not contradict the law"


def verdict_words(ratios: Mapping[int, Spread]) -> str:
    """At which tokens a ratio is "faster", at which "slower", and at which undecided, in words."""
    verdicts = (("faster", "faster"), ("slower", "slower"), ("cannot tell", "undecided"))
    at = {word: [t for t in sorted(ratios) if ratios[t].verdict == verdict] for verdict, word in verdicts}
    return ", ".join(f"{word} at {listed(tokens)}" for word, tokens in at.items() if tokens)


def describe_sweep(
    after: Mapping[int, Spread],
    during: Mapping[int, Spread],
    overlap: Mapping[int, Spread],
    law: Mapping[str, float],
) -> dict[str, str]:
    """When steps are free, by the law from `law["during"]` tokens on, and when overlap pays, in words."""
    return {
        "during": free_words(during),
        "after": free_words(after),
        "versus-law": law_words(law["during"], during),
        "overlap": verdict_words(overlap),
    }


def free_range(ratios: Mapping[int, Spread]) -> tuple[int, int]:
    """Between which tokens a step becomes free: the most that are not, 0 if all are, and the first that are.

    Raises:
        ValueError: no size is surely free.
    """
    first_free = _surely_free(ratios)
    if first_free is None:
        raise ValueError(f"no step is surely free at {listed(sorted(ratios))} tokens; measure longer ones")
    return _surely_not_free(ratios), first_free


def _surely_free(ratios: Mapping[int, Spread]) -> int | None:
    return measured_knee({tokens: spread.high for tokens, spread in ratios.items()}, LIMIT)


def _surely_not_free(ratios: Mapping[int, Spread]) -> int:
    """The most tokens whose whole range is at the limit or above; 0 if there are none."""
    return max((tokens for tokens, spread in ratios.items() if spread.low >= LIMIT), default=0)


def cost_of_overlap(times: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Seconds by which DURING and AFTER take longer than ALONE, seconds of ALL_REDUCE by itself, and how
    DURING compares with ALONE and ALL_REDUCE one after the other, in words."""
    during, after = (subtract_rounds(times[way], times[ALONE]) for way in (DURING, AFTER))
    in_turn = [sum(pair) for pair in zip(times[ALONE], times[ALL_REDUCE], strict=True)]
    beyond = subtract_rounds(times[DURING], in_turn)
    words = "neither clearly longer nor clearly less than"
    if beyond.low > 0 or beyond.high < 0:
        words = f"{in_seconds(abs(beyond.median))} {'longer' if beyond.low > 0 else 'less'} than"
    seconds = {"during": during.median, "after": after.median, "all-reduce": median(times[ALL_REDUCE])}
    return {**{name: (value, "s") for name, value in seconds.items()}, "compared": words}


def compare_with_rate(
    times: Mapping[int, Mapping[str, Sequence[float]]], size: ViTSize, card: MachineCard
) -> dict[str, object]:
    """How many times as long as at the card's rate the step ALONE takes with the fewest tokens."""
    tokens = min(times)
    at_rate = size.training_flops(tokens // size.tokens, classes=3) / card.matmul
    return {"tokens": tokens, "times": median(times[tokens][ALONE]) / at_rate}


def describe_wide(size: ViTSize, dtype: torch.dtype, card: MachineCard) -> dict[str, object]:
    """The model of the sweep, the bytes of its gradients, and what B and R say at MIDDLE images a rank."""
    parameters = size.parameters(classes=3)
    gradient = dtype.itemsize * parameters
    return {
        "blocks": size.layers,
        "width": size.hidden,
        "parameters": parameters,
        "gradient": (gradient, "B"),
        "by-bandwidth": (bytes_sent("all_reduce", gradient, card.ranks) / card.bandwidth, "s"),
        "at-rate": (size.training_flops(MIDDLE, classes=3) / card.matmul, "s"),
    }


def spread_columns(spreads: Mapping[str, Mapping[int, Spread]]) -> dict[str, dict[str, float | str]]:
    """Columns of a table, a median and a range for each head; a row for each number of tokens."""
    columns: dict[str, dict[str, float | str]] = {}
    for head, by_tokens in spreads.items():
        columns[head] = {f"{t:,} tokens": spread.median for t, spread in by_tokens.items()}
        columns[f"{head}: range"] = {f"{t:,} tokens": spread.range for t, spread in by_tokens.items()}
    return columns


def step_ratios(
    after: Mapping[float, Spread],
    during: Mapping[float, Spread],
    law_knee: float,
    free: Mapping[str, float | None],
    title: str = "what communication adds to a step",
) -> Figure:
    """Tokens per rank against the time of a step over the time of the same step without communication.

    Args:
        after, during: {tokens: ratio} of steps that reduce after and during the backward: dots with bars, a
            little to the left and right of their tokens, so that none covers another.
        law_knee: tokens at which the backward takes as long as the all-reduce; it decides the two lines.
        free: {what says so: the tokens from which on a step is free}, a rule for each; None is left out.
    """
    measured, tokens = {AFTER: after, DURING: during}, sorted({*after, *during})
    ratios = [ratio for points in measured.values() for spread in points.values() for ratio in spread]
    knees = {words: tokens for words, tokens in free.items() if tokens is not None}
    low = min(tokens[0], law_knee / 2) / 1.2
    high = 1.3 * max([tokens[-1], 1.5 * law_knee, *knees.values()])
    line = [low * (high / low) ** (i / _LAW_POINTS) for i in range(_LAW_POINTS + 1)]
    aside = {AFTER: 0.95, DURING: 1.05} if after and during else {AFTER: 1.0, DURING: 1.0}
    look, series = looks(measured), []
    for name, points in measured.items():
        shares = (exposed_share(t / law_knee, name == DURING) for t in line)
        series.append(
            Series(name, line, [1 / (1 - share) for share in shares], look[name], "line", f"law {name}")
        )
        if points:
            x, y = [t * aside[name] for t in points], [spread.median for spread in points.values()]
            series.append(Series(name, x, y, look[name], "dots", f"measured {name}"))
    words = "lines: the law; markers: measured, a little left and right of their tokens; bars: ranges"
    keys = [Key(OpStyle(SOFT, "", words), "words")]
    panel = CurvePanel(
        series, "step / step alone (log scale)", "xy", 2.8, xlabel="tokens per rank (log scale)"
    )
    fig = curves([panel], title=title[:1].upper() + title[1:], more_keys=keys)
    (ax,) = fig.axes
    bottom = min(0.9, 0.95 * min(ratios))
    top = 1.3 * max(1.5, *ratios)  # the law may leave the figure: the decision is at the bottom
    for name, points in measured.items():
        ends = [(spread.low, spread.high) for spread in points.values()]
        for t, (lowest, highest) in zip(points, ends, strict=True):
            ax.vlines(t * aside[name], lowest, highest, look[name].color, zorder=2.2)
    ax.set_ylim(bottom, top)
    ratios_drawn = [y for y in (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0) if y < top]
    set_ticks(ax.yaxis, ratios_drawn, "{:g}".format)
    ax.set_xlim(low, high)
    ax.axhline(LIMIT, color=INK, linestyle=":", linewidth=1.2, zorder=1.8, label="limit")
    ax.text(low * 1.04, LIMIT * 1.01, f"free below {LIMIT:g}", size=SMALL, color=INK, va="bottom")
    labels = [f"{words} {count(knee)} tokens" for words, knee in knees.items()]
    for row, (label, (words, knee)) in enumerate(zip(labels, knees.items(), strict=True)):
        rule(ax, knee, words, line="--")
        at_right = math.log(knee / low) > 0.65 * math.log(high / low)
        ax.text(knee / 1.04 if at_right else knee * 1.04, 0.92 - 0.1 * row, label, size=SMALL, color=INK,
                zorder=6, ha="right" if at_right else "left", transform=ax.get_xaxis_transform(),
                bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1.0})  # fmt: skip
    fig.set_label("; ".join(labels))
    if _have_room(tokens, low, high, ax.get_position().width * WIDTH):
        set_ticks(ax.xaxis, tokens, count)
    else:
        log_ticks(ax.xaxis, count)
    return fig


def _have_room(ticks: Sequence[float], low: float, high: float, inches: float) -> bool:
    """Whether the labels of these ticks do not touch on a logarithmic axis of `inches`."""
    wide = [text_inches(count(tick)) / 2 + 0.06 for tick in ticks]
    apart = [math.log(b / a) / math.log(high / low) * inches for a, b in pairwise(ticks)]
    return all(a + b <= room for (a, b), room in zip(pairwise(wide), apart, strict=True))


Kept = Mapping[str, Mapping[str, float]]  # {name: {category: bytes}}


def states(predicted: Kept, measured: Kept, title: str = "") -> Figure:
    """What a rank keeps, by category: for each ZeRO stage a predicted bar over a measured one."""
    rows = {name: [Bar(predicted[name], True), Bar(measured[name])] for name in predicted}
    outline = Key(OpStyle(STYLE["compute"].color, "", "predicted (filled: measured)"), "hollow")
    panel = BarPanel(rows, "B", "bytes on one rank ({unit})", row_inches=0.52)
    return bars([panel], CATEGORY, title=title, more_keys=[outline], right=0.65)
