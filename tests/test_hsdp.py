"""Sharded replicas (HSDP): parameters sharded over a part of dp, equal on the rest, against one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from test_fully_shard import LR, Net, batches, distance, on_cpu, train_rare, whole_gradients

import hpnb
from hpnb import Layout, Mesh, placement, precision
from hpnb.data_parallel.fsdp import fully_shard, no_sync
from hpnb.mesh import Axis


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


def replicas_and_shards() -> tuple[Axis, Axis, Axis]:
    """dp of 4 as 2 replicas of 2 shards."""
    dp = Mesh(Layout(dp=4)).dp
    return dp, *dp.split(2, 2)


def compare(kind: str, options: dict[str, Any], accumulate: int, clip: float) -> float:
    """The largest distance of gradients and weights from one process's, after three steps."""
    dp, replicas, shards = replicas_and_shards()
    torch.manual_seed(0)
    serial = Net(kind)
    torch.manual_seed(dp.rank)  # ranks must not rely on starting equal
    model = Net(kind)
    if dp.rank == 0:
        model.load_state_dict(serial.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    fully_shard(model, shards, replicas=replicas, **options)
    rare = kind == "unused"
    gradients = {}
    for step, (x, y) in enumerate(batches(3, 72)):
        optimizer.zero_grad()
        for i, (part, target) in enumerate(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)):
            mine, wanted = part[dp.rank :: 4], target[dp.rank :: 4]
            if i < accumulate - 1:
                with no_sync(model):
                    ((model(mine, False) - wanted).square().sum() / len(mine) / accumulate).backward()
            else:
                out = model(mine, rare and step == 1 and dp.rank == 0)
                ((out - wanted).square().sum() / len(mine) / accumulate).backward()
        gradients = whole_gradients(model, shards)
        precision.step(optimizer, [shards], max_norm=clip)
    weights = placement.full_state_dict(model, [shards])

    wanted_optimizer = torch.optim.SGD(serial.parameters(), LR, momentum=0.9)
    if rare:
        _, wanted_gradients, wanted_weights = train_rare(serial, wanted_optimizer, 4)
    else:
        for x, y in batches(3, 72):
            wanted_optimizer.zero_grad()
            ((serial(x, False) - y).square().sum() / len(x)).backward()
            wanted_gradients = whole_gradients(serial, None)
            precision.step(wanted_optimizer, (), max_norm=clip)
        wanted_weights = {name: t.detach() for name, t in serial.state_dict().items()}
    for tensors in (weights, wanted_weights):
        tensors.pop("offset")  # zero, so that a relative distance means nothing
    return max(
        distance(on_cpu(gradients), wanted_gradients),
        distance(on_cpu(weights), wanted_weights),
    )


def test_equal_to_one_process(pools: RankPools) -> None:
    cases = [
        ("plain", {}, 1, 0.0),
        ("plain", {"prefetch": 0}, 1, 0.1),
        ("plain", {"reshard_after_forward": False}, 2, 0.0),
        ("plain", {"cpu_offload": True}, 1, 0.1),
        ("frozen", {}, 1, 0.0),
        ("checkpoint", {}, 2, 0.0),
        ("unused", {"find_unused_parameters": True}, 1, 0.0),
    ]
    far = {str(case): max(pools[4].run(compare, *case)) for case in cases}
    assert max(far.values()) < 1e-12, far


def count_bytes() -> tuple[float, float, int]:
    """Bytes that left this rank along each part of dp in one step, and the bytes of all parameters."""
    _, replicas, shards = replicas_and_shards()
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(3)))
    full = sum(p.nbytes for p in model.parameters())
    fully_shard(model, shards, replicas=replicas)
    with hpnb.record.traffic() as t:
        model(torch.ones(1, 32)).sum().backward()
    return t.bytes[shards.name], t.bytes[replicas.name], full


