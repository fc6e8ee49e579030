"""Ranks that share a GPU: their process group against gloo, in the host's memory."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pools import RankPools

import hpnb
from hpnb.pipeline_parallel import executor, schedules
from hpnb.ranks import shared_gpu_copies, shared_gpu_group
from hpnb.record import recorder
from hpnb.theory import REPLAY_LINK, Link


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def group_of_small_chunks(chunk: int) -> dist.ProcessGroup:
    shared_gpu_copies.CHUNK = chunk
    shared_gpu_copies._scratch.cache_clear()
    shared_gpu_group.register_backend()
    return dist.new_group(backend=shared_gpu_group.BACKEND)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + hpnb.rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(8).to(dtype)


def every_collective(chunk: int, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """{name: [over the shared buffers, over gloo]}"""
    shared, world = group_of_small_chunks(chunk), dist.group.WORLD
    n, results = hpnb.world_size(), {}
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

    def both(name: str, call: Any, *shape: int) -> None:
        results[name] = []
        for group in (shared, world):
            results[name].append(call(group, draw(*shape, dtype=dtype)))
        results[name].append(torch.tensor(shared._shared.buffers is not None))  # type: ignore[attr-defined]
        shared._shared.buffers = None  # type: ignore[attr-defined]

    def reduced(op: Any) -> Any:
        def call(group: Any, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, op, group)
            return x

        return call

    def gathered(group: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(n * x.size(0), x.size(1))
        dist.all_gather_into_tensor(out, x, group)
        return out

    def gathered_list(group: Any, x: torch.Tensor) -> torch.Tensor:
        out = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(out, x, group)
        return torch.stack(out)

    def scattered(group: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.size(0) // n, x.size(1))
        dist.reduce_scatter_tensor(out, x, group=group)
        return out

    def exchanged(group: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    def broadcast(group: Any, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, n - 1, group)
        return x

    def reduced_to_one(group: Any, x: torch.Tensor) -> torch.Tensor:
        dist.reduce(x, 1, group=group)
        return x if hpnb.rank() == 1 else x * 0

    for name, op in ops.items():
        both(name, reduced(op), 7, 5)
    both("not contiguous", lambda group, x: reduced(ops["sum"])(group, x.t()), 7, 5)
    both("all_gather", gathered, 5, 3)
    both("all_gather list", gathered_list, 5, 3)
    both("reduce_scatter", scattered, 3 * n, 5)
    both("all_to_all", exchanged, 3 * n, 5)
    both("broadcast", broadcast, 11)
    both("reduce", reduced_to_one, 11)
    both("empty", reduced(ops["sum"]), 0)
    return results


@pytest.mark.parametrize(("chunk", "dtype"), [(64, torch.float64), (1 << 12, torch.int32)])
def test_every_collective_is_that_of_gloo(pools: RankPools, chunk: int, dtype: torch.dtype) -> None:
    for results in pools[3].run(every_collective, chunk, dtype):
        for name, (ours, theirs, through_buffers) in results.items():
            assert through_buffers or name == "empty"
            torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=1e-15, msg=name)


def sixteen_bits() -> tuple[torch.Tensor, torch.Tensor]:
    group = group_of_small_chunks(64)
    x = draw(1000, dtype=torch.bfloat16)
    exact = x.double()
    dist.all_reduce(exact)
    dist.all_reduce(x, group=group)
    return x, exact


def test_sums_of_16_bits_are_rounded_once_and_equal_on_all_ranks(pools: RankPools) -> None:
    results = pools[3].run(sixteen_bits)
    for ours, exact in results:
        assert torch.equal(ours, exact.float().to(torch.bfloat16))
        assert torch.equal(ours, results[0][0])


def messages() -> list[torch.Tensor]:
    """All ranks send to all, before anybody receives, more than a chunk; then the gradients come back."""
    group, me, n = group_of_small_chunks(64), hpnb.rank(), hpnb.world_size()
    others = [rank for rank in range(n) if rank != me]
    sent = [dist.isend(draw(40) + i, peer, group) for peer in others for i in range(3)]
    received = [torch.empty(40, dtype=torch.float64) for _ in others for _ in range(3)]
    arriving = [dist.irecv(x, source, group) for x, source in zip(received, sorted(others * 3), strict=True)]
    for work in (*arriving, *sent):
        assert work is not None
        work.wait()
    ring = torch.empty(40, dtype=torch.float64)
    operations = [
        dist.P2POp(dist.isend, draw(40), (me + 1) % n, group),
        dist.P2POp(dist.irecv, ring, (me - 1) % n, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [*received, ring]


def test_messages_between_two_ranks_arrive_in_order(pools: RankPools) -> None:
    results = pools[3].run(messages)
    drawn = [torch.randn(40, generator=torch.Generator().manual_seed(1 + r), dtype=torch.float64) * 8
             for r in range(3)]  # fmt: skip
    for rank, received in enumerate(results):
        others = [other for other in range(3) if other != rank]
        expected = [drawn[other] + i for other in others for i in range(3)]
        torch.testing.assert_close(received, [*expected, drawn[(rank - 1) % 3]])


def beside_each_other() -> tuple[float, float, list[int]]:
    """Two groups' collectives in another order on each rank, objects and a barrier between them."""
    first, second = group_of_small_chunks(64), group_of_small_chunks(64)
    order = [first, second] if hpnb.rank() else [second, first]
    tensors = {id(group): torch.full((100,), 1.0 + hpnb.rank()) for group in order}
    works = [dist.all_reduce(tensors[id(group)], group=group, async_op=True) for group in order]
    objects: list[int] = [0] * hpnb.world_size()
    dist.all_gather_object(objects, hpnb.rank(), first)
    dist.barrier(second)
    for work in works:
        assert work is not None
        work.wait()
        assert work.is_completed()
    return tensors[id(first)].mean().item(), tensors[id(second)].mean().item(), objects


