"""Every name that a user meets has a docstring with an example, and the example runs."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import RankPools

import hpnb

# What is documented without an example, and why.
WITHOUT_EXAMPLE = {
    "hpnb.launch_from_torch": "it needs torchrun: docs/train.md, tests/test_launch_hybrid.py",
    "hpnb.load_ipython_extension": "IPython calls it, for %load_ext hpnb",
}
# The functions and classes of packages that DESIGN's "Names a user meets" and README name.
IN_PACKAGES = """
    data.beans data.cifar10 data.mrpc data_parallel.compare_replicas data_parallel.global_mean
    models.gpt2 models.roles models.vit pipeline_parallel.Costs pipeline_parallel.Schedule
    pipeline_parallel.schedules.make plot.compare plot.memory plot.mesh plot.timeline precision.LossScaler
    precision.Masters precision.step record.memory record.timeline record.traffic
    tensor_parallel.full_gradients tensor_parallel.full_state_dict tensor_parallel.parallelize
"""


def public_names() -> list[str]:
    top = [name for name in hpnb.__all__ if not inspect.ismodule(getattr(hpnb, name))]
    return [f"hpnb.{name}" for name in (*top, *IN_PACKAGES.split())]


def look_up(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


@pytest.mark.parametrize("name", public_names())
def test_a_public_name_has_a_docstring(name: str) -> None:
    assert len(inspect.getdoc(look_up(name)) or "") > 20


@pytest.mark.parametrize("name", [name for name in public_names() if name not in WITHOUT_EXAMPLE])
def test_the_example_in_its_docstring_runs(
    name: str, pools: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(fn: Any, *args: Any, ranks: int, device: str) -> list[Any]:
        assert device == "cpu", "an example looks the same on every machine"
        return pools[ranks].run(fn, *args)

    text = inspect.getdoc(look_up(name)) or ""
    monkeypatch.setattr(hpnb, "launch", launch)
    names = {"hpnb": hpnb, "torch": torch, "schedules": hpnb.pipeline_parallel.schedules}
    example = doctest.DocTestParser().get_doctest(text, {**names, "__name__": "__main__"}, name, None, None)
    assert example.examples, f"{name} has no example in its docstring"
    report: list[str] = []
    with contextlib.chdir(tmp_path):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
        result = runner.run(example, out=report.append)
    assert result.failed == 0, "".join(report)


def test_what_has_no_example_still_has_none() -> None:
    for name in WITHOUT_EXAMPLE:
        assert ">>>" not in (look_up(name).__doc__ or ""), f"{name} has an example now"
