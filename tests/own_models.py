"""A Llama of one's own: rotary tables on the model, grouped queries, a mask, tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpnb.models import Anatomy, Part, Role, register, root_parameters, tied
from hpnb.models.role import embedding, linear, norm


class Rotary(nn.Module):
    def __init__(self, width: int, length: int = 16) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, a, s, d)
        first, second = x.chunk(2, -1)
        turned, s = torch.cat([-second, first], -1), x.size(-2)
        return x * self.get_buffer("cos")[:s] + turned * self.get_buffer("sin")[:s]


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.width = hidden // heads
        self.norm = norm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, False), nn.Linear(hidden, hidden, False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.width, False) for _ in range(2))
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor, rotary: nn.Module, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class OwnLlama(nn.Module):
    def __init__(
        self, layers: int = 2, kv_heads: int = 2, norm: type[nn.Module] = nn.RMSNorm, hidden: int = 16
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = (heads := 4), kv_heads
        self.tokens = nn.Embedding(23, hidden)
        self.start = nn.Parameter(torch.randn(hidden))
        self.rotary = Rotary(hidden // heads)
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, norm) for _ in range(layers))
        self.norm, self.logits = norm(hidden), nn.Linear(hidden, 23, False)
        self.logits.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids) + self.start
        for block in self.blocks:
            x = block(x, self.rotary, mask)
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


class LlamaParts(Anatomy):
    rotary: nn.Module

    def embed(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        tokens, root = (part.module for part in self.embedding)
        return tokens(inputs["ids"]) + root.start  # type: ignore[no-any-return]

    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return block.module(hidden, self.rotary, inputs.get("mask"))  # type: ignore[no-any-return]

    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        norm, logits = (part.module for part in self.head)
        return logits(norm(hidden))  # type: ignore[no-any-return]


class NoNorm(LlamaParts):
    def finish(self, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return self.head[1].module(hidden)  # type: ignore[no-any-return]


class NoMask(LlamaParts):
    def run(self, block: Part, hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
        return block.module(hidden, self.rotary, None)  # type: ignore[no-any-return]


def parts(net: OwnLlama, kind: type[LlamaParts] = LlamaParts, root: bool = True) -> LlamaParts:
    first = (Part("tokens", net.tokens), root_parameters(net, "start"))
    blocks = tuple(Part(f"blocks.{i}", block) for i, block in enumerate(net.blocks))
    head = (Part("norm", net.norm), Part("logits", net.logits))
    found = kind(first[: 1 + root], blocks, head, tied(net), causal=True)
    found.rotary = net.rotary
    return found


def roles(net: OwnLlama) -> dict[str, Role]:
    table = [*embedding("tokens"), ("start", Role("embedding", 0)), *norm("norm")]
    for name in (f"blocks.{i}" for i in range(len(net.blocks))):
        table += norm(f"{name}.norm")
        table += [*linear(f"{name}.q", "column", net.heads), *linear(f"{name}.o", "row", net.heads)]
        table += [*linear(f"{name}.k", "column", net.kv_heads), *linear(f"{name}.v", "column", net.kv_heads)]
        table += [*linear(f"{name}.up", "column", 32), *linear(f"{name}.down", "row", 32)]
    return dict(table)


def register_llama(kind: type[LlamaParts] = LlamaParts, **wrong: Role) -> None:
    """`wrong`: roles by the names of their layers, such as down."""

    def table(net: OwnLlama) -> dict[str, Role]:
        layers = {name: name.split(".")[-2] if "." in name else name for name in roles(net)}
        return {name: wrong.get(layers[name], role) for name, role in roles(net).items()}

    register(OwnLlama, lambda net: parts(net, kind), table)


def batch(samples: int = 4) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    seen = torch.arange(6) < torch.randint(2, 7, (samples, 1), generator=g)
    mask = causal & (seen[:, None, None] | torch.eye(6, dtype=torch.bool))  # (B, 1, s, s)
    return {"ids": torch.randint(23, (samples, 6), generator=g), "mask": mask}
