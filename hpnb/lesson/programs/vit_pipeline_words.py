"""What notebook 02 says of the steps that vit_pipeline.py runs: decisions, and words for its prose.

vit_pipeline_words.record_run(here, SHAPE, DTYPE)                 02.run
vit_pipeline_words.record_race(NAME, predicted, steps, spreads)   02.race, 02.race.step, ..

In a docstring, a sentence of the page stands in quotation marks; the words in brackets are filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from hpnb.lesson.banner import Banner
from hpnb.lesson.programs.step_timing import compute_seconds, divide_rounds
from hpnb.lesson.programs.vit_pipeline import IN_ONE_PIECE, SPLIT, add_to_ledger
from hpnb.lesson.tables import number
from hpnb.lesson.values import record
from hpnb.pipeline_parallel import Costs, Schedule
from hpnb.record import Timeline


def record_run(here: Banner, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Record what kind of run this is, and return "measured" or "replayed".

    Steps are "measured" where each rank has a GPU or a core. 02.run fills these sentences:

    - "This run's steps are [kind], and [messages]", in the opening.
    - "In this run b = [images], s = [tokens] and h = [hidden], and a number has [bytes] bytes", of a message.
    - "We show [shown]", which of several steps, at the race and at the sweep.
    - "The race's predictions contain no messages; [in-race]."
    """
    kind = "measured" if here.timings_mean_something else "replayed"
    race = "its steps contain them, and also launches and waits, so the ratio of a step to its prediction "
    race += "does not show what messages cost"
    if kind == "measured":
        messages = "steps include the time of messages"
    elif here.device == "cpu":
        messages = "messages take no time"
        race = "neither do its replayed steps, so the race does not show what messages cost"
    else:
        messages = "messages take an NVLink's time"  # REPLAY_LINK's
        race = "its replayed steps count an NVLink's time for them, so the race does not show their cost"
    images, tokens, hidden = shape
    sizes = {"images": images, "tokens": tokens, "hidden": hidden, "bytes": dtype.itemsize}
    shown = "the median step" if kind == "measured" else "a replay of each action's median time"
    record("02.run", {"kind": kind, "messages": messages, "in-race": race, "shown": shown, **sizes})
    return kind


def record_beside_gpipe(steps: Mapping[str, Timeline], schedules: Mapping[str, Schedule]) -> None:
    """Record the steps of "gpipe" and "1f1b", and how they would compare with the same times of stages.

    02.ran fills "Timed again, beside 1F1B, GPipe's step takes [..] with a bubble of [..]. 1F1B's step takes
    [..] with [..]". 02.by-medians fills "With the median times of GPipe's stages, 1F1B's step takes [..]
    times as long as GPipe's": both are simulated with these medians, which need not be equal.
    """
    record("02.ran", dict(steps))
    costs = Costs.measured(steps["gpipe"])
    simulated = {name: schedule.simulate(costs).makespan for name, schedule in schedules.items()}
    record("02.by-medians", simulated["1f1b"] / simulated["gpipe"])


def record_race(
    name: str, predicted: Mapping[str, float], steps: Mapping[str, Timeline], spreads: Mapping[str, float]
) -> None:
    """Record what the race of schedules decides, and add all steps to the ledger.

    02.race fills "So [faster]. The prediction puts [first.predicted] first, the run [first.run]".
    02.race.half-backward fills "In the 1F1B step of this run, half a backward takes [..] times as long as a
    forward". 02.race.step gives 1F1B's seconds to the sentence that compares its steps of three cells.
    """
    makespans = {schedule: tl.makespan for schedule, tl in steps.items()}
    first = {
        "predicted": min(predicted, key=predicted.__getitem__),
        "run": min(makespans, key=makespans.__getitem__),
    }
    words = race_words(makespans, spreads)
    record("02.race", {"faster": words, "first": first})
    total = {op: sum(e.duration for e in steps["1f1b"].events if e.op == op) for op in "FB"}
    record("02.race.half-backward", total["B"] / 2 / total["F"])  # the prediction's W over F
    record("02.race.step", makespans, "s")
    add_to_ledger(name, predicted, steps)


def faster_pairs(steps: Mapping[str, float], spreads: Mapping[str, float]) -> list[str]:
    """["c is faster than a and b"]: all pairs whose steps differ by more than the larger spread.

    They are the clauses of `race_words`.
    """
    shorter = {
        a: [b for b in steps if steps[b] - steps[a] > max(spreads[a], spreads[b])]
        for a in sorted(steps, key=steps.__getitem__)
    }
    return [f"{a} is faster than {listed(others)}" for a, others in shorter.items() if others]


def race_words(steps: Mapping[str, float], spreads: Mapping[str, float]) -> str:
    """The sentence "So [..]" after the race: the `faster_pairs`, and whether other pairs are undecided."""
    faster = faster_pairs(steps, spreads)
    if not faster:
        return "no schedule is faster than another: all pairs are undecided"
    decided = all(abs(steps[a] - steps[b]) > max(spreads[a], spreads[b]) for a, b in combinations(steps, 2))
    return ", ".join(faster) + ("" if decided else "; all other pairs are undecided")


