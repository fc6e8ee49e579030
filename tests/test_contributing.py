"""CONTRIBUTING names files, functions and numbers of this tree, and they are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from breakages import BREAKAGES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\d+\. `([\w/.]+\.py)`: (.+)$", TEXT, re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """Functions, methods, classes and module variables of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assigned = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    assigned += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
    return defined | {t.id for t in assigned if isinstance(t, ast.Name)}


@pytest.mark.parametrize(("file", "sentence"), STEPS, ids=[f"{i}" for i in range(len(STEPS))])
def test_a_step_of_a_walk_names_what_its_file_defines(file: str, sentence: str) -> None:
    """Every file defines at least one of the names; a step about a hand-over may name the other side too."""
    named = re.findall(r"`([A-Za-z_]\w*)`", sentence)
    assert named, sentence
    assert set(named) & names_in(ROOT / file), f"{file} defines none of {named}"
    assert named[0] in names_in(ROOT / file), f"{file} does not define {named[0]}"
    assert sentence.endswith(".")


def test_there_are_three_walks() -> None:
    assert len(re.findall(r"^1\. `hpnb/", TEXT, re.MULTILINE)) == 3
    assert len(STEPS) == len(re.findall(r"^\d+\. ", TEXT, re.MULTILINE)) == 25


def test_files_and_folders_that_are_named_exist() -> None:
    for name in re.findall(r"`((?:hpnb|tests|docs)/[\w/.*]+)`", TEXT):
        assert list(ROOT.glob(name.rstrip("/"))) or "NN_name" in name, name
    for name in re.findall(r"`(test_\w+\.py)`", TEXT):
        assert (ROOT / "tests" / name).exists(), name


def test_tests_that_are_named_exist() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", TEXT):
        assert f"def {name}(" in sources, name


def test_names_of_the_recipes_exist() -> None:
    schedules = names_in(ROOT / "hpnb/pipeline_parallel/schedules.py")
    assert {"_number_words", "_MAKERS", "_ONE_CHUNK", "_V_SHAPED", "gpipe"} <= schedules
    modes = names_in(ROOT / "hpnb/tensor_parallel/mode.py") | names_in(
        ROOT / "hpnb/tensor_parallel/parallelize.py"
    )
    for name in (
        "TensorParallelMode",
        "weight_cuts",
        "replace_layer",
        "connect",
        "cross_entropy",
        "make_mode",
    ):
        assert f"{name}`" in TEXT
        assert name in modes
    assert f"for {len(BREAKAGES)} mechanisms" in TEXT
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in re.findall(r"^make ([\w-]+)", TEXT, re.MULTILINE):
        assert target in targets
