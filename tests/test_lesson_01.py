"""What page 01 alone uses: ranges of rounds, and its figures' words."""

from __future__ import annotations

import random

import pytest

from hpnb.lesson.figures import vit_data_parallel as figures
from hpnb.lesson.programs import step_timing
from hpnb.record import Event, Timeline
from hpnb.theory import Link


def test_a_range_leaves_out_as_many_rounds_as_95_percent_allow() -> None:
    rounds = {n: step_timing.Spread.of_rounds(range(n, 0, -1)) for n in (6, 9, 15)}
    assert rounds == {6: (3.5, 1, 6), 9: (5, 2, 8), 15: (8, 4, 12)}
    with pytest.raises(ValueError, match="5 rounds"):
        step_timing.Spread.of_rounds(range(5))
    generator = random.Random(0)
    samples = (step_timing.Spread.of_rounds(generator.random() for _ in range(9)) for _ in range(4000))
    assert 0.95 <= sum(s.low <= 0.5 <= s.high for s in samples) / 4000 <= 0.97


def test_two_steps_are_compared_within_each_round() -> None:
    rounds = [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]  # a busy moment hits both
    twice = [2 * seconds for seconds in rounds]
    assert step_timing.divide_rounds(twice, rounds) == (2.0, 2.0, 2.0)
    assert step_timing.subtract_rounds(twice, rounds) == (2.0, 1.0, 3.0)
    slower, faster = (step_timing.divide_rounds(*pair) for pair in ((twice, rounds), (rounds, twice)))
    undecided = step_timing.divide_rounds(rounds, rounds[::-1])
    assert [s.verdict for s in (slower, faster, undecided)] == ["slower", "faster", "cannot tell"]
    assert undecided.range == "0.33 to 3.00"


def test_the_round_that_is_drawn_is_typical_of_every_version() -> None:
    def lasting(*seconds: float) -> list[Timeline]:
        return [Timeline((Event(0, -1, "F", -1, 0.0, end),)) for end in seconds]

    # medians 8, 3 and 4.5: the last round is nearest, although the second one has the median C / B
    rounds = {"A": lasting(8.0, 9.0, 7.0), "B": lasting(9.0, 1.0, 3.0), "C": lasting(12.0, 1.4, 4.5)}
    drawn = figures.typical_round(rounds)
    assert {name: tl.makespan for name, tl in drawn.items()} == {"A": 7.0, "B": 3.0, "C": 4.5}
    steps, exposed = figures.median_steps(rounds)
    assert steps == {"A": 8.0, "B": 3.0, "C": 4.5}
    assert exposed == dict.fromkeys(rounds, 0.0)


def test_page_01_puts_its_results_into_words() -> None:
    free, unclear, slow = (step_timing.Spread(1.1, *ends) for ends in ((1.0, 1.05), (1.05, 1.15), (1.1, 1.2)))
    ways = (
        (slow, unclear, free),
        (free, free, free),
        (slow, slow, unclear),
        (slow, slow, slow),
        (unclear,) * 3,
    )
    runs = [dict(zip((17, 1088, 2176), spreads, strict=True)) for spreads in ways]
    assert [figures.free_words(run) for run in runs] == [
        "not free at 17, undecided at 1,088, free from 2,176 on",
        "free from 17 on",
        "not free at 17 and 1,088, undecided at 2,176",
        "not free at 17, 1,088 and 2,176",
        "undecided at 17, 1,088 and 2,176",
    ]
    assert [figures.free_range(run) for run in runs[:2]] == [(17, 2176), (0, 17)]
    with pytest.raises(ValueError, match="no step is surely free at 17, 1,088 and 2,176"):
        figures.free_range(runs[2])
    cases = ((17, 0), (18, 0), (2177, 0), (20, 1), (17, 1), (1088, 2), (1089, 2), (5, 4))
    said = [figures.law_words(law, runs[run]) for law, run in cases]
    words = {"more": "needs more", "fewer": "needs fewer", "agree": "do not contradict"}
    wanted = ["more", "agree", "fewer", "fewer", "agree", "more", "agree", "agree"]
    assert all(words[want] in text for want, text in zip(wanted, said, strict=True)), said
    assert ["not scored" in figures.answer_words(first) for first in (None, 17)] == [True, False]
    causes = {figures.ALONE: [2.0] * 6, "sharing": [2.2] * 6}
    steps = [figures.explain_step(causes, last, unclear) for last in (-0.2, 0.0, 0.2)]
    assert [step["ratio"] for step in steps] == pytest.approx([1.0, 1.1, 1.2])
    assert [step["by-seconds"] for step in steps] == pytest.approx([1.0, 1.1, 1.2])
    assert [str(step["lies"]).split(" ")[3] for step in steps] == ["below", "within", "above"]
    # the same causes when the machine slows down within the rounds: 1.5 in most of them, 3 by the medians
    slowing = {figures.ALONE: [1.0] * 4 + [2.0] * 3, "sharing": [1.5] * 3 + [3.0] * 4}
    apart = figures.explain_step(slowing, 0.0, step_timing.Spread(1.5, 1.4, 1.6))
    assert (apart["ratio"], apart["by-seconds"]) == (1.5, 3.0)
    assert apart["lies"] == (
        "The first number lies within this range and the second above this range, so this run cannot say "
        "whether these costs explain the step"
    )
    for at_times, last, side in ((1.5, 0.1, "below"), (0.5, 0.55, "above")):  # 1.0, in a range up or down
        busy = {figures.ALONE: [1.0] * 9, "sharing": [1.0] * 5 + [at_times] * 4}
        lies = str(figures.explain_step(busy, last, step_timing.Spread(1.4, 1.3, 1.5))["lies"])
        assert lies.startswith(f"Both numbers lie {side} this range, but the ranges of the factors reach it")
    slower, unclear = step_timing.Spread(1.2, 1.1, 1.3), step_timing.Spread(1.2, 0.9, 1.3)
    alone = step_timing.Backward(1.0, 3.0, (2.0, 3.0), (10.0, 10.0))
    equal = step_timing.Backward(2.0, 8.0, (4.0, 6.0, 8.0), (1.0, 1.0, 1.0)).as_long_as(alone)
    assert equal == step_timing.Backward(1.0, 3.0, (1.5, 2.25, 3.0), (1.0, 1.0, 1.0))
    assert figures.count_messages({"B: buckets": alone.on(Link(0.0, 10.0), 2)}) == {"b": 2}
    work = (Event(0, -1, "compute", -1, 0.0, 1.0), Event(1, -1, "compute", -1, 0.0, 3.0))
    assert figures.handling_seconds({"A: tensors": Timeline(work)}) == {"a": 3.0}
    assert figures.count_verdicts({17: slower, 34: slower, 68: unclear}) == {
        "faster": 0,
        "slower": 2,
        "undecided": 1,
    }
    for all_reduce, compared in (
        (0.25, "more than"),
        (0.75, "less than"),
        (0.5, "not clearly more or less than"),
    ):
        times = {figures.ALONE: [1.0] * 6, figures.DURING: [1.5] * 6, figures.ALL_REDUCE: [all_reduce] * 6}
        ends = dict.fromkeys(("median", "low", "high"), 0.5)
        assert figures.cost_of_overlap(times) == {**ends, "all-reduce": all_reduce, "compared": compared}
