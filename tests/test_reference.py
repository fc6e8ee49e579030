"""`make docs` builds the API reference without a warning, and every public name is in it."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import hpnb

ROOT = Path(__file__).parents[1]


def test_the_reference_is_built_without_warnings_and_has_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_reference.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warn" not in done.stdout + done.stderr
    packages = [name for name in hpnb.__all__ if inspect.ismodule(getattr(hpnb, name)) and name != "lesson"]
    top = (tmp_path / "hpnb.html").read_text(encoding="utf-8")
    for name in set(hpnb.__all__) - {*packages, "lesson"}:
        assert f'id="{name}"' in top, name
    for package in packages:
        page = (tmp_path / "hpnb" / f"{package}.html").read_text(encoding="utf-8")
        module = importlib.import_module(f"hpnb.{package}")
        public = [n for n in getattr(module, "__all__", []) if not inspect.ismodule(getattr(module, n))]
        assert [name for name in public if f'id="{name}"' not in page] == []
