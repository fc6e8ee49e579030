"""Parameters of the model itself, which `embed` and `finish` read from the parts of `root_parameters`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part, Role, register, root_parameters
from hpnb.models.role import linear
from hpnb.pipeline_parallel import full_state_dict

CLASSES, HIDDEN, STEPS = 3, 8, 3


class Net(nn.Module):
    """Its root has a table that is indexed, one that is summed, where empty would be silent, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, HIDDEN)
        self.table = nn.Parameter(torch.randn(2, HIDDEN))
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.last = nn.Linear(HIDDEN, CLASSES)
        self.shifts = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.scale + self.table[0] - self.table[1]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden.mean(1)) * self.shifts.square().sum()  # type: ignore[no-any-return]


class NetParts(Anatomy):
    def embed(self, inputs: Any) -> torch.Tensor:
        first, root = (part.module for part in self.embedding)
        return first(inputs["x"]) * root.scale + root.table[0] - root.table[1]  # type: ignore[no-any-return, index]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return hidden + torch.tanh(block.module(hidden))

    def finish(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        last, root = (part.module for part in self.head)
        return last(hidden.mean(1)) * root.shifts.square().sum()  # type: ignore[no-any-return, operator]


def parts(net: Net) -> NetParts:
    blocks = tuple(Part(f"layers.{i}", layer) for i, layer in enumerate(net.layers))
    first = (Part("first", net.first), root_parameters(net, "table", "scale"))
    return NetParts(first, blocks, (Part("last", net.last), root_parameters(net, "shifts")))


def roles(net: Net) -> dict[str, Role]:
    table = [("table", Role("embedding", 1)), ("scale", Role("embedding", 0)), ("shifts", Role("head", 0))]
    for name in (f"layers.{i}" for i in range(len(net.layers))):
        table += linear(name, "head")
    return dict([*table, *linear("first", "embedding"), *linear("last", "head")])


def build() -> Net:
    register(Net, parts, roles)
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(8, 5, 6, generator=g, dtype=torch.float64),
            "labels": torch.randint(CLASSES, (8,), generator=g),
        }
        for _ in range(STEPS)
    ]


def cross_entropy(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs, inputs["labels"])


def optimize(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train(**layout: Any) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **layout)
    model: Any = build()
    model, optimizer, *_ = (booster := hpnb.Booster(plugin=plugin)).boost(model, optimize(model))
    losses: list[float | None] = []
    dp = plugin.mesh.dp
    for batch in batches():
        local = {name: value.chunk(dp.size)[dp.rank] for name, value in batch.items()}
        optimizer.zero_grad()
        loss = booster.execute_pipeline(iter([local]), model, cross_entropy, optimizer)["loss"]
        losses.append(None if loss is None else loss.item())
        optimizer.step()
    _, pp, *_ = model.axes
    return losses, full_state_dict(model.module, pp, [axis for axis in model.axes if axis.name != "pp"])


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    made = RankPools()
    yield made
    made.close()


LAYOUTS: list[dict[str, Any]] = [
    {"pp_size": 2, "zero_stage": 3},
    {"pp_size": 2, "zero_stage": 3, "pp_style": "zb-v"},
    {"pp_size": 2, "zero_stage": 3, "activation_checkpointing": "full", "cpu_offload": True},
    {"pp_size": 2, "zero_stage": 1},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pipeline_with_zero_trains_as_one_process(pools: RankPools, layout: dict[str, Any]) -> None:
    alone = build()
    optimizer, losses = optimize(alone), []
    for batch in batches():
        optimizer.zero_grad()
        loss = cross_entropy(alone(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, weights in pools[4].run(train, **layout):
        for local_loss, wanted in zip(found, losses, strict=True):
            assert local_loss is None or local_loss == pytest.approx(wanted, rel=1e-12)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-13)


def shard_by_grid() -> None:
    hpnb.tensor_parallel.parallelize(build(), hpnb.Mesh(hpnb.Layout(tp=4)).tp, "2d")


def test_a_grid_refuses_a_scalar_in_a_sentence(pools: RankPools) -> None:
    with pytest.raises(hpnb.RankError, match=r"scale is a scalar.*mode='1d'"):
        pools[4].run(shard_by_grid)
