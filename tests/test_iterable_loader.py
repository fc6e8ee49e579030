"""Streams: a replica reads its own samples, all ranks of it the same ones, and all ranks end together."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import hpnb
from hpnb.data.batch_agreement import iterate_together
from hpnb.hybrid.training import hooks, resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.run_state import TrainingState

D = torch.float64
SAMPLES = 22  # 5 global batches of 4, and one of 2
LAYOUTS: dict[str, dict[str, Any]] = {"dp": {}, "tp": {"tp_size": 2}, "pp": {"pp_size": 2}}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def row(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    return {"x": torch.randn(6, generator=g, dtype=D), "number": torch.tensor(i)}


class Stream(IterableDataset[Any]):
    """Rows 0, 1, 2, ..., of which it knows nothing more."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(row, range(self.samples))


class StreamByWorker(Stream):
    """Shards itself over workers, as PyTorch's documentation shows, and keeps what it has read."""

    read: list[int]

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(worker, self.samples, workers):
            self.read = [*getattr(self, "read", []), i]
            yield row(i)


class StreamWithState(Stream):
    """Goes on from a position without reading what was before."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.at, self.samples):
            self.at = i + 1
            yield row(i)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def streaming(shards: int, samples: int = SAMPLES) -> Any:
    import datasets

    table = datasets.Dataset.from_dict({"number": list(range(samples))})
    return table.to_iterable_dataset(num_shards=shards).map(lambda r: row(r["number"])).with_format("torch")


MAKERS: dict[str, Any] = {
    "plain": Stream, "by worker": StreamByWorker, "with state": StreamWithState,
    "one shard": lambda: streaming(1), "four shards": lambda: streaming(4),
}  # fmt: skip


def batches(how: dict[str, Any], kind: str, stop: int | None = None, **options: Any) -> tuple[int, Any, Any]:
    """(the replica, the numbers in each batch, what is left by the state after `stop` batches)."""
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)

    def make() -> Any:
        return plugin.prepare_dataloader(MAKERS[kind](), 4 // plugin.dp_size, **options)

    loader = make()
    everything = [batch["number"].tolist() for batch in loader]
    left = None
    if stop is not None:
        loader.set_epoch(1)
        seen = iter(loader)
        for _ in range(stop):
            next(seen)
        state, loader = loader.state_dict(), make()
        loader.load_state_dict(state)
        loader.set_epoch(1)
        left = [batch["number"].tolist() for batch in loader]
    return plugin.mesh.dp.rank, everything, left


def global_batches(found: list[Any]) -> list[set[int]]:
    """The samples of each batch, after ranks of one replica had the same."""
    by_replica: dict[int, Any] = {}
    for replica, everything, _ in found:
        assert by_replica.setdefault(replica, everything) == everything
    joined = [list(chain(*parts)) for parts in zip(*by_replica.values(), strict=True)]
    assert sorted(chain(*joined)) == list(range(SAMPLES)), "a sample is lost or doubled"
    return [set(samples) for samples in joined]


READS: list[int] = []
IN_ORDER = [set(range(k, min(k + 4, SAMPLES))) for k in range(0, SAMPLES, 4)]


@pytest.mark.sampled(6, cover=True)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_read_their_own_samples(pools: RankPools, layout: str, kind: str) -> None:
    """Batch k is the same set of samples in every layout, unless each replica has shards."""
    found = global_batches(pools[4].run(batches, LAYOUTS[layout], kind))
    if kind != "four shards":
        assert found == IN_ORDER


@pytest.mark.parametrize("kind", ["plain", "by worker", "four shards"])
def test_workers_neither_double_nor_lose_samples(pools: RankPools, kind: str) -> None:
    found = global_batches(pools[2].run(batches, {}, kind, num_workers=2))
    if kind == "plain":
        assert found == IN_ORDER


def test_a_dataset_that_shards_itself_reads_no_more_than_its_shard(pools: RankPools) -> None:
    def read() -> list[int]:
        plugin = hpnb.HybridParallelPlugin(precision="fp64")
        loader = plugin.prepare_dataloader(StreamByWorker(), 2)
        list(loader)
        numbers: list[int] = loader._source.dataset.read
        return numbers

    assert pools[2].run(read) == [list(range(0, SAMPLES, 2)), list(range(1, SAMPLES, 2))]


def test_replicas_with_shards_of_other_lengths_end_together(pools: RankPools) -> None:
    """Two shards of 21 samples over two replicas are 11 and 10; one sample gives the other rank empty batches
    with the right fields."""

    def read(samples: int, drop_last: bool) -> list[tuple[list[int], Any]]:
        plugin = hpnb.HybridParallelPlugin(precision="fp64")
        loader = plugin.prepare_dataloader(streaming(2, samples), 5, drop_last=drop_last)
        return [(batch["number"].tolist(), tuple(batch["x"].shape)) for batch in loader]

    first, second = pools[2].run(read, 21, False)
    assert [len(numbers) for numbers, _ in first] == [5, 5, 1]
    assert [len(numbers) for numbers, _ in second] == [5, 5, 0]
    assert second[-1][1] == (0, 6)
    assert [len(rows) for rows in pools[2].run(read, 21, True)] == [2, 2]
    first, second = pools[2].run(lambda: [len(b["x"]) for b in hpnb.data.IterableLoader(
        Stream(1), 5, hpnb.Mesh(hpnb.Layout(dp=2)).dp)])  # fmt: skip
    assert (first, second) == ([1], [0])


@pytest.mark.parametrize(("lengths", "warns"), [((3, 17, 1, 16), True), ((9, 11, 8, 9), False)])
def test_a_replica_that_stays_without_samples_is_named(
    pools: RankPools, lengths: tuple[int, ...], warns: bool
) -> None:
    """The global batch fell from 8 samples to 4 for most of the epoch, without a word."""

    def read() -> tuple[list[str], list[int]]:
        import datasets

        def rows(shards: list[int]) -> Iterator[Any]:
            for shard in shards:
                yield from ({"number": 100 * shard + i} for i in range(lengths[shard]))

        stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
        plugin = hpnb.HybridParallelPlugin(precision="fp64")
        loader = plugin.prepare_dataloader(stream.with_format("torch"), 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sizes = [len(batch["number"]) for batch in loader]
            list(loader)  # it is said once
        return [str(w.message) for w in caught if "no samples" in str(w.message)], sizes

    for said, sizes in pools[2].run(read):
        assert len(said) == int(warns), sizes
        if warns:
            assert "data-parallel rank 0 has had no samples for 3 batches" in said[0]
            assert "a step trains on 4 samples instead of 8" in said[0]


@pytest.mark.sampled(5, cover=True)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_was(pools: RankPools, kind: str, workers: int) -> None:
    for _, everything, left in pools[2].run(batches, {}, kind, stop=3, num_workers=workers):
        assert left == everything[3:]


def shuffled_stream(how: str) -> Any:
    import datasets

    stream = datasets.Dataset.from_dict({"number": list(range(40))}).to_iterable_dataset()
    shuffled = stream.shuffle(seed=1, buffer_size=10)
    if how == "changed afterwards":
        return shuffled.map(lambda sample: {"number": sample["number"]}).with_format("torch")
    if how == "one of two":
        return datasets.interleave_datasets([stream, shuffled], stopping_strategy="all_exhausted")
    return shuffled


@pytest.mark.parametrize("how", ["plain", "changed afterwards", "one of two"])
def test_a_stream_that_the_caller_shuffled_goes_on_with_the_batches_that_were_left(how: str) -> None:
    def numbers(loader: Any) -> list[list[int]]:
        return [batch["number"].tolist() for batch in loader]

    loader = hpnb.data.IterableLoader(shuffled_stream(how), 4)
    uninterrupted = numbers(loader)
    seen = iter(loader)
    first = [next(seen)["number"].tolist() for _ in range(3)]
    resumed = hpnb.data.IterableLoader(shuffled_stream(how), 4)
    resumed.load_state_dict(loader.state_dict())
    assert first + numbers(resumed) == uninterrupted


def test_a_position_is_taken_up_without_reading_what_was_before(pools: RankPools) -> None:
    """By the dataset's own state, or torchdata's; the layout may change where batches are the same ones."""

    def saved(make: Any, batch_size: int) -> tuple[dict[str, Any], Any]:
        plugin = hpnb.HybridParallelPlugin(precision="fp64")
        loader = plugin.prepare_dataloader(make(), batch_size)
        seen = iter(loader)
        next(seen), next(seen)
        return loader.state_dict(), [batch["number"].tolist() for batch in seen]

    def resumed(make: Any, batch_size: int, state: Any, **how: Any) -> tuple[list[int], Any]:
        READS.clear()
        plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
        loader = plugin.prepare_dataloader(make(), batch_size)
        loader.load_state_dict(state)
        left = [batch["number"].tolist() for batch in loader]
        return list(READS), left

    def counted() -> Any:
        return streaming(2).map(lambda r: READS.append(int(r["number"])) or r)

    both = pools[2].run(saved, counted, 2)
    (state, _), _ = both
    for (_, left), (reads, again) in zip(both, pools[2].run(resumed, counted, 2, state), strict=True):
        assert again == left
        assert len(reads) == sum(map(len, left)), "batches before the position were read again"
    with pytest.raises(hpnb.RankError, match=r"2 replicas with 0 w.* here are 1 with 0.*shards of"):
        pools[2].run(resumed, counted, 4, state, tp_size=2)
    with pytest.raises(hpnb.RankError, match=r"global_batch=4, this loader has 6; .*batch_size=2"):
        pools[2].run(resumed, counted, 3, state)

    both = pools[2].run(saved, Stream, 2)
    wanted = [sorted(a + b) for a, b in zip(*(left for _, left in both), strict=True)]
    for _, again in pools[2].run(resumed, Stream, 4, both[0][0], tp_size=2):
        assert again == wanted


def test_what_a_stream_cannot_do_is_refused(pools: RankPools) -> None:
    def attempt(data: Any, **options: Any) -> None:
        hpnb.HybridParallelPlugin(precision="fp64").prepare_dataloader(data, 2, **options)

    with pytest.raises(hpnb.RankError, match=r"shuffle=True needs a dataset .* and a Stream"):
        pools[2].run(attempt, Stream(), shuffle=True)
    mixup = hpnb.data.ImageTransform(8, mixup=0.2, classes=2)
    with pytest.raises(hpnb.RankError, match="mixup=0"):
        pools[2].run(attempt, Stream(), transform=mixup)

    def split_before() -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(streaming(2), hpnb.rank(), 2)

    with pytest.raises(hpnb.RankError, match=r"split for 2 ranks already.*split_dataset_by_node"):
        pools[2].run(lambda: attempt(split_before()))
    first, second = pools[2].run(batches, {}, "one shard", shuffle=True, stop=2)
    assert sorted(chain(*first[1], *second[1])) == list(range(SAMPLES))
    assert [first[1], second[1]] != pools[2].run(lambda: batches({}, "one shard")[1])
    assert len(first[2]) == len(first[1]) - 2


# --- loaders of PyTorch -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 3, dtype=D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class StopAfter(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: TrainingState) -> None:
        if trainer.step == self.step:
            raise KeyboardInterrupt


def fit(
    make_loader: Any,
    how: dict[str, Any],
    epochs: int = 2,
    path: Path | None = None,
    stop: int = -1,
    **resume: bool,
) -> tuple[list[float], list[float], list[str]]:
    """(losses of the epochs, weights, warnings)."""
    plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
    booster, net = hpnb.Booster(plugin=plugin), Net()
    model: Any = nn.Sequential(net.body, nn.Tanh()) if plugin.pp_size > 1 else net

    def criterion(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        x = inputs[0] if isinstance(inputs, (list, tuple)) else inputs["x"]
        return (outputs.sum(1) - x.sum(1)).square().mean()

    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    extra: list[Any] = [StopAfter(stop)]
    if path is not None:
        extra.append(hooks.CheckpointHook(path, every=3))
    trainer = hpnb.Trainer(booster, boosted, optimizer, criterion, hooks=extra, display_progress=False)
    if path is not None:
        trainer.resume(path, missing_ok=True, **resume)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(make_loader(plugin), epochs, evaluate=make_loader(plugin))
        except KeyboardInterrupt:
            return [], [], []
    losses = [row[name] for row in trainer.history for name in ("loss", "eval_loss")]
    weights = [] if plugin.pp_size > 1 else net.body.weight.flatten().tolist()
    return losses, weights, [str(warning.message) for warning in caught if "batch" in str(warning.message)]


def test_a_stream_trains_as_one_rank_does_and_goes_on(pools: RankPools, tmp_path: Path) -> None:
    def loader(plugin: Any) -> Any:
        return plugin.prepare_dataloader(Stream(), 4 // plugin.dp_size)

    ((losses, weights, _),) = pools[1].run(fit, loader, {})
    assert losses[2] < losses[0]
    for found in pools[2].run(fit, loader, {}):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(weights, rel=1e-12)
    pools[2].run(fit, loader, {}, 2, tmp_path, 4)
    for found in pools[2].run(fit, loader, {}, 2, tmp_path):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(weights, rel=1e-12)


def test_without_the_loader_a_checkpoint_loads_on_another_number_of_replicas(
    pools: RankPools, tmp_path: Path
) -> None:
    """Two replicas have read two shards each; in one replica's order their place is no place."""

    def resumed(how: dict[str, Any], saves: bool = False, with_loader: bool = True) -> Any:
        plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
        booster, net = hpnb.Booster(plugin=plugin), Net()
        model = nn.Sequential(net.body, nn.Tanh())
        loader = plugin.prepare_dataloader(streaming(4), 4 // plugin.dp_size)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if saves:
            next(iter(loader))
            with torch.no_grad():
                net.body.weight.fill_(7.0)
            booster.save(tmp_path / "run", model, optimizer, None, loader, extra={"step": 1})
            return None
        booster.load(tmp_path / "run", model, optimizer, None, *([loader] if with_loader else []))
        weights = [p.flatten().tolist() for name, p in model.named_parameters() if name == "0.weight"]
        return weights, [i for batch in loader for i in batch["number"].tolist()]

    pools[2].run(resumed, {}, saves=True)
    with pytest.raises(hpnb.RankError, match=r"are restored: leave the dataloader out of booster\.load"):
        pools[2].run(resumed, {"pp_size": 2})
    for weights, samples in pools[2].run(resumed, {"pp_size": 2}, with_loader=False):
        assert weights in ([[7.0] * 18], [])  # the other stage has the Tanh
        assert sorted(samples) == list(range(SAMPLES))


def test_a_trainer_resumes_on_another_number_of_replicas_if_the_epoch_begins_anew(
    pools: RankPools, tmp_path: Path
) -> None:
    """fit named booster.load alone, which a Trainer's caller doesn't call."""

    def loader(plugin: Any) -> Any:
        return plugin.prepare_dataloader(StreamByWorker(), 4 // plugin.dp_size)

    def by_hand() -> list[float]:
        """Losses of two epochs and of the evaluation after each, from the checkpoint on."""
        plugin = hpnb.HybridParallelPlugin(precision="fp64")
        booster, net = hpnb.Booster(plugin=plugin), Net()
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        booster.load(tmp_path, model, optimizer)

        def mean(train: bool) -> float:
            total = 0.0
            for batch in loader(plugin):
                loss = (model(batch["x"]).sum(1) - batch["x"].sum(1)).square().mean()
                if train:
                    optimizer.zero_grad()
                    booster.backward(loss, optimizer)
                    optimizer.step()
                total += loss.item() * len(batch["x"])
            return total / SAMPLES

        return [mean(train) for train in (True, False, True, False)]

    pools[4].run(fit, loader, {}, 2, tmp_path, 4)
    assert [path.name for path in resuming.saved(tmp_path)] == ["step-00000003"]
    (right,) = pools[1].run(by_hand)
    with pytest.raises(hpnb.RankError, match=r"a Trainer call trainer\.resume\(folder, restore_data=False\)"):
        pools[2].run(fit, loader, {}, 2, tmp_path)
    for losses, *_ in pools[2].run(fit, loader, {}, 2, tmp_path, restore_data=False):
        assert losses == pytest.approx(right, rel=1e-12)
    assert resuming.step_of(resuming.saved(tmp_path)[-1]) == 3 + 2 * len(IN_ORDER)


@pytest.mark.parametrize(
    ("kind", "workers", "why"),
    [
        ("by worker", 0, r"A StreamByWorker calls get_worker_info\(\) and shards itself"),
        ("plain", 2, r"With workers the loader doesn't see whether a Stream shards itself"),
        ("four shards", 2, "Replicas or workers read different shards of a stream of `datasets`"),
    ],
)
def test_a_stream_that_may_be_in_another_order_is_refused_with_the_reason(
    pools: RankPools, kind: str, workers: int, why: str
) -> None:
    def load(state: Any = None, **how: Any) -> Any:
        plugin = hpnb.HybridParallelPlugin(precision="fp64", **how)
        data, batch_size = MAKERS[kind](), 4 // plugin.dp_size
        loader = plugin.prepare_dataloader(data, batch_size, num_workers=workers)
        if state is not None:
            return loader.load_state_dict(state)
        next(iter(loader))
        return loader.state_dict()

    state, _ = pools[2].run(load)
    with pytest.raises(hpnb.RankError, match=f"by 2 replicas with {workers} workers, and here are 1 .*{why}"):
        pools[2].run(load, state, tp_size=2)


class Items:
    """Rows that can be indexed."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        return row(i)


def test_a_loader_over_a_stream_is_warned_about(pools: RankPools) -> None:
    def boost(make: Any) -> list[str]:
        booster, net = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64")), Net()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            booster.boost(net, torch.optim.SGD(net.parameters()), dataloader=make())
        return [str(warning.message) for warning in caught if "data-parallel ranks" in str(warning.message)]

    for make in (lambda: DataLoader(Stream(), 4), lambda: DataLoader(Items(8), 4)):
        assert [len(said) for said in pools[2].run(boost, make)] == [1, 1]
    for _, _, said in pools[2].run(fit, lambda _: DataLoader(Stream(), 4), {}):
        assert any("all read the same first batch" in sentence for sentence in said)


def test_loaders_that_end_apart_end_together_or_are_refused(pools: RankPools) -> None:
    """Rank 1 has fewer samples."""
    for losses, _, said in pools[2].run(fit, lambda _: DataLoader(Stream(20 - 8 * hpnb.rank()), 4), {}, 1):
        assert len(losses) == 2
        assert any("ended after 3 batches on rank 1" in sentence for sentence in said)
    told = "has 5 batches on rank 0 and 3 on rank 1"
    with pytest.raises(hpnb.RankError, match=told):
        pools[2].run(fit, lambda _: DataLoader(Items(20 - 8 * hpnb.rank()), 4), {}, 1)  # type: ignore[arg-type]
    with pytest.raises(hpnb.RankError, match="20 samples on rank 0 and 12 on rank 1"):
        pools[2].run(fit, lambda plugin: plugin.prepare_dataloader(Items(20 - 8 * hpnb.rank()), 4), {}, 1)


def test_ranks_of_one_replica_with_other_batches_are_refused(pools: RankPools) -> None:
    def shuffled(_: Any) -> Any:
        g = torch.Generator().manual_seed(hpnb.rank())
        return DataLoader(Items(20), 4, shuffle=True, generator=g)  # type: ignore[arg-type]

    with pytest.raises(hpnb.RankError, match="ranks 0 and 1 hold one replica"):
        pools[2].run(fit, shuffled, {"pp_size": 2}, 1)


def test_one_process_needs_no_ranks() -> None:
    loader = hpnb.data.IterableLoader(Stream(), 4)
    assert [set(batch["number"].tolist()) for batch in loader] == IN_ORDER
    axis = type("Axis", (), {"size": 1, "rank": 0})
    assert len(list(iterate_together([1, 2, 3], axis))) == 3


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
def test_torchdata_keeps_the_position_of_workers(pools: RankPools) -> None:
    def keeper() -> str:
        return hpnb.data.IterableLoader(streaming(4), 2, num_workers=2).state_dict()["keeper"]

    assert pools[1].run(keeper) == ["torchdata"]


def orders_of_epochs() -> list[list[int]]:
    import datasets

    stream = datasets.Dataset.from_dict({"i": list(range(24))}).to_iterable_dataset()
    loader = hpnb.TorchDDPPlugin("fp32").prepare_dataloader(stream, 4, shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append([i for batch in loader for i in batch["i"].tolist()])
    return orders


def test_a_shuffled_stream_has_another_order_in_every_epoch() -> None:
    first, second = hpnb.launch(orders_of_epochs, ranks=2, device="cpu")
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours + theirs) == list(range(24))
    assert first[0] != first[1]
    assert first[0] == first[2]


class StreamByRank(Stream):
    """Splits itself by rank, and if asked over workers as well, as a program without hpnb has to."""

    def __init__(self, by_worker: bool) -> None:
        super().__init__()
        self.by_worker = by_worker

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.by_worker else None
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = torch.distributed.get_rank() * workers + worker
        return map(row, range(first, self.samples, torch.distributed.get_world_size() * workers))


def _said_by(make: Any, num_workers: int = 0) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = hpnb.HybridParallelPlugin(precision="fp64")
        list(plugin.prepare_dataloader(make(), 2, num_workers=num_workers))
    return [str(w.message) for w in caught if "is split" in str(w.message)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("by_worker", [False, True])
def test_a_stream_that_splits_itself_by_rank_is_named(
    pools: RankPools, by_worker: bool, num_workers: int
) -> None:
    said = pools[2].run(_said_by, lambda: StreamByRank(by_worker), num_workers)
    seen = "asks for its rank" if by_worker else "rank 0 and rank 1 different first samples"
    for sentences in said:
        assert [seen in sentence and "DataLoader" in sentence for sentence in sentences] == [True]


def test_what_is_the_same_on_all_ranks_is_split_without_a_word(pools: RankPools) -> None:
    for make in (Stream, StreamByWorker, lambda: Items(22), RandomlyCropped):
        assert pools[2].run(_said_by, make) == [[], []]


class RandomlyCropped:
    """Every sample has noise that differs on every rank and in every epoch."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(6, dtype=D), "number": torch.tensor(i)}


def test_a_list_that_differs_between_ranks_is_named(pools: RankPools) -> None:
    """Each rank has kept every second sample, and prepare_dataloader would split those again."""

    def own() -> list[Any]:
        return [row(i) for i in range(hpnb.rank(), SAMPLES, hpnb.world_size())]

    def state() -> bool:
        before = torch.random.get_rng_state()
        hpnb.HybridParallelPlugin(precision="fp64").prepare_dataloader(RandomlyCropped(), 2)
        return torch.equal(before, torch.random.get_rng_state())

    for sentences in pools[2].run(_said_by, own):
        assert ["samples 0, 5, 10 of the 11" in sentence for sentence in sentences] == [True]
        assert "give every rank all samples" in sentences[0]
    assert pools[2].run(state) == [True, True]  # the comparison draws no random numbers


def test_a_dataloader_is_no_dataset() -> None:
    rows: Any = [row(i) for i in range(6)]
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=r"pass its dataset, loader\.dataset, which its DistributedSampler"):
        hpnb.data.Loader(DataLoader(rows, 2, sampler=sampler), 2)  # type: ignore[arg-type]


def fit_without_samples(kind: str) -> str:
    plugin = hpnb.HybridParallelPlugin(precision="fp32")
    booster, model = hpnb.Booster(plugin=plugin), torch.nn.Linear(4, 3)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader: Any = plugin.prepare_dataloader(Stream(0), 2)
    if kind == "generator":
        loader = (batch for batch in [])
    try:
        if kind == "loop":
            booster.execute_pipeline(iter(loader), model, lambda outputs, _: outputs.mean(), optimizer)
        hpnb.Trainer(booster, model, optimizer, display_progress=False).fit(loader, 1)
    except (ValueError, StopIteration) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stream", "its Stream gave no sample"),
        ("generator", "a generator can be read once"),
        ("loop", "if it never gave one, its dataset has no samples"),
    ],
)
def test_a_stream_without_samples_is_called_that(pools: RankPools, kind: str, words: str) -> None:
    """The Trainer said that it must be read again, as of a generator."""
    for said in pools[2].run(fit_without_samples, kind):
        assert words in said
