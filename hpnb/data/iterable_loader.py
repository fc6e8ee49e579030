"""Batches of a stream for every rank of a layout: an IterableDataset of PyTorch or of `datasets`.

    loader = IterableLoader(dataset, 32, mesh.dp)         # or plugin.prepare_dataloader(dataset, 32)
    for batch in loader: ...                              # as many batches on every rank

A stream of `datasets` is split by `datasets.distributed.split_dataset_by_node`: a replica reads shards of its
own if their number divides by the replicas, and every R-th sample otherwise. worker_shards.py splits others.
The ranks of one replica read the same samples, which they compare batch by batch.

A stream has no length, so before each batch all ranks agree whether one of them has samples. If so, those
without get an empty batch, and if not, the epoch is over. The last global batch may be ragged.

A run resumes in the middle of an epoch in one of three ways. If torchdata is installed, its
StatefulDataLoader keeps the position. If not, the dataset's `state_dict` does, where it has one and no worker
loads ahead. In all other cases the batches before the position are read again and skipped: so is a stream of
`datasets` that somebody shuffled, because no state holds the samples in its buffer.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hpnb.data.batch_agreement import (
    BatchReport,
    RankOnAxis,
    count_rows,
    gather_reports,
    next_or_none,
    warn_if_split_already,
)
from hpnb.data.distributed_sampler import BatchSamples
from hpnb.data.loader import Collate, ResumableLoader, Transform, empty_batch
from hpnb.data.seeds import seeded_generator
from hpnb.data.worker_shards import ShardedStream, shard_stream

WARN_AFTER = 3  # batches in which a replica has no samples


def is_iterable_dataset(dataset: Any) -> bool:
    """Whether it is a stream: iterated, and not indexed."""
    return isinstance(dataset, IterableDataset) or _is_from_datasets(dataset)


class IterableLoader(ResumableLoader):
    """Iterate over the batches of this rank: `for batch in IterableLoader(dataset, 32, mesh.dp): ...`

    Args:
        dataset: an IterableDataset of PyTorch or of `datasets`, the same on all ranks.
        batch_size: samples per data-parallel rank and batch.
        axis: the data-parallel axis of the mesh; None is one rank alone.
        shuffle: let `datasets` shuffle shards, and samples in a buffer; other streams shuffle themselves.
        seed: of the shuffle and of the random numbers of `transform`; the same on all ranks.
        drop_last: leave out global batches that are not full.
        collate_fn, transform, num_workers, pin_memory: as for `Loader`. Workers of a stream of `datasets`
            read shards of their own, so an epoch may have more steps with them: where their shards end
            apart, the last batches of several are ragged.

    Raises:
        ValueError: numbers that leave no batch, or a stream that cannot be shuffled.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        axis: RankOnAxis | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        transform: Transform | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        kind = type(dataset).__name__
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a count; use 1 or more samples a rank")
        if shuffle and not _is_from_datasets(dataset):
            raise ValueError(
                f"shuffle=True needs a dataset that can be indexed, and a {kind} is read in its own order; "
                "shuffle inside it, or use dataset.shuffle of a streaming `datasets` set"
            )
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        super().__init__(dataset, batch_size, collate_fn, transform, num_workers, pin_memory)
        if getattr(transform, "partners", False):
            raise ValueError(
                f"mixup takes partners from all ranks' samples by their index, and a {kind} has no index; "
                "use a dataset with __len__ and __getitem__, or mixup=0"
            )
        self.replicas, self.replica = (1, 0) if axis is None else (axis.size, axis.rank)
        split = getattr(dataset, "_distributed", None)  # set by datasets.distributed.split_dataset_by_node
        if split is not None and self.replicas > 1:
            raise ValueError(
                f"this {kind} is split for {split.world_size} ranks already, and splitting it for "
                f"{self.replicas} replicas again would leave samples out; pass it as it was before "
                "split_dataset_by_node"
            )
        if shuffle:
            self.dataset = dataset.shuffle(seed=seed)
        self._source: Any = None  # of the iteration under way
        self._batches: Any = None
        self._example: Any = None  # an empty batch
        self._compared = False  # the first samples of all ranks
        self._warned = False  # of a replica that has no samples left

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.replicas

    def __iter__(self) -> Iterator[Any]:
        """All ranks iterate together."""
        resume = self._resume
        self._next = 0 if resume is None else resume["batch"]
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        self._source = self._split()
        if hasattr(self._source, "set_epoch"):  # a split set of `datasets` has an epoch of its own, from 0 on
            self._source.set_epoch(self.epoch)
        loader: Any = _loader_class()(
            self._source,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            collate_fn=self.collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # Without a generator every epoch draws from the one that dropout uses. The replica is no part of
            # the seed: a stream that workers shuffle must have one order on all replicas.
            generator=seeded_generator(self.seed, self.epoch),
        )
        self._batches = loader
        skipped = 0 if resume is None else self._restore(resume)
        batches = iter(loader)
        for _ in range(skipped):
            next_or_none(batches)
        return self._drop_position(self._run(batches, self.epoch))

    def _split(self) -> Any:
        if not _is_from_datasets(self.dataset):
            # One with a state would begin where the last iteration has ended. Others may count their epochs.
            has_state = hasattr(self.dataset, "load_state_dict")
            dataset = copy.copy(self.dataset) if has_state else self.dataset
            return shard_stream(dataset, self.replicas, self.replica, self.batch_size)
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(copy.copy(self.dataset), self.replica, self.replicas)

    def _run(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        batches_with_an_empty_replica = 0
        while True:
            batch, ended = next_or_none(batches)
            if not ended and self._example is None:
                self._example = empty_batch(batch, self.batch_size)
            reports = gather_reports(batch, ended, self.replica, self._example is not None, together=True)
            if all(r.ended for r in reports) or (self.drop_last and any(r.ended for r in reports)):
                return
            batches_with_an_empty_replica += any(r.ended for r in reports)
            if batches_with_an_empty_replica == WARN_AFTER and not self._warned:
                self._warn_of_empty_batches(reports)
            if not all(report.has_example for report in reports):
                self._share_example(next(rank for rank, r in enumerate(reports) if r.has_example))
            if not self._compared and isinstance(self._source, ShardedStream) and self.replicas > 1:
                seen, asks = self._source.seen.tolist()
                warn_if_split_already(type(self.dataset).__name__, seen, asks > 0, self.replicas)
                self._compared = True
            if ended:
                batch = self._example
            self._next += 1
            yield batch if self.transform is None else self.transform(batch, self._samples(batch, epoch))

    def _warn_of_empty_batches(self, reports: list[BatchReport]) -> None:
        """Say that steps train on fewer samples than the global batch has: all ranks see the same reports."""
        samples = {report.replica: max(0, report.samples) for report in reports}
        empty = [replica for replica, n in samples.items() if n == 0]
        who = f"rank {empty[0]} has" if len(empty) == 1 else f"ranks {', '.join(map(str, empty))} have"
        warnings.warn(
            f"data-parallel {who} had no samples for {WARN_AFTER} batches while others go on, so that a step "
            f"trains on {sum(samples.values())} samples instead of {self.global_batch_size}. Shards of "
            f"this {type(self.dataset).__name__} differ in length, and each data-parallel rank reads some of "
            "them: give it shards of equal length, or drop_last=True, which leaves out what only some have",
            stacklevel=3,
        )
        self._warned = True

    def _share_example(self, source: int) -> None:
        """A rank that never had a sample learns the fields of a batch from one that did."""
        shared = [self._example]
        dist.broadcast_object_list(shared, src=source)
        self._example = shared[0] if self._example is None else self._example

    def _samples(self, batch: Any, epoch: int) -> BatchSamples:
        """Numbers of the samples, for the transform's random numbers: their places in a stream that every
        replica reads in turns."""
        first = (self._next - 1) * self.batch_size
        numbers = [(first + i) * self.replicas + self.replica for i in range(count_rows(batch))]
        return BatchSamples(self.seed, epoch, self._next - 1, tuple(numbers))

    # --- going on ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position after the last batch that was returned, the same on every rank. All of them call it."""
        positions: list[Any] = [None] * self.replicas
        if (position := self._position()) is not None and self.replicas > 1:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (self.replica, position))
            positions = [value for _, value in sorted(dict(everyone).items())]
        elif position is not None:
            positions = [position]
        return {"epoch": self.epoch, "batch": self._next, "seed": self.seed, "shuffle": int(self.shuffle),
                "global_batch": self.global_batch_size, "replicas": self.replicas,
                "workers": self.num_workers, "in_order": self._in_order(), "keeper": self._keeper(),
                "positions": positions}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position: the next iteration returns the batches that were left of that epoch.

        Raises:
            ValueError: the state is of another order or another global batch, or of another number of
                replicas or workers, with which the batches of the epoch were or may have been others.
        """
        order = {"seed": self.seed, "shuffle": int(self.shuffle), "global_batch": self.global_batch_size}
        replicas = self.replicas
        self._check_order(state, order, replicas)
        same = (state["replicas"], state["workers"]) == (replicas, self.num_workers)
        if not same and state["batch"] and not (state["in_order"] and self._in_order()):
            raise ValueError(
                f"the stream was read by {state['replicas']} replicas with {state['workers']} workers, and "
                f"here are {replicas} with {self.num_workers}. {self._why_not_in_order(state)}, so the "
                "batches that were trained on need not be the first ones here. Resume with as many, or let "
                "the epoch begin anew while weights and optimizer are restored: leave the dataloader out of "
                "booster.load, or with a Trainer call trainer.resume(folder, restore_data=False)"
            )
        self.epoch, self._next, self._resume = state["epoch"], state["batch"], dict(state)

    def _in_order(self) -> bool:
        """Whether batch k is the same set of samples on any number of replicas and workers."""
        if _is_from_datasets(self.dataset):
            shards: int = self.dataset.num_shards
            return self.num_workers < 2 and (self.replicas == 1 or shards % self.replicas > 0)
        shards_itself = getattr(self._source, "shards_itself", None)
        return self.num_workers == 0 and shards_itself is not True

    def _why_not_in_order(self, state: Mapping[str, Any]) -> str:
        """Why batch k may be other samples on as many replicas and workers as `state` has, in words."""
        kind = type(self.dataset).__name__
        if _is_from_datasets(self.dataset):
            return "Replicas or workers read different shards of a stream of `datasets`"
        if state["in_order"] or state["workers"]:
            return f"With workers the loader doesn't see whether a {kind} shards itself by get_worker_info()"
        return f"A {kind} calls get_worker_info() and shards itself by it"

    def _keeper(self) -> str:
        """Who keeps the position within the stream."""
        if self.shuffle or _has_shuffle_buffer(self.dataset):
            return "count"  # the samples in the buffer are part of no state
        if _has_torchdata():
            return "torchdata"
        return "dataset" if self.num_workers == 0 and hasattr(self.dataset, "load_state_dict") else "count"

    def _position(self) -> Any:
        keeper = self._keeper()
        if keeper == "count" or self._batches is None or self._next == 0:
            return None
        if keeper == "torchdata":
            return self._batches.state_dict()
        return self._source.state_dict()

    def _restore(self, state: Mapping[str, Any]) -> int:
        """Set the position. Returns how many batches are still to be skipped."""
        position = state["positions"][self.replica] if state["replicas"] == self.replicas else None
        if position is None or state["keeper"] != self._keeper() or state["workers"] != self.num_workers:
            return int(state["batch"])
        (self._batches if self._keeper() == "torchdata" else self._source).load_state_dict(position)
        return 0


def _is_from_datasets(dataset: Any) -> bool:
    """Without importing `datasets`: whoever made one has."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.IterableDataset)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether `datasets` shuffles it, or one of the streams that it was made from, in a buffer."""
    if not _is_from_datasets(dataset):
        return False
    left: list[Any] = [dataset._ex_iterable]
    while left:
        stream = left.pop()
        if "Shuffled" in type(stream).__name__:  # BufferShuffledExamplesIterable, which is private
            return True
        inner = getattr(stream, "ex_iterable", None)
        left += [*getattr(stream, "ex_iterables", ()), *(() if inner is None else (inner,))]
    return False


def _has_torchdata() -> bool:
    return importlib.util.find_spec("torchdata") is not None


def _loader_class() -> Any:
    if not _has_torchdata():
        return DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader
