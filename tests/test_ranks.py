"""A cell is a cluster: results, names, output, and every way to fail."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from preloaded_python import Program

import hpnb
from hpnb.ranks import devices, forkserver, forkserver_process
from hpnb.ranks.failed_call import did_not_start
from hpnb.ranks.forkserver import server
from hpnb.ranks.forkserver_process import ForkedRanks

SCALE = 2


def scaled_rank() -> int:
    return SCALE * hpnb.rank()


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Batch:
    values: torch.Tensor
    name: str = "batch"

    def total(self) -> float:
        return float(self.values.sum()) * SCALE


@pytest.fixture(scope="module")
def four() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(4, device="cpu", timeout=60) as ranks:
        yield ranks


def children_of(pid: int) -> list[int]:
    """Process ids of the descendants of `pid`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(entry.parent.name)
            found += [child, *children_of(child)]
    return found


# --- results and arguments -------------------------------------------------------------------


def test_a_collective_runs_and_results_come_one_a_rank(four: hpnb.Ranks) -> None:
    def add(start: float, *, step: float) -> tuple[int, int, str, float]:
        total = torch.tensor([start + step * hpnb.rank()])
        dist.all_reduce(total)
        return hpnb.rank(), hpnb.world_size(), str(hpnb.device()), total.item()

    assert four.run(add, 1.0, step=2.0) == [(r, 4, "cpu", 16.0) for r in range(4)]


def test_launch_takes_the_same_function() -> None:
    assert hpnb.launch(scaled_rank, ranks=3, device="cpu", timeout=60) == [0, 2, 4]


def test_lambdas_closures_recursion_partials_and_methods(four: hpnb.Ranks) -> None:
    bonus = 10

    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    assert four.run(lambda: hpnb.rank() + bonus) == [10, 11, 12, 13]
    assert four.run(fib, 10) == [55] * 4
    assert four.run(functools.partial(fib, 7)) == [13] * 4
    assert four.run(Batch(torch.ones(3)).total) == [6.0] * 4


def test_types_survive_the_way_there_and_back(four: hpnb.Ranks) -> None:
    @dataclass
    class Local:
        rank: int

    def make() -> tuple[Point, Batch, Local]:
        return Point(hpnb.rank(), 1), Batch(torch.full((2,), float(hpnb.rank()))), Local(hpnb.rank())

    for rank, (point, batch, local) in enumerate(four.run(make)):
        assert type(point) is Point
        assert point == (rank, 1)
        assert type(batch) is Batch
        assert batch.total() == 4.0 * rank
        assert type(local) is Local
        assert local == Local(rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_tensors_of_any_dtype_and_shape_survive(four: hpnb.Ranks, dtype: torch.dtype) -> None:
    for shape in [(), (0, 3), (2, 3)]:
        sent = torch.ones(shape).to(dtype).transpose(0, -1) if shape else torch.ones(()).to(dtype)
        for back in four.run(lambda t: t, sent):
            assert back.dtype == dtype
            assert torch.equal(back, sent)


def test_a_module_keeps_shared_parameters_and_loses_its_graph(four: hpnb.Ranks) -> None:
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    def step(model: torch.nn.Linear) -> tuple[torch.nn.Linear, torch.Tensor]:
        loss = model(torch.ones(3, dtype=torch.float64)).sum()
        loss.backward()
        optimizer.step()  # a captured optimizer still holds the parameters of the model that was passed
        return model, loss

    for trained, loss in four.run(step, layer):
        assert torch.equal(trained.weight, layer.weight - 1.0)
        assert not loss.requires_grad
        assert trained.weight.requires_grad


# --- names -----------------------------------------------------------------------------------


def test_state_stays_between_runs_and_differs_by_rank(four: hpnb.Ranks) -> None:
    def put() -> None:
        global kept
        kept = [hpnb.rank()]

    def get() -> list[int]:
        kept.append(7)  # type: ignore[name-defined]
        return kept  # type: ignore[name-defined]

    four.run(put)
    assert four.run(get) == [[r, 7] for r in range(4)]
    assert four.run(get) == [[r, 7, 7] for r in range(4)]


def test_a_rebound_name_is_sent_again_and_another_is_not(
    four: hpnb.Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert four.run(scaled_rank) == [0, 2, 4, 6]
    four.run(lambda: globals().update(SCALE=100))
    assert four.run(scaled_rank) == [0, 100, 200, 300]  # the rank's own binding stands
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 5)
    assert four.run(scaled_rank) == [0, 5, 10, 15]
    assert four.run(lambda: scaled_rank()) == [0, 5, 10, 15]  # through a function that calls it


def test_what_ranks_have_is_refreshed_where_only_a_function_of_theirs_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "rate", 1.0, raising=False)
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        ranks.run_cell("def show(): return rate\nown = rate")
        main.rate = 2.0  # type: ignore[attr-defined]
        monkeypatch.setattr(main, "own", 7.0, raising=False)
        assert ranks.run_cell("show()") == [2.0, 2.0]
        ranks.run_cell("rate = 3.0")  # by a rank: it stays until the caller reassigns it
        assert ranks.run_cell("show()") == [3.0, 3.0]
        main.rate = threading.Lock()  # type: ignore[attr-defined]
        with pytest.warns(UserWarning, match="the new value of rate cannot be pickled, so the ranks keep"):
            assert ranks.run_cell("show()") == [3.0, 3.0]
        with pytest.raises(hpnb.RankError, match="the global rate"):
            ranks.run_cell("rate")


