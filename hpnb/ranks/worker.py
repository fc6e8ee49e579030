"""The life of one rank: forked from the server, it joins the process group, runs calls, and leaves.

Its __main__ is an empty module that stays between calls: the namespace of a second kernel. Its standard
output and error, C-level writes included, are one pipe to the caller.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import ctypes
import importlib
import linecache
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpnb.ranks import cell_figures, last_seen, out_of_memory, serialize_function, stop_request
from hpnb.ranks.caller_globals import MODULE_ATTRIBUTES, Name
from hpnb.ranks.cell_syntax import FLAGS, run_code
from hpnb.ranks.changed_modules import SourceFile, note_imports, reload_modules, take_imports
from hpnb.ranks.current_rank import current, finish_call
from hpnb.ranks.devices import SHARED_GPU_BACKEND
from hpnb.ranks.gpu_limits import limit_gpu_memory
from hpnb.ranks.keyboard import refuse_keyboard
from hpnb.ranks.messages import receive_message, send_message
from hpnb.ranks.process_group import LONGER_THAN_ANY_LAUNCH
from hpnb.ranks.shared_gpu_group import share_gpu

_PR_SET_PDEATHSIG = 1
_LINE_BUFFERED = 1


@dataclass(frozen=True)
class RankSpec:
    """What a rank knows when it is forked."""

    rank: int
    world_size: int
    device: str
    gpus: int  # the ranks lie on these round-robin
    backend: str
    threads: int
    store_port: int
    environ: dict[str, str]  # the caller's


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        body: pickles {"names", "end", "fn", "args", "kwargs"} or {"names", "end", "cell", "filename",
            "wanted", "draws"}; the last is the rank whose figures are shown.
        number: counts the calls of a pool. Replies repeat it, so that none is taken for another call's.
    """

    body: bytes
    sources: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()  # submodules that the caller has imported, as in `import xml.dom.minidom`
    cwd: str = ""
    path: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    reloads: tuple[str, ...] = ()  # modules that the caller has reloaded
    entries: tuple[bytes, ...] = ()  # each pickles (_, module, name of a dictionary in it, key, value)
    number: int = 0


@dataclass(frozen=True)
class Done:
    """A call has returned: its pickled result, the globals that it has assigned and deleted, what was
    imported, and the figures of a cell, as PNG."""

    result: bytes
    new_names: frozenset[Name] = frozenset()
    deleted_names: frozenset[Name] = frozenset()
    imported: dict[str, SourceFile] = field(default_factory=dict)
    figures: tuple[bytes, ...] = ()
    call: int = 0  # its number; 0 for the start of a rank


@dataclass(frozen=True)
class Failed:
    """A call has raised. `place` is the type of the error and every (file, line) of its traceback."""

    traceback: str
    summary: str
    error: str  # the name of the exception's type
    place: tuple[Any, ...]
    time: float  # time.monotonic(), which processes of one machine share
    new_names: frozenset[Name] = frozenset()
    deleted_names: frozenset[Name] = frozenset()
    took_names: bool = False  # whether the globals that were sent with the call have arrived
    imported: dict[str, SourceFile] = field(default_factory=dict)
    call: int = 0


def main(spec: dict[str, Any], fds: list[int], server_fd: int) -> None:
    """Run as the target of a forked process; `fds` are control socket, output pipe, last-seen page."""
    rank_spec = RankSpec(**spec)
    control_fd, output_fd, page_fd = fds
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the server ignores
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the caller blocks is inherited
    os.close(server_fd)
    _die_with_parent()
    control = socket.socket(fileno=control_fd)
    _redirect_output(output_fd)
    refuse_keyboard(rank_spec.rank)
    note_imports()
    page = last_seen.Writer(page_fd)
    stop_request.use_page(page.page)
    _note_before_dying(page)
    rank = _Rank(rank_spec, control, page)
    try:
        rank.join()
    except BaseException as error:
        send_message(control, _failed(error))
        return
    send_message(control, Done(serialize_function.dumps(None)))
    with contextlib.suppress(EOFError, BrokenPipeError):
        rank.serve()
    if dist.is_initialized() and rank_spec.device == "cuda":
        dist.destroy_process_group()


