"""The matrix product of 3D tensor parallelism, over l x l x l ranks, and its gradients.

    Y = X W      Y_ij = sum_k X_ik W_kj       rank (i, k, j) computes the one product X_ik W_kj

Rank (i, k, j) is at i along `rows`, k along `inputs` and j along `outputs`. No rank keeps a block that others
have too: each block is sharded once more, along the axis on which it is the same:

    X_ik, (rows / l, in / l)      its rows over `outputs`     all-gather along `outputs` before the product
    W_kj, (in / l, out / l)       over `rows`                 all-gather along `rows`
    Y_ij, (rows / l, out / l)     its rows over `inputs`      reduce-scatter along `inputs`: the sum over k

(Agarwal et al. 1995, "A three-dimensional approach to parallel matrix multiplication"; as layers of a
transformer Bian et al. 2021, arXiv 2105.14450, section 3.) So a rank has an l^3-th of everything. Y has the
layout of X with `inputs` and `outputs` exchanged: the next layer's inputs lie along this one's outputs.

    dX_ik = sum_j dY_ij W_kj^T    all-gather dY and W again, reduce-scatter along `outputs`
    dW_kj = sum_i X_ik^T dY_ij    all-gather X again, reduce-scatter along `rows`

What was gathered is not kept. The gathers of X, W and dY run at once. The sum of dX overlaps the computation
of dW, and the sum of dW overlaps the rest of the block's backward (`async_weight_grads.py`). For gathered
blocks of n_x, n_w and n_y bytes, of which a rank holds an l-th, forward and backward send from each rank, in
units of (l-1)/l,

    along `outputs`  3 n_x        along `rows`  3 n_w        along `inputs`  2 n_y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hpnb.background import Background, Pending
from hpnb.gradients import differentiable_once
from hpnb.mesh import Axis
from hpnb.tensor_parallel.async_weight_grads import (
    NO_SECOND_DERIVATIVE,
    PendingWeightGrads,
    finish_or_defer,
)
from hpnb.tensor_parallel.tp_2d_linear import cast_for_autocast, concat_biases, split_outputs


class MatmulAxes3D:
    """The three directions of l x l x l ranks, as one linear layer uses them."""

    def __init__(self, rows_axis: Axis, inputs_axis: Axis, outputs_axis: Axis, device: torch.device) -> None:
        axes = rows_axis, inputs_axis, outputs_axis
        self.rows, self.inputs, self.outputs = (Background(axis, device) for axis in axes)


def linear_3d(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    cube: MatmulAxes3D,
    dim: int,
    transposed: bool,
    pending_grads: PendingWeightGrads | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """X W + b for each of some layers with the same X, which is gathered once for all of them.

    Args:
        x: (rows of i and j, ..., in of k).
        weights: shards of block (k, j), as they are stored: (out, in), or (in, out) if `transposed`.
        biases: (out of j,), equal along `rows` and `inputs`; gradients cover this rank's samples.
        dim: of the weight as it is stored, along which its block is sharded over `rows`.
        pending_grads: see `linear_2d`.
        sizes: of one weight, the shards' sizes along `dim`, if they differ.

    Returns:
        (rows of i and k, ..., out of j) for each.
    """
    blocks = _WeightBlocks([tuple(w.shape) for w in weights], cube.rows, dim, transposed, sizes)
    y: torch.Tensor = _Linear3D.apply(x, cube, blocks, pending_grads, *weights, *biases)
    return split_outputs(y, x, blocks.outputs)


class _Linear3D(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cube: MatmulAxes3D,
        blocks: _WeightBlocks,
        pending_grads: PendingWeightGrads | None,
        *parameters: Any,
    ) -> torch.Tensor:
        layers = len(blocks.outputs)
        weights = parameters[:layers]
        ctx.dtype, x = x.dtype, cast_for_autocast(x)
        ctx.cube, ctx.blocks, ctx.pending_grads = cube, blocks, pending_grads
        ctx.save_for_backward(x, *weights)
        full_x, x_pending = _all_gather(x.flatten(0, -2), cube.outputs)
        full_w, w_pending = blocks.gather(weights, x.dtype)
        x_pending.wait()
        w_pending.wait()
        summand = full_x @ blocks.matrix(full_w)  # (rows of i, out of j), to be summed over k
        y, y_pending = _reduce_scatter(summand, cube.inputs)
        y_pending.wait()
        bias = concat_biases(parameters[layers:], blocks.outputs, x)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        cube, blocks, layers = ctx.cube, ctx.blocks, len(weights)
        needs = ctx.needs_input_grad[4:]
        for_x, for_w, for_b = ctx.needs_input_grad[0], any(needs[:layers]), any(needs[layers:])
        dy = dy.to(x.dtype)
        grads: list[torch.Tensor | None] = [None] * len(needs)
        if for_b:
            grads[layers:] = dy.sum(0).split(blocks.outputs)
        dx, dx_pending = None, Pending()
        if for_x or for_w:
            full_dy, dy_pending = _all_gather(dy, cube.inputs)
            if for_x:
                full_w, w_pending = blocks.gather(weights, x.dtype)
            if for_w:
                full_x, x_pending = _all_gather(x.flatten(0, -2), cube.outputs)
            dy_pending.wait()
            if for_x:
                w_pending.wait()
                dx, dx_pending = _reduce_scatter(full_dy @ blocks.matrix(full_w).t(), cube.outputs)
            if for_w:
                x_pending.wait()
                dws, dw_pending = blocks.reduce_scatter_grads(full_x, full_dy)
                grads[:layers] = finish_or_defer(dws, weights, dw_pending, ctx.pending_grads)
        dx_pending.wait()
        grads = [g if need else None for g, need in zip(grads, needs, strict=True)]
        return None if dx is None else dx.view(x.shape).to(ctx.dtype), None, None, None, *grads


def _all_gather(x: torch.Tensor, background: Background) -> tuple[torch.Tensor, Pending]:
    """(n, m) -> ((l n, m), what to wait for)."""
    if background.axis.size == 1:
        return x, Pending()
    x = x.contiguous()
    full = x.new_empty((background.axis.size * x.size(0), x.size(1)))
    return full, _keep_until_waited(x, background.all_gather(full, x)) if x.numel() else Pending()


def _reduce_scatter(x: torch.Tensor, background: Background) -> tuple[torch.Tensor, Pending]:
    """(l n, m), this rank's summand -> ((n, m), what to wait for)."""
    if background.axis.size == 1:
        return x, Pending()
    x = x.contiguous()
    shard = x.new_empty((x.size(0) // background.axis.size, x.size(1)))
    return shard, _keep_until_waited(x, background.reduce_scatter(shard, x)) if x.numel() else Pending()


def _keep_until_waited(source: torch.Tensor, pending: Pending) -> Pending:
    """The collective reads `source` until somebody has waited, so its memory must not be reused before."""
    kept = [source]

    def wait() -> None:
        pending.wait()
        kept.clear()

    return Pending(wait)


class _WeightBlocks:
    """The blocks W_kj of some layers, each sharded along `dim` over an axis; all go in one message.

    Attributes:
        outputs: how many outputs each block has.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        background: Background,
        dim: int,
        transposed: bool,
        sizes: Sequence[int] | None,
    ) -> None:
        self._background, self._dim, self._transposed, self._sizes = background, dim, transposed, sizes
        self._ranks, self._out_dim = background.axis.size, 1 if transposed else 0
        self._padded_shapes = [self._pad(shape) for shape in shapes]
        self._numels = [a * b for a, b in self._padded_shapes]
        self.outputs = [self._count_outputs(shape) for shape in shapes]

    def _count_outputs(self, shape: Sequence[int]) -> int:
        if self._out_dim != self._dim:
            return shape[self._out_dim]
        return shape[self._out_dim] * self._ranks if self._sizes is None else sum(self._sizes)

    def _pad(self, shape: Sequence[int]) -> tuple[int, int]:
        padded = list(shape)
        if self._sizes is not None:
            padded[self._dim] = max(self._sizes)
        return padded[0], padded[1]

    def gather(self, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, Pending]:
        """All shards of all blocks: ((l, elements), what to wait for)."""
        flats = []
        for weight, numel in zip(weights, self._numels, strict=True):
            flat = weight.to(dtype).reshape(-1)  # an uneven one is sharded along dim 0: padding comes last
            flats.append(F.pad(flat, (0, numel - flat.numel())))
        message = flats[0] if len(flats) == 1 else torch.cat(flats)
        return _all_gather(message.unsqueeze(0), self._background)

    def matrix(self, gathered: torch.Tensor) -> torch.Tensor:
        """What `gather` gave -> (in of k, out of j of all layers)."""
        blocks = []
        for flat, shape in zip(gathered.split(self._numels, 1), self._padded_shapes, strict=True):
            shards = flat.view(self._ranks, *shape)
            if self._sizes is not None:
                blocks.append(torch.cat([shard[:n] for shard, n in zip(shards, self._sizes, strict=True)]))
            else:
                blocks.append(shards.movedim(0, self._dim).flatten(self._dim, self._dim + 1))
        in_out = blocks if self._transposed else [block.t() for block in blocks]
        return in_out[0] if len(in_out) == 1 else torch.cat(in_out, 1)

    def reduce_scatter_grads(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[list[torch.Tensor], Pending]:
        """X^T dY, summed: (this rank's shard of each weight's gradient, what to wait for)."""
        dw = x.t() @ dy if self._transposed else dy.t() @ x  # as the weights are stored, side by side
        flats = []
        for block, shape in zip(dw.split(self.outputs, self._out_dim), self._padded_shapes, strict=True):
            if self._sizes is not None:
                padded = block.new_zeros((self._ranks, *shape))
                for shard, rows in zip(padded, block.split(list(self._sizes)), strict=True):
                    shard[: rows.size(0)] = rows
                flats.append(padded.flatten(1))
            else:
                shards = block.unflatten(self._dim, (self._ranks, shape[self._dim]))
                flats.append(shards.movedim(self._dim, 0).reshape(self._ranks, -1))  # (l, elements)
        message = flats[0] if len(flats) == 1 else torch.cat(flats, 1)
        result, pending = _reduce_scatter(message, self._background)
        grads = []
        for flat, shape in zip(result.view(-1).split(self._numels), self._padded_shapes, strict=True):
            grad = flat.view(shape)
            grads.append(grad if self._sizes is None else grad[: self._sizes[self._background.axis.rank]])
        return grads, pending
