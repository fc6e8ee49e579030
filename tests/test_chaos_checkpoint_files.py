"""Chaos in a checkpoint's files: an error names the file, or the older checkpoint is taken with a warning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_checkpoint_files as program
import pytest
from chaos_tally import Tally, tally

import hpnb

ONE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with tally("files of a checkpoint", request) as made:
        yield made


def try_all(counts: Tally, ranks: int, *args: Any) -> int:
    with hpnb.Ranks(ranks, device="cpu", timeout=500) as pool:
        found = pool.run(program.try_all, *args)
    severity = ("wrong", "lost", "named", "unharmed")
    for on_ranks in zip(*found, strict=True):  # each fault on all ranks
        worst = min(on_ranks, key=lambda outcome: severity.index(outcome[1]))
        counts.add(*worst)
    counts.check()
    return len(found[0])


def test_a_sample_of_damaged_files(counts: Tally, tmp_path: Path) -> None:
    assert try_all(counts, 1, tmp_path, 0, ONE, 2, 6, 120) == 120


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (1, {"model": "vit"}), (2, {"zero_stage": 1}), (2, {"zero_stage": 3}), (2, {"pp": 2})],
    ids=str,
)
def test_every_damaged_file(counts: Tally, ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    assert try_all(counts, ranks, tmp_path, 1, options, 12, 12, None) > 500


def test_the_payload_works(tmp_path: Path) -> None:
    import pickle

    pickle.loads(pickle.dumps(program.Payload(tmp_path / "made")))
    assert (tmp_path / "made").exists()
