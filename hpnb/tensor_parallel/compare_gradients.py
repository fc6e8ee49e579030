"""The gradient of replicated hidden states is equal on all ranks. If it is not, something lacks a sum.

    x (equal on all ranks) -> block -> z         dL/dx must be equal on all ranks, as x is

1D tensor parallelism sums the gradients of what column-parallel layers read. It cannot see a replicated
tensor that meets a sharded one further on, as in `down(up(x) * gate)` with a gate for each token. There each
rank has a summand of the gate's gradient, and everything below trains wrongly without an error. So the first
backward of a registered model compares the gradient at the input of each block, once. It costs a message of h
numbers, the sum of the tokens' gradients under fixed signs, r = sum_i s_i g_i with s_i = +1 or -1: averaged
over signs, such a sketch keeps the norm of any difference.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.tensor_parallel.module_hooks import tensors_of


def compare_first_gradient(name: str, block: nn.Module, axis: Axis) -> None:
    """In its first backward, raise ValueError if the gradient of the block's input differs between ranks."""

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(tensors_of(module, args, kwargs), None)
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
                hooks.pop(before.id, None)  # of a copy of the block, too, which `before.remove` does not know
            hidden = _sketch(x.detach()) if x.dim() else None
            x.register_hook(lambda grad: _compare(grad, name, axis, hidden))

    before = block.register_forward_pre_hook(watch, with_kwargs=True)


def _compare(grad: torch.Tensor | None, name: str, axis: Axis, hidden: torch.Tensor | None = None) -> None:
    """Raise if `grad` differs between ranks; `hidden` is the sketch of what the block got, which may, too."""
    if grad is None or not grad.dim() or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    distance = _distance(_sketch(grad.detach()), axis)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-2}.get(grad.dtype, 0.1)  # roundings of many blocks
    if distance > tolerance:  # NaN, as after an overflow, is not
        if hidden is not None and (apart := _distance(hidden, axis)) > tolerance:
            raise ValueError(
                f"the hidden states that {name} gets differ between the {axis.size} ranks of {axis.name}, by "
                f"{apart:.0%} of their norm, so the model would train wrongly. In front of {name}, a forward "
                "reads other rows or columns of a sharded weight than it means, as of a table of positions "
                "that it slices: give such a table the role embedding(path, vocabulary=False)"
            )
        raise ValueError(
            f"the gradient of the hidden states that {name} gets differs between the {axis.size} ranks of "
            f"{axis.name}, by {distance:.0%} of its norm, so the model would train wrongly. In {name}, a "
            "tensor that all ranks have alike meets a sharded one between a column and its row: multiply or "
            "add it after the row, or compute it by a linear whose role has partial_outputs"
        )


def _distance(sketch: torch.Tensor, axis: Axis) -> float:
    """The largest distance of another rank's sketch from rank 0's, over the largest norm."""
    gathered = sketch.new_empty(axis.size * len(sketch))
    dist.all_gather_into_tensor(gathered, sketch, group=axis.group)
    sketches = gathered.view(axis.size, -1)
    return float((sketches - sketches[0]).norm(dim=1).max() / sketches.norm(dim=1).max())


def _sketch(grad: torch.Tensor) -> torch.Tensor:
    """(..., h) -> (h,)."""
    vectors = grad.reshape(-1, grad.size(-1)).to(torch.promote_types(grad.dtype, torch.float32))  # (n, h)
    bits = torch.arange(len(vectors), device=grad.device) * 2_654_435_761 >> 15 & 1  # Knuth's hash
    return (1 - 2 * bits).to(vectors.dtype) @ vectors
