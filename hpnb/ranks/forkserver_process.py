"""The fork server's side: it imports, forks ranks, signals them, and reaps them.

A process id belongs to its process until that is reaped, and may be a stranger's afterwards. So this process
alone signals ranks, in one thread: a rank is signalled only while it has not been reaped, and it is reaped
only once its process group has been killed. A rank in uninterruptible sleep (a dead disk, a stuck driver)
dies when the kernel lets it. Nobody waits for it longer than `_REAP_LIMIT`, because the other pools of the
caller share this thread; it is reaped later, while the server is idle.

When the caller is gone, by whatever means, the server reads end-of-file, kills every rank, and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch.multiprocessing

from hpnb.ranks.messages import receive_message, send_message
from hpnb.ranks.process_stat import all_processes

# An optimizer's first step imports this, a second of every rank's time; the server does it once, when idle.
_IMPORTED_WHEN_IDLE = "torch._dynamo"
_IDLE = 0.5  # seconds
_LONG_IDLE = 4  # times that, after which nothing is likely to be wanted soon
_REAP_LIMIT = 5.0  # seconds for killed ranks to end
_PR_SET_CHILD_SUBREAPER = 36


def serve(fd: int, caller: int) -> None:
    """Answer requests until the caller is gone. `fd` is the server's end of the socket pair."""
    connection = socket.socket(fileno=fd)
    ranks = ForkedRanks()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to all processes; ranks save meanwhile
    if sys.platform == "linux":  # what a rank leaves behind becomes a child of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        while _wait_for_request(connection, caller, ranks):
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
        ranks.kill(ranks.pids)


def _answer(ranks: ForkedRanks, request: tuple[Any, ...], connection: socket.socket) -> Any:
    match request:
        case "import", modules:
            return _import(modules)
        case ("environ",):
            return dict(os.environ)
        case "spawn", specs, modules:
            _import(modules)
            return ranks.fork(specs, connection)
        case "signal", pids, number:
            return ranks.signal(pids, number)
        case "kill", pids:
            return ranks.kill(pids)
        case "codes", pids:
            return {pid: ranks.exit_code(pid) for pid in pids}
    raise ValueError(f"no request {request[0]!r}")


def _wait_for_request(connection: socket.socket, caller: int, ranks: ForkedRanks) -> bool:
    """False once the caller is gone."""
    waited = 0
    # A child of the caller may have inherited its end of the pair and keep it open: look for the
    # caller itself as well.
    while not select.select([connection], [], [], _IDLE)[0]:
        if os.getppid() != caller:
            return False
        ranks.reap_killed()
        waited += 1
        # Not while there are ranks: a signal that asks one where it is must not wait for an import.
        if waited >= _LONG_IDLE and not ranks.pids and _IMPORTED_WHEN_IDLE not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(_IMPORTED_WHEN_IDLE)
    return True


def _import(modules: list[str]) -> None:
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # what cannot be imported here, the rank will miss itself
                importlib.import_module(name)


class ForkedRanks:
    """The ranks that this process has forked and not yet reaped."""

    def __init__(self) -> None:
        self._processes: dict[int, BaseProcess] = {}
        self._killed: set[int] = set()  # of those, the ones that were killed and have not ended yet
        self._exit_codes: dict[int, int | None] = {}  # of ranks that were reaped

    @property
    def pids(self) -> list[int]:
        return list(self._processes)

    def fork(self, specs: Sequence[dict[str, Any]], connection: socket.socket) -> list[int]:
        """Fork one rank for each spec; its descriptors come over `connection`."""
        from hpnb.ranks.worker import main

        context = torch.multiprocessing.get_context("fork")
        pids: list[int] = []
        gc.freeze()  # else each rank's garbage collections walk, and copy, all that was imported here
        for spec in specs:
            send_message(connection, ("next", None))
            _, fds, _, _ = socket.recv_fds(connection, 1, 8)
            process = context.Process(target=main, args=(spec, fds, connection.fileno()))
            self._reap_ended(self.pids)  # `start` would reap them without killing their groups
            try:
                process.start()
            except BaseException:  # no more processes, or no memory for one
                self.kill(pids)
                raise
            finally:
                for fd in fds:
                    os.close(fd)
            assert process.pid is not None
            self._processes[process.pid] = process
            self._exit_codes.pop(process.pid, None)  # of an earlier rank with the same id
            pids.append(process.pid)
        return pids

    def signal(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to those of `pids` that have not ended."""
        for pid in pids:
            if self._holds_its_pid(pid):
                os.kill(pid, number)

    def kill(self, pids: Iterable[int]) -> list[int]:
        """Kill these ranks and whatever they have started; which of them have not ended in time."""
        pids = [pid for pid in pids if pid in self._processes]
        for pid in pids:
            self._kill_group(pid)
        self._killed.update(pids)
        deadline = time.monotonic() + _REAP_LIMIT
        while self._reap_ended(pids) and time.monotonic() < deadline:
            time.sleep(0.002)
        if not self._processes:
            _kill_orphans(deadline)
        return [pid for pid in pids if pid in self._processes]

    def reap_killed(self) -> None:
        """Let go of ranks that were killed and took longer to end than `kill` waited."""
        self._reap_ended(list(self._killed))

    def exit_code(self, pid: int) -> int | None:
        """Negative for a signal; None while the rank runs. The rank is not reaped by being asked."""
        if pid not in self._processes:
            return self._exit_codes.get(pid)
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._processes[pid].exitcode
        try:
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._processes[pid].exitcode
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def _holds_its_pid(self, pid: int) -> bool:
        """Whether `pid` is still this rank's: it runs, or has ended and was not reaped."""
        if pid not in self._processes:
            return False
        if not hasattr(os, "waitid"):
            return self._processes[pid].exitcode is None
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # multiprocessing has reaped it
            return False
        return True

    def _kill_group(self, pid: int) -> None:
        if not self._holds_its_pid(pid):
            return
        # The group outlives its leader while a DataLoader worker lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet

    def _reap_ended(self, pids: Iterable[int]) -> bool:
        """Reap those of `pids` that have ended; whether any is left."""
        left = False
        for pid in pids:
            if pid not in self._processes:
                continue
            if self.exit_code(pid) is None:
                left = True
                continue
            self._kill_group(pid)
            process = self._processes.pop(pid)
            self._killed.discard(pid)
            self._exit_codes[pid] = process.exitcode  # reaps it
            process.close()
        return left


def _kill_orphans(deadline: float) -> None:
    """Kill what ranks have left behind in other sessions; this process has become its parent."""
    while orphans := [process.pid for process in all_processes() if process.parent == os.getpid()]:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)  # it holds its pid: only this process could reap it
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
