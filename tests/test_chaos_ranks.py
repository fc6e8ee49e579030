"""Chaos on ranks: whatever a rank does, the caller soon knows which rank it was, and nothing stays behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import chaos_rank_faults as program
import pytest
from chaos_tally import Tally, tally

import hpnb

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    hpnb.launch(hpnb.rank, ranks=1, device="cpu")  # the server is there, with its descriptors
    with tally("ranks", request) as made:
        yield made


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening() -> set[str]:
    """Ports on which this process, or what it has started, listens."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{entry}").strip("socket:[]"))
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines if line.split()[3] == "0A" and line.split()[9] in inodes}


def shared_memory(pids: list[int]) -> list[str]:
    """What these processes have left in /dev/shm."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return [name for name in names if any(f"_{pid}_" in name for pid in pids)]


def what_is_left(folder: Path, descriptors: int, ports: set[str]) -> str:
    """Processes, descriptors, ports and shared memory, once they had five seconds to go."""
    pids = [int(name) for name in os.listdir(folder) if name.isdigit()]
    deadline = time.monotonic() + 5
    while True:
        left = [f"process {pid}" for pid in pids if is_running(pid)]
        left += [f"/dev/shm/{name}" for name in shared_memory(pids)]
        left += [f"port {port}" for port in listening() - ports]
        if (more := len(os.listdir("/proc/self/fd")) - descriptors) > 0:
            left.append(f"{more} descriptors")
        if not left or time.monotonic() > deadline:
            return ", ".join(left)
        time.sleep(0.05)


def interrupt_soon(started: Path) -> None:
    while not (started / "started").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def waits(folder: Path) -> None:
    program.note(folder, os.getpid())
    (folder / "started").touch()
    time.sleep(60)


def test_an_interrupt_of_the_caller_leaves_nothing(counts: Tally, tmp_path: Path) -> None:
    descriptors, ports = len(os.listdir("/proc/self/fd")), listening()
    thread = threading.Thread(target=interrupt_soon, args=(tmp_path,))
    with hpnb.Ranks(2, device="cpu", timeout=50) as ranks:
        thread.start()
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt, match="interrupted"):
            ranks.run(waits, tmp_path)
        seconds = time.perf_counter() - began
    thread.join()
    left = what_is_left(tmp_path, descriptors, ports)
    counts.add("Ctrl-C in the caller", "lost" if left else "named", seconds, "", left)
    counts.check()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", program.FAULTS)
def test_a_fault_of_a_rank_is_named_and_leaves_nothing(counts: Tally, name: str, tmp_path: Path) -> None:
    fault = program.FAULTS[name]
    descriptors, ports = len(os.listdir("/proc/self/fd")), listening()
    outcome, text = "unharmed", ""
    silence = contextlib.redirect_stdout(io.StringIO())
    with silence, hpnb.Ranks(2, device="cpu", timeout=fault.timeout) as ranks:
        began = time.perf_counter()
        try:
            ranks.run(program.call, name, tmp_path)
            if fault.told is not None:
                outcome, text = "wrong", "no error"
        except hpnb.RankError as error:
            text = error.summary
            named = error.rank == program.CULPRIT or fault.of_both
            text = str(error) if fault.of_both else text
            outcome = "named" if named and any(told in text for told in fault.told or ()) else "wrong"
        seconds = time.perf_counter() - began
    if left := what_is_left(tmp_path, descriptors, ports):
        outcome, text = "lost", f"{left} left; {text}"
    if hpnb.launch(hpnb.rank, ranks=2, device="cpu") != [0, 1]:
        outcome, text = "lost", "the next launch does not work"
    counts.add(name, outcome, seconds, text, left)
    counts.check()
