"""DataParallel, ZeroOptimizer and fully_shard on one model: who reduces, and by whose options."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch import nn

from hpnb import Layout, Mesh
from hpnb.data_parallel import DataParallel, ZeroOptimizer, fully_shard
from hpnb.placement import Cut, Placement, keep_placements, set_placement

D = torch.float64


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


def message_of(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


# --- one after the other ---------------------------------------------------------------------------------


def test_a_sharded_module_is_not_wrapped_and_keeps_its_values(pools: RankPools) -> None:
    def run() -> tuple[str, bool]:
        axis = Mesh(Layout(dp=2)).dp
        torch.manual_seed(0)
        serial = nn.Linear(4, 4)
        model = fully_shard(copy.deepcopy(serial), axis)
        message = message_of(lambda: DataParallel(model, axis))
        x = torch.ones(1, 4)
        return message, torch.equal(model(x), serial(x))

    for message, equal in pools[2].run(run):
        assert "FSDPState already" in message
        assert equal  # rank 0's shard was not sent to rank 1


@pytest.mark.parametrize("stage", [1, 2])
def test_sums_are_not_summed_again_with_zero_on_a_replica(pools: RankPools, stage: int) -> None:
    """Two backwards a step that both reduce, with sums instead of means, against one process."""

    def run() -> float:
        axis = Mesh(Layout(dp=2)).dp
        torch.manual_seed(0)
        serial = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        model = copy.deepcopy(serial)
        replica = DataParallel(model, axis, average=False)
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage, average=False, lr=0.3)
        plain = torch.optim.SGD(serial.parameters(), lr=0.3)
        g = torch.Generator().manual_seed(3)
        for _ in range(2):
            zero.zero_grad()
            plain.zero_grad()
            for _ in range(2):
                x = torch.randn(4, 4, dtype=D, generator=g)
                replica(x.chunk(2)[axis.rank]).square().sum().backward()
                serial(x).square().sum().backward()
            zero.step()
            plain.step()
        pairs = zip(model.parameters(), serial.parameters(), strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    assert max(pools[2].run(run)) < 1e-12


def test_means_and_sums_of_one_gradient_are_refused(pools: RankPools) -> None:
    def run(first: str) -> str:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Linear(4, 4)

        def wrap(average: bool) -> DataParallel:
            return DataParallel(model, axis, average=average)

        def make_zero(average: bool) -> ZeroOptimizer:
            return ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, average=average)

        make_first, make_second = (wrap, make_zero) if first == "replica" else (make_zero, wrap)
        earlier = make_first(False)  # noqa: F841
        return message_of(lambda: make_second(True))

    for first, kind in (("replica", "DataParallel"), ("zero", "ZeroOptimizer")):
        for message in pools[2].run(run, first):
            assert "average=True" in message, (first, message)
            assert f"average=False in the {kind}" in message, (first, message)


def test_a_step_after_a_reduction_that_failed_is_refused(pools: RankPools) -> None:
    def run(earlier_backward: bool) -> str:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        replica = DataParallel(model, axis)
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis)
        x = torch.ones(1, 4)
        if earlier_backward:
            replica(x).sum().backward()
            zero.zero_grad()
            with replica.no_sync():
                replica(x).sum().backward()
        else:
            with contextlib.suppress(RuntimeError):  # parameters without a gradient
                model[0](x).sum().backward()
        return message_of(zero.step)

    for earlier_backward in (False, True):
        for message in pools[2].run(run, earlier_backward):
            assert "no backward since the last step was reduced" in message


def test_the_reducer_of_a_replica_whose_gradients_zero_reduces(pools: RankPools) -> None:
    def run() -> str:
        axis = Mesh(Layout(dp=2)).dp
        model = nn.Linear(4, 4)
        replica = DataParallel(model, axis)
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, stage=2)  # noqa: F841
        return message_of(lambda: replica.reducer)

    assert pools[2].run(run) == ["a ZeroOptimizer reduces these gradients"] * 2


# --- DataParallel itself ---------------------------------------------------------------------------------


class Average(nn.Module):
    """A buffer that the forward replaces by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False, dtype=D)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(1, dtype=D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + x.mean()
        y: torch.Tensor = self.linear(x) + self.mean
        return y


def test_a_buffer_that_a_forward_replaces_follows_rank_0(pools: RankPools) -> None:
    def run() -> float:
        axis = Mesh(Layout(dp=2)).dp
        replica = DataParallel(Average(), axis)
        for _ in range(3):  # rank 0 adds 1 each time, and rank 1 adds 2 to what rank 0 had
            replica(torch.full((1, 1), axis.rank + 1.0, dtype=D)).sum().backward()
        return float(replica.module.mean)  # type: ignore[arg-type]

    assert pools[2].run(run) == [3.0, 4.0]


def test_a_copy_of_a_replica_has_no_sync(pools: RankPools) -> None:
    def run() -> bool:
        copied = copy.deepcopy(DataParallel(nn.Linear(2, 2), Mesh(Layout(dp=2)).dp))
        with copied.no_sync():
            return bool(copied(torch.ones(1, 2)).isfinite().all())

    assert pools[2].run(run) == [True, True]


@pytest.mark.parametrize("average", [True, False])
def test_what_is_frozen_between_two_backwards_keeps_its_gradient(pools: RankPools, average: bool) -> None:
    def run() -> float:
        axis = Mesh(Layout(dp=2)).dp
        torch.manual_seed(0)
        serial = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        model = copy.deepcopy(serial)
        replica = DataParallel(model, axis, average=average)
        x = torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(3))
        for net, inputs in ((replica, x.chunk(2)[axis.rank]), (serial, x)):
            layers = model if net is replica else serial
            scale = len(inputs) if average else 1
            with replica.no_sync() if net is replica else contextlib.nullcontext():
                (net(inputs).square().sum() / scale).backward()
            layers[0].requires_grad_(False)
            (net(inputs).square().sum() / scale).backward()
        pairs = zip(model.parameters(), serial.parameters(), strict=True)
        return max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)  # type: ignore

    assert max(pools[2].run(run)) < 1e-12


