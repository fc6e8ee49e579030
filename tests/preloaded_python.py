"""Programs in forks of a Python that has imported hpnb and transformers, which takes a new one seconds.

A program has an environment, a folder and output of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

_PRELOADED = ["hpnb.hybrid.booster", "hpnb.hybrid.checkpoint.checkpoint", "hpnb.hybrid.train_command.train"]
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


def _run(
    script: Path, arguments: tuple[str, ...], folder: Path, out: Path, errors: Path, environ: dict[str, str]
) -> None:
    for number, path in ((1, out), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path[0:0] = [str(script.parent), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(str(script), run_name="__main__")