class _Rank:
    def __init__(self, spec: RankSpec, control: socket.socket, page: last_seen.Writer) -> None:
        self.spec, self.control, self.page = spec, control, page
        self.main = types.ModuleType("__main__")
        self.main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self.main
        self.known: frozenset[Name] = frozenset()
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self.rank_environ = {
            "RANK": str(spec.rank),
            "LOCAL_RANK": str(spec.rank),
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_WORLD_SIZE": str(spec.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(spec.store_port),
            # Ranks of one machine meet on its loopback, whatever its host name resolves to.
            "GLOO_SOCKET_IFNAME": loopback,
        }
        if spec.world_size <= spec.gpus:
            # Streams that share a hardware queue wait for each other: give every stream a queue. Where ranks
            # share a GPU it has not so many, and a context takes 3 s in place of 0.7.
            self.rank_environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
            # NCCL's sends of one group wait for one another, and every rank would warn of it at its first.
            # Of a pipeline's steps only those with new shapes do so; the others copy (`step_queues.py`).
            self.rank_environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "false"
            self.rank_environ["NCCL_GRAPH_REGISTER"] = "0"  # no rank waits for another one in a capture

    def join(self) -> None:
        """Enter the process group, and make this process look like a rank."""
        spec = self.spec
        self._adopt(spec.environ)
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # read on import, in the server
        multiprocessing.set_start_method("fork", force=True)  # DataLoader workers see what this rank defined
        torch.set_num_threads(spec.threads)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # or every fork would draw the same numbers
        shares = spec.backend == SHARED_GPU_BACKEND
        device = torch.device("cuda", spec.rank % spec.gpus) if spec.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            on_gpu = sum(other % spec.gpus == device.index for other in range(spec.world_size))
            limit_gpu_memory(device, on_gpu)
            # Said once, by the thread of autograd, which has no context before its first product.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current")
        current.rank, current.world_size, current.device = spec.rank, spec.world_size, device
        if shares:
            share_gpu()
        dist.init_process_group(
            spec.backend,
            store=TCPStore("127.0.0.1", spec.store_port, timeout=LONGER_THAN_ANY_LAUNCH),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=LONGER_THAN_ANY_LAUNCH,
            device_id=device if device.type == "cuda" and not shares else None,
        )

    def serve(self) -> None:
        """Answer calls until the caller says to leave."""
        rank_pid = os.getpid()
        while isinstance(call := receive_message(self.control), Call):
            reply: Done | Failed
            self.took_names = False
            try:
                value, where = self._run(call)
                if self.spec.device == "cuda":
                    torch.cuda.synchronize()  # an asynchronous error belongs to the call that made it
                reply = self._done(value, where)
            except BaseException as error:
                reply = replace(_failed(error), took_names=self.took_names)
            _flush()
            if os.getpid() != rank_pid:
                _end_child(reply)
            new, deleted = self._changed_names()
            reply = replace(reply, new_names=new, deleted_names=deleted, imported=take_imports())
            send_message(self.control, replace(reply, call=call.number))

    def _run(self, call: Call) -> tuple[object, types.CodeType | None]:
        """The value, and the code of the function that gave it."""
        current.raised = ""
        self.page.note()
        sys.path[:] = call.path
        self._adopt(call.environ)
        os.chdir(call.cwd)
        for name, text in call.sources.items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        for name in call.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        reload_modules(call.reloads)
        content = serialize_function.loads(call.body)
        for (module, name), value in content["names"].items():
            serialize_function.namespace_of(module)[name] = value
        self.known = self.known | frozenset(content["names"])
        for entry in call.entries:
            # An entry that names a module which the rank cannot import is of no use to it.
            with contextlib.suppress(ImportError, AttributeError):
                _, module, name, key, value = serialize_function.loads(entry)
                getattr(importlib.import_module(module), name)[key] = value
        self.took_names = True
        if "cell" in content:
            cell_figures.begin_cell(content["draws"] == self.spec.rank)
            try:
                cell, filename = content["cell"], content["filename"]
                value = run_cell(cell, filename, self.main.__dict__, content["wanted"])
            finally:
                cell_figures.keep_open_figures()
            finish_call()
            return value if content["wanted"] else None, None
        fn: Callable[..., object] = content["fn"]
        value = fn(*content["args"], **content["kwargs"])
        finish_call()
        return value, getattr(fn, "__code__", None)

    def _adopt(self, environ: dict[str, str]) -> None:
        wanted = {**self.rank_environ, **environ, **{k: self.rank_environ[k] for k in _NEVER_FROM_CALLER}}
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _done(self, value: object, code: types.CodeType | None) -> Done | Failed:
        try:
            by_value = {id(of): module for module, of in serialize_function.rank_namespaces().items()}
            result = serialize_function.dumps(value, by_value)
            return Done(result, figures=cell_figures.take_pictures())
        except Exception as error:
            summary = (
                f"TypeError: rank {self.spec.rank} returned a {type(value).__name__} that cannot be pickled "
                f"({type(error).__name__}: {error}); return numbers, tensors or plain containers of them"
            )
            made = (code.co_filename, code.co_firstlineno, code.co_name) if code else ("<cell>", 1, "<cell>")
            stack = traceback.StackSummary.from_list([traceback.FrameSummary(*made)]).format()
            text = "".join(stack) + summary + "\n"
            place = ("unpicklable", made)
            return Failed(text, summary, "TypeError", place, time.monotonic(), took_names=True)

    def _changed_names(self) -> tuple[frozenset[Name], frozenset[Name]]:
        """Globals that were assigned since this was last called, and those that were deleted."""
        namespaces = serialize_function.rank_namespaces().items()
        names = frozenset(
            (of, name) for of, values in namespaces for name in values.keys() - MODULE_ATTRIBUTES
        )
        known, self.known = self.known, names
        return names - known, known - names


