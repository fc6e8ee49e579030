"""An IterableDataset sharded over replicas, and over the worker processes of each.

    asks get_worker_info()        it shards itself over workers, as PyTorch's documentation shows. It sees the
                                  workers of all replicas as if they were those of one loader, and reads no
                                  more than its shard: worker r W + w of R W (replica r of R, worker w of W)
    does not ask                  every worker reads the stream; replica r keeps samples r, r + R, r + 2R, ...
                                  and worker w of it every W-th batch of these

Either way all ranks must read the same stream, because one that splits itself by rank would be split twice.
`seen` helps to detect that. It has a digest of the first samples before they are split, and whether the
dataset asks for its rank besides get_worker_info().

Unless the dataset shards itself, a global batch is the same set of samples on any number of replicas and
workers. A dataset that shards itself must call get_worker_info() before its first sample.

A dataset may shuffle with the random numbers of its worker process. Workers that read the full stream are
seeded alike, and those that read a shard each get different seeds.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from hpnb.data.batch_agreement import sample_digest
from hpnb.data.seeds import seed_generators

_FIRST = 8  # samples that ranks compare
_NO_MORE = object()  # where a stream ends


class _ReplicaWorkerInfo:
    """What get_worker_info() returns to the dataset: one worker among those of all replicas."""

    def __init__(self, number: int, workers: int, info: Any, dataset: Any) -> None:
        self._id, self._num_workers = number, workers
        self._seeds = info is not None
        self.seed, self.dataset = (info.seed - info.id + number if self._seeds else 0), dataset
        self.rng = getattr(info, "rng", None)
        self.worker_method = getattr(info, "worker_method", "multiprocessing")
        self.asked = False
        self.asked_rank = False
        if self._seeds:  # all workers read the same stream, and may shuffle it
            seed_generators(info.seed - info.id)

    def _ask(self) -> None:
        if self._seeds and not self.asked:  # each shard has other random numbers
            seed_generators(self.seed)
        self.asked = True

    @property
    def id(self) -> int:
        self._ask()
        return self._id

    @property
    def num_workers(self) -> int:
        self._ask()
        return self._num_workers


class ShardedStream(IterableDataset[Any]):
    """The samples of a dataset that belong to one replica, and to the worker that iterates.

    Args:
        replicas, replica: the data-parallel size, and which of them this is.
        batch_size: consecutive samples of a replica that go to one worker.
    """

    def __init__(self, dataset: Any, replicas: int, replica: int, batch_size: int) -> None:
        self.dataset, self.replicas, self.replica, self.batch_size = dataset, replicas, replica, batch_size
        self.shards_itself: bool | None = None  # known once a sample was read in this process
        # What this process, or its first worker, has seen of the dataset; a worker shares the memory.
        self.seen = torch.full((2,), -1, dtype=torch.int64).share_memory_()
        # Samples of the dataset that the current iteration has read. After load_state_dict the dataset begins
        # behind them, and the next iteration counts from there.
        self.samples_read = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        shown = _ReplicaWorkerInfo(
            self.replica * workers + worker, self.replicas * workers, info, self.dataset
        )
        self.shards_itself = None
        start, self.samples_read = self.samples_read, 0
        # As many as have been read, on every rank, before there is a batch.
        first = 0 if start else min(_FIRST, (self.batch_size - 1) * self.replicas + 1)
        digests: list[int] = []
        for number, sample in enumerate(_run_with(shown, self.dataset), start):
            self.samples_read = number + 1
            if self.shards_itself is None:
                self.shards_itself = shown.asked
            if shown.asked != self.shards_itself:
                raise ValueError(
                    f"{type(self.dataset).__name__} asked get_worker_info() only after {number} samples, "
                    "which were split already; ask at the start of __iter__"
                )
            if worker == 0 and number < first and not self.shards_itself:
                digests.append(sample_digest(sample))
                self.seen[0] = zlib.crc32(str(digests).encode())
            if worker == 0:
                self.seen[1] = int(self.shards_itself and shown.asked_rank)
            position, remainder = divmod(number, self.replicas)
            is_ours = remainder == self.replica and position // self.batch_size % workers == worker
            if self.shards_itself or is_ours:
                yield sample


class StatefulShardedStream(ShardedStream):
    """The same of a dataset that keeps its position: it has `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {"samples_read": self.samples_read, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self.samples_read = state["samples_read"]


def shard_stream(dataset: Any, replicas: int, replica: int, batch_size: int) -> ShardedStream:
    kind = StatefulShardedStream if hasattr(dataset, "load_state_dict") else ShardedStream
    return kind(dataset, replicas, replica, batch_size)


def _run_with(info: _ReplicaWorkerInfo, dataset: Any) -> Iterator[Any]:
    """The samples of `dataset`, whose code sees `info` as its worker."""
    with _noting_rank(info):
        samples = _call_as(info, iter, dataset)
        sample = _call_as(info, next, samples, _NO_MORE)
    while sample is not _NO_MORE:
        yield sample
        sample = _call_as(info, next, samples, _NO_MORE)


def _call_as(info: _ReplicaWorkerInfo, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, inside which get_worker_info() returns `info`. It is called for every sample, and
    `mock.patch` would cost more than many a sample does."""
    worker: Any = torch_worker
    before, worker._worker_info = worker._worker_info, info
    try:
        return function(*args)
    finally:
        worker._worker_info = before


@contextmanager
def _noting_rank(info: _ReplicaWorkerInfo) -> Iterator[None]:
    """Inside, note in `info` whether somebody asks for the rank or the number of ranks."""

    def noting(ask: Callable[..., int]) -> Callable[..., int]:
        def noted(*args: Any, **kwargs: Any) -> int:
            info.asked_rank = True
            return ask(*args, **kwargs)

        return noted

    hpnb = sys.modules["hpnb"]  # its own rank() and world_size() are asked as often
    names = ((dist, "get_rank"), (dist, "get_world_size"), (hpnb, "rank"), (hpnb, "world_size"))
    with ExitStack() as stack:
        for module, name in names:
            stack.enter_context(patch.object(module, name, noting(getattr(module, name))))
        yield
