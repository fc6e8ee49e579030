"""The same function with its products added up in another order: heads and units of MLPs stand the other way.

    y = [y_1 | ... | y_n],  z = y B        ->        [y_n | ... | y_1],  z = y' B'        rows of B with them

Nothing but the order of sums over heads and units changes, in the forward and in the backward. That is what
ranks of tensor parallelism change too, and rows in another order do not: each row's own numbers stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2LMHeadModel

from hpnb.bench.tasks import Task


@dataclass(frozen=True)
class OtherOrder(Task):
    """A task whose model has heads and units in the opposite order."""

    @classmethod
    def of(cls, task: Task) -> OtherOrder:
        return cls(**vars(task))

    def build(self) -> nn.Module:
        return turned(super().build())


@torch.no_grad()
def turned(model: nn.Module) -> nn.Module:
    """Turn a GPT2LMHeadModel or a ViTForImageClassification, in place, and return it."""
    made: Any = model
    heads = made.config.num_attention_heads
    if isinstance(model, GPT2LMHeadModel):  # weights are (in, out)
        for block in made.transformer.h:
            _turn(block.attn.c_attn, 1, heads, fused=3)
            _turn(block.attn.c_proj, 0, heads)
            _turn(block.mlp.c_fc, 1, block.mlp.c_fc.weight.size(1))
            _turn(block.mlp.c_proj, 0, block.mlp.c_proj.weight.size(0))
    else:  # (out, in)
        for block in made.vit.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                _turn(getattr(block.attention, name), 0, heads, outputs=0)
            _turn(block.attention.o_proj, 1, heads, outputs=0)
            _turn(block.mlp.fc1, 0, block.mlp.fc1.weight.size(0), outputs=0)
            _turn(block.mlp.fc2, 1, block.mlp.fc2.weight.size(1), outputs=0)
    return model


def _turn(layer: Any, dim: int, units: int, fused: int = 1, outputs: int = 1) -> None:
    """Of a dim of the weight, and of the bias with its outputs: `units` the other way, in each of `fused`."""
    for tensor, where in ((layer.weight, dim), (layer.bias, 0))[: 2 if dim == outputs else 1]:
        parts = tensor.unflatten(where, (fused, units, -1))
        tensor.copy_(parts.flip(where + 1).flatten(where, where + 2))
