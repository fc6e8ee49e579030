"""DDP's reducer: all-reduces gradients, bucket by bucket, while the backward still runs.

    backward     ...  g9 g8 | g7 g6 g5 | g4 g3 ...          bucket 0 is full at the first bar
    all-reduce        [ bucket 0 ][ bucket 1  ][ ...        and is reduced while the backward goes on

All ranks must reduce the same buckets in the same order, because collectives are matched by order. So bucket
k is sent when it and all before it are full, even if a later one is full already. After Li et al. 2020,
*PyTorch Distributed*, section 3.2 (arXiv 2006.15704).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from hpnb.background import Background, Pending, wait_all
from hpnb.data_parallel.buckets import assign_buckets, count_expected, fill_bucket, refuse_sparse
from hpnb.gradients import GradientSink
from hpnb.mesh import Axis
from hpnb.record.recorder import separate_compute


class Reducer(GradientSink):
    """All-reduces gradients: after `finish`, .grad is the sum or mean over the axis.

    Args:
        parameters: {name: parameter} in the order of the model.
        axis: whose ranks hold replicas.

    The other arguments are those of `DataParallel`.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        axis: Axis,
        bucket_mb: float = 25.0,
        *,
        average: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        overlap_communication: bool = True,
        check_reduction: bool = False,
        copy_engines: bool = False,
    ) -> None:
        self.axis, self.average, self.find_unused_parameters = axis, average, find_unused_parameters
        self._static_graph, self._check_reduction = static_graph, check_reduction
        self._gradient_as_bucket_view, self._copy_engines = gradient_as_bucket_view, copy_engines
        self.overlap_communication = overlap_communication
        self.names = {p: name for name, p in parameters.items() if p.requires_grad}
        self._frozen = {p: name for name, p in parameters.items() if not p.requires_grad}
        self._number = {id(p): i for i, p in enumerate(self.names)}  # by id, because a tensor's hash is slow
        self._bucket_mb = bucket_mb
        self._background: dict[torch.device, Background] = {}
        self._summed: set[int] = set()  # numbers of parameters whose .grad is a sum over all ranks already
        self._learned_order = False  # of a static graph
        self._unused_here: frozenset[torch.nn.Parameter] = frozenset()
        self._unused_everywhere: frozenset[torch.nn.Parameter] = frozenset()
        self._make_buckets(list(reversed(self.names)))

    def _make_buckets(self, order: Sequence[torch.nn.Parameter]) -> None:
        self.buckets = assign_buckets(order, self._bucket_mb)
        bucket_of = {id(p): i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        self._bucket_of = [bucket_of[id(p)] for p in self.names]
        self._flat = [torch.zeros(b.numel, dtype=b.dtype, device=b.device) for b in self.buckets]
        self._views = [b.views(flat) for b, flat in zip(self.buckets, self._flat, strict=True)]
        for flat in self._flat:
            if flat.device not in self._background:
                self._background[flat.device] = Background(self.axis, flat.device, self._copy_engines)
        self._start_step()

    def _start_step(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._ready: dict[int, None] = {}  # numbers of parameters, in the order in which gradients came
        self._sent: list[Pending] = []
        self._sent_as_zeros: list[torch.nn.Parameter] = []  # because there was no gradient

    # --- the sink ---------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self._missing = [count_expected(bucket.parameters) for bucket in self.buckets]

    def before_accumulation(self, parameter: torch.nn.Parameter) -> None:
        """A second backward adds to .grad. If that is a sum over the ranks already, every rank would send the
        sum again. Rank 0 keeps the old sum and adds to it; the others set .grad to None. So the next sum
        counts the old one once."""
        number = self._number[id(parameter)]
        if number in self._summed:
            self._summed.discard(number)
            if self.axis.rank:
                parameter.grad = None

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """Count a gradient, and send every bucket whose turn has come. This runs for every parameter, so it
        is kept short.

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
        if self.overlap_communication and not self._missing[bucket]:
            while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
                self._send(len(self._sent))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all, and put the sums where the gradients were.

        Raises:
            RuntimeError: parameters without a gradient (unless `find_unused_parameters`), by name; parameters
                that were frozen when this was made and are trained now.
        """
        # What this backward did not use has the gradient of an earlier backward, or is frozen, or is unused.
        not_ready = [p for number, p in enumerate(self.names) if number not in self._ready]
        frozen = frozenset(p for p in not_ready if p.grad is None and not p.requires_grad)
        unused_here = [p for p in not_ready if p.grad is None and p not in frozen]
        with separate_compute():
            try:
                if thawed := [name for p, name in self._frozen.items() if p.requires_grad]:
                    raise RuntimeError(thawed_message(thawed))
                if unused_here and not self.find_unused_parameters:
                    raise RuntimeError(unused_message([self.names[p] for p in unused_here], len(self.names)))
                for p in not_ready:
                    self.before_accumulation(p)
                while len(self._sent) < len(self.buckets):
                    self._send(len(self._sent))
                without_grad = self._find_unused_everywhere(unused_here) | frozen
                wait_all(self._sent)
                in_place = self._gradient_as_bucket_view and self.average
                if self._sent_as_zeros or without_grad or not in_place:
                    for index in range(len(self.buckets)):
                        self._assign_gradients(index, without_grad)
                if self._check_reduction:
                    self._compare_ranks()
                if self._static_graph and not self._learned_order:
                    self._learn_order()
            finally:
                self.drop()

    def drop(self) -> None:
        """Start the next backward afresh, at the end of one and after one that failed."""
        wait_all(self._sent)  # no bucket may be filled while it is being reduced
        self._start_step()

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
        scale = 1.0 if background.averages or not self.average else 1.0 / self.axis.size
        grads = [p.grad for p in bucket.parameters]
        for p, grad in zip(bucket.parameters, grads, strict=True):
            if grad is None:
                self._sent_as_zeros.append(p)
        refuse_sparse(bucket.parameters, (self.names[p] for p in bucket.parameters))
        fill_bucket(flat, views, grads, scale)
        if self._gradient_as_bucket_view:
            for p, view in zip(bucket.parameters, views, strict=True):
                if p.grad is not None:
                    p.grad = view  # which frees what autograd made
        self._sent.append(background.all_reduce(flat, self.average and background.averages))

    def _assign_gradients(self, index: int, without_grad: Collection[torch.nn.Parameter]) -> None:
        """Let .grad be the reduced gradients of a bucket, and None for parameters in `without_grad`."""
        for p, view in zip(self.buckets[index].parameters, self._views[index], strict=True):
            if p in without_grad:
                p.grad = None
            elif self._gradient_as_bucket_view:
                p.grad = view
            elif p.grad is None:
                p.grad = view.clone()
            else:
                p.grad.copy_(view)
            if not self.average and p.grad is not None:
                self._summed.add(self._number[id(p)])

    # --- what the ranks agree on --------------------------------------------------------------

    def _find_unused_everywhere(self, unused: Sequence[torch.nn.Parameter]) -> frozenset[torch.nn.Parameter]:
        """Parameters that no rank has a gradient of. It stays None, as on one process."""
        if not self.find_unused_parameters:
            return frozenset()
        if self._static_graph and self._learned_order:
            if changed := frozenset(unused) ^ self._unused_here:
                raise RuntimeError(
                    f"{self.names[next(iter(changed))]} and {len(changed) - 1} more parameters are used in "
                    "this step and were not in the first, or the other way round: leave static_graph out"
                )
            return self._unused_everywhere
        self._unused_here = frozenset(unused)
        self._unused_everywhere = agree_on_unused(list(self.names), unused, self.axis)
        return self._unused_everywhere

    def _learn_order(self) -> None:
        """Order buckets by rank 0's first step, so that they fill one after the other. Its gradients stay in
        the old buckets until `zero_grad()` or the next reduction, so until then gradients exist twice."""
        self._learned_order = True
        arrived = dict.fromkeys([*self._ready, *range(len(self.names))])
        order = torch.tensor(list(arrived), device=self._flat[0].device)
        if self.axis.size > 1:
            dist.broadcast(order, src=self.axis.ranks[0], group=self.axis.group)
        by_number = list(self.names)
        self._make_buckets([by_number[i] for i in order.tolist()])

    def _compare_ranks(self) -> None:
        real = [torch.view_as_real(flat) if flat.is_complex() else flat for flat in self._flat]
        sums = torch.stack([flat.double().sum() for flat in real])
        sums = sums.nan_to_num(nan=math.pi)  # nan differs from itself, and an overflow is no disagreement
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.axis.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.axis.group)
        if not torch.equal(low, high):
            off = [i for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)) if a != b]
            raise RuntimeError(f"after the reduction the ranks of {self.axis.name} differ in buckets {off}")


