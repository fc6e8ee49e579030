"""All ranks agree on each batch of a loader that hpnb did not make: whether there is one, and which.

    for batch in iterate_together(loader, mesh.dp): ...

    a loader ends earlier on one rank       all ranks end there, with a warning; none waits in a collective
    ranks of one replica read different     all raise: one of them reads the inputs, another one the labels
    batches
    all replicas read the same first batch  a warning: the data-parallel ranks repeat one another's work

The messages are four numbers a rank, among CPUs. A digest of a batch reads at most 256 elements of a tensor.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

_SAMPLED = 256  # elements of a tensor that enter a digest


class RankOnAxis(Protocol):
    """One rank on the data-parallel axis: an `hpnb.Axis`, or anything with these two."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...


class BatchReport(NamedTuple):
    """What a rank says of its next batch.

    Attributes:
        replica: its rank on the data-parallel axis.
        samples: of the batch; -1 if the loader has ended.
        digest: of the contents.
        has_example: whether the rank knows the fields of a batch.
    """

    replica: int
    samples: int
    digest: int
    has_example: bool

    @property
    def ended(self) -> bool:
        return self.samples < 0


def gather_reports(batch: Any, ended: bool, replica: int, has_example: bool = True) -> list[BatchReport]:
    """The reports of all ranks, in order of rank; all of them call it.

    Raises:
        ValueError: ranks of one replica have different batches.
    """
    own = BatchReport(replica, -1 if ended else count_rows(batch), 0 if ended else digest(batch), has_example)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    gathered = [torch.empty(4, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([*map(int, own)]))
    reports = [BatchReport(r, n, crc, bool(knows)) for r, n, crc, knows in torch.stack(gathered).tolist()]
    first: dict[int, tuple[int, BatchReport]] = {}
    for rank, report in enumerate(reports):
        other, expected = first.setdefault(report.replica, (rank, report))
        if not report.ended and not expected.ended and report[:3] != expected[:3]:
            raise ValueError(
                f"ranks {other} and {rank} hold one replica of the model and read different batches, of "
                f"{expected.samples} and {report.samples} samples; all ranks of a replica must read the same "
                "ones: give the dataset one seed on all ranks, or use plugin.prepare_dataloader"
            )
    return reports


def iterate_together(loader: Iterable[Any], axis: RankOnAxis) -> Iterator[Any]:
    """The batches of `loader`, until it ends on any rank. All ranks call it.

    Raises:
        ValueError: ranks of one replica read different batches.
    """
    batches = iter(loader)
    for number in count():
        batch, ended = next_or_none(batches)
        reports = gather_reports(batch, ended, axis.rank)
        over = [rank for rank, report in enumerate(reports) if report.ended]
        if over:
            if len(over) < len(reports):
                warnings.warn(
                    f"the loader ended after {number} batches on rank {over[0]}, and other ranks have more, "
                    "which are left out; plugin.prepare_dataloader gives every rank as many",
                    stacklevel=2,
                )
            return
        if number == 0 and axis.size > 1 and len({report.digest for report in reports}) == 1:
            warnings.warn(
                f"the {axis.size} data-parallel ranks all read the same first batch, so they probably train "
                "on the same samples; plugin.prepare_dataloader(dataset, batch_size) splits them",
                stacklevel=2,
            )
        yield batch


def check_lengths(loader: Any) -> int | None:
    """The number of batches of `loader`, after all ranks, which call it, have said the same; None if it has
    no length on some rank.

    Raises:
        ValueError: ranks have different numbers of batches.
    """
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):
        batches = -1
    lengths = gather_numbers(batches)
    if min(lengths) < 0:
        return None
    if len(set(lengths)) > 1:
        other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise ValueError(
            f"the loader has {lengths[0]} batches on rank 0 and {lengths[other]} on rank {other}, and a step "
            "needs a batch on every rank; plugin.prepare_dataloader(dataset, batch_size) gives every rank as "
            "many, and an empty one where samples run out"
        )
    return batches


def gather_numbers(number: int) -> list[int]:
    """That of every rank, in order of rank; all of them call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [number]
    numbers = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor(number))
    return [int(n) for n in numbers]


def next_or_none(batches: Iterator[Any]) -> tuple[Any, bool]:
    """(the next batch, False), or (None, True) if there is none."""
    try:
        return next(batches), False
    except StopIteration:
        return None, True


# --- what is in a batch -------------------------------------------------------------------------------------


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)


def count_rows(batch: Any) -> int:
    """Samples of a batch: the first size of its first tensor."""
    for tensor in tensors_in(batch):
        return len(tensor) if tensor.dim() else 1
    return len(batch) if hasattr(batch, "__len__") else 1


def digest(batch: Any) -> int:
    """A number that differs for batches of other shapes, and almost surely for those of other contents."""
    crc = 0
    for tensor in tensors_in(batch):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // _SAMPLED))].cpu().contiguous()
        crc = zlib.crc32(str(tuple(tensor.shape)).encode(), crc)
        if sample.numel():
            crc = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), crc)
    return crc
