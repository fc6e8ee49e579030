"""One bucket of ZeRO on one rank: parameters whole, and the pieces of them that this rank steps.

    parameters   |  a  |    b    | c |pad     one flat tensor that every rank has; each p.data is a view of it
    gradients    |  a  |    b    | c |pad     one flat tensor, summed over the ranks by a reduce-scatter
    this rank             [ b | c |pad]       its share of both: pieces, and their .grad, are views of it

A step writes this rank's share of the parameters, and an all-gather the others': no copy on either side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from hpnb import placement
from hpnb.background import Background, Pending
from hpnb.data_parallel.reducer import fill
from hpnb.data_parallel.shard_layout import shard_layout_of
from hpnb.mesh import Axis
from hpnb.placement import placement_of, set_placement


class ZeroBucket:
    """Moves `parameters`, which are of one dtype and device, into one flat tensor.

    Args:
        whole: every parameter belongs to one rank.
        keep: hold on to the flat gradients from step to step (stage 1); otherwise they live from `start` to
            `collect` (stage 2).
        wire: dtype in which gradients travel.
        offload: pieces and their gradients live on the CPU.

    Attributes:
        flat: (shares.numel,), the parameters.
        pieces: one a parameter, None where this rank has no element of it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        axis: Axis,
        *,
        whole: bool,
        keep: bool,
        wire: torch.dtype | None,
        offload: bool,
    ) -> None:
        first = parameters[0]
        self.parameters, self.axis = tuple(parameters), axis
        self.wire = first.dtype if wire is None else wire
        self.shares = shard_layout_of(parameters, axis.size, whole)
        self.flat = torch.zeros(self.shares.numel, dtype=first.dtype, device=first.device)
        for p, view in zip(parameters, self.shares.views(self.flat), strict=True):
            view.copy_(p.detach())
            p.data = view
        self._addresses = [p.data_ptr() for p in parameters]
        self.mine = self.shares.mine(self.flat, axis.rank)  # (share,)
        self.home = _on_cpu(self.mine) if offload else self.mine  # (share,): where pieces live
        self.ranges = self.shares.pieces(axis.rank)
        self.pieces = [
            self._piece(p, name, view, span)
            for p, name, view, span in zip(parameters, names, self.views(self.home), self.ranges, strict=True)
        ]
        self._keep = keep
        self._kept: torch.Tensor | None = None  # the flat gradients of stage 1
        self._landing = _on_cpu(self.mine) if offload else None  # their share of an offloaded bucket
        self._flat: torch.Tensor | None = None  # gradients on their way
        self._share: torch.Tensor | None = None  # what becomes of them
        self._pending: Pending | None = None

    def _piece(
        self, p: nn.Parameter, name: str, view: torch.Tensor, span: tuple[int, int]
    ) -> nn.Parameter | None:
        start, stop = span
        if start == stop:
            return None
        piece = nn.Parameter(view)
        set_placement(piece, placement_of(p, name).cut(self._cut(p, span)))
        return piece

    def _cut(self, p: nn.Parameter, span: tuple[int, int]) -> placement.Cut:
        """The elements of `p` that this rank holds, which may be none."""
        start, stop = span
        if self.shares.whole and p.dim() and start < stop:
            return placement.Cut(self.axis.name, 0, ((0, p.shape[0]),))  # all of it, and nothing elsewhere
        return placement.Cut(self.axis.name, placement.FLAT, (span,))

    def shard_placements(self) -> dict[nn.Parameter, placement.Placement]:
        """{parameter: which elements of it, as it is on this rank, belong to this rank's piece}."""
        return {
            p: placement.Placement("", tuple(p.shape), (self._cut(p, span),))
            for p, span in zip(self.parameters, self.ranges, strict=True)
        }

    def views(self, share: torch.Tensor) -> list[torch.Tensor]:
        """Of (share,) one view a parameter: its piece, as the optimizer sees it."""
        found = self.shares.piece_views(share, self.axis.rank)
        return [view if view.dim() else view.view(1) for view in found]

    # --- gradients ----------------------------------------------------------------------------

    def start(self, background: Background, average: bool, fresh: bool) -> None:
        """Take the parameters' gradients and begin to sum them; `fresh` forgets earlier backwards."""
        for piece in self.pieces:
            if piece is not None and piece.grad is not None:
                # What is reused below must not be what is still needed.
                reused = self._keep or self._landing is not None
                piece.grad = None if fresh else piece.grad.clone() if reused else piece.grad
        self._flat, self._share = self._buffers()
        here = 1.0 if background.averages or not average else 1.0 / self.axis.size  # else on the way
        fill(self._flat, self.shares.views(self._flat), [p.grad for p in self.parameters], here)
        for p in self.parameters:
            p.grad = None  # an unreduced gradient under that name would be a trap
        on_the_way = average and background.averages
        self._pending = background.reduce_scatter(self._share, self._flat, on_the_way)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole gradients (numel,) and this rank's share of their sum."""
        if not self._keep:
            flat = self.flat.new_empty(self.shares.numel, dtype=self.wire)
            return flat, flat.new_empty(self.shares.share)
        if self._kept is None:
            self._kept = torch.zeros_like(self.flat, dtype=self.wire)
        return self._kept, self.shares.mine(self._kept, self.axis.rank)

    def collect(self) -> None:
        """Wait for the sums; whole gradients are free from here on. A second call does nothing."""
        if self._pending is None or self._share is None:
            return
        self._pending.wait()
        self._pending = self._flat = None
        if self._landing is not None:
            self._share = self._landing.copy_(self._share, non_blocking=True)
        else:
            self._share = self._share.to(self.flat.dtype)

    def hand_out(self, nowhere: Collection[nn.Parameter]) -> None:
        """Give every piece its part of the sums, added to what it has; none where no rank had a gradient."""
        assert self._share is not None
        for p, piece, view in zip(self.parameters, self.pieces, self.views(self._share), strict=True):
            if piece is None:
                continue
            if piece.grad is not None:
                piece.grad = view.add_(piece.grad)
            elif p not in nowhere:
                piece.grad = view
        self._share = None

    def drop(self) -> None:
        """Forget gradients that are on their way."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = self._flat = self._share = None

    def cut_gradients(self) -> None:
        """Let pieces see the parameters' own gradients, which somebody else has reduced."""
        for p, piece, (start, stop) in zip(self.parameters, self.pieces, self.ranges, strict=True):
            if piece is not None:
                grad = None if p.grad is None else p.grad.reshape(-1)[start:stop].view(piece.shape)
                piece.grad = grad

    # --- parameters ---------------------------------------------------------------------------

    def gather(self, background: Background) -> Pending:
        """Give all ranks what each has stepped."""
        if self.home is not self.mine:
            self.mine.copy_(self.home, non_blocking=True)
        return background.all_gather(self.flat, self.mine)

    def gather_pieces(
        self, pieces: Sequence[torch.Tensor | None], dtype: torch.dtype, background: Background
    ) -> list[torch.Tensor]:
        """One full tensor per parameter, from what every rank has for its pieces. All ranks call it."""
        share = torch.zeros(self.shares.share, dtype=dtype, device=self.flat.device)
        for view, piece in zip(self.views(share), pieces, strict=True):
            if piece is not None:
                view.copy_(piece.view_as(view))
        flat = share.new_empty(self.shares.numel)
        background.all_gather(flat, share).wait()
        return self.shares.views(flat)

    def refresh(self) -> None:
        """Take offloaded pieces from the parameters as they are."""
        if self.home is not self.mine:
            self.home.copy_(self.mine)

    def moved(self) -> list[nn.Parameter]:
        """Parameters that have been given other memory since."""
        pairs = zip(self.parameters, self._addresses, strict=True)
        return [p for p, address in pairs if p.data_ptr() != address]

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Gradients of any kind, and offloaded pieces: what is no view of the parameters."""
        grads = [piece.grad for piece in self.pieces if piece is not None and piece.grad is not None]
        flats = [t for t in (self._kept, self._flat, self._share, self._landing) if t is not None]
        return {"optimizer": [] if self.home is self.mine else [self.home], "gradients": [*grads, *flats]}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` on the CPU, in memory that a GPU reads and writes directly."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
