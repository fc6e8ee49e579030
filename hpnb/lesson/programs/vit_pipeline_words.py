"""What notebook 02 says of the steps that vit_pipeline.py runs: decisions, and words for its prose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from hpnb.lesson.banner import Banner
from hpnb.lesson.programs import gpt2_pipeline
from hpnb.lesson.programs.gpt2_pipeline import StepRepeats
from hpnb.lesson.programs.step_timing import compute_seconds, divide_rounds
from hpnb.lesson.programs.vit_pipeline import IN_ONE_PIECE, SPLIT, add_to_ledger, spread_of
from hpnb.lesson.tables import number
from hpnb.lesson.values import record
from hpnb.pipeline_parallel import Costs, Schedule
from hpnb.record import Timeline


def record_run(here: Banner, shape: Sequence[int], dtype: torch.dtype) -> str:
    """Record under 02.run what kind of run this is, and return it, "measured" or "replayed"."""
    kind = "measured" if here.timings_mean_something else "replayed"
    race = "its steps contain them, and also launches and waits, so the ratio of a step to its prediction "
    race += "does not show what messages cost"
    if kind == "measured":
        messages = "they include the time of messages"
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
    record("02.run.repeats", repeats_of(here))
    return kind


def beside_gpipe_title(ran: Mapping[str, Timeline]) -> str:
    """What one step of "1f1b" and of "gpipe" says; page 02 claims a difference under a fifth."""
    ratio = ran["1f1b"].makespan / ran["gpipe"].makespan
    if abs(ratio - 1) < 0.2:
        return "1F1B takes about as long as GPipe"
    return f"1F1B takes {ratio:.2f} times as long as GPipe"


def walk_title(walked: Timeline) -> str:
    """What the walk of one microbatch says; page 02 claims that ranks take turns."""
    if walked.bubble_fraction > 0.95 - 1 / len(walked.ranks):
        return "One microbatch: one rank works at a time"
    return f"One microbatch: ranks are idle for {100 * walked.bubble_fraction:.0f} % of the time"


def heavy_title(took: Mapping[str, float]) -> str:
    """What the steps of the partitions "uniform" and "heavy" say."""
    if took["heavy"] > took["uniform"]:
        return "One heavy stage delays every microbatch"
    return "With one heavy stage, the step took no longer here"


def busiest_title(tl: Timeline) -> str:
    """Which rank works longest."""
    return f"Others wait for stage {max(tl.ranks, key=tl.work)}"


def repeats_of(here: Banner) -> int:
    """How often the race times each schedule."""
    return gpt2_pipeline.step_repeats(here.device)


def claim_faster(rounds: Mapping[str, Sequence[Timeline]], fast: str, slow: str) -> None:
    """Claim that all steps of `fast` are shorter than all of `slow`, or say that the run does not decide.

    The range of both is printed.
    """
    runs = _repeats(rounds)
    gpt2_pipeline.claim_faster(runs, fast, slow, "02")
    print(range_words("steps", {name: runs[name].seconds for name in (fast, slow)}, "s"))


def claim_less_idle(rounds: Mapping[str, Sequence[Timeline]], less: str, more: str) -> None:
    """Claim that all bubbles of `less` are below all of `more`, or say that the run does not decide.

    The range of both is printed.
    """
    gpt2_pipeline.claim_less_idle(_repeats(rounds), less, more, "02")
    bubbles = {name: [100 * tl.bubble_fraction for tl in rounds[name]] for name in (less, more)}
    print(range_words("bubbles", bubbles, "%"))


def range_words(what: str, values: Mapping[str, Sequence[float]], unit: str) -> str:
    """In words, the least and the largest values: "Range of steps: a 1.00 s to 2.00 s, b 3.00 s"."""
    ranges = []
    for name, numbers in values.items():
        ends = list(dict.fromkeys(number(end(numbers), unit) for end in (min, max)))
        ranges.append(f"{name} {' to '.join(ends)}")
    return f"Range of {what}: {', '.join(ranges)}."


def _repeats(rounds: Mapping[str, Sequence[Timeline]]) -> dict[str, StepRepeats]:
    return {name: StepRepeats(timelines) for name, timelines in rounds.items()}


def record_beside_gpipe(steps: Mapping[str, Timeline], schedules: Mapping[str, Schedule]) -> None:
    """Record the steps of "gpipe" and "1f1b" (02.ran), and 1F1B's over GPipe's: as they ran (02.by-run), and
    both simulated with the median times of GPipe's stages (02.by-medians).
    """
    record("02.ran", dict(steps))
    costs = Costs.measured(steps["gpipe"])
    simulated = {name: schedule.simulate(costs).makespan for name, schedule in schedules.items()}
    record("02.by-medians", simulated["1f1b"] / simulated["gpipe"])
    record("02.by-run", steps["1f1b"].makespan / steps["gpipe"].makespan)


def record_race(
    name: str,
    predicted: Mapping[str, float],
    steps: Mapping[str, Timeline],
    rounds: Mapping[str, Sequence[Timeline]],
) -> None:
    """Record under 02.race what the race of schedules decides, and add all steps to the ledger.

    `steps` are {schedule: its median step}, 1f1b first, and `rounds` {schedule: all its steps}.
    """
    makespans = {schedule: tl.makespan for schedule, tl in steps.items()}
    first = {
        "predicted": min(predicted, key=predicted.__getitem__),
        "run": min(makespans, key=makespans.__getitem__),
    }
    spreads = {schedule: spread_of(timelines) for schedule, timelines in rounds.items()}
    others = {schedule: seconds for schedule, seconds in predicted.items() if schedule != "1f1b"}
    words = {"faster": race_words(makespans, spreads), "idle": idle_words(rounds), "work": work_words(steps)}
    record("02.race", {**words, "first": first})
    record("02.race.ratio", gpt2_pipeline.ratio_range(makespans, others))
    total = {op: sum(e.duration for e in steps["1f1b"].events if e.op == op) for op in "FB"}
    record("02.race.half-backward", total["B"] / 2 / total["F"])  # the prediction's W over F
    record("02.race.step", {"1f1b": makespans["1f1b"]}, "s")
    add_to_ledger(name, predicted, steps)


def idle_words(rounds: Mapping[str, Sequence[Timeline]]) -> str:
    """In words, which schedules' bubbles are all below, or above, all of 1F1B's."""
    bubbles = {name: sorted(tl.bubble_fraction for tl in tls) for name, tls in rounds.items()}
    base = bubbles.pop("1f1b")
    below = [name for name, shares in bubbles.items() if shares[-1] < base[0]]
    above = [name for name, shares in bubbles.items() if shares[0] > base[-1]]
    undecided = [name for name in bubbles if name not in below + above]
    clauses = [
        f"all steps of {listed(names)} are {side} all of 1f1b's"
        for side, names in (("below", below), ("above", above))
        if names
    ]
    if undecided:
        clauses.append(f"those of {listed(undecided)} overlap with 1f1b's, so the run does not decide")
    return "; ".join(clauses)


def work_words(steps: Mapping[str, Timeline]) -> str:
    """In words, the least and the most work of a rank, with their schedules."""
    work = {name: compute_seconds(tl) for name, tl in steps.items()}
    ends = min(work, key=work.__getitem__), max(work, key=work.__getitem__)
    return " to ".join(f"{number(work[name], 's')} under {name}" for name in ends)


def record_cuts(
    rounds: Mapping[str, Sequence[Timeline]],
    steps: Mapping[str, Timeline],
    blocks: Mapping[str, Sequence[int]],
) -> None:
    """Record the seconds of each partition (02.cut), whether balancing by time decides (02.cut.verdict), and
    what rank 1 of the heavy one does over the median rank (02.heavy-work, 02.heavy-blocks).

    `rounds` and median `steps` are of "uniform", "heavy" and "by time", `blocks` of each stage.
    """
    record("02.cut", {name: tl.makespan for name, tl in steps.items()}, "s")
    record("02.cut.verdict", balanced_words(rounds, blocks))
    work = [steps["heavy"].work(rank) for rank in steps["heavy"].ranks]
    record("02.heavy-work", work[1] / statistics.median(work))
    record("02.heavy-blocks", blocks["heavy"][1] / statistics.median(blocks["heavy"]))


def balanced_words(rounds: Mapping[str, Sequence[Timeline]], blocks: Mapping[str, Sequence[int]]) -> str:
    """In words, whether the steps of the partition "by time" show that it is faster."""
    if list(blocks["by time"]) == list(blocks["uniform"]):
        return "this is the uniform partition"
    if rounds["uniform"][0].source == "simulated":
        return "it and the uniform partition are simulated from the same times of layers"
    runs = _repeats(rounds)
    if runs["by time"].overlaps(runs["uniform"]):
        return "its repeats overlap with the uniform partition's, so the run does not decide which is faster"
    faster = runs["by time"].slowest < runs["uniform"].fastest
    return f"all its steps are {'shorter' if faster else 'longer'} than all of the uniform partition's"


def faster_pairs(steps: Mapping[str, float], spreads: Mapping[str, float]) -> list[str]:
    """["c is faster than a and b"]: all pairs whose steps differ by more than the larger spread."""
    shorter = {
        a: [b for b in steps if steps[b] - steps[a] > max(spreads[a], spreads[b])]
        for a in sorted(steps, key=steps.__getitem__)
    }
    return [f"{a} is faster than {listed(others)}" for a, others in shorter.items() if others]


def race_words(steps: Mapping[str, float], spreads: Mapping[str, float]) -> str:
    """The `faster_pairs` in a sentence, and whether other pairs are undecided."""
    faster = faster_pairs(steps, spreads)
    if not faster:
        return "no schedule is shown to be faster than another: all pairs are undecided"
    decided = all(abs(steps[a] - steps[b]) > max(spreads[a], spreads[b]) for a, b in combinations(steps, 2))
    return ", ".join(faster) + ("" if decided else "; all other pairs are undecided")


def compare_split(rounds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | str]]:
    """Columns of a table with one row: how many times as long a step with split backwards takes."""
    row, ratio = "split / in one piece", divide_rounds(rounds[SPLIT], rounds[IN_ONE_PIECE])
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"  # two digits may leave the median outside
    columns: dict[str, float | str] = {"factor": ratio.median, "range": spread, "verdict": ratio.verdict}
    columns["rounds"] = len(rounds[SPLIT])
    return {head: {row: value} for head, value in columns.items()}


def best_and_rivals(
    steps: Mapping[int, Timeline], rounds: Mapping[int, Sequence[Timeline]]
) -> tuple[int, list[int]]:
    """(the choice with the shortest median step, those that may be as good: not longer than it in every
    round).

    Of two equally fast choices, one is longer in all of six rounds in 1 of 32 cases.
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
    graph_rounds: Mapping[int, Sequence[Timeline]],
    notes: Sequence[str],
    usual: int,
) -> str:
    """What CUDA graphs changed at the largest number of microbatches, and `notes`, to print under the figure.

    Args:
        steps, graphed: {number of microbatches: median step}, launched from Python and as graphs.
        rounds, graph_rounds: {number of microbatches: all its steps}, likewise.
        usual: the number of microbatches of the race, for which a sentence is added.
    """
    if not graphed:
        return "On GPUs the figure has a second panel: the same steps with CUDA graphs."
    most, (best, rivals) = max(steps), best_and_rivals(graphed, graph_rounds)
    eager, replayed = (number(at[most].makespan, "s") for at in (steps, graphed))
    words = f"the step at m = {most} takes {replayed} with graphs instead of {eager}, "
    words += f"and the shortest step is {number(graphed[best].makespan, 's')} at m = {best}"
    words += f", where m = {listed(rivals)} may be as good" if rivals else ""
    words += ", although some stages could not be captured" if notes else ""
    words += f". {launch_words(rounds[usual], graph_rounds[usual], usual)}."
    return "\n".join([f"{words[0].upper()}{words[1:]}", *notes])


