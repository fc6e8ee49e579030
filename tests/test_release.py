"""One version, a changelog, the licences of what is needed; tests/test_ground.py builds the wheel."""

from __future__ import annotations

import importlib.util
import re
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