def compare_split(rounds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | str]]:
    """Columns of a table with one row: how many times as long a step with split backwards takes.

    The table, 02.split, fills "[factor] times as long, with the range [range] and the verdict [verdict]".
    """
    row, ratio = "split / in one piece", divide_rounds(rounds[SPLIT], rounds[IN_ONE_PIECE])
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"  # two digits may leave the median outside
    return {"factor": {row: ratio.median}, "range": {row: spread}, "verdict": {row: ratio.verdict}}


def best_and_rivals(
    steps: Mapping[int, Timeline], rounds: Mapping[int, Sequence[Timeline]]
) -> tuple[int, list[int]]:
    """(the choice with the shortest step, those that may be as good: not longer than it in every round).

    `sweep_title`, `record_graphs` and `record_sweep` put it in words: "m = 2 may be as good".
    Of two equally fast choices, one is longer in all of six rounds in 1 of 32 cases.

    Args:
        steps: {choice, such as a number of microbatches: its median step}.
        rounds: {choice: its steps}.
    """
    best = min(steps, key=lambda m: steps[m].makespan)
    longer = {
        m: all(a.makespan > b.makespan for a, b in zip(rounds[m], rounds[best], strict=True)) for m in steps
    }
    return best, [m for m in steps if m != best and not longer[m]]


def sweep_title(best: int, rivals: Sequence[int]) -> str:
    """The title of the sweep's figure: the m with the shortest step, and those that may be as good."""
    if not rivals:
        return f"Launched from Python, the step is shortest at m = {best}"
    return f"Launched from Python: m = {best} takes least; {listed(rivals)} may be as good"


def record_graphs(
    steps: Mapping[int, Timeline],
    graphed: Mapping[int, Timeline],
    rounds: Mapping[int, Sequence[Timeline]],
    notes: Sequence[str],
) -> str:
    """Record in words what CUDA graphs changed at the largest number of microbatches, and return them.

    02.graphs fills "So c falls, and more microbatches pay. In this run, [..]". What is returned is printed
    under the figure: the same words, then `notes`.

    Args:
        steps, graphed: {number of microbatches: median step}, launched from Python and as graphs.
        rounds: {number of microbatches: all its steps with graphs}.
        notes: which stages ran without graphs.
    """
    if not graphed:
        record("02.graphs", "the ranks have no GPU, so the figure has one panel")
        return "On GPUs the figure has a second panel: the same steps with CUDA graphs."
    most, (best, rivals) = max(steps), best_and_rivals(graphed, rounds)
    eager, replayed = (number(at[most].makespan, "s") for at in (steps, graphed))
    words = f"the step at m = {most} takes {replayed} with graphs instead of {eager}, "
    words += f"and the shortest step is {number(graphed[best].makespan, 's')} at m = {best}"
    words += f", where m = {listed(rivals)} may be as good" if rivals else ""
    words += ", although some stages could not be captured" if notes else ""
    record("02.graphs", words)
    return "\n".join([f"{words[0].upper()}{words[1:]}.", *notes])


def record_sweep(
    steps: Mapping[int, Timeline],
    rounds: Mapping[int, Sequence[Timeline]],
    parts: Mapping[str, Sequence[float]],
    predicted: Sequence[float],
    usual: int,
) -> None:
    """Record what the sweep over numbers of microbatches shows. Its values fill these sentences:

    - 02.sweep.best, 02.sweep.verdict: "The shortest step has m = [best]; [verdict]".
    - 02.sweep-bubble: "In the shortest step the bubble takes [best], at m = [02.sweep.most] [most]".
    - 02.sweep: the bars are "furthest from" the formula "at m = [furthest], where the step takes [over] times
      as long as by the formula".
    - 02.sweep-step, 02.sweep-share: "At m = 1 [..] that step, [alone] [..]. The shortest step without graphs
      takes [best], which is [share] of that. At this m the ranks compute for [work] in all". The step of the
      `usual` m is compared with those of two other cells.

    Args:
        steps: {number of microbatches: median step}, in rising order.
        rounds: {number of microbatches: all its steps}.
        parts: of the median steps, as `step_parts` has them.
        predicted: seconds of each by the formula.
        usual: the number of microbatches of other cells.
    """
    took = {m: tl.makespan for m, tl in steps.items()}
    (best, rivals), bubbles = best_and_rivals(steps, rounds), dict(zip(took, parts["bubble"], strict=True))
    ratios = {m: took[m] / formula for m, formula in zip(took, predicted, strict=True)}
    furthest = max(ratios, key=lambda m: abs(math.log(ratios[m])))
    record("02.sweep", {"best": best, "most": max(took), "furthest": furthest, "over": ratios[furthest]})
    work = compute_seconds(steps[best]) * len(steps[best].ranks)
    record("02.sweep-step", {"alone": took[1], "best": took[best], "usual": took[usual], "work": work}, "s")
    some, every = (f"{which} of {len(rounds[best])} rounds" for which in ("some", "each"))
    decided = f"every other m took longer in {every}"
    undecided = f"m = {listed(rivals)} took less in {some} and may be as good" if rivals else ""
    record("02.sweep.verdict", undecided or decided)
    record("02.sweep-bubble", {"best": bubbles[best], "most": bubbles[max(took)]}, "s")
    record("02.sweep-share", 100 * took[best] / took[1], "%")


def listed(names: Sequence[object]) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    *others, last = map(str, names)
    return " and ".join([*([", ".join(others)] if others else []), last])
