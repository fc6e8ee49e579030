"""A process that has imported torch and nothing else happened to it; ranks are forked from it.

Starting Python and importing torch takes seconds a rank; a fork of a process that has done so takes
milliseconds. The caller's own process cannot be forked once CUDA is up in it (nor safely while it has
threads), so a server stands beside it: single-threaded, never told about CUDA, in a session of its own.

The server answers requests over a socket pair. When the caller is gone, by whatever means, the server
reads end-of-file, kills the process group of every rank, and leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing

from hpnb.ranks import wire

# An optimizer's first step imports this, a second of every rank's time; the server does it once, when idle.
_IMPORTED_WHEN_IDLE = "torch._dynamo"
_IDLE = 0.5  # seconds

# What a rank is likely to import anyway, and what is safe to have imported before a fork (no threads).
_PRELOADED = ("hpnb", "numpy", "torchvision", "transformers")


# --- the caller's side -----------------------------------------------------------------------


class ForkServer:
    """The caller's handle on its server. One a process, shared by all pools; thread-safe."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        start = f"from hpnb.ranks.forkserver import serve; serve({theirs.fileno()}, {self.pid})"
        path = f"import sys; sys.path[:] = {[p or os.getcwd() for p in sys.path]!r}; "
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", path + start],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # neither Ctrl-C nor a kill of the kernel's group reaches it
            )

    def spawn(self, specs: Sequence[dict[str, Any]], descriptors: Sequence[Sequence[int]]) -> list[int]:
        """Fork one rank for each spec, handing it its descriptors; returns the process ids."""
        wanted = sorted(name for name in sys.modules if name.split(".")[0] in _PRELOADED)
        with self._lock:
            self._send(("spawn", list(specs), wanted))
            for fds in descriptors:
                wire.receive(self._socket)  # one at a time: the server says when it expects the next
                socket.send_fds(self._socket, [b"f"], list(fds))
            return list(self._reply())

    def kill(self, pids: Sequence[int]) -> None:
        """Kill these ranks and whatever they have started. Returns once none is left."""
        self._ask("kill", list(pids))

    def exit_codes(self, pids: Sequence[int]) -> dict[int, int | None]:
        """{pid: exit code, negative for a signal, None while it runs}."""
        codes: dict[int, int | None] = self._ask("codes", list(pids))
        return codes

    def alive(self) -> bool:
        return self.pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        if self.pid == os.getpid():
            self._socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._errors.close()

    def _ask(self, *request: object) -> Any:
        with self._lock:
            self._send(request)
            return self._reply()

    def _send(self, request: object) -> None:
        try:
            wire.send(self._socket, request)
        except OSError as error:
            raise self._gone() from error

    def _reply(self) -> Any:
        try:
            return wire.receive(self._socket)
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> RuntimeError:
        said = ""
        if not self._errors.closed:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
        return RuntimeError("the process that starts ranks has ended" + (f":\n{said}" if said else ""))


_server: ForkServer | None = None
_server_lock = threading.Lock()


def server() -> ForkServer:
    """This process's server, started on first use and again if it was lost."""
    global _server
    with _server_lock:
        if _server is None or not _server.alive():
            _server = ForkServer()
            atexit.register(_server.close)
        return _server


# --- the server's side -----------------------------------------------------------------------


def serve(fd: int, caller: int) -> None:
    """Answer requests until the caller is gone. `fd` is the server's end of the socket pair."""
    connection = socket.socket(fileno=fd)
    ranks: dict[int, BaseProcess] = {}
    try:
        while _wait(connection, caller):
            match wire.receive(connection):
                case "spawn", specs, modules:
                    wire.send(connection, _spawn(ranks, specs, modules, connection))
                case "kill", pids:
                    wire.send(connection, _kill(ranks, pids))
                case "codes", pids:
                    wire.send(connection, {pid: _peek(ranks[pid]) for pid in pids if pid in ranks})
    except (EOFError, OSError):
        pass
    finally:
        _kill(ranks, list(ranks))


def _wait(connection: socket.socket, caller: int) -> bool:
    # A child of the caller may have inherited its end of the pair and keep it open: look for the
    # caller itself as well.
    while not select.select([connection], [], [], _IDLE)[0]:
        if os.getppid() != caller:
            return False
        if _IMPORTED_WHEN_IDLE not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(_IMPORTED_WHEN_IDLE)
    return True


def _spawn(
    ranks: dict[int, BaseProcess], specs: list[dict[str, Any]], modules: list[str], connection: socket.socket
) -> list[int]:
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # what cannot be imported here, the rank will miss itself
                importlib.import_module(name)
    from hpnb.ranks.worker import main

    context = torch.multiprocessing.get_context("fork")
    pids = []
    for spec in specs:
        wire.send(connection, "next")
        _, fds, _, _ = socket.recv_fds(connection, 1, 8)
        process = context.Process(target=main, args=(spec, fds, connection.fileno()))
        process.start()
        for fd in fds:
            os.close(fd)
        assert process.pid is not None
        ranks[process.pid] = process
        pids.append(process.pid)
    return pids


def _kill(ranks: dict[int, BaseProcess], pids: list[int]) -> dict[int, int | None]:
    codes: dict[int, int | None] = {}
    for pid in pids:
        if pid in ranks:
            # The group outlives its leader while a DataLoader worker lives, and its id is not reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
    for pid in pids:
        process = ranks.pop(pid, None)
        if process is not None:
            process.join()
            codes[pid] = process.exitcode
            process.close()
    return codes


def _peek(process: BaseProcess) -> int | None:
    """A child's exit code without reaping it: its id, and so its group's, stays taken until `_kill`."""
    if not hasattr(os, "waitid") or process.pid is None:  # macOS before Python 3.13
        return process.exitcode
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
