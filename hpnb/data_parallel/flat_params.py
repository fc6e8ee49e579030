"""Parameters that are whole while their unit computes; at all other times each rank has its share of them.

    share (n/p,)      -- all-gather ---->   flat (n,), of which the whole parameters are views
    share.grad (n/p,) <- reduce-scatter --  flat gradient (n,), once the unit's backward is through

Every parameter exists twice. The *share* is the module's own Parameter, with this rank's elements as its
data; it is what the optimizer knows. The *whole* one has the full shape, and takes its place for the forward
and the backward. Shares are views of one tensor and whole parameters of another, so the gather copies nothing
before or after itself; gradients are copied once, by one kernel.

After Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), stage 3; freeing by resizing a storage to nothing is
Zhao et al. 2023, *PyTorch FSDP* (arXiv 2304.11277), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from hpnb.background import Background, Pending
from hpnb.data_parallel.reducer import fill
from hpnb.data_parallel.shard_layout import ShardLayout
from hpnb.gradients import attach
from hpnb.mesh import Axis
from hpnb.placement import FLAT, Cut, placement_of, set_placement


@dataclass(frozen=True)
class FSDPPolicy:
    """In which form parameters and gradients travel.

    Attributes:
        device: where a unit computes.
        dtype: in which it computes; None is that of its parameters.
        communication_dtype: in which gradients are summed; None is that in which it computes.
        average: divide sums of gradients by the number of ranks.
        offload: shares and their gradients lie in the memory of the CPU.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    average: bool = True
    offload: bool = False


