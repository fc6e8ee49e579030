"""SUMMA: products of matrices in q x q blocks over q x q ranks, for 2D and 2.5D tensor parallelism.

Rank (i, j) of the grid holds block (i, j) of each matrix, and no rank ever holds a full matrix:

    ab     C = A B       C_ij = sum_t  A_it   B_tj       A_it comes along the row, B_tj along the column
    abt    C = A B^T     C_it = sum_j  A_ij   B_tj^T     B_tj comes along the column; summed on the row's t-th
    atb    C = A^T B     C_tj = sum_i  A_it^T B_ij       A_it comes along the row; summed on the column's t-th

(van de Geijn & Watts 1997, "SUMMA: scalable universal matrix multiplication algorithm"; as layers of a
transformer Xu et al. 2021, "An efficient 2D method for training super-large deep learning models" (Optimus),
arXiv 2104.05343, section 3.) The gradients of each are the others, so a linear layer needs all three:

    Y = X W      dX = dY W^T  (abt)    dW = X^T dY  (atb)    X: (b s / q, in / q), W: (in / q, out / q)
    Z = X E^T    dX = dZ E    (ab)     dE = dZ^T X  (atb)    E: an embedding, (V / q, h / q)

`ab` and `abt` are functions below. atb is not, because a layer computes it together with its other gradient,
step by step: of Y in `linear_gradients`, of Z in `_Logits2D.backward` (`tp_2d_linear.py`).

A panel is the block that a whole row or column of ranks uses at step t. While panels t are multiplied, panels
t + 1 are on their way (two buffers), and so is the sum of t - 1:

    compute          [ t = 0 ][ t = 1 ][ t = 2 ]
    communication    [ panels 1 ][ panels 2 ]
                              [ sum of 0 ][ sum of 1 ][ sum of 2 ]

A broadcast or reduce of n bytes counts (q-1)/q n (`hpnb.record.traffic`), and there are q panels of each. For
blocks of n_x, n_w, n_z and n_e bytes, forward and backward send from each rank

    Y = X W       along the row  3 (q-1) n_x        along the column  3 (q-1) n_w
    Z = X E^T     along the row  2 (q-1) n_z        along the column  3 (q-1) n_e

n_z and n_e are means over the panels if V does not divide by q. The gradients of X and E share the panels of
dZ. In 2.5D the d grids of d x q x q ranks do this side by side, each with other samples, and dW is summed
over depth: 2 (d-1)/d n_w more (Wang et al. 2021, "Tesseract", arXiv 2105.14500, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hpnb.background import Background, Pending
from hpnb.mesh import Axis


class PanelAxis(Background):
    """The collectives that panels need, along a row or column of the grid."""

    def reduce(self, tensor: torch.Tensor, index: int) -> Pending:
        """Sum `tensor` in place on rank `index` of the axis; elsewhere its values are lost."""
        target = self.axis.ranks[index]
        return self._start(
            "reduce",
            tensor.nbytes,
            lambda wait: dist.reduce(tensor, target, group=self.axis.group, async_op=not wait),
        )


class SummaGrid:
    """q x q ranks, seen from one of them, and the depth of a 2.5D grid.

    Args:
        down: the ranks of this rank's column, with all i; `down.rank` is i.
        across: the ranks of this rank's row, with all j; `across.rank` is j.
        depth: the ranks at (i, j) of all d grids; None for 2D.
    """

    def __init__(self, down: Axis, across: Axis, device: torch.device, depth: Axis | None = None) -> None:
        if down.size != across.size:
            raise ValueError(f"{down.size} x {across.size} ranks are no square; use q x q")
        self.down, self.across, self.size = PanelAxis(down, device), PanelAxis(across, device), down.size
        self.depth = Background(depth, device) if depth is not None and depth.size > 1 else None


# --- the products --------------------------------------------------------------------------------------


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
    return sums.result()


def linear_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    grid: SummaGrid,
    for_x: bool,
    for_w: bool,
    transposed: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dX = dY W^T and dW = X^T dY together, so that each computes while the other's panels are on their way.

    dW has the shape of its weight as it is stored: (in, out) if `transposed`, else (out, in).
    """
    if not for_x and not for_w:
        return None, None
    sums_x, sums_w = PanelSums(grid.across), PanelSums(grid.down)
    panels = ([Panels(w, grid.down, 0)] if for_x else []) + ([Panels(x, grid.across, 1)] if for_w else [])
    for t, (first, *rest) in iterate_panels(grid.size, *panels):
        if for_x:
            sums_x.add(dy @ first.t(), t)
        if for_w:
            x_panel = rest[0] if for_x else first
            sums_w.add(x_panel.t() @ dy if transposed else dy.t() @ x_panel, t)
    return sums_x.result() if for_x else None, sums_w.result() if for_w else None


