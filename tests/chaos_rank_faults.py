"""What a rank may do that ends a call: one function a fault, each with what the caller must be told.

A fault strikes on rank 1 of 2. The other rank meanwhile waits for it in a collective.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb

CULPRIT = 1


@dataclass(frozen=True)
class Fault:
    """How a rank fails, and what the caller is told.

    Attributes:
        strike: what the culprit does; the other rank waits for it.
        told: texts, of which the error has one. None: the call ends well.
        timeout: seconds that the call may take.
        alone: the other rank does not wait.
        before: what both ranks do before.
        of_both: both ranks fail, and either may be the first; the error shows what both did.
    """

    strike: Callable[[Path], Any]
    told: tuple[str, ...] | None
    timeout: float = 60.0
    alone: bool = False
    before: Callable[[Path], None] | None = None
    of_both: bool = False


FAULTS: dict[str, Fault] = {}


def fault(name: str, *told: str, ends_well: bool = False, **options: Any) -> Any:
    def enter(strike: Callable[[Path], Any]) -> Callable[[Path], Any]:
        FAULTS[name] = Fault(strike, None if ends_well else told, **options)
        return strike

    return enter


def note(folder: Path, pid: int) -> None:
    """A process that must be gone when the pool is closed."""
    (folder / str(pid)).touch()


def call(name: str, folder: Path) -> Any:
    """On each rank."""
    note(folder, os.getpid())
    chosen = FAULTS[name]
    dist.barrier()
    if chosen.before is not None:
        chosen.before(folder)
    if hpnb.rank() == CULPRIT:
        return chosen.strike(folder)
    if not chosen.alone:
        dist.all_reduce(torch.ones(3))
    return None


def wait_for_the_other() -> None:
    dist.all_reduce(torch.ones(3))


# --- errors in Python --------------------------------------------------------------------------------------


@fault("raises", "ValueError: seven")
def _(folder: Path) -> None:
    raise ValueError("seven")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@fault("raises what cannot be shown", "Unprintable")
def _(folder: Path) -> None:
    raise Unprintable


@fault("raises a KeyboardInterrupt", "KeyboardInterrupt")
def _(folder: Path) -> None:
    raise KeyboardInterrupt


@fault("raises out of a finally that hangs for a second", "ZeroDivisionError")
def _(folder: Path) -> None:
    try:
        _ = 1 / 0
    finally:
        time.sleep(1)


@fault("sys.exit(0)", "SystemExit: 0")
def _(folder: Path) -> None:
    sys.exit(0)


@fault("sys.exit with a text", "SystemExit: enough")
def _(folder: Path) -> None:
    sys.exit("enough")


@fault("deep recursion", "RecursionError")
def _(folder: Path) -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    deeper(0)


@fault("recursion through C", "RecursionError", "SIGSEGV")
def _(folder: Path) -> None:
    sys.setrecursionlimit(10**9)
    inner: list[Any] = []
    for _ in range(10**6):
        inner = [inner]
    repr(inner)


@fault("out of memory", "MemoryError", "can't allocate memory")
def _(folder: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.getrlimit(resource.RLIMIT_AS)[1]))
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))


@fault("out of memory in Python", "MemoryError")
def _(folder: Path) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.getrlimit(resource.RLIMIT_AS)[1]))
    _ = bytearray(1 << 33)


@fault("a result that cannot be pickled", "cannot be pickled", alone=True)
def _(folder: Path) -> Any:
    return threading.Lock()


class Bomb:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@fault("a result that cannot be unpickled", "cannot be unpickled", "rank 1", alone=True)
def _(folder: Path) -> Any:
    return Bomb()


@fault("another collective than the others", "calls that do not match", timeout=5, of_both=True)
def _(folder: Path) -> None:
    dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3))
    dist.barrier()


# --- ends of a process -------------------------------------------------------------------------------------


@fault("os._exit(0)", "exited with code 0")
def _(folder: Path) -> None:
    os._exit(0)


@fault("os._exit(9)", "exited with code 9")
def _(folder: Path) -> None:
    os._exit(9)


def _killed(number: signal.Signals) -> Callable[[Path], None]:
    def strike(folder: Path) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return strike


for _name in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGBUS", "SIGHUP"):
    fault(_name, _name)(_killed(signal.Signals[_name]))


@fault("a null pointer is read", "SIGSEGV")
def _(folder: Path) -> None:
    ctypes.string_at(0)


@fault("abort() in C", "SIGABRT")
def _(folder: Path) -> None:
    ctypes.CDLL(None).abort()


@fault("exit(3) in C", "exited with code 3")
def _(folder: Path) -> None:
    ctypes.CDLL(None).exit(3)


@fault("killed by a thread of its own", "SIGKILL")
def _(folder: Path) -> None:
    threading.Timer(0.2, ctypes.CDLL(None).kill, (os.getpid(), int(signal.SIGKILL))).start()
    time.sleep(60)


@fault("another program in its place", "exited with code 4")
def _(folder: Path) -> None:
    os.execv(sys.executable, [sys.executable, "-c", "import os; os._exit(4)"])


# --- hangs -------------------------------------------------------------------------------------------------


@fault("SIGSTOP", "no answer from", timeout=3)
def _(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@fault("hangs in Python", "no answer from", timeout=3)
def _(folder: Path) -> None:
    while True:
        pass


@fault("hangs in C, with the GIL", "no answer from", timeout=3)
def _(folder: Path) -> None:
    ctypes.PyDLL(None).sleep(600)


@fault("hangs in C, without the GIL", "no answer from", timeout=3)
def _(folder: Path) -> None:
    ctypes.CDLL(None).sleep(600)


@fault("hangs and ignores signals", "no answer from", timeout=3)
def _(folder: Path) -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


@fault("waits for a lock that nobody gives back", "no answer from", timeout=3)
def _(folder: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# --- output and results ------------------------------------------------------------------------------------


@fault("200 MB of output, then an error", "ValueError: after much")
def _(folder: Path) -> None:
    line = "x" * 9999 + "\n"
    for _ in range(20_000):
        sys.stdout.write(line)
    raise ValueError("after much")


@fault("output without an end of line, in no encoding", "ValueError: after bytes")
def _(folder: Path) -> None:
    os.write(1, b"\xff\xfe\x00\x1b[2J" * 1000)
    raise ValueError("after bytes")


@fault("a result of 1 GB", ends_well=True, alone=True, timeout=120)
def _(folder: Path) -> Any:
    return torch.zeros(1 << 27, dtype=torch.float64)


@fault("its output is closed", ends_well=True, alone=True)
def _(folder: Path) -> None:
    os.close(1)
    os.close(2)


@fault("all descriptors are closed", "is gone", "exited", "died", "SIG", "Error", "no answer", timeout=10)
def _(folder: Path) -> None:
    os.closerange(0, 4096)
    wait_for_the_other()


# --- other processes and threads ---------------------------------------------------------------------------


@fault("a fork that returns", ends_well=True, alone=True)
def _(folder: Path) -> str:
    pid = os.fork()
    note(folder, pid or os.getpid())
    return "child" if pid == 0 else "rank"


@fault("a child that raises, then an error", "ValueError: of the rank")
def _(folder: Path) -> None:
    if os.fork() == 0:
        raise KeyError("of the child")
    os.wait()
    raise ValueError("of the rank")


@fault("a thread that raises", ends_well=True, alone=True)
def _(folder: Path) -> None:
    def fails() -> None:
        raise ValueError("of a thread")

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()


@fault("a thread that never ends", ends_well=True, alone=True)
def _(folder: Path) -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


@fault("a child left behind, then an error", "ValueError: of the parent")
def _(folder: Path) -> None:
    note(folder, subprocess.Popen(["sleep", "600"]).pid)
    raise ValueError("of the parent")


@fault("a child left in a session of its own, then killed", "SIGKILL")
def _(folder: Path) -> None:
    note(folder, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    os.kill(os.getpid(), signal.SIGKILL)


@fault("shared memory, then killed", "SIGKILL")
def _(folder: Path) -> None:
    kept = torch.ones(1 << 20).share_memory_()
    os.kill(os.getpid(), signal.SIGKILL)
    del kept


# --- in the middle of work ---------------------------------------------------------------------------------


def save_in_background(folder: Path) -> None:
    """Both ranks begin a save."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", zero_stage=1))
    net = nn.Linear(500, 500)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.save(folder / "run" / "step-1", model, optimizer, background=True)


@fault("killed while a save is written", "SIGKILL", before=save_in_background)
def _(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@fault("raises while a save is written", "ValueError: meanwhile", before=save_in_background)
def _(folder: Path) -> None:
    raise ValueError("meanwhile")


@fault("sys.exit while a save is written", "SystemExit", before=save_in_background)
def _(folder: Path) -> None:
    sys.exit(1)


@fault("raises in a hook of the backward", "ValueError: in a hook")
def _(folder: Path) -> None:
    net = nn.Linear(3, 3)

    def hook(grad: torch.Tensor) -> None:
        raise ValueError("in a hook")

    net.weight.register_hook(hook)
    net(torch.ones(1, 3)).sum().backward()


@fault("the process group is destroyed", "process group has not been initialized", timeout=5, of_both=True)
def _(folder: Path) -> None:
    dist.destroy_process_group()
    wait_for_the_other()


@fault("the working folder is removed, then an error", "ValueError: nowhere")
def _(folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    raise ValueError("nowhere")