# --- experts, and weights that are sharded along another axis too ------------------------------------------


class TwoExperts(nn.Module):
    """A weight that all ranks have, and one of two experts. Only the first of these two is used."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, dtype=D))
        self.expert = nn.Parameter(torch.randn(2, 4, dtype=D)[mesh.ep.rank : mesh.ep.rank + 1].clone())
        cut = Cut("ep", 0, ((mesh.ep.rank, mesh.ep.rank + 1),))
        set_placement(self.expert, Placement("expert", (2, 4), (cut,)))
        keep_placements(self)
        self.uses_expert = mesh.ep.rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y + x * self.expert if self.uses_expert else y


@pytest.mark.parametrize("kind", ["replica", "zero 1", "zero 2", "zero 3"])
def test_an_expert_that_no_rank_with_it_uses_has_no_gradient(pools: RankPools, kind: str) -> None:
    """Weight decay would shrink an expert whose gradient is zero, and leaves one without a gradient alone."""

    def run() -> tuple[bool, float]:
        mesh = Mesh(Layout(dp=4, ep=2))
        model = TwoExperts(mesh)
        axes: dict[str, Any] = {"axis": mesh.dp, "average": False, "find_unused_parameters": True}
        decay: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.5}
        forward: nn.Module = model
        if kind == "replica":
            forward = DataParallel(model, expert_axis=mesh.edp, **axes)
        elif kind == "zero 3":
            fully_shard(model, expert_axes=(None, mesh.edp), **axes)
        before = model.expert.detach().clone()
        if kind in ("zero 1", "zero 2"):
            optimizer: torch.optim.Optimizer = ZeroOptimizer(
                model.parameters(), torch.optim.SGD, stage=int(kind[-1]), expert_axis=mesh.edp,
                **axes, **decay,
            )  # fmt: skip
        else:
            optimizer = torch.optim.SGD(model.parameters(), **decay)
        forward(torch.ones(1, 4, dtype=D)).sum().backward()
        optimizer.step()
        return model.uses_expert, float((model.expert.detach() - before).abs().sum())

    for uses_expert, moved in pools[4].run(run):
        assert (moved > 0) == uses_expert


def test_zero_clips_a_weight_that_is_sharded_along_tp(pools: RankPools) -> None:
    def run() -> tuple[float, float]:
        mesh = Mesh(Layout(dp=2, tp=2))
        torch.manual_seed(0)
        full = torch.randn(4, 4, dtype=D)
        weight = nn.Parameter(full.chunk(2)[mesh.tp.rank].clone())
        rows = (2 * mesh.tp.rank, 2 * mesh.tp.rank + 2)
        set_placement(weight, Placement("weight", (4, 4), (Cut("tp", 0, (rows,)),)))
        zero = ZeroOptimizer([weight], torch.optim.SGD, mesh.dp, lr=1.0)
        (weight.square().sum()).backward()
        norm = zero.clip_grad_norm_(1.0, [mesh.tp])
        zero.step()
        wanted = full - (2 * full / (2 * full).norm())
        off = (weight.detach() - wanted.chunk(2)[mesh.tp.rank]).abs().max()
        return float(norm / (2 * full).norm()), float(off)

    for ratio, off in pools[4].run(run):
        assert ratio == pytest.approx(1.0, rel=1e-12)
        assert off < 1e-5  # the 1e-6 beside the norm


def test_zero_2_on_a_replica_with_experts_says_how_to_reduce_them(pools: RankPools) -> None:
    """And in the order that the message advises, both train."""

    def run(stage: int) -> tuple[str, float]:
        mesh = Mesh(Layout(dp=4, ep=2))

        def wrap(model: nn.Module) -> nn.Module:
            return DataParallel(
                model, mesh.dp, average=False, expert_axis=mesh.edp, find_unused_parameters=True
            )

        def shard(model: nn.Module) -> ZeroOptimizer:
            return ZeroOptimizer(
                model.parameters(), torch.optim.SGD, mesh.dp, stage, average=False, expert_axis=mesh.edp,
                find_unused_parameters=True, lr=0.5,
            )  # fmt: skip

        first, second = TwoExperts(mesh), TwoExperts(mesh)
        wrap(first)
        message = message_of(lambda: shard(first))
        before = second.expert.detach().clone()
        optimizer = shard(second)
        wrap(second)(torch.ones(1, 4, dtype=D)).sum().backward()
        optimizer.step()
        return message, float((before - second.expert.detach()).sum()) * second.uses_expert

    for stage in (1, 2):
        for rank, (message, moved) in enumerate(pools[4].run(run, stage)):
            assert "the experts among them" in message, message
            assert "make the ZeroOptimizer before the DataParallel" in message, message
            assert moved == (4.0, 0.0)[rank % 2]  # 0.5 times 4 elements times 2 ranks with this expert


class ExpertWithBuffer(nn.Module):
    """One of two experts, whose buffer is sharded as its weight is."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        cut = Cut("ep", 0, ((mesh.ep.rank, mesh.ep.rank + 1),))
        self.weight = nn.Parameter(torch.ones(1, dtype=D))
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((1,), mesh.ep.rank + 1.0, dtype=D))
        self.register_buffer("count", torch.full((1,), mesh.dp.rank + 1.0, dtype=D))
        for name, tensor in (("weight", self.weight), ("scale", self.scale)):
            set_placement(tensor, Placement(name, (2,), (cut,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale + 0  # a forward may replace a buffer
        y: torch.Tensor = x * self.weight * self.scale
        return y


@pytest.mark.parametrize("kind", ["replica", "zero 3"])
def test_the_buffer_of_an_expert_stays_with_that_expert(pools: RankPools, kind: str) -> None:
    def run() -> tuple[float, float, float]:
        mesh = Mesh(Layout(dp=4, ep=2))
        model: Any = ExpertWithBuffer(mesh)
        if kind == "replica":
            module: nn.Module = DataParallel(model, mesh.dp, average=False, expert_axis=mesh.edp)
        else:
            module = fully_shard(model, mesh.dp, expert_axes=(None, mesh.edp), average=False)
        for _ in range(2):
            module(torch.ones(1, dtype=D)).sum().backward()
        return mesh.ep.rank + 1.0, float(model.scale), float(model.count)

    for wanted, scale, count in pools[4].run(run):
        assert (scale, count) == (wanted, 1.0)
