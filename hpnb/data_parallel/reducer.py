"""Sums gradients over the ranks of an axis, bucket by bucket, while the backward still runs.

    backward   ...  g9 g8 | g7 g6 g5 | g4 g3 ...          bucket 0 is full at the first bar
    wire            [ bucket 0 ][ bucket 1  ][ ...        and travels while the backward goes on

All ranks must send the same buckets in the same order, or collectives would meet the wrong partner: bucket k
leaves when it and all before it are full, even if a later one is full already. After Li et al. 2020, *PyTorch
Distributed*, section 3.2 (arXiv 2006.15704).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from hpnb.background import Background, Pending, wait_all
from hpnb.data_parallel.buckets import assign_buckets
from hpnb.mesh import Axis
from hpnb.record.recorder import apart

SMALL = 16384  # elements of a gradient in the mean: below, calls cost more than bytes


class Reducer:
    """A `GradientSink` that all-reduces: after `finish`, .grad is the sum (or mean) over the axis.

    Args:
        parameters: {name: parameter} in the order of the model.
        axis: whose ranks hold replicas.
        bucket_mb: at most so many MB (2^20 bytes) travel at once.
        average: divide by the number of ranks, which gives the mean of the ranks' means: right where all
            have equally many samples. Otherwise sum, with losses divided by the global count.
        find_unused: a parameter without a gradient counts as zero, instead of being an error. Costs one
            small all-reduce a step, by which all ranks agree on what none of them used.
        static: every step uses the same parameters, in the same order: what the first step finds unused
            stays so without asking again, and the buckets follow the order in which its gradients came.
        as_view: .grad is a view of its bucket; False gives it memory of its own, for a copy a step.
        overlap: send a bucket as soon as it is full; False sends all at the end.
        check: compare the reduced gradients of all ranks after every step.
        copy_engines: of `Background`.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        axis: Axis,
        bucket_mb: float = 25.0,
        *,
        average: bool = True,
        find_unused: bool = False,
        static: bool = False,
        as_view: bool = True,
        overlap: bool = True,
        check: bool = False,
        copy_engines: bool = False,
    ) -> None:
        self.axis, self.average, self.find_unused = axis, average, find_unused
        self.static, self.as_view, self.overlap, self.check = static, as_view, overlap, check
        self._copy_engines = copy_engines
        self.names = {p: name for name, p in parameters.items() if p.requires_grad}
        self._number = {id(p): i for i, p in enumerate(self.names)}  # a tensor's own hash is slow
        self._bucket_mb = bucket_mb
        self._background: dict[torch.device, Background] = {}
        self._summed: set[int] = set()  # numbers of parameters whose .grad is a sum over all ranks already
        self._learned = False  # of a static graph: its order, and what it does not use, here and anywhere
        self._idle: frozenset[torch.nn.Parameter] = frozenset()
        self._nowhere: frozenset[torch.nn.Parameter] = frozenset()
        self._arrange(list(reversed(self.names)))

    def _arrange(self, order: Sequence[torch.nn.Parameter]) -> None:
        self.buckets = assign_buckets(order, self._bucket_mb)
        bucket_of = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        self._bucket_of = [bucket_of[id(p)] for p in self.names]
        self._flat = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in self.buckets]
        self._views = [b.views(flat) for b, flat in zip(self.buckets, self._flat, strict=True)]
        for flat in self._flat:
            if flat.device not in self._background:
                self._background[flat.device] = Background(self.axis, flat.device, self._copy_engines)
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._ready: dict[int, None] = {}  # numbers of parameters, in the order in which they came
        self._sent: list[Pending] = []
        self._absent: list[torch.nn.Parameter] = []  # what was sent as zeros, for want of a gradient

    # --- the sink ---------------------------------------------------------------------------

    def grows(self, parameter: torch.nn.Parameter) -> None:
        """Its gradient is about to be added to. Where gradients are summed, and not averaged, a sum that all
        ranks have would be summed again: rank 0's is kept."""
        number = self._number[id(parameter)]
        if number in self._summed:
            self._summed.discard(number)
            if self.axis.rank:
                parameter.grad = None

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """Count a gradient; send every bucket whose turn has come. It runs for every parameter: be short.

        Raises:
            RuntimeError: it was ready in this backward already.
        """
        number = self._number[id(parameter)]
        if number in self._ready:
            raise RuntimeError(
                f"the gradient of {self.names[parameter]} was ready twice in one backward; with checkpoints, "
                "use_reentrant=False"
            )
        self._ready[number] = None
        if self._summed:
            self._summed.discard(number)
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        if self.overlap and not self._missing[bucket]:
            while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
                self._send(len(self._sent))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all, and put the sums where the gradients were.

        Raises:
            RuntimeError: parameters without a gradient (unless `find_unused`), by name.
        """
        # What an earlier backward of this step has used has a gradient; what is frozen by now needs none.
        silent = [p for number, p in enumerate(self.names) if number not in self._ready]
        frozen = frozenset(p for p in silent if not p.requires_grad)
        unused = [p for p in silent if p.grad is None and p not in frozen]
        with apart():
            try:
                if unused and not self.find_unused:
                    raise RuntimeError(about_unused([self.names[p] for p in unused], len(self.names)))
                for p in silent:
                    self.grows(p)
                while len(self._sent) < len(self.buckets):
                    self._send(len(self._sent))
                nowhere = self._used_nowhere(unused) | frozen
                wait_all(self._sent)
                if self._absent or nowhere or not (self.as_view and self.average):  # else all is in its place
                    for index in range(len(self.buckets)):
                        self._hand_back(index, nowhere)
                if self.check:
                    self._compare()
                if self.static and not self._learned:
                    self._learn(nowhere)
            finally:
                self.drop()

    def drop(self) -> None:
        """Forget what a backward that failed has left behind."""
        wait_all(self._sent)  # nothing may be filled again while it is being sent
        self._reset()

    # --- one bucket -------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, index: int) -> None:
        bucket, flat, views = self.buckets[index], self._flat[index], self._views[index]
        if bucket.dtype != flat.dtype or bucket.device != flat.device:
            raise RuntimeError(
                f"parameters were {flat.dtype} on {flat.device} when wrapped, and are {bucket.dtype} on "
                f"{bucket.device} now; cast or move the model before, not after"
            )
        background = self._background[flat.device]
        here = 1.0 if background.averages or not self.average else 1.0 / self.axis.size  # else on the way
        grads = [p.grad for p in bucket.parameters]
        for p, grad in zip(bucket.parameters, grads, strict=True):
            if grad is None:
                self._absent.append(p)
            elif grad.is_sparse:
                raise ValueError(
                    f"{self.names[p]} has a sparse gradient, which has no place in a bucket; use "
                    "nn.Embedding(sparse=False)"
                )
        fill(flat, views, grads, here)
        if self.as_view:
            for p, view in zip(bucket.parameters, views, strict=True):
                if p.grad is not None:
                    p.grad = view  # what autograd made is free from here on
        self._sent.append(background.all_reduce(flat, self.average and background.averages))

    def _hand_back(self, index: int, nowhere: Collection[torch.nn.Parameter]) -> None:
        for p, view in zip(self.buckets[index].parameters, self._views[index], strict=True):
            if p in nowhere:
                p.grad = None
            elif self.as_view:
                p.grad = view
            elif p.grad is None:
                p.grad = view.clone()
            else:
                p.grad.copy_(view)
            if not self.average and p.grad is not None:
                self._summed.add(self._number[id(p)])

    # --- agreement --------------------------------------------------------------------------

    def _used_nowhere(self, unused: Sequence[torch.nn.Parameter]) -> frozenset[torch.nn.Parameter]:
        """Parameters that no rank has a gradient of: it stays None, as on one process."""
        if not self.find_unused:
            return frozenset()
        if self.static and self._learned:
            if changed := frozenset(unused) ^ self._idle:
                raise RuntimeError(
                    f"{self.names[next(iter(changed))]} and {len(changed) - 1} more parameters are used in "
                    "this step and were not in the first, or the other way round: leave static_graph out"
                )
            return self._nowhere
        self._idle = frozenset(unused)
        return used_nowhere(list(self.names), unused, self.axis)

    def _learn(self, nowhere: frozenset[torch.nn.Parameter]) -> None:
        """Take over the order of the first step, rank 0's, so that buckets fill one after the other."""
        self._learned, self._nowhere = True, nowhere
        came = dict.fromkeys([*self._ready, *range(len(self.names))])
        order = torch.tensor(list(came), device=self._flat[0].device)
        if self.axis.size > 1:
            dist.broadcast(order, src=self.axis.ranks[0], group=self.axis.group)
        by_number = list(self.names)  # the gradients at hand stay what they are, where they are
        self._arrange([by_number[i] for i in order.tolist()])

    def _compare(self) -> None:
        real = [torch.view_as_real(flat) if flat.is_complex() else flat for flat in self._flat]
        sums = torch.stack([flat.double().sum() for flat in real])
        sums = sums.nan_to_num(nan=math.pi)  # nan differs from itself, and an overflow is no disagreement
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.axis.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.axis.group)
        if not torch.equal(low, high):
            off = [i for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)) if a != b]
            raise RuntimeError(f"after the reduction the ranks of {self.axis.name} differ in buckets {off}")


