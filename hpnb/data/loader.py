"""Batches for every rank of a layout, the same ones in every layout (distributed_sampler.py has the rule).

    loader = Loader(dataset, 32, mesh.dp, seed=0, collate=collate_images)
    for epoch in range(epochs):
        loader.set_epoch(epoch)         # another order
        for batch in loader: ...        # as many batches on every rank

A rank left without samples in the last batch gets one of no rows, with the fields, shapes and dtypes of the
others: it joins the step, and the collectives of the others do not wait in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from hpnb.data.dataset import Rows
from hpnb.data.distributed_sampler import Deal, Where

Collate = Callable[[list[Any]], Any]  # items to a batch


class Place(Protocol):
    """A place on an axis: an `hpnb.Axis`, or anything with these two."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...


class Transform(Protocol):
    """What is done to a loaded batch in the rank's own process, where its device is."""

    @property
    def partners(self) -> bool: ...
    def collate(self, items: list[Any], /) -> Any: ...
    def __call__(self, batch: Any, where: Where, /) -> Any: ...


class Loader:
    """Iterate over the batches of this rank: `for batch in Loader(dataset, 32, mesh.dp, seed=0): ...`

    Args:
        dataset: anything with __len__ and __getitem__.
        batch_size: samples a data-parallel rank gets a batch.
        axis: the data axis of the mesh; None is one rank alone.
        shuffle: in another order every epoch; call `set_epoch`.
        seed: of the order and of what `transform` draws; the same on all ranks.
        drop_last: leave out the last global batch where it is not full.
        collate: a list of items to a batch of tensors; None is the transform's, else the dataset's
            `collate` if it has one, else torch's default.
        transform: done to a loaded batch in this process, such as `ImageTransform`.
        num_workers: processes that load ahead.
        pin_memory: load into memory from which a GPU copies without waiting.

    Raises:
        ValueError: a dataset of another kind or without samples, or numbers that deal out nothing.
    """

    def __init__(
        self,
        dataset: Rows,
        batch_size: int,
        axis: Place | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
        transform: Transform | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                kind = type(dataset).__name__
                raise ValueError(f"a {kind} has no {method}; a dataset needs __len__ and __getitem__")
        ranks, rank = (1, 0) if axis is None else (axis.size, axis.rank)
        self.deal = Deal(len(dataset), batch_size, ranks, rank, shuffle, seed, drop_last)
        self.dataset, self.batch_size, self.transform = dataset, batch_size, transform
        own: Collate = getattr(dataset, "collate", None) or default_collate
        usual = own if transform is None else transform.collate
        self.collate = collate or usual
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.epoch = 0
        self._next = 0  # the batch that comes after the one handed out last
        self._resume = 0  # where the next iteration starts: 0, unless a state was loaded

    def __len__(self) -> int:
        """Batches an epoch, the same on every rank."""
        return self.deal.batches

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch` from the next iteration on. A place loaded for this epoch is kept."""
        if epoch < 0:
            raise ValueError(f"epoch={epoch} is negative; use 0 or more")
        if epoch != self.epoch:
            self.epoch, self._next, self._resume = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:
        start, self._resume = self._resume, 0
        self._next = start
        return self._run(self.epoch, start)

    def _run(self, epoch: int, start: int) -> Iterator[Any]:
        partners = self.transform is not None and self.transform.partners
        loaded = DataLoader(
            _Batches(self.dataset, self.deal, self.collate, partners),
            batch_size=None,  # an index is a whole batch
            sampler=[(epoch, batch) for batch in range(start, len(self))],
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # else every epoch draws from the generator that dropout uses
        )
        for batch, found in enumerate(loaded, start):
            self._next = batch + 1
            if self.transform is not None:
                found = self.transform(found, self.deal.where(epoch, batch, partners))
            yield found

    def state_dict(self) -> dict[str, int]:
        """Where the run is: after the batch handed out last. The same on every rank."""
        deal = self.deal
        return {"epoch": self.epoch, "batch": self._next, "seed": deal.seed, "shuffle": int(deal.shuffle),
                "samples": deal.samples, "global_batch": deal.global_batch}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there: the next iteration gives the batches that were left of that epoch.

        The layout may be another one, as long as the global batch is the same.

        Raises:
            ValueError: the state is of other samples, another order, or another global batch.
        """
        own = self.state_dict()
        for name in ("samples", "seed", "shuffle", "global_batch"):
            if state[name] != own[name]:
                needed = f"; with {self.deal.ranks} data-parallel ranks use batch_size="
                fits = name == "global_batch" and state[name] % self.deal.ranks == 0
                hint = f"{needed}{state[name] // self.deal.ranks}" if fits else ""
                said = f"the state was saved with {name}={state[name]}, this loader has {own[name]}"
                raise ValueError(said + hint)
        self.epoch, self._next, self._resume = state["epoch"], state["batch"], state["batch"]


class _Batches(torch.utils.data.Dataset[Any]):
    """What a worker process holds: (epoch, batch) to the rank's batch."""

    def __init__(self, dataset: Rows, deal: Deal, collate: Collate, partners: bool) -> None:
        self.dataset, self.deal, self.collate, self.partners = dataset, deal, collate, partners

    def __getitem__(self, place: tuple[int, int]) -> Any:
        samples = self.deal.where(*place, self.partners).samples
        if samples:
            return self.collate([self.dataset[sample] for sample in samples])
        probe = self.deal.block(*place)[0]  # for the fields, shapes and dtypes of a batch of no rows
        return _no_rows(self.collate([self.dataset[probe]]))


def _no_rows(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: _no_rows(value) for name, value in batch.items()}
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, list) and not any(isinstance(part, torch.Tensor) for part in batch):
        return []  # a list of texts, one a row
    if isinstance(batch, (list, tuple)):
        return type(batch)(_no_rows(part) for part in batch)
    return batch


def _as_it_is(batch: Any) -> Any:
    return batch
