"""Ranks under faults: forks, exhausted descriptors, interrupts, a killed server, and timeouts without end."""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preloaded_python import run_program

import hpnb
from hpnb.ranks import forkserver_process
from hpnb.ranks.forkserver import ForkServer, server
from hpnb.ranks.forkserver_process import ForkedRanks
from hpnb.ranks.messages import receive_message, send_message
from hpnb.ranks.worker import Failed


def forks(number: int) -> tuple[int, str]:
    pid = os.fork()  # the child forgets os._exit, so both return
    return number, "child" if pid == 0 else "rank"


def forks_and_raises() -> str:
    if os.fork() == 0:
        raise ValueError("of the child")
    os.wait()
    return "rank"


def test_a_child_that_a_rank_forks_does_not_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with hpnb.Ranks(2, device="cpu", timeout=30) as ranks:
        for number in range(20):
            assert ranks.run(forks, number) == [(number, "rank")] * 2
        assert ranks.run(forks_and_raises) == ["rank"] * 2
        assert ranks.run(forks, 21) == [(21, "rank")] * 2


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_a_launch_without_enough_descriptors_gives_them_back() -> None:
    hpnb.launch(hpnb.rank, ranks=1, device="cpu")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            hpnb.launch(hpnb.rank, ranks=64, device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() <= before + 1
    assert hpnb.launch(hpnb.rank, ranks=1, device="cpu") == [0]


def test_an_interrupt_while_ranks_are_stopped_closes_their_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hpnb.launch(hpnb.rank, ranks=1, device="cpu")
    before = open_descriptors()
    ranks = hpnb.Ranks(2, device="cpu", timeout=30)
    kill = server().kill

    def interrupted(pids: list[int]) -> None:
        kill(pids)
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks._processes.server, "kill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ranks.close()
    monkeypatch.undo()
    del ranks
    assert open_descriptors() <= before + 1


KILLED_SERVER = """
    import os, signal, subprocess, sys, threading, time
    from pathlib import Path
    import hpnb
    from hpnb.ranks.forkserver import server

    def starts_processes(folder):
        child = subprocess.Popen(["sleep", "60"])
        Path(folder, f"{hpnb.rank()}.part").write_text(str(child.pid))
        os.rename(Path(folder, f"{hpnb.rank()}.part"), Path(folder, str(hpnb.rank())))
        time.sleep(60)

    def kill_the_server(folder):
        while len([name for name in os.listdir(folder) if name.isdigit()]) < 2:
            time.sleep(0.05)
        time.sleep(0.5)  # a rank notes where it is ten times a second
        os.kill(server()._process.pid, signal.SIGKILL)

    threading.Thread(target=kill_the_server, args=sys.argv[1:], daemon=True).start()
    try:
        hpnb.launch(starts_processes, sys.argv[1], ranks=2, device="cpu", timeout=50)
    except hpnb.RankError as error:
        print("is gone" in str(error), "in starts_processes" in str(error))
    print(hpnb.launch(hpnb.rank, ranks=2, device="cpu"))
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_what_ranks_have_started_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(KILLED_SERVER))
    done = run_program(tmp_path / "program.py", str(tmp_path), folder=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True", "[0, 1]"], done.stdout + done.stderr
    pids = [int((tmp_path / rank).read_text()) for rank in ("0", "1")]
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_fork_that_fails_is_an_error_and_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides waited for each other until `start_timeout`, and a disk was blamed."""

    def start() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=start))
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(forkserver_process.gc, "freeze", lambda: None)
    monkeypatch.setattr(forkserver_process, "_kill_orphans", lambda deadline: None)  # pytest's own children
    before = open_descriptors()
    ours, theirs = socket.socketpair()
    client = object.__new__(ForkServer)
    client._socket, client._lost, client._stuck = ours, False, False
    client._requests = queue.SimpleQueue()

    def serve() -> None:
        request = receive_message(theirs)
        try:
            forkserver_process._answer(ForkedRanks(), request, theirs)
        except OSError as error:
            send_message(theirs, ("failed", str(error)))

    threads = [threading.Thread(target=run, daemon=True) for run in (client._talk, serve)]
    for thread in threads:
        thread.start()
    read_end, write_end = os.pipe()
    copies = [[os.dup(read_end)], [os.dup(write_end)]]
    future = client._ask(("spawn", [{}, {}], []), copies)
    with pytest.raises(RuntimeError, match=r"could not spawn: .*Resource temporarily unavailable"):
        client._result(future, 5.0)
    client._requests.put(None)
    for thread in threads:
        thread.join(5)
    for fd in (read_end, write_end):
        os.close(fd)
    ours.close()
    theirs.close()
    assert open_descriptors() == before


def test_a_lost_connection_does_not_hide_who_was_lost() -> None:
    begun = time.monotonic()
    lost = Failed("", "RuntimeError: Connection closed by peer [127.0.0.1]:7", "RuntimeError", (), begun)
    cases: list[Any] = [None, replace(lost, summary="ValueError: seven", time=begun + 0.3)]
    for reply in cases:
        with hpnb.Ranks(2, device="cpu", timeout=30) as ranks:
            ranks._died[1] = begun + 3.0  # on a busy machine a death is noticed late
            assert ranks._failure((0, 1), {0: lost, 1: reply}, 30.0).rank == 1


@pytest.mark.parametrize("timeout", [float("inf"), 1e10])
def test_a_timeout_may_be_as_long_as_one_likes(timeout: float) -> None:
    assert hpnb.launch(hpnb.rank, ranks=2, device="cpu", timeout=timeout) == [0, 1]


def test_ranks_take_signals_that_the_caller_blocks(tmp_path: Path) -> None:
    """A process keeps its signal mask over fork and exec, and supervisors block SIGTERM to wait for it."""
    program = """
        import signal
        import hpnb

        def blocked():
            return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

        if __name__ == "__main__":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            print(hpnb.launch(blocked, ranks=2, device="cpu"))
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = run_program(tmp_path / "program.py", folder=tmp_path, timeout=120)
    assert done.stdout.strip() == "[[], []]", done.stderr