# --- what every way of reducing needs ------------------------------------------------------------------


def fill(
    flat: torch.Tensor, views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float
) -> None:
    """Put each gradient times `scale` into its view of `flat` (numel,); zeros where there is none.

    Large gradients are scaled as they are copied, in one pass over memory. Small ones are copied by one call
    for all, and then scaled in the cache, where a second pass costs less than a call for each.
    """
    cast = next((g.dtype for g in grads if g is not None), flat.dtype) != flat.dtype  # before it is scaled
    small = cast or scale == 1.0 or flat.numel() <= SMALL * len(views)
    there, come = [], []
    for view, grad in zip(views, grads, strict=True):
        if grad is None:
            view.zero_()
        elif grad.data_ptr() == view.data_ptr():  # it lies there already
            if not small:
                view.mul_(scale)
        elif small:
            there.append(view)
            come.append(grad)
        else:
            torch.mul(grad, scale, out=view)
    if come:
        torch._foreach_copy_(there, come)
    if small and scale != 1.0:
        flat.mul_(scale)


def used_nowhere(
    parameters: Sequence[torch.nn.Parameter], unused: Collection[torch.nn.Parameter], axis: Axis
) -> frozenset[torch.nn.Parameter]:
    """Those of `parameters` that are unused on every rank of `axis`."""
    here = frozenset(unused)
    used = torch.tensor([p not in here for p in parameters], dtype=torch.int32, device=parameters[0].device)
    if axis.size > 1:
        dist.all_reduce(used, group=axis.group)
    return frozenset(p for p, count in zip(parameters, used.tolist(), strict=True) if not count)


def about_unused(names: Sequence[str], of: int) -> str:
    """The sentence on parameters without a gradient."""
    told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{len(names)} of {of} parameters got no gradient in this backward: {told}. Freeze "
        "them (requires_grad_(False)), or pass find_unused_parameters=True; a checkpoint of the last layers "
        "needs use_reentrant=False"
    )
