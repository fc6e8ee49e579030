"""How hidden states lie on a grid: the batch is sharded over some axes, the hidden size over another.

    (b, s, h)   batch along "tp.0", hidden size along "tp.1"    ->   (b / q, s, h / q) on each rank of q x q

The batch is sharded along one axis after the other: shard r0 * n1 + r1 where the axes have n0 and n1 ranks.
Tokens stay together because attention mixes them, and so does the width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.models import Role

T = TypeVar("T")


@dataclass(frozen=True)
class ActivationLayout:
    """Of the hidden states, or the logits, of one model on one grid.

    Attributes:
        batch_axes: the axes along which the batch is sharded, the outermost first.
        hidden_axis: the axis along which the last dim is sharded.
    """

    batch_axes: tuple[Axis, ...]
    hidden_axis: Axis

    @property
    def batch_shards(self) -> int:
        """Into how many shards the batch is split."""
        return prod(axis.size for axis in self.batch_axes)

    def split_batch(self, x: torch.Tensor) -> torch.Tensor:
        """(b, ...), equal along `batch_axes` -> this rank's samples. Backward gathers."""
        for axis in self.batch_axes:
            x = comm.split(x, axis, 0)
        return x

    def narrow_batch(self, x: torch.Tensor) -> torch.Tensor:
        """(b, ...) -> this rank's samples, of something that needs no gradient: a view."""
        for axis in self.batch_axes:
            size = x.size(0) // axis.size
            x = x.narrow(0, axis.rank * size, size)
        return x

    def gather_batch(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's samples -> (b, ...), on all ranks, which go on alike. Backward takes a slice."""
        for axis in reversed(self.batch_axes):
            x = comm.gather(x, axis, 0)
        return x

    def gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """This rank's samples and slice of the last dim -> (b, ..., width), on all ranks."""
        return self.gather_batch(comm.gather(x, self.hidden_axis, -1, width))

    def sum_over_batch(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over shards of the batch, on all ranks, which go on alike."""
        for axis in self.batch_axes:
            x = comm.all_reduce(x, axis)
        return x


def before_and_after(role: Role, hidden: T, inner: T) -> tuple[T, T]:
    """What holds of the inputs and of the outputs of a column or row.

    Args:
        hidden: what holds between the regions of a block, in front of a column and behind a row.
        inner: what holds inside a region, between the two.
    """
    return (hidden, inner) if role.kind == "column" else (inner, hidden)