def test_a_name_that_only_some_ranks_got_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "marker", "sent", raising=False)
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        assert ranks.run_cell("marker", members=[1]) == ["sent"]
        assert ranks.run_cell("marker") == ["sent", "sent"]


def test_where_the_caller_stands_is_where_ranks_stand(
    four: hpnb.Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nearby.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HPNB_TEST", "there")

    def look() -> tuple[str, str | None, int, str]:
        import nearby  # type: ignore[import-not-found]

        return os.getcwd(), os.environ.get("HPNB_TEST"), nearby.ANSWER, os.environ["RANK"]

    assert four.run(look) == [(str(tmp_path), "there", 42, str(r)) for r in range(4)]
    monkeypatch.delenv("HPNB_TEST")
    assert four.run(lambda: os.environ.get("HPNB_TEST")) == [None] * 4


def test_a_large_captured_value_is_named_in_a_warning(four: hpnb.Ranks) -> None:
    table = torch.zeros(500_000)
    with pytest.warns(UserWarning, match=r"'table' \(2\.0 MB\) .* 4 ranks"):
        four.run(lambda: table.sum().item())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        four.run(lambda t: t.sum().item(), table)  # passed on purpose


shared_model = torch.nn.Linear(2, 1, bias=False)
shared_optimizer = torch.optim.SGD(shared_model.parameters(), lr=1.0)


def test_an_optimizer_that_is_sent_later_still_holds_its_model() -> None:
    def look() -> float:
        return shared_model.weight.sum().item()

    def step() -> bool:
        shared_model(torch.ones(2)).backward()
        shared_optimizer.step()
        return shared_optimizer.param_groups[0]["params"][0] is shared_model.weight

    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        (before, _) = ranks.run(look)
        assert ranks.run(step) == [True, True]
        assert ranks.run(look) == pytest.approx([before - 2.0] * 2)
        assert shared_model.weight.sum().item() == pytest.approx(before)  # the caller's own is another


# --- the process -----------------------------------------------------------------------------


def test_ranks_leave_half_of_the_cores_to_what_runs_beside_them(four: hpnb.Ranks) -> None:
    a_rank = min(torch.get_num_threads(), devices.threads_per_rank(devices.usable_cores(), 4))
    assert four.run(torch.get_num_threads) == [a_rank] * 4
    for cores, ranks, threads in ((2, 4, 1), (2, 1, 2), (8, 2, 2), (16, 4, 2), (64, 4, 8)):
        assert devices.threads_per_rank(cores, ranks) == threads


def test_a_rank_has_no_more_threads_than_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 64)
    for own, threads in ((1, 1), (3, 3), (32, 16)):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=own: own)
        assert devices.choose_device("cpu", 2).threads == threads
    assert devices.choose_device("cpu", 2, cores=128).threads == 32  # another machine's


def test_dataloader_workers_run_inside_ranks(four: hpnb.Ranks) -> None:
    class Squares(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> int:
            return i * i

    def load() -> int:
        loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2)
        return sum(int(batch.sum()) for batch in loader)

    assert four.run(load) == [140] * 4


def test_random_numbers_differ_between_launches() -> None:
    def draw() -> float:
        import random

        import numpy as np

        return random.random() + np.random.rand()

    draws = [value for _ in range(2) for value in hpnb.launch(draw, ranks=2, device="cpu", timeout=60)]
    assert len(set(draws)) == 4


