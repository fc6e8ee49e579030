"""Products of matrices that are cut into q x q blocks, over q x q ranks: the matrix product of 2D and 2.5D.

Rank (i, j) of the grid holds block (i, j) of each matrix, and nothing is ever whole anywhere:

    ab     C = A B       C_ij = sum_t  A_it   B_tj       A_it comes across the row, B_tj down the column
    abt    C = A B^T     C_it = sum_j  A_ij   B_tj^T     B_tj comes down; summed across, on place t
    atb    C = A^T B     C_tj = sum_i  A_it^T B_ij       A_it comes across; summed down, on place t

(van de Geijn & Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; as layers of a
transformer Xu et al. 2021, "An efficient 2D method for training super-large deep learning models" (Optimus),
arXiv 2104.05343, section 3.) The gradients of each are the others, so a linear layer needs all three:

    Y = X W      dX = dY W^T  (abt)    dW = X^T dY  (atb)    X: (b s / q, in / q), W: (in / q, out / q)
    Z = X E^T    dX = dZ E    (ab)     dE = dZ^T X  (atb)    E: a table of words, (V / q, h / q)

A panel is the block that all of a row or column use at step t. While panels t are multiplied, panels t + 1
are on their way (two buffers), and the sum of t - 1 is on its way to its owner:

    compute   [ t = 0 ][ t = 1 ][ t = 2 ]
    wire      [ panels 1 ][ panels 2 ]
                       [ sum of 0 ][ sum of 1 ][ sum of 2 ]

A broadcast or reduce of n bytes counts (q-1)/q n (`hpnb.record.traffic`), and there are q panels of each. For
blocks of n_x, n_w, n_z and n_e bytes, forward and backward send from each rank

    Y = X W       across  3 (q-1) n_x        down  3 (q-1) n_w
    Z = X E^T     across  2 (q-1) n_z        down  3 (q-1) n_e

n_z and n_e are means over the panels where words do not divide by q. The gradients of X and E share the
panels of dZ. In 2.5D the d layers of a d x q x q grid do this side by side, each with its own rows, and dW is
summed over depth: 2 (d-1)/d n_w more (Wang et al. 2021, "Tesseract", arXiv 2105.14500, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hpnb.background import Background, Pending
from hpnb.mesh import Axis


class PanelAxis(Background):
    """The collectives that panels need, along one direction of the grid."""

    def reduce(self, tensor: torch.Tensor, to: int) -> Pending:
        """Sum `tensor` on place `to` of the axis, in place; elsewhere it is no good afterwards."""
        last = self.axis.ranks[to]
        return self._start(
            "reduce",
            tensor.nbytes,
            lambda wait: dist.reduce(tensor, last, group=self.axis.group, async_op=not wait),
        )


class SummaGrid:
    """q x q ranks, seen from one of them, and what is common to the layers of a 2.5D grid.

    Args:
        down: the ranks of this column, which have the other i; `down.rank` is i.
        across: the ranks of this row, which have the other j; `across.rank` is j.
        depth: the ranks at (i, j) of the other layers; None for 2D.

    Raises:
        ValueError: rows and columns differ in number.
    """

    def __init__(self, down: Axis, across: Axis, device: torch.device, depth: Axis | None = None) -> None:
        if down.size != across.size:
            raise ValueError(f"{down.size} x {across.size} ranks are no square; use q x q")
        self.down, self.across, self.size = PanelAxis(down, device), PanelAxis(across, device), down.size
        self.depth = Background(depth, device) if depth is not None and depth.size > 1 else None


# --- the three products --------------------------------------------------------------------------------


def ab(a: torch.Tensor, b: torch.Tensor, grid: SummaGrid, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Block (i, j) of A B, without autograd.

    Args:
        a: (m of i, k of j); b: (k of i, n of j). Either may be a transposed view.
        bias: (n of j,), added once to each row; equal along i.
    """
    c: torch.Tensor | None = None
    for _, (left, right) in iterate_panels(grid.size, Panels(a, grid.across, 1), Panels(b, grid.down, 0)):
        if c is None:
            c = left @ right if bias is None else torch.addmm(bias, left, right)
        else:
            c.addmm_(left, right)
    assert c is not None
    return c


