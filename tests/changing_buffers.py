"""A model whose blocks change their buffers in each forward: in place, with another tensor, and from None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpnb.models import Anatomy, Part

WIDTH = 4


class Quantizer(nn.Module):
    """The nearest of 5 codes, which are moving averages of what they were nearest to, as in VQ-VAE.

    Args:
        in_data: change the codes through `.data`, which PyTorch does not count as a change.
    """

    def __init__(self, in_data: bool) -> None:
        super().__init__()
        self.in_data = in_data
        self.codes: torch.Tensor
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, h)
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        quantized = x * self.codes[nearest]  # the gradient of x reads the codes too
        if self.training:
            codes = self.codes.data if self.in_data else self.codes
            with torch.no_grad():
                codes.index_copy_(0, nearest[:1], 0.7 * codes[nearest[:1]] + 0.3 * x.detach()[:1])
        return quantized


class Block(nn.Module):
    def __init__(self, in_data: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.quantizer = Quantizer(in_data)
        self.count: torch.Tensor
        self.largest: torch.Tensor | None
        self.register_buffer("constant", torch.arange(1.0, WIDTH + 1))
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("largest", None)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + torch.tanh(self.quantizer(self.norm(self.linear(x)))) * self.constant / self.count
        if self.training:
            self.count = self.count + 1
            if self.largest is None:
                self.largest = x.detach().amax(0)
            else:
                x = x + 0.1 * self.largest
                self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return x


class Net(nn.Module):
    def __init__(self, in_data: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(in_data) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Parts(Anatomy):
    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.embedding[0].module(inputs["x"])  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return block.module(hidden)  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.head[0].module(hidden)  # type: ignore[no-any-return]


def parts(net: Net, kind: type[Parts] = Parts) -> Parts:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    return kind((Part("first", net.first),), blocks, (Part("last", net.last),))