def test_groups_do_not_wait_for_each_other(pools: RankPools) -> None:
    assert pools[3].run(beside_each_other) == [(6.0, 6.0, [0, 1, 2])] * 3


def in_inference_mode() -> list[float]:
    """A tensor of the inference mode, then one that autograd has seen."""
    group, values = group_of_small_chunks(64), []
    with torch.inference_mode():
        x = torch.ones(20) * (1 + hpnb.rank())
        dist.all_reduce(x, group=group)
        values.append(x.mean().item())
        if hpnb.rank() == 0:
            dist.send(x, 1, group)
        else:
            dist.recv(x.zero_(), 0, group)
        values.append(x.mean().item())
    weight = torch.ones(20, requires_grad=True)
    y = (weight * 2).detach()
    dist.all_reduce(y, group=group)
    (weight * y).sum().backward()
    assert weight.grad is not None
    return [*values, weight.grad.mean().item()]


def test_tensors_of_the_inference_mode_travel_too(pools: RankPools) -> None:
    assert pools[2].run(in_inference_mode) == [[3.0, 3.0, 4.0]] * 2


def fails_in_its_thread() -> str:
    group = group_of_small_chunks(64)
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    work.wait()
    shared = group  # a group of this process's class, with its methods
    work = shared._collectives.do(lambda: [][0], [])  # type: ignore[attr-defined]
    try:
        work.wait()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_an_error_of_a_copy_is_raised_by_wait(pools: RankPools) -> None:
    assert pools[2].run(fails_in_its_thread) == ["IndexError"] * 2


class FakeTurns:
    """Every action takes 10 ms of a GPU."""

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(types.SimpleNamespace(seconds=0.010))

    taking = released = contextlib.nullcontext


def step_by_turns(link: Link) -> tuple[str, float, str, float, int]:
    mesh = hpnb.Mesh(hpnb.Layout(pp=2))
    schedule = schedules.make("1f1b", stages=2, microbatches=4)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).double()
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, lambda y, _: y.square().mean())
    before = executor.gpu_turns, recorder.gpu_turns
    executor.gpu_turns = recorder.gpu_turns = FakeTurns  # type: ignore[assignment]
    try:
        result = pipe.step(torch.ones(8, 8, dtype=torch.float64))
        tl, other = result.timeline, result.replayed(link)
    finally:
        executor.gpu_turns, recorder.gpu_turns = before
    return tl.source, tl.makespan, other.source, other.makespan, result._message_bytes


def test_a_step_is_replayed_over_a_named_link_from_what_its_actions_took(pools: RankPools) -> None:
    slow = Link(0.003, 1e6, "slow link")
    for source, makespan, other_source, other_makespan, nbytes in pools[2].run(step_by_turns, slow):
        assert source == f"replayed from measured GPU time, {REPLAY_LINK.name}"
        assert other_source == "replayed from measured GPU time, slow link"
        assert nbytes >= 2 * 8 * 8  # a microbatch: 2 samples of 8 numbers of 8 bytes
        hop = REPLAY_LINK.latency + nbytes / REPLAY_LINK.bandwidth
        # Rank 0 waits for the first gradient: F F on the way there, B on the way back, and a hop each way.
        assert makespan == pytest.approx(0.010 * 2 * (4 + 1) + 2 * hop, abs=1e-4)
        assert other_makespan > makespan + 2 * slow.latency