def test_only_a_shard_of_the_gradients_crosses_to_the_replicas(pools: RankPools) -> None:
    """3 (p-1)/p n along the shards, and 2 (r-1)/r n/p along the replicas: here 3/2 n and n/2."""
    for along_shards, along_replicas, full in pools[4].run(count_bytes):
        assert along_shards == 3 * full / 2
        assert along_replicas == full / 2


def shard_over_one_axis_twice() -> None:
    dp, _, shards = replicas_and_shards()
    fully_shard(torch.nn.Linear(4, 4), shards, replicas=dp)


def test_axes_that_share_ranks_are_refused(pools: RankPools) -> None:
    with pytest.raises(hpnb.RankError) as caught:
        pools[4].run(shard_over_one_axis_twice)
    assert re.search(r"ranks (0, 1|2, 3) are on both axes.*mesh\.dp\.split\(2, 4\)", caught.value.summary)


def save_and_load(folder: str, replicas: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Train a step and save (`replicas` above 0) or load; the weights and Adam's averages of all ranks."""
    knobs = {"zero_replicas": replicas} if replicas else {}
    plugin = hpnb.HybridParallelPlugin(zero_stage=3, precision="fp64", **knobs)
    booster = hpnb.Booster(plugin=plugin)
    torch.manual_seed(replicas)
    model = hpnb.models.vit("laptop", classes=3).double()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    if replicas:
        generator = torch.Generator().manual_seed(plugin.mesh.dp.rank)
        batch = {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64),
            "labels": torch.tensor([0, 1]),
        }
        booster.backward(boosted(**batch).loss, optimizer)
        optimizer.step()
        booster.save(folder, boosted, optimizer)
    else:
        booster.load(folder, boosted, optimizer)
    state = optimizer.state
    averages = [state[p]["exp_avg"] for p in boosted.module.parameters() if p in state]
    axis = plugin.zero_axes[1]
    sums = torch.stack([average.double().square().sum() for average in averages])
    torch.distributed.all_reduce(sums, group=axis.group)
    return placement.full_state_dict(boosted.module, [axis]), list(sums)


def test_a_save_of_replicas_loads_in_another_layout(pools: RankPools, tmp_path: Path) -> None:
    """4 ranks that hold each shard twice, then 2 that hold it once."""
    saved, averages = pools[4].run(save_and_load, str(tmp_path / "saved"), 2)[0]
    for loaded, again in pools[2].run(save_and_load, str(tmp_path / "saved"), 0):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert torch.allclose(torch.stack(again), torch.stack(averages), rtol=1e-12)


def test_replicas_that_do_not_divide_dp_are_refused(pools: RankPools) -> None:
    with pytest.raises(hpnb.RankError) as caught:
        pools[4].run(lambda: hpnb.HybridParallelPlugin(zero_stage=3, zero_replicas=3).mesh)
    assert "zero_replicas=3 does not divide the 4 ranks of dp x cp" in caught.value.summary
    assert "use zero_replicas=1 or 2 or 4" in caught.value.summary


def shard_differently(option: str, values: tuple[Any, ...]) -> str:
    """What fully_shard says on this rank, whose option is values[rank]."""
    dp, replicas, shards = replicas_and_shards()
    try:
        fully_shard(Net("plain"), shards, replicas=replicas, **{option: values[dp.rank]})
    except ValueError as error:
        return str(error)
    return "nothing"