# --- for every reducer -------------------------------------------------------------------------------


def agree_on_unused(
    parameters: Sequence[torch.nn.Parameter], unused: Collection[torch.nn.Parameter], axis: Axis
) -> frozenset[torch.nn.Parameter]:
    """Those of `parameters` that are unused on every rank of `axis`."""
    unused_here = frozenset(unused)
    flags = [p not in unused_here for p in parameters]
    used = torch.tensor(flags, dtype=torch.int32, device=parameters[0].device)
    if axis.size > 1:
        dist.all_reduce(used, group=axis.group)
    return frozenset(p for p, count in zip(parameters, used.tolist(), strict=True) if not count)


def unused_message(names: Sequence[str], count: int) -> str:
    """The error for parameters `names` of `count` that got no gradient."""
    first = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{len(names)} of {count} parameters got no gradient in this backward: {first}. Freeze "
        "them (requires_grad_(False)), or pass find_unused_parameters=True; a checkpoint of the last layers "
        "needs use_reentrant=False"
    )


def thawed_message(names: Sequence[str]) -> str:
    """The error for parameters `names` that were frozen when gradients were hooked, and are trained now."""
    return (
        f"{len(names)} parameters, {names[0]} first, were frozen when the model was wrapped or boosted and "
        "are trained now, and nobody reduces their gradients: wrap or boost it with these parameters "
        "trainable, and freeze them afterwards. To go on with a run, detach() a DataParallel and wrap it "
        "again; with a Booster save a checkpoint, make and boost the model anew, and load the checkpoint"
    )
