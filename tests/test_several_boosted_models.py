"""Losses whose gradient passes through a boosted model more than once, or leaves it by an input.

A generator before a discriminator, a criterion that calls another model, a gradient penalty, saliency: with
even and with ragged batches, beside one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn

import hpnb

D = torch.float64
ROWS = {"even": (4, 4), "ragged": (5, 3), "a rank has none": (8, 0)}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


class Training:
    """Two models, their optimizers, this rank's rows, and how a backward is called; boosted if `rows` is."""

    def __init__(self, rows: tuple[int, int] | None, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(D)
        second = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(D)
        self.models: list[Any] = [first, second]
        self.optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        self.x = torch.randn(8, 4, dtype=D)
        self.booster = None
        if rows is not None:
            self.booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
            for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                self.models[i], self.optimizers[i], *_ = self.booster.boost(model, optimizer)
            self.x = self.x.split(list(rows))[hpnb.rank()]

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        if self.booster is None:
            loss.backward()
        else:
            self.booster.backward(loss, optimizer)

    def end(self, *results: torch.Tensor) -> list[torch.Tensor]:
        """What the steps made of the weights, seen through the models, which shard them differently."""
        for optimizer in self.optimizers:
            optimizer.step()
        probe = torch.linspace(-1, 1, 12, dtype=D).view(3, 4)
        with torch.no_grad():
            return [*results, *(model(probe) for model in self.models)]


def adversarial(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    run = Training(rows, options)
    run.backward(run.models[1](run.models[0](run.x)).square().mean(), run.optimizers[0])
    return run.end()


def other_model_in_the_criterion(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    run = Training(rows, options)
    first, second = run.models
    if run.booster is None:
        second(first(run.x)).square().mean().backward()
    else:
        criterion = lambda outputs, _: second(outputs).square().mean()  # noqa: E731
        run.booster.execute_pipeline(iter([(run.x,)]), first, criterion, run.optimizers[0])
    return run.end()


def sum_and_count(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    run = Training(rows, options)
    outputs = run.models[1](run.models[0](run.x))
    if run.booster is None:
        outputs.square().mean().backward()
    else:
        run.booster.backward((outputs.square().sum(), len(run.x)), run.optimizers[0])
    return run.end()


def gradient_penalty(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    run = Training(rows, options)
    x = run.x.clone().requires_grad_()
    outputs = run.models[1](x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    run.backward(outputs.mean() + slope.square().sum(1).mean(), run.optimizers[1])
    return run.end(slope.detach())


def saliency(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    run = Training(rows, options)
    x = run.x.clone().requires_grad_()
    return list(torch.autograd.grad(run.models[1].eval()(x).sum(), x))


def a_term_of_parameters(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    run = Training(rows, options)
    decay = sum(p.square().sum() for p in run.models[0].parameters())
    run.backward(run.models[0](run.x).square().mean() + 0.1 * decay, run.optimizers[0])
    return run.end()


def two_forwards(rows: tuple[int, int] | None, options: dict[str, Any]) -> list[torch.Tensor]:
    """Rank 0's first row is a forward of its own, of which the other rank has no row."""
    run = Training(rows, options)
    alone = 1 if rows is None or hpnb.rank() == 0 else 0
    one, others = run.models[0](run.x[:alone]), run.models[0](run.x[alone:])
    loss = others.square().mean() + 3 * one.sin().mean().nan_to_num()
    run.backward(loss, run.optimizers[0])
    return run.end()


LOSSES = (adversarial, other_model_in_the_criterion, sum_and_count, gradient_penalty, saliency, two_forwards)
CASES = {loss.__name__: loss for loss in LOSSES}


@pytest.mark.sampled(18, cover=True)
@pytest.mark.parametrize("options", [{}, {"zero_stage": 2}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_it_is_one_process(pools: RankPools, case: str, rows: str, options: dict[str, Any]) -> None:
    check(pools, case, ROWS[rows], options)


def penalty_after_another_step(rows: tuple[int, int], options: dict[str, Any]) -> list[torch.Tensor]:
    other_model_in_the_criterion((5, 3), options)
    return gradient_penalty(rows, options)


def test_forwards_inside_a_pipeline_step_do_not_weigh_the_next_loss(pools: RankPools) -> None:
    """Only a second derivative shows it."""
    alone = gradient_penalty(None, {})
    for results in pools[2].run(penalty_after_another_step, (4, 4), {}):
        for ours, theirs in zip(results[1:], alone[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def check(pools: RankPools, case: str, rows: tuple[int, int], options: dict[str, Any]) -> None:
    alone = CASES[case](None, {})
    by_rank = pools[2].run(CASES[case], rows, options)
    of_rows = 1 if case in ("gradient_penalty", "saliency") else 0
    for i, expected in enumerate(alone):
        for rank, results in enumerate(by_rank):
            here = expected.split(list(rows))[rank] if i < of_rows else expected
            torch.testing.assert_close(results[i], here, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}, {"zero_stage": 3}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_a_term_of_parameters_counts_once(pools: RankPools, rows: str, options: dict[str, Any]) -> None:
    """Also where a rank has no samples, and where parameters are sharded and so no rank has the full term."""
    alone = a_term_of_parameters(None, {})
    for results in pools[2].run(a_term_of_parameters, ROWS[rows], options):
        for ours, theirs in zip(results, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_accumulated_batches_of_two_models(pools: RankPools) -> None:
    """Two backwards before one step, each through both models."""

    def train(rows: tuple[int, int] | None) -> list[torch.Tensor]:
        run = Training(rows, {})
        for shift in (0.0, 0.5):
            outputs = run.models[1](run.models[0](run.x + shift))
            run.backward(F.mse_loss(outputs, run.x[:, :1]), run.optimizers[0])
        return run.end()

    for results in pools[2].run(train, ROWS["ragged"]):
        for ours, theirs in zip(results, train(None), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def criterion_with_another(boosted: bool) -> float | None:
    torch.manual_seed(0)
    generator: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(D)
    critic: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(D).requires_grad_(False)
    plugin = hpnb.HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp64")
    booster = hpnb.Booster(plugin=plugin)
    generator, optimizer, *_ = booster.boost(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    if boosted:
        critic, *_ = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64")).boost(critic)
    x = torch.randn(8, 4, dtype=D, generator=torch.Generator().manual_seed(5))
    loss = booster.execute_pipeline(
        iter([(x,)]), generator, lambda outputs, _: -critic(outputs).mean(), optimizer
    )["loss"]
    return None if loss is None else loss.item()


def test_a_criterion_of_stages_refuses_to_call_another_boosted_model(pools: RankPools) -> None:
    with pytest.raises(hpnb.RankError, match="a pipeline of 2 stages calls its criterion") as e:
        pools[2].run(criterion_with_another, True)
    assert "as it was before boost" in str(e.value)
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(D)
    critic = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(D)
    x = torch.randn(8, 4, dtype=D, generator=torch.Generator().manual_seed(5))
    expected = -critic(generator(x)).mean().item()
    assert pools[2].run(criterion_with_another, False) == [None, pytest.approx(expected, abs=1e-12)]