def test_what_cannot_be_asked_for_is_one_clear_sentence(four: hpnb.Ranks) -> None:
    with pytest.raises(ValueError, match="ranks=0: at least 1 rank is needed"):
        hpnb.launch(scaled_rank, ranks=0)
    with pytest.raises(ValueError, match="device='tpu' is not known; use 'auto', 'cpu' or 'cuda'"):
        hpnb.launch(scaled_rank, ranks=2, device="tpu")
    if not torch.cuda.device_count():
        with pytest.raises(ValueError, match="device='cuda': this machine has no GPU; use device='cpu'"):
            hpnb.launch(scaled_rank, ranks=1, device="cuda")
    for timeout in (0, -1, "5", float("nan")):
        with pytest.raises(ValueError, match=f"timeout={timeout!r}: give seconds"):
            hpnb.Ranks(2, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a function is needed"):
        four.run(3)  # type: ignore[arg-type]

    def nested() -> str:
        try:
            hpnb.launch(scaled_rank, ranks=2)
        except ValueError as error:
            return str(error)
        return "it started"

    assert four.run(nested)[2].startswith("rank 2 of 4 cannot start ranks of its own")


def test_auto_takes_the_gpus_and_ranks_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "CUDA IPC and CPU memory"
    cases = [(0, 2, "gloo", 0), (1, 1, "NCCL", 1), (4, 4, "NCCL", 1), (4, 2, "NCCL", 1),
             (2, 4, both, 2), (1, 4, "CUDA IPC", 4), (2, 5, both, 3)]  # fmt: skip
    for gpus, ranks, name, on_each in cases:
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        choice = devices.choose_device("auto", ranks)
        assert (choice.name, choice.device == "cuda") == (name, gpus > 0)
        assert choice.shares_gpus is (on_each > 1)
        plural = "s" if ranks > 1 else ""
        assert str(choice).startswith(f"{ranks} rank{plural} on {choice.device}")
        assert devices.choose_device("cpu", ranks).backend == "gloo"
        if gpus:
            assert devices.choose_device("cuda", ranks).backend == choice.backend


# --- failures --------------------------------------------------------------------------------


def fails(fn: Callable[[], object], timeout: float = 60.0, ranks: int = 3) -> hpnb.RankError:
    """The error of a launch, which must come within 15 s."""
    begin = time.monotonic()
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(fn, ranks=ranks, device="cpu", timeout=timeout)
    assert time.monotonic() - begin < 15
    return caught.value


def on_rank_1(act: Callable[[], object]) -> Callable[[], None]:
    """A function that acts on rank 1, while the others wait for it in a collective."""

    def run() -> None:
        if hpnb.rank() == 1:
            act()
        dist.barrier()

    return run


def raise_at_once() -> None:
    raise KeyError("no such thing")


def exit_at_once() -> None:
    os._exit(3)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def call_exit() -> None:
    sys.exit("had enough")


def ask_for_too_much() -> None:
    torch.empty(1 << 62, dtype=torch.uint8)


def segfault() -> None:
    import ctypes

    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("act", "summary", "line"),
    [
        (raise_at_once, "raised KeyError: 'no such thing'", 'raise KeyError("no such thing")'),
        (exit_at_once, "exited with code 3", "os._exit(3)"),
        (kill_self, "was killed by SIGKILL; if nobody sent it, memory ran out", "os.kill(os.getpid()"),
        (call_exit, "raised SystemExit: had enough", 'sys.exit("had enough")'),
        (ask_for_too_much, "allocate memory", "torch.empty(1 << 62"),
        (segfault, "was killed by SIGSEGV", ""),
    ],
)
def test_a_rank_that_fails_ends_the_call_and_all_say_where_they_were(
    act: Callable[[], object], summary: str, line: str
) -> None:
    error = fails(on_rank_1(act))
    assert error.rank == 1
    assert "rank 1 of 3" in error.summary
    assert summary in error.summary
    assert line in error.traceback
    for rank in (0, 2):
        assert "dist.barrier()" in error.stacks[rank]
    first = str(error)[len(error.summary) :].split("\n\n")[1]
    assert first.startswith("Rank 1:")  # the culprit's own traceback comes before the others'


def test_a_failure_that_ends_the_ranks_says_that_their_variables_are_gone() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        ranks.run_cell("kept = 1")
        with pytest.raises(hpnb.RankError, match=r"raised KeyError.*the variables that they had .* gone"):
            ranks.run(on_rank_1(raise_at_once))
        assert not ranks.alive


def test_a_hang_names_the_rank_that_does_not_wait_for_others() -> None:
    error = fails(on_rank_1(lambda: time.sleep(600)), timeout=1)
    assert error.rank == 1
    assert "no answer from ranks 0, 1, 2 of 3 within 1 s: rank 1 was still at work" in error.summary
    assert "time.sleep(600)" in error.traceback
    assert "dist.barrier()" in error.stacks[0]


@pytest.mark.parametrize(
    ("busy", "words"),
    [((0, 2), "ranks 0, 2 were still at work"), ((0, 1, 2), "all of them were still at work")],
)
def test_a_hang_names_all_that_do_not_wait(busy: tuple[int, ...], words: str) -> None:
    error = fails(lambda: time.sleep(600) if hpnb.rank() in busy else dist.barrier(), timeout=1)
    assert f"no answer from ranks 0, 1, 2 of 3 within 1 s: {words}. If" in error.summary


def test_a_mismatch_of_collectives_says_that_all_wait() -> None:
    def mismatch() -> None:
        if hpnb.rank() == 0:
            dist.recv(torch.zeros(1), src=1)
        else:
            dist.recv(torch.zeros(1), src=0)

    error = fails(mismatch, timeout=1, ranks=2)
    assert "all of them wait for others, in calls that do not match" in error.summary
    assert "src=1" in error.stacks[0]
    assert "src=0" in error.stacks[1]


def test_a_rank_killed_from_outside_was_last_seen_somewhere() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        pids = ranks.run(os.getpid)
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
        with pytest.raises(hpnb.RankError) as caught:
            ranks.run(lambda: time.sleep(60))
        assert caught.value.rank == 1
        assert "time.sleep(60)" in caught.value.traceback
        with pytest.raises(RuntimeError, match="these ranks have ended"):
            ranks.run(scaled_rank)


