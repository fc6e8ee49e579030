"""Which rank gets which samples: numbers alone, no data and no processes.

    order of epoch e    a permutation of all samples, drawn from (seed, e) and nothing else
    global batch k      samples k G to (k + 1) G of that order, G = batch_size x dp
    rank r of dp        its even split of those (split_sizes.py)

Only the data-parallel axis counts: ranks that differ on the other axes alone get the same samples. Layouts
with the same G have the same samples in batch k, in the same order when the ranks' splits are put end to end.
The last batch may be smaller. It is split evenly too: no sample is lost or doubled, and a rank may get none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hpnb.split_sizes import split_range


@dataclass(frozen=True)
class BatchSamples:
    """The samples of one batch: whichever rank gets a sample draws the same random numbers for it.

    Attributes:
        samples: their indices in the dataset, this rank's first; mixup partners of other ranks may follow.
        partners: for each sample of this rank, where its mixup partner stands in `samples`; () without mixup.
    """

    seed: int
    epoch: int
    batch: int
    samples: tuple[int, ...]
    partners: tuple[int, ...] = ()


@dataclass(frozen=True)
class DistributedBatchSampler:
    """The samples of every batch, for one rank of the data-parallel axis.

    Attributes:
        samples: how many the dataset has.
        batch_size: samples per data-parallel rank and batch.
        ranks, rank: size of the data-parallel axis, and this rank on it.

    Raises:
        ValueError: numbers that leave nothing to sample.
    """

    samples: int
    batch_size: int
    ranks: int = 1
    rank: int = 0
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("the dataset is empty: there is nothing to sample")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is not a count; use 1 or more samples a rank")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is outside an axis of {self.ranks} ranks")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative; use 0 or more")
        if self.batches == 0:
            raise ValueError(
                f"drop_last leaves no batch: {self.samples} samples are fewer than the global batch of "
                f"{self.batch_size} x {self.ranks} = {self.global_batch_size}"
            )

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.ranks

    @property
    def batches(self) -> int:
        """How many an epoch has, on every rank."""
        full, rest = divmod(self.samples, self.global_batch_size)
        return full if self.drop_last or not rest else full + 1

    def global_batch(self, epoch: int, batch: int) -> list[int]:
        """The samples of a batch on all ranks, in order."""
        order = _order_of_epoch(self.samples, self.seed, epoch) if self.shuffle else range(self.samples)
        start = batch * self.global_batch_size
        return [int(i) for i in order[start : start + self.global_batch_size]]

    def batch_samples(self, epoch: int, batch: int, with_partners: bool) -> BatchSamples:
        """This rank's samples, and those to mix them with: the global batch rotated by a random step."""
        everyone = self.global_batch(epoch, batch)
        start, stop = split_range(len(everyone), self.ranks, self.rank)
        samples = everyone[start:stop]
        if not with_partners:
            return BatchSamples(self.seed, epoch, batch, tuple(samples))
        step = int(np.random.default_rng([self.seed, epoch, batch]).integers(1, max(2, len(everyone))))
        partners = [everyone[(i + step) % len(everyone)] for i in range(start, stop)]
        places = {sample: i for i, sample in enumerate(dict.fromkeys([*samples, *partners]))}
        return BatchSamples(self.seed, epoch, batch, tuple(places), tuple(places[p] for p in partners))


@lru_cache(maxsize=8)
def _order_of_epoch(samples: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(samples)
