"""How long a call may take: for ever, unless a limit is given or no rank computes any more."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb.ranks import hang, last_seen, waits
from hpnb.ranks.last_seen import Note

LIMIT = 1.0  # seconds


def fails(fn: Callable[[], object]) -> hpnb.RankError:
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(fn, ranks=3, device="cpu", hang_timeout=LIMIT, timeout=60)
    return caught.value


def test_a_call_has_no_limit_unless_one_is_given() -> None:
    for function in (hpnb.launch, hpnb.Ranks):
        assert inspect.signature(function).parameters["timeout"].default is None
    for timeout in (None, math.inf, 60):
        assert hpnb.launch(hpnb.rank, ranks=1, device="cpu", timeout=timeout, hang_timeout=timeout) == [0]
    with pytest.raises(ValueError, match="hang_timeout=0"):
        hpnb.launch(hpnb.rank, ranks=1, device="cpu", hang_timeout=0)


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def receive_from_0() -> None:
    dist.recv(torch.zeros(1), src=0)  # which sends nothing


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "act", [lambda: time.sleep(600), stop_oneself, receive_from_0], ids=["sleeps", "stopped", "mismatch"]
)
def test_when_no_rank_computes_any_more_it_is_a_hang(act: Callable[[], object]) -> None:
    def run() -> None:
        if hpnb.rank() == 1:
            act()
        dist.barrier()

    error = fails(run)
    assert error.error == "hung"
    assert f"{LIMIT:g} s" in error.summary
    assert "hang_timeout=" in error.summary
    assert "dist.barrier()" in error.stacks[0]
    assert "act()" in error.stacks[1] or "dist.recv" in error.stacks[1]


def test_ranks_that_wait_for_one_that_computes_or_prints_do_not_hang() -> None:
    def run() -> float:
        end = time.monotonic() + 2.5 * LIMIT
        total = torch.ones(1)
        while hpnb.rank() == 1 and time.monotonic() < end:
            total = total + torch.ones(300).sum() * 0  # computes
        while hpnb.rank() == 2 and time.monotonic() < 2 * end:
            if time.monotonic() > end + 1.5 * LIMIT:
                break
            time.sleep(0.2)
            if time.monotonic() > end - 0.5:
                print("still here")
        dist.all_reduce(total)
        return total.item()

    assert hpnb.launch(run, ranks=3, device="cpu", hang_timeout=LIMIT) == [3.0] * 3


def test_a_limit_that_fires_names_itself() -> None:
    with pytest.raises(hpnb.RankError, match=r"within 0\.5 s.* timeout=1\b.* timeout=None") as caught:
        hpnb.launch(time.sleep, 600, ranks=2, device="cpu", timeout=0.5)
    assert caught.value.error == "timed out"


class Fake:
    """Two ranks; the first one's page says where it stands, and each check says what it has used."""

    def __init__(self) -> None:
        self.pids, self.pages, self.bytes_printed = [11, 12], [0, 1], 0


def loop(batches: Sequence[int]) -> None:
    for _ in range(batches[hpnb.rank()]):
        dist.all_reduce(torch.ones(1))


def receive_in_background() -> None:
    if hpnb.rank() == 1:
        work = dist.irecv(torch.zeros(1), src=0)
        assert work is not None
        work.wait()


def train(batches: Sequence[int]) -> None:
    model = hpnb.DataParallel(torch.nn.Linear(2, 1), hpnb.Mesh(hpnb.Layout(dp=3)).dp)
    for _ in range(batches[hpnb.rank()]):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["loop", "background", "DataParallel"])
def test_a_rank_that_waits_for_one_that_has_returned_hangs_soon_and_learns_why(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for 300 s, and the advice was a longer hang_timeout."""
    monkeypatch.setattr(hang, "GRACE", 1.0)
    batches = (2, 3, 3)
    ways = {"loop": lambda: loop(batches), "DataParallel": lambda: train(batches)}
    run: Callable[[], object] = ways.get(way, receive_in_background)
    began = time.monotonic()
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(run, ranks=3, device="cpu", timeout=60)
    assert time.monotonic() - began < 30
    assert caught.value.error == "hung"
    waiting = "rank 1 of 3" if way == "background" else "ranks 1, 2 of 3"
    summary = caught.value.summary
    assert f"no answer from {waiting}, in a collective, though the others have returned" in summary
    assert "hpnb.data.Loader(dataset, batch_size, mesh.dp)" in summary
    assert "plugin.prepare_dataloader(dataset, batch_size)" in summary
    assert "hang_timeout" not in summary


def step_with_a_refused_criterion(waits_on: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    schedule = hpnb.pipeline_parallel.schedules.make("1f1b", stages=2, microbatches=2)
    refused = lambda outputs, batch: outputs.sum(1)  # noqa: E731
    pipe = hpnb.Pipeline(model, hpnb.Mesh(hpnb.Layout(pp=2)).pp, schedule, refused)
    try:
        pipe.step((torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
    except ValueError:
        if waits_on:  # as in the next run of a sweep
            dist.recv(torch.zeros(1), src=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("waits_on", [False, True])
def test_an_error_of_hpnb_that_a_function_caught_is_named(
    waits_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader was blamed."""
    monkeypatch.setattr(hang, "GRACE", 1.0)
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(
            step_with_a_refused_criterion, waits_on, ranks=2, device="cpu", timeout=60, hang_timeout=3
        )
    summary = caught.value.summary
    assert "Rank 1 raised ValueError: the loss function returned a tensor of shape (2,)" in summary
    assert "the function caught it" in summary
    assert "prepare_dataloader" not in summary


def backward_that_one_rank_refuses() -> None:
    booster = hpnb.Booster(plugin=hpnb.TorchDDPPlugin("fp32"))
    model = torch.nn.Linear(2, 3)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    labels = torch.tensor([1, 2 * (1 - hpnb.rank())])  # the ignored one occurs on rank 1
    loss = torch.nn.functional.cross_entropy(boosted(torch.ones(2, 2)), labels, ignore_index=0)
    with contextlib.suppress(ValueError):
        booster.backward(loss, optimizer)


@pytest.mark.slow  # that of a step is above
def test_so_is_one_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "GRACE", 1.0)
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(backward_that_one_rank_refuses, ranks=2, device="cpu", timeout=60, hang_timeout=3)
    assert "Rank 1 raised ValueError: the loss function returned a cross entropy" in caught.value.summary


