"""What page 01 alone uses: ranges of rounds, and its figures' words."""

from __future__ import annotations

import random

import pytest
import torch

import hpnb
from hpnb.lesson.figures import vit_data_parallel as figures
from hpnb.lesson.programs import step_timing
from hpnb.lesson.programs.launch_timing import Launch, vit_launches
from hpnb.models import SIZES
from hpnb.record import Event, Timeline


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
    wants = {"more": "needs more", "fewer": "needs fewer", "agree": "do not contradict"}
    wanted = ["more", "agree", "fewer", "fewer", "agree", "more", "agree", "agree"]
    assert all(wants[want] in text for want, text in zip(wanted, said, strict=True)), said
    causes = {figures.ALONE: [2.0] * 6, "sharing": [2.2] * 6}
    steps = [figures.explain_step(causes, last, unclear) for last in (-0.2, 0.0, 0.2)]
    assert [step["ratio"] for step in steps] == pytest.approx([1.0, 1.1, 1.2])
    assert [str(step["lies"]).split(" ")[3] for step in steps] == ["below", "within", "above"]
    assert steps[0]["alone"] == (2.0, "s")
    open_range = figures.explain_step(causes, 0.0, step_timing.Spread(1.2, 0.9, 1.3))
    wanted_words = "The sum lies within this range, which includes 1, so this run cannot decide"
    assert open_range["lies"] == wanted_words
    below_one = figures.explain_step(causes, 0.0, step_timing.Spread(0.9, 0.85, 0.95))
    assert below_one["lies"] == "The sum lies above this range, so these costs do not simply add up"
    sides = ((1.5, 0.1, "below", "upper"), (0.5, 0.55, "above", "lower"))  # 1.0, in a range up or down
    for at_times, last, side, ends in sides:
        busy = {figures.ALONE: [1.0] * 9, "sharing": [1.0] * 5 + [at_times] * 4}
        lies = str(figures.explain_step(busy, last, step_timing.Spread(1.4, 1.3, 1.5))["lies"])
        assert lies.startswith(f"The sum lies {side} this range, but with the {ends} ends of the factors")
        assert lies.endswith("so this run cannot decide")
    slower, unclear = step_timing.Spread(1.2, 1.1, 1.3), step_timing.Spread(1.2, 0.9, 1.3)
    alone = step_timing.Backward(1.0, 3.0, (2.0, 3.0), (10.0, 10.0))
    equal = step_timing.Backward(2.0, 8.0, (4.0, 6.0, 8.0), (1.0, 1.0, 1.0)).as_long_as(alone)
    assert equal == step_timing.Backward(1.0, 3.0, (1.5, 2.25, 3.0), (1.0, 1.0, 1.0))
    assert (
        figures.verdict_words({17: slower, 34: slower, 68: unclear}) == "slower at 17 and 34, undecided at 68"
    )
    sweep = figures.describe_sweep(runs[0], runs[1], {17: unclear}, {"during": 18.0})
    assert set(sweep) == {"during", "after", "versus-law", "overlap"}
    for all_reduce, words in (
        (0.25, "250 ms longer than"),
        (0.75, "250 ms less than"),
        (0.5, "neither clearly longer nor clearly less than"),
    ):
        times = {figures.ALONE: [1.0] * 6, figures.DURING: [1.5] * 6, figures.AFTER: [1.75] * 6}
        costs = figures.cost_of_overlap(times | {figures.ALL_REDUCE: [all_reduce] * 6})
        seconds = {"during": (0.5, "s"), "after": (0.75, "s"), "all-reduce": (all_reduce, "s")}
        assert costs == {**seconds, "compared": words}


def test_page_01_names_the_late_rank_and_what_makes_it_late() -> None:
    def step(*forwards: float) -> Timeline:
        events = []
        for rank, forward in enumerate(forwards):
            backward = forward + 2.0
            times = {"F": (0.0, forward), "B": (forward, backward), "all_reduce": (backward, 9.0)}
            times["compute"] = times["all_reduce"]  # unpacking
            events += [Event(rank, -1, op, -1, *span) for op, span in times.items()]
        return Timeline(tuple(events))

    late = [step(1.0, 3.0), step(1.0, 4.0), step(2.0, 1.5)]
    said = figures.describe_versions({"A: tensors": [step(1.0, 1.0)] * 3, "C: buckets": late})
    assert said["late"] == {"seconds": (2.0, "s"), "last": "rank 1 in 2 of 3 rounds"}
    assert said["handling"] == {"a": (6.0, "s"), "c": (6.0, "s")}
    assert said["messages"] == {"a": 1, "c": 1}
    assert figures.divide_versions({"A": [step(1.0)] * 6, "B": [step(1.0)] * 6}) == [(1.0, 1.0, 1.0)]
    bound, unbound = ([Launch(1.0, 2.0), Launch(launched, 4.0)] for launched in (3.9, 1.0))
    words = [
        figures.describe_launches(*run) for run in ((bound, "cuda"), (unbound, "cuda"), (unbound, "cpu"))
    ]
    assert [said["rank"] for said in words] == ["rank 1"] * 3
    assert "needs 3.90 s just to launch" in str(words[0]["words"])
    assert "launches do not set the time" in str(words[1]["words"])
    assert "on CPUs there are no launches" in str(words[2]["words"])


def test_hundreds_of_messages_keep_their_colour() -> None:
    def step(messages: int) -> Timeline:
        sent = [Event(0, -1, "all_reduce", -1, 1.0 + i, 2.0 + i, "dp") for i in range(messages)]
        return Timeline((Event(0, -1, "F", -1, 0.0, 1.0), *sent))

    one = step_timing.Spread(1.0, 1.0, 1.0)
    fig = figures.versions({"A: tensors": step(101), "B: buckets": step(2)}, one, one)
    artists = [artist for ax in fig.axes for artist in ax.collections if artist.get_label() == "all_reduce"]
    assert [artist.get_linewidth()[0] for artist in artists] == [0.0, 0.6]  # type: ignore[index]


def test_launches_are_timed_on_every_rank() -> None:
    size = SIZES["laptop"]
    launches = hpnb.launch(vit_launches, size, 1, torch.float32, 2, ranks=2, device="cpu")
    assert launches[0] == launches[1]
    assert len(launches[0]) == 2
    assert all(0.0 < launch.launched <= launch.done for launch in launches[0])
