"""A region of a tensor-parallel model: from where its input is sent around to where its output is summed.

    x --hold--> x --enter--> column --> ... --> row --leave--> z

The backward comes to `enter` with the gradient of x, which must be summed over the ranks (or
reduce-scattered) before anything upstream can use it. Autograd would have computed the gradients of the
weights just before, and nothing would be left to compute meanwhile. So they are put off:

    compute   [dx of row][ ... ][dx of column][dA of row][dA of column][ upstream
    wire                                      [ sum of dx            ]

(Megatron-LM overlaps the sum with the column's dA; here the row's joins it.) Autograd runs what is ready in
the reverse order of the forward. A weight is therefore handed to its layer by a node that was made *before*
`enter` and *after* `hold`: its backward, which computes dA, comes between the start of the sum and the wait
for it. Everything is an ordinary gradient of an ordinary backward: hooks, accumulation and checkpointing know
of nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hpnb.background import Pending

Reduce = Callable[[torch.Tensor], tuple[torch.Tensor, Pending, torch.Tensor]]
"""Starts a collective for a gradient: (what will be the result when one has waited, what to wait for, what is
being sent)."""


class Flight:
    """What is on the wire between the backward of `enter` and that of `hold`."""

    def __init__(self) -> None:
        self.pending = Pending()
        self.sent: torch.Tensor | None = None  # its memory belongs to the collective until then


def hold(x: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Forward nothing; backward waits for what `enter` has started."""
    held: torch.Tensor = _Hold.apply(x, flight)
    return held


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flight: Flight) -> torch.Tensor:
        ctx.flight = flight
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.flight.pending.wait()
        ctx.flight.sent = None
        return grad.contiguous(), None


def enter(
    x: torch.Tensor, flight: Flight, there: Callable[[torch.Tensor], torch.Tensor], back: Reduce
) -> torch.Tensor:
    """Forward `there`; backward starts `back` and leaves it in flight."""
    entered: torch.Tensor = _Enter.apply(x, flight, there, back)
    return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flight: Flight, there: Any, back: Reduce) -> torch.Tensor:
        ctx.flight, ctx.back = flight, back
        found: torch.Tensor = there(x)
        return found.view_as(x) if found is x else found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        result, ctx.flight.pending, ctx.flight.sent = ctx.back(grad)
        return result, None, None, None


# --- a weight whose gradient comes later -----------------------------------------------------------------


class Later:
    """A layer's weight and bias as its forward uses them, and what their gradients will be made of."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, adds: bool = True
    ) -> None:
        self.pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.transposed = transposed
        self.adds = adds  # the bias; if not, another rank does, and it has its gradient here all the same
        self.weight: torch.Tensor
        self.bias: torch.Tensor | None
        if bias is None:
            self.weight, self.bias = _Later.apply(weight, None, self)[0], None
        else:
            self.weight, self.bias = _Later.apply(weight, bias, self)


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, later: Later) -> Any:
        ctx.later, ctx.kind = later, weight.dtype
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tokens: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        d_weight = d_bias = None
        pieces, ctx.later.pieces = ctx.later.pieces, []
        for x, dy in pieces:
            if ctx.needs_input_grad[0]:
                part = (x.t() @ dy if ctx.later.transposed else dy.t() @ x).to(ctx.kind)
                d_weight = part if d_weight is None else d_weight + part
            if ctx.needs_input_grad[1]:
                sums = (dy.t() @ _ones(len(dy), dy.dtype, dy.device)).to(ctx.kind)  # quicker than dy.sum(0)
                d_bias = sums if d_bias is None else d_bias + sums
        return d_weight, d_bias, None


def matmul(x: torch.Tensor, later: Later) -> torch.Tensor:
    """x A + b, (..., in) -> (..., out), whose backward gives the gradient of x alone."""
    y: torch.Tensor = _Matmul.apply(x, later.weight, later.bias, later)
    return y


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: Later
    ) -> torch.Tensor:
        ctx.later, ctx.kind, ctx.weight_kind = later, x.dtype, weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias if later.adds else None, later.transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        token_weight = token_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            ctx.later.pieces.append((x.flatten(0, -2), dy.flatten(0, -2)))
            # Autograd only asks who is ready: one number, seen as a whole weight, takes no memory.
            token = _zero(weight.device, ctx.weight_kind)
            if ctx.needs_input_grad[1]:
                token_weight = token.expand_as(weight)
            if ctx.needs_input_grad[2]:
                token_bias = token.expand(dy.size(-1))
        dx = (dy @ (weight.t() if ctx.later.transposed else weight)).to(ctx.kind)
        return dx if ctx.needs_input_grad[0] else None, token_weight, token_bias, None


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
