"""Titles of notebook 11's figures and tables, each by what the run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from hpnb.lesson.programs.step_timing import fall_in_words
from hpnb.lesson.programs.vit_pipeline_words import listed

_POPULAR, _MORE_EVEN = 2.0, 0.95  # loads over the mean load, and over the load without balancing


def used_title(used: int, weights: int) -> str:
    """Which share of the experts' weights works on a token."""
    return f"{100 * used / weights:.0f} % of the experts' weights work on a token"


def dispatch_title(chosen: Sequence[Sequence[Sequence[int]]], num_experts: int, popular: int) -> str:
    """Whether the rank with the popular expert gets the most rows; `chosen` as in `dispatched_rows`."""
    local = num_experts // len(chosen)
    loads = [0] * len(chosen)
    for expert in (expert for rows in chosen for experts in rows for expert in experts):
        loads[expert // local] += 1
    busiest = [rank for rank, load in enumerate(loads) if load == max(loads)]
    if busiest == [popular // local]:
        return "counted · rows go to their expert's rank, and a popular expert loads it"
    if len(busiest) > 1:
        return f"counted · rows go to their expert's rank; here ranks {listed(busiest)} get most"
    return f"counted · rows go to their expert's rank; here rank {busiest[0]} gets most"


def waiting_title(seconds: Sequence[float], popular: int) -> str:
    """Whom all ranks wait for; `popular` is the rank that has the popular expert."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    whom = "the one with the popular expert" if slowest == popular else f"rank {slowest}"
    return f"replayed · all ranks wait for {whom}"


def loads_title(imbalances: Mapping[str, Sequence[float]], last: int = 10) -> str:
    """What {way of balancing: busiest expert / mean in each step} says; "no balancing" is the first.

    An expert is popular with more than twice the mean load, and loads are more even if they are a twentieth
    lower.
    """
    late = {way: fmean(run[-last:]) for way, run in imbalances.items()}
    free = late.pop("no balancing")
    popular = all(max(run) > _POPULAR for run in imbalances.values())
    if popular and max(late.values()) <= _POPULAR < free:
        return "counted · an expert becomes popular in each run; balancing ends that"
    more = [way for way, load in late.items() if load > _MORE_EVEN * free]
    if more:
        return f"counted · with {' and '.join(more)}, loads end no more even than without"
    return "counted · with balancing, loads end more even"


def capacity_title(dropped: Mapping[str, Sequence[float]], at: int, factor: float) -> str:
    """What shares of dropped rows of an unbalanced and of a balanced model say at one capacity."""
    free, balanced = (shares[at] for shares in dropped.values())
    fewer = "fewer rows" if balanced < free else "no fewer rows"
    return f"measured · a balanced model drops {fewer} at {factor:g} times the mean load"


def fault_title(losses: Mapping[str, Sequence[float]], unused: Mapping[str, int]) -> str:
    """What two runs say: their losses, and {run: experts without a token that have a gradient}."""
    right, wrong = unused.values()
    tell = "gradients of experts without a token tell"
    if not right < wrong:
        tell = "gradients of experts without a token do not tell"
    fall = fall_in_words(losses)
    return f"measured · {fall[0].lower()}{fall[1:]}; {tell}"


def unused_title(unused: Mapping[str, int]) -> str:
    """Of {run: experts without a token that have a gradient}: which runs have none."""
    none = [run for run, count in unused.items() if count == 0]
    if not none:
        return "Unused experts have gradients in both runs"
    return f"Unused experts have no gradient if {' or '.join(none)}"
