"""The optimizer's entries in a checkpoint that every rank reads: one a stage, and not one a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from rank_pools import RankPools
from torch import nn

import hpnb
from hpnb.hybrid.checkpoint import optimizer_shards
from hpnb.hybrid.checkpoint.background_save import HostCopies
from hpnb.hybrid.checkpoint.state_files import StateReader, unpack
from hpnb.hybrid.checkpoint.weight_files import WeightFiles


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def boosted(options: dict[str, Any], lr: float = 0.01) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", **options))
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=lr))
    return booster, model, optimizer


def step(booster: Any, model: Any, optimizer: Any) -> None:
    batch = torch.ones(4, 4), torch.ones(4, 3)
    booster.execute_pipeline(iter([batch]), model, lambda y, b: (y - b[1]).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def entries(folder: str, options: dict[str, Any], old: bool = False) -> tuple[dict[str, int], list[float]]:
    """{entry: what is in it}, and the counters after a load into another optimizer. In an `old` checkpoint
    all ranks write all they have."""
    booster, model, optimizer = boosted(options)
    step(booster, model, optimizer)
    names, counters = optimizer_shards._writes_names, optimizer_shards._writes_counters
    if old:
        optimizer_shards._writes_names = optimizer_shards._writes_counters = lambda *_: True
    try:
        booster.save(folder, model, optimizer)
    finally:
        optimizer_shards._writes_names, optimizer_shards._writes_counters = names, counters
    stored = StateReader(Path(folder) / "state")
    sizes = {}
    for label, file in stored._values.items():
        if label.startswith(("names/", "optimizer/counters/")):
            with safetensors.safe_open(Path(folder) / "state" / file, "pt") as opened:
                sizes[label] = len(unpack(bytes(opened.get_tensor(label).numpy())))
    booster, model, optimizer = boosted(options)
    booster.load(folder, model, optimizer)
    inner = getattr(optimizer_shards.boosted_optimizer(optimizer), "inner", None)
    return sizes, [float(state["step"]) for state in inner.state.values() if "step" in state]


@pytest.mark.parametrize(
    ("options", "stages"),
    [({}, 1), ({"zero_stage": 1}, 1), ({"zero_stage": 3}, 1), ({"pp_size": 2, "zero_stage": 1}, 2)],
    ids=str,
)
def test_an_entry_is_written_once(
    pools: RankPools, options: dict[str, Any], stages: int, tmp_path: Path
) -> None:
    """Every rank wrote an entry of its parameters and counters, and every rank read all of them."""
    results = pools[4].run(entries, str(tmp_path / "new"), options)
    for sizes, steps in results:
        names = [size for label, size in sizes.items() if label.startswith("names/")]
        counters = [size for label, size in sizes.items() if label.startswith("optimizer/counters/")]
        assert len(names) == stages
        assert sum(names) == sum(counters) == 8
        assert steps
        assert {*steps} == {1.0}
    for (sizes, steps), (_, expected) in zip(
        pools[4].run(entries, str(tmp_path / "old"), options, True), results, strict=True
    ):
        assert sum(label.startswith("names/") for label in sizes) == 4
        assert steps == expected


def copies_of_averages(folder: str) -> tuple[bool, bool]:
    """Whether all copies of averages, and any of the model's parameters, are made before the next update."""
    booster, model, optimizer = boosted({})
    _, average, _ = boosted({})
    step(booster, model, optimizer)
    soon: dict[int, bool] = {}
    copy = HostCopies.copy

    def noted(self: HostCopies, tensor: torch.Tensor, is_soon: bool = False) -> torch.Tensor:
        soon[tensor.data_ptr()] = is_soon
        return copy(self, tensor, is_soon)

    HostCopies.copy = noted  # type: ignore[method-assign]
    try:
        booster.save(folder, model, optimizer, averages={"ema": average}, background=True)
        booster.wait()
    finally:
        HostCopies.copy = copy  # type: ignore[method-assign]
    return all(soon[p.data_ptr()] for p in average.parameters()), any(
        soon[p.data_ptr()] for p in model.parameters()
    )


def test_an_average_is_copied_before_its_next_update(pools: RankPools, tmp_path: Path) -> None:
    """It was copied by the stream for which the optimizer's step waits, and an update before it does not."""
    assert pools[1].run(copies_of_averages, str(tmp_path / "step-1")) == [(True, False)]


def count_verified(folder: str) -> tuple[int, int]:
    """How often the weights in a checkpoint's files are compared, by `load` and by `load_model`."""
    booster, model, optimizer = boosted({})
    booster.save(folder, model, optimizer)
    calls: list[None] = []
    verify = WeightFiles.verify

    def counted(self: WeightFiles, rank: int = 0, ranks: int = 1) -> None:
        calls.append(None)
        verify(self, rank, ranks)

    WeightFiles.verify = counted  # type: ignore[method-assign]
    try:
        booster.load(folder, model, optimizer)
        by_load = len(calls)
        booster.load_model(model, Path(folder) / "model")
    finally:
        WeightFiles.verify = verify  # type: ignore[method-assign]
    return by_load, len(calls)


def test_weights_of_files_that_are_verified_are_not_compared_again(pools: RankPools, tmp_path: Path) -> None:
    assert pools[1].run(count_verified, str(tmp_path / "step-1")) == [(0, 1)]
