"""A sum over the ranks in place, outside of autograd, that a recorder sees."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.record.recorder import communication


def all_reduce_in_place(
    x: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Sum `x` over the ranks of `axis`, or what `op` says, and return it."""
    if axis.size > 1:
        with communication("all_reduce", axis.name, x.nbytes, axis.ranks):
            dist.all_reduce(x, op, group=axis.group)
    return x
