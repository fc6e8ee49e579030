"""What notebook 02 compares and draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from matplotlib.text import Annotation, Text
from replayed_graphs import with_graphs

import hpnb
from hpnb.lesson.exercises import vit_pipeline_parallel as exercises
from hpnb.lesson.figures.vit_pipeline import u_curve, without_numbers
from hpnb.lesson.programs import vit_pipeline, vit_pipeline_words
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.record import Timeline


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
    assert [list(column.values()) for column in columns.values()] == [[1.25], ["1.250 to 1.250"], ["slower"]]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((3.0, 3.0), "no schedule is faster than another: all pairs are undecided"),
        ((3.0, 2.0), "b is faster than a"),
        ((3.0, 2.0, 2.0), "b is faster than a, c is faster than a; all other pairs are undecided"),
        ((3.0, 2.0, 1.0), "c is faster than a and b, b is faster than a"),
        ((4.0, 3.0, 2.0, 1.0), "d is faster than a, b and c, c is faster than a and b, b is faster than a"),
    ],
)
def test_the_race_says_which_pairs_are_undecided(seconds: tuple[float, ...], words: str) -> None:
    steps = dict(zip("abcd", seconds, strict=False))
    assert vit_pipeline_words.race_words(steps, dict.fromkeys(steps, 0.5)) == words


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


def test_the_page_says_what_graphs_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(vit_pipeline_words, "record", recorded.__setitem__)
    slow, fast = (
        {m: schedules.make("1f1b", 2, m).simulate(Costs(cost, 0.0, 0.0, 0.0)) for m in (1, 4)}
        for cost in (1.0, 0.5)
    )
    assert "a second panel" in vit_pipeline_words.record_graphs(slow, {}, {}, [])
    assert recorded["02.graphs"] == "the ranks have no GPU, so the figure has one panel"
    rounds = {m: [tl] * 2 for m, tl in fast.items()}
    said = vit_pipeline_words.record_graphs(slow, fast, rounds, ["stage 1 runs without CUDA graphs"])
    assert said.splitlines()[1:] == ["stage 1 runs without CUDA graphs"]
    words = "the step at m = 4 takes 2.50 s with graphs instead of 5.00 s, "
    words += "and the shortest step is 1.00 s at m = 1"
    assert recorded["02.graphs"] == f"{words}, although some stages could not be captured"
    rounds[1] = [fast[1], slow[4]]  # longer than m = 4 in the second round
    vit_pipeline_words.record_graphs(slow, fast, rounds, [])
    assert recorded["02.graphs"] == f"{words}, where m = 4 may be as good"


def test_the_second_panel_has_an_axis_of_its_own() -> None:
    eager = {"ideal": [1.0, 1.0], "bubble": [2.0, 1.0], "small kernels": [0.0, 4.0]}
    graphs = {"ideal": [1.0, 1.0], "bubble": [2.0, 0.5], "small kernels": [0.0, 0.25]}
    fig = u_curve([1, 8], eager, [3.0, 6.0], "T", "measured", graphs)
    above, below = fig.axes
    assert above.get_ylim() == (0, pytest.approx(1.14 * 6.0))
    assert below.get_ylim() == (0, pytest.approx(1.14 * 3.0))
    assert {"6.00", "1.75", "the same steps with CUDA graphs"} <= {t.get_text() for t in fig.findobj(Text)}
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
    sweep = steps, rounds, {"bubble": [4.0, 1.0]}, [7.0, 10.0], 1  # steps of 8 s and 5 s
    vit_pipeline_words.record_sweep(*sweep)
    assert recorded["02.sweep"] == {"best": 4, "most": 4, "furthest": 4, "over": 0.5}
    assert recorded["02.sweep-step"] == {"alone": 8.0, "best": 5.0, "usual": 8.0, "work": 8.0}
    assert recorded["02.sweep.verdict"] == "every other m took longer in each of 2 rounds"
    rounds[4].append(steps[1])
    rounds[1].append(steps[4])
    vit_pipeline_words.record_sweep(*sweep)
    assert recorded["02.sweep.verdict"] == "m = 1 took less in some of 3 rounds and may be as good"
    assert recorded["02.sweep-bubble"] == {"best": 1.0, "most": 1.0}
    assert recorded["02.sweep-share"] == 62.5


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
        assert vit_pipeline.slowest_over_mean(steps["gpipe"]) == pytest.approx(
            (forward[0] + 2) / (sum(forward) / 4 + 2)
        )
