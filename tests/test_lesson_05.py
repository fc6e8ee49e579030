"""Notebook 05: budgets that are kept, memory and seconds of a step, gathers, noise scales, its figures."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpnb
from hpnb import theory
from hpnb.lesson.exercises import gpt2_data_parallel as exercises
from hpnb.lesson.exercises.checker import check
from hpnb.lesson.figures import gpt2_data_parallel as figures
from hpnb.lesson.programs import gpt2_zero, gradient_noise
from hpnb.lesson.programs.gpt2_zero import ZeroConfig
from hpnb.mesh import Layout, Mesh
from hpnb.models import GPT2Size
from hpnb.record import MemoryProfile, MemorySample, OutOfBudget
from hpnb.theory import LINKS, Block

MB = 1_000_000.0
SIZE = GPT2Size(hidden=64, layers=4, heads=4, mlp=256, vocab_size=401, length=32)


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=120.0) as ranks:
        yield ranks


# --- a budget of bytes -----------------------------------------------------------------------


def _grow(budget: float | None, count: int = 4) -> list[torch.Tensor]:
    """A layer of 40 bytes, and `count` tensors of 400 bytes beside it."""
    with hpnb.record.memory(nn.Linear(3, 2, bias=True).double().requires_grad_(False), budget=budget):
        return [torch.ones(100) for _ in range(count)]


def test_a_budget_is_kept_to_the_byte() -> None:
    states = 8 * (6 + 2)
    assert len(_grow(states + 1600)) == 4
    with pytest.raises(
        OutOfBudget, match=r"1,664 bytes .* after aten\.ones, 1 more .* 1,663"
    ) as found:
        _grow(states + 1599)
    assert found.value.usage.total == states + 1600
    assert (found.value.usage.parameters, found.value.usage.temporary) == (states, 1600)


def test_survivors_are_told_by_shape_and_owner() -> None:
    with pytest.raises(OutOfBudget) as found:
        _grow(1000)
    first, *rest = found.value.survivors
    assert str(first) == "3 x (100) float32"
    assert (first.category, first.nbytes) == ("temporary", 1200)
    assert {each.category for each in rest} == {"parameters"}
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.survivors) == (str(found.value), found.value.survivors)


def test_states_alone_can_be_too_much() -> None:
    with pytest.raises(OutOfBudget, match="before the first operator"):
        _grow(50)
    with pytest.raises(ValueError, match="budget=0"):
        _grow(0)


def test_who_runs_out_is_stopped_once_and_what_it_held_is_named() -> None:
    """Adam's moments come in the first step, inside a context that itself calls operators on its way out."""
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 64)).sum().backward()
    with pytest.raises(OutOfBudget) as found, hpnb.record.memory(layer, optimizer, budget=3.5 * 4 * 64 * 64):
        optimizer.step()
    assert "zeros_like" in found.value.operator
    assert found.value.usage.optimizer >= 4 * 64 * 64


# --- the memory of a step --------------------------------------------------------------------


def _peaks(ways: list[ZeroConfig], rows: int) -> list[tuple[int, MemorySample]]:
    found = [gpt2_zero.measure_step(SIZE, rows, torch.float32, way, 0.25, repeats=0).profile for way in ways]
    return [(p.peak, p.samples[-1]) for p in found]


@pytest.mark.parametrize("rows", [1, 8])
def test_step_memory_is_what_is_recorded(two: hpnb.Ranks, rows: int) -> None:
    ways = [ZeroConfig(stage, again) for again in (0, -1) for stage in range(4)] + [ZeroConfig(2, 2)]
    ways = ways if rows == 8 else [ZeroConfig(0), ZeroConfig(3, -1)]
    for way, (peak, end) in zip(ways, two.run(_peaks, ways, rows)[0], strict=True):
        told = gpt2_zero.predict_memory(SIZE, rows, torch.float32, way, 2, 0.25)
        assert 0.8 <= peak / told.peak <= 1.25, f"{way}: {peak / MB:.2f} MB, predicted {told.peak / MB:.2f}"
        if rows == 8 and not way.again and way.stage < 3:
            assert peak / told.peak == pytest.approx(1.0, abs=0.03), str(way)
        states = theory.model_states(SIZE.parameters(), 2, way.stage, weight_bytes=4, gradient_bytes=4,
                                     optimizer_bytes=8)  # fmt: skip
        assert end.parameters == pytest.approx(states.parameters, rel=0.01)


