"""`make docs` builds the API reference without a warning, and every public name is in it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from scripts_here import run_script_here

import hpnb

ROOT = Path(__file__).parents[1]


def test_the_reference_is_built_without_warnings_and_has_every_public_name(tmp_path: Path) -> None:
    script = ROOT / "docs" / "make_reference.py"  # a warning raises
    ((printed, errors),) = hpnb.launch(run_script_here, script, (str(tmp_path),), ranks=1, device="cpu")
    assert "Warn" not in printed + errors
    packages = [name for name in hpnb.__all__ if inspect.ismodule(getattr(hpnb, name)) and name != "lesson"]
    top = (tmp_path / "hpnb.html").read_text(encoding="utf-8")
    for name in set(hpnb.__all__) - {*packages, "lesson"}:
        assert f'id="{name}"' in top, name
    for package in packages:
        page = (tmp_path / "hpnb" / f"{package}.html").read_text(encoding="utf-8")
        module = importlib.import_module(f"hpnb.{package}")
        public = [n for n in getattr(module, "__all__", []) if not inspect.ismodule(getattr(module, n))]
        assert [name for name in public if f'id="{name}"' not in page] == []
    # Methods of bases that have no entry of their own.
    assert 'id="Booster.save_model"' in top
    schedules = (tmp_path / "hpnb" / "pipeline_parallel.html").read_text(encoding="utf-8")
    for method in ("__init__", "check", "stages_of"):
        assert f'id="Schedule.{method}"' in schedules, method
