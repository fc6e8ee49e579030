"""Grouped queries under tensor parallelism: whatever the roles count, heads stay with what they read.

pytest tests/test_grouped_queries.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import grouped_queries
import pytest
import torch
from grouped_queries import WIDTH, Net
from torch import nn

import hpnb
from hpnb.models import Attention, Part, Role, registry
from hpnb.models.role import linear
from hpnb.tensor_parallel.grouped_queries import keep_groups_together

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))


def test_units_of_heads_are_those_of_key_value_heads_where_heads_are_left_over() -> None:
    """16 heads and 4 key-value heads: two ranks split both alike, three do not."""
    batch = {"x": torch.randn(4, 6, 8)}
    for query_units in (16, 4):
        grouped_queries.register(query_units, kv_units=4)
        report = hpnb.models.check(Net(bias=True), batch)
        assert "tensor parallelism on 2 ranks" in report
        assert "tensor parallelism on 3 ranks" in report


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(12, 3, 2), (6, 3, 2), (16, 4, 3)])
def test_units_of_heads_train_as_one_process(heads: int, kv_heads: int, ranks: int) -> None:
    grouped_queries.register(heads, kv_heads)
    losses = hpnb.launch(train, heads, kv_heads, tp=ranks, ranks=ranks, device="cpu")[0]
    assert losses == pytest.approx(train(heads, kv_heads), rel=1e-12)


def train(heads: int, kv_heads: int, tp: int = 1) -> list[float]:
    torch.manual_seed(0)
    net = Net(kv_heads, heads=heads).double()
    if tp > 1:
        hpnb.tensor_parallel.parallelize(net, hpnb.Mesh(hpnb.Layout(tp=tp)).tp)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- attentions that count heads ---------------------------------------------------------------------------


class CountingNet(Net):
    pass


def _resize(attention: Any, heads: int) -> None:
    attention.heads, attention.kv_heads = heads, heads * attention.kv_heads // attention.heads


def test_an_attention_that_counts_heads_counts_those_of_its_groups() -> None:
    """12 heads and 3 key-value heads on 2 ranks: 8 heads that read 2, and 4 that read 1."""
    grouped_queries.register(12, 3)
    net = registry.REGISTERED[Net]
    registry.REGISTERED[CountingNet] = net._replace(attentions=attentions)
    assert hpnb.launch(counts, ranks=2, device="cpu") == [(8, 2, 8 * WIDTH), (4, 1, 4 * WIDTH)]


def attentions(net: nn.Module) -> tuple[Attention, ...]:
    blocks = enumerate(net.get_submodule("blocks").children())
    return tuple(Attention(f"blocks.{i}", 12, partial(_resize, block)) for i, block in blocks)


def counts() -> tuple[int, int, int]:
    net = CountingNet(3, heads=12)
    hpnb.tensor_parallel.parallelize(net, hpnb.Mesh(hpnb.Layout(tp=2)).tp)
    block: Any = net.blocks[0]
    return block.heads, block.kv_heads, block.q.weight.shape[0]


# --- which units become groups -----------------------------------------------------------------------------


def units(*layers: tuple[str, str, int, int], ranks: int = 2) -> dict[str, int]:
    """Of each weight of block b, after (path, kind, units, width of a unit)."""
    roles: dict[str, Role] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, kind, count, width in layers:
        roles |= dict(linear(f"b.{path}", kind, count))  # type: ignore[arg-type]
        size = (count * width, 40) if kind == "column" else (40, count * width)
        shapes |= {f"b.{path}.weight": size, f"b.{path}.bias": size[:1]}
    together = keep_groups_together([Part("b", nn.Module())], roles, shapes, ranks)
    for path, kind, _, _ in layers:
        if kind == "column":
            assert together[f"b.{path}.bias"].units == together[f"b.{path}.weight"].units
    return {path: together[f"b.{path}.weight"].units for path, *_ in layers}


Q, K, V, OUT = ("q", "column", 12, 8), ("k", "column", 3, 8), ("v", "column", 3, 8), ("o", "row", 12, 8)
UP, DOWN = ("up", "column", 96, 1), ("down", "row", 96, 1)
GROUPED = {"q": 3, "k": 3, "v": 3, "o": 3}


def test_units_of_q_and_the_projection_become_groups_and_those_of_an_mlp_stay() -> None:
    mlp = {"up": 96, "down": 96}
    assert units(Q, K, V, OUT, UP, DOWN) == units(Q, K, V, UP, DOWN, OUT) == GROUPED | mlp
    assert units(("q", "column", 3, 32), K, V, ("o", "row", 3, 32), UP, DOWN) == GROUPED | mlp


def test_the_projection_may_be_in_another_module() -> None:
    inside = [(f"att.self.{path}", *rest) for path, *rest in (Q, K, V)]
    other = [("mix.q", *Q[1:]), ("mix.k", *Q[1:]), ("mix.o", *OUT[1:])]  # an attention without groups
    after = units(*inside, ("att.output", *OUT[1:]), *other)  # type: ignore[arg-type]
    assert set(after.values()) == {3, 12}
    assert all((count == 12) == path.startswith("mix") for path, count in after.items())


def test_keys_and_values_side_by_side_have_no_width_of_a_head_and_still_a_group() -> None:
    assert units(Q, ("kv", "column", 3, 16), OUT) == {"q": 3, "kv": 3, "o": 3}


def test_what_is_not_grouped_and_what_will_be_refused_stays() -> None:
    assert units(Q, K, V, OUT, ranks=4) == {"q": 12, "k": 3, "v": 3, "o": 12}
    assert units(Q, ("k", "column", 12, 8), OUT, UP, DOWN)["q"] == 12


def test_two_mlps_side_by_side_keep_their_neurons() -> None:
    wide = ("wide", "column", 192, 1), ("narrow", "row", 192, 1)
    assert units(UP, DOWN, *wide) == {"up": 96, "down": 96, "wide": 192, "narrow": 192}