def launch_words(eager: Sequence[Timeline], graphed: Sequence[Timeline], usual: int) -> str:
    """A sentence that says whether launches are a part of the race's steps, by steps of 1F1B with `usual`
    microbatches, launched from Python and as graphs.
    """
    runs = StepRepeats(eager), StepRepeats(graphed)
    before, after = (number(run.median.makespan, "s") for run in runs)
    if runs[0].overlaps(runs[1]) or runs[1].fastest > runs[0].slowest:
        return f"At m = {usual}, as in the race, steps of {before} and {after} do not show that graphs help"
    words = f"At m = {usual}, as in the race, graphs take {after} instead of {before}: "
    return words + "there, too, work and bubble contain waits for launches"


def sweep_words(
    choices: Sequence[int],
    best: int,
    parts: Mapping[str, Sequence[float]],
    graph_parts: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """In words, how {part: seconds at each choice} change from the best m to the largest, and why the bubble
    grows if it does; `choices` are in rising order.
    """
    if best == choices[-1]:
        return "nothing changes, because the largest m is the best: the sweep ends before fixed costs win"
    at = list(choices).index(best)
    names = {
        "small kernels": "the time of launches and small kernels",
        "bubble": "the bubble",
        "host wait": "host wait",
    }
    changes = {part: parts[part][-1] - parts[part][at] for part in names}
    clauses = [
        f"{names[part]} {'grows' if change > 0 else 'shrinks'} by {number(abs(change), 's')}"
        for part, change in changes.items()
        if abs(change) > 1e-6
    ]
    words = listed(clauses) if clauses else "no part changes by more than 1 µs"
    if changes["bubble"] <= 0:
        return words
    if graph_parts is None:
        return f"{words}. Short actions take unequally long, and a rank waits for the longer ones"
    graphed = graph_parts["bubble"][-1]
    words += f". With CUDA graphs, the bubble at m = {choices[-1]} is {number(graphed, 's')}"
    most = graphed < parts["bubble"][-1] / 2
    reason = ". So most of the bubble without them comes from launches, not from the schedule"
    return words + (reason if most else "")


def record_sweep(
    steps: Mapping[int, Timeline],
    rounds: Mapping[int, Sequence[Timeline]],
    parts: Sequence[Mapping[str, Sequence[float]]],
    predicted: Sequence[float],
    usual: int,
) -> None:
    """Record under 02.sweep what the sweep over numbers of microbatches shows.

    Args:
        steps: {number of microbatches: median step}, in rising order.
        rounds: {number of microbatches: all its steps}.
        parts: of the median steps, as `step_parts` has them; then of those with CUDA graphs, if they ran.
        predicted: seconds of each by the formula.
        usual: the number of microbatches of other cells.
    """
    took = {m: tl.makespan for m, tl in steps.items()}
    (best, rivals), bubbles = best_and_rivals(steps, rounds), dict(zip(took, parts[0]["bubble"], strict=True))
    ratios = {m: took[m] / formula for m, formula in zip(took, predicted, strict=True)}
    furthest = max(ratios, key=lambda m: abs(math.log(ratios[m])))
    record("02.sweep", {"best": best, "most": max(took), "furthest": furthest, "over": ratios[furthest]})
    work = compute_seconds(steps[best]) * len(steps[best].ranks)
    record("02.sweep-step", {"alone": took[1], "best": took[best], "usual": took[usual], "work": work}, "s")
    count = len(rounds[best])
    verdict = f"every other m took longer in each of {count} rounds"
    if rivals:
        verdict = f"m = {listed(rivals)} took no longer in at least one of {count} rounds and may be as good"
    record("02.sweep.verdict", verdict)
    record("02.sweep.changes", sweep_words(list(took), best, *parts))
    record("02.sweep-bubble", {"best": bubbles[best], "most": bubbles[max(took)]}, "s")
    record("02.sweep-share", 100 * took[best] / took[1], "%")


def listed(names: Sequence[object]) -> str:
    """Names or numbers in a sentence: "a", "a and b", "17, 68 and 1,088"."""
    *others, last = (f"{name:,}" if isinstance(name, int) else str(name) for name in names)
    return " and ".join([*([", ".join(others)] if others else []), last])
