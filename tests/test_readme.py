"""README says what is so: its code runs, its images come from committed runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpnb.lesson.images import IMAGES, figure

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_example(number: int, folder: Path) -> list[str]:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    script = folder / "example.py"
    script.write_text(code)
    command = [sys.executable, script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def test_the_library_example_runs_and_is_right(tmp_path: Path) -> None:
    # 3 values of 4 bytes over 2 ranks: 2 (2-1)/2 x 12
    assert run_example(0, tmp_path) == [str([(3.0, 12.0)] * 4)]


def test_the_pipeline_example_runs_and_is_right(tmp_path: Path) -> None:
    bubble, losses = run_example(1, tmp_path)
    assert bubble == f"{3 / 11:.3f}"
    values = {float(value) for value in losses.strip("[]").split(",")}
    assert len(losses.split(",")) == 4
    assert len(values) == 1, "every rank reads the same loss"
    assert 0.5 < values.pop() < 2.5  # of three classes, before anything is learned: about ln 3


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_figures_of_the_committed_notebooks(name: str) -> None:
    notebook, alt = IMAGES[name]
    committed = figure(ROOT / "notebooks" / f"{notebook}.ipynb", alt)
    assert (ROOT / "images" / name).read_bytes() == committed, "run python -m hpnb.lesson.images"


def test_links_and_images_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_every_notebook_is_in_the_table() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.name}" in README
