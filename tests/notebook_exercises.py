"""Proof that a notebook's exercises tell right from wrong: each is answered three ways in a real kernel.

    stub       as the reader finds it        must be "not yet", and not raise
    solution   from the fold under it        must be "passed"
    wrong      a plausible mistake           must be "failed"

What a notebook has for this: code cells tagged `setup` (all that its exercises need: imports, helpers); and
for exercise N a code cell tagged `stub-N`, which defines what the reader will write, and one tagged `check-N`
that ends in an expression whose value has a .status, as `lesson.check(exercises.halves, all_reduce)` does.
The wrong answer is the file tests/wrong_answers/<notebook>_<N>.py: what a reader would put in the stub cell,
with a comment on what is wrong (and `# ruff: noqa: F821` first, where it uses names from setup).

One kernel a notebook: setup once, and before each answer the namespace is put back to what setup left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from notebook_parts import code_cells, exercises, tags

from hpnb.lesson.pages.execute import execute

EXPECTED = {"stub": "not yet", "solution": "passed", "wrong": "failed"}

_SNAPSHOT = "get_ipython().after_setup = dict(get_ipython().user_ns)"
_RESET = """\
for _name in set(get_ipython().user_ns) - set(get_ipython().after_setup):
    del get_ipython().user_ns[_name]
get_ipython().user_ns.update(get_ipython().after_setup)"""
_FORGET = 'get_ipython().user_ns["_oh"].clear()'  # values of cells; the check's is then the only one
_STATUS = """\
print(*[getattr(_value, "status", "no verdict") for _value in get_ipython().user_ns["_oh"].values()])"""


def answers(nb: Any, name: str, wrong_answers: Path) -> dict[tuple[int, str], str | None]:
    """{(exercise, "stub" | "solution" | "wrong"): code, None where there is none}."""
    found: dict[tuple[int, str], str | None] = {}
    for exercise in exercises(nb):
        n, stub = exercise.number, exercise.tagged("stub")
        file = wrong_answers / f"{name}_{n}.py"
        found[n, "stub"] = stub[0].source if stub else None
        found[n, "solution"] = exercise.solution
        found[n, "wrong"] = file.read_text(encoding="utf-8") if file.exists() else None
    return found


def unproven(nb: Any, name: str, wrong_answers: Path, folder: Path, timeout: float = 500.0) -> list[str]:
    """What is wrong with the exercises of the notebook called `name`, in words; `folder` is for copies."""
    checks = {exercise.number: exercise.tagged("check") for exercise in exercises(nb)}
    tried = answers(nb, name, wrong_answers)
    missing = [f"exercise {n} has no {kind}" for (n, kind), code in tried.items() if code is None]
    missing += [f"exercise {n} has no cell tagged check-{n}" for n, cells in checks.items() if not cells]
    known = {f"{name}_{n}.py" for n in checks}
    missing += [
        f"{file.name} answers no exercise"
        for file in sorted(wrong_answers.glob(f"{name}_*.py"))
        if file.name not in known
    ]
    if missing or not checks:
        return missing
    book = new_notebook(cells=[cell for cell in code_cells(nb) if "setup" in tags(cell)])
    book.cells.append(new_code_cell(_SNAPSHOT))
    for (n, _), code in tried.items():
        for source in (_RESET, code, _FORGET, checks[n][0].source, _STATUS):
            book.cells.append(new_code_cell(source, metadata={"tags": ["raises-exception"]}))
    start = len(book.cells) - 5 * len(tried)
    nbformat.write(book, folder / "exercises.ipynb")
    failure = execute(folder / "exercises.ipynb", folder / "executed.ipynb", timeout)
    if failure is not None:
        return [f"the exercises did not run: {failure}"]
    ran = nbformat.read(folder / "executed.ipynb", as_version=4).cells[start:]
    found = []
    for i, (n, kind) in enumerate(tried):
        _, answer, _, check, status = ran[5 * i : 5 * i + 5]
        verdict = "".join(out.get("text", "") for out in status.outputs).strip()
        said = _raised(answer) or _raised(check) or verdict or "no verdict"
        if said != EXPECTED[kind]:
            found.append(f"exercise {n}: the {kind} should be {EXPECTED[kind]!r}; it is {said!r}")
    return found


def _raised(cell: Any) -> str:
    """What a cell raised, in a line; "" if nothing."""
    errors = [f"raised {out.ename}: {out.evalue}" for out in cell.outputs if out.output_type == "error"]
    return errors[0].splitlines()[0] if errors else ""
