"""The plain model on one GPU, which adds its products up as t ranks of tensor parallelism must.

    row layer       z = round(y_1 B_1) + ... + round(y_t B_t) + b         y = [y_1 | ... | y_t], B in rows
    column layer    [x A_1 | ... | x A_t]                                 A in columns
        backward    dx = round(dy_1 A_1') + ... + round(dy_t A_t')

It is the same function, and in float64 the same numbers. In 16 bits every part is rounded before it is added,
whoever adds: a run of it shows how far that alone leads from a plain one. Heads and units of an MLP are dealt
out as hpnb's ranks have them, 25 heads over 4 as 7, 6, 6 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2LMHeadModel

from hpnb.bench.whole.task import Task
from hpnb.comm import shares


@dataclass(frozen=True)
class InParts(Task):
    """A task whose model adds its products up in `sums` parts.

    Raises:
        ValueError: more parts than heads.
    """

    sums: int = 2

    @classmethod
    def of(cls, task: Task, sums: int) -> InParts:
        """With half as many rows of a forward, where they divide: what is not compiled keeps more."""
        rows = task.rows // 2 if task.rows % 2 == 0 else task.rows
        return cls(**{**vars(task), "rows": rows}, sums=sums)

    def build(self) -> nn.Module:
        return in_parts(super().build(), self.sums)


def in_parts(model: nn.Module, parts: int) -> nn.Module:
    """Change a GPT2LMHeadModel or a ViTForImageClassification, in place, and return it.

    Raises:
        ValueError: more parts than heads.
    """
    made: Any = model
    heads, gpt2 = made.config.num_attention_heads, isinstance(model, GPT2LMHeadModel)
    if not 1 <= parts <= heads:
        raise ValueError(f"{heads} heads cannot be summed in {parts} parts; use 1 to {heads}")
    for block in made.transformer.h if gpt2 else made.vit.layers:
        attention, mlp = (block.attn, block.mlp) if gpt2 else (block.attention, block.mlp)
        each = made.config.hidden_size // heads
        hidden = [share * each for share in shares(heads, parts)]
        if gpt2:
            attention.c_attn = _Column(attention.c_attn, hidden, fused=3)
            attention.c_proj = _Row(attention.c_proj, hidden)
            units = shares(mlp.c_fc.weight.size(1), parts)
            mlp.c_fc, mlp.c_proj = _Column(mlp.c_fc, units), _Row(mlp.c_proj, units)
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, name, _Column(getattr(attention, name), hidden))
            attention.o_proj = _Row(attention.o_proj, hidden)
            units = shares(mlp.fc1.weight.size(0), parts)
            mlp.fc1, mlp.fc2 = _Column(mlp.fc1, units), _Row(mlp.fc2, units)
    return model


class _InParts(nn.Module):
    """A linear layer, or a Conv1D, whose weight is (in, out), with parts of these sizes."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, old: Any, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias, self.sizes = old.weight, old.bias, list(sizes)
        self.transposed = not isinstance(old, nn.Linear)

    def matrix(self) -> torch.Tensor:
        """(in, out)."""
        return self.weight if self.transposed else self.weight.t()


class _Row(_InParts):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        pairs = zip(y.split(self.sizes, -1), self.matrix().split(self.sizes, 0), strict=True)
        return torch.stack([part @ rows for part, rows in pairs]).sum(0) + self.bias


class _Column(_InParts):
    """With `fused` outputs side by side, as q, k and v, each is cut."""

    def __init__(self, old: Any, sizes: Sequence[int], fused: int = 1) -> None:
        super().__init__(old, sizes)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix().unflatten(1, (self.fused, -1)).split(self.sizes, 2)  # (in, fused, part)
        bias = self.bias.unflatten(0, (self.fused, -1)).split(self.sizes, 1)
        made = [
            (x @ columns.flatten(1) + b.flatten()).unflatten(-1, (self.fused, -1))
            for columns, b in zip(matrix, bias, strict=True)
        ]
        return torch.cat(made, -1).flatten(-2)
