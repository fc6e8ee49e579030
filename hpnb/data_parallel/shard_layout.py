"""How tensors lie end to end in one flat tensor, which is sharded evenly over the ranks.

    tensors        |   a   |     b     |  c  |    d     |pad
    elementwise    |   shard of 0   |   shard of 1   |            shards cut through tensors
    otherwise      |   b     |      |   d    |  a  | c |          every tensor lies within one shard

One reduce-scatter or all-gather then moves all of them, and nothing is copied on the way. Elementwise
sharding is ZeRO's (Rajbhandari et al. 2020, arXiv 1910.02054): it is even to the last element, and right for
an optimizer that treats elements alike. An optimizer that looks at full matrices (Muon, Adafactor) needs the
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

ALIGNMENT = 16  # bytes: where a matrix begins elsewhere, kernels cannot load it in vectors


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor lies in the flat one. Numbers are elements.

    Attributes:
        itemsize: bytes of an element. Every tensor and every shard begins at a multiple of ALIGNMENT bytes.
        elementwise: whether a tensor may be split anywhere. Otherwise it lies within one shard.
    """

    shapes: tuple[tuple[int, ...], ...]
    num_shards: int
    itemsize: int
    elementwise: bool = True

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, padding included."""
        return self.shard_numel * self.num_shards

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self._shard_numel_and_offsets[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in the flat one."""
        return self._shard_numel_and_offsets[1]

    @cached_property
    def _shard_numel_and_offsets(self) -> tuple[int, tuple[int, ...]]:
        sizes = [self._align(prod(shape)) for shape in self.shapes]
        if self.elementwise:
            starts = accumulate(sizes, initial=0)
            return self._align(-(-sum(sizes) // self.num_shards)), tuple(starts)[:-1]
        # The largest tensor first, each to the shard that has the least so far.
        filled, positions = [0] * self.num_shards, [(0, 0)] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            rank = filled.index(min(filled))
            positions[i] = rank, filled[rank]
            filled[rank] += sizes[i]
        return max(filled), tuple(rank * max(filled) + offset for rank, offset in positions)

    def _align(self, numel: int) -> int:
        multiple = max(1, ALIGNMENT // self.itemsize)
        return -(-numel // multiple) * multiple

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One view of `flat` (numel,) for each tensor, in its shape."""
        return [
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def shard(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """(shard_numel,): a view of the shard of `rank` in `flat`."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """For each tensor its elements [start, stop) that lie in the shard of `rank`; (n, n) is none."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        ranges = []
        for offset, shape in zip(self.offsets, self.shapes, strict=True):
            size = prod(shape)
            start = min(max(low - offset, 0), size)
            ranges.append((start, max(start, min(high - offset, size))))
        return ranges

    def views_in_shard(self, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Of each tensor the elements in the shard of `rank`, as a view of `shard` (shard_numel,): (n,), or
        the tensor's shape where tensors are not split and this shard has it."""
        views = []
        for offset, shape, (start, stop) in zip(self.offsets, self.shapes, self.ranges(rank), strict=True):
            first = max(0, offset + start - rank * self.shard_numel)
            view = shard[first : first + stop - start]
            views.append(view if self.elementwise or stop == start else view.view(shape))
        return views
