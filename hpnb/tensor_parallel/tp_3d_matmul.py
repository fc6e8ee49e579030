"""A product of matrices over l x l x l ranks, and its gradients: the matrix product of 3D.

    Y = X W      Y_ij = sum_k X_ik W_kj       rank (i, k, j) computes the one product X_ik W_kj

Rank (i, k, j) stands at i along `rows`, k along `into` and j along `out`. Nobody keeps a block that others
have too; each is cut once more, along the axis on which it is the same:

    X_ik, (rows / l, in / l)      its rows over `out`     all-gather along `out` before the product
    W_kj, (in / l, out / l)       over `rows`             all-gather along `rows`
    Y_ij, (rows / l, out / l)     its rows over `into`    reduce-scatter along `into`, which is the sum over k

(Agarwal et al. 1995, "A three-dimensional approach to parallel matrix multiplication"; as layers of a
transformer Bian et al. 2021, arXiv 2105.14450, section 3.) So a rank has an l^3-th of everything, and Y lies
as X does with `into` and `out` changed: the next layer's input direction is this one's output direction.

    dX_ik = sum_j dY_ij W_kj^T    all-gather dY and W again, reduce-scatter along `out`
    dW_kj = sum_i X_ik^T dY_ij    all-gather X again, reduce-scatter along `rows`

What was gathered is not kept. Gathers of X, W and dY travel together; the sum of dX is on its way while dW is
computed, and that of dW until the block's backward ends (`arriving.py`). For gathered blocks of n_x, n_w and
n_y bytes, of which a rank holds an l-th, forward and backward send from each rank, in units of (l-1)/l,

    along `out`  3 n_x        along `rows`  3 n_w        along `into`  2 n_y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hpnb.background import Background, Pending
from hpnb.mesh import Axis
from hpnb.tensor_parallel.async_weight_grads import PendingWeightGrads, tokens
from hpnb.tensor_parallel.tp_2d_linear import cast_for_autocast, concat_biases


class MatmulAxes3D:
    """l x l x l ranks, as one linear layer meets them: see above."""

    def __init__(self, rows: Axis, into: Axis, out: Axis, device: torch.device) -> None:
        self.rows, self.into, self.out = (Background(axis, device) for axis in (rows, into, out))


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    cube: MatmulAxes3D,
    dim: int,
    transposed: bool,
    sent: PendingWeightGrads | None = None,
    pieces: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """X W + b for each of some layers with the same X, which is gathered once for all of them.

    Args:
        x: (rows of i and j, ..., in of k).
        weights: parts of block (k, j), as they are stored: (out, in), or (in, out) if `transposed`.
        biases: (out of j,), equal along `rows` and `into`; gradients are this rank's share.
        dim: of the weight as it is stored, along which its block is cut over `rows`.
        sent: where to leave gradients of weights that are on their way; without it they are waited for.
        pieces: of one weight, its sizes along `dim` by place on `rows`, if they differ.

    Returns:
        (rows of i and k, ..., out of j) for each.
    """
    options = (cube, dim, transposed, sent, pieces, len(weights))
    found: tuple[torch.Tensor, ...] = _Linear.apply(x, *options, *weights, *biases)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cube: MatmulAxes3D,
        dim: int,
        transposed: bool,
        sent: PendingWeightGrads | None,
        pieces: Sequence[int] | None,
        layers: int,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights = [w for w in parameters[:layers] if w is not None]
        ctx.kind, x = x.dtype, cast_for_autocast(x)
        ctx.cube, ctx.sent = cube, sent
        ctx.blocks = _Blocks([tuple(w.shape) for w in weights], cube.rows, dim, transposed, pieces)
        ctx.save_for_backward(x, *weights)
        flat_x, x_there = _gather(x.flatten(0, -2), cube.out)
        flat_w, w_there = ctx.blocks.gather(weights, x.dtype)
        x_there.wait()
        w_there.wait()
        part = flat_x @ ctx.blocks.matrix(flat_w)  # (rows of i, out of j), to be summed over k
        y, y_there = _scatter(part, cube.into)
        y_there.wait()
        bias = concat_biases(parameters[layers:], ctx.blocks.outs, x)
        y = y if bias is None else y.add_(bias)
        found: tuple[torch.Tensor, ...] = y.view(*x.shape[:-1], y.size(-1)).split(ctx.blocks.outs, -1)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        cube, blocks, layers = ctx.cube, ctx.blocks, len(weights)
        needs = ctx.needs_input_grad[7:]
        for_x, for_w, for_b = ctx.needs_input_grad[0], any(needs[:layers]), any(needs[layers:])
        dy = (dys[0] if layers == 1 else torch.cat(dys, -1)).to(x.dtype).flatten(0, -2)
        found: list[torch.Tensor | None] = [None] * len(needs)
        if for_b:
            found[layers:] = dy.sum(0).split(blocks.outs)
        dx, dx_there = None, Pending()
        if for_x or for_w:
            whole_dy, dy_there = _gather(dy, cube.into)
            if for_x:
                flat_w, w_there = blocks.gather(weights, x.dtype)
            if for_w:
                flat_x, x_there = _gather(x.flatten(0, -2), cube.out)
            dy_there.wait()
            if for_x:
                w_there.wait()
                dx, dx_there = _scatter(whole_dy @ blocks.matrix(flat_w).t(), cube.out)
            if for_w:
                x_there.wait()
                parts, dw_there = blocks.scatter(flat_x, whole_dy)
                if ctx.sent is None:
                    dw_there.wait()
                    found[:layers] = [part.to(w.dtype) for part, w in zip(parts, weights, strict=True)]
                else:
                    ctx.sent.append((parts, dw_there))
                    found[:layers] = tokens(weights)
        dx_there.wait()
        found = [g if need else None for g, need in zip(found, needs, strict=True)]
        d_input = None if dx is None else dx.view(x.shape).to(ctx.kind)
        return d_input, None, None, None, None, None, None, *found


def _gather(x: torch.Tensor, wire: Background) -> tuple[torch.Tensor, Pending]:
    """(n, m) -> (l n, m), when one has waited."""
    if wire.axis.size == 1:
        return x, Pending()
    x = x.contiguous()
    whole = x.new_empty((wire.axis.size * x.size(0), x.size(1)))
    return whole, _lent(x, wire.all_gather(whole, x)) if x.numel() else Pending()


def _scatter(x: torch.Tensor, wire: Background) -> tuple[torch.Tensor, Pending]:
    """(l n, m), this rank's part of a sum -> (n, m), when one has waited."""
    if wire.axis.size == 1:
        return x, Pending()
    x = x.contiguous()
    mine = x.new_empty((x.size(0) // wire.axis.size, x.size(1)))
    return mine, _lent(x, wire.reduce_scatter(mine, x)) if x.numel() else Pending()


def _lent(source: torch.Tensor, pending: Pending) -> Pending:
    """`source` is read until one has waited, and its memory must not be given to anybody before."""
    kept = [source]

    def join() -> None:
        pending.wait()
        kept.clear()

    return Pending(join)


class _Blocks:
    """Weights W_kj of some layers, each cut over the ranks of `wire` along `dim`; all go in one message.

    Attributes:
        outs: outputs of each.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        wire: Background,
        dim: int,
        transposed: bool,
        pieces: Sequence[int] | None,
    ) -> None:
        self._wire, self._dim, self._transposed, self._pieces = wire, dim, transposed, pieces
        self._shapes = [self._padded(shape) for shape in shapes]
        self._numels = [a * b for a, b in self._shapes]
        self.outs = [self._outs(*shape) for shape in shapes]

    def _outs(self, *shape: int) -> int:
        out = 1 if self._transposed else 0
        if out != self._dim:
            return shape[out]
        return shape[out] * self._wire.axis.size if self._pieces is None else sum(self._pieces)

    def _padded(self, shape: Sequence[int]) -> tuple[int, int]:
        whole = list(shape)
        if self._pieces is not None:
            whole[self._dim] = max(self._pieces)
        return whole[0], whole[1]

    def gather(self, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, Pending]:
        """All parts of all blocks: (l, elements)."""
        flats = []
        for weight, numel in zip(weights, self._numels, strict=True):
            flat = weight.to(dtype).reshape(-1)  # an uneven one is cut along dim 0: padding comes last
            flats.append(torch.nn.functional.pad(flat, (0, numel - flat.numel())))
        mine = flats[0] if len(flats) == 1 else torch.cat(flats)
        whole, pending = _gather(mine.unsqueeze(0), self._wire)
        return whole, pending

    def matrix(self, whole: torch.Tensor) -> torch.Tensor:
        """What has been gathered -> (in of k, out of j of all layers)."""
        blocks = []
        for flat, shape in zip(whole.split(self._numels, 1), self._shapes, strict=True):
            parts = flat.view(self._wire.axis.size, *shape)
            if self._pieces is not None:
                blocks.append(torch.cat([part[:n] for part, n in zip(parts, self._pieces, strict=True)]))
            else:
                blocks.append(parts.movedim(0, self._dim).flatten(self._dim, self._dim + 1))
        turned = blocks if self._transposed else [block.t() for block in blocks]
        return turned[0] if len(turned) == 1 else torch.cat(turned, 1)

    def scatter(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[list[torch.Tensor], Pending]:
        """X^T dY, summed: this rank's part of each weight's gradient, when one has waited."""
        dw = x.t() @ dy if self._transposed else dy.t() @ x  # as the weights are stored, side by side
        size, flats = self._wire.axis.size, []
        out = 1 if self._transposed else 0
        for block, shape in zip(dw.split(self.outs, out), self._shapes, strict=True):
            if self._pieces is not None:
                padded = block.new_zeros((size, *shape))
                for part, rows in zip(padded, block.split(list(self._pieces)), strict=True):
                    part[: rows.size(0)] = rows
                flats.append(padded.flatten(1))
            else:
                parts = block.unflatten(self._dim, (size, shape[self._dim]))
                flats.append(parts.movedim(self._dim, 0).reshape(size, -1))  # (l, elements)
        mine, pending = _scatter(flats[0] if len(flats) == 1 else torch.cat(flats, 1), self._wire)
        found = []
        for flat, shape in zip(mine.view(-1).split(self._numels), self._shapes, strict=True):
            part = flat.view(shape)
            found.append(part if self._pieces is None else part[: self._pieces[self._wire.axis.rank]])
        return found, pending
