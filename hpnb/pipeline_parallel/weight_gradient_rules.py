"""Rules for modules whose weight gradients can be computed apart from the gradient of their input.

    y = x A + b                    x (n, in), A (in, out), and dy = dL/dy (n, out)

    dx = dy A^T                    2 n in out FLOPs
    dA = x^T dy,  db = 1^T dy      2 n in out FLOPs, and no part in common with dx

This holds for every matmul, and for a convolution, which is a sum of them. The weight of an nn.Linear is A^T,
that of a Conv1D of transformers A.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


class WeightGradientRule(ABC):
    """Forward and gradients of a module whose parameters are called weight and bias (or None).

    Everything has the dtype of `x`. `dy` is the gradient of the output as `prepare_grad_output` returns it.
    """

    @abstractmethod
    def forward(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the module computes. Not a view, so that it may be changed in place."""

    @abstractmethod
    def prepare_grad_output(self, dy: Tensor) -> Tensor:
        """The gradient of the output in the form that is kept until W."""

    @abstractmethod
    def input_gradient(self, module: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        """dL/dx, in the shape of x."""

    @abstractmethod
    def weight_gradient(self, module: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        """dL/dweight. `weight` may be the parameter or its .grad: only its shape counts."""

    @abstractmethod
    def bias_gradient(self, dy: Tensor) -> Tensor:
        """dL/dbias."""

    def count_uses(self, module: Any, x: Tensor) -> int:
        """How often the forward of `x` uses each weight: once per token for a matmul."""
        return x.numel() // (x.size(-1) or 1) if x.dim() else 1

    def add_weight_gradient(self, grad: Tensor, module: Any, x: Tensor, dy: Tensor) -> None:
        """grad += dL/dweight."""
        grad.add_(self.weight_gradient(module, x, grad, dy))

    def add_bias_gradient(self, grad: Tensor, dy: Tensor) -> None:
        """grad += dL/dbias."""
        grad.add_(self.bias_gradient(dy))


@dataclass(frozen=True)
class MatmulRule(WeightGradientRule):
    """y = x A + b. The weight is A (in, out), or if `transposed` (out, in), as in nn.Linear."""

    transposed: bool

    def forward(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.transposed:
            return F.linear(x, weight, bias)
        y = _flatten_tokens(x) @ weight if bias is None else torch.addmm(bias, _flatten_tokens(x), weight)
        return y.view(*x.shape[:-1], y.size(1)).detach()  # no longer a view

    def prepare_grad_output(self, dy: Tensor) -> Tensor:
        return _flatten_tokens(dy)  # (n, out)

    def input_gradient(self, module: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        return dy.mm(weight if self.transposed else weight.t()).view(x.shape)

    def weight_gradient(self, module: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        return dy.t().mm(_flatten_tokens(x)) if self.transposed else _flatten_tokens(x).t().mm(dy)

    def add_weight_gradient(self, grad: Tensor, module: Any, x: Tensor, dy: Tensor) -> None:
        # With beta = 1 the matmul adds: no temporary, and no second pass over grad.
        if self.transposed:
            grad.addmm_(dy.t(), _flatten_tokens(x))
        else:
            grad.addmm_(_flatten_tokens(x).t(), dy)

    def bias_gradient(self, dy: Tensor) -> Tensor:
        return dy.t().mv(_ones(dy.size(0), dy.dtype, dy.device))

    def add_bias_gradient(self, grad: Tensor, dy: Tensor) -> None:
        # A sum as a product with ones: on a GPU it takes half to nine tenths of sum(0)'s time, and adds.
        grad.addmv_(dy.t(), _ones(dy.size(0), dy.dtype, dy.device))


@dataclass(frozen=True)
class ConvolutionRule(WeightGradientRule):
    """nn.Conv1d, nn.Conv2d and nn.Conv3d, which have so many `dims` of space."""

    dims: int

    def forward(self, module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.dims - 1]
        y = convolve(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)
        return y if x.dim() == self.dims + 2 else y.detach()

    def prepare_grad_output(self, dy: Tensor) -> Tensor:
        return self._batched(dy)

    def input_gradient(self, module: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        return self._gradients(module, x, weight, dy, (True, False, False))[0].view(x.shape)

    def weight_gradient(self, module: Any, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
        if weight.dtype != x.dtype:
            weight = torch.empty_like(weight, dtype=x.dtype)
        return self._gradients(module, x, weight, dy, (False, True, False))[1]

    def bias_gradient(self, dy: Tensor) -> Tensor:
        return dy.sum((0, *range(2, dy.dim())))

    def count_uses(self, module: Any, x: Tensor) -> int:
        """Once per position of the output."""
        sizes = zip(
            x.shape[-self.dims :], module.kernel_size, module.stride, module.padding, module.dilation,
            strict=False,
        )  # fmt: skip
        positions = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in sizes
        )
        uses: int = prod(x.shape[: -self.dims - 1]) * prod(positions)
        return uses

    def _gradients(
        self, module: Any, x: Tensor, weight: Tensor, dy: Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = (module.stride, module.padding, module.dilation, False, [0] * self.dims, module.groups)
        backward = torch.ops.aten.convolution_backward
        gradients: tuple[Tensor, Tensor, Tensor]
        gradients = backward(dy, self._batched(x), weight, None, *settings, wanted)
        return gradients

    def _batched(self, t: Tensor) -> Tensor:
        return t if t.dim() == self.dims + 2 else t.unsqueeze(0)


RULES: dict[type[nn.Module], WeightGradientRule] = {
    nn.Linear: MatmulRule(transposed=True),
    nn.Conv1d: ConvolutionRule(1),
    nn.Conv2d: ConvolutionRule(2),
    nn.Conv3d: ConvolutionRule(3),
}
"""By exact type, since a subclass may use its weight in another way. Add yours: RULES[YourLinear] = ..."""


def rule_of(module: nn.Module) -> WeightGradientRule | None:
    """The rule for `module`, or None."""
    rule = RULES.get(type(module))
    if isinstance(rule, ConvolutionRule) and (
        module.padding_mode != "zeros" or isinstance(module.padding, str)
    ):
        return None  # it pads by another operator
    transformers = sys.modules.get("transformers.pytorch_utils")  # not imported for this
    if rule is None and transformers is not None and type(module) is transformers.Conv1D:
        return MatmulRule(transposed=False)
    return rule


# --- one use of a module ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeferredGradient:
    """The weight gradients of one use of a module, before they are computed from x and dy."""

    rule: WeightGradientRule
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None  # None if there is none, or it is frozen
    x: Tensor
    dy: Tensor
    versions: tuple[int, int]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def add(self) -> None:
        """Add the gradients to .grad."""
        if (self.x._version, self.dy._version) != self.versions:
            which = "input" if self.x._version != self.versions[0] else "gradient of the output"
            raise RuntimeError(
                f"the {which} of a {type(self.module).__name__} was changed in place between I and W, which "
                f"needs it: change a clone (its input has shape {tuple(self.x.shape)})"
            )
        grad = self.weight.grad
        if grad is not None and grad.dtype == self.x.dtype and grad.layout is torch.strided:
            self.rule.add_weight_gradient(grad, self.module, self.x, self.dy)
        else:
            _accumulate(self.weight, self.rule.weight_gradient(self.module, self.x, self.weight, self.dy))
        if self.bias is None:
            return
        grad = self.bias.grad
        if grad is not None and grad.dtype == self.dy.dtype and grad.layout is torch.strided:
            self.rule.add_bias_gradient(grad, self.dy)
        else:
            _accumulate(self.bias, self.rule.bias_gradient(self.dy))


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to .grad as autograd does: a new one gets dtype and strides of the parameter."""
    if parameter.grad is None:
        if gradient.dtype != parameter.dtype or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    elif parameter.grad.layout is torch.strided:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = gradient + parameter.grad


_ones_cache: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}  # for good: CUDA graphs read them


def _ones(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n,). To make one takes as long as the product with it, where a launch is what takes time."""
    key = n, dtype, device
    if key not in _ones_cache:
        ones = torch.ones(n, dtype=dtype, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ones  # only replays fill it
        _ones_cache[key] = ones
    return _ones_cache[key]


def _flatten_tokens(t: Tensor) -> Tensor:
    """(..., c) -> (n, c)."""
    return t if t.dim() == 2 else t.reshape(prod(t.shape[:-1]), t.shape[-1])
