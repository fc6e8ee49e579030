"""A criterion of execute_pipeline with a term of weights alone: exact with ZeRO 0 to 2, refused by ZeRO 3."""

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


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).to(D)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(7, 4, dtype=D, generator=torch.Generator().manual_seed(step)), torch.arange(7) % 3


def with_norm(model: Any, counts: bool) -> Any:
    """Of the weights of the head, which the rank of the last stage has."""
    head = [p for name, p in model.named_parameters() if name.startswith("3")]

    def criterion(outputs: torch.Tensor, inputs: Any) -> Any:
        norm = 0.05 * torch.stack([p.square().sum() for p in head]).sum()
        mean = F.cross_entropy(outputs, inputs[1]) + norm if len(outputs) else outputs.sum() + norm
        return (mean * len(outputs), len(outputs)) if counts else mean

    return criterion


def train(options: dict[str, Any], counts: bool) -> Any:
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
    model: Any = make()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    criterion, dp = with_norm(model, counts), booster.plugin.mesh.dp
    for step in range(3):
        rows = tuple(t.tensor_split(dp.size)[dp.rank] for t in batch(step))
        try:
            booster.execute_pipeline(iter([rows]), model, criterion, optimizer)
        except ValueError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    if booster.plugin.pp_size > 1:
        return hpnb.pipeline_parallel.full_state_dict(model.unwrap(), booster.plugin.mesh.pp)
    return hpnb.placement.full_state_dict(model.unwrap(), model.axes)


def one_process() -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        with_norm(model, False)(model(batch(step)[0]), batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *((2, {"zero_stage": stage}) for stage in range(3)),
        (4, {"zero_stage": 1, "pp_size": 2}),
        (1, {"zero_stage": 3}),
    ],
    ids=str,
)
def test_a_term_of_weights_counts_once(
    pools: RankPools, ranks: int, options: dict[str, Any], counts: bool
) -> None:
    for state in pools[ranks].run(train, options, counts):
        for name, value in one_process().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_zero_3_with_replicas_refuses_it(pools: RankPools) -> None:
    for message in pools[4].run(train, {"zero_stage": 3, "zero_replicas": 2}, False):
        assert message.startswith("the criterion uses 3.bias and 3.weight")


@pytest.mark.parametrize("counts", [False, True])
def test_zero_3_refuses_it(pools: RankPools, counts: bool) -> None:
    """It trained with weights that were wrong in the third digit, and said nothing."""
    for message in pools[2].run(train, {"zero_stage": 3}, counts):
        assert message.startswith(
            "the criterion uses 3.bias and 3.weight, of which ZeRO 3 leaves a rank a shard"
        )


def test_zero_3_refuses_it_in_a_pipeline() -> None:
    words = r"ValueError: the criterion uses 3\.bias and 3\.weight, of which ZeRO 3 leaves a rank a shard"
    with pytest.raises(hpnb.RankError, match=words):
        hpnb.launch(lambda: raises(train({"zero_stage": 3, "pp_size": 2}, False)), ranks=4, device="cpu")


def raises(result: Any) -> None:
    if isinstance(result, str):
        raise ValueError(result)
