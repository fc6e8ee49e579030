"""A process that has imported torch and done nothing else; ranks are forked from it.

Starting Python and importing torch takes seconds per rank; a fork of a process that has done so takes
milliseconds. The caller's process cannot be forked once it uses CUDA (nor safely while it has threads). So a
server process is forked instead: it has one thread, never touches CUDA, and has its own session.

The server answers requests over a socket pair; `forkserver_process.py` is its side. It starts with the first
ranks. In the kernel of a notebook it may start earlier, by `start_ahead`: then kernel and server import at
the same time. Ranks must not notice. Modules read the environment while they are imported, so a server that
stood ready while the notebook changed os.environ, sys.path or its folder is replaced by a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from hpnb.ranks.messages import receive_message, send_message
from hpnb.ranks.notebook import in_notebook

# Seconds that ranks have to start, unless the caller says otherwise: imports from a cold disk are slow.
START_TIMEOUT = 300.0
# Seconds that the server may take to answer anything else.
_KILL_LIMIT = 30.0
_SIGNAL_LIMIT = 2.0

# What a rank is likely to import anyway, and what is safe to have imported before a fork (no threads).
_PRELOADED = ("hpnb", "numpy", "torchvision", "transformers")
_NEVER_PRELOADED = "hpnb.plot"  # ranks do not draw


class ForkServer:
    """The caller's handle on its server: one per process, shared by all pools and threads.

    One thread owns the socket and handles requests in turn. So Ctrl-C, which interrupts the main thread,
    never separates a request from its reply, and a pool may be garbage-collected at any moment: it only
    queues.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lost = False  # it has ended
        self._stuck = False  # it did not answer in time: it keeps the ranks that it has, and gets no new ones
        self._used = False
        self._living: set[int] = set()  # ranks that nobody has killed yet
        self._environ, self._path, self._folder = dict(os.environ), _search_path(), os.getcwd()
        self._socket, server_socket = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        path = f"import sys; sys.path[:] = {self._path!r}; "
        serve = f"serve({server_socket.fileno()}, {self.pid})"
        start = f"from hpnb.ranks.forkserver_process import serve; {serve}"
        with server_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-c", path + start],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[server_socket.fileno()],
                start_new_session=True,  # neither Ctrl-C nor a kill of the kernel's group reaches it
            )
        self._requests: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...], Sequence[Sequence[int]]] | None]
        self._requests = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._talk, name="hpnb fork server", daemon=True)
        self._thread.start()

    def prepare(self, modules: Sequence[str]) -> None:
        """Import these before ranks are wanted. Returns at once."""
        self._ask(("import", list(modules)))

    def is_as_new(self, limit: float = START_TIMEOUT) -> bool:
        """Whether ranks would find the same in a server that starts now; True once it has any ranks.

        Imports set environment variables, the same ones there as here: those are no difference.
        """
        if self._used:
            return True
        if (self._path, self._folder) != (_search_path(), os.getcwd()):
            return False
        at_start, now = self._environ, dict(os.environ)
        try:
            in_server = self._result(self._ask(("environ",)), limit)
        except RuntimeError:  # it has ended, or is stuck
            return False
        return all(now.get(name) in (at_start.get(name), in_server.get(name)) for name in {*at_start, *now})

    def spawn(
        self,
        specs: Sequence[dict[str, Any]],
        descriptors: Sequence[Sequence[int]],
        modules: Iterable[str] = (),
        limit: float = START_TIMEOUT,
    ) -> list[int]:
        """Import `modules`, then fork one rank for each spec, handing it its descriptors, in `limit` seconds.

        Returns:
            Their process ids.
        """
        self._used = True
        # Copies, because the server may take them after the caller has given up and closed them.
        copies = [[os.dup(fd) for fd in fds] for fds in descriptors]
        future = self._ask(("spawn", list(specs), sorted({*_loaded(), *_wanted, *modules})), copies)
        try:
            advice = f". If it needs more time, pass start_timeout={2 * limit:g} or None"
            pids = list(self._result(future, limit, advice=advice))
            self._living.update(pids)
            return pids
        except BaseException:
            # Nobody will know their ids, so they are killed as soon as they are there.
            future.add_done_callback(lambda done: done.exception() or self._ask(("kill", done.result())))
            raise

    def kill(self, pids: Sequence[int]) -> None:
        """Kill these ranks and whatever they have started. Returns once none is left, or says who is."""
        future = self._ask(("kill", list(pids)))
        if threading.current_thread() is self._thread:  # garbage collection runs anywhere
            return
        self._living.difference_update(pids)
        if left := self._result(future, _KILL_LIMIT):
            processes = f"process{'es' * (len(left) > 1)} {', '.join(map(str, left))}"
            warnings.warn(f"{processes} cannot be killed: waiting for a disk or driver", stacklevel=2)

    def signal(self, pids: Sequence[int], number: int) -> None:
        """Send a signal to those of these ranks that have not ended."""
        with contextlib.suppress(RuntimeError):
            self._result(self._ask(("signal", list(pids), number)), _SIGNAL_LIMIT, stuck=False)

    def exit_codes(self, pids: Sequence[int]) -> dict[int, int | None]:
        """{pid: exit code, negative for a signal, None while it runs}."""
        codes: dict[int, int | None] = self._result(self._ask(("codes", list(pids))), _KILL_LIMIT)
        return codes

    def alive(self) -> bool:
        """Whether it can start ranks."""
        lost = self._lost or self._stuck or self._process.poll() is not None
        return self.pid == os.getpid() and not lost

    def close(self) -> None:
        if self.pid == os.getpid():
            if not self._living or self._stuck:
                self._process.kill()  # no ranks to look after, and it may be importing for seconds
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
            _close(descriptors)
            future.set_exception(self._gone())
        else:
            self._requests.put((future, request, descriptors))
        return future

    def _result(self, future: Future[Any], limit: float, stuck: bool = True, advice: str = "") -> Any:
        """What the server answers within `limit` seconds; a `stuck` server gets no new ranks from then on."""
        try:
            wait = min(limit, _SIGNAL_LIMIT) if self._stuck else limit
            return future.result(None if wait == math.inf else wait)
        except TimeoutError:
            self._stuck = self._stuck or stuck
            raise RuntimeError(
                f"the process that starts ranks has not answered for {limit:g} s; it may wait for a disk or "
                f"a driver. The next launch starts another one{advice}"
            ) from None

    def _talk(self) -> None:
        while (entry := self._requests.get()) is not None:
            future, request, descriptors = entry
            try:
                send_message(self._socket, request)
                kind, reply = receive_message(self._socket)
                for fds in descriptors:  # one at a time: the server says when it expects the next
                    if kind != "next":
                        break
                    socket.send_fds(self._socket, [b"f"], list(fds))
                    kind, reply = receive_message(self._socket)
            except (EOFError, OSError):
                self._lost = True
                future.set_exception(self._gone())
                continue
            finally:
                _close(descriptors)
            if kind == "failed":
                future.set_exception(RuntimeError(f"the server of ranks could not {request[0]}: {reply}"))
            else:
                future.set_result(reply)

    def _gone(self) -> RuntimeError:
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace").strip()
        return RuntimeError("the process that starts ranks has ended" + (f":\n{output}" if output else ""))


