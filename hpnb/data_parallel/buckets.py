"""Gradient buckets: few large messages instead of many small ones.

A bucket is reduced when all its gradients are there, so it holds parameters that become ready together: in
reverse order of the model, which is about the order in which the backward reaches them. Beyond the knee of
the link (see `hpnb.theory.knee`) a larger bucket hardly saves latency, and starts later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FOREACH_BELOW = 16384  # elements of a gradient, on average: with fewer, launches cost more than bytes
FIRST_MB = 1.0  # of a first bucket


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype and device that are reduced together, one behind the other."""

    parameters: tuple[torch.nn.Parameter, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One view of `flat` (numel,) for each parameter, in its shape."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def assign_buckets(parameters: Iterable[torch.nn.Parameter], bucket_mb: float) -> list[Bucket]:
    """Assign parameters, in the order given, to buckets of at most `bucket_mb` (2^20 bytes each).

    Until the first bucket is full, at most `FIRST_MB` of each dtype and device are in one, so that
    communication starts early. A parameter larger than a bucket gets one to itself.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb!r} must be above 0; 25 is a good start")
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    open_bytes = Counter[tuple[torch.dtype, torch.device]]()
    for p in parameters:
        kind = (p.dtype, p.device)
        members = open_buckets.setdefault(kind, [])
        limit = (min(FIRST_MB, bucket_mb) if not buckets else bucket_mb) * 2**20
        if members and open_bytes[kind] + p.nbytes > limit:
            buckets.append(Bucket(tuple(members)))
            members = open_buckets[kind] = []
            open_bytes[kind] = 0
        members.append(p)
        open_bytes[kind] += p.nbytes
    return [*buckets, *(Bucket(tuple(members)) for members in open_buckets.values() if members)]


def assign_buckets_by_group(groups: Sequence[Mapping[str, Any]], bucket_mb: float) -> list[Bucket]:
    """Assign an optimizer's trained parameters to buckets, in the order in which these will be full.

    A bucket has parameters of one group. Experts are reduced along another axis, so `split_groups` makes them
    separate groups first. The order is a guess: a group may be spread over the model, as all biases are,
    and is then complete when the backward is. So the k-th of a group's n parameters is expected after k/n of
    the backward, and among equals the last group's first.
    """
    expected: list[tuple[float, Bucket]] = []
    for group in reversed(groups):
        trained = [p for p in group["params"] if p.requires_grad]
        count = 0
        for bucket in assign_buckets(reversed(trained), bucket_mb):
            count += len(bucket.parameters)
            expected.append((count / len(trained), bucket))
    return [bucket for _, bucket in sorted(expected, key=lambda pair: pair[0])]  # which keeps equals in order


def split_groups(
    groups: Sequence[Mapping[str, Any]], belongs: Callable[[torch.nn.Parameter], bool]
) -> list[Mapping[str, Any]]:
    """Each group as two: those of its parameters that do not belong, and those that do."""
    return [
        {"params": [p for p in group["params"] if belongs(p) == side]}
        for group in groups
        for side in (False, True)
    ]


def count_expected(parameters: Iterable[torch.nn.Parameter]) -> int:
    """For how many gradients of a bucket its reduction waits. A backward brings none for a parameter that was
    frozen since, but if that has an earlier gradient, the bucket is reduced at the end of the backward."""
    return sum(p.requires_grad or p.grad is not None for p in parameters)


def refuse_sparse(parameters: Iterable[torch.nn.Parameter], names: Iterable[str]) -> None:
    """A bucket is dense, and so must the gradients of its parameters be."""
    for p, name in zip(parameters, names, strict=True):
        if p.grad is not None and p.grad.is_sparse:
            raise ValueError(
                f"{name} has a sparse gradient, which has no place in a bucket; use "
                "nn.Embedding(sparse=False)"
            )


def fill_bucket(
    flat: torch.Tensor, views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float
) -> None:
    """Put each gradient times `scale` into its view of `flat` (numel,); zeros where there is none.

    Large gradients are scaled as they are copied, in one pass over memory. Small ones are copied by one call
    for all, and then scaled in the cache, where a second pass costs less than a call for each.
    """
    # Gradients of another dtype are cast first, and scaled in the bucket's. A bucket's parameters have one
    # dtype, and so do their gradients: the first one tells.
    casts = next((g.dtype for g in grads if g is not None), flat.dtype) != flat.dtype
    scale_flat = casts or scale == 1.0 or flat.numel() <= FOREACH_BELOW * len(views)
    targets, sources = [], []
    for view, grad in zip(views, grads, strict=True):
        if grad is None:
            view.zero_()
        elif grad.data_ptr() == view.data_ptr():  # it is in the bucket already
            if not scale_flat:
                view.mul_(scale)
        elif scale_flat:
            targets.append(view)
            sources.append(grad)
        else:
            torch.mul(grad, scale, out=view)
    if sources:
        torch._foreach_copy_(targets, sources)
    if scale_flat and scale != 1.0:
        flat.mul_(scale)
