"""nn.Embedding(sparse=True): pipelines train it as one process does; what needs dense gradients refuses it.

pytest tests/test_sparse_gradients.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_cases import distance, weights
from rank_pools import RankPools
from torch import nn

import hpnb

D = torch.float64
SAMPLES = torch.randint(7, (8, 3), generator=torch.Generator().manual_seed(5))
BATCH = {"x": SAMPLES, "labels": SAMPLES.sum(1) % 3}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def make(sparse: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    embedding = nn.Embedding(7, 4, sparse=sparse)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)).to(D)


def criterion(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, inputs["labels"])


def boosted(options: dict[str, Any], change: Any = None) -> Any:
    """The weights after two steps, or why the model was refused."""
    net = make()
    if change is not None:
        change(net)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(**{"precision": "fp64", **options}))
    try:
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5), criterion)
    except ValueError as error:
        return str(error)
    for _ in range(2):
        booster.execute_pipeline(iter([BATCH]), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("style", [{}, {"pp_style": "zb-h1"}], ids=str)
def test_a_pipeline_trains_it_as_one_process(pools: RankPools, style: dict[str, Any]) -> None:
    net = make(sparse=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        criterion(net(BATCH["x"]), BATCH).backward()
        optimizer.step()
    for state in pools[2].run(boosted, {"pp_size": 2, "num_microbatches": 2, **style}):
        assert distance(state, net.state_dict()) < 1e-12


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "2 ranks sum gradients"),
        ({"zero_stage": 1}, "zero_stage=1 shards gradients"),
        ({"zero_stage": 3}, "zero_stage=3 shards gradients"),
        ({"pp_size": 2, "max_norm": 1.0}, "max_norm=1.0 takes their norm"),
        ({"pp_size": 2, "precision": "bf16"}, "precision='bf16' copies them to float32"),
    ],
    ids=str,
)
def test_a_boost_that_needs_dense_gradients_names_the_module(
    pools: RankPools, options: dict[str, Any], words: str
) -> None:
    for refused in pools[2].run(boosted, options):
        assert refused == (
            f"0 is an Embedding with sparse=True, and {words}, which must be dense: use sparse=False"
        )


def tie(net: nn.Sequential) -> None:
    net[2], net[4] = nn.Linear(12, 4).to(D), nn.Linear(4, 7, bias=False).to(D)
    net[4].weight = net[0].weight


def freeze(net: nn.Sequential) -> None:
    net[0].weight.requires_grad_(False)


def test_a_tied_one_in_stages_is_refused_and_a_frozen_one_is_not(pools: RankPools) -> None:
    options = {"pp_size": 2, "num_microbatches": 2}
    for refused in pools[2].run(boosted, options, tie):
        assert "stages sum the gradients of a tied weight" in refused
    for state in pools[2].run(boosted, {"zero_stage": 1}, freeze):
        assert torch.equal(state["0.weight"], make()[0].weight)


def test_a_zero_optimizer_names_the_parameter(pools: RankPools) -> None:
    """A forward may ask for a sparse gradient without a module that says so."""

    def backward() -> str:
        table = nn.Embedding(4, 4)
        axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
        hpnb.ZeroOptimizer(table.named_parameters(), torch.optim.SGD, axis, lr=0.1)
        try:
            F.embedding(torch.tensor([1]), table.weight, sparse=True).sum().backward()
        except ValueError as error:
            return str(error)
        return ""

    for refused in pools[2].run(backward):
        assert refused.startswith("weight has a sparse gradient")
