"""Who gets which samples: numbers alone, no data and no processes.

    order of epoch e    a permutation of all samples, from (seed, e) and nothing else
    global batch k      places k G to (k + 1) G of it, G = batch_size x dp
    rank r of dp        its share of those, as even as can be

Only the data axis counts: a rank's peers on the other axes have the same place on it, and get the same.
Layouts with the same G have the same samples in batch k, in the same order when the shares are put end to
end. The last batch may be ragged: it is dealt out evenly too, nothing is lost or doubled, and a share may be
empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hpnb.split_sizes import split_sizes

Batch = dict[str, Any]


@dataclass(frozen=True)
class Where:
    """Which rows a batch holds: with it, whoever gets a sample draws the same random numbers for it.

    Attributes:
        samples: their indices in the dataset, row by row. Samples of other ranks may follow the own ones.
        partners: for each own row, the row of its partner in mixup; () without mixup.
    """

    seed: int
    epoch: int
    batch: int
    samples: tuple[int, ...]
    partners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Deal:
    """Who gets which samples, as numbers alone.

    Attributes:
        samples: how many the dataset has.
        batch_size: samples a data-parallel rank gets a batch.
        ranks, rank: size of the data axis, and the place on it.
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
            raise ValueError("the dataset is empty: there is nothing to deal out")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is not a count; use 1 or more samples a rank")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"place {self.rank} is outside an axis of {self.ranks} ranks")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} is negative; use 0 or more")
        if self.batches == 0:
            raise ValueError(
                f"drop_last leaves no batch: {self.samples} samples are fewer than the global batch of "
                f"{self.batch_size} x {self.ranks} = {self.global_batch}"
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.ranks

    @property
    def batches(self) -> int:
        """How many an epoch has, on every rank."""
        return self.samples // self.global_batch if self.drop_last else -(-self.samples // self.global_batch)

    def block(self, epoch: int, batch: int) -> list[int]:
        """The samples of a global batch, in order."""
        order = _order(self.samples, self.seed, epoch) if self.shuffle else range(self.samples)
        return [int(i) for i in order[batch * self.global_batch : (batch + 1) * self.global_batch]]

    def share(self, epoch: int, batch: int) -> list[int]:
        """The rank's samples of it."""
        block = self.block(epoch, batch)
        sizes = split_sizes(len(block), self.ranks)
        start = sum(sizes[: self.rank])
        return block[start : start + sizes[self.rank]]

    def where(self, epoch: int, batch: int, partners: bool) -> Where:
        """The rank's samples, and those to mix them with: one turn of the global batch by a random step."""
        own, block = self.share(epoch, batch), self.block(epoch, batch)
        if not partners:
            return Where(self.seed, epoch, batch, tuple(own))
        step = int(np.random.default_rng([self.seed, epoch, batch]).integers(1, max(2, len(block))))
        other = {sample: block[(place + step) % len(block)] for place, sample in enumerate(block)}
        rows = list(dict.fromkeys([*own, *(other[sample] for sample in own)]))  # each sample once, own first
        return Where(self.seed, epoch, batch, tuple(rows), tuple(rows.index(other[sample]) for sample in own))


@lru_cache(maxsize=8)
def _order(samples: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng([seed, epoch]).permutation(samples)
