"""Do all layouts train as one GPU does? The losses of 50 steps, each with a batch of its own.

    distance of two runs     ||a - b|| / ||a||, over the losses of all steps
    what is allowed          3 x that of one GPU's from itself with sums in another order:
                             samples reversed; and with tp, heads and units of MLPs reversed

In 16 bits no two orders of summation give the same losses, so a layout may be as far off as an order is.
Where two orders happen to agree, the last digit of a float32 stands in for their distance.

Tensor parallelism changes the order of sums over heads and units, which reversed samples do not. The same
model with heads and units reversed does, and computes the same function:

    y = [y_1 | ... | y_n],  z = y B    ->    y' = [y_n | ... | y_1],  z = y' B',  B' with its rows reversed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpnb.bench.results import distance_over_noise
from hpnb.bench.tasks import TrainingTask

ALLOWED = 3.0


def loss_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """||a - b|| / ||a||.

    Raises:
        ValueError: they have different numbers of steps.
    """
    if len(a) != len(b):
        raise ValueError(f"losses of {len(a)} and of {len(b)} steps cannot be compared")
    return math.dist(a, b) / math.hypot(*a)


def describe(layout: str, name: str, distance: float, noise: float, units: float = 0.0) -> str:
    """The line for a layout, from its distance and that of reversed samples.

    Args:
        units: with tp, the distance with reversed heads and units. The larger of the two counts.
    """
    agrees = distance_over_noise(distance, max(noise, units)) <= ALLOWED * (1 + 1e-9)
    verdict = "coincide" if agrees else "TOO FAR APART"
    beside = f", {distance_over_noise(distance, units):.2f} x that of units" if units else ""
    times = distance_over_noise(distance, noise)
    return f"{layout:10} {name:34} {distance:.2e}   {times:6.2f} x the order's{beside}: {verdict}"


# --- the same function with another order of sums -----------------------------------------------------------


@dataclass(frozen=True)
class ReversedUnitsTask(TrainingTask):
    """A task whose model has heads and units in the opposite order."""

    @classmethod
    def of(cls, task: TrainingTask) -> ReversedUnitsTask:
        return cls(**vars(task))

    def build(self) -> nn.Module:
        return reverse_units(super().build())


@torch.no_grad()
def reverse_units(model: nn.Module) -> nn.Module:
    """Reverse heads and units of a GPT2LMHeadModel or a ViTForImageClassification, in place; returns it."""
    transformer: Any = model
    heads = transformer.config.num_attention_heads
    if transformer.config.model_type == "gpt2":  # weights are (in, out)
        for block in transformer.transformer.h:
            _reverse(block.attn.c_attn, 1, heads, fused=3)
            _reverse(block.attn.c_proj, 0, heads)
            _reverse(block.mlp.c_fc, 1, block.mlp.c_fc.weight.size(1))
            _reverse(block.mlp.c_proj, 0, block.mlp.c_proj.weight.size(0))
    else:  # (out, in)
        for block in transformer.vit.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                _reverse(getattr(block.attention, name), 0, heads, outputs=0)
            _reverse(block.attention.o_proj, 1, heads, outputs=0)
            _reverse(block.mlp.fc1, 0, block.mlp.fc1.weight.size(0), outputs=0)
            _reverse(block.mlp.fc2, 1, block.mlp.fc2.weight.size(1), outputs=0)
    return model


def _reverse(layer: Any, dim: int, units: int, fused: int = 1, outputs: int = 1) -> None:
    """Reverse `units` along a dim of the weight, in each of `fused` matrices, and of the bias with its
    outputs."""
    for tensor, at in ((layer.weight, dim), (layer.bias, 0))[: 2 if dim == outputs else 1]:
        parts = tensor.unflatten(at, (fused, units, -1))
        tensor.copy_(parts.flip(at + 1).flatten(at, at + 2))
