"""A committed notebook says where its outputs come from, and anyone can see when its code has moved on.

    python -m hpnb.lesson.pages.committed notebooks/00_ranks.py    # run, clean, stamp, write
    python -m hpnb.lesson.pages.committed --all --pair               # only pair, and fill numbers
    python -m hpnb.lesson.pages.committed --all --check              # exit status 1 if any is behind

The stamp is the notebook's metadata["hpnb"]: a digest of the code cells' programs, hardware, device,
versions, date. Prose may be mended without running anything again; a changed code cell makes the outputs
stale. What the reader at this machine has guessed and solved stays out: a command begins with an empty
HPNB_HOME, which its notebooks share.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hpnb
from hpnb import files
from hpnb.lesson.banner import count_text
from hpnb.lesson.pages import numbers_in_prose, paired
from hpnb.lesson.pages.clean_outputs import clean, name_cells
from hpnb.lesson.values import WRITING
from hpnb.ranks import usable_cores

__all__ = ["clean", "digest", "hardware_here", "is_stale", "stamp"]

_GPU_NAMES = "import torch\nfor i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))"


def digest(nb: Any) -> str:
    """sha256 over the code cells' programs in order.

    Comments, blank lines, and where a line breaks do not matter, nor does the rest of `nb`: they change no
    output.
    """
    programs = (paired.program(cell.source) for cell in nb.cells if cell.cell_type == "code")
    return hashlib.sha256("\0".join(programs).encode()).hexdigest()


def stamp(nb: Any, hardware: str) -> None:
    """Note in `nb` that its outputs come from the code that it has now, on `hardware`, today.

    Args:
        hardware: as `hardware_here` words it: "2 CPU cores", "4 x NVIDIA H200".
    """
    python = platform.python_version()
    nb.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nb.metadata["language_info"] = {"name": "python", "version": python}
    nb.metadata["hpnb"] = {
        "digest": digest(nb),
        "hardware": hardware,
        "device": "cpu" if "CPU" in hardware else "cuda",
        "versions": {
            "python": python,
            "torch": str(torch.__version__),
            "transformers": importlib.metadata.version("transformers"),
            "hpnb": hpnb.__version__,
        },
        "date": datetime.date.today().isoformat(),
    }


def is_stale(nb: Any) -> str | None:
    """Why the outputs of `nb` are not those of its code, in a sentence; None if they are."""
    mark = nb.metadata.get("hpnb")
    if not mark:
        return "its outputs do not say where they ran"
    if mark.get("digest") != digest(nb):
        return f"its code has changed since it ran on {mark.get('hardware')}, {mark.get('date')}"
    counts: list[int] = []
    for number, cell in enumerate((cell for cell in nb.cells if cell.cell_type == "code"), 1):
        if not cell.source.strip() or "skip-execution" in cell.metadata.get("tags", []):
            continue  # which a run passes over, too
        if cell.execution_count is None:
            return f"its code cell {number} has not run"
        counts.append(cell.execution_count)
    if counts != sorted(set(counts)):
        return "its cells have not run in one go from top to bottom"
    if counts and not any(cell.get("outputs") for cell in nb.cells):
        return "its outputs have been taken out"
    return None


def hardware_here() -> str:
    """What ranks run on here by default: the GPUs (ranks can share one), otherwise the CPU's cores."""
    if torch.cuda.device_count():  # asks the driver only
        # In a child: a context of this process would take GPU memory from the notebook that runs next.
        done = subprocess.run([sys.executable, "-c", _GPU_NAMES], capture_output=True, text=True, check=True)
        return " + ".join(f"{n} x {name}" for name, n in Counter(done.stdout.splitlines()).items())
    return count_text(usable_cores(), "CPU core")


# --- the command -----------------------------------------------------------------------------


def run(path: Path, timeout: float = 600.0) -> str | None:
    """Run the notebook at `path` (either file of the pair) and write its outputs; None, or what is wrong.

    If a cell fails, or one key is recorded with two values, the notebook keeps the outputs that it had, and
    the new copy is left in executed/. If a claim does not hold, the outputs are written all the same.
    """
    from hpnb.lesson.pages.execute import execute  # needs what --check and --pair do not

    if path.with_suffix(".py").exists() and paired.can_read_text():
        paired.pair(path)
    copy = Path("executed") / f"{path.stem}.ipynb"
    copy.parent.mkdir(exist_ok=True)
    with _writing(path):
        failure = execute(path.with_suffix(".ipynb"), copy, timeout)
    if failure is not None:
        return f"FAILED: {failure} (see {copy})"
    nb = paired.read(copy)
    try:
        values, claims = numbers_in_prose.take_out(nb)
    except ValueError as error:
        return f"FAILED: {error} (see {copy})"
    clean(nb)
    stamp(nb, hardware_here())
    if values or claims:
        nb.metadata["hpnb"] |= {"values": values, "claims": claims}
    paired.write(nb, path)
    copy.unlink()
    fill(path)
    broken = numbers_in_prose.broken_claims(claims)
    return f"written, but {'; '.join(broken)}" if broken else None


