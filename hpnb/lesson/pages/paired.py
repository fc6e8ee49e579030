"""A notebook is two files: name.py (jupytext's py:percent), which is written and reviewed, and name.ipynb,
which is run and shown. The text is the source of truth; the notebook adds the outputs.

    differences(path)      # in words; [] when the two are in step
    pair(path)             # bring name.ipynb in step, keeping the outputs of cells that did not change
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat

from hpnb import files
from hpnb.lesson.pages.clean_outputs import name_cells

# Without jupytext's own version, which would change with every developer's installation.
HEADER = """\
# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
"""

# What the two files must agree on, cell by cell.
_PARTS: dict[str, Callable[[Any], object]] = {
    "type": lambda cell: cell.cell_type,
    "tags": lambda cell: sorted(cell.metadata.get("tags", [])),
    "source": lambda cell: cell.source,
}

try:
    _jupytext: Any = importlib.import_module("jupytext")
except ImportError:  # a machine that only runs notebooks
    _jupytext = None


def can_read_text() -> bool:
    return _jupytext is not None


def read_text(path: Path) -> Any:
    """The notebook in the text file beside `path`, without outputs."""
    nb = _jupytext.reads(path.with_suffix(".py").read_text(encoding="utf-8"), fmt="py:percent")
    for cell in nb.cells:
        cell.metadata.pop("lines_to_next_cell", None)  # layout of the text
    nb.metadata["jupytext"] = {"formats": "ipynb,py:percent"}
    name_cells(nb)
    return nb


def read(path: Path) -> Any:
    """The notebook beside `path`, with its outputs."""
    return nbformat.read(path.with_suffix(".ipynb"), as_version=4)


def write(nb: Any, path: Path) -> None:
    """Write the notebook beside `path`: all of it or nothing, so that an interrupt leaves no half."""
    files.write_text(path.with_suffix(".ipynb"), nbformat.writes(nb) + "\n")


def differences(path: Path) -> list[str]:
    """What keeps name.py and name.ipynb from being a pair, in words."""
    for partner in (path.with_suffix(".py"), path.with_suffix(".ipynb")):
        if not partner.exists():
            return [f"there is no {partner.name}"]
    problems = []
    if not path.with_suffix(".py").read_text(encoding="utf-8").startswith(HEADER):
        problems.append(f"{path.stem}.py does not open with the header that pairs it")
    cells = itertools.zip_longest(read_text(path).cells, read(path).cells)
    for number, (text, cell) in enumerate(cells, 1):
        if text is None or cell is None:
            where = f"{path.stem}.{'ipynb' if text is None else 'py'}"
            problems.append(f"cell {number} is only in {where}")
        elif differ := [name for name, part in _PARTS.items() if part(text) != part(cell)]:
            problems.append(f"cell {number} differs in {' and '.join(differ)}: {_opening(text)}")
    return problems


def pair(path: Path) -> Any:
    """Make or update name.ipynb from name.py, executing nothing, and return it.

    A code cell whose program did not change keeps its outputs, wherever it moved; the stamp stays as it was,
    and no longer fits if any code changed.
    """
    text = path.with_suffix(".py")
    if (settled := with_header(text.read_text(encoding="utf-8"))) != text.read_text(encoding="utf-8"):
        files.write_text(text, settled)
    nb = read_text(path)
    if path.with_suffix(".ipynb").exists():
        old = read(path)
        ran: dict[str, list[Any]] = defaultdict(list)
        for cell in old.cells:
            if cell.cell_type == "code":
                ran[program(cell.source)].append(cell)
        for cell in nb.cells:
            if cell.cell_type == "code" and ran[program(cell.source)]:
                before = ran[program(cell.source)].pop(0)
                cell.outputs, cell.execution_count = before.outputs, before.execution_count
        nb.metadata = type(nb.metadata)({**old.metadata, **nb.metadata})
    write(nb, path)
    return nb


def program(source: str) -> str:
    """What a code cell does: its syntax tree in words, equal in all versions of Python, without comments,
    blank lines and line breaks, which change no output; of a cell with magics, its lines."""
    try:
        return _in_words(ast.parse(source))
    except SyntaxError:
        return "\n".join(line.rstrip() for line in source.splitlines()).strip("\n")


def _in_words(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(map(_in_words, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    # An empty field may be one that only a later Python has.
    filled = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({','.join(f'{name}={_in_words(value)}' for name, value in filled)})"


def with_header(text: str) -> str:
    """`text` of a py:percent file with HEADER in place of the header that it has, if any."""
    lines = text.splitlines(keepends=True)
    if lines and lines[0].rstrip() == "# ---":
        end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "# ---"), -1)
        lines = lines[end + 1 :]
    return HEADER + "\n" + "".join(lines).lstrip("\n")


def _opening(cell: Any) -> str:
    return next((line.strip()[:60] for line in cell.source.splitlines() if line.strip()), "(empty)")
