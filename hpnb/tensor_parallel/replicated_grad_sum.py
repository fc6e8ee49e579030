"""Replicated weights that each rank uses on other tokens, heads or samples: their gradients are summed.

    y = norm(x) * g + b       x: this rank's tokens, say; g and b: equal on all ranks
    dg = sum over ranks of sum over its tokens of dy * norm(x)

Each such gradient is a vector, too small for a message of its own, and every block has a few. So all those of
a block go through one autograd node, whose backward sums them in one all-reduce:

    g1, b1, c1, g2, b2, c2 --_SumGradients--> the same, used in the block

As a part of the graph it sums each backward's gradients once, also where gradients accumulate, and hooks on a
parameter see the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
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
        if parameter is None:
            return None
        if parameter in self._summed:
            return self._summed[parameter]  # type: ignore[index]
        # A layer runs by itself, or is recomputed for a backward without its block's hooks: it sums alone.
        if self.axes and parameter.requires_grad and torch.is_grad_enabled():
            (alone,) = _SumGradients.apply(self.axes, parameter)
            return alone  # type: ignore[no-any-return]
        return parameter


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axes: tuple[Axis, ...], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axes = axes
        ctx.shapes = [(w.shape, w.dtype) for w in weights]
        ctx.set_materialize_grads(False)  # a weight that the forward has not used gets None, as without ranks
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        used = [grad for grad in grads if grad is not None]  # of the same weights on all ranks
        if not used:
            return (None,) * (1 + len(grads))
        dtype = reduce(torch.promote_types, (grad.dtype for grad in used))
        flat = torch.cat([grad.reshape(-1).to(dtype) for grad in used])
        for axis in ctx.axes:
            if torch.is_grad_enabled():  # create_graph=True: the sum needs a backward
                flat = all_reduce(flat, axis)
            else:
                all_reduce_in_place(flat, axis)
        sums = iter(flat.split([grad.numel() for grad in used]))
        shapes = zip(grads, ctx.shapes, strict=True)
        return None, *(
            None if g is None else next(sums).view(shape).to(dtype) for g, (shape, dtype) in shapes
        )