class FlatParam:
    """Parameters that are gathered by one call: those of a unit that have one dtype, trained or frozen.

    Args:
        named: {name: parameter}, which become this rank's shares; they take the values of the axis's rank 0.
        complete: called in a backward when the last of the gradients has come.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        axis: Axis,
        wire: Background,
        policy: FSDPPolicy,
        complete: Callable[[FlatParam], None],
    ) -> None:
        self._wire, self._policy, self._complete = wire, policy, complete
        self.names, self.shares = list(named), list(named.values())
        dtype = self.shares[0].dtype
        compute = policy.dtype if policy.dtype is not None and dtype.is_floating_point else dtype
        # Complex gradients travel as they are: a real dtype would drop the imaginary part.
        sent = (policy.communication_dtype or compute) if compute.is_floating_point else compute
        itemsize = min(dtype.itemsize, compute.itemsize, sent.itemsize)
        layout = ShardLayout(tuple(tuple(p.shape) for p in self.shares), axis.size, itemsize)
        self._share = self._start(layout, axis, policy)  # (n/p,)

        flat = torch.empty(layout.numel, dtype=compute, device=policy.device)
        # With .data, for that has a version counter of its own: autograd must not take the next gather for a
        # change of what it saved, since it brings the same values back.
        self.wholes = [nn.Parameter(view.data, p.requires_grad)
                       for view, p in zip(layout.views(flat), self.shares, strict=True)]  # fmt: skip
        self._flat, self._flat_bytes = flat, flat.nbytes
        # Another dtype or device: converted straight into its place in `flat`.
        self._converts = compute != dtype or policy.offload
        self._mine = layout.mine(flat, axis.rank)
        self._pending = Pending()
        self._release(flat)
        self.is_whole = False

        self._scale = 1.0 / axis.size if policy.average and not wire.averages and axis.size > 1 else 1.0
        self._gradient, self._gradient_views = torch.empty(0), list[torch.Tensor]()
        self._gradient_bytes, self._layout, self._sent = layout.numel * sent.itemsize, layout, sent
        self._reduced: tuple[Pending, torch.Tensor] | None = None
        self.holds = False  # gradients that have not been reduced
        self.ready = False  # gathered, and waited for
        self._hooked: set[nn.Parameter] = set()
        self._count()

    def _start(self, layout: ShardLayout, axis: Axis, policy: FSDPPolicy) -> torch.Tensor:
        """Make parameters into shares with the values of rank 0; returns what the shares are views of."""
        dtype, home = self.shares[0].dtype, torch.device("cpu") if policy.offload else policy.device
        if all(p.is_meta for p in self.shares):
            share = torch.zeros(layout.share, dtype=dtype, device=home)
        else:
            whole = torch.zeros(layout.numel, dtype=dtype, device=policy.device)
            for view, p in zip(layout.views(whole), self.shares, strict=True):
                if not p.is_meta:
                    view.copy_(p.detach())
            if axis.size > 1:
                dist.broadcast(whole, src=axis.ranks[0], group=axis.group)
            share = layout.mine(whole, axis.rank).to(home, copy=True)
        if policy.offload and policy.device.type == "cuda":
            share = share.pin_memory()
        self._cut_at = _cuts(layout, axis.rank)
        parts = share.split(self._cut_at)[1::2]
        pieces = layout.pieces(axis.rank)
        for name, p, part, piece in zip(self.names, self.shares, parts, pieces, strict=True):
            where = placement_of(p, name).cut(Cut(axis.name, FLAT, (piece,)))
            p.grad = None
            if p.is_meta:  # .data cannot change from meta to real; swapping keeps the object too
                torch.utils.swap_tensors(p, nn.Parameter(part, p.requires_grad))
            else:
                p.data = part
            set_placement(p, where)
        self._seen_at = [(p, p.data_ptr(), p.dtype) for p in self.shares if p.numel()]
        return share

    def refresh(self) -> None:
        """Follow what was frozen or thawed since the last time."""
        changed = False
        for share, whole in zip(self.shares, self.wholes, strict=True):
            if share.requires_grad != whole.requires_grad:
                whole.requires_grad_(share.requires_grad)
                changed = True
        if changed:
            self._count()

    def _count(self) -> None:
        trained = [w for w in self.wholes if w.requires_grad]
        for whole in trained:
            if whole not in self._hooked:
                attach([whole], self._grown, keep=False)  # hooks of the module do
                self._hooked.add(whole)
        self.trains, self.has_frozen = len(trained), len(trained) < len(self.wholes)
        self.missing = self.trains

    def moved(self) -> str | None:
        """The name of a share that is no longer where it was put, if somebody has replaced its data."""
        for share, at, dtype in self._seen_at:
            if share.data_ptr() != at or share.dtype != dtype:
                return next(n for n, p in zip(self.names, self.shares, strict=True) if p is share)
        return None

    # --- parameters -------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather the whole parameters, unless they are here."""
        if self.is_whole:
            return
        self.is_whole = True
        self._flat.untyped_storage().resize_(self._flat_bytes)
        if self._converts:
            self._mine.copy_(self._share, non_blocking=True)
        self._pending = self._wire.all_gather(self._flat, self._mine if self._converts else self._share)

    def wait(self) -> None:
        self._pending.wait()
        self.ready = self.is_whole

    def free(self) -> None:
        """Let the whole parameters go; what autograd saved are views of them, and sees them come again."""
        if self.is_whole:
            self._pending.wait()
            self._release(self._flat)
            self.is_whole = self.ready = False

    @staticmethod
    def _release(flat: torch.Tensor) -> None:
        flat.untyped_storage().resize_(0)
        flat.detach()  # a recorder of memory looks at what operators return, and learns the new size

    # --- gradients --------------------------------------------------------------------------

    def _grown(self, whole: torch.Tensor) -> None:
        if not self.ready or (whole.grad is not None and whole.grad.is_sparse):
            self._refuse(whole)
        self.holds = True
        self.missing -= 1
        if self.missing == 0:
            self._complete(self)

    def _refuse(self, whole: torch.Tensor) -> None:
        name = next(n for n, w in zip(self.names, self.wholes, strict=True) if w is whole)
        if self.ready:
            raise ValueError(f"the gradient of {name} is sparse; use nn.Embedding(sparse=False)")
        raise RuntimeError(
            f"the gradient of {name} came before its unit was gathered again, so it is wrong: a forward left "
            "a tensor elsewhere (in an attribute?) that the loss uses. Return it from the forward"
        )

    def drop(self) -> None:
        """Forget gradients that have not been reduced."""
        if self._reduced is not None:
            self._reduced[0].wait()
            self._reduced = None
            self._release(self._gradient)
        for whole in self.wholes:
            whole.grad = None
        self.holds, self.missing = False, self.trains

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; one that is missing counts as zero."""
        if not self._gradient_views:
            self._gradient = torch.empty(self._layout.numel, dtype=self._sent, device=self._flat.device)
            self._gradient_views = self._layout.views(self._gradient)
        else:
            self._gradient.untyped_storage().resize_(self._gradient_bytes)
        fill(self._gradient, self._gradient_views, [whole.grad for whole in self.wholes], self._scale)
        for whole in self.wholes:
            whole.grad = None
        self.holds = False
        mine = torch.empty(self._layout.share, dtype=self._sent, device=self._flat.device)
        average = self._policy.average and self._wire.averages
        self._reduced = self._wire.reduce_scatter(mine, self._gradient, average), mine

    def finish(self, used: Sequence[bool] | None = None) -> None:
        """Wait for the sums, and put this rank's share of them into (or add it to) .grad of the shares.

        Args:
            used: for each parameter, whether any rank has a gradient of it; without one, .grad stays None.
        """
        assert self._reduced is not None
        (pending, mine), self._reduced = self._reduced, None
        pending.wait()
        self._release(self._gradient)
        if self._converts or mine.dtype != self._share.dtype:
            pinned = self._share.is_pinned() if self._policy.offload else False
            here = torch.empty_like(self._share, pin_memory=pinned)
            here.copy_(mine, non_blocking=pinned)
            mine = here
        olds, news = [], []
        parts = mine.split(self._cut_at)[1::2]
        for i, (share, part) in enumerate(zip(self.shares, parts, strict=True)):
            if not share.requires_grad or (used is not None and not used[i]):
                continue
            if share.grad is None:
                share.grad = part
            else:
                olds.append(share.grad)
                news.append(part)
        if olds:
            if mine.is_pinned():
                torch.cuda.current_stream().synchronize()
            torch._foreach_add_(olds, news)


def _cuts(layout: ShardLayout, rank: int) -> list[int]:
    """Sizes that split a share into what lies between the pieces, and the pieces, in turn."""
    sizes, at = [], 0
    for start, shape, (begin, end) in zip(layout.offsets, layout.shapes, layout.pieces(rank), strict=True):
        gap = start + begin - rank * layout.share - at if prod(shape) and end > begin else 0
        sizes += [gap, end - begin]
        at += gap + end - begin
    return [*sizes, layout.share - at]
