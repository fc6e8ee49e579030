"""Sums gradients over the ranks of an axis, bucket by bucket, while the backward still runs.

    backward   ...  g9 g8 | g7 g6 g5 | g4 g3 ...          bucket 0 is full at the first bar
    wire            [ bucket 0 ][ bucket 1  ][ ...        and travels while the backward goes on

All ranks must send the same buckets in the same order, or collectives would meet the wrong partner: bucket k
leaves when it and all before it are full, even if a later one is full already. After Li et al. 2020, *PyTorch
Distributed*, section 3.2 (arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from hpnb.data_parallel.buckets import deal
from hpnb.mesh import Axis
from hpnb.record.recorder import communication


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
        check: compare the reduced gradients of all ranks after every step.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        axis: Axis,
        bucket_mb: float = 25.0,
        *,
        average: bool = True,
        find_unused: bool = False,
        check: bool = False,
    ) -> None:
        self.axis, self.average, self.find_unused, self.check = axis, average, find_unused, check
        trained = {p: name for name, p in parameters.items() if p.requires_grad}
        self.names = trained
        self.buckets = deal(reversed(trained), bucket_mb)
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket.parameters}
        self._flat = [torch.zeros(b.numel, dtype=b.parameters[0].dtype, device=b.parameters[0].device)
                      for b in self.buckets]  # fmt: skip
        self._views = [b.views(flat) for b, flat in zip(self.buckets, self._flat, strict=True)]
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._ready: set[torch.nn.Parameter] = set()
        self._works: list[dist.Work | None] = []

    # --- the sink ---------------------------------------------------------------------------

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """Count a gradient; send every bucket whose turn has come."""
        if parameter in self._ready:
            raise RuntimeError(
                f"the gradient of {self.names[parameter]} was ready twice in one step: of several backwards, "
                "all but the last need no_sync() around them"
            )
        self._ready.add(parameter)
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._send(len(self._works))

    def finish(self) -> None:
        """Send what is left, wait for all, and put the sums where the gradients were.

        Raises:
            RuntimeError: parameters without a gradient (unless `find_unused`), by name.
        """
        unused = [p for p in self.names if p not in self._ready]
        try:
            if unused and not self.find_unused:
                raise RuntimeError(self._about_unused(unused))
            while len(self._works) < len(self.buckets):
                self._send(len(self._works))
            nowhere = self._used_nowhere() if self.find_unused else frozenset()
            for index, work in enumerate(self._works):
                if work is not None:
                    work.wait()
                self._hand_back(index, nowhere)
            if self.check:
                self._compare()
        finally:
            self._reset()

    # --- one bucket -------------------------------------------------------------------------

    def _send(self, index: int) -> None:
        bucket, flat = self.buckets[index], self._flat[index]
        views, grads = [], []
        for p, view in zip(bucket.parameters, self._views[index], strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad.data_ptr() != view.data_ptr():  # else it lives in the bucket already
                views.append(view)
                grads.append(p.grad)
        if grads:  # one kernel for the bucket
            torch._foreach_copy_(views, grads)
        if self.average:
            flat.div_(self.axis.size)
        work: dist.Work | None = None
        if self.axis.size > 1:
            with communication("all_reduce", self.axis.name, flat.nbytes, self.axis.ranks):
                work = dist.all_reduce(flat, group=self.axis.group, async_op=True)
        self._works.append(work)

    def _hand_back(self, index: int, nowhere: frozenset[torch.nn.Parameter]) -> None:
        for p, view in zip(self.buckets[index].parameters, self._views[index], strict=True):
            p.grad = None if p in nowhere else view

    # --- agreement --------------------------------------------------------------------------

    def _used_nowhere(self) -> frozenset[torch.nn.Parameter]:
        """Parameters that no rank has a gradient of: it stays None, as on one process."""
        order = list(self.names)
        used = torch.tensor([p.grad is not None for p in order], dtype=torch.int32)
        used = used.to(self._flat[0].device)
        if self.axis.size > 1:
            dist.all_reduce(used, group=self.axis.group)
        return frozenset(p for p, count in zip(order, used.tolist(), strict=True) if not count)

    def _about_unused(self, unused: Sequence[torch.nn.Parameter]) -> str:
        names = [self.names[p] for p in unused]
        told = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return (
            f"{len(names)} of {len(self.names)} parameters got no gradient in this backward: {told}. Freeze "
            "them (requires_grad_(False)), or pass find_unused_parameters=True"
        )

    def _compare(self) -> None:
        sums = torch.stack([flat.double().sum() for flat in self._flat])
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.axis.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.axis.group)
        if not torch.equal(low, high):
            off = [i for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)) if a != b]
            raise RuntimeError(f"after the reduction the ranks of {self.axis.name} differ in buckets {off}")
