"""Which cases of a sweep run without --slow: the same each time, and of every kind one where that is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SWEEPS = """
import pytest

@pytest.fixture(params=["p", "q"])
def pool(request): pass

@pytest.mark.sampled(1, cover=True)
@pytest.mark.parametrize(("kind", "size"), [(k, {"size": n}) for n, k in enumerate("abcdefg")])
@pytest.mark.parametrize("mode", ["u", "v", "w"])
def test_covering(pool, kind, size, mode): pass

@pytest.mark.sampled(9, cover=True)
@pytest.mark.parametrize("kind", "abcdefg")
@pytest.mark.parametrize("mode", "uv")
def test_covering_and_more(kind, mode): pass

@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", range(20))
def test_four(case): pass

@pytest.mark.sampled(2, of="both")
@pytest.mark.parametrize("case", range(4))
def test_one_sweep(case): pass

@pytest.mark.sampled(2, of="both")
@pytest.mark.parametrize("case", range(4))
def test_the_same_sweep(case): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 9))])
def test_some_slow(case): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with this conftest.py and sweeps of its own."""
    folder = tmp_path_factory.mktemp("sweeps")
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_sweeps.py").write_text(SWEEPS)
    return folder


def drawn(folder: Path, *options: str) -> dict[str, list[str]]:
    """{test: what stands in the brackets of its cases}."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins take seconds to import
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    cases: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("test_sweeps.py::"):
            test, _, case = line.rpartition("::")[2].rstrip("]").partition("[")
            cases.setdefault(test, []).append(case)
    return cases


def test_of_each_sweep_the_seed_draws_as_many_cases_as_it_says(folder: Path) -> None:
    cases, others = drawn(folder), drawn(folder, "--draw", "1")
    assert drawn(folder, "--draw", "0") == cases
    for draw in (cases, others):
        assert len(draw["test_four"]) == 4
        assert len(draw.get("test_one_sweep", [])) + len(draw.get("test_the_same_sweep", [])) == 2
        assert {"0", "1"} <= set(draw["test_some_slow"])  # the slow ones are skipped, and not drawn
        values = zip(*(case.split("-") for case in draw["test_covering"]), strict=True)
        assert {frozenset("pq"), frozenset("uvw"), frozenset("abcdefg")} <= {*map(frozenset, values)}
        assert len(draw["test_covering"]) == 7
        assert len(draw["test_covering_and_more"]) == 9
    assert cases["test_four"] != others["test_four"]


def test_slow_runs_every_case(folder: Path) -> None:
    counts = {test: len(cases) for test, cases in drawn(folder, "--slow").items()}
    assert counts == {"test_covering": 42, "test_covering_and_more": 14, "test_four": 20, "test_one_sweep": 4,
                      "test_the_same_sweep": 4, "test_some_slow": 9}  # fmt: skip
