"""A run with expert parallelism that is saved goes on bit for bit on its layout, and exactly on others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from safetensors.torch import load_file
from test_expert_parallel import build, distances

import hpnb

BEFORE, AFTER = 3, 4  # steps until the save, and after it
SAMPLES, GLOBAL_BATCH = 40, 8  # five steps an epoch: the save is inside the first, the run ends in the second


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.ids = torch.randint(3, 29, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i].clone()}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def train(plugin: dict[str, Any], adam: bool, folder: str, saves: bool, loads: bool) -> Any:
    """(losses, learning rates, imbalances) of the steps after the save; the model then is in `folder`-end."""
    options = {"precision": "fp64", "max_norm": 0.7, "selection_bias_rate": 0.01, **plugin}
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(**options))
    model = build("DeepseekV3", num_hidden_layers=3)
    parameters = model.parameters()
    optimizer: Any = torch.optim.AdamW(parameters, 1e-2) if adam else torch.optim.SGD(parameters, 0.5, 0.9)
    per_rank = GLOBAL_BATCH // booster.plugin.dp_size
    loader = booster.plugin.prepare_dataloader(Texts(), per_rank, shuffle=True, seed=7)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BEFORE + AFTER + 2)
    boosted, optimizer, _, loader, scheduler = booster.boost(
        model, optimizer, dataloader=loader, lr_scheduler=scheduler
    )
    if loads:
        booster.load(folder, boosted, optimizer, scheduler, loader)
    losses, rates, step = [], [], BEFORE if loads else 0
    while step < BEFORE + AFTER:
        for batch in loader:
            optimizer.zero_grad()
            result = booster.execute_pipeline(iter([batch]), boosted, None, optimizer, return_loss=True)
            optimizer.step()
            scheduler.step()
            step += 1
            if step == BEFORE and saves:
                booster.save(folder, boosted, optimizer, scheduler, loader)
            if step > BEFORE:
                losses.append(None if result["loss"] is None else float(result["loss"]))
                rates.append(optimizer.param_groups[0]["lr"])
            if step == BEFORE + AFTER:
                break
    booster.save_model(boosted, f"{folder}-end")
    return losses, rates, boosted.selection_bias.loads.imbalances[-AFTER:]


def read(folder: str) -> dict[str, torch.Tensor]:
    """The weights, and the routers' biases."""
    return load_file(f"{folder}-end/model.safetensors")


def biases(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value for name, value in weights.items() if name.endswith("correction_bias")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("adam", "zero"), [(False, 0), (True, 2), (True, 3)], ids=["sgd", "adamw, ZeRO 2", "adamw, ZeRO 3"]
)
def test_on_the_same_layout_bit_for_bit(pools: RankPools, adam: bool, zero: int, tmp_path: Path) -> None:
    plugin, folder = {"ep_size": 2, "zero_stage": zero}, str(tmp_path / "run")
    wanted = pools[4].run(train, plugin, adam, folder, True, False)
    weights = read(folder)
    resumed = pools[4].run(train, plugin, adam, folder, False, True)
    assert resumed == wanted
    again = read(folder)
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    saved = load_file(f"{folder}/model/model.safetensors")  # at the end they may have moved back to 0
    assert max(float(bias.abs().max()) for bias in biases(saved)) > 0.009


OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ep 4, ZeRO 1": (4, {"ep_size": 4, "zero_stage": 1}),
    "dp 2 x ep 2, ZeRO 3 within nodes": (4, {"ep_size": 2, "zero_stage": 3, "zero_replicas": 2}),
    "tp 2 x ep 2": (4, {"ep_size": 2, "tp_size": 2}),
    "pp 2 x ep 2": (4, {"ep_size": 2, "pp_size": 2, "num_microbatches": 2}),
    "cp 2 = ep 2": (2, {"ep_size": 2, "cp_size": 2}),
}


@pytest.fixture(scope="module")
def saved(pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The folder of a save under ep 2, and one process that trains on without a save."""
    folder = tmp_path_factory.mktemp("saved")
    pools[2].run(train, {"ep_size": 2}, False, str(folder / "run"), True, False)
    results = pools[1].run(train, {}, False, str(folder / "one"), False, False)[0]
    return str(folder / "run"), (*results, read(str(folder / "one")))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", OTHERS)
def test_on_another_layout_exactly(pools: RankPools, saved: tuple[str, Any], layout: str) -> None:
    folder, (losses, rates, imbalances, weights) = saved
    ranks, plugin = OTHERS[layout]
    for ours in pools[ranks].run(train, plugin, False, folder, False, True):
        assert None in ours[0] or ours[0] == pytest.approx(losses, rel=1e-12)
        assert ours[1] == rates
        assert plugin.get("pp_size") or ours[2] == imbalances  # a stage has the loads of its own layers
    assert max(distances(read(folder), weights).values()) < 1e-12
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)


def test_context_parallelism_resumes_too(pools: RankPools, tmp_path: Path) -> None:
    plugin, folder = {"cp_size": 2}, str(tmp_path / "run")
    wanted = pools[2].run(train, plugin, False, folder, True, False)
    assert pools[2].run(train, plugin, False, folder, False, True) == wanted
