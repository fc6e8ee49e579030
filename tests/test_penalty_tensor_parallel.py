"""A gradient penalty with tensor parallelism: exact in mode 1d, refused in a sentence where it cannot be."""

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
from hpnb.models.role import linear, norm

D = torch.float64
SAMPLES = 8


class Layer(nn.Module):
    """Attention with two heads and an MLP."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.v, self.o = (nn.Linear(h, h) for _ in range(3))
        self.k = nn.Linear(h, h, bias=False)  # whose gradient would be 0 but for rounding
        self.up, self.down = nn.Linear(h, 12), nn.Linear(12, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        x = x + self.o((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(6, 8), nn.ModuleList(Layer(8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


class CriticParts(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.embedding[0].module(inputs["x"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return block.module(hidden)  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.head[1].module(self.head[0].module(hidden).mean(1))  # type: ignore[no-any-return]


def parts(net: Critic) -> CriticParts:
    blocks = tuple(Part(f"layers.{i}", layer) for i, layer in enumerate(net.layers))
    return CriticParts((Part("embed", net.embed),), blocks, (Part("norm", net.norm), Part("head", net.head)))


def roles(net: Critic) -> dict[str, Role]:
    table = [*linear("embed", "embedding"), *norm("norm"), *linear("head", "head")]
    for i in range(len(net.layers)):
        layer = f"layers.{i}"
        table += [*norm(f"{layer}.norm"), *norm(f"{layer}.norm2")]
        for name in "qkv":
            table += linear(f"{layer}.{name}", "column", 2)  # names that a model lacks do no harm
        table += linear(f"{layer}.o", "row", 2)
        table += [*linear(f"{layer}.up", "column", 12), *linear(f"{layer}.down", "row", 12)]
    return dict(table)


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def make() -> Critic:
    torch.manual_seed(0)
    return Critic().to(D)


def batch(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 3, 6, dtype=D, generator=torch.Generator().manual_seed(step))


def loss_with_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean over samples of a critic's output and of its squared slope."""
    x = x.requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.square().mean() + 3 * slope.square().sum((1, 2)).mean()  # type: ignore[no-any-return]


def train(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    hpnb.models.register(Critic, parts, roles)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64", **options))
    model: Any = make()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    dp = booster.plugin.mesh.dp
    for step in range(3):
        booster.backward(loss_with_penalty(model, batch(step).chunk(dp.size)[dp.rank]), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return hpnb.placement.full_state_dict(model.unwrap(), model.axes)


def one_process() -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        loss_with_penalty(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.sampled(3, cover=True)
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "full"}], ids=str)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_penalty_trains_as_on_one_process(
    pools: RankPools, zero_stage: int, sequence: bool, more: dict[str, Any]
) -> None:
    options = {"tp_size": 2, "zero_stage": zero_stage, "enable_sequence_parallelism": sequence, **more}
    for state in pools[4].run(train, options):
        for name, value in one_process().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def penalty_of_weights(model: Any) -> torch.Tensor:
    """A loss of the gradients of weights that all ranks have: norms, and a row's bias."""
    names = ["layers.0.norm2.weight", "layers.0.down.bias", "layers.1.norm.bias"]
    weights = [dict(model.named_parameters())[name] for name in names]
    gradients = torch.autograd.grad(model(batch(0)).square().sum(), weights, create_graph=True)
    return torch.stack([g.square().sum() for g in gradients]).sum()


def gradients_of_penalty(sequence: bool) -> dict[str, torch.Tensor]:
    hpnb.models.register(Critic, parts, roles)
    model = make()
    hpnb.tensor_parallel.parallelize(model, hpnb.Mesh(hpnb.Layout(tp=2)).tp, sequence_parallel=sequence)
    penalty_of_weights(model).backward()
    return hpnb.tensor_parallel.full_gradients(model)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_replicated_weights_are_differentiable_too(pools: RankPools, sequence: bool) -> None:
    model = make()
    penalty_of_weights(model).backward()
    for gradients in pools[2].run(gradients_of_penalty, sequence):
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-11, atol=1e-11, msg=name)


def refused(options: dict[str, Any]) -> str:
    hpnb.models.register(Critic, parts, roles)
    model = make()
    plugin = hpnb.HybridParallelPlugin(**options)
    boosted, *_ = hpnb.Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        loss_with_penalty(boosted, batch(0).to(boosted.plugin.policy.weights))
    except RuntimeError as error:
        return str(error)
    return "trained"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "tp_size"), [("2d", 4), ("3d", 8)])
def test_a_grid_refuses_it(mode: str, tp_size: int) -> None:
    options = {"tp_size": tp_size, "tp_mode": mode, "precision": "fp64"}
    for message in hpnb.launch(refused, options, ranks=tp_size, device="cpu"):
        assert message.startswith("tp_mode 2d, 2.5d or 3d cannot compute a second derivative (create_graph")
        assert message.endswith("use tp_mode='1d'")


def test_autocast_refuses_it(pools: RankPools) -> None:
    """It would train with half of the second derivative, because copies of weights lead to no weight."""
    for message in pools[2].run(refused, {"tp_size": 2, "precision": "amp-bf16"}):
        assert message.startswith("tensor parallelism under autocast cannot compute a second derivative")
