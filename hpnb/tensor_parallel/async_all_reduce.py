"""The all-reduce in the backward of a tensor-parallel region overlaps the region's weight gradients.

    x --enter_region--> x' --> column (x' A) --> ... --> row (y B) --> z

A region begins where x is prepared for a column-parallel layer and ends where the outputs of a row-parallel
layer are summed. Its backward ends with the gradient of x, which must be all-reduced (or reduce-scattered)
before anything upstream can use it. Autograd would already have computed dA and dB by then, and nothing would
be left to overlap the all-reduce with. So the backwards of the two layers compute dx alone and keep the
operands of dA and dB; the backward of `enter_region` computes these while its all-reduce runs:

    compute          [dx of row][ ... ][dx of column][dA of column][dB of row][ upstream
    communication                                    [ all-reduce of dx      ]

Megatron-LM overlaps the all-reduce with dA; here dB joins it. The weights pass through `enter_region` on
their way to the layers, so it is the node that returns their gradients. These are ordinary gradients of an
ordinary backward: hooks, gradient accumulation and activation checkpointing work unchanged.

A backward of which autograd makes a graph (create_graph=True, as of a gradient penalty) postpones nothing. It
computes all gradients where they arise, by functions that have a backward: that of a collective is what the
forward sends at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from hpnb import comm
from hpnb.background import Pending
from hpnb.gradients import refuse_second_derivative
from hpnb.tensor_parallel.per_backward_list import PerBackwardList
from hpnb.tensor_parallel.sharded_linear import ShardedLinear

StartedCollective = tuple[torch.Tensor, Pending, torch.Tensor]
"""A collective under way: its result, what to wait for, and the tensor being sent, which must live on."""


@dataclass(frozen=True)
class RegionEntry:
    """What happens to x where a region begins, and to dx at the same place; see `SequenceSharding`."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], StartedCollective]

    def differentiable_backward(self, dx: torch.Tensor) -> torch.Tensor:
        """`backward` to its end, as a function that has a backward."""
        return comm.with_backward(dx, self._finished_backward, self.forward)

    def _finished_backward(self, dx: torch.Tensor) -> torch.Tensor:
        dx, pending, _send_buffer = self.backward(dx.clone())  # _send_buffer must live until pending.wait()
        pending.wait()
        return dx


@dataclass(frozen=True)
class RegionExit:
    """What happens to z where a region ends, and to dz at the same place; see `SequenceSharding`."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], torch.Tensor]
    keep_slice: Callable[[torch.Tensor], torch.Tensor]  # of what `backward` gives, what dz was

    def differentiable_backward(self, dz: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`backward` as functions with a backward: for the operands of a matrix, which differ between ranks,
        and for a bias, of which all ranks compute the same gradient."""
        summed = comm.with_backward(dz, self.backward, lambda y: self.forward(y.clone()))
        return summed, comm.with_backward(dz, self.backward, self.keep_slice)


NO_COMMUNICATION = RegionEntry(lambda x: x, lambda grad: (grad, Pending(), grad))