def _close(descriptors: Sequence[Sequence[int]]) -> None:
    for fd in (fd for fds in descriptors for fd in fds):
        os.close(fd)


_server: ForkServer | None = None
_server_lock = threading.Lock()
_wanted: set[str] = set()  # modules that ranks will use, whether the caller imports them or not


def server(limit: float = START_TIMEOUT) -> ForkServer:
    """This process's server, started on first use and again if it was lost or is out of date."""
    global _server
    with _server_lock:
        if _server is not None and _server.alive() and not _server.is_as_new(limit):
            _server.close()
        if _server is None or not _server.alive():
            _server = ForkServer()
            atexit.register(_server.close)
        return _server


def start_ahead(*modules: str) -> None:
    """In the kernel of a notebook: let the server import `modules` while the caller goes on, and start it if
    there is none.

    Anywhere else (a script, a test, a rank, under torchrun) nothing starts before ranks are wanted. Then the
    server imports `modules` once for all ranks, even if the caller has not imported them.
    """
    global _server
    _wanted.update(modules)
    if not in_notebook() or multiprocessing.parent_process() is not None:
        return
    with _server_lock:
        if _server is None:
            _server = ForkServer()
            atexit.register(_server.close)
            modules = (*_loaded(), *modules)
        if modules and not _server._used:  # one that has ranks answers for them first
            _server.prepare(modules)


def _loaded() -> list[str]:
    """What the caller has imported and ranks are likely to import."""
    likely = [name for name in list(sys.modules) if name.split(".")[0] in _PRELOADED]
    return sorted(name for name in likely if not f"{name}.".startswith(f"{_NEVER_PRELOADED}."))


def _search_path() -> list[str]:
    return [str(p) or os.getcwd() for p in sys.path]
