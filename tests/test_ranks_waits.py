"""A rank that waits for others is recognised by where it stands, also inside of hpnb's collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pools import RankPools
from torch import nn
from torch.nn.functional import cross_entropy

import hpnb
from hpnb import Layout, Mesh, overlapped_pair
from hpnb.hybrid.checkpoint.background_save import Saving
from hpnb.hybrid.training.stop_hook import StopVote
from hpnb.ranks import pool, shared_gpu_group, waits
from hpnb.ranks.last_seen import Note

HPNB = Path(hpnb.__file__).parent


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def come_late(flag: Path) -> None:
    """Rank 0 goes on once the caller has seen that rank 1 waits."""
    flag.with_name(f"rank {hpnb.rank()}").touch()
    while hpnb.rank() == 0 and not flag.exists():
        time.sleep(0.01)


def all_reduce(flag: Path) -> None:
    come_late(flag)
    dist.all_reduce(torch.ones(1))


def backward(flag: Path, kind: str) -> None:
    axis, model = Mesh(Layout(dp=2)).dp, nn.Linear(2, 1)
    forward: nn.Module = hpnb.DataParallel(model, axis) if kind == "DataParallel" else model
    if kind == "ZeRO":
        hpnb.ZeroOptimizer(model.parameters(), torch.optim.SGD, axis, 2, lr=0.1)
    if kind == "fully_shard":
        hpnb.fully_shard(model, axis)
    loss = forward(torch.ones(1, 2)).sum()
    come_late(flag)
    loss.backward()


def pipeline_step(flag: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    schedule = hpnb.pipeline_parallel.schedules.make("1f1b", stages=2, microbatches=2)
    pipe = hpnb.Pipeline(model, Mesh(Layout(pp=2)).pp, schedule, lambda x, batch: cross_entropy(x, batch[1]))
    come_late(flag)
    pipe.step((torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))


def tensor_parallel(flag: Path) -> None:
    axis = Mesh(Layout(tp=2)).tp
    come_late(flag)
    hpnb.comm.all_gather(torch.ones(2, 2), axis, 0)


def exchange_rows(flag: Path, in_a_pair: bool = False) -> None:
    axis = Mesh(Layout(dp=2)).dp
    come_late(flag)
    exchange = partial(hpnb.comm.exchange_rows, torch.ones(2, 2), axis, [1, 1], [1, 1])
    if in_a_pair:  # the first side ends at once, and waits for the second
        overlapped_pair.run_pair(lambda: None, exchange)
    else:
        exchange()


def save_in_background(flag: Path) -> None:
    group = dist.new_group(backend="gloo")
    come_late(flag)
    Saving(lambda: dist.barrier(group), True, Path()).wait()


def vote_to_stop(flag: Path) -> None:
    Mesh(Layout(dp=2))
    come_late(flag)
    StopVote().now(False)


def on_a_shared_gpu(flag: Path, op: str) -> None:
    """In the group of ranks that share a GPU, which copies through the CPU's memory here."""
    shared_gpu_group.register_backend()
    group, x = dist.new_group(backend=shared_gpu_group.BACKEND), torch.ones(8)
    come_late(flag)
    if op == "barrier":
        dist.barrier(group)
    elif op == "all_reduce":
        dist.all_reduce(x, group=group)
    elif hpnb.rank() == 0:
        dist.send(x, 1, group)
    else:
        dist.recv(x, 0, group)


WAITS: dict[str, Callable[[Path], None]] = {
    "all_reduce": all_reduce,
    **{kind: partial(backward, kind=kind) for kind in ("DataParallel", "ZeRO", "fully_shard")},
    "pipeline": pipeline_step,
    "tensor parallel": tensor_parallel,
    "experts": exchange_rows,
    "pair": partial(exchange_rows, in_a_pair=True),
    "save": save_in_background,
    "stop vote": vote_to_stop,
    **{f"shared GPU, {op}": partial(on_a_shared_gpu, op=op) for op in ("all_reduce", "barrier", "recv")},
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_rank_that_waits_is_seen_to_wait(pools: RankPools, kind: str, tmp_path: Path) -> None:
    """In hpnb's collectives it was taken for one at work: a hang was noticed after 300 s in place of 10."""
    ranks, flag, seen = pools[2], tmp_path / "come", False
    with ThreadPoolExecutor(1) as executor:
        call = executor.submit(ranks.run, WAITS[kind], flag)
        end = time.monotonic() + 30
        while not call.done() and not seen and time.monotonic() < end:
            if all((tmp_path / f"rank {rank}").exists() for rank in range(2)):
                time.sleep(0.4)  # the next note is of what follows
                note = ranks._processes.last_notes()[1]
                seen = waits.stands_in_collective(note) and waits.waits_for_others(note)
            time.sleep(0.02)
        flag.touch()
        call.result()
    assert seen


def test_who_waits_in_hpnb_for_a_rank_that_raised_is_not_waited_for(
    pools: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was awaited for 5 seconds more."""
    monkeypatch.setattr(pool, "_GRACE_OF_STATE", 50.0)

    def run() -> None:
        model = hpnb.DataParallel(nn.Linear(2, 1), Mesh(Layout(dp=2)).dp)
        loss = model(torch.ones(1, 2)).sum()
        if hpnb.rank() == 0:
            raise ArithmeticError
        loss.backward()

    began = time.monotonic()
    with pytest.raises(hpnb.RankError, match="rank 0 of 2 raised ArithmeticError"):
        pools[2].run(run)
    assert time.monotonic() - began < 40


def test_the_functions_in_which_ranks_wait_are_there() -> None:
    for file, function in {*waits.IN_COLLECTIVE, *waits.FOR_THREAD}:
        assert f"def {function}(" in (HPNB / file).read_text(), (file, function)


def note_of(**threads: list[tuple[str, int, str]]) -> Note:
    return Note(0.0, threads, 100.0)


def test_a_backward_on_a_gpu_waits_where_its_thread_does() -> None:
    """Autograd runs it on a thread of its own, which threading does not know."""
    main = [(torch.autograd.graph.__file__, 1, "_engine_run_backward")]
    waiting, computing = ((str(HPNB / "background.py"), 1, function) for function in ("wait_all", "_start"))
    for name, expected in (("140231", True), ("Dummy-3", True), ("pin memory", False)):
        note = note_of(MainThread=main, **{name: [waiting]})
        assert waits.stands_in_collective(note) is waits.waits_for_others(note) is expected
    assert not waits.waits_for_others(note_of(MainThread=main, **{"140231": [computing]}))
    assert not waits.waits_for_others(note_of(MainThread=main))


def test_who_waits_for_a_thread_that_works_is_at_work() -> None:
    threading_frame = (threading.__file__, 1, "join")
    main = [(str(HPNB / "hybrid/checkpoint/background_save.py"), 1, "join"), threading_frame]
    writes = [(__file__, 1, "write")]
    assert not waits.waits_for_others(note_of(MainThread=main, **{"hpnb-save": writes}))
    assert not waits.waits_for_others(note_of(MainThread=main))
    in_barrier = [(dist.distributed_c10d.__file__, 1, "barrier")]
    assert waits.stands_in_collective(note_of(MainThread=main, **{"hpnb-save": in_barrier}))
    assert not waits.waits_for_others(note_of(MainThread=[(__file__, 1, "f"), threading_frame]))