def test_calls_of_hpnb_that_do_not_match_blame_nobody() -> None:
    """The rank in DataParallel's wait was called still at work, and a rank that raised was waited for."""

    def mismatch() -> None:
        model = hpnb.DataParallel(torch.nn.Linear(2, 1), hpnb.Mesh(hpnb.Layout(dp=2)).dp)
        loss = model(torch.ones(1, 2)).sum()
        if hpnb.rank() == 0:
            dist.recv(torch.zeros(1), src=1)
        loss.backward()

    with pytest.raises(hpnb.RankError, match="all of them wait for others, in calls that do not match"):
        hpnb.launch(mismatch, ranks=2, device="cpu", timeout=60, hang_timeout=2)


def test_slow_work_after_the_last_collective_of_others_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has returned; rank 1 waits for rank 2, which sleeps: it may load or write something."""
    monkeypatch.setattr(hang, "GRACE", 1.0)

    def run() -> float:
        if hpnb.rank() == 0:
            return 0.0
        value = torch.full((1,), 7.0)
        if hpnb.rank() == 2:
            time.sleep(2)
            dist.send(value, 1)
        else:
            dist.recv(value.zero_(), 2)
            time.sleep(1.5)
        return value.item()

    assert hpnb.launch(run, ranks=3, device="cpu", timeout=60) == [0.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("where", "unchanged", "share", "hangs"),
    [
        ("a collective", 100.0, 1.0, True),  # NCCL spins
        ("a collective", 0.0, 1.0, False),  # one of many collectives of a program that goes on
        ("a product", 100.0, 1.0, False),
        ("a product", 100.0, 0.01, True),
    ],
)
def test_a_rank_that_spins_in_a_collective_does_not_compute(
    where: str, unchanged: float, share: float, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    file = dist.__file__ if where == "a collective" else __file__
    note = Note(0.0, {"MainThread": [(file, 1, "f")]}, unchanged)
    monkeypatch.setattr(last_seen, "read", lambda page: note)
    monkeypatch.setattr(hang.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]

    def cpu_seconds(pids: Sequence[int]) -> Mapping[int, float]:
        return {11: share * clock[0], 12: 0.0}

    watch, said = hang.HangWatch(Fake(), 300.0, cpu_seconds), []
    for second in range(700):
        clock[0] = float(second)
        said.append(watch.hangs([0, 1]))
    assert any(said) == hangs
    assert not any(said[:300])
    assert not watch.hangs([0, 1]) or hangs


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_a_cpu_a_line_that_asks_for_a_number_computes(on_gpu: bool, tmp_path: Path) -> None:
    """A comprehension over `.item()` at full load was a hang, and called a wait for other ranks."""
    (tmp_path / "program.py").write_text("losses = [loss(batch).item() for batch in batches]\nwork.wait()\n")
    frames = [(str(tmp_path / "program.py"), line, "f") for line in (1, 2)]
    notes = [Note(0.0, {"MainThread": [frame]}, 100.0, on_gpu=on_gpu) for frame in frames]
    assert [waits.waits_for_others(note) for note in notes] == [on_gpu, True]


def test_a_short_call_does_not_read_what_processes_use() -> None:
    """It took 5 ms of every call."""
    reads = []

    def cpu_seconds(pids: Sequence[int]) -> Mapping[int, float]:
        reads.append(pids)
        return {}

    watch = hang.HangWatch(Fake(), 300.0, cpu_seconds)
    assert not watch.hangs([0, 1])
    assert reads == []
    assert watch.next_check() - time.monotonic() < 1


def test_who_waits_for_the_rest_of_a_failed_call_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next check of a hang was long over, so nothing was waited for: thousands of looks a second."""

    def one_raises() -> None:
        if hpnb.rank() == 0:
            raise ValueError
        time.sleep(0.4)

    with hpnb.Ranks(2, device="cpu", hang_timeout=1.2) as ranks:
        looks, poll = [], ranks._processes.poll
        monkeypatch.setattr(ranks._processes, "poll", lambda *args: looks.append(args) or poll(*args))
        with pytest.raises(hpnb.RankError):
            ranks.run(one_raises)
        assert len(looks) < 50


def test_workers_of_a_rank_count_as_the_rank() -> None:
    used = hang.cpu_seconds_of_groups([os.getpgid(0)])
    if used is None:
        pytest.skip("needs /proc")
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    later = hang.cpu_seconds_of_groups([os.getpgid(0)])
    assert later is not None
    assert later[os.getpgid(0)] > used[os.getpgid(0)]