def test_a_thread_is_walked_while_it_runs_and_left_alone() -> None:
    from hpnb.ranks.last_seen import walk

    done = threading.Event()

    def dïve(depth: int) -> int:  # deeper than a note shows, and named as not every encoding can
        return dïve(depth - 1) + 1 if depth else 0

    def dives() -> None:
        while not done.is_set():
            dïve(200)

    thread = threading.Thread(target=dives)
    thread.start()
    try:
        assert thread.ident is not None
        found, deadline = [walk(thread.ident) for _ in range(2000)], time.monotonic() + 20
        while max(map(len, found)) <= 100 and time.monotonic() < deadline:
            time.sleep(0)  # on a busy machine the thread may not have run yet
            found.append(walk(thread.ident))
    finally:
        done.set()
        thread.join()
    assert max(map(len, found)) > 100
    for frames in found:
        names = [name for _, _, name in frames]
        deep = names.count("dïve")
        assert names[-deep:] == ["dïve"] * deep if deep else True  # innermost last, and nothing between
        assert all(line > 0 and Path(file).is_file() for file, line, _ in frames[:3])
    assert gc.isenabled()
    assert walk(thread.ident) == []  # it has ended


def test_what_cannot_be_pickled_is_named(four: hpnb.Ranks) -> None:
    lock = threading.Lock()
    with pytest.raises(hpnb.RankError, match=r"argument 1 \(a lock\) cannot be pickled") as caught:
        four.run(lambda a, b: None, 1, lock)
    assert "four.run(lambda a, b: None, 1, lock)" in caught.value.traceback
    with pytest.raises(hpnb.RankError, match=r"the captured variable lock"):
        four.run(lambda: lock)
    assert four.run(scaled_rank)  # nothing was sent, so nothing is lost

    def give_back() -> object:
        return (i for i in range(3))

    with pytest.raises(hpnb.RankError, match=r"rank \d returned a generator that cannot be pick") as caught:
        four.run(give_back)
    assert set(caught.value.stacks) == {0, 1, 2, 3}
    assert "def give_back() -> object:" in caught.value.traceback
    assert four.run(scaled_rank)  # all failed at one line: they are in step, and stay


def test_ranks_that_part_are_stopped_and_ranks_in_step_stay() -> None:
    def all_raise() -> None:
        raise ValueError(f"rank {hpnb.rank()}")

    def one_raises() -> None:
        globals()["kept"] = hpnb.rank() + 7
        if hpnb.rank() == 0:
            raise ValueError
        time.sleep(1)  # longer than others are usually given to report a failure of theirs

    def one_leaves_out_a_collective() -> None:
        if hpnb.rank() == 1:
            raise ValueError
        dist.broadcast(torch.ones(1), src=0)  # the source may not wait until it has arrived

    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        with pytest.raises(hpnb.RankError):
            ranks.run(all_raise)
        assert ranks.alive
        assert ranks.run(hpnb.rank) == [0, 1]
        with pytest.raises(hpnb.RankError, match="rank 0 of 2 raised ValueError"):
            ranks.run(one_raises)
        assert ranks.run(lambda: globals()["kept"]) == [7, 8]  # nobody waited for rank 0
        with pytest.raises(hpnb.RankError, match="rank 1 of 2 raised ValueError"):
            ranks.run(one_leaves_out_a_collective)
        assert not ranks.alive


def test_ranks_have_no_keyboard(four: hpnb.Ranks) -> None:
    for ask, words in ((lambda: input("x?"), r"input\('x\?'\).*no keyboard"), (breakpoint, "no keyboard")):
        with pytest.raises(hpnb.RankError, match=words):
            four.run(lambda ask=ask: ask())
    assert four.run(hpnb.rank) == [0, 1, 2, 3]


SCRIPT = """
import os, signal, subprocess, sys, time
import hpnb

class Thing:
    def __init__(self, n): self.n = n

def work(x):
    print("working", flush=True)
    time.sleep(x)
    return Thing(hpnb.rank())
"""


def written_script(body: str, folder: Path) -> Path:
    file = folder / "script.py"
    file.write_text(SCRIPT + textwrap.dedent(body))
    return file


def run_script(body: str, tmp_path: Path) -> Program:
    return Program(written_script(body, tmp_path))


def test_a_script_needs_no_main_guard_and_its_output_is_live(tmp_path: Path) -> None:
    script = run_script("print([type(t) is Thing and t.n for t in hpnb.launch(work, 2, ranks=2)])", tmp_path)
    assert script.stdout is not None
    first = script.stdout.readline()
    assert script.poll() is None  # printed while the ranks still sleep
    lines = [first.strip(), *script.stdout.read().splitlines()]  # `communicate` would miss what is buffered
    assert script.wait(60) == 0
    assert sorted(lines[:2]) == ["[rank 0] working", "[rank 1] working"]
    assert lines[-1] == "[0, 1]"


