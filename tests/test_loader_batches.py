"""Batches of the loaders: random numbers of worker processes, empty batches, digests, missing fields.

pytest tests/test_loader_batches.py
"""

from __future__ import annotations

import random
import time
import warnings
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hpnb.data import ImageTransform, IterableLoader, Loader, batch_agreement, collate_images, worker_shards
from hpnb.data.batch_agreement import BatchReport, _refuse_unlike, count_rows, digest
from hpnb.data.distributed_sampler import DistributedBatchSampler
from hpnb.data.image_folder import _held_out
from hpnb.data.loader import empty_batch

# --- random numbers in worker processes ------------------------------------------------------------------


class RandomNumbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        return [index, torch.rand(()).item(), random.random(), np.random.rand()]


def draw(
    rank: int = 0, ranks: int = 1, seed: int = 7, epoch: int = 0, start: int = 0, workers: int = 2
) -> dict[int, Any]:
    axis: Any = SimpleNamespace(size=ranks, rank=rank)
    loader = Loader(RandomNumbers(), 4 // ranks, axis, num_workers=workers, seed=seed)
    loader.load_state_dict(loader.state_dict() | {"epoch": epoch, "batch": start})
    rows = [torch.stack(batch, 1) for batch in loader]
    return {int(row[0]): row[1:].tolist() for row in torch.cat(rows)}


def test_random_numbers_in_workers_follow_from_the_sample() -> None:
    numbers = draw()
    columns = list(zip(*numbers.values(), strict=True))
    assert all(len(set(column)) == 8 for column in columns), "samples share random numbers"
    assert not set(columns[0]) & {row[0] for row in draw(epoch=1).values()}, "epochs share random numbers"
    assert not set(columns[0]) & {row[0] for row in draw(seed=8).values()}
    assert draw(rank=0, ranks=2) | draw(rank=1, ranks=2) == numbers, "another layout draws other numbers"
    assert draw(workers=1) == numbers
    resumed = draw(start=1)
    assert len(resumed) == 4
    assert resumed.items() <= numbers.items()


class Shuffled(IterableDataset[Any]):
    def __iter__(self) -> Any:
        order = list(range(16))
        random.shuffle(order)
        yield from order


class Counting(IterableDataset[Any]):
    """Counts its epochs itself."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        yield from range(10 * self.epoch, 10 * self.epoch + 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_workers_shuffle_has_another_order_in_every_epoch(workers: int) -> None:
    loader = IterableLoader(Shuffled(), 4, num_workers=workers)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append([i for batch in loader for i in batch.tolist()])
    assert all(sorted(numbers) == list(range(16)) for numbers in epochs), "a sample is lost or doubled"
    assert epochs[0] == epochs[2] != epochs[1]


def test_a_stream_may_count_its_epochs() -> None:
    loader = IterableLoader(Counting(), 4)
    assert [next(iter(loader)).tolist()[0] for _ in range(3)] == [10, 20, 30]


# --- fields ------------------------------------------------------------------------------------------------


class OtherColumns:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"img": Image.new("RGB", (8, 8)), "fine_label": index % 3}


@pytest.mark.parametrize("options", [{"transform": ImageTransform(8)}, {"collate_fn": collate_images}])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_column_is_an_error_and_no_empty_epoch(options: Any, workers: int) -> None:
    with pytest.raises(KeyError, match=r"'img', 'fine_label'.*'labels' or 'label'"):
        list(Loader(OtherColumns(), 4, num_workers=workers, **options))


# --- empty batches -----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")
X, Y = torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    ("sample", "empty"),
    [
        (({"x": X}, {"y": Y}), [{"x": (0, 2)}, {"y": (0, 3)}]),
        (((X, Y), (Y, X)), [[(0, 2), (0, 3)], [(0, 3), (0, 2)]]),
        ({"inputs": (X, "a text"), "n": 3}, {"inputs": [(0, 2), ()], "n": (0,)}),
        (("a text", 3), [(), (0,)]),
        (("a text", "another"), [(), ()]),
        (({"text": "a text"}, {"text": "another"}), [{"text": []}, {"text": []}]),
        (Pair(X, {"y": Y}), Pair((0, 2), {"y": (0, 3)})),
    ],
)
@pytest.mark.parametrize("samples", [1, 2])
def test_an_empty_batch_has_the_structure_of_the_others(sample: Any, empty: Any, samples: int) -> None:
    batch = empty_batch(default_collate([sample] * samples), samples)
    shapes = tree_map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf, batch)
    assert type(batch) is type(empty)
    assert shapes == empty


@pytest.mark.parametrize("samples", [1, 2])
def test_arrays_numbers_and_entries_per_sample_can_be_empty(samples: int) -> None:
    items = [{"image": torch.ones(3, 8, 8), "boxes": torch.ones(5, 4)}] * samples
    batch = empty_batch({"a": np.ones((samples, 3)), "n": torch.tensor(3), "items": items}, samples)
    assert batch["a"].shape == (0, 3)
    assert batch["n"] == 3
    assert batch["items"] == []
    images, targets = empty_batch(tuple(zip(*[(i["image"], i) for i in items], strict=True)), samples)
    assert (images, targets) == ((), ())


# --- digests -----------------------------------------------------------------------------------------------


def padded_texts(seed: int) -> Any:
    ids = torch.zeros(64, 1024, dtype=torch.long)
    ids[:, 0] = 1
    ids[:, 1:200] = torch.randint(2, 99, (64, 199), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def bordered_images(seed: int) -> torch.Tensor:
    images = torch.zeros(64, 1, 28, 28)
    images[:, :, 2:26, 2:26] = torch.rand(64, 1, 24, 24, generator=torch.Generator().manual_seed(seed))
    return images


@pytest.mark.parametrize("make", [padded_texts, bordered_images])
def test_batches_with_borders_or_padding_have_digests_of_their_contents(make: Any) -> None:
    assert digest(make(0)) == digest(make(0)) != digest(make(1))
    changed = make(0)
    (changed if isinstance(changed, torch.Tensor) else changed["input_ids"]).view(-1)[-3] += 1
    assert digest(changed) != digest(make(0))


def test_batches_without_tensors_have_digests_and_rows() -> None:
    assert digest(["a", "b"]) != digest(["c"])
    assert digest({"x": torch.ones(2), "text": ["a"]}) != digest({"x": torch.ones(2), "text": ["b"]})
    assert digest(torch.arange(20)[1:10:2]) == digest(torch.tensor([1, 3, 5, 7, 9]))
    assert digest(torch.ones(5, dtype=torch.uint8)[1:]) == digest(torch.ones(4, dtype=torch.uint8))
    assert count_rows({"text": ["a", "b", "c"]}) == 3


class Graph:
    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("batches", "warns"),
    [
        ([Graph(torch.tensor(1)), Graph(torch.tensor(2))], False),
        ([Graph(torch.tensor(1)), Graph(torch.tensor(1))], True),
        ([Graph([Graph(1)]), Graph([Graph(2)])], False),
        ([{"graph": Graph(1), "size": 8}, {"graph": Graph(2), "size": 8}], False),
        ([["a", None], ["a", None]], True),
    ],
)
def test_objects_are_only_compared_by_their_tensors(
    monkeypatch: pytest.MonkeyPatch, batches: list[Any], warns: bool
) -> None:
    monkeypatch.setattr(
        batch_agreement, "gather_numbers", lambda *_: [[i, 1, digest(x), 1] for i, x in enumerate(batches)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(batch_agreement.iterate_together(batches, SimpleNamespace(size=2, rank=0)))
    assert ["all read the same first batch" in str(w.message) for w in caught] == [True] * warns


def test_ranks_of_one_replica_with_objects_of_other_tensors_are_refused() -> None:
    def refuse(first: Any, second: Any) -> None:
        reports = [BatchReport(0, 1, digest(x), True) for x in (first, second)]
        _refuse_unlike(dict(enumerate(reports)), together=True)

    refuse(Graph(1), Graph(2))  # which may be the same graph: nothing is known of them
    with pytest.raises(ValueError, match="ranks 0 and 1 hold one replica"):
        refuse(Graph(torch.tensor(1)), Graph(torch.tensor(2)))


def test_samples_that_can_be_read_only_once_are_not_compared() -> None:
    class Once(list[int]):
        def __getitem__(self, i: Any) -> Any:
            return self.pop()

    assert batch_agreement._digest_samples(Once([1, 2, 3]), [0, 1]) == -1


# --- positions ---------------------------------------------------------------------------------------------


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from range(12)


def make(stream: bool) -> Any:
    return IterableLoader(Numbers(), 4) if stream else Loader(list(range(12)), 4, shuffle=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_peek_leaves_the_position(stream: bool) -> None:
    loader = make(stream)
    loader.load_state_dict(loader.state_dict() | {"batch": 1})
    assert next(iter(loader)).tolist() == [4, 5, 6, 7]
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(list(loader)) == 3  # another epoch


@pytest.mark.parametrize("stream", [False, True])
def test_the_state_of_another_kind_of_loader_is_refused(stream: bool) -> None:
    with pytest.raises(ValueError, match="saved by another kind of loader"):
        make(stream).load_state_dict(make(not stream).state_dict())


class AsksForEverything(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        yield from [int(info.rng is None), len(info.worker_method)]


def test_a_stream_sees_all_attributes_of_its_worker() -> None:
    assert next(iter(IterableLoader(AsksForEverything(), 2))).tolist() == [1, len("multiprocessing")]


def test_a_sample_costs_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    plain = worker_shards.patch.object

    def counting(module: Any, name: str, *args: Any) -> Any:
        patched.append(name)
        return plain(module, name, *args)

    monkeypatch.setattr(worker_shards, "patch", SimpleNamespace(object=counting))
    assert len(list(worker_shards.shard_stream(Numbers(), 1, 0, 4))) == 12
    assert len(patched) < 12  # only those that note who asks for its rank, once


def test_ranks_of_one_replica_end_together() -> None:
    reports = {0: BatchReport(0, 4, 77, True), 1: BatchReport(0, -1, 0, True)}
    _refuse_unlike(reports, together=False)
    with pytest.raises(ValueError, match="of 4 and 0 samples"):
        _refuse_unlike(reports, together=True)


def test_partners_cost_linear_time() -> None:
    sampler = DistributedBatchSampler(4096, 4096)
    begin = time.process_time()
    samples = sampler.batch_samples(0, 0, with_partners=True)
    assert time.process_time() - begin < 0.1  # 0.4 s with a search per sample
    everyone = sampler.global_batch(0, 0)
    steps = {(everyone.index(samples.samples[p]) - i) % 4096 for i, p in enumerate(samples.partners[:50])}
    assert len(steps) == 1


def test_a_tenth_is_held_out_in_linear_time() -> None:
    rows = [(str(i), i % 400) for i in range(40_000)]
    begin = time.process_time()
    assert len(_held_out(rows)) == 4000
    assert time.process_time() - begin < 0.2  # 0.6 s with a scan per class