# An option and its values on ranks 0 to 3, which are two replicas of two shards, and what all of them say.
DIFFERENT: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "within replica 1": (
        "prefetch", (1, 1, 1, 2),
        "prefetch=1 on rank 0 of axis dp.1, and prefetch=2 on rank 1; pass the same on every rank; here dp.1 "
        "is the axis of ranks 2, 3"),
    "within both": (
        "average", (True, False, True, False),
        "average=True on rank 0 of axis dp.1, and average=False on rank 1; pass the same on every rank; here "
        "dp.1 is the axis of ranks 0, 1"),
    "between replicas": (
        "prefetch", (1, 1, 2, 2),
        "prefetch=1 on rank 0 of axis dp.0, and prefetch=2 on rank 1; pass the same on every rank; here dp.0 "
        "is the axis of ranks 0, 2"),
    "units": (
        "units", (["blocks.0", "blocks.1"], ["blocks.0"], ["blocks.0"], ["blocks.0"]),
        "units=['blocks.0', 'blocks.1'] on rank 0 of axis dp.1, and units=['blocks.0'] on rank 1; pass the "
        "same on every rank; here dp.1 is the axis of ranks 0, 1"),
    "a unit that is not there": (
        "units", (["blocks.0"], ["blocks.0"], ["blocks.0"], ["blocks.9"]),
        "rank 1 of axis dp.1: unit 'blocks.9' is not in the module; it has 'embed', 'blocks', 'blocks.0', "
        "'blocks.0.norm', 'blocks.0.up', ...; here dp.1 is the axis of ranks 2, 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_every_rank_of_both_replicas_refuses_options_that_differ(pools: RankPools, case: str) -> None:
    option, values, expected = DIFFERENT[case]
    assert pools[4].run(shard_differently, option, values) == [expected] * 4


def shard_without_replicas() -> str:
    dp, replicas, shards = replicas_and_shards()
    try:
        fully_shard(Net("plain"), shards, replicas=None if dp.rank == 3 else replicas)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_rank_without_replicas_is_refused_on_every_rank(pools: RankPools) -> None:
    """It takes no part in messages along the replicas, and nobody waits for it."""
    messages = pools[4].run(shard_without_replicas)
    assert all(m.startswith("replicas=2 on rank 0 of axis dp.1, and replicas=1 on rank 1") for m in messages)


# --- as the gradients of a pipeline -------------------------------------------------------------------


def pipeline_step(names_data_axis: bool) -> tuple[float, float]:
    """How far loss and gradients of a pipeline without a Booster are from one process's. 5 of 16 labels are
    masked, unequally."""
    dp, replicas, shards = replicas_and_shards()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4)).double()
    x, labels = torch.randn(16, 6, dtype=torch.float64), torch.randint(0, 4, (16,))
    labels[[0, 4, 8, 1, 6]] = -100
    serial = torch.nn.functional.cross_entropy(model(x), labels)
    serial.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    schedule = hpnb.pipeline_parallel.schedules.make("1f1b", stages=1, microbatches=2)
    data_axis: dict[str, Any] = {"replicas": dp} if names_data_axis else {}

    def loss(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    pipe = hpnb.Pipeline(model, Mesh(Layout(dp=4)).pp, schedule, loss, **data_axis)
    fully_shard(pipe.module, shards, replicas=replicas)
    with pytest.raises(ValueError, match=r"set pipe\.gradients to hpnb\.data_parallel\.sink\(pipe\.module\)"):
        pipe.step((x[dp.rank :: 4], labels[dp.rank :: 4]))
    pipe.gradients = hpnb.data_parallel.sink(pipe.module)
    result = pipe.step((x[dp.rank :: 4], labels[dp.rank :: 4]))
    gradients = placement.full_gradients(pipe.module, [shards])
    with pytest.raises(ValueError, match=r"sharded along dp\.1, so ranks of dp"):
        hpnb.data_parallel.compare_replicas(pipe.module, dp)
    assert hpnb.data_parallel.compare_replicas(pipe.module, replicas) == {}
    return abs(result.loss.item() - serial.item()), distance(gradients, wanted)


@pytest.mark.parametrize("names_data_axis", [False, True], ids=["", "replicas=mesh.dp"])
def test_a_pipeline_counts_targets_of_all_replicas(pools: RankPools, names_data_axis: bool) -> None:
    for loss, gradients in pools[4].run(pipeline_step, names_data_axis):
        assert loss < 1e-12
        assert gradients < 1e-12
