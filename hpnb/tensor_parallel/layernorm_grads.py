"""Weights that every rank has whole, but uses on a share of the tokens: their gradients must be summed.

    y = norm(x) * g + b       x: this rank's tokens; g and b: equal on all ranks
    dg = sum over ranks of sum over its tokens of dy * norm(x)

Each such gradient is a vector, too small to be worth a message of its own, and every block has a few. So all
of a block go through one node, whose backward sends them in one all-reduce:

    g1, b1, c1, g2, b2, c2 --together--> the same, used in the block

Being part of the graph, it sums each backward's gradients once, also where gradients accumulate, and hooks
on a parameter see the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from hpnb.mesh import Axis
from hpnb.record.recorder import communication


class ReplicatedGradSum:
    """The weights of one block that are summed over `axes`, as its layers use them.

    shared.begin()                     # at the start of the block's forward
    norm(x) * shared.used(g)           # outside of a block's forward g has a node and a message alone
    """

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = tuple(axis for axis in axes if axis.size > 1)
        self.homes: list[tuple[nn.Module, str]] = []  # whose weights: module and name
        self._used: dict[nn.Parameter, torch.Tensor] = {}

    def begin(self) -> None:
        """Make the node for the forward that begins."""
        held = (module._parameters[name] for module, name in self.homes)
        trained = list(dict.fromkeys(p for p in held if p is not None and p.requires_grad))
        if self.axes and trained and torch.is_grad_enabled():
            self._used = dict(zip(trained, _Together.apply(self.axes, *trained), strict=True))

    def end(self) -> None:
        self._used = {}

    def used(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        if weight is None or weight in self._used:
            return weight if weight is None else self._used[weight]  # type: ignore[index]
        # A layer runs by itself, or once more for a backward without its block's hooks: a sum of its own.
        if self.axes and weight.requires_grad and torch.is_grad_enabled():
            (alone,) = _Together.apply(self.axes, weight)
            return alone  # type: ignore[no-any-return]
        return weight


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axes: tuple[Axis, ...], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.axes = axes
        ctx.shapes = [(w.shape, w.dtype) for w in weights]
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wide = grads[0].dtype
        for grad in grads:
            wide = torch.promote_types(wide, grad.dtype)
        flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads])
        for axis in ctx.axes:
            with communication("all_reduce", axis.name, flat.nbytes, axis.ranks):
                dist.all_reduce(flat, group=axis.group)
        parts = flat.split([shape.numel() for shape, _ in ctx.shapes])
        found = [p.view(shape).to(kind) for p, (shape, kind) in zip(parts, ctx.shapes, strict=True)]
        return None, *found