def test_each_measure_moves_its_own_term() -> None:
    block = Block(512, 8, 128, 4)

    def peak(stage: int = 0, ranks: int = 4, **more: Any) -> theory.StepMemory:
        return theory.step_memory(block, 6, 5000, 128, ranks, stage, bucket_bytes=1e5, **more)

    plain, again = peak(), peak(recompute=6)
    assert plain.moments[0].name == "turn"
    turns = [peak(stage).moments[0] for stage in range(4)]
    assert all(a.total > b.total for a, b in pairwise(turns))
    assert again.moments[0].activations < plain.moments[0].activations / 3
    assert again.moments[0].optimizer == plain.moments[0].optimizer
    assert peak(3, offload=True).moments[0].optimizer == 0
    steps = [peak(0).moments[-1], peak(1).moments[-1]]
    assert steps[0].temporary == 4 * steps[1].temporary  # masters' gradients are dealt out too
    with pytest.raises(ValueError, match="recompute=7 of 6 blocks"):
        peak(recompute=7)


def test_the_largest_model_is_the_last_that_fits(two: hpnb.Ranks) -> None:
    budget = gpt2_zero.predict_memory(SIZE, 2, torch.float32, ZeroConfig(2), 2, 0.25).peak * 1.3
    count = gpt2_zero.most_blocks_predicted(SIZE, 2, torch.float32, ZeroConfig(2), 2, 0.25, budget)
    for layers, fits in ((count, True), (count + 1, False)):
        size = GPT2Size(64, layers, 4, 256, 401, 32)
        assert (
            gpt2_zero.predict_memory(size, 2, torch.float32, ZeroConfig(2), 2, 0.25).peak <= budget
        ) is fits
    found = gpt2_zero.most_blocks_measured(two, SIZE, 2, torch.float32, ZeroConfig(2), 0.25, budget, count)
    assert abs(found - count) <= 1


def test_blocks_that_are_computed_again_give_the_same_gradients() -> None:
    grads = []
    for count in (0, 2, 4):
        model: Any = hpnb.models.gpt2(SIZE, dtype=torch.float64)
        gpt2_zero.recompute_blocks(model, count)
        ids = torch.arange(64).view(2, 32)
        model(input_ids=ids).logits.square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in grads[1:]:
        assert (grads[0] - other).norm() / grads[0].norm() < 1e-12


# --- its seconds -----------------------------------------------------------------------------


def _seconds(stage: int, ranks: int = 8, wire: str = "InfiniBand NDR", **more: Any) -> dict[str, float]:
    sizes = {"block_bytes": 5e7, "root_bytes": 1e8, "layers": 20, "ranks": ranks}
    return dict(theory.zero_step_seconds(0.1, 0.2, 0.03, stage=stage, link=LINKS[wire], **sizes, **more))


def test_shard_seconds() -> None:
    assert _seconds(0, ranks=1) == {"computing": pytest.approx(0.3), "computing again": 0.0, "exposed": 0.0,
                                    "optimizer": 0.03}  # fmt: skip
    assert _seconds(2)["optimizer"] == pytest.approx(0.03 / 8)
    assert _seconds(2)["exposed"] > theory.seconds("all_gather", 1.1e9, 8, LINKS["InfiniBand NDR"])
    assert _seconds(3)["exposed"] < _seconds(2)["exposed"]  # behind blocks, while they last
    assert _seconds(3, wire="Ethernet 10 Gb")["exposed"] > _seconds(2, wire="Ethernet 10 Gb")["exposed"]
    assert _seconds(0, recompute=10)["computing again"] == pytest.approx(0.05)
    offload = _seconds(2, host_bandwidth=25e9, host_seconds=0.8)["offload"]
    assert offload == pytest.approx(2 * 1.1e9 / 8 / 25e9)
    with pytest.raises(ValueError, match="stage=4"):
        _seconds(4)


