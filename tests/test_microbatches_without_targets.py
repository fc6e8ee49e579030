"""Microbatches without targets weigh nothing, also under a mean that is 0/0 there; beside one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from replayed_graphs import with_graphs
from torch import nn

import hpnb
from hpnb import Layout, Mesh
from hpnb.pipeline_parallel import schedules

STEPS = 4  # with graphs, two that warm up
NONE, SOME = [-100] * 4, [0, 1, 2, 0]
TARGETS = {"first": NONE + SOME, "last": SOME + NONE, "all": NONE + NONE}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def masked_mean(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """0/0 without targets, and so is its gradient."""
    labels = batch["labels"]
    mask = labels != -100
    losses = -outputs.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return (losses * mask).sum() / mask.sum()


def masked_pair(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = batch["labels"] != -100
    return F.cross_entropy(outputs, batch["labels"], reduction="sum"), mask.sum()


class OwnLoss(nn.Module):
    """A model that computes its loss itself, from the labels of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"logits": logits, "loss": masked_mean(logits, {"labels": labels})}


def draw(where: str, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.tensor(TARGETS[where])}


def read_grads(module: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters()]


def expected(where: str) -> list[list[torch.Tensor]]:
    steps = []
    for step in range(STEPS):
        model, batch = make_model(), draw(where, step)
        total, count = masked_pair(model(batch["x"]), batch)
        (total / count.clamp(min=1)).backward()
        steps.append(read_grads(model))
    return steps


def train(where: str, kind: str, schedule: str, graphs: bool = False) -> list[list[torch.Tensor]]:
    mesh = Mesh(Layout(pp=hpnb.world_size()))
    made = schedules.make(schedule, mesh.pp.size, 2)
    if kind == "model":
        model: Any = hpnb.pipeline_parallel.stages.WholeModel(OwnLoss())
        loss: Callable[[Any, Any], Any] = lambda outputs, batch: outputs["loss"]  # noqa: E731
    else:
        model, loss = make_model(), masked_mean if kind == "mean" else masked_pair
    if kind == "mean, stated":
        loss = masked_mean
    stated: Any = "sum_and_count" if kind == "mean, stated" else None
    pipe = hpnb.Pipeline(model, mesh.pp, made, loss, loss_reduction=stated)
    if graphs:
        with_graphs(pipe)
    steps = []
    for step in range(STEPS):
        pipe.zero_grad()
        pipe.step(draw(where, step))
        steps.append(read_grads(pipe))
    return steps


@pytest.mark.parametrize("where", TARGETS)
@pytest.mark.parametrize(
    ("kind", "schedule", "ranks", "graphs"),
    [
        ("mean", "1f1b", 2, False),
        ("mean", "zb-h1", 2, False),
        ("mean", "1f1b", 1, True),
        ("pair", "1f1b", 2, False),
        ("mean, stated", "1f1b", 2, False),
        ("model", "1f1b", 1, False),
        ("model", "1f1b", 1, True),
    ],
)
def test_a_microbatch_without_targets_has_gradients_of_0(
    pools: RankPools, where: str, kind: str, schedule: str, ranks: int, graphs: bool
) -> None:
    by_rank = pools[ranks].run(train, where, kind, schedule, graphs)
    for step, wanted in enumerate(expected(where)):
        grads = [grad for of_rank in by_rank for grad in of_rank[step]]
        for grad, right in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, right, rtol=1e-12, atol=1e-14)


def train_replica_without_targets() -> list[list[torch.Tensor]]:
    """Two steps of two replicas, of which one has all targets; gradients accumulate over a third step."""
    mesh = Mesh(Layout(dp=2, pp=1))
    pipe = hpnb.Pipeline(make_model(), mesh.pp, schedules.make("1f1b", 1, 1), masked_mean)
    pipe.gradients = lambda module: hpnb.DataParallel(module, mesh.dp)
    rows, steps = slice(4 * mesh.dp.rank, 4 * mesh.dp.rank + 4), []
    for step in range(STEPS - 1):
        if step != 2:
            pipe.zero_grad()
        pipe.step({name: x[rows] for name, x in draw("first", step).items()}, reduce=step != 1)
        steps.append(read_grads(pipe))
    return steps


def test_a_replica_without_targets_does_no_harm(pools: RankPools) -> None:
    first, second, third = expected("first")[:3]
    for steps in pools[2].run(train_replica_without_targets):
        assert not any(grad.isnan().any() for grads in steps for grad in grads)
        for grad, right in zip(steps[0], first, strict=True):
            torch.testing.assert_close(grad, right)
        for grad, b, c in zip(steps[2], second, third, strict=True):
            torch.testing.assert_close(grad, b + c)


class Count:
    """A hook of a Trainer that adds up what losses count."""

    def __init__(self) -> None:
        self.targets = 0.0

    def on_loss(self, trainer: Any, total: torch.Tensor, n: torch.Tensor) -> None:
        assert bool(total.isfinite())
        self.targets += float(n)

    def on_outputs(self, trainer: Any, outputs: Any, inputs: Any) -> None:
        labels = inputs["labels"]
        assert int((labels != -100).sum()) in (0, 4)


def seen_by_hooks() -> list[float]:
    from hpnb.hybrid.training.accumulation import HookedCriterion

    hook, mesh = Count(), Mesh(Layout(pp=1))
    state: Any = SimpleNamespace(hooks=[hook], causal=False, model=SimpleNamespace(context=None))
    pipe = hpnb.Pipeline(
        make_model(), mesh.pp, schedules.make("1f1b", 1, 2), HookedCriterion(masked_mean, state)
    )
    counts = []
    for step in range(3):
        hook.targets = 0.0
        pipe.step(draw("last", step))
        counts.append(hook.targets)
    return counts


def test_hooks_count_the_targets_that_are_there(pools: RankPools) -> None:
    assert pools[1].run(seen_by_hooks) == [[4.0] * 3]


def count_backwards_of_another_model() -> list[int]:
    """How often gradients come to a weight that the criterion uses: other ranks may wait for each of them."""
    weight, calls = torch.ones((), dtype=torch.float64, requires_grad=True), list[int]()
    weight.register_hook(lambda grad: calls.append(1))

    def guarded_mean(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        total, count = masked_pair(outputs, batch)
        return weight * total / count.clamp(min=1)

    schedule, counts = schedules.make("1f1b", 1, 2), []
    pipe = hpnb.Pipeline(make_model(), Mesh(Layout(pp=1)).pp, schedule, guarded_mean)
    for step in range(2):
        calls.clear()
        pipe.step(draw("first", step))
        counts.append(len(calls))
    return counts


def test_a_finite_loss_without_targets_keeps_its_backward(pools: RankPools) -> None:
    assert pools[1].run(count_backwards_of_another_model) == [[2, 2]]
