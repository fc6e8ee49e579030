"""All ranks agree on each batch of a loader that hpnb did not make: whether there is one, and which.

    for batch in iterate_together(loader, mesh.dp): ...

    a loader ends earlier on one rank       all ranks end there, with a warning; none waits in a collective
    ranks of one replica read different     all raise: one of them reads the inputs, another one the labels
    batches
    all replicas read the same first batch  a warning: the data-parallel ranks repeat one another's work

The messages are four numbers a rank, among CPUs. One of them is a digest of the batch.

A loop of your own has no such loader. There the first step of a model compares its batch over the ranks that
hold one replica (`check_same_batch`), and later steps cost nothing.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.record.traffic import uncounted

_SAMPLED = 256  # elements of a tensor that enter a digest one by one
INCOMPLETE = 1 << 32  # a bit of digests, which have 32 others: some contents are of a class that has none


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
        digest: of the contents; with the bit INCOMPLETE if some have none.
        has_example: whether the rank knows the fields of a batch.
    """

    replica: int
    samples: int
    digest: int
    has_example: bool

    @property
    def ended(self) -> bool:
        return self.samples < 0


def gather_reports(
    batch: Any, ended: bool, replica: int, has_example: bool = True, together: bool = False
) -> list[BatchReport]:
    """The reports of all ranks, in order of rank; all of them call it.

    Args:
        together: whether ranks of one replica must also end at the same step.

    Raises:
        ValueError: ranks of one replica have different batches.
    """
    samples, checksum = (-1, 0) if ended else (count_rows(batch), digest(batch))
    gathered = gather_numbers(replica, samples, checksum, int(has_example))
    reports = [BatchReport(r, n, crc, bool(knows)) for r, n, crc, knows in gathered]
    _refuse_unlike(dict(enumerate(reports)), together)
    return reports


def check_same_batch(batch: Any, *axes: Axis) -> None:
    """Compare a batch over the ranks of `axes`, which hold one replica of the model and all call it.

    Raises:
        ValueError: ranks have different batches.
    """
    if all(axis.size == 1 for axis in axes):
        return
    reports = {dist.get_rank(): BatchReport(0, count_rows(batch), digest(batch), True)}
    for axis in axes:
        if axis.size > 1:
            gathered = [reports] * axis.size
            with uncounted():
                dist.all_gather_object(gathered, reports, group=axis.group)
            reports = {rank: report for of_rank in gathered for rank, report in of_rank.items()}
    _refuse_unlike(reports, together=True)


def _refuse_unlike(reports: Mapping[int, BatchReport], together: bool) -> None:
    """Refuse different batches on ranks of one replica; `reports` by rank."""
    first: dict[int, tuple[int, BatchReport]] = {}
    for rank, report in sorted(reports.items()):
        other, expected = first.setdefault(report.replica, (rank, report))
        ends = not together and (report.ended or expected.ended)
        if not ends and report[:3] != expected[:3]:
            raise ValueError(
                f"ranks {other} and {rank} hold one replica of the model and read different batches, of "
                f"{max(0, expected.samples)} and {max(0, report.samples)} samples; all ranks of a replica "
                "must read the same ones: give the dataset one seed on all ranks, or use "
                "plugin.prepare_dataloader"
            )


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
        first = {report.digest for report in reports}
        if number == 0 and axis.size > 1 and len(first) == 1 and not max(first) & INCOMPLETE:
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
    lengths = [length for (length,) in gather_numbers(batches)]
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


