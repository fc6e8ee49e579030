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


def test_the_library_example_runs_and_is_right(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    script = tmp_path / "example.py"
    script.write_text(code)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stderr == ""
    assert ran.stdout.strip() == str([(3.0, 12.0)] * 4)  # 3 values of 4 bytes over 2 ranks: 2 (2-1)/2 x 12


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
