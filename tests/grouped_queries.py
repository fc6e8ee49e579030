"""A model of one's own with fewer key-value heads than query heads, in units of one or the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hpnb
from hpnb.models import Anatomy, Part
from hpnb.models.role import Role, linear

HEADS, WIDTH = 16, 4


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, hidden, kv = heads, kv_heads, heads * WIDTH, kv_heads * WIDTH
        self.q, self.o = (nn.Linear(hidden, hidden, bias) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, kv, bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, kv_heads: int = 4, bias: bool = False, heads: int = HEADS) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, heads * WIDTH), nn.Linear(heads * WIDTH, 3)
        self.blocks = nn.ModuleList(Attention(heads, kv_heads, bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Parts(Anatomy):
    def embed(self, inputs: Any) -> torch.Tensor:
        return self.embedding[0].module(inputs["x"])

    def run(self, block: Part, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return block.module(hidden)

    def finish(self, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return self.head[0].module(hidden)


def parts(net: Net) -> Parts:
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    return Parts((Part("inp", net.inp),), blocks, (Part("out", net.out),))


def register(query_units: int, kv_units: int) -> None:
    def roles(net: Net) -> dict[str, Role]:
        table = [*linear("inp", "embedding"), *linear("out", "head")]
        for i in range(len(net.blocks)):
            for name, kind, units in (
                ("q", "column", query_units), ("k", "column", kv_units), ("v", "column", kv_units),
                ("o", "row", query_units),
            ):  # fmt: skip
                table += linear(f"blocks.{i}.{name}", kind, units)
        return dict(table)

    hpnb.models.register(Net, parts, roles)
