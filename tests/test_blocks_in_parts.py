"""Blocks whose modules are called one by one, without the block: ZeRO 3 trains them, or says what to call.

pytest tests/test_blocks_in_parts.py
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
from hpnb.models import Anatomy, Part, registry
from hpnb.models.role import embedding, linear, norm

HIDDEN, TOKENS = 12, 19


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 20), nn.Linear(20, HIDDEN)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x) + other.mean(1, keepdim=True))))
        return x + y


class Pair(nn.Module):
    """Without a forward: the model calls both layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()


class PairWithForward(Pair):
    """With one that the model does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, x), x)  # type: ignore[no-any-return]


class Model(nn.Module):
    kind: type[Pair] = Pair

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, HIDDEN)
        self.blocks = nn.ModuleList(self.kind() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = start = self.tokens(ids)
        for block in self.blocks:
            x = block.second(block.first(x, start), x)  # type: ignore[operator]
            start = x
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class ModelWithForward(Model):
    kind = PairWithForward


class Parts(Anatomy):
    def embed(self, inputs: Any) -> Any:
        return self.embedding[0].module(inputs["ids"])

    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> Any:
        pair: Any = block.module
        return pair.second(pair.first(hidden, hidden), hidden)

    def finish(self, hidden: torch.Tensor, inputs: Any) -> Any:
        return self.head[1].module(self.head[0].module(hidden))


class PartsWithTokens(Parts):
    def tokens(self, inputs: Any) -> Any:
        return inputs["ids"].shape


class PartsThatSlice(PartsWithTokens):
    """One token is run apart, as an encoder-decoder does with packed hidden states."""

    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> Any:
        rest, last = hidden.split([inputs["ids"].shape[1] - 1, 1], 1)
        return torch.cat([super().run(block, rest, inputs), super().run(block, last, inputs)], 1)


class SlicingModel(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: Any = self.tokens(ids)
        for block in self.blocks:
            parts = (block.second(block.first(h, h), h) for h in hidden.split([ids.shape[1] - 1, 1], 1))  # type: ignore[operator]
            hidden = torch.cat(list(parts), 1)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def roles(net: Model) -> Any:
    found = [*embedding("tokens", vocabulary=True), *norm("norm"), *linear("head", "head", vocabulary=True)]
    for i in range(len(net.blocks)):
        for layer in (f"blocks.{i}.first", f"blocks.{i}.second"):
            found += [*norm(f"{layer}.norm"), *linear(f"{layer}.up", "column", 20)]
            found += linear(f"{layer}.down", "row", 20)
    return dict(found)


def register(kind: type[Model], parts: type[Parts] = Parts) -> None:
    def anatomy(net: Model) -> Parts:
        blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
        return parts((Part("tokens", net.tokens),), blocks, (Part("norm", net.norm), Part("head", net.head)))

    hpnb.models.register(kind, anatomy, roles)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    register(Model)
    register(ModelWithForward)
    register(SlicingModel, PartsThatSlice)


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"ids": torch.randint(TOKENS, (8, 5), generator=generator)} for _ in range(2)]


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["ids"].flatten())


def train_on_one_process(kind: type[Model]) -> tuple[list[float], float]:
    torch.manual_seed(1)
    model = kind().double()
    optimizer, losses, norm = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), [], 0.0
    for batch in batches():
        loss = loss_of(model(**batch), batch)
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        losses.append(loss.item())
    return losses, norm


def train_boosted(kind: type[Model], layout: dict[str, Any]) -> tuple[list[float], float]:
    register(kind)
    plugin = hpnb.HybridParallelPlugin(precision="fp64", max_norm=0.5, **layout)
    booster = hpnb.Booster(plugin=plugin)
    torch.manual_seed(1)
    model: Any = kind()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    local, losses = slice(plugin.mesh.dp.rank, None, plugin.mesh.dp.size), []
    for batch in batches():
        optimizer.zero_grad()
        part = {name: value[local] for name, value in batch.items()}
        loss = booster.execute_pipeline(iter([part]), model, loss_of, optimizer)["loss"]
        optimizer.step()
        losses.append(0.0 if loss is None else float(loss))
    return losses, float(optimizer.last_step.norm)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"zero_stage": 3}),
        (2, {"zero_stage": 3, "activation_checkpointing": "full"}),
        (4, {"zero_stage": 3, "tp_size": 2}),
        (4, {"zero_stage": 3, "pp_size": 2, "num_microbatches": 2}),
        (4, {"zero_stage": 3, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb-v"}),
    ],
    ids=str,
)
def test_blocks_without_a_forward_train_in_zero_3(
    pools: RankPools, ranks: int, layout: dict[str, Any]
) -> None:
    losses, norm = train_on_one_process(Model)
    ours, our_norm = next(r for r in pools[ranks].run(train_boosted, Model, layout) if r[0][0])
    assert ours == pytest.approx(losses, rel=1e-12)
    assert our_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (4, {"pp_size": 2}), (4, {"tp_size": 2})], ids=str)
def test_a_block_that_is_not_called_is_named(pools: RankPools, ranks: int, layout: dict[str, Any]) -> None:
    with pytest.raises(
        hpnb.RankError, match=r"this is in blocks\.\d, whose modules are called without it\. .*call the block"
    ):
        pools[ranks].run(train_boosted, ModelWithForward, {**layout, "zero_stage": 3, "num_microbatches": 1})


def fail_inside_a_block() -> str:
    """The error of a block that is called, and fails by itself."""
    model = ModelWithForward().double()
    vars(model)["forward"] = lambda x: model.blocks[0](x)
    hpnb.fully_shard(model, hpnb.Mesh(hpnb.Layout(dp=2)))
    with pytest.raises(RuntimeError) as error:
        model(torch.zeros(2, 3, HIDDEN + 1, dtype=torch.double))
    return str(error.value)


def test_what_fails_inside_of_a_called_block_is_not_explained(pools: RankPools) -> None:
    assert all("called without it" not in message for message in pools[2].run(fail_inside_a_block))


def test_check_runs_zero_3() -> None:
    report = hpnb.models.check(Model(), batches()[0])
    assert "; ZeRO 3 on 2 ranks; ZeRO 3 in a pipeline on 2 ranks; " in report
    report = hpnb.models.check(ModelWithForward(), batches()[0])
    assert report.count("\nIt cannot use ZeRO 3: ") == 1
    assert "whose modules are called without it" in report
    assert "; tensor parallelism on 2 ranks" in report


def test_check_reports_sequence_parallelism_apart() -> None:
    report = hpnb.models.check(SlicingModel(), batches()[0])
    assert "SlicingModel is registered well: " in report
    assert "\nIt cannot use sequence parallelism: " in report
    assert "each rank has a part of the tokens then" in report
    assert "tensor parallelism on 2 ranks" in report