def abt(
    a: torch.Tensor, b: torch.Tensor, grid: SummaGrid, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Block (i, j) of A B^T, without autograd: (m of i, n of j).

    Args:
        a: (m of i, k of j); b: (n of i, k of j).
        sizes: n of each i, if they differ.
    """
    sums = PanelSums(grid.across)
    for t, (right,) in iterate_panels(grid.size, Panels(b, grid.down, 0, sizes)):
        sums.add(a @ right.t(), t)
    return sums.own()


def atb(
    a: torch.Tensor, b: torch.Tensor, grid: SummaGrid, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Block (i, j) of A^T B, without autograd: (m of i, n of j).

    Args:
        a: (k of i, m of j); b: (k of i, n of j).
        sizes: m of each j, if they differ.
    """
    sums = PanelSums(grid.down)
    for t, (left,) in iterate_panels(grid.size, Panels(a, grid.across, 1, sizes)):
        sums.add(left.t() @ b, t)
    return sums.own()


def gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    grid: SummaGrid,
    for_x: bool,
    for_w: bool,
    transposed: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX = dY W^T and dW = X^T dY in one go, so that each computes while the other's panels travel.

    dW is as its weight is stored: (in, out) if `transposed`, else (out, in).
    """
    if not for_x and not for_w:
        return None, None
    sums_x, sums_w = PanelSums(grid.across), PanelSums(grid.down)
    panels = ([Panels(w, grid.down, 0)] if for_x else []) + ([Panels(x, grid.across, 1)] if for_w else [])
    for t, (first, *rest) in iterate_panels(grid.size, *panels):
        if for_x:
            sums_x.add(dy @ first.t(), t)
        if for_w:
            left = rest[0] if for_x else first
            sums_w.add(left.t() @ dy if transposed else dy.t() @ left, t)
    return sums_x.own() if for_x else None, sums_w.own() if for_w else None


# --- panels --------------------------------------------------------------------------------------------


class Panels:
    """The blocks of one row or column of the grid, one after the other, in two buffers.

    Args:
        block: this rank's, 2 dims; a transposed view is sent as it lies in memory.
        dim: in which the blocks may differ.
        sizes: of that dim, by place.
    """

    def __init__(
        self, block: torch.Tensor, wire: PanelAxis, dim: int, sizes: Sequence[int] | None = None
    ) -> None:
        self._turned = not block.is_contiguous() and block.t().is_contiguous()
        self._own = block.t() if self._turned else block.contiguous()
        self._wire, self._dim, self._sizes = wire, 1 - dim if self._turned else dim, sizes
        self._buffers: dict[int, torch.Tensor] = {}
        self.place = wire.axis.rank

    def start(self, t: int) -> tuple[torch.Tensor, Pending]:
        """Panel t, which is there when one has waited. Panel t - 2 is gone then."""
        here = self._own
        if t != self.place:
            shape = list(here.shape)
            if self._sizes is not None:
                shape[self._dim] = self._sizes[t]
            here = self._buffer(t % 2, shape)
        pending = self._wire.broadcast(here, t) if here.numel() else Pending()
        return here.t() if self._turned else here, pending

    def _buffer(self, which: int, shape: list[int]) -> torch.Tensor:
        if which not in self._buffers:
            most = list(shape)
            if self._sizes is not None:
                most[self._dim] = max(self._sizes)
            self._buffers[which] = self._own.new_empty(most[0] * most[1])
        return self._buffers[which][: shape[0] * shape[1]].view(shape)


def iterate_panels(steps: int, *panels: Panels) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """(t, panels t), while panels t + 1 are on their way."""
    coming = [source.start(0) for source in panels]
    given = []  # this rank's own, which it need not wait for to use
    for t in range(steps):
        here = coming
        coming = [source.start(t + 1) for source in panels] if t + 1 < steps else []
        for source, (_, pending) in zip(panels, here, strict=True):
            if t == source.place:
                given.append(pending)
            else:
                pending.wait()
        yield t, tuple(panel for panel, _ in here)
    for pending in given:
        pending.wait()


class PanelSums:
    """Sums over a row or column of the grid, each on its way to its owner while the next one is computed."""

    def __init__(self, wire: PanelAxis) -> None:
        self._wire = wire
        self._mine: torch.Tensor | None = None
        self._last: tuple[torch.Tensor, Pending] | None = None  # its memory is lent until it has arrived

    def add(self, part: torch.Tensor, to: int) -> None:
        """This rank's part of what place `to` will have; nobody uses it any more."""
        pending = self._wire.reduce(part, to) if part.numel() else Pending()
        self._wait()
        self._last = (part, pending)
        if to == self._wire.axis.rank:
            self._mine = part

    def own(self) -> torch.Tensor:
        self._wait()
        assert self._mine is not None
        return self._mine

    def _wait(self) -> None:
        if self._last is not None:
            self._last[1].wait()
            self._last = None
