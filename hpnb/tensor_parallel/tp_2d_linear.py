"""Linear layers of 2D and 2.5D tensor parallelism: the autograd functions around SUMMA's products.

    linear_2d    Y = X W + b       dX = dY W^T, dW = X^T dY, db = sum of rows of dY     `summa.py` has the
    logits_2d    Z = X E^T         dX = dZ E,   dE = dZ^T X                             products and the bytes

Input and output of a layer have the same layout, batch over the grid's rows and hidden size over its columns,
so column- and row-parallel layers do not differ here. Layers that are passed together (q, k and v,
which have the same input) are one product: X is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpnb.background import Pending
from hpnb.gradients import differentiable_once
from hpnb.tensor_parallel.async_all_reduce import autocast_dtype
from hpnb.tensor_parallel.async_weight_grads import (
    NO_SECOND_DERIVATIVE,
    PendingWeightGrads,
    finish_or_defer,
)
from hpnb.tensor_parallel.summa import (
    Panels,
    PanelSums,
    SummaGrid,
    ab,
    abt,
    iterate_panels,
    linear_gradients,
)


def linear_2d(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    grid: SummaGrid,
    transposed: bool,
    pending_grads: PendingWeightGrads | None = None,
) -> tuple[torch.Tensor, ...]:
    """X W + b for each of some layers with the same X, which is sent once for all of them.

    Args:
        x: (samples of i, ..., in of j).
        weights: blocks, in of i, out of j: (out, in), or (in, out) if `transposed`, as Conv1D has it.
        biases: (out of j,), equal along i and depth; gradients cover this rank's samples.
        pending_grads: gets the running sums over depth, for which `await_weight_grads` waits; without it they
            are waited for here.

    Returns:
        (samples of i, ..., out of j) for each.
    """
    options = (grid, transposed, pending_grads, len(weights))
    y: torch.Tensor = _Linear2D.apply(x, *options, *weights, *biases)
    return split_outputs(y, x, [w.size(1 if transposed else 0) for w in weights])


class _Linear2D(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        grid: SummaGrid,
        transposed: bool,
        pending_grads: PendingWeightGrads | None,
        num_layers: int,
        *parameters: Any,
    ) -> torch.Tensor:
        weights, biases = parameters[:num_layers], parameters[num_layers:]  # a bias may be None
        ctx.dtype, x = x.dtype, cast_for_autocast(x)
        ctx.grid, ctx.transposed, ctx.pending_grads = grid, transposed, pending_grads
        ctx.save_for_backward(x, *weights)
        ctx.sizes = [w.size(1 if transposed else 0) for w in weights]
        w = concat_weights(weights, transposed, x.dtype)  # (in, out of all layers)
        return ab(x.flatten(0, -2), w, grid, concat_biases(biases, ctx.sizes, x))

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grid, transposed, num_layers = ctx.grid, ctx.transposed, len(weights)
        dy = dy.to(x.dtype)
        w = concat_weights(weights, transposed, x.dtype)
        needs_grad = ctx.needs_input_grad[5:]
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(needs_grad[:num_layers])
        dx, dw = linear_gradients(dy, x.flatten(0, -2), w, grid, needs_dx, needs_dw, transposed)
        d_weights: Sequence[torch.Tensor | None] = (None,) * num_layers
        if dw is not None:
            dws = dw.split(ctx.sizes, 1 if transposed else 0)
            d_weights = finish_or_defer(dws, weights, *_start_depth_sum(dw, grid, ctx.pending_grads))
        d_biases: Sequence[torch.Tensor | None] = (None,) * num_layers
        if any(needs_grad[num_layers:]):
            d_biases = dy.sum(0).split(ctx.sizes)
        grads = [g if needed else None for g, needed in zip((*d_weights, *d_biases), needs_grad, strict=True)]
        return None if dx is None else dx.view(x.shape).to(ctx.dtype), None, None, None, None, *grads


def logits_2d(
    x: torch.Tensor,
    embedding: torch.Tensor,
    grid: SummaGrid,
    vocab_sizes: Sequence[int],
    pending_grads: PendingWeightGrads | None = None,
) -> torch.Tensor:
    """X E^T: (samples of i, ..., h of j) and E (V of i, h of j) -> (samples of i, ..., V of j).

    Args:
        vocab_sizes: V of each i, and of each j.
        pending_grads: as in `linear_2d`.
    """
    z: torch.Tensor = _Logits2D.apply(x, embedding, grid, tuple(vocab_sizes), pending_grads)
    return z.view(*x.shape[:-1], z.size(-1))


class _Logits2D(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        embedding: torch.Tensor,
        grid: SummaGrid,
        vocab_sizes: tuple[int, ...],
        pending_grads: PendingWeightGrads | None,
    ) -> torch.Tensor:
        ctx.dtype, x = x.dtype, cast_for_autocast(x)
        ctx.grid, ctx.vocab_sizes, ctx.pending_grads = grid, vocab_sizes, pending_grads
        ctx.save_for_backward(x, embedding)
        return abt(x.flatten(0, -2), embedding.to(x.dtype), grid, vocab_sizes)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
        x, embedding = ctx.saved_tensors
        grid, needs_dx, needs_de = ctx.grid, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dz, flat_x = dz.to(x.dtype), x.flatten(0, -2)
        sums, dx = PanelSums(grid.down), torch.zeros_like(flat_x) if needs_dx else None
        panels = [Panels(dz, grid.across, 1, ctx.vocab_sizes)]
        if dx is not None:
            panels.append(Panels(embedding.to(x.dtype), grid.down, 0, ctx.vocab_sizes))
        for t, (dz_t, *e_t) in iterate_panels(grid.size, *panels):
            if dx is not None:
                dx.addmm_(dz_t, e_t[0])
            if needs_de:
                sums.add(dz_t.t() @ flat_x, t)
        de = None
        if needs_de:
            total = sums.result()
            (de,) = finish_or_defer((total,), (embedding,), *_start_depth_sum(total, grid, ctx.pending_grads))
        return None if dx is None else dx.view(x.shape).to(ctx.dtype), de, None, None, None


def _start_depth_sum(
    grad: torch.Tensor, grid: SummaGrid, pending_grads: PendingWeightGrads | None
) -> tuple[Pending, PendingWeightGrads | None]:
    """2.5D: start to sum a weight gradient over depth, in place. In 2D it is complete already."""
    if grid.depth is None:
        return Pending(), None
    return grid.depth.all_reduce(grad), pending_grads


# --- used by 3D too ------------------------------------------------------------------------------------


def cast_for_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of autocast's matmuls, if that is on."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def split_outputs(y: torch.Tensor, x: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """(n, out of all layers) -> (..., out) of each layer, which may be changed in place.

    A view that a Function returns may not be, nor one of `Tensor.split`; nobody uses y itself after this.
    """
    y = y.view(*x.shape[:-1], y.size(-1))
    return (y,) if len(sizes) == 1 else tuple(torch.unsafe_split_with_sizes(y, list(sizes), -1))


def concat_weights(weights: Sequence[torch.Tensor], transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    """(in, out of all layers) of weights as they are stored; of one layer a view."""
    cast_tensors = [w.to(dtype) for w in weights]
    stored = cast_tensors[0] if len(cast_tensors) == 1 else torch.cat(cast_tensors, 1 if transposed else 0)
    return stored if transposed else stored.t()


def concat_biases(
    biases: Sequence[torch.Tensor | None], sizes: Sequence[int], x: torch.Tensor
) -> torch.Tensor | None:
    """(out of all layers,), 0 where a layer has none; None if none has."""
    if all(bias is None for bias in biases):
        return None
    cast_tensors = [
        x.new_zeros(n) if b is None else b.to(x.dtype) for b, n in zip(biases, sizes, strict=True)
    ]
    return cast_tensors[0] if len(cast_tensors) == 1 else torch.cat(cast_tensors)
