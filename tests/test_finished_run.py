"""`hpnb train` once more in the folder of a run that has finished: its figures stay as they are.

pytest tests/test_finished_run.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_pools import RankPools

import hpnb
from hpnb.hybrid.train_command.run_file import parse
from hpnb.hybrid.train_command.train import RunResult, train

VIT = {"hidden": 16, "layers": 2, "heads": 2, "mlp": 32, "patch": 8, "image": 16}
LENGTHS: list[dict[str, Any]] = [{"epochs": 2}, {"steps": 4}]  # the second ends inside of its second epoch


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    pools = RankPools(timeout=120)
    yield pools[2]
    pools.close()


def run(two: hpnb.Ranks, folder: Path, **training: Any) -> RunResult:
    tables = {
        "model": {"family": "vit", "size": dict(VIT)},
        "data": {"name": "beans", "kind": "generated", "batch_size": 4, "rows": 24},
        "layout": {},
        "training": {"learning_rate": 3e-3, "precision": "fp64", **training},
        "checkpoint": {"dir": str(folder)},
    }
    results: list[RunResult] = two.run(train, parse(tables))
    return results[0]


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_its_history_stays_and_it_says_that_it_is_finished(
    two: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str], length: dict[str, Any]
) -> None:
    first = run(two, tmp_path, **length)
    history = (tmp_path / "history.json").read_text()
    capfd.readouterr()
    again = run(two, tmp_path, **length)
    assert f"the run in {tmp_path} is finished, and nothing is left to train" in capfd.readouterr().out
    assert (tmp_path / "history.json").read_text() == history
    assert (again.history, again.final, again.step) == (first.history, first.final, first.step)


def test_an_epoch_whose_row_was_never_written_gets_it(two: hpnb.Ranks, tmp_path: Path) -> None:
    """It was killed after its last step, in the evaluation."""
    first = run(two, tmp_path, steps=4)
    (tmp_path / "history.json").unlink()
    again = run(two, tmp_path, steps=4)
    assert [row["step"] for row in again.history] == [3, 4]
    assert again.history[-1]["eval_loss"] == first.history[-1]["eval_loss"]


def test_more_steps_go_on_and_write_the_row_of_the_cut_epoch_once_more(
    two: hpnb.Ranks, tmp_path: Path
) -> None:
    run(two, tmp_path, steps=4, schedule="constant")
    run(two, tmp_path, steps=4, schedule="constant")
    more = run(two, tmp_path, steps=6, schedule="constant")
    assert [(row["epoch"], row["step"]) for row in more.history] == [(1, 3), (2, 6)]


def test_a_finished_run_without_checkpoints_is_not_written_over(two: hpnb.Ranks, tmp_path: Path) -> None:
    run(two, tmp_path, epochs=2)
    history = (tmp_path / "history.json").read_text()
    for checkpoint in tmp_path.glob("step-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(hpnb.RankError, match=r"is finished, after 6 steps, and its checkpoints are gone"):
        run(two, tmp_path, epochs=2)
    assert (tmp_path / "history.json").read_text() == history
