"""Notebook 11: its figures, and what it runs on ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpnb
from hpnb import expert_parallel, theory
from hpnb.expert_parallel import combine_rows, dispatch_rows, plan_dispatch
from hpnb.lesson.exercises.experts import balance_of
from hpnb.lesson.figures import experts as figures
from hpnb.lesson.programs import experts as moe
from hpnb.lesson.programs.expert_timing import wait_for_slowest

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def two() -> Any:
    with hpnb.Ranks(2, device="cpu", timeout=120) as pool:
        yield pool


# --- figures -----------------------------------------------------------------------------------------


def test_every_row_is_drawn_on_the_rank_of_its_expert() -> None:
    chosen = [[[0, 2], [1, 2]], [[2, 3], [2, 0]]]  # 2 ranks with 2 tokens each, 4 experts
    figure = figures.dispatched_rows(chosen, 4)
    assert figure.get_label() == (
        "4 tokens mark 8 cells of a matrix of tokens and 4 experts. After the all-to-all ranks 0 to 1 have "
        "3, 5 rows; rank 1 has most."
    )
    left, right = figure.axes
    assert np.count_nonzero(np.asarray(left.images[0].get_array()) >= 0) == 8
    assert len(right.patches) == 8
    assert [text.get_text() for text in right.get_yticklabels()] == ["rank 0:\n3 rows", "rank 1:\n5 rows"]


def test_experts_without_a_token_are_shaded_and_counted() -> None:
    losses = {"right": [2.0, 1.0], "wrong": [2.0, 1.1]}
    norms = {"right": [0.1, 0.2, 0.0], "wrong": [0.1, 0.2, 0.3]}
    figure = figures.losses_and_experts(losses, norms, [4, 4, 0])
    assert figure.get_label() == (
        "right: 0 of 1 experts without a token get one; wrong: 1 of 1 experts without a token get one"
    )
    dots = {line.get_label(): list(line.get_ydata()) for line in figure.axes[1].get_lines()}  # type: ignore[arg-type]
    assert dots == {f"gradient's norm, {run},": values for run, values in norms.items()}
    assert len(figure.axes[1].patches) == 1


def test_a_capacity_has_a_panel_for_drops_and_one_for_the_loss() -> None:
    figure = figures.capacity([1.0, 2.0], {"a": [0.25, 0.0]}, {"a": [0.1, 0.0]})
    assert [list(ax.get_lines()[0].get_ydata()) for ax in figure.axes] == [[25.0, 0.0], [0.1, 0.0]]  # type: ignore[arg-type]


# --- one process -------------------------------------------------------------------------------------


def test_the_experts_of_transformers_block_are_those_that_it_applies() -> None:
    block, router, experts = moe.transformers_block(4, 1)
    x = torch.randn(6, router.size(1))
    chosen = (x @ router.T).argmax(-1)
    wanted = torch.stack([experts[int(e)](row[None])[0] for e, row in zip(chosen, x, strict=True)])
    assert torch.allclose(block(x[None])[0], wanted, atol=1e-6)


def test_a_popular_expert_is_drawn_more_often_and_no_expert_twice() -> None:
    even, popular = (moe.routed_rows(400, 8, 2, weight) for weight in (1.0, 8.0))
    assert (even[:, 0] != even[:, 1]).all()
    share = [int((chosen == 2).sum()) / 400 for chosen in (even, popular)]
    assert share[0] == pytest.approx(2 / 8, abs=0.08)
    assert share[1] > 2 * share[0]


def balancing_loss_of_library(logits: torch.Tensor, k: int) -> tuple[float, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    loss = expert_parallel.balancing_loss([logits], k, moe.expert_axis())
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad


def test_the_oracle_of_the_balancing_loss_is_the_library() -> None:
    logits = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (found,) = hpnb.launch(balancing_loss_of_library, logits, 2, ranks=1, device="cpu")
    loss, gradient = balance_of(logits, 2)
    assert found[0] == pytest.approx(float(loss), rel=1e-6)
    assert torch.allclose(found[1], gradient, rtol=1e-5)


def test_layers_of_deepseek_v3_have_the_published_weights() -> None:
    """37 billion weights work on a token, most of them in the attention and experts of 61 layers."""
    layer = moe.deepseek_v3_layer(1, 64, 2.0, theory.Link(0.0, 1.0))  # seconds are multiply-adds
    assert 61 * (layer["attention"] + layer["experts"]) == pytest.approx(36e9, rel=0.1)
    assert layer["all-to-all"] == pytest.approx(63 / 64 * 8 * 7168 * 2)


def test_rows_of_ranks_are_means_of_sorted_loads() -> None:
    steps = [{"a": torch.tensor([4, 0, 1, 1])}, {"a": torch.tensor([0, 0, 4, 2])}]
    assert moe.sorted_rows(steps, 2) == [5.0, 1.0]


# --- on ranks ----------------------------------------------------------------------------------------


def routed(x: Any, chosen: Any, weights: Any, compute: Any, axis: Any) -> torch.Tensor:
    plan = plan_dispatch(chosen, compute.num_experts, axis)
    rows = dispatch_rows(x, plan, axis)
    return combine_rows(compute(rows, plan.experts), weights, plan, axis)


def wrong_expert(x: Any, chosen: Any, weights: Any, compute: Any, axis: Any) -> torch.Tensor:
    """All rows go to the first expert of their rank."""
    plan = plan_dispatch(chosen, compute.num_experts, axis)
    rows = dispatch_rows(x, plan, axis)
    return combine_rows(compute(rows, 0 * plan.experts), weights, plan, axis)


def test_a_layer_that_computes_the_wrong_expert_is_far_off(two: Any) -> None:
    for ran in two.run(moe.compare_layer, routed, 4, 2):
        assert max(ran.distances.values()) < 1e-12
        assert ran.sent == theory.experts.rows_sent(ran.there, ran.back, 8, 8) + 1 / 2 * 8 * 4
    for ran in two.run(moe.compare_layer, wrong_expert, 4, 2):
        assert min(ran.distances.values()) > 0.1


def test_twice_the_rows_take_about_twice_as_long(two: Any) -> None:
    seconds = two.run(moe.seconds_of_ranks, {"even": [50, 50], "busy": [10, 90]}, 2)[0]
    assert 1.3 < seconds["busy"][1] / max(seconds["even"]) < 3
    assert seconds["busy"][0] < seconds["even"][0]


def test_ranks_wait_until_the_slowest_has_finished() -> None:
    waits = {e.rank: (e.start, e.end) for e in wait_for_slowest([1.0, 4.0, 2.0]).events if e.op == "wait"}
    assert waits == {0: (1.0, 4.0), 1: (4.0, 4.0), 2: (2.0, 4.0)}


def keep_all(chosen: torch.Tensor, capacity: int) -> torch.Tensor:
    return torch.ones_like(chosen, dtype=torch.bool)


def keep_none_of_finite(chosen: torch.Tensor, capacity: int) -> torch.Tensor:
    return torch.full_like(chosen, capacity >= chosen.numel(), dtype=torch.bool)


def capacity_points(keep: Any) -> list[tuple[float, float]]:
    ids = torch.arange(32).reshape(2, 16)
    batches = [{"input_ids": ids, "labels": ids}, {"input_ids": ids + 40, "labels": ids + 40}]
    states = {"a": moe.mixture().state_dict()}
    return moe.loss_within_capacity(states, keep, (1.0, math.inf), batches, 8, 2)["a"]


def test_dropped_rows_are_counted_and_change_the_loss(two: Any) -> None:
    kept, other = two.run(capacity_points, keep_all)
    assert kept == other  # ranks share the batches and read the same
    assert kept[0] == kept[1]
    assert kept[0][0] == 0
    dropped = two.run(capacity_points, keep_none_of_finite)[0]
    assert dropped[0][0] == 1
    assert dropped[1] == kept[1]
    assert dropped[0][1] != kept[0][1]


def probe(axis_of_experts: str) -> moe.ProbedExperts:
    mesh = hpnb.Mesh(hpnb.Layout(dp=2, ep=2))
    model = moe.mixture()
    expert_parallel.parallelize(model, mesh.ep)

    def reduce() -> None:
        for name, p in model.named_parameters():
            axis = mesh.axes[axis_of_experts] if ".experts." in name else mesh.dp
            assert p.grad is not None
            p.grad.copy_(hpnb.comm.all_reduce(p.grad, axis) / 2)

    return moe.probe_experts(model, reduce, mesh.ep, 2, torch.tensor([[32, 302, 466]]))


def test_experts_averaged_over_others_ranks_get_gradients_without_a_token(two: Any) -> None:
    for right in two.run(probe, "edp"):
        assert right.distance < 1e-5
        assert right.unused_with_gradient == 0
        assert sum(right.tokens) == 2 * 3 * 2
    for wrong in two.run(probe, "dp"):
        assert wrong.distance > 0.5
        assert wrong.unused_with_gradient > 0


def test_a_pipeline_of_experts_has_the_losses_of_data_parallelism(two: Any) -> None:
    ids = torch.arange(32, 160).reshape(8, 16)
    batches = [{"input_ids": ids, "labels": ids}] * 2
    alone = two.run(moe.pipeline_losses, {"num_microbatches": 1}, batches)
    piped = two.run(moe.pipeline_losses, {"pp_size": 2, "num_microbatches": 4}, batches)
    assert alone[0] == alone[1]
    assert piped[0] == piped[1] == pytest.approx(alone[0], rel=1e-5)
    assert alone[0][1] < alone[0][0]
