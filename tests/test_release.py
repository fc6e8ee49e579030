"""What a release is made of: one version, a changelog, a small wheel, the licences of what it needs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import hpnb

ROOT = Path(__file__).parents[1]


def make_licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_licences", ROOT / "docs" / "make_licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == hpnb.__version__
    assert make_licences().PROJECT["version"] == hpnb.__version__


def test_each_dependency_is_listed_with_the_licence_that_it_declares() -> None:
    licences = make_licences()
    page = licences.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)[1:]
    assert {package: group for package, _, group in rows} == licences.direct_dependencies()
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    for package, licence, _ in rows:
        assert len(licence) > 2
        if f"{package}=={version(package)}".lower() in constraints:  # others may declare it in other words
            assert licence == licences.licence_of(package), "run python docs/make_licences.py"


def test_the_wheel_is_small_and_typed_and_has_no_notebooks(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "hpnb", source / "hpnb", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob(f"hpnb-{hpnb.__version__}-*.whl")
    assert wheel.stat().st_size < 2e6
    names = zipfile.ZipFile(wheel).namelist()
    assert "hpnb/py.typed" in names
    assert not [name for name in names if name.endswith((".ipynb", ".png", ".gif"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