def fill(path: Path) -> None:
    """Write the recorded numbers into the prose of both files of the pair."""
    values = numbers_in_prose.values_beside(path)
    nb, text = paired.read(path), path.with_suffix(".py")
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = numbers_in_prose.fill(cell.source, values)
    name_cells(nb)
    paired.write(nb, path)
    if text.exists():
        before = text.read_text(encoding="utf-8")
        if (filled := numbers_in_prose.fill(before, values)) != before:
            files.write_text(text, filled)


@contextmanager
def empty_home() -> Iterator[None]:
    """HPNB_HOME is an empty folder meanwhile."""
    before = os.environ.get("HPNB_HOME")
    with tempfile.TemporaryDirectory(prefix="hpnb-home-") as folder:
        os.environ["HPNB_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["HPNB_HOME"]
            if before is not None:
                os.environ["HPNB_HOME"] = before


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Kernels that start meanwhile know that they write a page, and which one: "04"."""
    os.environ[WRITING] = path.name[:2]
    try:
        yield
    finally:
        del os.environ[WRITING]


def check(path: Path) -> str | None:
    """What is wrong with the committed notebook at `path`; None if nothing is."""
    if not path.with_suffix(".ipynb").exists():
        return f"there is no {path.name}.ipynb"
    problems = paired.differences(path) if paired.can_read_text() else []
    nb = paired.read(path)
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    problems += numbers_in_prose.differences(prose, numbers_in_prose.values_beside(path))
    problems += numbers_in_prose.broken_claims(nb.metadata.get("hpnb", {}).get("claims", {}))
    if stale := is_stale(nb):
        problems.append(stale)
    return "; ".join(problems) or None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m hpnb.lesson.pages.committed",
        description="Run notebooks and write them as they are committed.",
    )
    parser.add_argument("notebook", type=Path, nargs="*", help="either file of a pair")
    parser.add_argument("--all", action="store_true", help="every notebook in notebooks/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; say what is behind")
    what.add_argument(
        "--pair", action="store_true", help="run nothing; take changes of the .py over, and fill numbers"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a notebook (default: 600)")
    options = parser.parse_args(arguments)
    named = [*options.notebook]
    if options.all:
        named += [file for end in ("py", "ipynb") for file in Path("notebooks").glob(f"*.{end}")]
    paths = sorted({file.with_suffix("") for file in named})
    if not paths:
        parser.error("name a notebook, or --all")
    for path in paths:
        if not any(path.with_suffix(end).exists() for end in (".py", ".ipynb")):
            parser.error(f"there is no {path}.py and no {path}.ipynb")
        if options.pair and not path.with_suffix(".py").exists():
            parser.error(f"there is no {path}.py")
    if not paired.can_read_text():
        if options.pair:
            parser.error("pairing needs jupytext")
        print("jupytext is not installed: taking the code from .ipynb, not from .py", file=sys.stderr)
    with empty_home():
        wrong = [_process(path, options, max(len(path.name) for path in paths)) for path in paths]
    if len(paths) > 1 and not options.check:  # a page's prose may have numbers of pages that ran after it
        for path in (path for path in paths if path.with_suffix(".ipynb").exists()):
            fill(path)
    return 1 if any(wrong) and not options.pair else 0  # what --pair says is news, not a failure


def _process(path: Path, options: argparse.Namespace, width: int) -> str | None:
    """Do what the options ask with one notebook, on one line."""
    print(f"{path.name:<{width}}  ", end="", flush=True)  # named while it runs
    start = time.perf_counter()
    if options.check:
        wrong = check(path)
    elif options.pair:
        wrong = is_stale(paired.pair(path))
        fill(path)
    else:
        wrong = run(path, options.timeout)
        print(f"{time.perf_counter() - start:6.1f} s  ", end="")
    print(_summary(path) if wrong is None else wrong, flush=True)
    return wrong


def _summary(path: Path) -> str:
    size = path.with_suffix(".ipynb").stat().st_size / 1000
    return f"{size:7.0f} kB  {paired.read(path).metadata['hpnb']['hardware']}"


if __name__ == "__main__":
    sys.exit(main())
