"""The fork server's own side: it imports, forks ranks, and kills them.

When the caller is gone, by whatever means, the server reads end-of-file, kills the process group of every
rank, and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

from hpnb.ranks.messages import receive_message, send_message

# An optimizer's first step imports this, a second of every rank's time; the server does it once, when idle.
_IMPORTED_WHEN_IDLE = "torch._dynamo"
_IDLE = 0.5  # seconds
_PR_SET_CHILD_SUBREAPER = 36


def serve(fd: int, caller: int) -> None:
    """Answer requests until the caller is gone. `fd` is the server's end of the socket pair."""
    connection = socket.socket(fileno=fd)
    ranks: dict[int, BaseProcess] = {}
    if sys.platform == "linux":  # what a rank leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        while _wait(connection, caller):
            try:
                request = receive_message(connection)
            except (EOFError, OSError):
                break
            try:
                reply = ("done", _answer(ranks, request, connection))
            except Exception as error:
                reply = ("failed", f"{type(error).__name__}: {error}")
            send_message(connection, reply)
    except OSError:
        pass
    finally:
        _kill(ranks, list(ranks))


def _answer(ranks: dict[int, BaseProcess], request: tuple[Any, ...], connection: socket.socket) -> Any:
    match request:
        case "import", modules:
            return _import(modules)
        case ("environ",):
            return dict(os.environ)
        case "spawn", specs, modules:
            _import(modules)
            return _spawn(ranks, specs, connection)
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


def _import(modules: list[str]) -> None:
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # what cannot be imported here, the rank will miss itself
                importlib.import_module(name)


def _spawn(
    ranks: dict[int, BaseProcess], specs: list[dict[str, Any]], connection: socket.socket
) -> list[int]:
    from hpnb.ranks.worker import main

    context = torch.multiprocessing.get_context("fork")
    pids = []
    for spec in specs:
        send_message(connection, "next")
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
