"""Gradients of replicated weights that each rank uses on other tokens: layer norms and biases are summed.

    y = norm(x) * g + b       x: this rank's tokens; g and b: equal on all ranks
    dg = sum over ranks of sum over its tokens of dy * norm(x)

Each such gradient is a vector, too small for a message of its own, and every block has a few. So all those of
a block go through one autograd node, whose backward sums them in one all-reduce:

    g1, b1, c1, g2, b2, c2 --_SumGradients--> the same, used in the block

As a part of the graph it sums each backward's gradients once, also where gradients accumulate, and hooks on a
parameter see the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpnb.comm import all_reduce
from hpnb.mesh import Axis
from hpnb.tensor_parallel.all_reduce_in_place import all_reduce_in_place


class ReplicatedGradSum:
    """Sums the gradients of one block's replicated weights over `axes`.

    grad_sum.begin()                       # at the start of the block's forward
    norm(x) * grad_sum.weight(g)           # outside of a block's forward, g gets a node and a message alone
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = tuple(axis for axis in axes if axis.size > 1)
        self.members: list[tuple[nn.Module, str]] = []  # the weights: module and attribute
        self._summed: dict[nn.Parameter, torch.Tensor] = {}

    def add(self, module: nn.Module, *names: str) -> None:
        self.members += [(module, name) for name in names]

    def begin(self) -> None:
        """Make the node for the forward that begins."""
        parameters = (module._parameters[name] for module, name in self.members)
        trained = list(dict.fromkeys(p for p in parameters if p is not None and p.requires_grad))
        if self.axes and trained and torch.is_grad_enabled():
            self._summed = dict(zip(trained, _SumGradients.apply(self.axes, *trained), strict=True))

    def end(self) -> None:
        self._summed = {}

    @property
    def is_begun(self) -> bool:
        """Whether the forward of its block runs now, with gradients."""
        return bool(self._summed)

    def weight(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """`parameter` as a layer is to use it, so that its gradient is summed."""
        if parameter is None or parameter in self._summed:
            return parameter if parameter is None else self._summed[parameter]  # type: ignore[index]
        # A layer runs by itself, or is recomputed for a backward without its block's hooks: it sums alone.
        if self.axes and parameter.requires_grad and torch.is_grad_enabled():
            (summed,) = _SumGradients.apply(self.axes, parameter)
            return summed  # type: ignore[no-any-return]
        return parameter


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axes: tuple[Axis, ...], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axes = axes
        ctx.shapes = [(w.shape, w.dtype) for w in weights]
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype = grads[0].dtype
        for grad in grads:
            dtype = torch.promote_types(dtype, grad.dtype)
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in grads])
        for axis in ctx.axes:
            if torch.is_grad_enabled():  # create_graph=True: the sum needs a backward
                flat = all_reduce(flat, axis)
            else:
                all_reduce_in_place(flat, axis)
        flat_sums = flat.split([shape.numel() for shape, _ in ctx.shapes])
        sums = [s.view(shape).to(dtype) for s, (shape, dtype) in zip(flat_sums, ctx.shapes, strict=True)]
        return None, *sums
