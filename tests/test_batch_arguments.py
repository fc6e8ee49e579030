"""Masks on 2D, 2.5D and 3D grids: what has an entry per sample is split with the samples, or refused.

pytest tests/test_batch_arguments.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part, Role
from hpnb.models.model_anatomy import Attention
from hpnb.models.role import embedding, linear, norm
from hpnb.tensor_parallel.activation_layout import ActivationLayout
from hpnb.tensor_parallel.batch_arguments import BatchArguments

D = torch.float64
TOKENS = 6


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, dtype=D) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:  # (B, s)
        mask = mask[0] if isinstance(mask, tuple) else mask
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) + torch.where(mask, 0.0, -1e9)[:, None, None]
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm, self.attention = how, nn.LayerNorm(16, dtype=D), SelfAttention()
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.how == "attribute":
            assert self.mask is not None
            return x * self.mask[..., None] + self.attention(self.norm(x), mask)  # type: ignore[no-any-return]
        if self.how == "keyword":
            return x + self.attention(self.norm(x), mask=mask)  # type: ignore[no-any-return]
        given = (mask,) if self.how == "tuple" else mask
        x = x + self.attention(self.norm(x), given)
        return x * mask[..., None] if self.how == "in the block" else x


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 16, dtype=D)
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(16, dtype=D), nn.Linear(16, 16, False, dtype=D)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            block.mask = mask
            x = block(x, mask)
        return self.out(self.norm(x))  # type: ignore[no-any-return]


class Parts(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.embedding[0].module(inputs["ids"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        block.module.mask = inputs["mask"]
        return block.module(hidden, inputs["mask"])  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.head[1].module(self.head[0].module(hidden))  # type: ignore[no-any-return]


def parts(net: Net) -> Parts:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    return Parts((Part("tokens", net.tokens),), blocks, (Part("norm", net.norm), Part("out", net.out)))


def roles(net: Net) -> dict[str, Role]:
    table = [*embedding("tokens"), *norm("norm"), *linear("out", "head", vocabulary=True)]
    for i in range(2):
        table += [*norm(f"blocks.{i}.norm"), *linear(f"blocks.{i}.attention.o", "row", 2)]
        for name in "qkv":
            table += linear(f"blocks.{i}.attention.{name}", "column", 2)
    return dict(table)


def attentions(net: Net) -> tuple[Attention, ...]:
    return tuple(Attention(f"blocks.{i}.attention", 2, lambda n: None) for i in range(2))


def build(how: str, named: bool = True) -> Net:
    hpnb.models.register(Net, parts, roles, attentions if named else None)
    torch.manual_seed(1)
    return Net(how)


def batch(samples: int, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, tokens, (samples, 1), generator=g)
    ids = torch.randint(16, (samples, tokens), generator=g)
    return {"ids": ids, "mask": torch.arange(tokens) < lengths}


def loss_and_gradients(model: Net, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**tokens).square().mean()  # of any shape, so that a wrong one does not raise
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def on_grid(
    how: str, mode: str, depth: int, named: bool, tokens: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(how, named)
    axis = hpnb.Mesh(hpnb.Layout(tp=hpnb.world_size())).tp
    hpnb.tensor_parallel.parallelize(model, axis, mode=mode, depth=depth)
    return loss_and_gradients(model, tokens), hpnb.tensor_parallel.full_gradients(model)


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.mark.sampled(6, cover=True)
@pytest.mark.parametrize("samples", [4, 8])  # of 4, a rank of depth 4 has one
@pytest.mark.parametrize(
    ("how", "mode", "depth", "named"),
    [
        ("positional", "2d", 1, True),
        ("positional", "2.5d", 4, True),
        ("keyword", "2.5d", 4, True),
        ("tuple", "2d", 1, True),
        ("in the block", "2.5d", 4, False),
        ("positional", "3d", 1, True),
        ("tuple", "3d", 1, True),
    ],
)
def test_a_mask_of_samples_computes_what_one_process_does(
    pools: RankPools, how: str, mode: str, depth: int, named: bool, samples: int
) -> None:
    tokens, alone = batch(samples), build(how, named)
    loss = loss_and_gradients(alone, tokens)
    for found, gradients in pools[8 if mode == "3d" else 4].run(on_grid, how, mode, depth, named, tokens):
        assert abs(found - loss) < 1e-12
        for name, p in alone.named_parameters():
            assert p.grad is not None
            assert float((gradients[name] - p.grad).norm()) < 1e-12 * max(1, float(p.grad.norm())), name


REFUSED = [
    ("positional", "2d", 1, True, batch(6), r"attention gets .* \(6, 6\).*6 tokens too.*\(6, 1, 1, 6\)"),
    ("positional", "3d", 1, False, batch(4), r"blocks\.0 gets .*attentions=.*2\.5d"),
    ("attribute", "2.5d", 4, True, batch(4), r"blocks\.0 makes \(4, 6, 16\) of hidden states \(1, 6, 16\)"),
    ("in the block", "3d", 1, True, batch(4), r"blocks\.0 makes \(4, 6, 8\) of hidden states \(1, 6, 8\)"),
    ("in the block", "3d", 1, True, batch(8), r"must match.*entry per sample still has all of them"),
]


@pytest.mark.parametrize(("how", "mode", "depth", "named", "tokens", "sentence"), REFUSED)
def test_what_a_grid_cannot_split_is_refused(
    pools: RankPools, how: str, mode: str, depth: int, named: bool, tokens: Any, sentence: str
) -> None:
    with pytest.raises(hpnb.RankError, match=sentence):
        pools[8 if mode == "3d" else 4].run(on_grid, how, mode, depth, named, tokens)


def test_arguments_with_an_entry_per_sample_are_split_and_no_others() -> None:
    axis: Any = SimpleNamespace(size=2, rank=1)
    arguments = BatchArguments("attention", ActivationLayout((axis,), axis), "2d grid")
    hidden = torch.zeros(2, 6, 4)  # of 4 samples

    def shapes(*values: Any, **named: Any) -> list[tuple[int, ...]]:
        args, by_name = arguments.split(nn.Identity(), (hidden, *values), named)
        return [tuple(value.shape) for value in (*args[1:], *by_name.values())]

    def zeros(*shape: int) -> torch.Tensor:
        return torch.arange(float(shape[0])).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)

    assert shapes(zeros(4, 1, 6, 6), zeros(4, 6), zeros(4, 6, 6), zeros(4)) == [
        (2, 1, 6, 6), (2, 6), (2, 6, 6), (2,)
    ]  # fmt: skip
    assert shapes(zeros(1, 1, 6, 6), zeros(6, 6), zeros(6), torch.tensor(1.0)) == [
        (1, 1, 6, 6), (6, 6), (6,), ()
    ]  # fmt: skip
    assert shapes(attention_mask=zeros(4, 6), any_name=zeros(4, 6)) == [(2, 6), (2, 6)]
    assert shapes(position_ids=zeros(4)) == [(4,)]
    (_, (of_rank, table)), _ = arguments.split(nn.Identity(), (hidden, (zeros(4, 6), zeros(6, 2))), {})
    assert of_rank[:, 0].tolist() == [2, 3]
    assert table.shape == (6, 2)
    _, by_name = arguments.split(nn.Identity(), (), {"x": hidden, "masks": {"a": [zeros(4, 6)]}})
    assert by_name["masks"]["a"][0].shape == (2, 6)


def test_where_samples_are_as_many_as_tokens_four_dimensions_tell() -> None:
    axis: Any = SimpleNamespace(size=2, rank=1)
    layout = ActivationLayout((axis,), axis)
    arguments, hidden = BatchArguments("attention", layout, "2d grid"), torch.zeros(2, 4, 4)

    def split(*values: Any, **named: Any) -> Any:
        return arguments.split(nn.Identity(), (hidden, *values), named)

    assert split(torch.zeros(4, 1, 4, 4))[0][1].shape == (2, 1, 4, 4)
    assert split(attention_mask=torch.zeros(4, 4))[1]["attention_mask"].shape == (2, 4)
    for unclear in (torch.zeros(4), torch.zeros(4, 4), torch.zeros(4, 1, 4)):
        with pytest.raises(ValueError, match="may count either"):
            split(unclear)
    block = BatchArguments("block", layout, "2d grid", refuses_unclear=False)
    assert block.split(nn.Identity(), (hidden, torch.zeros(4, 4)), {})[0][1].shape == (4, 4)
    with pytest.raises(ValueError, match="needs a gradient"):
        split(torch.zeros(4, 1, 1, 4, requires_grad=True))
