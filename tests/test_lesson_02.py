"""What notebook 02 compares and draws."""

from __future__ import annotations

import pytest
import torch

import hpnb
from hpnb.lesson.figures.vit_pipeline import without_numbers
from hpnb.lesson.programs import vit_pipeline
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import schedules


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
    columns = vit_pipeline.compare_split(rounds)
    assert [list(column.values()) for column in columns.values()] == [[1.25], ["1.25 to 1.25"], ["slower"]]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((3.0, 3.0), "no schedule is faster than another: all pairs are undecided"),
        ((3.0, 2.0), "b is faster than a"),
        ((3.0, 2.0, 2.0), "b is faster than a, c is faster than a; all other pairs are undecided"),
    ],
)
def test_the_race_says_which_pairs_are_undecided(seconds: tuple[float, ...], words: str) -> None:
    steps = dict(zip("abc", seconds, strict=False))
    assert vit_pipeline.race_words(steps, dict.fromkeys(steps, 0.5)) == words
