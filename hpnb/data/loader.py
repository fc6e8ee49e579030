"""Batches for every rank of a layout, the same ones in every layout (distributed_sampler.py has the rule).

    loader = Loader(dataset, 32, mesh.dp, seed=0, collate_fn=collate_images)
    for epoch in range(epochs):
        loader.set_epoch(epoch)         # another order
        for batch in loader: ...        # as many batches on every rank

A rank without samples of the last batch gets an empty batch, with the fields, trailing shapes and dtypes of
the other ranks' batches. So it takes part in the step, and no collective waits for it.

In worker processes the random numbers of a sample follow from (seed, epoch, sample), as in `ImageTransform`:
they differ in every epoch, and are the same in every layout and after a resume.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, default_collate, get_worker_info

from hpnb.data.batch_agreement import RankOnAxis
from hpnb.data.dataset import MapDataset
from hpnb.data.distributed_sampler import BatchSamples, DistributedBatchSampler
from hpnb.data.seeds import seed_generators, seed_of, seeded_generator

Collate = Callable[[list[Any]], Any]  # items to a batch


class Transform(Protocol):
    """Changes a loaded batch in the rank's process, on its device.

    It may also have `collate(items)`, which makes the batch, and `partners`: true if it mixes samples with
    those of other ranks.
    """

    def __call__(self, batch: Any, samples: BatchSamples, /) -> Any: ...


def check_transform(transform: Any) -> None:
    """
    Raises:
        ValueError: it cannot be called with a batch and its samples, as one for single samples cannot.
    """
    try:
        inspect.signature(transform).bind(None, None)
    except TypeError:
        raise ValueError(
            f"transform={getattr(transform, '__name__', None) or type(transform).__name__} has to take two "
            "arguments, a batch and its hpnb.data.BatchSamples; what changes one sample at a time belongs "
            "into the dataset's __getitem__, or into its with_transform if it is one of `datasets`"
        ) from None
    except ValueError:  # a builtin has no signature to look at
        return


class ResumableLoader:
    """What `Loader` and `IterableLoader` share: how a batch is made, and the position in an epoch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate_fn: Collate | None,
        transform: Transform | None,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        if transform is not None:
            check_transform(transform)
        self.dataset, self.batch_size, self.transform = dataset, batch_size, transform
        while isinstance(dataset, Subset):  # as random_split makes them
            dataset = dataset.dataset
        of_dataset: Collate = getattr(dataset, "collate", None) or default_collate
        self.collate = collate_fn or getattr(transform, "collate", None) or of_dataset
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.epoch = 0
        self._next = 0  # the batch after the last one that was returned
        self._resume: Mapping[str, Any] | None = None  # the state that the next iteration starts from

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch` from the next iteration on. A position loaded for it is kept."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch} is negative; use 0 or more")
        if epoch != self.epoch:
            self.epoch, self._next, self._resume = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def _drop_position(self, batches: Iterator[Any]) -> Iterator[Any]:
        """`batches`, which start at the loaded position. It is dropped after the first one, so that a peek,
        `next(iter(loader))`, leaves it for the iteration that trains."""
        resume = self._resume
        for batch in batches:
            yield batch
            if self._resume is resume:
                self._resume = None
        if self._resume is resume:
            self._resume = None

    def _check_order(self, state: Mapping[str, Any], current: Mapping[str, Any], replicas: int) -> None:
        """Raise ValueError where a saved state differs from what this loader has in `current`."""
        if lacking := [name for name in self.state_dict() if name not in state]:
            raise ValueError(
                f"the state has no {lacking[0]}, so it was saved by another kind of loader than this "
                f"{type(self).__name__}; resume with a dataset of the same kind: both streams, or neither"
            )
        for name, value in current.items():
            if state[name] != value:
                hint = ""
                if name == "global_batch" and state[name] % replicas == 0:
                    hint = f"; with {replicas} data-parallel ranks use batch_size={state[name] // replicas}"
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, this loader has {value}{hint}"
                )


class Loader(ResumableLoader):
    """Iterate over the batches of this rank: `for batch in Loader(dataset, 32, mesh.dp, seed=0): ...`

    Args:
        dataset: anything with __len__ and __getitem__.
        batch_size: samples per data-parallel rank and batch.
        axis: the data-parallel axis of the mesh; None is one rank alone.
        shuffle: another order every epoch; call `set_epoch`.
        seed: of the order and of the random numbers of `transform`; the same on all ranks.
        drop_last: leave out the last global batch if it is not full.
        collate_fn: makes a batch of tensors from a list of items; None takes the transform's, else the
            dataset's `collate` if it has one, else torch's default.
        transform: applied to a loaded batch in this process, such as `ImageTransform`.
        num_workers: processes that load ahead.
        pin_memory: load into memory from which a GPU copies without waiting.

    Raises:
        ValueError: no map-style dataset, one without samples, numbers that leave no batch, or a transform
            that does not take a batch and its samples.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        axis: RankOnAxis | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Collate | None = None,
        transform: Transform | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if isinstance(dataset, DataLoader):
            splits = isinstance(dataset.sampler, torch.utils.data.DistributedSampler)
            by = "its DistributedSampler splits already, and " if splits else ""
            raise ValueError(
                f"a DataLoader is no dataset: pass its dataset, loader.dataset, which {by}is split here "
                "over the data-parallel ranks"
            )
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                kind = type(dataset).__name__
                raise ValueError(
                    f"a {kind} has no {method}; a dataset needs __len__ and __getitem__, and a stream "
                    "goes through plugin.prepare_dataloader or hpnb.data.IterableLoader"
                )
        ranks, rank = (1, 0) if axis is None else (axis.size, axis.rank)
        self.sampler = DistributedBatchSampler(
            len(dataset), batch_size, ranks, rank, shuffle, seed, drop_last
        )
        super().__init__(dataset, batch_size, collate_fn, transform, num_workers, pin_memory)

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        return self.sampler.batches

    def __iter__(self) -> Iterator[Any]:
        self._next = 0 if self._resume is None else self._resume["batch"]
        return self._drop_position(self._run(self.epoch, self._next))

    def _run(self, epoch: int, start: int) -> Iterator[Any]:
        with_partners = bool(getattr(self.transform, "partners", False))
        batches = DataLoader(
            _RankBatches(self.dataset, self.sampler, self.collate, with_partners),
            batch_size=None,  # an index is a whole batch
            sampler=[(epoch, batch) for batch in range(start, len(self))],
            collate_fn=_identity,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # Without a generator every epoch draws from the one that dropout uses.
            generator=seeded_generator(self.sampler.seed, epoch, self.sampler.rank),
        )
        for number, batch in enumerate(batches, start):
            self._next = number + 1
            if self.transform is not None:
                batch = self.transform(batch, self.sampler.batch_samples(epoch, number, with_partners))
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position after the last batch that was returned; the same on every rank."""
        sampler = self.sampler
        return {"epoch": self.epoch, "batch": self._next, "seed": sampler.seed,
                "shuffle": int(sampler.shuffle), "samples": sampler.samples,
                "global_batch": sampler.global_batch_size}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a saved position: the next iteration returns the batches that were left of that epoch.

        The layout may be another one, as long as the global batch size is the same.

        Raises:
            ValueError: the state is of other samples, another order, or another global batch.
        """
        order = ("samples", "seed", "shuffle", "global_batch")
        here = self.state_dict()
        self._check_order(state, {name: here[name] for name in order}, self.sampler.ranks)
        self.epoch, self._next, self._resume = state["epoch"], state["batch"], state


class _RankBatches(torch.utils.data.Dataset[Any]):
    """The dataset of a worker process: an index is (epoch, batch), an item this rank's batch."""

    def __init__(
        self, dataset: MapDataset, sampler: DistributedBatchSampler, collate: Collate, with_partners: bool
    ) -> None:
        self.dataset, self.sampler, self.collate = dataset, sampler, collate
        self.with_partners = with_partners

    def __getitem__(self, index: tuple[int, int]) -> Any:
        samples = self.sampler.batch_samples(*index, self.with_partners).samples
        if samples:
            return self.collate([self._load(sample, index[0]) for sample in samples])
        probe = self.sampler.global_batch(*index)[0]  # has the fields, shapes and dtypes of the empty batch
        return empty_batch(self.collate([self._load(probe, index[0])]), samples=1)

    def _load(self, sample: int, epoch: int) -> Any:
        if get_worker_info() is not None:
            seed_generators(seed_of(self.sampler.seed, epoch, sample))
        return self.dataset[sample]


def empty_batch(batch: Any, samples: int) -> Any:
    """No samples, with the fields, trailing shapes and dtypes of `batch`. A number without a dim stays.

    Args:
        samples: how many `batch` has.
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {name: empty_batch(value, samples) for name, value in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    fields = [empty_batch(part, samples) for part in batch] if _has_fields(batch, samples) else []
    return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)


_CONTAINERS = (torch.Tensor, np.ndarray, Mapping, list, tuple)


def _has_fields(batch: Sequence[Any], samples: int) -> bool:
    """Whether the entries are fields of a batch, such as (pixels, labels), and not one per sample, such as
    texts."""
    if hasattr(batch, "_fields"):
        return True
    if not any(isinstance(part, _CONTAINERS) for part in batch):
        return False
    in_lists = all(isinstance(part, (list, tuple)) and len(part) == samples for part in batch)
    return len(batch) != samples or in_lists or _sizes(batch) - {None} == {samples}


def _sizes(value: Any) -> set[int | None]:
    """The first sizes of all tensors, arrays and lists in `value`; None for what has no size."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return {len(value) if value.ndim else None}
    parts = list(value.values() if isinstance(value, Mapping) else value)
    if isinstance(value, (list, tuple)) and not any(isinstance(part, _CONTAINERS) for part in parts):
        return {len(value)}
    return set().union(*(_sizes(part) if isinstance(part, _CONTAINERS) else {None} for part in parts))


def _identity(batch: Any) -> Any:
    return batch