@dataclass(frozen=True)
class DeferredWeightGrad:
    """The operands of a layer's weight and bias gradients, kept for the backward of `enter_region`.

    Attributes:
        operands: (input, gradient of the output), as matrices, of each use of the layer in a backward.
    """

    transposed: bool
    dtype: torch.dtype
    operands: PerBackwardList[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=PerBackwardList)

    def compute(self, for_weight: bool, for_bias: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(weight gradient, bias gradient), None for those that are not needed."""
        d_weight: torch.Tensor | None = None
        d_bias: torch.Tensor | None = None
        operands = self.operands.take()
        while operands:
            x, dy = operands.pop(0)  # which frees them one by one
            if for_weight:
                product = (x.t() @ dy if self.transposed else dy.t() @ x).to(self.dtype)
                d_weight = product if d_weight is None else d_weight + product
            if for_bias:
                # One matmul. A vector that is made in a capture would have no values outside of its graph.
                make_ones = _ones.__wrapped__ if _is_captured(dy) else _ones
                column_sums = (dy.t() @ make_ones(len(dy), dy.dtype, dy.device)).to(self.dtype)
                d_bias = column_sums if d_bias is None else d_bias + column_sums
        return d_weight, d_bias


@dataclass(frozen=True)
class WeightsWithDeferredGrads:
    """A layer's weight and bias for one forward; their gradients come from `enter_region`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    adds_bias: bool
    deferred: DeferredWeightGrad


def enter_region(
    x: torch.Tensor, layers: Sequence[ShardedLinear], entry: RegionEntry
) -> tuple[torch.Tensor, list[WeightsWithDeferredGrads]]:
    """(x as the region's layers take it, the weights that `layers` use for this forward)."""
    deferred = [DeferredWeightGrad(layer.transposed, layer.weight.dtype) for layer in layers]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    entered, *views = _EnterRegion.apply(x, entry, deferred, *parameters)
    pairs = zip(layers, views[::2], views[1::2], deferred, strict=True)
    return entered, [
        WeightsWithDeferredGrads(weight, bias, layer.adds_bias, d) for layer, weight, bias, d in pairs
    ]


class _EnterRegion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        entry: RegionEntry,
        deferred: list[DeferredWeightGrad],
        *parameters: torch.Tensor | None,
    ) -> Any:
        ctx.entry, ctx.deferred = entry, deferred
        ctx.set_materialize_grads(False)
        entered = entry.forward(x)
        outputs: list[torch.Tensor | None] = [entered.view_as(x) if entered is x else entered]
        outputs += [p if p is None else p.view_as(p) for p in parameters]
        pairs = zip((x, *parameters), outputs, strict=True)
        ctx.mark_non_differentiable(*(out for p, out in pairs if p is not None and not p.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor | None, *weight_grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return None if dx is None else ctx.entry.differentiable_backward(dx), None, None, *weight_grads
        needs_grad, pending = ctx.needs_input_grad, Pending()
        if dx is not None:
            dx, pending, _send_buffer = ctx.entry.backward(dx)  # _send_buffer must live until pending.wait()
        grads: list[torch.Tensor | None] = []
        for deferred, for_weight, for_bias in zip(
            ctx.deferred, needs_grad[3::2], needs_grad[4::2], strict=True
        ):
            grads += deferred.compute(for_weight, for_bias)
        pending.wait()
        grads = [_add(a, b) for a, b in zip(grads, weight_grads, strict=True)]
        return None if dx is None else dx.contiguous(), None, None, *grads


def linear_deferring_weight_grad(
    x: torch.Tensor, layer: WeightsWithDeferredGrads, region_exit: RegionExit | None = None
) -> torch.Tensor:
    """x A + b, (..., in) -> (..., out), whose backward computes the gradient of x alone.

    Args:
        region_exit: set for a row-parallel layer, with which its region ends.
    """
    y: torch.Tensor = _Linear.apply(x, layer.weight, layer.bias, layer.adds_bias, layer.deferred, region_exit)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adds_bias: bool,
        deferred: DeferredWeightGrad,
        region_exit: RegionExit | None,
    ) -> torch.Tensor:
        dtype = autocast_dtype(x)
        ctx.deferred, ctx.region_exit = deferred, region_exit
        ctx.dtype, ctx.casts = x.dtype, dtype is not None
        if dtype is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        y = apply_linear(x, weight, bias if adds_bias else None, deferred.transposed)
        y = y.data if y._is_view() else y  # torch 2.11 makes a view, which could not be changed in place
        return y if region_exit is None else region_exit.forward(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, dy)
        (x, weight), deferred = ctx.saved_tensors, ctx.deferred
        if ctx.region_exit is not None:
            dy = ctx.region_exit.backward(dy)
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx = (dy @ (weight.t() if deferred.transposed else weight)).to(ctx.dtype) if for_x else None
        if not (for_weight or for_bias):
            return dx, *[None] * 5
        deferred.operands.append((x.flatten(0, -2), dy.flatten(0, -2)))
        d_weight = placeholder_grad(weight.shape, deferred.dtype, weight.device) if for_weight else None
        d_bias = placeholder_grad(dy.shape[-1:], deferred.dtype, weight.device) if for_bias else None
        return dx, d_weight, d_bias, None, None, None


def _differentiable_gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """What the backward of `_Linear` returns, and autograd can differentiate again."""
    if ctx.casts:  # what it has saved are copies, which lead to no weight
        refuse_second_derivative(
            "tensor parallelism under autocast",
            "it keeps 16-bit copies of weights; use precision='fp32' or 'bf16'",
        )
    (x, weight), transposed = ctx.saved_tensors, ctx.deferred.transposed
    dy_of_bias = dy
    if ctx.region_exit is not None:
        dy, dy_of_bias = ctx.region_exit.differentiable_backward(dy)
    for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
    rows, d_rows = x.flatten(0, -2), dy.flatten(0, -2)
    d_weight = (rows.t() @ d_rows if transposed else d_rows.t() @ rows) if for_weight else None
    d_bias = dy_of_bias.flatten(0, -2).sum(0) if for_bias else None
    dx = dy @ (weight.t() if transposed else weight) if for_x else None
    return dx, d_weight, d_bias, None, None, None


def _add(computed: torch.Tensor | None, passed: torch.Tensor | None) -> torch.Tensor | None:
    """A weight's gradient: what this backward has computed, and what its other uses passed on. After
    create_graph=True, `passed` is a real gradient, from the graph of the first backward."""
    if passed is None or _is_placeholder(passed):
        return computed
    return passed if computed is None else computed + passed


def _is_placeholder(grad: torch.Tensor) -> bool:
    return grad.data_ptr() == _zero(grad.dtype, grad.device).data_ptr()


def placeholder_grad(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zero, expanded to a weight's shape: tells autograd that a gradient is due, and takes no memory."""
    return _zero(dtype, device).expand(shape)


def _is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def _ones(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(n, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """To what autocast casts the operands of a matmul with x; None if it is off. It leaves float64 alone."""
    is_on = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if is_on else None


def apply_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """x A + b for a weight (out, in), or (in, out) if `transposed`."""
    return F.linear(x, weight.t() if transposed else weight, bias)
