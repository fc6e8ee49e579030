"""Run the series from top to bottom, as a reader would, and say in one line a notebook whether it worked.

    python -m hpnb.lesson.pages.execute notebooks executed

Each notebook gets a fresh kernel and its own time limit; its executed copy is written even when a cell
failed, so that the traceback can be read where it happened. The exit status is 1 if any notebook failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import zmq
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from traitlets import default

from hpnb import files


class ThisPython(AsyncKernelManager):
    """Starts kernels with the running interpreter.

    Jupyter would look first for a kernel called python3 in places that belong to the user, and that one may
    be another environment. With nowhere to look it falls back to the interpreter at hand.
    """

    @default("kernel_spec_manager")
    def _only_this_python(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])

    @default("transport_encryption")
    def _encrypt(self) -> str:
        """Kernels listen on TCP, and warn when others on the machine could read along."""
        return "auto" if zmq.has("curve") else "disabled"


def execute(source: Path, target: Path, timeout: float = 600.0) -> str | None:
    """Run the notebook `source` in its own folder and write the executed copy to `target`; why it failed.

    `timeout` is in seconds for the whole notebook. Nothing is raised for a notebook that fails: a cell that
    raises, a kernel that dies, a file that is no notebook are such reasons, and None is success. What a
    failed notebook's kernel wrote past its cells (a crash, say) is left beside the copy in a .log file.
    """
    start = time.perf_counter()
    failure = None
    notebook = None
    log = target.with_suffix(".log")
    try:
        notebook = nbformat.read(source, as_version=4)
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            kernel_manager_class=ThisPython,
            timeout_func=_time_left(start + timeout),
            shutdown_kernel="immediate",  # its outputs are here, and ending by itself takes a second
            resources={"metadata": {"path": str(source.parent)}},
        )
        with log.open("wb") as file:
            client.execute(env=_environment(), stdout=file, stderr=file)
    except CellTimeoutError:
        failure = f"stopped after {timeout:.0f} s"
    except CellExecutionError as error:
        failure = _one_line(error.ename, error.evalue)
    except Exception as error:
        failure = _one_line(type(error).__name__, str(error))
    if notebook is not None:
        files.write_text(target, nbformat.writes(notebook) + "\n")  # all of it or nothing
    if log.exists() and (failure is None or log.stat().st_size == 0):
        log.unlink()
    return failure


def _time_left(deadline: float) -> Callable[[Any], int]:
    """nbclient's limit is per cell: give each cell what is left of the notebook's (at least a second)."""
    return lambda cell: max(1, math.ceil(deadline - time.perf_counter()))


def _environment() -> dict[str, str]:
    """The caller's, with this interpreter's folder first: `!torchrun` in a cell is then the matching one."""
    folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}


def _one_line(name: str, message: str) -> str:
    first = message.strip().splitlines()[0] if message.strip() else ""
    return f"{name}: {first}" if first else name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m hpnb.lesson.pages.execute", description="Run notebooks in order."
    )
    parser.add_argument("source", type=Path, help="a folder of notebooks, or one notebook")
    parser.add_argument("target", type=Path, help="the folder for executed copies")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a notebook (default: 600)")
    options = parser.parse_args(arguments)
    one = options.source.suffix == ".ipynb"
    if one and not options.source.exists():
        parser.error(f"there is no {options.source}")
    sources = [options.source] if one else sorted(options.source.glob("*.ipynb"))
    if not sources:
        print(f"no notebooks in {options.source}")
        return 0
    options.target.mkdir(parents=True, exist_ok=True)
    width = max(len(source.name) for source in sources)
    failures = {}
    for source in sources:
        print(f"{source.name:<{width}}  ", end="", flush=True)  # named while it runs
        start, target = time.perf_counter(), options.target / source.name
        failure = execute(source, target, options.timeout)
        seconds = time.perf_counter() - start
        print(f"{seconds:6.1f} s  {'ok' if failure is None else 'FAILED'}", flush=True)
        if failure is not None:
            failures[target] = failure
    for target, failure in failures.items():
        print(f"{target}: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
