"""What has been let go is freed: the memory of one training step is there for the next model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import hpnb
from hpnb import Layout, Mesh
from hpnb.models import GPT2Size

SIZE = GPT2Size(32, 4, 4, 64, 61, 16)
WRAPPED = ["replicas", "zero1", "zero2", "zero3"]
BOOSTED: dict[str, tuple[dict[str, Any], int]] = {
    "dp": ({}, 1),
    "dp, ZeRO 1": ({"zero_stage": 1}, 1),
    "dp, ZeRO 3": ({"zero_stage": 3}, 1),
    "tp": ({"tp_size": 2}, 1),
    "tp, tokens cut": ({"tp_size": 2, "enable_sequence_parallelism": True}, 1),
    "pp": ({"pp_size": 2}, 4),
    "pp, zb-v": ({"pp_size": 2, "pp_style": "zb-v", "num_model_chunks": 2}, 4),
}


def wrapped(how: str) -> list[weakref.ref[Any]]:
    """Two steps by a wrapper; what to look for afterwards."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    model: Any = hpnb.models.gpt2(SIZE)
    module, seen = model, [weakref.ref(p) for p in model.parameters()]
    optimizer: torch.optim.Optimizer
    if how in ("zero1", "zero2"):
        optimizer = hpnb.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, axis, stage=1 if how == "zero1" else 2, lr=1e-3
        )
    else:
        module = hpnb.fully_shard(model, axis) if how == "zero3" else hpnb.DataParallel(model, axis)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.zeros(2, SIZE.length, dtype=torch.long)
    for _ in range(2):
        optimizer.zero_grad()
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return [*seen, weakref.ref(model)]


def boosted(how: str) -> list[weakref.ref[Any]]:
    knobs, microbatches = BOOSTED[how]
    plugin = hpnb.HybridParallelPlugin(precision="fp32", num_microbatches=microbatches, **knobs)
    booster = hpnb.Booster(plugin=plugin)
    made: Any = hpnb.models.gpt2(SIZE)
    ids = torch.zeros(8, SIZE.length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    model, optimizer, *_ = booster.boost(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
    seen: list[weakref.ref[Any]] = [weakref.ref(p) for whose in (made, model) for p in whose.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        if microbatches > 1:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)
        optimizer.step()
    return seen


def left(train: Any, how: str) -> tuple[int, int]:
    """(how many of these are still there, of how many)."""
    from test_ranks import wait_until

    seen = train(how)

    def gone() -> bool:
        gc.collect()  # which does nothing while another thread is at it
        return not any(one() is not None for one in seen)

    wait_until(gone, 3)
    return sum(one() is not None for one in seen), len(seen)


@pytest.fixture(scope="module")
def two() -> Any:
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        yield ranks


def kept_by_nobody() -> tuple[float, bool]:
    """(a gradient by a wrapper to which no name is left, whether it was there without its module)."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    module = torch.nn.Linear(1, 1, bias=False)
    replica = weakref.ref(hpnb.DataParallel(module, axis))
    gc.collect()
    module(torch.tensor([[1.0 + hpnb.rank()]])).sum().backward()
    assert module.weight.grad is not None
    found = module.weight.grad.item()
    del module
    gc.collect()
    return found, replica() is not None


def test_a_wrapper_that_nobody_keeps_reduces_and_goes_with_its_module(two: hpnb.Ranks) -> None:
    assert two.run(kept_by_nobody) == [(1.5, False)] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_is_freed(two: hpnb.Ranks, how: str) -> None:
    for alive, count in two.run(left, wrapped, how):
        assert alive == 0
        assert count > 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", BOOSTED)
def test_a_boosted_model_is_freed(two: hpnb.Ranks, how: str) -> None:
    for alive, count in two.run(left, boosted, how):
        assert alive == 0
        assert count > 20


class OwnTrainer:
    """Has model and optimizer, and a criterion that leads back to both."""

    def __init__(self, how: str) -> None:
        knobs, microbatches = BOOSTED[how]
        plugin = hpnb.HybridParallelPlugin(precision="bf16", num_microbatches=microbatches, **knobs)
        self.booster, made = hpnb.Booster(plugin=plugin), hpnb.models.gpt2(SIZE)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        self.model, self.optimizer, *_ = self.booster.boost(made, optimizer)

    def loss(self, outputs: Any, _: Any) -> Any:
        return outputs.loss

    def step(self) -> None:
        ids = torch.zeros(8, SIZE.length, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        self.booster.execute_pipeline(iter([batch]), self.model, self.loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained_by_its_own(how: str) -> list[weakref.ref[Any]]:
    trainer = OwnTrainer(how)
    trainer.step()
    return [weakref.ref(trainer), *(weakref.ref(p) for p in trainer.model.parameters())]


def of_other_stages(how: str) -> list[weakref.ref[Any]]:
    """The parameters of a model that this rank has no part of, while it trains."""
    plugin = hpnb.HybridParallelPlugin(precision="bf16", num_microbatches=2, **STAGES[how])
    booster, made = hpnb.Booster(plugin=plugin), hpnb.models.gpt2(SIZE)
    every = [weakref.ref(p) for p in made.parameters()]
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    KEPT.append(booster.boost(made, optimizer)[0])
    mine = {id(p) for p in KEPT[-1].parameters()}
    return [one for one in every if id(one()) not in mine]


KEPT: list[Any] = []
STAGES: dict[str, dict[str, Any]] = {
    "pp": {"pp_size": 2},
    "pp, loss in chunks": {"pp_size": 2, "loss_chunk": 8},
    "pp, ZeRO 3": {"pp_size": 2, "zero_stage": 3},
    "pp, V": {"pp_size": 2, "pp_style": "zb-v", "num_model_chunks": 2, "loss_chunk": 8},
}


@pytest.mark.parametrize("how", STAGES)
def test_a_rank_keeps_its_own_stages_alone(two: hpnb.Ranks, how: str) -> None:
    for alive, count in two.run(left, of_other_stages, how):
        assert count > 20
        assert alive == 0, f"{alive} of {count} parameters of other stages are still there"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", BOOSTED)
def test_a_criterion_may_lead_back_to_the_optimizer(two: hpnb.Ranks, how: str) -> None:
    for alive, count in two.run(left, trained_by_its_own, how):
        assert alive == 0, f"{alive} of {count} are still there"
