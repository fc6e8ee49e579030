"""What notebook 02 compares and draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from matplotlib.text import Annotation, Text
from replayed_graphs import with_graphs

import hpnb
from hpnb.lesson.exercises import vit_pipeline_parallel as exercises
from hpnb.lesson.figures.vit_pipeline import u_curve, without_numbers
from hpnb.lesson.programs import gpt2_pipeline, vit_pipeline, vit_pipeline_words
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.record import Timeline

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


def test_weight_gradients_lose_their_numbers_and_nothing_else() -> None:
    tl = schedules.make("zb-h2", 2, 4).simulate()
    bare = without_numbers(tl, "W")
    assert {e.microbatch for e in bare.events if e.op == "W"} == {-1}
    kept = [e for e in tl.events if e.op != "W"]
    assert [e for e in bare.events if e.op != "W"] == kept
    assert (bare.makespan, bare.bubble_fraction) == (tl.makespan, tl.bubble_fraction)


def test_a_split_backward_is_timed_beside_one_in_one_piece() -> None:
    size = ViTSize(hidden=32, layers=4, heads=2, mlp=64, patch=8, image=16)
    program = vit_pipeline.time_split_backward, size, 4, torch.float32, 4, 2, 6
    (rounds,) = hpnb.launch(*program, ranks=1, device="cpu")
    assert {way: len(seconds) for way, seconds in rounds.items()} == {
        vit_pipeline.IN_ONE_PIECE: 6,
        vit_pipeline.SPLIT: 6,
    }


def test_the_split_step_is_divided_by_the_other_one() -> None:
    rounds = {vit_pipeline.IN_ONE_PIECE: [1.0] * 9, vit_pipeline.SPLIT: [1.25] * 9}
    columns = vit_pipeline_words.compare_split(rounds)
    assert [list(column.values()) for column in columns.values()] == [
        [1.25],
        ["1.250 to 1.250"],
        ["slower"],
        [9],
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((3.0, 3.0), "no schedule is shown to be faster than another: all pairs are undecided"),
        ((3.0, 2.0), "b is faster than a"),
        ((3.0, 2.0, 2.0), "b is faster than a, c is faster than a; all other pairs are undecided"),
        ((3.0, 2.0, 1.0), "c is faster than a and b, b is faster than a"),
        ((4.0, 3.0, 2.0, 1.0), "d is faster than a, b and c, c is faster than a and b, b is faster than a"),
    ],
)
def test_the_race_says_which_pairs_are_undecided(seconds: tuple[float, ...], words: str) -> None:
    steps = dict(zip("abcd", seconds, strict=False))
    assert vit_pipeline_words.race_words(steps, dict.fromkeys(steps, 0.5)) == words


def steps_of(*seconds: float) -> list[Timeline]:
    """Measured steps of two ranks, of so many seconds."""
    made = schedules.make("1f1b", 2, 1)  # two forwards and two backwards, one after the other
    steps = [made.simulate(Costs(each / 4, each / 4, 0.0)) for each in seconds]
    return [replace(tl, source="measured") for tl in steps]


def bubbles_of(*microbatches: int) -> list[Timeline]:
    """Steps of two ranks; the more microbatches, the smaller the bubble."""
    return [schedules.make("1f1b", 2, m).simulate(Costs(1.0, 1.0, 0.0)) for m in microbatches]


def test_a_smaller_bubble_is_said_only_of_schedules_whose_steps_are_all_below() -> None:
    rounds = {
        "1f1b": bubbles_of(4, 8),
        "a": bubbles_of(16, 32),
        "b": bubbles_of(6, 16),
        "c": bubbles_of(1, 2),
    }
    words = vit_pipeline_words.idle_words(rounds)
    assert words == (
        "all steps of a are below all of 1f1b's; all steps of c are above all of 1f1b's; "
        "those of b overlap with 1f1b's, so the run does not decide"
    )
    del rounds["b"], rounds["c"]
    assert vit_pipeline_words.idle_words(rounds) == "all steps of a are below all of 1f1b's"


def test_a_balanced_partition_is_faster_only_if_all_of_its_steps_are() -> None:
    blocks = {"uniform": [6, 6], "by time": [7, 5]}

    def say(*seconds: float, source: Any = "measured") -> str:
        rounds = {"uniform": steps_of(5, 6), "by time": steps_of(*seconds)}
        rounds = {name: [replace(tl, source=source) for tl in steps] for name, steps in rounds.items()}
        return vit_pipeline_words.balanced_words(rounds, blocks)

    assert say(3, 4) == "all its steps are shorter than all of the uniform partition's"
    assert say(7, 8) == "all its steps are longer than all of the uniform partition's"
    assert "does not decide" in say(4, 5.5)
    assert (
        say(3, 4, source="simulated")
        == "it and the uniform partition are simulated from the same times of layers"
    )
    blocks["by time"] = [6, 6]
    assert say(3, 4) == "this is the uniform partition"


def test_the_ranges_of_what_is_compared_are_printed_with_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: dict[str, str] = {}
    monkeypatch.setattr(gpt2_pipeline, "record", lambda key, value: recorded.update({key: value}))
    steps = {"fast": steps_of(1, 4, 2), "slow": steps_of(3)}
    vit_pipeline_words.claim_faster(steps, "fast", "slow")
    bubbles = {"less": bubbles_of(32, 16), "more": bubbles_of(4, 8)}
    vit_pipeline_words.claim_less_idle(bubbles, "less", "more")
    assert recorded == {
        "02.order.fast-faster-than-slow": "the repeats overlap, so this run doesn't decide that",
        "02.order.less-less-idle-than-more": "all repeats agree",
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'Not decided whether every repeat of "fast" is faster than "slow": the repeats overlap'
    assert lines[1] == "Range of steps: fast 1.00 s to 4.00 s, slow 3.00 s."
    assert lines[3] == "Range of bubbles: less 3.03 % to 5.88 %, more 11.1 % to 20.0 %."


def test_on_a_cpu_a_model_is_drawn_once_and_every_caller_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ViTSize(hidden=32, layers=2, heads=2, mlp=64, patch=8, image=16)
    monkeypatch.setattr(hpnb, "device", lambda: torch.device("cpu"))
    (a, batch), (b, _) = (vit_pipeline.fresh_vit_and_batch(size, 4, torch.float32) for _ in range(2))
    assert len(batch["labels"]) == 4
    for first, second in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
    other, batch = vit_pipeline.fresh_vit_and_batch(size, 2, torch.float64)
    assert next(other.parameters()).dtype == batch["pixel_values"].dtype == torch.float64


def test_the_race_says_how_far_predictions_are_off_and_who_works_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(
        vit_pipeline_words, "record", lambda key, value, unit="": recorded.update({key: value})
    )
    monkeypatch.setattr(vit_pipeline_words, "add_to_ledger", lambda *args: None)
    made = {name: schedules.make(name, 2, 4) for name in ("1f1b", "zb-h1", "zb-h2")}
    costs = {"1f1b": Costs(1.0, 1.0, 1.0), "zb-h1": Costs(1.0, 1.5, 1.0), "zb-h2": Costs(1.0, 1.0, 1.0)}
    steps = {name: schedule.simulate(costs[name]) for name, schedule in made.items()}
    predicted = {name: tl.makespan / 2 for name, tl in steps.items()}
    predicted |= {"1f1b": 1.0, "zb-h2": steps["zb-h2"].makespan}
    vit_pipeline_words.record_race("ViT", predicted, steps, {name: [tl] for name, tl in steps.items()})
    assert recorded["02.race.ratio"] == {"least": 1.0, "most": 2.0}  # 1F1B predicts itself
    assert recorded["02.race"]["work"] == "12.0 s under 1f1b to 14.0 s under zb-h1"
    assert recorded["02.race"]["first"] == {"predicted": "1f1b", "run": "zb-h2"}


# --- exercise 1 --------------------------------------------------------------------------------------


def library_lists(p: int, m: int) -> list[list[str]]:
    return [list(map(str, actions)) for actions in schedules.make("1f1b", p, m).actions]


def swapped_lists(p: int, m: int) -> list[list[str]]:
    rows = library_lists(p, m)
    rows[1][1], rows[1][3] = rows[1][3], rows[1][1]
    return rows


def lists_that_begin_with_backwards(p: int, m: int) -> list[list[str]]:
    return [actions[::-1] for actions in library_lists(p, m)]


@pytest.mark.parametrize(
    ("write", "title", "actions"),
    [
        (library_lists, "Your schedule, p = 4 and m = 8", 64),
        (swapped_lists, "Your schedule, p = 4 and m = 8: it stops after 8 of 64 actions", 8),
        (lists_that_begin_with_backwards, None, 0),
        (lambda p, m: None, None, 0),
        (lambda p, m: ["0F0", 7], None, 0),
        (lambda p, m: 1 // 0, None, 0),
    ],
)
def test_a_readers_schedule_is_drawn_as_far_as_it_runs(
    write: Callable[[int, int], Any], title: str | None, actions: int
) -> None:
    drawn: list[tuple[Timeline, dict[str, Any]]] = []
    with patch.object(exercises, "show", lambda tl, **options: drawn.append((tl, options))):
        exercises.draw_schedule(write, 4, 8)
    assert [(options["title"], len(tl.events)) for tl, options in drawn] == [(title, actions)] * bool(title)
    assert all(options["in_flight"] == (actions == 64) for _, options in drawn)


# --- with CUDA graphs --------------------------------------------------------------------------------

TINY = ViTSize(hidden=32, layers=2, heads=2, mlp=64, patch=8, image=16)


def time_replayed(refused: bool) -> tuple[dict[int, list[Timeline]], list[str], list[int]]:
    """`time_captured` with captures that call again, and how many graphs each pipeline had at its end."""
    made: list[Any] = []
    real = hpnb.Pipeline

    def pipeline(*args: Any, cuda_graphs: bool, **options: Any) -> hpnb.Pipeline:
        assert cuda_graphs
        pipe = real(*args, **options)
        made.append(with_graphs(pipe))
        if refused and hpnb.rank() == 1:
            made[-1]._run_eagerly(1, "it draws random numbers on the CPU")
        return pipe

    by_m = {m: schedules.make("1f1b", hpnb.world_size(), m) for m in (1, 2)}
    with patch.object(hpnb, "Pipeline", pipeline):
        rounds, notes = vit_pipeline.time_captured(TINY, 4, torch.float32, by_m, 2)
    return rounds, notes, [len(graphs._graphs) for graphs in made]


@pytest.mark.parametrize("refused", [False, True])
def test_steps_are_timed_with_graphs_and_say_which_stages_had_none(refused: bool) -> None:
    results = hpnb.launch(time_replayed, refused, ranks=2, device="cpu")
    why = ["stage 1 runs without CUDA graphs, because it draws random numbers on the CPU"]
    for rank, (rounds, notes, captured) in enumerate(results):
        counts = {m: [len(tl.events) for tl in timelines] for m, timelines in rounds.items()}
        assert counts == {1: [4, 4], 2: [8, 8]}
        assert notes == (why if refused else [])  # every rank says it
        assert captured == ([0, 0] if refused and rank == 1 else [1, 2 - rank])  # one for each slot


def test_a_cpu_has_no_graphs_to_time() -> None:
    by_m = {1: schedules.make("1f1b", 1, 1)}
    (result,) = hpnb.launch(vit_pipeline.time_graphs, TINY, 4, torch.float32, by_m, ranks=1, device="cpu")
    assert result == ({}, [])


def test_a_step_is_the_sum_of_its_parts() -> None:
    made = {m: schedules.make("1f1b", 2, m) for m in (1, 4)}
    steps = {m: schedule.simulate(Costs(1.0, 1.0, 1.0, 0.25)) for m, schedule in made.items()}
    parts = vit_pipeline.step_parts(steps, made, ideal=4.0)
    assert parts["ideal"] == [3.0, 4.0]  # never more than a rank works
    assert parts["small kernels"] == [0.0, 8.0]
    assert parts["bubble"] == [3.0, 3.0]
    assert parts["host wait"][0] == pytest.approx(0.5)  # two transfers
    for i, tl in enumerate(steps.values()):
        assert sum(part[i] for part in parts.values()) == pytest.approx(tl.makespan)


def test_the_page_says_what_graphs_changed() -> None:
    slow, fast = (
        {m: schedules.make("1f1b", 2, m).simulate(Costs(cost, 0.0, 0.0, 0.0)) for m in (1, 4)}
        for cost in (1.0, 0.5)
    )
    assert "a second panel" in vit_pipeline_words.record_graphs(slow, {}, {}, {}, [], 4)
    eager, rounds = ({m: [tl] * 2 for m, tl in steps.items()} for steps in (slow, fast))
    notes = ["stage 1 runs without CUDA graphs"]
    said = vit_pipeline_words.record_graphs(slow, fast, eager, rounds, notes, 4)
    words = "The step at m = 4 takes 2.50 s with graphs instead of 5.00 s, "
    words += "and the shortest step is 1.00 s at m = 1"
    usual = "At m = 4, as in the race, graphs take 2.50 s instead of 5.00 s: "
    usual += "there, too, work and bubble contain waits for launches"
    assert said.splitlines() == [f"{words}, although some stages could not be captured. {usual}.", *notes]
    rounds[1] = [fast[1], slow[4]]  # longer than m = 4 in the second round
    said = vit_pipeline_words.record_graphs(slow, fast, eager, rounds, [], 4)
    assert said == f"{words}, where m = 4 may be as good. {usual}."


def test_graphs_show_launches_only_where_all_of_their_steps_are_shorter() -> None:
    helps = vit_pipeline_words.launch_words(steps_of(5, 6), steps_of(3, 4), 8)
    assert helps.startswith("At m = 8, as in the race, graphs take 4.00 s instead of 6.00 s")
    for graphed in ((4, 5), (7, 8)):
        words = vit_pipeline_words.launch_words(steps_of(5, 6), steps_of(*graphed), 8)
        assert words.endswith("do not show that graphs help")


def test_the_second_panel_has_an_axis_of_its_own() -> None:
    eager = {"ideal": [1.0, 1.0], "bubble": [2.0, 1.0], "small kernels": [0.0, 4.0]}
    graphs = {"ideal": [1.0, 1.0], "bubble": [2.0, 0.5], "small kernels": [0.0, 0.25]}
    fig = u_curve([1, 8], eager, [3.0, 6.0], "T", "measured", graphs)
    above, below = fig.axes
    assert above.get_ylim() == (0, pytest.approx(1.14 * 6.0))
    assert below.get_ylim() == (0, pytest.approx(1.14 * 3.0))
    below = "the same steps with CUDA graphs, on another scale"
    assert {"6.00", "1.75", below} <= {t.get_text() for t in fig.findobj(Text)}
    assert fig.get_label() == (
        "The bars end at 3.00 s at 1, 6.00 s at 8; with CUDA graphs at 3.00 s at 1, 1.75 s at 8"
    )


def test_a_number_stands_above_a_steep_line() -> None:
    parts = {"ideal": [1.0, 1.0, 1.0], "bubble": [7.0, 3.0, 1.0]}
    fig = u_curve([1, 2, 4], parts, [8.0, 4.0, 2.0])
    heights = {t.get_text(): t.xy[1] for t in fig.findobj(Annotation) if t.get_text() in ("4.00", "2.00")}
    assert heights == {"4.00": 5.0, "2.00": 2.5}  # a quarter of the way to the point on its left


def test_the_sweep_says_how_far_the_formula_is_off_and_how_long_bubbles_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(
        vit_pipeline_words, "record", lambda key, value, unit="": recorded.update({key: value})
    )
    steps = {m: schedules.make("1f1b", 2, m).simulate(Costs(4 / m, 0.0, 0.0, 0.0)) for m in (1, 4)}
    rounds = {m: [tl, tl] for m, tl in steps.items()}
    parts = [{"bubble": [4.0, 1.0]}]
    sweep = steps, rounds, parts, [7.0, 10.0], 1  # steps of 8 s and 5 s
    vit_pipeline_words.record_sweep(*sweep)
    assert recorded["02.sweep"] == {"best": 4, "most": 4, "furthest": 4, "over": 0.5}
    assert recorded["02.sweep-step"] == {"alone": 8.0, "best": 5.0, "usual": 8.0, "work": 8.0}
    assert recorded["02.sweep.verdict"] == "every other m took longer in each of 2 rounds"
    rounds[4].append(steps[1])
    rounds[1].append(steps[4])
    vit_pipeline_words.record_sweep(*sweep)
    assert (
        recorded["02.sweep.verdict"] == "m = 1 took no longer in at least one of 3 rounds and may be as good"
    )
    assert recorded["02.sweep-bubble"] == {"best": 1.0, "most": 1.0}
    assert recorded["02.sweep-share"] == 62.5
    assert recorded["02.sweep.changes"].startswith("nothing changes, because the largest m is the best")


@pytest.mark.parametrize(
    ("bubbles", "graphs", "ending"),
    [
        ([4.0, 1.0, 0.5], None, "grows by 2.00 s and the bubble shrinks by 500 ms"),
        ([4.0, 1.0, 3.0], None, "a rank waits for the longer ones"),
        ([4.0, 1.0, 3.0], [4.0, 1.0, 2.0], "With CUDA graphs, the bubble at m = 8 is 2.00 s"),
        (
            [4.0, 1.0, 3.0],
            [4.0, 1.0, 0.5],
            "is 500 ms. So most of the bubble without them comes from launches, not from the schedule",
        ),
    ],
)
def test_the_sweep_says_why_a_bubble_grows(
    bubbles: list[float], graphs: list[float] | None, ending: str
) -> None:
    parts = {"small kernels": [0.0, 1.0, 3.0], "bubble": bubbles, "host wait": [0.0, 0.0, 0.0]}
    graph_parts = {"bubble": graphs} if graphs else None
    words = vit_pipeline_words.sweep_words([1, 4, 8], 4, parts, graph_parts)
    assert words.startswith("the time of launches and small kernels grows by 2.00 s and the bubble ")
    assert words.endswith(ending)
    same = {part: [1.0, 1.0, 1.0] for part in parts}
    assert vit_pipeline_words.sweep_words([1, 4, 8], 4, same) == "no part changes by more than 1 µs"


@pytest.mark.parametrize(
    ("slow", "rivals", "title"),
    [
        (5.5, [], "Launched from Python, the step is shortest at m = 4"),
        (6.0, [8], "Launched from Python: m = 4 takes least; 8 may be as good"),
        (9.0, [1, 8], "Launched from Python: m = 4 takes least; 1 and 8 may be as good"),
    ],
)
def test_a_rival_of_the_best_m_is_not_longer_in_every_round(
    slow: float, rivals: list[int], title: str
) -> None:
    def step(seconds: float) -> Timeline:
        return schedules.make("1f1b", 1, 1).simulate(Costs(seconds, 0.0, 0.0))

    took = {1: 8.0, 4: 5.0, 8: 6.0}
    rounds = {m: [step(t), step(slow if m == 4 else t)] for m, t in took.items()}
    best = vit_pipeline_words.best_and_rivals({m: step(t) for m, t in took.items()}, rounds)
    assert best == (4, rivals)
    assert vit_pipeline_words.sweep_title(*best) == title


def test_unequal_stages_make_gpipe_take_longer_than_1f1b(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(vit_pipeline_words, "record", recorded.__setitem__)
    made = {name: schedules.make(name, 4, 8) for name in ("gpipe", "1f1b")}
    for forward, ratio in (([1.0, 1.0, 1.0, 1.0], 1.0), ([1.25, 1.0, 1.0, 1.0], 0.98)):
        steps = {name: s.simulate(Costs(forward, [2.0] * 4, 0.0)) for name, s in made.items()}
        vit_pipeline_words.record_beside_gpipe(steps, made)
        assert recorded["02.by-medians"] == pytest.approx(ratio, abs=0.01)
        assert recorded["02.ran"] == steps
        assert recorded["02.by-run"] == steps["1f1b"].makespan / steps["gpipe"].makespan
        assert vit_pipeline.slowest_over_mean(steps["gpipe"]) == pytest.approx(
            (forward[0] + 2) / (sum(forward) / 4 + 2)
        )
    # the slowest forward is on the first stage, the slowest backward on the last
    apart = made["gpipe"].simulate(Costs([1.5, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.5], 0.0))
    assert vit_pipeline.slowest_over_mean(apart) == pytest.approx((1.5 + 2.5) / (4.5 / 4 + 8.5 / 4))
