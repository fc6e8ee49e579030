"""Layers of blocks: SUMMA's products as autograd knows them, for 2D and 2.5D tensor parallelism.

    linear    Y = X W + b       dX = dY W^T, dW = X^T dY, db = sum of rows of dY       `summa.py` has the
    logits    Z = X E^T         dX = dZ E,   dE = dZ^T X                               products and the bytes

A layer's input and output lie alike, rows over the grid's rows and width over its columns, so there are no
column and row layers here. Layers with the same input (q, k and v) are one product: X goes around once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads, tokens
from hpnb.tensor_parallel.summa import Panels, PanelSums, SummaGrid, ab, abt, gradients, iterate_panels

# --- a linear layer, X W + b ---------------------------------------------------------------------------


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    grid: SummaGrid,
    transposed: bool,
    sent: PendingWeightGrads | None = None,
) -> tuple[torch.Tensor, ...]:
    """X W + b for each of some layers with the same X, which is sent around once for all of them.

    Args:
        x: (rows of i, ..., in of j).
        weights: blocks, in of i, out of j: (out, in), or (in, out) if `transposed`, as Conv1D has it.
        biases: (out of j,), equal along i and depth; gradients are this rank's share.
        sent: where to leave sums over depth that are on their way (`arriving.py`); without it they are
            waited for.

    Returns:
        (rows of i, ..., out of j) for each.
    """
    found: tuple[torch.Tensor, ...] = _Linear.apply(
        x, grid, transposed, sent, len(weights), *weights, *biases
    )
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        grid: SummaGrid,
        transposed: bool,
        sent: PendingWeightGrads | None,
        layers: int,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:layers], parameters[layers:]
        ctx.kind, x = x.dtype, cast_for_autocast(x)
        ctx.grid, ctx.transposed, ctx.sent = grid, transposed, sent
        ctx.save_for_backward(x, *weights)
        ctx.sizes = [w.size(1 if transposed else 0) for w in weights if w is not None]
        w = concat_weights(weights, transposed, x.dtype)  # (in, out) of all layers
        y = ab(x.flatten(0, -2), w, grid, concat_biases(biases, ctx.sizes, x))
        found: tuple[torch.Tensor, ...] = y.view(*x.shape[:-1], y.size(-1)).split(ctx.sizes, -1)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grid, layers = ctx.grid, len(weights)
        dy = (dys[0] if layers == 1 else torch.cat(dys, -1)).to(x.dtype).flatten(0, -2)
        flat, w = x.flatten(0, -2), concat_weights(weights, ctx.transposed, x.dtype)
        needs = ctx.needs_input_grad[5:]
        dx, dw = gradients(dy, flat, w, grid, ctx.needs_input_grad[0], any(needs[:layers]), ctx.transposed)
        d_weights: Sequence[torch.Tensor | None] = (None,) * layers
        if dw is not None:
            parts = dw.split(ctx.sizes, 1 if ctx.transposed else 0)
            d_weights = sum_over_depth(dw, parts, weights, grid, ctx.sent)
        d_biases: list[torch.Tensor | None] = [None] * layers
        if any(needs[layers:]):
            d_biases = list(dy.sum(0).split(ctx.sizes))
        found = [g if need else None for g, need in zip((*d_weights, *d_biases), needs, strict=True)]
        return None if dx is None else dx.view(x.shape).to(ctx.kind), None, None, None, None, *found


# --- logits, X E^T -------------------------------------------------------------------------------------


def logits(
    x: torch.Tensor,
    table: torch.Tensor,
    grid: SummaGrid,
    words: Sequence[int],
    sent: PendingWeightGrads | None = None,
) -> torch.Tensor:
    """X E^T: (rows of i, ..., h of j) and E (V of i, h of j) -> (rows of i, ..., V of j).

    Args:
        words: V of each i, and of each j.
        sent: as in `linear`.
    """
    found: torch.Tensor = _Logits.apply(x, table, grid, tuple(words), sent)
    return found


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        table: torch.Tensor,
        grid: SummaGrid,
        words: tuple[int, ...],
        sent: PendingWeightGrads | None,
    ) -> torch.Tensor:
        ctx.kind, x = x.dtype, cast_for_autocast(x)
        ctx.grid, ctx.words, ctx.sent = grid, words, sent
        ctx.save_for_backward(x, table)
        z = abt(x.flatten(0, -2), table.to(x.dtype), grid, words)
        return z.view(*x.shape[:-1], z.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
        x, table = ctx.saved_tensors
        grid, for_x, for_e = ctx.grid, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dz, flat = dz.to(x.dtype).flatten(0, -2), x.flatten(0, -2)
        sums, dx = PanelSums(grid.down), torch.zeros_like(flat) if for_x else None
        panels = [Panels(dz, grid.across, 1, ctx.words)]
        if dx is not None:
            panels.append(Panels(table.to(x.dtype), grid.down, 0, ctx.words))
        for t, (dz_t, *e_t) in iterate_panels(grid.size, *panels):
            if dx is not None:
                dx.addmm_(dz_t, e_t[0])
            if for_e:
                sums.add(dz_t.t() @ flat, t)
        de = None
        if for_e:
            whole = sums.own()
            (de,) = sum_over_depth(whole, (whole,), (table,), grid, ctx.sent)
        return None if dx is None else dx.view(x.shape).to(ctx.kind), de, None, None, None


# --- what both use, and 3D too -------------------------------------------------------------------------


def cast_for_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the type of autocast's matmuls, if that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def concat_weights(
    weights: Sequence[torch.Tensor | None], transposed: bool, dtype: torch.dtype
) -> torch.Tensor:
    """(in, out of all layers) of weights as they are stored; of one layer a view."""
    found = [w.to(dtype) for w in weights if w is not None]
    stored = found[0] if len(found) == 1 else torch.cat(found, 1 if transposed else 0)
    return stored if transposed else stored.t()


def concat_biases(
    biases: Sequence[torch.Tensor | None], sizes: Sequence[int], x: torch.Tensor
) -> torch.Tensor | None:
    """(out of all layers,), 0 where a layer has none; None if none has."""
    if all(bias is None for bias in biases):
        return None
    found = [x.new_zeros(n) if b is None else b.to(x.dtype) for b, n in zip(biases, sizes, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found)


def sum_over_depth(
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    grid: SummaGrid,
    sent: PendingWeightGrads | None,
) -> Sequence[torch.Tensor | None]:
    """Gradients summed over depth; or the start of that, and tokens."""
    if grid.depth is None:
        return [part.to(w.dtype) for part, w in zip(parts, weights, strict=True)]
    pending = grid.depth.all_reduce(whole)
    if sent is None:
        pending.wait()
        return [part.to(w.dtype) for part, w in zip(parts, weights, strict=True)]
    sent.append((parts, pending))
    return tokens(weights)