def gather_numbers(*numbers: int) -> list[list[int]]:
    """Those of every rank, in order of rank; all of them call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(numbers)]
    gathered = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(numbers))
    return [numbers_of_rank.tolist() for numbers_of_rank in gathered]


def check_same_dataset(dataset: Any) -> None:
    """Compare the length and three samples of a dataset on all ranks, which call it: the loader that splits
    it takes it for the same one everywhere. Warns if samples differ.

    Raises:
        ValueError: it has another length on another rank.
    """
    lengths = [length for (length,) in gather_numbers(len(dataset))]
    if other := next((rank for rank, n in enumerate(lengths) if n != lengths[0]), None):
        raise ValueError(
            f"the dataset has {lengths[0]} samples on rank 0 and {lengths[other]} on rank {other}; "
            "give every rank the same one, which prepare_dataloader then splits"
        )
    if len(lengths) == 1:
        return
    places = sorted({0, lengths[0] // 2, lengths[0] - 1})
    if (other := _differing(_digest_samples(dataset, places))) is not None:
        warnings.warn(
            f"samples {', '.join(map(str, places))} of the {lengths[0]} in the dataset differ between rank 0 "
            f"and rank {other}, and it is split over the data-parallel ranks all the same, so each "
            "rank trains on a part of its dataset; " + NOT_SPLIT_TWICE,
            stacklevel=3,
        )


def warn_if_split_already(kind: str, digest: int, asks_rank: bool, replicas: int) -> None:
    """Warn of a stream that splits itself by rank, and is split over the replicas again. All ranks call it.

    Args:
        kind: what the stream is called.
        digest: of its first samples on this rank, before they are split; -1 if they are not to be compared.
        asks_rank: whether it asks for its rank, though it shards itself over the workers of all replicas.
    """
    other = _differing(digest)
    if other is not None:
        seen = f"gives rank 0 and rank {other} different first samples"
    elif [1] in gather_numbers(int(asks_rank)):
        seen = "asks for its rank, besides get_worker_info(), which numbers the workers of all ranks already"
    else:
        return
    warnings.warn(
        f"this {kind} {seen}: it probably splits itself by rank, and it is split over {replicas} "
        "data-parallel ranks again, so each rank trains on a part of its part; " + NOT_SPLIT_TWICE,
        stacklevel=3,
    )


NOT_SPLIT_TWICE = (
    "give every rank all samples, or, where ranks have different samples already, pass booster.boost a "
    "torch.utils.data.DataLoader, which is not split"
)


def _digest_samples(dataset: Any, places: list[int]) -> int:
    """A digest of some samples; -1 if they cannot be read here, or differ each time that they are read."""
    with _equal_random_numbers():
        try:
            first = [sample_digest(dataset[i]) for i in places]
        except Exception:
            return -1  # a batch will say it
    with _equal_random_numbers():  # a dataset with a generator of its own gives other ones now
        try:
            again = [sample_digest(dataset[i]) for i in places]
        except Exception:
            return -1  # if only this rank raised here, the others would wait for its digest
    return zlib.crc32(str(first).encode()) if first == again else -1


@contextmanager
def _equal_random_numbers() -> Iterator[None]:
    """Inside, all ranks draw the same ones: a sample that is augmented at random is the same on all."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _differing(digest: int) -> int | None:
    """The first rank whose digest is not that of rank 0; None if a rank has none. All ranks call it."""
    digests = [crc for (crc,) in gather_numbers(digest)]
    if min(digests) < 0:
        return None
    return next((rank for rank, crc in enumerate(digests) if crc != digests[0]), None)


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
    """Samples of a batch: the first size of its first tensor, else the length of its first field."""
    for tensor in tensors_in(batch):
        return len(tensor) if tensor.dim() else 1
    while isinstance(batch, Mapping) and batch:
        batch = next(iter(batch.values()))
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, str) else 1


def sample_digest(sample: Any) -> int:
    """As `digest`, of one sample: of its tensors, arrays, pictures, texts and numbers.

    Of an object of another class it is that of the tensors among its attributes. One without tensors has no
    digest: it counts as equal to any other, and the bit INCOMPLETE says so.
    """
    if isinstance(sample, torch.Tensor):
        return digest(sample)
    if isinstance(sample, Mapping):
        sample = list(sample.items())
    if isinstance(sample, (list, tuple)):
        return _join_digests([sample_digest(part) for part in sample])
    if hasattr(sample, "tobytes"):  # an array, or a picture of Pillow
        return zlib.crc32(sample.tobytes())
    if sample is None or isinstance(sample, (str, bytes, int, float)):
        return zlib.crc32(repr(sample).encode())
    tensors = list(tensors_in(getattr(sample, "__dict__", None)))
    return _join_digests([digest(tensor) for tensor in tensors]) if tensors else INCOMPLETE


def _join_digests(parts: list[int]) -> int:
    return zlib.crc32(str(parts).encode()) | (INCOMPLETE if any(part & INCOMPLETE for part in parts) else 0)


def digest(batch: Any) -> int:
    """A number that differs for batches of other shapes, and almost surely for those of other contents.

    Of a tensor it takes every n-th element, and the sum of all its bytes, read as 64-bit integers, because
    that sum does not depend on the order of addition. n is odd: an even one would stay in one column of an
    image with a border, or of padded texts.
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return _join_digests([digest(part) for part in batch])
    if not isinstance(batch, torch.Tensor):
        return sample_digest(batch)
    flat = batch.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    crc = zlib.crc32(str(tuple(batch.shape)).encode())
    if flat.numel():
        sample = flat[:: -(-flat.numel() // _SAMPLED) | 1].cpu().contiguous()
        crc = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), crc)
        content = flat.contiguous().view(torch.uint8)
        content = content.clone() if content.storage_offset() % 8 else content
        rest = len(content) % 8
        total = int(content[: len(content) - rest].view(torch.int64).sum())
        crc = zlib.crc32(f"{total} {content[len(content) - rest :].tolist()}".encode(), crc)
    return crc
