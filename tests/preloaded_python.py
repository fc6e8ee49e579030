"""Programs in forks of a Python that has imported hpnb and transformers, which takes a new one seconds.

A program has an environment, a folder and output of its own. If it starts ranks, their server is such a fork
too, made before the program has run a line; a second server is a new Python, as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

_PRELOADED = ["hpnb.hybrid.booster", "hpnb.hybrid.checkpoint.checkpoint", "hpnb.hybrid.train_command.train"]
_PRELOADED += ["torch._dynamo", "torch.distributed.run", "torchvision.transforms.v2", "hpnb.data.images"]
_PRELOADED += ["hpnb.ranks.forkserver_process", "hpnb.ranks.worker"]
_PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("vit", "gpt2")]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(_PRELOADED)


def run_program(
    script: Path,
    *arguments: str,
    folder: Path,
    environ: Mapping[str, str] | None = None,
    timeout: float = 200,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run([python, script, *arguments], cwd=folder, env=environ)."""
    out, errors = folder / f"{script.stem}.out", folder / f"{script.stem}.err"
    process = start_program(script, *arguments, folder=folder, environ=environ, out=out, errors=errors)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{script.name} ran for {timeout:g} s:\n{out.read_text()}\n{errors.read_text()}")
    return subprocess.CompletedProcess(script, process.exitcode, out.read_text(), errors.read_text())


def start_program(
    script: Path,
    *arguments: str,
    folder: Path,
    out: Path,
    errors: Path,
    environ: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start it, with its output in files."""
    where = dict(os.environ if environ is None else environ)
    process = _server.Process(target=_run, args=(script, arguments, folder, out, errors, where))
    process.start()
    return process


class Program:
    """A program whose output is read while it runs: subprocess.Popen([python, script], stdout=PIPE).

    It is the leader of a session. What it writes to stderr is in `script.err`.
    """

    def __init__(self, script: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        pipe, self._errors = script.with_suffix(".pipe"), script.with_suffix(".err")
        os.mkfifo(pipe)
        self._process = start_program(
            script, *arguments, folder=Path.cwd(), out=pipe, errors=self._errors, environ=environ
        )
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout: TextIO = pipe.open()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it wrote since the last read, and all that it wrote to stderr."""
        self.wait(timeout)
        with self.stdout:
            return self.stdout.read(), self._errors.read_text()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    script: Path, arguments: tuple[str, ...], folder: Path, out: Path, errors: Path, environ: dict[str, str]
) -> None:
    os.setsid()
    _make_server_of_ranks()
    for number, path in ((1, out), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path[0:0] = [str(script.parent), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()


# --- the server of its ranks -------------------------------------------------------------------------------


def _make_server_of_ranks() -> None:
    """Fork it, and let hpnb.ranks take it in place of the first server that it would start."""
    from hpnb.ranks import forkserver

    ours, theirs = socket.socketpair()
    caller = os.getpid()
    if (pid := os.fork()) == 0:
        ours.close()
        try:
            _serve_ranks(theirs, caller)
        finally:
            os._exit(0)
    theirs.close()
    unused = [_ForkedServer(pid, ours)]

    def start(command: Sequence[str], *, pass_fds: Sequence[int], stderr: Any, **options: Any) -> Any:
        if os.getpid() != caller or not unused:
            return subprocess.Popen(command, pass_fds=pass_fds, stderr=stderr, **options)
        forked = unused.pop()
        forked.begin(pass_fds[0], stderr.fileno())
        return forked

    forkserver.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


class _ForkedServer:
    """What hpnb.ranks uses of a subprocess.Popen."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection, self._code = pid, connection, None

    def begin(self, server_socket: int, errors: int) -> None:
        told = pickle.dumps((dict(os.environ), [str(p) or os.getcwd() for p in sys.path], os.getcwd()))
        socket.send_fds(self._connection, [len(told).to_bytes(8, "big")], [server_socket, errors])
        self._connection.sendall(told)

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + timeout
            while self.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve_ranks(connection: socket.socket, caller: int) -> None:
    """Wait until the program wants ranks, or has ended."""
    from hpnb.ranks.forkserver_process import serve

    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
    if not size:
        return
    server_socket, errors = descriptors
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += connection.recv(1 << 20)
    environ, sys.path[:], folder = pickle.loads(told)
    connection.close()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    empty = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, empty), (1, errors), (2, errors)):
        os.dup2(file, number)
    serve(server_socket, caller)