# --- panels --------------------------------------------------------------------------------------------


class Panels:
    """The blocks of one row or column of the grid, one after the other, in two buffers.

    Args:
        block: this rank's, 2 dims; a transposed view is sent as it lies in memory.
        dim: in which the blocks may differ.
        sizes: of that dim, by the index of the rank in the row or column.
    """

    def __init__(
        self, block: torch.Tensor, axis: PanelAxis, dim: int, sizes: Sequence[int] | None = None
    ) -> None:
        self._transposed = not block.is_contiguous() and block.t().is_contiguous()
        self._block = block.t() if self._transposed else block.contiguous()
        self._axis, self._dim, self._sizes = axis, 1 - dim if self._transposed else dim, sizes
        self._buffers: dict[int, torch.Tensor] = {}
        self.index = axis.axis.rank

    def start(self, t: int) -> tuple[torch.Tensor, Pending]:
        """Start to broadcast panel t: (panel, what to wait for). Panel t - 2 is overwritten."""
        panel = self._block
        if t != self.index:
            shape = list(panel.shape)
            if self._sizes is not None:
                shape[self._dim] = self._sizes[t]
            panel = self._buffer(t % 2, shape)
        pending = self._axis.broadcast(panel, t) if panel.numel() else Pending()
        return panel.t() if self._transposed else panel, pending

    def _buffer(self, which: int, shape: list[int]) -> torch.Tensor:
        if which not in self._buffers:
            largest = list(shape)
            if self._sizes is not None:
                largest[self._dim] = max(self._sizes)
            self._buffers[which] = self._block.new_empty(largest[0] * largest[1])
        return self._buffers[which][: shape[0] * shape[1]].view(shape)


def iterate_panels(steps: int, *panels: Panels) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    """(t, panels t), while panels t + 1 are on their way."""
    upcoming = [source.start(0) for source in panels]
    sending = []  # of this rank's block, which it may use without waiting
    for t in range(steps):
        current = upcoming
        upcoming = [source.start(t + 1) for source in panels] if t + 1 < steps else []
        for source, (_, pending) in zip(panels, current, strict=True):
            if t == source.index:
                sending.append(pending)
            else:
                pending.wait()
        yield t, tuple(panel for panel, _ in current)
    for pending in sending:
        pending.wait()


class PanelSums:
    """Sums over a row or column of the grid, each on its way to its rank while the next one is computed."""

    def __init__(self, axis: PanelAxis) -> None:
        self._axis = axis
        self._result: torch.Tensor | None = None
        self._previous: tuple[torch.Tensor, Pending] | None = None  # keeps its memory until it was sent

    def add(self, summand: torch.Tensor, index: int) -> None:
        """Start to sum `summand` on rank `index` of the axis. The caller may not use it any more."""
        pending = self._axis.reduce(summand, index) if summand.numel() else Pending()
        self._wait()
        self._previous = (summand, pending)
        if index == self._axis.axis.rank:
            self._result = summand

    def result(self) -> torch.Tensor:
        """This rank's sum."""
        self._wait()
        assert self._result is not None
        return self._result

    def _wait(self) -> None:
        if self._previous is not None:
            self._previous[1].wait()
            self._previous = None