_NEVER_FROM_CALLER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_cell(text: str, filename: str, namespace: dict[str, Any], wanted: bool = False) -> object:
    """Execute a cell and return what its last line evaluates to. Like a notebook, print it, unless it is
    `wanted`, because the caller puts it into a variable."""
    tree = ast.parse(text, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    run_code(compile(tree, filename, "exec", FLAGS, dont_inherit=True), namespace)
    if not isinstance(last, ast.Expr):
        return None
    expression = ast.Expression(last.value)
    value = run_code(compile(expression, filename, "eval", FLAGS, dont_inherit=True), namespace)
    is_shown = value is not None and not text.rstrip().endswith(";")
    if is_shown and not cell_figures.keep_value(value) and not wanted:
        print(repr(value))
    return value


# What a traceback begins with before the caller's first line.
_frames_around_a_cell = (__file__, run_code.__code__.co_filename, os.path.dirname(asyncio.__file__) + os.sep)


def _failed(error: BaseException) -> Failed:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_frames_around_a_cell):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    if (reading := out_of_memory.reading(error)) is not None:
        message, *lines = reading.splitlines(keepends=True)
    summary = type(error).__name__ + (f": {message.rstrip()}" if message else "")
    frames = tuple((f.f_code.co_filename, line) for f, line in traceback.walk_tb(trace))
    place = (type(error).__name__, frames)
    return Failed("".join(lines), summary, type(error).__name__, place, time.monotonic())


def _end_child(reply: Done | Failed) -> None:
    """A child that the function has forked came back from it, too. Only the rank answers: two answers on one
    socket would be taken for those of two calls."""
    if isinstance(reply, Failed):
        print(reply.traceback, file=sys.stderr, flush=True)
    os._exit(isinstance(reply, Failed))


# --- the process -----------------------------------------------------------------------------


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(fd: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(nothing)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    with contextlib.suppress(ValueError, AttributeError):  # C's own buffer would hold lines back
        name = "__stdoutp" if sys.platform == "darwin" else "stdout"
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _LINE_BUFFERED, 0)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)


def _note_before_dying(page: last_seen.Writer) -> None:
    """A rank that ends itself without an exception still notes where it was."""
    rank_pid, leave, kill = os.getpid(), os._exit, os.kill

    def noted_exit(status: int) -> None:
        if os.getpid() == rank_pid:
            _flush()
            page.note()
        leave(status)

    def noted_kill(pid: int, sig: int) -> None:
        if pid == rank_pid == os.getpid() and sig:
            _flush()
            page.note()
        kill(pid, sig)

    os._exit, os.kill = noted_exit, noted_kill  # type: ignore[assignment]
