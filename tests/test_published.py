"""What others published beside its prediction: errors of rows that were held out, and what they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpnb.hybrid.plan_command.published import GROUPS, PublishedProgram, published_table, summarize
from hpnb.theory.published_runs import MEGATRON_CORE

PAGE = Path(__file__).parents[1] / "hpnb" / "bench" / "results" / "PUBLISHED.md"
BY_NAME = {group.name: group for group in GROUPS}


def errors(group: PublishedProgram) -> tuple[float, float]:
    """(mean, worst) of the rows held out."""
    held_out = [row.error for row in group.compare() if not row.fitted]
    return sum(held_out) / len(held_out), max(held_out)


def test_the_committed_table_is_what_is_predicted_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == published_table(), (
        "python -m hpnb plan --published > PUBLISHED.md"
    )


@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [
        ("Megatron-LM 2021", 0.04, 0.08),
        ("Megatron-LM 2022", 0.04, 0.08),
        ("Megatron-Core", 0.08, 0.15),
        ("Megatron-Core, one batch", 0.08, 0.15),
        ("Llama 3", 0.08, 0.15),
        ("llm-foundry", 0.10, 0.20),
    ],
)
def test_rows_held_out_are_predicted_as_well_as_the_table_says(name: str, mean: float, worst: float) -> None:
    found = errors(BY_NAME[name])
    assert found[0] < mean, summarize(BY_NAME[name].compare())
    assert found[1] < worst, summarize(BY_NAME[name].compare())


@pytest.mark.parametrize("group", [one for one in GROUPS if one.fitted], ids=lambda one: one.name)
def test_one_row_is_fitted_by_the_share_alone(group: PublishedProgram) -> None:
    (fitted,) = [row for row in group.compare() if row.fitted]
    assert fitted.error < 0.005
    (other,) = [row for row in replace(group, share=1.1 * group.share).compare() if row.fitted]
    assert other.error > 0.03


@pytest.mark.parametrize(
    ("name", "change", "factor"),
    [
        ("Megatron-Core", {"tp_overlap": False}, 2.0),
        ("Llama 3", {"tp_overlap": False}, 1.5),
        ("Megatron-Core", {"action_seconds": 1e-3}, 1.2),
        ("Megatron-LM 2022", {"fused": True}, 1.5),
    ],
)
def test_each_part_of_a_program_is_needed(name: str, change: dict[str, Any], factor: float) -> None:
    group = BY_NAME[name]
    without = replace(group, software=replace(group.software, **change))
    if "fused" in change:  # which cannot recompute attention alone
        without = replace(without, rows=tuple(row for row in group.rows if row.name.endswith("full")))
    assert errors(without)[0] > factor * errors(group)[0]


def test_korthikanti_agrees_with_the_utilization_of_its_abstract() -> None:
    """arXiv 2205.05198: 530B on 2,240 A100s reaches 54.2 %."""
    row = next(row for row in BY_NAME["Megatron-LM 2022"].rows if row.name.startswith("530B on 2,240"))
    mfu = row.model.training_flops(row.batch, row.sequence) / row.seconds / 2240 / 312e12
    assert mfu == pytest.approx(0.542, abs=0.0006)


def test_the_picture_and_the_table_agree_where_both_have_a_run() -> None:
    table = next(row for row in BY_NAME["Megatron-Core"].rows if row.name == "177B")
    picture = next(row for row in BY_NAME["Megatron-Core, one batch"].rows if row.name == "177B on 2,304")
    assert picture.seconds == pytest.approx(table.seconds, rel=0.01)
    assert len(BY_NAME["Megatron-Core"].rows) == len(MEGATRON_CORE) == 9
