"""`import hpnb`, `hpnb.<TAB>` and `help(hpnb)`: cheap, complete, and no more than the public names."""

from __future__ import annotations

import importlib
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hpnb

PUBLIC = [name for name in dir(hpnb) if not name.startswith("_")]


def test_tab_offers_exactly_the_public_names() -> None:
    assert sorted(hpnb.__all__) == PUBLIC == sorted(set(PUBLIC))
    for name in hpnb.__all__:
        assert getattr(hpnb, name) is getattr(hpnb, name), name
    assert {"DataParallel", "Booster", "tensor_parallel", "data", "launch"} <= set(PUBLIC)
    assert not {"importlib", "annotations", "TYPE_CHECKING"} & set(vars(hpnb))
    with pytest.raises(AttributeError, match="'importlib'"):
        _ = hpnb.importlib  # type: ignore[attr-defined]


def test_hooks_metrics_schedules_and_data_helpers_are_public() -> None:
    hooks = [name for name in PUBLIC if name.endswith("Hook")]
    assert {"AccuracyHook", "CheckpointHook", "F1Hook", "Hook", "MemoryHook", "TimelineHook"} <= set(hooks)
    assert all(issubclass(getattr(hpnb, name), hpnb.Hook) for name in hooks)
    assert hpnb.pipeline_parallel.schedules.make("1f1b", stages=2, microbatches=2)
    assert hpnb.data.Loader
    assert hpnb.data_parallel.global_mean


def test_help_is_an_index_of_every_public_name() -> None:
    text = pydoc.plain(pydoc.render_doc(hpnb))
    assert 40 <= len((hpnb.__doc__ or "").splitlines()) <= 80
    assert len(text.splitlines()) <= 110  # with the list of files, but not with every method of every class
    words = set(re.findall(r"\w+", hpnb.__doc__ or ""))
    assert set(PUBLIC) - words - {"load_ipython_extension"} == set()
    assert all(len(line) <= 120 for line in text.splitlines())


def test_importing_hpnb_costs_no_torch() -> None:
    """Neither the command line's help nor a completer in a terminal waits for it."""
    look = "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    programs = [
        f"import sys, hpnb; dir(hpnb); {look}",
        f"import sys; from hpnb.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: {look}",
    ]
    for program in programs:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_star_import_binds_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from hpnb import *", names)
    assert set(hpnb.__all__) <= set(names)


def test_hpnb_is_also_a_command() -> None:
    from hpnb.__main__ import main

    text = (Path(hpnb.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    module, _, function = tomllib.loads(text)["project"]["scripts"]["hpnb"].partition(":")
    assert getattr(importlib.import_module(module), function) is main
