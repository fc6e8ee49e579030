"""Weights whose gradients are summed in the background, while the backward goes on.

    forward     W --await--> W' ---> Y = X W'
    backward    Y = X W' has dW: it starts the sum, and goes on with a token in its place
                ...  the rest of the block's backward  ...
                await: the sum is there, and becomes the gradient of W

Autograd runs what is ready in the reverse order of the forward, so an await that was made when the block
began comes when the block's backward is over. A token is a zero that is seen as a whole weight: it says who
is ready, and takes no memory. Where a weight is used twice, autograd adds tokens, never what is on its way.
Everything is an ordinary gradient of an ordinary backward: hooks, accumulation and checkpointing know of
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hpnb.background import Pending

PendingWeightGrads = list[tuple[Sequence[torch.Tensor], Pending]]
"""Gradients of some weights, a tensor each, and what to wait for before they may be used."""


def await_weight_grads(
    weights: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], PendingWeightGrads | None]:
    """The weights to use in the forward that begins, and where its backward leaves what it has sent.

    Where no gradient will be asked for: the weights themselves, and None.
    """
    if not torch.is_grad_enabled() or not any(w.requires_grad for w in weights):
        return tuple(weights), None
    sent: PendingWeightGrads = []
    return _Await.apply(sent, *weights), sent


def tokens(weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What stands for the gradients of `weights` until they arrive."""
    return [_zero(w.device, w.dtype).expand_as(w) for w in weights]


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: PendingWeightGrads, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sent, ctx.kinds = sent, [w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *stand_ins: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None] * len(ctx.kinds)
        while ctx.sent:
            parts, pending = ctx.sent.pop(0)
            pending.wait()
            for i, (part, kind) in enumerate(zip(parts, ctx.kinds, strict=True)):
                before = found[i]
                found[i] = part.to(kind) if before is None else before + part.to(kind)
        return None, *(g if n else None for g, n in zip(found, ctx.needs_input_grad[1:], strict=True))


@cache
def _zero(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), device=device, dtype=dtype)
