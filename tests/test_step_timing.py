"""How lessons time steps: which one is the median, and how many warm up before the first that counts."""

from __future__ import annotations

import inspect
from collections import Counter
from unittest.mock import patch

import pytest
import torch

import hpnb
from hpnb import ParallelLayout
from hpnb.lesson.programs import gpt2_hybrid, gpt2_zero, launch_timing, rank_rates, step_timing
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.lesson.programs.step_breakdown import RankRecord
from hpnb.models import GPT2Size, ViTSize
from hpnb.pipeline_parallel import schedules
from hpnb.record import Event, MemoryProfile, Timeline
from hpnb.theory import Link

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


def step_of(seconds: float) -> Timeline:
    return Timeline((Event(0, 0, "F", 0, 0.0, seconds),))


@pytest.mark.parametrize("seconds", [[3.0, 1.0, 2.0], [2.0, 1.0], [4.0, 1.0, 3.0, 2.0]])
def test_there_is_one_median_of_steps(seconds: list[float]) -> None:
    steps = [step_of(s) for s in seconds]
    middle = step_timing.median_by(steps, lambda tl: tl.makespan).makespan
    assert middle == sorted(seconds)[len(seconds) // 2]
    run = gpt2_zero.StepMeasurement(tuple({"forward": s} for s in sorted(seconds)), MemoryProfile(()))
    assert run.parts == {"forward": middle}
    record = RankRecord({"pp": 0}, timelines=steps)
    schedule, free = schedules.make("1f1b", 1, 1), Link(0.0, 1e30)
    layout_run = gpt2_hybrid.LayoutRun(ParallelLayout(), [record], schedule, free, 0.0, 0.0)
    assert layout_run.timeline.makespan == middle
    assert layout_run.seconds == middle


@pytest.mark.parametrize("program", [gpt2_zero.measure_step, gpt2_hybrid.run_layout])
def test_an_odd_number_of_steps_has_a_median(program: object) -> None:
    assert inspect.signature(program).parameters["repeats"].default == 3  # type: ignore[arg-type]


def _count_calls() -> dict[str, int]:
    """How often each way to time 2 steps calls what it times, if 3 steps warm up."""
    calls, model = Counter[str](), torch.nn.Linear(2, 1)
    size = ViTSize(hidden=16, layers=1, heads=2, mlp=16, patch=16, image=32)

    def loss(name: str) -> torch.Tensor:
        calls[name] += 1
        value: torch.Tensor = model(torch.ones(1, 2)).sum()
        return value

    def forward_and_backward(*_: object) -> None:
        calls["launches"] += 1

    with (
        patch.object(step_timing, "warmup_steps", lambda: 3),
        patch("hpnb.lesson.programs.device_timing.warmup_steps", lambda: 3),
        patch("hpnb.lesson.programs.layer_times.warmup_steps", lambda: 3),
        patch.object(step_timing, "forward_and_backward", forward_and_backward),
        patch.object(torch.optim.AdamW, "step", lambda *_: calls.update(["optimizer"])),
    ):
        step_timing.time_backward(model, lambda: loss("backward"), repeats=2)
        step_timing.record_in_turn({"": (model, lambda: loss("recorded"))}, repeats=2)
        step_timing.rounds_in_turn({"a": lambda: calls.update(["rounds"])}, repeats=2)
        launch_timing.vit_launches(size, 1, torch.float32, repeats=2)
        rank_rates._optimizer_seconds(GPT2Size(8, 1, 2, 16, 17, 4), torch.float32)
    return dict(calls)


def test_all_ways_to_time_steps_warm_up_alike() -> None:
    expected = dict.fromkeys(("backward", "recorded", "rounds", "launches"), 3 + 2)
    assert hpnb.launch(_count_calls, ranks=2, device="cpu")[0] == {**expected, "optimizer": 3 + 5}


def test_the_matmul_rate_of_a_rank_is_a_median_as_in_the_machine_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rank_rates, "seconds_in_turn", lambda calls, repeats: {n: [1.0, 2.0, 9.0] for n in calls}
    )
    size = GPT2Size(8, 1, 2, 16, 17, 4)
    assert rank_rates._matmul_rate(size, 3, torch.float32) == 2 * 3 * 4 * 8 * 16 / 2.0


def _largest() -> dict[str, float]:
    return step_timing.largest_over_ranks({"a": float(hpnb.rank()), "b": 1.0 - hpnb.rank()}, all_ranks("dp"))


def test_distances_are_those_of_the_rank_where_they_are_largest() -> None:
    assert hpnb.launch(_largest, ranks=2, device="cpu") == [{"a": 1.0, "b": 1.0}] * 2