# --- gathers ---------------------------------------------------------------------------------

USES = [0, 1, 2, 2, 1, 0]


def test_gathers_by_hand() -> None:
    """Blocks of 1 s forward and 2 s backward, gathers of 0.5 s."""
    computing, rest = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], ([0.5] * 3, [1.0] * 3)
    late = theory.simulate_gathers(USES, computing, *rest, theory.prefetch_plan(USES, 0))
    assert late.ends[-1] == pytest.approx(9 + 5 * 0.5)  # the middle one is not gathered twice
    assert (late.stall, late.most) == (pytest.approx(4 * 0.5), 1.0)
    early = theory.simulate_gathers(USES, computing, *rest, theory.prefetch_plan(USES, 1))
    assert early.ends[-1] == pytest.approx(9.5)
    assert (early.stall, early.most, len(early.gathers)) == (0.0, 2.0, 5)


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([[0], [], [], [], [], []], "use 1 computes with block 1, which is not gathered"),
        ([[0, 0], [1], [2], [], [1], [0]], "use 0 gathers block 0, which is gathered already"),
        ([[0], [1]], "2 lists of gathers for 6 uses"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(starts: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        theory.simulate_gathers(USES, [1.0] * 6, [0.5] * 3, [1.0] * 3, starts)


# --- the noise scale -------------------------------------------------------------------------


def test_two_norms_give_signal_and_noise() -> None:
    signal, noisy, small, ranks = 2.0, 50.0, 4, 8
    per_rank, reduced = exercises.planted(signal, noisy, small, ranks, 3000)
    means = [sum(norms) / ranks for norms in per_rank]
    found = theory.signal_and_noise(means, reduced, small, small * ranks)
    assert found == (pytest.approx(signal, rel=0.1), pytest.approx(noisy, rel=0.1))
    assert theory.noise_scale(means, reduced, small, small * ranks) == pytest.approx(25.0, rel=0.1)
    assert theory.noise_scale([10.0], [1.0], 1, 2) == math.inf  # all of it noise
    with pytest.raises(ValueError, match="the first must be the smaller"):
        theory.noise_scale([1.0], [1.0], 4, 4)


def test_a_wall_that_is_there_is_found() -> None:
    batches = [2, 4, 8, 16, 64]
    steps = [theory.steps_at(b, 50.0, 12.0) for b in batches]
    assert steps[0] == pytest.approx(350.0)
    assert theory.fitted_wall(batches, steps) == (pytest.approx(50, rel=0.01), pytest.approx(12, rel=0.02))
    with pytest.raises(ValueError, match="two or more"):
        theory.fitted_wall([4, 4], [10, 10])


class _Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 6.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=(x @ self.w).square().mean())


def _norms() -> tuple[float, float, float, float, float]:
    axis, draw = Mesh(Layout(dp=hpnb.world_size())).dp, torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, generator=draw, dtype=torch.float64)
    model, alone = _Quadratic(), _Quadratic()
    small, big = gradient_noise.gradient_norms(model, axis, {"x": x[axis.rank :: axis.size]})
    alone(x).loss.backward()
    assert model.w.grad is not None
    assert alone.w.grad is not None
    whole, off = alone.w.grad.square().sum().item(), (model.w.grad - alone.w.grad).norm().item()
    parts = []
    for rank in range(axis.size):
        alone.w.grad = None
        alone(x[rank :: axis.size]).loss.backward()
        parts.append(alone.w.grad.square().sum().item())
    return small, sum(parts) / len(parts), big, whole, off


