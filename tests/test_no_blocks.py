"""A model that is registered as an embedding and a head, with no block between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part, Role
from hpnb.models.role import linear

D = torch.float64


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(z)))  # type: ignore[no-any-return]


class GeneratorParts(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return torch.tanh(self.embedding[0].module(inputs["z"]))

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        raise AssertionError("there is no block")

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.head[0].module(hidden)  # type: ignore[no-any-return]


def parts(net: Generator) -> GeneratorParts:
    return GeneratorParts((Part("first", net.first),), (), (Part("last", net.last),))


def roles(net: Generator) -> dict[str, Role]:
    return dict([*linear("first", "embedding"), *linear("last", "head")])


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def make() -> Generator:
    torch.manual_seed(0)
    return Generator().to(D)


def batch(step: int) -> dict[str, torch.Tensor]:
    """7 samples, and one in the second step, so that a rank of two has none."""
    generator, samples = torch.Generator().manual_seed(step), 1 if step == 1 else 7
    return {"z": torch.randn(samples, 4, dtype=D, generator=generator), "labels": torch.arange(samples) % 3}


def criterion(outputs: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    return F.cross_entropy(outputs, inputs["labels"])


def train(options: dict[str, Any], executes: bool = True) -> Any:
    hpnb.models.register(Generator, parts, roles)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
    model: Any = make()
    try:
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    except ValueError as error:
        return str(error)
    dp = booster.plugin.mesh.dp
    for step in range(3):
        rows = {name: t.tensor_split(dp.size)[dp.rank] for name, t in batch(step).items()}
        if executes:
            booster.execute_pipeline(iter([rows]), model, criterion, optimizer)
        else:
            outputs = model(rows["z"])
            loss = F.cross_entropy(outputs, rows["labels"], reduction="sum")
            booster.backward(loss / max(len(outputs), 1), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if options.get("pp_size", 1) > 1:
        axes = [booster.plugin.mesh.dp]
        return hpnb.pipeline_parallel.full_state_dict(model.unwrap(), booster.plugin.mesh.pp, axes)
    return hpnb.placement.full_state_dict(model.unwrap(), model.axes)


def one_process() -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        criterion(model(batch(step)["z"]), batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("executes", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *({"zero_stage": stage} for stage in range(4)),
        *({"zero_stage": stage, "pp_size": 2} for stage in range(4)),
        {"tp_size": 2},
        {"activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_it_trains_as_on_one_process(pools: RankPools, options: dict[str, Any], executes: bool) -> None:
    if "pp_size" in options and not executes:
        pytest.skip("a pipeline is run by execute_pipeline")
    ranks = 4 if "pp_size" in options or "tp_size" in options else 2
    for state in pools[ranks].run(train, options, executes):
        for name, value in one_process().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_check_and_boost_say_the_same(pools: RankPools) -> None:
    hpnb.models.register(Generator, parts, roles)
    report = hpnb.models.check(make(), batch(0))
    assert "pipeline on 2 ranks" in report
    assert "tensor parallelism on 2 ranks" in report
    sentence = "a Generator is registered without blocks, and sequence parallelism"
    assert f"It cannot use sequence parallelism: {sentence}" in report
    with pytest.raises(ValueError, match=r"4 stages need 4 layers or more, and there are 2: at most 2"):
        hpnb.models.check(make(), batch(0), ranks=4)
    for options in ({"tp_size": 2, "enable_sequence_parallelism": True}, {"tp_size": 4, "tp_mode": "2d"}):
        for message in pools[4].run(train, options):
            assert message.startswith(sentence)
            assert message.endswith("embedding and head as blocks")
    for message in pools[4].run(train, {"pp_size": 4}):
        assert message == "4 stages need 4 layers or more, and there are 2: at most 2 stages"