def wait_until(gone: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_fork_of_the_caller_ends_no_ranks_and_neither_a_rank_nor_a_killed_caller_leaves_a_process(
    tmp_path: Path,
) -> None:
    body = """
        def leave():
            return subprocess.Popen(["sleep", "77"], start_new_session=True).pid
        with hpnb.Ranks(2, device="cpu") as ranks:
            left = ranks.run(leave)
            if (child := os.fork()) == 0:
                sys.exit(0)  # runs the finalizers that it has inherited
            os.waitpid(child, 0)
            print(ranks.run(hpnb.rank))
        print([os.path.exists(f"/proc/{pid}") for pid in left], flush=True)
        hpnb.launch(work, 600, ranks=3, device="cpu")
    """
    script = run_script(body, tmp_path)
    assert script.stdout is not None
    lines = [script.stdout.readline().strip() for _ in range(3)]
    assert lines[:2] == ["[0, 1]", "[False, False]"]
    assert "working" in lines[2]
    children = children_of(script.pid)
    assert len(children) >= 4  # the server and three ranks
    script.kill()
    script.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    script.stdout.close()


def test_ctrl_c_stops_the_ranks_and_is_also_a_keyboard_interrupt(tmp_path: Path) -> None:
    body = """
        try:
            hpnb.launch(work, 600, ranks=2, device="cpu")
        except KeyboardInterrupt as error:
            print(isinstance(error, hpnb.RankError), "time.sleep(x)" in error.stacks[0])
        print([t.n for t in hpnb.launch(work, 0, ranks=2, device="cpu")])
    """
    script = run_script(body, tmp_path)
    assert script.stdout is not None
    script.stdout.readline()
    time.sleep(0.3)
    script.send_signal(signal.SIGINT)
    out, _ = script.communicate(timeout=60)
    assert "True True" in out
    assert out.splitlines()[-1] == "[0, 1]"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("launches", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_launches_leak_no_descriptor_process_or_shared_memory(launches: int) -> None:
    def count() -> tuple[int, int, int]:
        descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), server()._process.pid))
        shared = len([name for name in os.listdir("/dev/shm") if "torch" in name or "psm" in name])
        return descriptors, len(children_of(os.getpid())), shared

    def work() -> int:
        loader = torch.utils.data.DataLoader(torch.arange(4), num_workers=1)  # type: ignore[arg-type]
        return sum(int(x) for x in loader) + hpnb.rank()

    hpnb.launch(work, ranks=2, device="cpu", timeout=60)
    before = count()
    for _ in range(launches):
        assert hpnb.launch(work, ranks=2, device="cpu", timeout=60) == [6, 7]
    assert count() == before


def test_many_launches_at_once_from_several_processes(tmp_path: Path) -> None:
    """From ten threads of a script, and from ten of this process."""
    body = """
        from concurrent.futures import ThreadPoolExecutor
        import torch, torch.distributed as dist
        def total():
            t = torch.ones(1); dist.all_reduce(t); return t.item()
        with ThreadPoolExecutor(10) as threads:
            jobs = [threads.submit(hpnb.launch, total, ranks=2, device="cpu") for _ in range(10)]
            print([job.result() for job in jobs] == [[2.0, 2.0]] * 10)
    """

    def total() -> float:
        t = torch.ones(1)
        dist.all_reduce(t)
        return t.item()

    script = run_script(body, tmp_path)
    with ThreadPoolExecutor(10) as threads:
        jobs = [threads.submit(hpnb.launch, total, ranks=2, device="cpu") for _ in range(10)]
        assert [job.result() for job in jobs] == [[2.0, 2.0]] * 10
    out, _ = script.communicate(timeout=120)
    assert out.splitlines()[-1] == "True"


# --- what users do ---------------------------------------------------------------------------


