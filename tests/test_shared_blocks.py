"""A block, or a norm, that stands at several places of a model: one module, whose gradient is a sum.

pytest tests/test_shared_blocks.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import own_models
import pytest
import torch
from hybrid_cases import distance, weights
from own_models import LlamaParts, OwnLlama, batch, parts
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.models import Part, registry

Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


class SharedBlocks(OwnLlama):
    """Two blocks, each of which stands in two slots of the list."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        first, second = self.blocks
        self.blocks = nn.ModuleList([first, second, first, second])


class SharedNorm(OwnLlama):
    """All blocks have the norm of the first."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        for block in self.blocks:
            block.norm = self.blocks[0].norm


class WithTokens(LlamaParts):
    def tokens(self, inputs: Any) -> tuple[int, int]:
        return inputs["ids"].shape  # type: ignore[no-any-return]


def by_first_names(net: OwnLlama) -> LlamaParts:
    """`named_modules` gives a block under its first name alone."""
    sound, names = parts(net, WithTokens), {module: name for name, module in net.named_modules()}
    blocks = tuple(Part(names[block.module], block.module) for block in sound.blocks)
    return sound.with_parts(sound.embedding, blocks, sound.head)


def only_once(net: OwnLlama) -> LlamaParts:
    sound = parts(net, WithTokens)
    return sound.with_parts(sound.embedding, sound.blocks[:2], sound.head)


by_places = partial(parts, kind=WithTokens)


def loss(logits: torch.Tensor, rows: Any) -> torch.Tensor:
    return logits.square().mean()


def train(kind: type[OwnLlama], how: Any, layout: dict[str, Any] | None = None) -> Weights:
    """Weights after two steps of SGD; without a layout those of one process."""
    hpnb.models.register(kind, how, own_models.roles)
    torch.manual_seed(4)
    model, rows = kind().double(), batch()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    if layout is None:
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(**rows), rows).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.state_dict().items()}
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **layout))
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        booster.execute_pipeline(iter([rows]), boosted, loss, optimizer)
        optimizer.step()
    return weights(boosted)


LAYOUTS: list[dict[str, Any]] = [
    {"pp_size": 2, "num_microbatches": 2},
    {"pp_size": 2, "num_microbatches": 2, "pp_style": "zb-v", "num_model_chunks": 2},
    {"tp_size": 2},
    {"zero_stage": 2},
    {"zero_stage": 3},
]


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("how", [by_places, by_first_names], ids=["places", "first names"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_block_at_two_places_trains_as_in_one_process(
    pools: RankPools, layout: dict[str, Any], how: Any
) -> None:
    """Under first names a pipeline and tensor parallelism said that its weights lie in no Part."""
    wanted = train(SharedBlocks, how)
    for found in pools[2].run(train, SharedBlocks, how, layout):
        assert distance(found, wanted) < 1e-12


def test_a_block_at_two_places_trains_in_a_pipeline_of_tensor_parallel_ranks(pools: RankPools) -> None:
    layout = {"pp_size": 2, "tp_size": 2, "num_microbatches": 2, "max_norm": 1.0}
    unclipped = train(SharedBlocks, by_places)
    found = pools[4].run(train, SharedBlocks, by_places, layout | {"max_norm": 0.0})
    assert distance(found[0], unclipped) < 1e-12
    clipped = pools[4].run(train, SharedBlocks, by_places, layout)
    alone = hpnb.launch(train, SharedBlocks, by_places, {"max_norm": 1.0}, ranks=1, device="cpu")
    assert distance(clipped[0], alone[0]) < 1e-12
    assert distance(clipped[0], unclipped) > 1e-3


def test_a_norm_of_several_blocks_trains_under_sequence_parallelism(pools: RankPools) -> None:
    """Its hooks were installed once for each block, and left a summed gradient's weight in its place."""
    layout = {"tp_size": 2, "enable_sequence_parallelism": True}
    wanted = train(SharedNorm, by_places)
    for found in pools[2].run(train, SharedNorm, by_places, layout):
        assert distance(found, wanted) < 1e-12


def refused(kind: type[OwnLlama], how: Any, layout: dict[str, Any]) -> str:
    try:
        train(kind, how, layout)
    except ValueError as error:
        return str(error)
    return ""


def test_the_slots_of_a_block_are_named_where_it_is_refused(pools: RankPools) -> None:
    for said in pools[2].run(
        refused, SharedBlocks, by_places, {"tp_size": 2, "enable_sequence_parallelism": True}
    ):
        assert "the same block stands at blocks.0 and blocks.2" in said
        assert "use mode '1d' without sequence parallelism" in said
    for said in pools[4].run(refused, SharedBlocks, by_first_names, {"tp_size": 4, "tp_mode": "2d"}):
        assert "blocks.0 and blocks.2" in said


@pytest.mark.parametrize("layout", [{"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}], ids=str)
def test_a_place_that_no_part_lists_is_called_that(pools: RankPools, layout: dict[str, Any]) -> None:
    for said in pools[2].run(refused, SharedBlocks, only_once, layout):
        assert said.startswith("blocks.2.")
        assert "and blocks.0." in said
        assert "are one weight of this SharedBlocks" in said


def test_check_takes_a_block_at_two_places_and_names_one_that_is_not_listed() -> None:
    for how in (by_places, by_first_names):
        hpnb.models.register(SharedBlocks, how, own_models.roles)
        report = hpnb.models.check(SharedBlocks(), batch())
        assert "pipeline on 2 ranks; tensor parallelism on 2 ranks" in report
        assert "It cannot use sequence parallelism: the same block stands at blocks.0 and blocks.2" in report
    hpnb.models.register(SharedBlocks, only_once, own_models.roles)
    with pytest.raises(ValueError, match=r"blocks\.2\..* and blocks\.0\..* are one weight"):
        hpnb.models.check(SharedBlocks(), batch(), ranks=1)
