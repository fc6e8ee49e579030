"""A layer norm whose hidden size is sharded over q ranks: it sums two numbers per token over the ranks.

    y = x' g + b,   x' = (x - m) / sqrt(v + e)       m, v: mean and variance over the hidden size h

    forward     m   = 1/q sum_j m_j                  m_j, v_j: of the h / q values that rank j has
                v   = 1/q sum_j (v_j + m_j^2) - m^2
    backward    dx  = (dx' - mean(dx') - x' mean(dx' x')) / sqrt(v + e),     dx' = dy g

(Ba et al. 2016, arXiv 1607.06450; sharded along the hidden size, Xu et al. 2021, arXiv 2104.05343, section
3.2.) In float32 the difference v would lose its digits where m is large beside sqrt(v), so the forward sends
float64 numbers. For n tokens a rank sends

    2 (q-1)/q * 2 n * 8 bytes in the forward, 2 (q-1)/q * 2 n * (4 bytes, or 8 of float64) in the backward.

dg = sum over tokens of dy x' and db = sum of dy cover this rank's samples: whoever uses the norm sums them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpnb.gradients import differentiable_once
from hpnb.mesh import Axis
from hpnb.tensor_parallel.all_reduce_in_place import all_reduce_in_place
from hpnb.tensor_parallel.async_weight_grads import NO_SECOND_DERIVATIVE
from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum


class ShardedLayerNorm(nn.Module):
    """Replaces an nn.LayerNorm over h, whose weights are sharded already.

    Args:
        hidden_axis: the axis along which h is sharded, evenly.
        grad_sum: sums the gradients of scale and shift over shards of the batch; None if each rank
            has the full batch.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, old: nn.LayerNorm, hidden_axis: Axis, grad_sum: ReplicatedGradSum | None) -> None:
        super().__init__()
        self.eps, self.hidden_axis, self.grad_sum = old.eps, hidden_axis, grad_sum
        self.register_parameter("weight", old.weight)
        self.register_parameter("bias", old.bias)
        self.train(old.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor | None = self.weight
        bias: torch.Tensor | None = self.bias
        if self.grad_sum is not None:
            weight, bias = self.grad_sum.weight(weight), self.grad_sum.weight(bias)
        if self.hidden_axis.size == 1:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        y: torch.Tensor = _ShardedLayerNorm.apply(x, weight, bias, self.hidden_axis, self.eps)
        return y

    def extra_repr(self) -> str:
        return f"ranks={self.hidden_axis.size}, eps={self.eps}"


class _ShardedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # (..., h / q)
        weight: torch.Tensor | None,  # (h / q,)
        bias: torch.Tensor | None,
        hidden_axis: Axis,
        eps: float,
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        v_j, m_j = torch.var_mean(wide, -1, correction=0)  # (...)
        m, v = sums = torch.stack([m_j, v_j]).double()  # (2, ...)
        v.addcmul_(m, m)
        _average(sums, hidden_axis)
        rsqrt = v.addcmul_(m, m, value=-1).clamp_(min=0).add_(eps).rsqrt_()
        scale, shift = rsqrt.to(wide.dtype).unsqueeze(-1), (m * rsqrt).neg_().to(wide.dtype).unsqueeze(-1)
        y = torch.addcmul(shift, wide, scale)  # x' of the formula
        if weight is not None:
            y = y * weight if bias is None else torch.addcmul(bias.to(y.dtype), y, weight.to(y.dtype))
        ctx.hidden_axis = hidden_axis
        ctx.save_for_backward(x, weight, bias, shift, scale)
        return y.to(_output_dtype(x, weight, bias))

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, shift, scale = ctx.saved_tensors
        dy = dy.to(scale.dtype)
        normed = torch.addcmul(shift, x.to(scale.dtype), scale)
        dx = d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            d_weight = (dy * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = dy.flatten(0, -2).sum(0).to(bias.dtype)
        if ctx.needs_input_grad[0]:
            d_normed = dy.clone() if weight is None else dy * weight
            means = torch.stack([d_normed.mean(-1), (d_normed * normed).mean(-1)])  # (2, ...)
            first, second = _average(means, ctx.hidden_axis).unsqueeze(-1)
            dx = d_normed.sub_(first).addcmul_(normed, second, value=-1).mul_(scale).to(x.dtype)
        return dx, d_weight, d_bias, None, None


def _average(numbers: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Over the ranks of `axis`, in place."""
    if numbers.numel():
        all_reduce_in_place(numbers, axis)
    return numbers.div_(axis.size)


def _output_dtype(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.dtype:
    """The dtype that PyTorch's own layer norm would give; under autocast that differs between devices."""
    if not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    return F.layer_norm(x.new_zeros((1, x.size(-1))), x.shape[-1:], weight, bias).dtype
