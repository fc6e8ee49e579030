"""An MLP-Mixer multiplies along tokens: 1D takes it, and a grid says why it does not, without heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part
from hpnb.models.role import linear, norm
from hpnb.tensor_parallel import parallelize

TOKENS, WIDTH = 16, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(TOKENS, 32), nn.Linear(32, TOKENS)
        self.wide, self.narrow = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.down(self.up(self.norm(x).transpose(1, 2)).relu()).transpose(1, 2)
        return x + self.narrow(self.wide(x).relu())


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class MixerAnatomy(Anatomy):
    def embed(self, inputs: Any) -> Any:
        return self.embedding[0].module(inputs["x"])

    def run(self, block: Part, hidden: Any, inputs: Any) -> Any:
        return block.module(hidden)

    def finish(self, hidden: Any, inputs: Any) -> Any:
        return self.head[0].module(hidden)


def anatomy(model: Any) -> Anatomy:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(model.blocks))
    return MixerAnatomy((Part("embed", model.embed),), blocks, (Part("head", model.head),))


def roles(model: Any) -> dict[str, Any]:
    named = {**dict(linear("embed", "embedding")), **dict(linear("head", "head"))}
    for i in range(len(model.blocks)):
        block = f"blocks.{i}"
        named |= dict(norm(f"{block}.norm")) | dict(linear(f"{block}.up", "column", 32))
        named |= dict(linear(f"{block}.down", "row", 32)) | dict(linear(f"{block}.narrow", "row", 20))
        named |= dict(linear(f"{block}.wide", "column", 20))
    return named


def forward(mode: str) -> str:
    hpnb.models.register(Mixer, anatomy, roles)
    torch.manual_seed(0)
    model: Any = Mixer()
    x = torch.randn(4, TOKENS, 4)
    expected = model(x)
    axis = hpnb.Mesh(hpnb.Layout(tp=hpnb.world_size())).tp
    model = parallelize(model, axis, mode)
    try:
        torch.testing.assert_close(model(x), expected)
    except RuntimeError as error:
        return str(error)
    return "equal"


def test_a_grid_says_that_it_splits_the_width() -> None:
    messages = hpnb.launch(forward, "2d", ranks=4, device="cpu")
    assert any("use mode='1d' for such a model" in message for message in messages)
    assert not any("head" in message for message in messages)


def test_1d_takes_it() -> None:
    assert hpnb.launch(forward, "1d", ranks=2, device="cpu") == ["equal"] * 2
