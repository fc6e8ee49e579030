"""How hidden states lie on a grid: rows of the batch over some axes, width over another.

    (b, s, h)   rows cut along "tp.0", width along "tp.1"    ->   (b / q, s, h / q) on each rank of q x q

Rows are cut along one axis after the other: row share r0 * n1 + r1 where the axes have n0 and n1 ranks.
Tokens stay together, for attention mixes them, and so does the width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from hpnb import comm
from hpnb.mesh import Axis


@dataclass(frozen=True)
class ActivationLayout:
    """Hidden states, or logits, of one model on one grid.

    Attributes:
        rows: the axes along which rows are cut, the outermost first.
        width: the axis along which the last dim is cut.
    """

    rows: tuple[Axis, ...]
    width: Axis

    @property
    def shares(self) -> int:
        """Into how many parts the rows fall."""
        return prod(axis.size for axis in self.rows)

    def deal(self, x: torch.Tensor) -> torch.Tensor:
        """(b, ...), equal along `rows` -> this rank's rows. Backward gathers."""
        for axis in self.rows:
            x = comm.split(x, axis, 0)
        return x

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """(b, ...) -> this rank's rows, of something that needs no gradient: a view."""
        for axis in self.rows:
            share = x.size(0) // axis.size
            x = x.narrow(0, axis.rank * share, share)
        return x

    def whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows -> (b, ...), on all ranks, which go on alike. Backward takes the own rows."""
        for axis in reversed(self.rows):
            x = comm.gather(x, axis, 0)
        return x

    def whole(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Rows and width -> (b, ..., width), on all ranks, which go on alike."""
        return self.whole_rows(comm.gather(x, self.width, -1, width))

    def over_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the row shares, where all ranks go on alike."""
        for axis in self.rows:
            x = comm.all_reduce(x, axis)
        return x
