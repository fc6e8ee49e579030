"""Learning rates and other numbers of an optimizer that differ between ranks are refused before the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_pools import RankPools

import hpnb
from hpnb.optimizer_state import group_numbers


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


def boosted(layout: dict[str, Any], lr: float) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", num_microbatches=2, **layout))
    model = hpnb.models.vit("laptop", classes=3)
    names = [name for name, _ in model.named_parameters()]
    groups = [
        {"params": [p for name, p in model.named_parameters() if name.endswith("weight")]},
        {"params": [p for name, p in model.named_parameters() if not name.endswith("weight")], "lr": 0.05},
    ]
    assert len(names) == sum(len(group["params"]) for group in groups)
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4) % 3}
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer, batch


def step(booster: Any, model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    booster.execute_pipeline(iter([batch]), model, None, optimizer)
    optimizer.step()


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 3": {"zero_stage": 3},
    "tp": {"tp_size": 2},
    "pp": {"pp_size": 2},
}


def other_momentum_in_the_first_step(layout: dict[str, Any]) -> tuple[str, bool, list[str]]:
    """What the first step says, whether weights are as they were, and what two later steps say."""
    booster, model, optimizer, batch = boosted(layout, 0.1)
    before = [p.detach().clone() for p in model.module.parameters()]
    optimizer.param_groups[1]["momentum"] += 0.05 * hpnb.rank()
    said = []
    for i in range(3):
        try:
            step(booster, model, optimizer, batch)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        if i == 0:
            after = [p.detach().clone() for p in model.module.parameters()]
            kept = all(map(torch.equal, before, after))
        optimizer.param_groups[1]["momentum"] = 0.9
    return said[0], kept, said[1:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_step_refuses_other_numbers_on_another_rank(pools: RankPools, name: str) -> None:
    for said, kept, later in pools[2].run(other_momentum_in_the_first_step, LAYOUTS[name]):
        number = "param_groups[1]['momentum']"
        assert said.startswith(f"the optimizer has {number}=0.9 on rank 0 and {number}=0.95 on rank 1"), said
        assert kept
        assert later == ["", ""]


def boost_with_other_lr(layout: dict[str, Any]) -> str:
    try:
        boosted(layout, 0.1 * (1 + (hpnb.rank() == 3)))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 2, "tp_size": 2}], ids=str)
def test_boost_refuses_another_learning_rate_on_every_rank(pools: RankPools, layout: dict[str, Any]) -> None:
    """Of ZeRO's two data-parallel groups only one has ranks that differ."""
    number = "param_groups[0]['lr']"
    said = pools[4].run(boost_with_other_lr, layout)
    assert (
        said
        == [
            f"the optimizer has {number}=0.1 on rank 0 and {number}=0.2 on rank 3, so ranks would train "
            "different models; give it the same numbers on every rank"
        ]
        * 4
    )


def zero_with_other_lr() -> str:
    axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
    model = torch.nn.Linear(4, 4)
    try:
        hpnb.ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, lr=0.1 + 0.1 * axis.rank)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_zero_optimizer_refuses_another_learning_rate(pools: RankPools) -> None:
    number = "param_groups[0]['lr']"
    for said in pools[2].run(zero_with_other_lr):
        assert said.startswith(f"{number}=0.1 on rank 0 of axis dp, and {number}=0.2 on rank 1"), said


def count_collectives(layout: dict[str, Any]) -> list[int]:
    """Calls of torch.distributed in the optimizer's part of each of four steps, with a scheduler."""
    booster, model, optimizer, batch = boosted(layout, 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls = 0
    names = ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast")

    def counting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return call

    counts = []
    for _ in range(4):
        optimizer.zero_grad()
        booster.execute_pipeline(iter([batch]), model, None, optimizer)
        calls = 0
        with patch.multiple(dist, **{name: counting(getattr(dist, name)) for name in names}):
            optimizer.step()
        scheduler.step()
        counts.append(calls)
    return counts


@pytest.mark.parametrize("name", ["dp", "tp"])
def test_later_steps_send_nothing_to_compare(pools: RankPools, name: str) -> None:
    """torch's all_gather_object calls all_gather twice, for sizes and for what is in it."""
    for first, *later in pools[2].run(count_collectives, LAYOUTS[name]):
        assert first > 0
        assert later == [0, 0, 0]


def test_numbers_of_groups() -> None:
    """What chooses an implementation is left out, and a learning rate that is a tensor is a number."""
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([p], lr=torch.tensor(0.5), betas=(0.9, 0.1 + 0.2), foreach=False)
    numbers = group_numbers(optimizer.param_groups)
    assert numbers["param_groups[0]['lr']"] == 0.5
    assert numbers["param_groups[0]['betas']"] == (0.9, 0.3)
    assert not any("foreach" in name or "params'" in name for name in numbers)
