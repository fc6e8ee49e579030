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
import ctypes
import importlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

from hpnb.ranks import wire

# An optimizer's first step imports this, a second of every rank's time; the server does it once, when idle.
_IMPORTED_WHEN_IDLE = "torch._dynamo"
_IDLE = 0.5  # seconds
_START_LIMIT = 60.0  # seconds that an interrupted start may take to be undone
_PR_SET_CHILD_SUBREAPER = 36

# What a rank is likely to import anyway, and what is safe to have imported before a fork (no threads).
_PRELOADED = ("hpnb", "numpy", "torchvision", "transformers")


# --- the caller's side -----------------------------------------------------------------------


class ForkServer:
    """The caller's handle on its server. One a process, shared by all pools and threads.

    One thread owns the socket and answers requests in turn. So Ctrl-C, which strikes the main thread, never
    tears a request from its reply, and a pool that is garbage-collected at an awkward moment only queues.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lost = False
        self._socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        start = f"from hpnb.ranks.forkserver import serve; serve({theirs.fileno()}, {self.pid})"
        path = f"import sys; sys.path[:] = {[str(p) or os.getcwd() for p in sys.path]!r}; "
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", path + start],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # neither Ctrl-C nor a kill of the kernel's group reaches it
            )
        self._requests: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...], Sequence[Sequence[int]]] | None]
        self._requests = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._talk, name="hpnb fork server", daemon=True)
        self._thread.start()

    def spawn(self, specs: Sequence[dict[str, Any]], descriptors: Sequence[Sequence[int]]) -> list[int]:
        """Fork one rank for each spec, handing it its descriptors; returns the process ids."""
        wanted = sorted(name for name in list(sys.modules) if name.split(".")[0] in _PRELOADED)
        future = self._ask(("spawn", list(specs), wanted), descriptors)
        try:
            return list(future.result())
        except BaseException:
            # Interrupted while they start: nobody will know their ids, so they go as soon as they are there.
            future.add_done_callback(lambda done: done.exception() or self._ask(("kill", done.result())))
            # The descriptors must stay open until the server has taken them.
            wait([future], timeout=_START_LIMIT)
            raise

    def kill(self, pids: Sequence[int]) -> None:
        """Kill these ranks and whatever they have started. Returns once none is left."""
        future = self._ask(("kill", list(pids)))
        if threading.current_thread() is not self._thread:  # garbage collection runs anywhere
            future.result()

    def exit_codes(self, pids: Sequence[int]) -> dict[int, int | None]:
        """{pid: exit code, negative for a signal, None while it runs}."""
        codes: dict[int, int | None] = self._ask(("codes", list(pids))).result()
        return codes

    def alive(self) -> bool:
        return self.pid == os.getpid() and not self._lost and self._process.poll() is None

    def close(self) -> None:
        if self.pid == os.getpid():
            self._requests.put(None)
            self._thread.join(5)
            self._lost = True
            self._socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    # --- the thread that owns the socket ------------------------------------------------------

    def _ask(self, request: tuple[Any, ...], descriptors: Sequence[Sequence[int]] = ()) -> Future[Any]:
        future: Future[Any] = Future()
        if self._lost:
            future.set_exception(self._gone())
        else:
            self._requests.put((future, request, descriptors))
        return future

    def _talk(self) -> None:
        while (asked := self._requests.get()) is not None:
            future, request, descriptors = asked
            try:
                wire.send(self._socket, request)
                for fds in descriptors:
                    wire.receive(self._socket)  # one at a time: the server says when it expects the next
                    socket.send_fds(self._socket, [b"f"], list(fds))
                kind, reply = wire.receive(self._socket)
            except (EOFError, OSError):
                self._lost = True
                future.set_exception(self._gone())
                continue
            if kind == "failed":
                future.set_exception(RuntimeError(f"the server of ranks could not {request[0]}: {reply}"))
            else:
                future.set_result(reply)

    def _gone(self) -> RuntimeError:
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
    if sys.platform == "linux":  # what a rank leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        while _wait(connection, caller):
            try:
                request = wire.receive(connection)
            except (EOFError, OSError):
                break
            try:
                reply = ("done", _answer(ranks, request, connection))
            except Exception as error:
                reply = ("failed", f"{type(error).__name__}: {error}")
            wire.send(connection, reply)
    except OSError:
        pass
    finally:
        _kill(ranks, list(ranks))


def _answer(ranks: dict[int, BaseProcess], request: tuple[Any, ...], connection: socket.socket) -> Any:
    match request:
        case "spawn", specs, modules:
            return _spawn(ranks, specs, modules, connection)
        case "kill", pids:
            return _kill(ranks, pids)
        case "codes", pids:
            return {pid: _peek(ranks[pid]) for pid in pids if pid in ranks}
    raise ValueError(f"no request {request[0]!r}")


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
            # The group outlives its leader while a DataLoader worker lives.
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
    if not ranks:
        _kill_orphans()
    return codes


def _kill_orphans() -> None:
    """What ranks have left behind in sessions of their own; this process has become its parent."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(entry.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                os.kill(int(entry.parent.name), signal.SIGKILL)
                os.waitpid(int(entry.parent.name), 0)


def _peek(process: BaseProcess) -> int | None:
    """A child's exit code; multiprocessing may have reaped it already, when it started another."""
    return process.exitcode