def test_two_norms_are_before_and_after_the_all_reduce(two: hpnb.Ranks) -> None:
    for small, parts, big, whole, off in two.run(_norms):
        assert small == pytest.approx(parts, rel=1e-12)
        assert big == pytest.approx(whole, rel=1e-12)
        assert off < 1e-12
        assert small > big


def test_training_stops_at_its_target(two: hpnb.Ranks) -> None:
    rows = torch.arange(32)[None].repeat(8, 1)  # one sentence: soon known by heart
    run = two.run(gradient_noise.train, rows, rows[:2], 2, 3.0, 60)[0]
    assert (run.batch, run.reached, run.steps < 60) == (4, True, True)
    assert len(run.small) == len(run.big) == run.steps
    assert not two.run(gradient_noise.train, rows, rows[:2], 1, 0.0, 5)[0].reached


# --- figures ---------------------------------------------------------------------------------


def _profile(peak: int) -> MemoryProfile:
    middle = MemorySample(0.1, 10, 5, 20, peak - 35)
    return MemoryProfile((MemorySample(0.0, 10, 0, 20), middle, MemorySample(0.2, 10)))


def test_rivers() -> None:
    fig = figures.rivers({"stage 0": _profile(100), "stage 1": _profile(60), "stage 2": _profile(50)}, 80.0)
    words = [t.get_text() for ax in fig.axes for t in ax.texts]
    assert "100 B" in words
    assert [ax.get_visible() for ax in fig.axes] == [True, True, True, False]
    assert fig.axes[0].get_ylim() == fig.axes[2].get_ylim()
    with pytest.raises(ValueError, match="samples; there are empty"):
        figures.rivers({"empty": MemoryProfile(())})


def test_frontier() -> None:
    points = {"plain": {"0": (1.0, 100.0), "1": (1.1, 60.0)}}
    fig = figures.frontier(points, points, 80.0)
    labels = {line.get_label() for line in fig.axes[0].lines}
    assert {"predicted plain", "measured plain", "budget"} <= labels
    drawn = next(line for line in fig.axes[0].lines if line.get_label() == "measured plain")
    assert np.asarray(drawn.get_xydata()).tolist() == [[100.0, 1.0], [60.0, 1.1]]


def test_batch_wall() -> None:
    fig = figures.batch_wall([2, 4], [100, 70], {"fit": (40.0, 3.0)})
    measured, law, *_ = fig.axes[1].lines
    assert list(measured.get_ydata()) == [200, 280]
    x, y = law.get_data()
    np.testing.assert_allclose(y, 40.0 * (np.asarray(x) + 3.0))
    assert [line.get_xdata()[0] for line in fig.axes[0].lines if line.get_label() == "noise scale"] == [3.0]


def test_step_bill() -> None:
    fig = figures.step_bill({"parameters": 60.0, "optimizer": 30.0}, {"computing": 1.0, "exposed": 0.5}, 80.0)
    corners = [c.get_paths()[0].vertices for c in fig.axes[0].collections]
    assert [np.ptp(c[:, 0]) for c in corners] == [60.0, 30.0]
    assert [line.get_xdata()[0] for line in fig.axes[0].lines if line.get_label() == "capacity"] == [80.0]
    with pytest.raises(ValueError, match="lunch"):
        figures.step_bill({"parameters": 1.0}, {"lunch": 1.0})


# --- the explorer, and checks that must not fall over ------------------------------------------


def test_answers_of_the_wrong_kind_are_told_so() -> None:
    told = {
        exercises.state_bytes: 3,
        exercises.recompute_choice: 3,
        exercises.gather_order: 3,
        exercises.noise_scale: "much",
    }
    for exercise, answer in told.items():
        assert check(exercise, lambda *_, answer=answer: answer).status == "failed"
    assert check(exercises.recompute_choice, lambda *_: [9]).status == "failed"
    assert check(exercises.gather_order, lambda step: [[*range(6)], *[[]] * 11]).status == "failed"
