"""One bucket of ZeRO 1 and 2 on one rank: full parameters, and the shards of them that this rank updates.

    parameters   |  a  |    b    | c |pad     one flat tensor, on every rank; each p.data is a view of it
    gradients    |  a  |    b    | c |pad     one flat tensor, summed by a reduce-scatter
    this rank             [ b | c |pad]       its shard of both: shards, and their .grad, are views of it

A step writes this rank's shard of the parameters, and an all-gather brings the others', without a copy.

On one of N ranks, for a bucket of P elements with its padding, there is:

    tensor            elements  lives
    flat              P         always; parameters are views of it
    _shard_in_flat    P/N       always; a view of `flat`
    _shard            P/N       always; `_shard_in_flat`, or a copy on the CPU with offload
    shards            P/N       always; views of `_shard`, one for each parameter
    p.grad            P         from the backward to start_reduction
    _flat_grad        P         from start_reduction to wait_for_reduction; in ZeRO 1 it is `_kept_grad`
    _kept_grad        P         from the first reduction on, in ZeRO 1
    _shard_grad       P/N       from start_reduction to assign_gradients; in ZeRO 1 a view of `_kept_grad`.
                                wait_for_reduction makes it `_offloaded_grad` with offload, and else a copy
                                if the communication dtype is another
    _offloaded_grad   P/N       always, with offload; on the CPU
    shard.grad        P/N       from assign_gradients until it is zeroed or replaced; a view of `_shard_grad`
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from hpnb.background import Background, Pending
from hpnb.data_parallel.buckets import fill_bucket, refuse_sparse
from hpnb.data_parallel.shard_layout import ShardLayout
from hpnb.mesh import Axis
from hpnb.placement import FLAT, Cut, Placement, placement_of, set_placement


class ZeroBucket:
    """Moves `parameters`, which are of one dtype and device, into one flat tensor.

    Args:
        elementwise: parameters may be split anywhere. Otherwise each belongs to one rank.
        keep_gradients: keep the flat gradients from step to step (ZeRO 1). Otherwise they live from
            `start_reduction` to `wait_for_reduction` (ZeRO 2).
        communication_dtype: in which gradients are summed; None is their own dtype.
        offload: shards and their gradients are on the CPU.

    Attributes:
        shards: None for a parameter of which this rank has no elements.
        ranges: for each parameter this rank's elements, [start, stop).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        axis: Axis,
        *,
        elementwise: bool,
        keep_gradients: bool,
        communication_dtype: torch.dtype | None,
        offload: bool,
    ) -> None:
        first = parameters[0]
        self.parameters, self._names, self.axis = tuple(parameters), tuple(names), axis
        # Complex gradients are reduced as they are: a real dtype would drop the imaginary part.
        casts = communication_dtype is not None and first.dtype.is_floating_point
        self._reduce_dtype = communication_dtype if casts else first.dtype
        shapes = tuple(tuple(p.shape) for p in parameters)
        self.layout = ShardLayout(shapes, axis.size, first.element_size(), elementwise)
        self.flat = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        for p, view in zip(parameters, self.layout.views(self.flat), strict=True):
            view.copy_(p.detach())
            p.data = view
        self._addresses = [p.data_ptr() for p in parameters]
        self._shard_in_flat = self.layout.shard(self.flat, axis.rank)  # (shard_numel,)
        self._shard = _copy_to_cpu(self._shard_in_flat) if offload else self._shard_in_flat
        self.ranges = self.layout.ranges(axis.rank)
        views = self._views_in_shard(self._shard)
        self.shards = [
            self._make_shard(p, name, view, span)
            for p, name, view, span in zip(parameters, names, views, self.ranges, strict=True)
        ]
        self._keep_gradients = keep_gradients
        self._kept_grad: torch.Tensor | None = None
        self._offloaded_grad = _copy_to_cpu(self._shard_in_flat) if offload else None
        self._flat_grad: torch.Tensor | None = None
        self._shard_grad: torch.Tensor | None = None
        self._reducing: Pending | None = None

    def _make_shard(
        self, p: nn.Parameter, name: str, view: torch.Tensor, span: tuple[int, int]
    ) -> nn.Parameter | None:
        start, stop = span
        if start == stop:
            return None
        shard = nn.Parameter(view)
        set_placement(shard, placement_of(p, name).cut(self._cut(p, span)))
        return shard

    def _cut(self, p: nn.Parameter, span: tuple[int, int]) -> Cut:
        """The elements of `p` that this rank updates, which may be none."""
        start, stop = span
        if not self.layout.elementwise and p.dim() and start < stop:
            return Cut(self.axis.name, 0, ((0, p.shape[0]),))  # all of it
        return Cut(self.axis.name, FLAT, (span,))

    def shard_placements(self) -> dict[nn.Parameter, Placement]:
        """{parameter: which elements of it, as it is on this rank, are in this rank's shard}."""
        return {
            p: Placement("", tuple(p.shape), (self._cut(p, span),))
            for p, span in zip(self.parameters, self.ranges, strict=True)
        }

    def _views_in_shard(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Of (shard_numel,) one view for each parameter, (1,) for one without dims."""
        views = self.layout.views_in_shard(shard, self.axis.rank)
        return [view if view.dim() else view.view(1) for view in views]

    # --- gradients ----------------------------------------------------------------------------

    def start_reduction(self, background: Background, average: bool, replace: bool) -> None:
        """Take the parameters' gradients and start to reduce-scatter them.

        Args:
            replace: they replace the gradients of shards, instead of adding to them.
        """
        reuses_buffers = self._keep_gradients or self._offloaded_grad is not None
        for shard in self.shards:
            if shard is not None and replace:
                shard.grad = None
            elif shard is not None and shard.grad is not None and reuses_buffers:
                shard.grad = shard.grad.clone()  # out of the buffer that is used again below
        flat, self._shard_grad = self._gradient_buffers()
        scale = 1.0 if background.averages or not average else 1.0 / self.axis.size
        refuse_sparse(self.parameters, self._names)
        fill_bucket(flat, self.layout.views(flat), [p.grad for p in self.parameters], scale)
        for p in self.parameters:
            p.grad = None  # frees full gradients, and nobody takes an unreduced one for a reduced one
        average_on_the_way = average and background.averages
        self._flat_grad = flat
        self._reducing = background.reduce_scatter(self._shard_grad, flat, average_on_the_way)

    def _gradient_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat gradient (numel,), and this rank's shard of the sums (shard_numel,)."""
        if not self._keep_gradients:
            flat = self.flat.new_empty(self.layout.numel, dtype=self._reduce_dtype)
            return flat, flat.new_empty(self.layout.shard_numel)
        if self._kept_grad is None:
            self._kept_grad = torch.zeros_like(self.flat, dtype=self._reduce_dtype)
        return self._kept_grad, self.layout.shard(self._kept_grad, self.axis.rank)

    def wait_for_reduction(self) -> None:
        """Wait for the sums, and free the flat gradient of ZeRO 2. A second call does nothing."""
        if self._reducing is None or self._shard_grad is None:
            return
        self._reducing.wait()
        self._reducing = self._flat_grad = None
        if self._offloaded_grad is not None:
            self._shard_grad = self._offloaded_grad.copy_(self._shard_grad, non_blocking=True)
        else:
            self._shard_grad = self._shard_grad.to(self.flat.dtype)

    def assign_gradients(self, unused: Collection[nn.Parameter]) -> None:
        """Add the sums to .grad of the shards; but not for `unused`, of which no rank has a gradient."""
        assert self._shard_grad is not None
        views = self._views_in_shard(self._shard_grad)
        for p, shard, view in zip(self.parameters, self.shards, views, strict=True):
            if shard is None:
                continue
            if shard.grad is not None:
                shard.grad = view.add_(shard.grad)
            elif p not in unused:
                shard.grad = view
        self._shard_grad = None

    def drop_gradients(self) -> None:
        """Forget gradients that are being reduced."""
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = self._flat_grad = self._shard_grad = None

    def slice_gradients(self) -> None:
        """Let .grad of shards be slices of the parameters' gradients, which DataParallel has reduced."""
        for p, shard, (start, stop) in zip(self.parameters, self.shards, self.ranges, strict=True):
            if shard is not None:
                shard.grad = None if p.grad is None else p.grad.reshape(-1)[start:stop].view(shard.shape)

    # --- parameters ---------------------------------------------------------------------------

    def gather_parameters(self, background: Background) -> Pending:
        """Start to give all ranks what each has updated."""
        if self._shard is not self._shard_in_flat:
            self._shard_in_flat.copy_(self._shard, non_blocking=True)
        return background.all_gather(self.flat, self._shard_in_flat)

    def refresh_offloaded(self) -> None:
        """Copy the parameters as they are now to offloaded shards."""
        if self._shard is not self._shard_in_flat:
            self._shard.copy_(self._shard_in_flat)

    def find_moved(self) -> list[nn.Parameter]:
        """Parameters that have been given other memory since."""
        pairs = zip(self.parameters, self._addresses, strict=True)
        return [p for p, address in pairs if p.data_ptr() != address]

    def tensors_by_category(self) -> dict[str, list[torch.Tensor]]:
        """Gradients of any kind, and offloaded shards: the tensors that are no views of the parameters."""
        grads = [shard.grad for shard in self.shards if shard is not None and shard.grad is not None]
        buffers = (self._kept_grad, self._flat_grad, self._shard_grad, self._offloaded_grad)
        offloaded = [] if self._shard is self._shard_in_flat else [self._shard]
        return {"optimizer": offloaded, "gradients": [*grads, *(t for t in buffers if t is not None)]}


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` on the CPU, in memory that a GPU reads and writes directly."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
