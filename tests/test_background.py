"""Collectives in the background give what those in the foreground give, and report when they ran."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from rank_pools import RankPools, gpu_ranks

import hpnb
from hpnb import Layout, Mesh
from hpnb.background import Background


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


def three(device: str) -> tuple[list[float], list[float], list[float], float]:
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    where = torch.device(hpnb.device() if device == "cuda" else "cpu")
    background = Background(axis, where)
    n, r = axis.size, axis.rank
    flat = torch.arange(2.0 * n, device=where) + 10 * r
    summed, share = flat.clone(), torch.empty(2, device=where)
    whole = torch.empty(2 * n, device=where)
    with hpnb.record.traffic() as t:
        first = background.all_reduce(summed)
        second = background.reduce_scatter(share, flat.clone())
        first.wait()
        first.wait()
        second.wait()
        background.all_gather(whole, share).wait()
    return summed.tolist(), whole.tolist(), flat.tolist(), t.bytes["dp"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_they_are_what_their_names_say(pools: RankPools, ranks: int) -> None:
    found = pools[ranks].run(three, "cpu")
    wanted = torch.tensor([own for _, _, own, _ in found]).sum(0).tolist()
    for summed, gathered, own, sent in found:
        assert summed == gathered == wanted
        assert sent == (2 + 1 + 1) * (ranks - 1) / ranks * 4 * len(own)


def recorded() -> tuple[list[str], float, bool]:
    """(ops of this rank, seconds between the two parts of its compute span, whether all is told)."""
    axis = Mesh(Layout(dp=2)).dp
    flat = torch.ones(1 << 20)
    background = Background(axis, flat.device)
    background.all_reduce(flat).wait()
    with hpnb.record.timeline() as recorder:
        with recorder.span("B", microbatch=3):
            time.sleep(0.3 * axis.rank)  # rank 0 waits for rank 1
            background.all_reduce(flat).wait()
    events = recorder.events()
    compute = [e for e in events if e.op == "B"]
    (sent,) = [e for e in events if e.op == "all_reduce"]
    told = sent.bytes == flat.nbytes and sent.group == (0, 1) and all(e.microbatch == 3 for e in compute)
    return sorted(e.op for e in events), compute[1].start - compute[0].end, told


def test_a_record_shows_when_they_ran_and_cuts_out_the_waiting(pools: RankPools) -> None:
    found = pools[2].run(recorded)
    for ops, _, told in found:
        assert ops == ["B", "B", "all_reduce"]
        assert told
    assert found[0][1] > 0.1  # it slept 0.3 s there, so this holds however slow the machine is


def every_op() -> list[str]:
    axis = Mesh(Layout(dp=2)).dp
    background = Background(axis, torch.device("cpu"))
    flat, share = torch.ones(8), torch.ones(4)
    with hpnb.record.timeline() as recorder:
        background.all_reduce(flat).wait()
        background.reduce_scatter(share, flat).wait()
        background.all_gather(flat, share).wait()
    return [e.op for e in recorder.events() if e.end >= e.start and e.bytes > 0]


def test_every_collective_can_be_recorded(pools: RankPools) -> None:
    found = pools[2].run(every_op)
    assert found == [["all_reduce", "reduce_scatter", "all_gather"]] * 2


def test_gloo_does_not_average(pools: RankPools) -> None:
    def run() -> str:
        axis = Mesh(Layout(dp=2)).dp
        try:
            Background(axis, torch.device("cpu")).all_reduce(torch.ones(1), average=True)
        except ValueError as error:
            return str(error)
        return ""

    for message in pools[2].run(run):
        assert "gloo does not average" in message


@pytest.mark.one_gpu
def test_on_gpus() -> None:
    found = hpnb.launch(three, "cuda", ranks=gpu_ranks(), device="cuda", timeout=120)
    wanted = torch.tensor([own for _, _, own, _ in found]).sum(0).tolist()
    for summed, gathered, _, _ in found:
        assert summed == gathered == wanted


def averaged() -> tuple[float, float]:
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    background = Background(axis, hpnb.device())
    x = torch.full((8,), float(axis.rank), device=hpnb.device(), dtype=torch.float64)
    background.all_reduce(x, average=True).wait()
    return x.mean().item(), (axis.size - 1) / 2


@pytest.mark.gpu
def test_nccl_averages() -> None:
    for got, wanted in hpnb.launch(averaged, ranks=2, device="cuda", timeout=120):
        assert got == wanted
