"""The norm of all gradients of a model that is split over ranks: every element counts once.

    norm = sqrt( sum over parameters p, over the distinct elements of p.grad, of g^2 )

A gradient that is sharded along an axis has its other elements on the axis's other ranks, so its squares are
summed over the axis. A replicated one has the same elements on every rank, so they are not. A tied parameter
shares its gradient with another one and is left out. `Placement` says which is which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.placement import check_axes, placement_of
from hpnb.ranks.current_rank import device as this_device


def total_norm(parameters: Iterable[torch.Tensor], axes: Sequence[Axis] = ()) -> torch.Tensor:
    """The 2-norm of all gradients, each element counted once: (), float32, or float64 if a parameter is.

    Every rank of `axes` calls it, and gets the same number. Without a gradient anywhere it is 0. The axes
    of a tensor-parallel model are `hpnb.tensor_parallel.axes(model)`, and not mesh.tp on a grid.
    """
    distinct = list({id(p): p for p in parameters}.values())
    check_axes(distinct, axes)
    squares = _sum_squares(distinct, axes)
    for i, axis in enumerate(axes):
        if axis.size > 1:
            sharded_here = [mask for mask in range(len(squares)) if mask >> i & 1]
            sums = squares[sharded_here]
            dist.all_reduce(sums, group=axis.group)
            squares[sharded_here] = sums
    is_double = any(p.dtype == torch.float64 for p in distinct)
    return squares.sum().sqrt().to(torch.float64 if is_double else torch.float32)


def _sum_squares(parameters: Sequence[torch.Tensor], axes: Sequence[Axis]) -> torch.Tensor:
    """(2^axes,): sums of squares of this rank's gradients, by the set of axes along which they are sharded.

    The message has this shape and float64 on every rank, whatever parameters a rank has.
    """
    grads: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for p in parameters:
        placement = placement_of(p)
        if p.grad is not None and placement.tied_to is None:
            mask = sum(1 << i for i, axis in enumerate(axes) if axis.name in placement.axes)
            grads[mask, p.grad.device, p.grad.dtype].append(p.grad)
    sums = torch.zeros(1 << len(axes), dtype=torch.float64, device=this_device())
    for (mask, _, dtype), group in grads.items():
        norms = torch._foreach_norm(group, 2, dtype=torch.promote_types(dtype, torch.float32))
        sums[mask] += torch.stack(norms).to(sums).square().sum()
    return sums
