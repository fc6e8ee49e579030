"""Chaos during saves: whenever ranks are killed, the newest complete checkpoint loads, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chaos_saves as program
import pytest
from chaos_tally import Tally, tally


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with tally("kills during a save", request) as made:
        yield made


def kill_in(counts: Tally, setting: program.Setting, folder: Path, lives: int, seed: int) -> None:
    for outcome, seconds, text in program.kill_in(setting, folder, lives, seed):
        counts.add(setting.name, outcome, seconds, text)
    counts.check()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", program.SETTINGS, ids=lambda setting: setting.name)
def test_a_few_kills_during_saves(counts: Tally, setting: program.Setting, tmp_path: Path) -> None:
    kill_in(counts, setting, tmp_path, 2, 0)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("setting", program.SETTINGS, ids=lambda setting: setting.name)
def test_two_hundred_kills_during_saves(counts: Tally, setting: program.Setting, tmp_path: Path) -> None:
    kill_in(counts, setting, tmp_path, 25, 1)
