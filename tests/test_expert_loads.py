"""The loads of experts count tokens of samples and nothing else, and what no rank may do is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from test_expert_parallel import batch, build

import hpnb
from hpnb import Layout, Mesh, comm, expert_parallel
from hpnb.expert_parallel import ExpertLoads, ExpertParallel, SelectionBias
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


def refused_expert() -> str:
    axis = Mesh(Layout(dp=2, ep=2)).ep
    try:
        expert_parallel.plan_dispatch(torch.tensor([[0], [9 if axis.rank == 0 else 1]]), 4, axis)
    except ValueError as error:
        return str(error)
    return ""


def test_all_ranks_refuse_an_expert_that_does_not_exist(pools: RankPools) -> None:
    here, there = pools[2].run(refused_expert)
    assert here == "a router chose expert 9 of 4; use numbers from 0 to 3"
    assert there == "a router on rank 0 of axis ep chose an expert that is none of 4; use numbers from 0 to 3"


def test_a_selection_bias_is_widened_as_often_as_it_is_cast() -> None:
    model, exact = build("DeepseekV3"), torch.full((4,), 0.001)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.fill_(0.001)
    selection = SelectionBias(model, expert_parallel.parallelize(model, ALONE), ALONE)
    for wanted in (exact, exact.bfloat16().float()):  # at first as it was, later what the cast has left
        model.to(torch.bfloat16)
        selection.widen()
        for bias in selection.biases.values():
            assert bias.dtype == torch.float32
            assert torch.equal(bias, wanted)


def exchanged_bytes() -> tuple[float, float]:
    """(of the timeline, of the traffic) that leave this rank in an uneven all-to-all and its backward."""
    axis = Mesh(Layout(dp=2, ep=2)).ep
    counts = [[1, 5], [0, 2]]  # rank r sends counts[r][to] rows
    rows = torch.ones(sum(counts[axis.rank]), 3, requires_grad=True)
    with hpnb.record.timeline() as recorder, hpnb.record.traffic() as traffic:
        comm.exchange_rows(rows, axis, counts[axis.rank], [c[axis.rank] for c in counts]).sum().backward()
    return sum(event.bytes for event in recorder.events()), traffic.bytes["ep"]


def test_a_timeline_has_the_bytes_of_an_uneven_exchange(pools: RankPools) -> None:
    assert pools[2].run(exchanged_bytes) == [(5 * 12.0, 5 * 12.0)] * 2  # rank 1 sends 5 gradients back
