"""The loads of experts count tokens of samples and nothing else, and what no rank may do is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from test_expert_parallel import batch, build

import hpnb
from hpnb.expert_parallel import ExpertLoads, ExpertParallel
from hpnb.mesh import Axis

ALONE = Axis("ep", 1, 0, None, (0,))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def loads_of_uneven_batches(kind: str, samples: list[int], plugin: dict[str, Any]) -> Any:
    """{layer: tokens of this rank's batch at each expert}, where rank r of dp has samples[r] samples."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", ep_size=2, **plugin))
    model = build(kind, num_hidden_layers=2)
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.01))
    dp = booster.plugin.mesh.dp
    here = {name: value[: samples[dp.rank]] for name, value in batch().items()}
    booster.execute_pipeline(iter([here]), boosted, None, None, return_loss=True)
    return {name: load.tolist() for name, load in boosted.experts.clear_tokens().items()}


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
@pytest.mark.parametrize("plugin", [{}, {"pp_size": 2, "num_microbatches": 2}], ids=str)
def test_the_placeholder_of_an_empty_batch_is_no_load(
    pools: RankPools, kind: str, plugin: dict[str, Any]
) -> None:
    ranks = 2 * plugin.get("pp_size", 1)
    by_rank = pools[ranks].run(loads_of_uneven_batches, kind, [3, 0], plugin)
    tokens = sorted(sum(load) for loads in by_rank for load in loads.values())
    layers = 2 if kind == "Mixtral" else 1
    assert tokens == [0] * layers + [3 * 6 * 2] * layers


def test_a_step_without_tokens_has_no_imbalance_and_the_others_keep_theirs() -> None:
    loads = ExpertLoads(ExpertParallel(ALONE, {}), ALONE)
    loads.steps = [{"a": torch.tensor([3, 1]), "b": torch.zeros(2)}, {"a": torch.zeros(2)}, {}]
    assert loads.imbalances == [1.5]
