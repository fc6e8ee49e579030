"""Parameters dealt out to buckets: few large messages instead of many small ones.

A gradient is sent when its bucket is full, so a bucket holds what becomes ready together: parameters in
reverse order of the model, which is about the order in which the backward reaches them. Beyond the knee of
the wire (see `hpnb.theory.knee`) a larger bucket saves no latency worth having, and starts later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


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
        """One view of `flat` (numel,) a parameter, in its shape."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def assign_buckets(
    parameters: Iterable[torch.nn.Parameter], bucket_mb: float, first_mb: float = 1.0
) -> list[Bucket]:
    """Deal parameters, in the order given, into buckets of at most `bucket_mb` (2^20 bytes each).

    The first bucket is smaller, so that communication starts early. A parameter larger than a bucket has
    one to itself.

    Raises:
        ValueError: a size that is not above 0.
    """
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb!r} must be above 0; 25 is a good start")
    buckets: list[Bucket] = []
    open_: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for p in parameters:
        kind = (p.dtype, p.device)
        held = open_.setdefault(kind, [])
        limit = (min(first_mb, bucket_mb) if not buckets else bucket_mb) * 2**20
        if held and sum(q.nbytes for q in held) + p.nbytes > limit:
            buckets.append(Bucket(tuple(held)))
            held = open_[kind] = []
        held.append(p)
    return [*buckets, *(Bucket(tuple(held)) for held in open_.values() if held)]
