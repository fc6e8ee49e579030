"""What notebook 08 decides from the runs of gpt2_hybrid.py: which layout wins, and on which link."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from hpnb import theory
from hpnb.lesson.programs.gpt2_hybrid import LayoutRun
from hpnb.lesson.tables import number
from hpnb.record import Timeline
from hpnb.theory import LayoutTask


def clock_in_words(device: str) -> str:
    """What times one action where ranks share cores or GPUs: of a CPU's ranks or of a GPU's."""
    return "CPU time, without waits for a core" if device == "cpu" else "a turn, alone on its GPU"


def pairs_in_order(ranking: Sequence[str], took: Mapping[str, float]) -> tuple[int, int, float]:
    """How well a predicted ranking orders layouts: (pairs in the right order, all pairs, by what share the
    layout that is put first takes longer in the worst of the other pairs).
    """
    gaps = [took[first] / took[second] - 1 for first, second in combinations(ranking, 2)]
    wrong = [gap for gap in gaps if gap > 0]
    return len(gaps) - len(wrong), len(gaps), max(wrong, default=0.0)


def ties(
    runs: Mapping[str, LayoutRun], took: Mapping[str, float], ranking: Sequence[str]
) -> dict[str, float | str | tuple[float, str]]:
    """What a race decides: steps are tied that differ by no more than repeats of one layout do.

    "spread" is by what share these differ at most, "first" how many are tied for the first place, in words;
    of the pairs that are not tied, "decided", the ranking has "order" in the predicted order. "alone" says in
    words whether its first choice is right.
    """
    spread = max(max(run.seconds_of_repeats) / min(run.seconds_of_repeats) - 1 for run in runs.values())
    first = sum(seconds <= (1 + spread) * min(took.values()) for seconds in took.values())
    gaps = [took[late] / took[early] for early, late in combinations(ranking, 2)]
    decided = [gap for gap in gaps if max(gap, 1 / gap) > 1 + spread]
    return {
        "spread": (100 * spread, "%"),
        "first": f"the first {first} layouts are tied" if first > 1 else "no layout is tied with the first",
        "decided": len(decided),
        "order": sum(gap > 1 for gap in decided),
        "alone": "Not here" if took[ranking[0]] > (1 + spread) * min(took.values()) else "The first one, yes",
    }


def misses_by_axis(
    runs: Mapping[str, LayoutRun], took: Mapping[str, float], steps: Mapping[str, float]
) -> dict[str, float]:
    """How many times as long as predicted steps take, at least and at most: with tp, with cp alone, with
    neither."""
    ratios: dict[str, list[float]] = {}
    for name, run in runs.items():
        kind = "with-tp" if run.layout.tp > 1 else "with-cp" if run.layout.cp > 1 else "neither"
        ratios.setdefault(kind, []).append(took[name] / steps[name])
    ends = {"least": min, "most": max}
    return {f"{kind}.{end}": pick(some) for kind, some in ratios.items() for end, pick in ends.items()}


def losses_apart(runs: Mapping[str, LayoutRun], dtype: torch.dtype) -> tuple[float, str, float]:
    """By what share of it the layouts' largest loss after one update is above the smallest; "<"; and what
    this may be, because layouts add in another order and in `dtype`."""
    losses = [run.losses[1] for run in runs.values()]
    if not all(map(math.isfinite, losses)):  # `max` and `min` pass over a NaN
        return math.inf, "<", 0.0
    return max(losses) / min(losses) - 1, "<", 1e-2 if dtype.itemsize == 2 else 1e-5


def exposed_cp(runs: Mapping[str, LayoutRun]) -> dict[str, float]:
    """{way of context parallelism: seconds} of the layouts with cp."""
    return {
        run.layout.context_parallel: run.parts["exposed cp"] for run in runs.values() if run.layout.cp > 1
    }


def resumed_in_words(resumed: Sequence[float], undisturbed: Sequence[float]) -> str:
    """How many losses of a resumed run are those of the run that nobody killed, for a figure's title."""
    same = sum(a == b for a, b in zip(resumed, undisturbed, strict=False))
    if same == len(resumed):
        return f"Resumed: all {same} losses are those of the run that nobody killed"
    return f"Resumed: {same} of {len(resumed)} losses are those of the run that nobody killed"


def idle_in_words(timeline: Timeline) -> str:
    """Where each stage of a step idles most, for a figure's title."""
    words = []
    for stage, events in timeline.by_rank.items():
        ends = min(e.start for e in events) + timeline.makespan - max(e.end for e in events)
        inside = timeline.makespan - timeline.work(stage) - ends
        idle = max(ends, inside) > 0.01 * timeline.makespan
        where = "inside the step" if inside > ends else "at its ends"
        words.append(f"stage {stage} {f'idles most {where}' if idle else 'hardly idles'}")
    return ", ".join(words).capitalize()


def replay_on_links(
    runs: Mapping[str, LayoutRun], task: LayoutTask, factors: Sequence[float], rules: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The runs replayed with the bandwidth multiplied by each factor: columns of a table with a row a factor.

    They are the fastest layout, replayed and predicted, and what the choice of the prediction and of each
    rule, {its name: the layout that it chooses}, costs over the fastest, in %.
    """
    first = next(iter(runs.values()))
    table: dict[str, dict[str, Any]] = {}
    for factor in factors:
        row, link = f"{factor} x bandwidth", replace(first.link, bandwidth=factor * first.link.bandwidth)
        took = {name: sum(run.parts_on(link).values()) for name, run in runs.items()}
        expected = {
            name: sum(theory.layout_parts(replace(task, inside=link), run.layout).values())
            for name, run in runs.items()
        }
        best, ours = min(took, key=lambda n: took[n]), min(expected, key=lambda n: expected[n])
        table.setdefault("fastest, replayed", {})[row] = best
        table.setdefault("fastest, predicted", {})[row] = ours
        for choice, name in {"prediction": ours, **rules}.items():
            table.setdefault(f"{choice} costs (%)", {})[row] = 100 * (took[name] / took[best] - 1)
    return table


def links_in_words(table: Mapping[str, Mapping[str, Any]]) -> str:
    """Which layout is fastest on each of three links of `replay_on_links`, and what the predicted choice
    costs on them at most, in two sentences."""
    replayed, predicted, costs = [*table.values()][:3]
    first, tenth, hundredth = replayed.values()
    if len({*replayed.values(), *predicted.values()}) == 1:
        return f"On all three links {first} is fastest, and it is predicted to be"
    most = max(costs.values())
    ours = f"The prediction's choices lose up to {number(most, '%')}" if most else "All three are predicted"
    return (
        f"The fastest is {first} on this link, {tenth} with a tenth of its bandwidth, and {hundredth} with a "
        f"hundredth. {ours}"
    )


def choice_in_words(choice: str, best: str, took: Mapping[str, float]) -> str:
    """What the prediction chose, `choice`, and what that costs over the `best`, as the end of a sentence."""
    if choice == best:
        return "chose it, too"
    return f"chose {choice}, which takes {number(100 * (took[choice] / took[best] - 1), '%')} longer"


def fit_in_words(fits: Sequence[str], predicted: Sequence[str]) -> str:
    """Whether the layouts that fit are those of which it was predicted, as the end of a sentence."""
    if {*fits} == {*predicted}:
        return "the predicted ones"
    missing = "; ".join(name for name in predicted if name not in fits)
    added = "; ".join(name for name in fits if name not in predicted)
    words = [f"without {missing}"] * bool(missing) + [f"with {added}"] * bool(added)
    return f"the predicted ones {' and '.join(words)}"
