"""Chaos of two and three runs in one folder: each save is refused, or complete, and none is mixed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_tally import Tally, tally
from preloaded_python import run_program


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with tally("runs in one folder", request) as made:
        yield made


def try_runs(counts: Tally, folder: Path, seed: int, trials: int) -> None:
    program = Path(__file__).with_name("chaos_two_runs.py")
    done = run_program(program, str(folder), str(seed), str(trials), folder=folder, timeout=60 + 10 * trials)
    lines = done.stdout.splitlines()
    assert len(lines) == trials, done.stderr[-2000:]
    for runs, said, newest in map(json.loads, lines):
        kind = f"{runs} runs"
        by_run = [save for of_run in said for save in of_run]
        for save in by_run:
            refused = save.startswith("ValueError") and str(folder) in save
            counts.add(kind, "unharmed" if save == "ok" else "named" if refused else "wrong", 0.0, save)
        if "ok" in by_run and not newest.isdigit():
            counts.add(kind, "lost", 0.0, f"{newest}; {said}")
    counts.check()


def test_runs_in_one_folder(counts: Tally, tmp_path: Path) -> None:
    try_runs(counts, tmp_path, 0, 1)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_runs_in_one_folder(counts: Tally, tmp_path: Path) -> None:
    try_runs(counts, tmp_path, 1, 60)
