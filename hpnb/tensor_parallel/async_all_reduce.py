"""A region of a tensor-parallel model: from where its input is sent around to where its output is summed.

    x, A, B --begin--> x, A, B --> column (x A) --> ... --> row (y B) --> z

The backward comes to `begin` with the gradient of x, which must be summed over the ranks (or
reduce-scattered) before anything upstream can use it. Autograd would have computed the gradients of the
weights just before, and nothing would be left to compute meanwhile. So the backwards of column and row
compute dx alone, and put by what dA and dB are made of; `begin` computes these while its sum is on the wire:

    compute   [dx of row][ ... ][dx of column][dA of column][dB of row][ upstream
    wire                                      [ sum of dx             ]

(Megatron-LM overlaps the sum with the column's dA; here the row's joins it.) Weights pass through `begin` on
their way to their layers, so that their gradients are its to return. Everything is an ordinary gradient of an
ordinary backward: hooks, accumulation and checkpointing know of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hpnb.background import Pending

StartedCollective = tuple[torch.Tensor, Pending, torch.Tensor]
"""A collective that has begun: what will be its result, what to wait for, and what is being sent."""


@dataclass(frozen=True)
class RegionEntry:
    """What is done to x on its way into a region, and to its gradient on its way out."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], StartedCollective]


@dataclass(frozen=True)
class RegionExit:
    """What is done to z on its way out of a region, and to its gradient on its way in."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], torch.Tensor]


NO_COMMUNICATION = RegionEntry(lambda x: x, lambda grad: (grad, Pending(), grad))


class Layer(Protocol):
    """A part of a linear layer.

    Attributes:
        weight: (out, in), or (in, out) if `transposed`.
        adds: the bias; if not, another rank does, and it has its gradient here all the same.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool
    adds: bool


@dataclass(frozen=True)
class DeferredWeightGrad:
    """What the gradients of a layer's weight and bias will be made of.

    Attributes:
        kind: the weight's dtype.
        pieces: (input, gradient of the output) of each use whose backward has come, as matrices.
    """

    transposed: bool
    kind: torch.dtype
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def gradients(self, weight: bool, bias: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the weight and of the bias, where they are asked for."""
        d_weight: torch.Tensor | None = None
        d_bias: torch.Tensor | None = None
        while self.pieces:
            x, dy = self.pieces.pop(0)
            if weight:
                part = (x.t() @ dy if self.transposed else dy.t() @ x).to(self.kind)
                d_weight = part if d_weight is None else d_weight + part
            if bias:
                sums = (dy.t() @ _ones(len(dy), dy.dtype, dy.device)).to(self.kind)  # quicker than dy.sum(0)
                d_bias = sums if d_bias is None else d_bias + sums
        return d_weight, d_bias


@dataclass(frozen=True)
class ForwardWeights:
    """A layer's weight and bias for one forward; their gradients come from `begin`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    adds: bool
    owed: DeferredWeightGrad


def begin(
    x: torch.Tensor, layers: Sequence[Layer], entry: RegionEntry
) -> tuple[torch.Tensor, list[ForwardWeights]]:
    """x as it is inside, and what `layers` are to use there."""
    owed = [DeferredWeightGrad(layer.transposed, layer.weight.dtype) for layer in layers]
    held = [p for layer in layers for p in (layer.weight, layer.bias)]
    entered, *inside = _Begin.apply(x, entry, owed, *held)
    pairs = zip(layers, inside[::2], inside[1::2], owed, strict=True)
    return entered, [ForwardWeights(weight, bias, layer.adds, owes) for layer, weight, bias, owes in pairs]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        entry: RegionEntry,
        owed: list[DeferredWeightGrad],
        *held: torch.Tensor | None,
    ) -> Any:
        ctx.entry, ctx.owed = entry, owed
        ctx.set_materialize_grads(False)
        entered = entry.forward(x)
        inside: list[torch.Tensor | None] = [entered.view_as(x) if entered is x else entered]
        inside += [p if p is None else p.view_as(p) for p in held]
        outside = zip((x, *held), inside, strict=True)
        ctx.mark_non_differentiable(*(into for p, into in outside if p is not None and not p.requires_grad))
        return tuple(inside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor | None, *ready: torch.Tensor | None) -> Any:
        needed, pending = ctx.needs_input_grad, Pending()
        if dx is not None:
            dx, pending, _sent = ctx.entry.backward(dx)  # whose memory is the collective's until it is over
        weights, biases = needed[3::2], needed[4::2]
        found = [owes.gradients(*asked) for owes, *asked in zip(ctx.owed, weights, biases, strict=True)]
        pending.wait()
        return None if dx is None else dx.contiguous(), None, None, *(grad for pair in found for grad in pair)


def matmul(x: torch.Tensor, layer: ForwardWeights, leaving: RegionExit | None = None) -> torch.Tensor:
    """x A + b, (..., in) -> (..., out), whose backward gives the gradient of x alone.

    Args:
        leaving: the region; a row layer does.
    """
    y: torch.Tensor = _Matmul.apply(x, layer.weight, layer.bias, layer.adds, layer.owed, leaving)
    return y


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adds: bool,
        owed: DeferredWeightGrad,
        leaving: RegionExit | None,
    ) -> torch.Tensor:
        ctx.owed, ctx.leaving, ctx.kind = owed, leaving, x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        y = product(x, weight, bias if adds else None, owed.transposed)
        return y if leaving is None else leaving.forward(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), owed = ctx.saved_tensors, ctx.owed
        if ctx.leaving is not None:
            dy = ctx.leaving.backward(dy)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = (dy @ (weight.t() if owed.transposed else weight)).to(ctx.kind) if needs_x else None
        if not (needs_weight or needs_bias):
            return dx, *[None] * 5
        owed.pieces.append((x.flatten(0, -2), dy.flatten(0, -2)))
        # Autograd only asks who is ready: one number, seen as a whole weight, takes no memory.
        ready = _zero(weight.device, owed.kind)
        d_weight = ready.expand_as(weight) if needs_weight else None
        return dx, d_weight, ready.expand(dy.size(-1)) if needs_bias else None, None, None, None


@lru_cache(maxsize=64)
def _ones(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(n, dtype=dtype, device=device)


@cache
def _zero(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), device=device, dtype=dtype)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """x A + b for a weight (out, in), or (in, out) if `transposed`."""
    return F.linear(x, weight.t() if transposed else weight, bias)
