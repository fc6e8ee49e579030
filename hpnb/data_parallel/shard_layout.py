"""Tensors end to end in one flat tensor, of which every rank has an equal share.

    tensors    |   a   |     b     |  c  |    d     |pad
    flat       |   share of 0   |   share of 1   |            elementwise: shares cut through tensors
    flat       |   b     |      |   d    |  a  | c |            whole: every tensor lies within one share

One reduce-scatter or all-gather then moves all of them, and nothing is copied on the way. Elementwise is what
ZeRO does (Rajbhandari et al. 2020, arXiv 1910.02054): even to the last element, and right for an optimizer
that treats elements alike. One that looks at a matrix as a whole (Muon, Adafactor) needs whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

ALIGNED = 16  # bytes: where a matrix begins elsewhere, kernels cannot load it in vectors


@dataclass(frozen=True)
class ShardLayout:
    """Where each tensor lies in the flat one. Numbers are elements.

    Attributes:
        shapes: of the tensors.
        ranks: how many shares.
        itemsize: bytes of an element; every tensor, and every share, begins at a multiple of ALIGNED bytes.
        whole: every tensor within one share.
    """

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    itemsize: int
    whole: bool = False

    @property
    def numel(self) -> int:
        """Of the flat tensor, padding included."""
        return self.share * self.ranks

    @property
    def share(self) -> int:
        """Of one rank's part of it."""
        return self._placed[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins in the flat one."""
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[int, tuple[int, ...]]:
        sizes = [self._aligned(prod(shape)) for shape in self.shapes]
        if not self.whole:
            starts = accumulate(sizes, initial=0)
            return self._aligned(-(-sum(sizes) // self.ranks)), tuple(starts)[:-1]
        # The largest first, each to the rank that has the least so far.
        load, at = [0] * self.ranks, [(0, 0)] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            rank = load.index(min(load))
            at[i] = rank, load[rank]
            load[rank] += sizes[i]
        return max(load), tuple(rank * max(load) + inside for rank, inside in at)

    def _aligned(self, numel: int) -> int:
        unit = max(1, ALIGNED // self.itemsize)
        return -(-numel // unit) * unit

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One view of `flat` (numel,) a tensor, in its shape."""
        return [
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def mine(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """(share,): a view of the part of `flat` that is `rank`'s."""
        return flat[rank * self.share : (rank + 1) * self.share]

    def pieces(self, rank: int) -> list[tuple[int, int]]:
        """Of each tensor the elements, from and up to, that lie in the share of `rank`; (n, n) is none."""
        low, high = rank * self.share, (rank + 1) * self.share
        found = []
        for start, shape in zip(self.offsets, self.shapes, strict=True):
            size = prod(shape)
            begin = min(max(low - start, 0), size)
            found.append((begin, max(begin, min(high - start, size))))
        return found

    def piece_views(self, share: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """One view of `share` (share,) a tensor: its piece (n,), or all of it in its shape if whole."""
        found = []
        parts = zip(self.offsets, self.shapes, self.pieces(rank), strict=True)
        for start, shape, (begin, end) in parts:
            at = max(0, start + begin - rank * self.share)
            piece = share[at : at + end - begin]
            found.append(piece.view(shape) if self.whole and end > begin else piece)
        return found


def shard_layout_of(tensors: Sequence[torch.Tensor], ranks: int, whole: bool = False) -> ShardLayout:
    """The shares of `tensors`, which are of one dtype."""
    return ShardLayout(tuple(tuple(t.shape) for t in tensors), ranks, tensors[0].element_size(), whole)