def test_a_dead_rank_of_one_pool_does_no_harm_to_another() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as a:
        os.kill(a.run(os.getpid)[0], signal.SIGKILL)
        with hpnb.Ranks(2, device="cpu", timeout=60) as b:
            with pytest.raises(hpnb.RankError, match="rank 0 of 2 was killed by SIGKILL"):
                a.run(scaled_rank)
            assert b.run(hpnb.rank) == [0, 1]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[ForkedRanks, int]]]:
    """Forks a process as the fork server would, and returns the table of its ranks and the process id."""
    monkeypatch.setattr(forkserver_process, "_kill_orphans", lambda deadline: None)  # pytest's own children
    processes: list[BaseProcess] = []

    def fork(work: Callable[..., object], *args: object) -> tuple[ForkedRanks, int]:
        process = multiprocessing.get_context("fork").Process(target=work, args=args)
        process.start()
        processes.append(process)
        assert process.pid is not None
        ranks = ForkedRanks()
        ranks._processes[process.pid] = process
        return ranks, process.pid

    yield fork
    for process in processes:
        with contextlib.suppress(ValueError):  # it was closed
            process.kill()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_rank_that_cannot_be_killed_is_left_and_reaped_later(
    forked: Callable[..., tuple[ForkedRanks, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver_process, "_REAP_LIMIT", 0.2)
    ranks, pid = forked(time.sleep, 60)
    with monkeypatch.context() as uninterruptible:  # SIGKILL waits until such a process wakes up
        uninterruptible.setattr(os, "kill", lambda *_: None)
        uninterruptible.setattr(os, "killpg", lambda *_: None)
        began = time.monotonic()
        assert ranks.kill([pid]) == [pid]
        assert time.monotonic() - began < 5
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: ranks.reap_killed() or not ranks.pids)
    assert ranks.exit_code(pid) == -signal.SIGKILL
    assert ranks.kill([pid]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs waitid")
def test_a_process_id_is_not_signalled_once_it_may_be_a_strangers(
    forked: Callable[..., tuple[ForkedRanks, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, pid = forked(os._exit, 3)
    assert wait_for(lambda: ranks.exit_code(pid) == 3)
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *signal: signals.append(signal))
    monkeypatch.setattr(os, "killpg", lambda *signal: signals.append(signal))
    ranks.signal([pid], signal.SIGUSR1)  # it was only asked for its code, so the process id is still its own
    assert signals == [(pid, signal.SIGUSR1)]
    ranks._processes[pid].join()  # multiprocessing reaps what has ended when it starts another process
    signals.clear()
    ranks.signal([pid], signal.SIGUSR1)
    assert ranks.kill([pid]) == []
    assert signals == []
    assert ranks.exit_code(pid) == 3


def test_a_death_is_reported_though_the_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: object) -> None:
        raise RuntimeError("not answered")

    monkeypatch.setattr(forkserver.ForkServer, "exit_codes", no_answer)
    error = fails(kill_self, ranks=1, timeout=30)
    assert (error.rank, error.error) == (0, "died")
    assert "kill_self" in error.traceback


def test_a_server_that_does_not_answer_is_replaced_and_keeps_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hpnb.Ranks(1, device="cpu", timeout=60) as pool:
        stuck = server()
        monkeypatch.setattr(forkserver, "_server", stuck)  # it serves the tests that follow, too
        monkeypatch.setattr(forkserver, "_loaded", list)  # its replacement need not import all of it
        before = children_of(stuck._process.pid)
        os.kill(stuck._process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RuntimeError, match=r"not answered for 0\.5 s.*pass start_timeout=1 or None"):
                hpnb.launch(hpnb.rank, ranks=2, device="cpu", start_timeout=0.5)
            assert hpnb.launch(hpnb.rank, ranks=2, device="cpu", timeout=60) == [0, 1]
            assert server() is not stuck
            assert pool.run(hpnb.world_size) == [1]
        finally:
            os.kill(stuck._process.pid, signal.SIGCONT)
        # The two ranks that nobody waits for any more come up and are killed.
        late = stuck._ask(("codes", []))
        late.result(60)
        assert wait_for(lambda: children_of(stuck._process.pid) == before)
        assert pool.run(hpnb.world_size) == [1]
        server().close()
        stuck._stuck = False


def test_start_timeout_is_a_number_of_seconds_or_none() -> None:
    with pytest.raises(ValueError, match=r"start_timeout=0: give seconds"):
        hpnb.launch(hpnb.rank, ranks=1, device="cpu", start_timeout=0)
    with hpnb.Ranks(1, device="cpu", start_timeout=None) as pool:
        assert pool.run(hpnb.rank) == [0]
        with pytest.raises(TypeError, match="start_timeout=9"):
            pool.run(hpnb.rank, start_timeout=9)
    assert "pass start_timeout=4 or None" in did_not_start(2.0).advice


def test_flooding_output_does_not_outlast_the_timeout(capfd: pytest.CaptureFixture[str]) -> None:
    def flood() -> None:
        while True:
            os.write(1, b"yyyyyyyyy\n" * 6000)

    assert fails(flood, timeout=1, ranks=1).error == "timed out"
    capfd.readouterr()


def test_a_hang_that_holds_the_interpreter_still_shows_where() -> None:
    def stuck() -> None:
        import re

        re.match(r"(a+)+$", "a" * 40 + "b")  # takes years, in C

    error = fails(on_rank_1(stuck), timeout=1, ranks=2)
    assert error.rank == 1
    assert 're.match(r"(a+)+$"' in error.traceback


class Unloadable:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return int, ("not a number",)


def test_names_that_did_not_arrive_are_sent_again() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        with pytest.raises(hpnb.RankError, match="ValueError"):
            ranks.run(lambda x: SCALE, Unloadable())
        assert ranks.run(lambda: SCALE) == [SCALE] * 2


def test_a_result_that_does_not_load_names_its_rank(four: hpnb.Ranks) -> None:
    with pytest.raises(hpnb.RankError, match="the result of rank 0 cannot be unpickled here"):
        four.run(lambda: Unloadable())


@functools.lru_cache
def remembered(x: int) -> int:
    return x * SCALE


def test_cached_functions_and_submodules_travel(four: hpnb.Ranks) -> None:
    import xml.dom.minidom

    def parse() -> str:
        return xml.dom.minidom.parseString("<a/>").documentElement.tagName  # type: ignore[union-attr]

    assert four.run(lambda: remembered(3)) == [3 * SCALE] * 4
    assert four.run(parse) == ["a"] * 4


SECTIONS = {
    "what an optimizer imports": """
        import torch
        def trains():
            before = "torch._dynamo" in sys.modules
            torch.optim.SGD([torch.ones(1, requires_grad=True)])
            return before

        def communicates():
            before = "hpnb.comm" in sys.modules
            hpnb.comm.barrier
            return before, "torch._dynamo" in sys.modules

        print(hpnb.launch(communicates, ranks=2), hpnb.launch(trains, ranks=2))
    """,
    "a helper": """
        import helpers
        SCALE = 3
        def inner(): return SCALE
        def outer(): return inner() * hpnb.rank()
        print(helpers.twice(outer))
    """,
    "globals": """
        import functools, helpers, torch
        width = 2
        def make(): return width
        class Layer:
            scale = torch.ones(1)
            def __init__(self): self.width = width * int(torch.ones(1))
            def read(self): return self.width, width
        print(helpers.run(make), helpers.run(lambda: width), helpers.run(functools.partial(make)))
        print(helpers.run(Layer)[0].width, helpers.run(Layer().read), helpers.call(Layer().read))
        def note():
            global noted
            noted = width
        def noted_and_width(): return noted, width
        with hpnb.Ranks(2, device="cpu") as ranks:
            ranks.run(note)
            print(helpers.again(ranks, noted_and_width))
            width = helpers.width = 5
            print(helpers.again(ranks, noted_and_width), ranks.run(noted_and_width))
    """,
}
HELPERS = """
import hpnb
SCALE = "of the helpers"
width = 1
count = 0
def twice(fn):
    return hpnb.launch(fn, ranks=2)
def work(make):
    global count
    count += 1
    return make(), width, count
def run(make):
    return hpnb.launch(work, make, ranks=2, device="cpu")[1]
def call(make):
    return hpnb.launch(make, ranks=2, device="cpu")[1]
def again(ranks, make):
    return ranks.run(work, make)[1]
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What one script prints in each of SECTIONS, in a new Python: it takes seconds to import everything."""
    folder = tmp_path_factory.mktemp("sections")
    (folder / "helpers.py").write_text(HELPERS)
    body = "".join(f"print('## {name}')\n{textwrap.dedent(text)}" for name, text in SECTIONS.items())
    command = [sys.executable, str(written_script(body, folder))]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120).stdout
    found = {part.partition("\n")[0]: part.splitlines()[1:] for part in out.split("## ")[1:]}
    assert found.keys() == SECTIONS.keys(), out
    return found


def test_what_an_optimizer_imports_is_imported_once_in_the_server(printed: dict[str, list[str]]) -> None:
    assert printed["what an optimizer imports"] == ["[(True, False), (True, False)] [True, True]"]


def test_a_helper_module_launches_what_main_defines(printed: dict[str, list[str]]) -> None:
    assert printed["a helper"] == ["[0, 3]"]


def test_every_function_has_the_globals_of_its_own_module(printed: dict[str, list[str]]) -> None:
    assert printed["globals"] == [
        "(2, 1, 1) (2, 1, 1) (2, 1, 1)",
        "2 ((2, 2), 1, 1) (2, 2)",
        "((2, 2), 1, 1)",
        "((2, 5), 5, 2) [(2, 5), (2, 5)]",
    ]


def test_under_torchrun_one_warning_says_how_to_use_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=r"program 4 times.*hpnb\.launch_from_torch\(\)") as told:
        assert hpnb.launch(hpnb.rank, ranks=2, device="cpu") == [0, 1]
    assert [warning.filename for warning in told] == [__file__]
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hpnb.launch(hpnb.rank, ranks=2, device="cpu") == [0, 1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [0.3, 1.0])
def test_ctrl_c_while_ranks_start_leaves_a_caller_that_can_launch(tmp_path: Path, after: float) -> None:
    body = f"""
        import threading
        threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            hpnb.launch(time.sleep, 30, ranks=2, device="cpu")
        except KeyboardInterrupt:
            print("interrupted")
        print(hpnb.launch(hpnb.rank, ranks=2, device="cpu", timeout=30))
    """
    out, _ = run_script(body, tmp_path).communicate(timeout=90)
    assert out.splitlines()[-2:] == ["interrupted", "[0, 1]"]


def test_the_environment_holds_before_the_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setattr(sys, "path", [*sys.path, Path("somewhere")])  # a Path there is common, if wrong
    levels = hpnb.launch(lambda: dist.get_debug_level().name, ranks=2, device="cpu", timeout=60)
    assert levels == ["DETAIL"] * 2


# --- output ----------------------------------------------------------------------------------


def test_every_kind_of_output_appears_under_its_label(
    four: hpnb.Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def talk() -> None:
        import ctypes

        print("from print", hpnb.rank())
        print("from stderr", file=sys.stderr)
        ctypes.CDLL(None).puts(b"from C")
        os.write(1, b"unfinished")

    four.run(talk)
    out, err = capfd.readouterr()
    for rank in range(4):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        said = ["from print " + str(rank), "from stderr", "from C", "unfinished"]
        assert [line.split("] ", 1)[1] for line in mine] == said
    assert err == ""


def test_a_bar_leaves_its_last_state_and_lines_beside_it_stay_whole(
    four: hpnb.Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    def bars() -> None:
        from tqdm import tqdm

        for i in tqdm(range(3), desc="outer", mininterval=0, ascii=True):
            for _ in tqdm(range(2), desc="inner", leave=False, mininterval=0, ascii=True):
                pass
            print("did", i)

    four.run(bars)
    lines = capfd.readouterr().out.splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert [line.split("] ")[1] for line in mine[:3]] == ["did 0", "did 1", "did 2"]
        assert len(mine) == 4
        assert "outer: 100%" in mine[3]
        assert "3/3" in mine[3]


def test_lines_that_end_as_on_windows_are_lines(four: hpnb.Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        os.write(1, b"a,b\r")
        time.sleep(0.05)
        os.write(1, b"\n1,2\r\n")
        print("end")

    four.run(write)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank 2]")]
    assert lines == ["[rank 2] a,b", "[rank 2] 1,2", "[rank 2] end"]


# --- messages --------------------------------------------------------------------------------


def test_the_message_folds_library_frames_and_the_attributes_keep_them() -> None:
    def wrong() -> None:
        torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3))

    error = fails(wrong, ranks=2)
    assert error.traceback.count('File "torch/') >= 3
    message = str(error).split("\n\n")[1]
    assert "torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(3))" in message
    assert message.count('File "torch/') == 1
    assert "in forward" in message  # the innermost frame is kept


def test_a_limit_that_is_given_to_run_says_where_it_belongs(four: hpnb.Ranks) -> None:
    def waits(timeout: float = 0.0) -> float:
        return timeout

    assert four.run(waits, timeout=3.0) == [3.0] * 4
    with pytest.raises(TypeError, match=r"which does not take it; .* hpnb\.Ranks\(timeout=5\)"):
        four.run(lambda: 1, timeout=5)
    assert four.alive


# --- modules that change ----------------------------------------------------------------------------


def _write_module(folder: Path, name: str, text: str) -> None:
    """A version of a module that differs from the last one in size, so that no old .pyc counts."""
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()


def test_what_the_caller_reloads_the_ranks_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    _write_module(tmp_path, "hpnb_edited", "def value(): return 1\n")
    helper = importlib.import_module("hpnb_edited")
    cell = "import hpnb_edited; from hpnb_edited import value; (hpnb_edited.value(), value())"
    later = "(hpnb_edited.value(), value())"
    with hpnb.Ranks(2, device="cpu") as two:
        assert two.run_cell(cell, members=[0]) == [(1, 1)]
        _write_module(tmp_path, "hpnb_edited", "def value(): return 1 + 1\n")
        importlib.reload(helper)
        assert two.run_cell(cell) == [(2, 2), (2, 2)]
        _write_module(tmp_path, "hpnb_edited", "def value(): return 1 + 1 + 1\n")
        importlib.reload(helper)
        assert two.run_cell(later, members=[1]) == [(3, 3)]
        assert two.run_cell(later) == [(3, 3), (3, 3)]  # a function that a rank imported by name follows
        assert two.run(helper.value) == [3, 3]
        _write_module(tmp_path, "hpnb_edited", "def value(): return 1 / 0\nvalue()\n")
        with pytest.raises(ZeroDivisionError):
            importlib.reload(helper)
        with pytest.raises(hpnb.RankError, match="ZeroDivisionError"):
            two.run_cell(later)
        _write_module(tmp_path, "hpnb_edited", "def value(): return 2 + 2\n")
        importlib.reload(helper)
        assert two.run_cell(later) == [(4, 4), (4, 4)]
        assert "has changed" not in capsys.readouterr().err
    sys.modules.pop("hpnb_edited")


def test_a_module_that_was_edited_and_not_reloaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    _write_module(tmp_path, "hpnb_alone", "VALUE = 1\n")
    cell = "import hpnb_alone; hpnb_alone.VALUE"
    with hpnb.Ranks(2, device="cpu") as two:
        # The file changes while the cell runs, after the import: the rank has the version from before.
        edit = f"; open({str(tmp_path / 'hpnb_alone.py')!r}, 'w').write('VALUE = 10 + 1\\n')"
        assert two.run_cell(cell + edit, members=[0]) is not None
        assert "has changed" not in capsys.readouterr().err
        assert two.run_cell(cell, members=[0]) == [1]
        said = capsys.readouterr().err
        assert "hpnb_alone.py has changed since the ranks imported hpnb_alone" in said
        assert "use import hpnb_alone outside the ranks" in said
        assert two.run_cell(cell, members=[0]) == [1]
        assert capsys.readouterr().err == ""  # once after an edit
        importlib.import_module("hpnb_alone")
        assert two.run_cell(cell) == [11, 11]
    sys.modules.pop("hpnb_alone")
