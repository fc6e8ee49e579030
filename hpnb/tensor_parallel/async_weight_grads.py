"""Weight gradients that are summed over ranks in the background, while the rest of the backward runs.

    forward     W --await_weight_grads--> W' ---> Y = X W'
    backward    Y = X W' has dW: it starts the sum, and returns a placeholder in place of it
                ...  the rest of the block's backward overlaps the sum  ...
                the node of await_weight_grads waits for the sum, which becomes the gradient of W

Autograd runs ready nodes in the reverse order of the forward, so a node that was made when the block began
comes when the block's backward is over. A placeholder is a zero expanded to the weight's shape: it says whose
turn it is, and takes no memory. Where a weight is used twice, autograd adds placeholders, never tensors that
are being sent. These are ordinary gradients of an ordinary backward: hooks, gradient accumulation and
activation checkpointing work unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpnb.background import Pending, wait_all
from hpnb.gradients import differentiable_once
from hpnb.tensor_parallel.async_all_reduce import placeholder_grad
from hpnb.tensor_parallel.per_backward_list import PerBackwardList

NO_SECOND_DERIVATIVE = (
    "tp_mode 2d, 2.5d or 3d",
    "its products have no second backward; use tp_mode='1d'",
)
"""What `differentiable_once` says of a grid's functions."""

PendingWeightGrads = PerBackwardList[tuple[Sequence[torch.Tensor], Pending]]
"""Gradients of some weights, one tensor each, and what to wait for before they may be used."""


def await_weight_grads(
    weights: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], PendingWeightGrads | None]:
    """The weights to use in the forward that begins, and the list for the sums that its backward starts.

    The weights themselves and None where no gradient will be needed.
    """
    if not torch.is_grad_enabled() or not any(w.requires_grad for w in weights):
        return tuple(weights), None
    pending_grads: PendingWeightGrads = PerBackwardList(_wait_for_sums)
    return _AwaitWeightGrads.apply(pending_grads, *weights), pending_grads


def finish_or_defer(
    grads: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    pending: Pending,
    pending_grads: PendingWeightGrads | None,
) -> list[torch.Tensor]:
    """What a backward returns for `weights` while `grads` are being summed: placeholders, if it may leave the
    sum to `await_weight_grads`; else it waits, and returns the gradients."""
    if pending_grads is not None:
        pending_grads.append((grads, pending))
        return [placeholder_grad(w.shape, w.dtype, w.device) for w in weights]
    pending.wait()
    return [grad.to(w.dtype) for grad, w in zip(grads, weights, strict=True)]


def _wait_for_sums(pending_grads: list[tuple[Sequence[torch.Tensor], Pending]]) -> None:
    """Of a backward that did not get to the weights: until then its sums use the memory."""
    wait_all(pending for _, pending in pending_grads)


class _AwaitWeightGrads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pending_grads: PendingWeightGrads, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.pending_grads, ctx.dtypes = pending_grads, [w.dtype for w in weights]
        ctx.set_materialize_grads(False)
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, *placeholders: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        totals: list[torch.Tensor | None] = [None] * len(ctx.dtypes)
        pending_grads = ctx.pending_grads.take()
        while pending_grads:
            grads, pending = pending_grads.pop(0)
            pending.wait()
            for i, (grad, dtype) in enumerate(zip(grads, ctx.dtypes, strict=True)):
                total = totals[i]
                totals[i] = grad.to(dtype) if total is None else total + grad.to(dtype)
        return None, *(
            g if needed else None for g, needed in zip(totals, ctx.needs_input_grad[1:], strict=True)
        )
