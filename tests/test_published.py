"""What others published beside its prediction: errors of rows that were held out, and what they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hpnb.hybrid.plan_command.published import GROUPS, PublishedProgram, published_table, summarize
from hpnb.hybrid.plan_command.published_steps import deepseek_v2_row
from hpnb.theory.plan_step import stage_seconds
from hpnb.theory.plan_task import PlanTask
from hpnb.theory.published_runs import MEGATRON_CORE

GUIDE = Path(__file__).parents[1] / "docs" / "train.md"
PAGE = Path(__file__).parents[1] / "hpnb" / "bench" / "results" / "PUBLISHED.md"
BY_NAME = {group.name: group for group in GROUPS}


def _guide() -> str:
    return " ".join(GUIDE.read_text(encoding="utf-8").split())


def errors(group: PublishedProgram) -> tuple[float, float]:
    """(mean, worst) of the rows held out."""
    held_out = [abs(row.ratio - 1) for row in group.compare() if not row.fitted]
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
        ("llm-foundry", 0.08, 0.20),
        ("llm-foundry, other lengths", 0.08, 0.20),
        ("NeMo AutoModel", 0.08, 0.08),
        ("DeepSeek-V2", 0.15, 0.15),
        ("DeepSeek-V3", 0.15, 0.15),
    ],
)
def test_rows_held_out_are_predicted_as_well_as_the_table_says(name: str, mean: float, worst: float) -> None:
    found = errors(BY_NAME[name])
    assert found[0] < mean, summarize(BY_NAME[name].compare())
    assert found[1] < worst, summarize(BY_NAME[name].compare())


@pytest.mark.parametrize("group", [one for one in GROUPS if one.fitted], ids=lambda one: one.name)
def test_one_row_is_fitted_by_one_constant(group: PublishedProgram) -> None:
    (fitted,) = [row for row in group.compare() if row.fitted]
    assert abs(fitted.ratio - 1) < 0.005
    if group.constant == "share":
        other = replace(group, share=1.1 * group.share)
    else:
        software = group.software
        other = replace(group, software=replace(software, attention_share=1.1 * software.attention_share))
    (worse,) = [row for row in other.compare() if row.fitted]
    assert abs(worse.ratio - 1) > 0.03


def test_groups_without_a_fitted_row_have_the_constants_of_another() -> None:
    for group in GROUPS:
        assert bool(group.share_of) == (group.fitted is None or group.constant != "share")
        if group.share_of:
            assert group.share == BY_NAME[group.share_of].share
    lengths = BY_NAME["llm-foundry, other lengths"]
    assert lengths.software == BY_NAME["llm-foundry"].software


@pytest.mark.parametrize(
    ("name", "change", "factor"),
    [
        ("Megatron-Core", {"tp_overlap": False}, 2.0),
        ("Llama 3", {"tp_overlap": False}, 1.5),
        ("Megatron-Core", {"action_seconds": 1e-3}, 1.2),
        ("Megatron-LM 2022", {"fused": True}, 1.5),
        ("llm-foundry", {"stops_early": False}, 1.1),
        ("llm-foundry, other lengths", {"attention_share": 0.6}, 2.0),
        ("NeMo AutoModel", {"token_copies": 0.0}, 4.0),
        ("NeMo AutoModel", {"fuses_permutations": False}, 2.0),
        ("DeepSeek-V3", {"fp8_matmuls": False}, 2.0),
        ("DeepSeek-V3", {"token_copies": 8.0, "dispatch_bytes": 2.0}, 2.0),
        ("DeepSeek-V3", {"message_sms": 0.0}, 1.2),
        ("DeepSeek-V3", {"bidirectional": False}, 2.0),
    ],
)
def test_each_part_of_a_program_is_needed(name: str, change: dict[str, Any], factor: float) -> None:
    group = BY_NAME[name]
    without = replace(group, software=replace(group.software, **change))
    if "fused" in change:  # which cannot recompute attention alone
        without = replace(without, rows=tuple(row for row in group.rows if row.name.endswith("full")))
    assert errors(without)[0] > factor * errors(group)[0]


def test_what_the_source_of_llama_3_leaves_open() -> None:
    """Sizes that agree, the share of the peak that it prints, and what its text says of chunks."""
    group = BY_NAME["Llama 3"]
    for row, printed in zip(group.rows, (43, 41, 38), strict=True):
        assert row.batch * row.sequence == 2**24
        flops = row.model.training_flops(row.batch, row.sequence)
        blocks = replace(row.model, layers=126, outputs=128256).training_flops(row.batch, row.sequence)
        assert flops == pytest.approx(blocks, rel=0.02)
        mfu = blocks / row.seconds / row.layout.world_size / 989e12
        assert mfu == pytest.approx(printed / 100, abs=0.007)
    with_four = replace(group, rows=tuple(replace(row, chunks=4) for row in group.rows)).compare()
    long = group.compare()[2]
    assert f"predicted {1 - long.predicted / long.published:.1%} too fast".replace("%", " %") in _guide()
    said = ", ".join(f"{row.predicted / row.published - 1:+.0%}".replace("%", " %") for row in with_four)
    assert " and ".join(said.rsplit(", ", 1)) in group.source


def test_with_a_mask_llama_3_would_contradict_itself() -> None:
    """Its long sequences would have to be 20 % slower than its short ones beside the same prediction."""
    errors = []
    for source, row in zip(BY_NAME["Llama 3"].rows, BY_NAME["Llama 3"].compare(), strict=True):
        flops = source.model.training_flops(source.batch, source.sequence)
        tokens = source.batch * source.sequence
        scores = 3 * 4.0 * tokens * source.sequence * 126 * source.model.heads * source.model.head_size
        errors.append(row.predicted / (row.published * (flops - scores / 2) / flops) - 1)
    assert max(errors[:2]) < 0.05
    assert errors[2] > 0.2


def test_what_the_source_of_deepseek_v2_leaves_open() -> None:
    group = BY_NAME["DeepSeek-V2"]
    few, many = (replace(group, rows=(deepseek_v2_row(gpus),)).compare()[0] for gpus in (256, 2048))
    said = " to ".join(f"{row.predicted / row.published - 1:.0%}".replace("%", " %") for row in (few, many))
    assert f"from 256 to 2,048 the error is {said}" in group.source
    (row,) = group.compare()
    assert f"DeepSeek-V2's {1 - row.predicted / row.published:.1%}".replace("%", " %") in _guide()


def test_what_the_source_of_deepseek_v3_says_of_bf16() -> None:
    group = BY_NAME["DeepSeek-V3"]
    (row,) = replace(group, software=replace(group.software, fp8_matmuls=False)).compare()
    assert f"at the rate of BF16 the step takes {row.predicted:.1f} s" in group.source
    (fp8,) = group.compare()
    assert fp8.predicted < row.predicted
    page = _guide()
    assert f"and DeepSeek-V3's {fp8.predicted / fp8.published - 1:.1%} too slow".replace("%", " %") in page
    assert f"{fp8.predicted:.1f} s instead of the {fp8.published:.1f} s" in page
    assert f"At the speed of BF16 it would predict {row.predicted:.1f} s" in page


def test_what_the_source_of_deepseek_v3_leaves_open() -> None:
    """Its stages: the two ends pace the others."""
    group = BY_NAME["DeepSeek-V3"]
    (source,), (row,) = group.rows, group.compare()
    task = PlanTask(source.model, group.cluster(2048), source.batch, source.sequence, software=group.software)
    times = [sum(parts.values()) for parts in stage_seconds(task, row.layout)]
    mean = sum(times) / len(times)
    assert times[0] == times[-1] == max(times)
    assert f"take {times[0] / times[7] - 1:.0%} longer".replace("%", " %") in group.source
    equal = row.predicted - (task.microbatches(row.layout) - 1) * (times[0] - mean)
    assert f"with equal times the step would take {equal:.1f} s" in group.source
    assert f"with equal times it would predict {equal:.1f} s" in _guide()
    folded = replace(group, software=replace(group.software, bidirectional=False)).compare()[0]
    assert f"it would take {folded.predicted:.1f} s" in group.source


def test_the_gate_of_automodel_sends_a_token_to_one_rank() -> None:
    """Token i goes to experts 8 i to 8 i + 7 of 128, of which each of 8 ranks has 16."""
    (row,) = BY_NAME["NeMo AutoModel"].rows
    experts, chosen, ranks = row.model.experts, row.model.chosen, row.layout.ep
    for token in range(experts):
        sent = {(chosen * token + i) % experts // (experts // ranks) for i in range(chosen)}
        assert len(sent) == BY_NAME["NeMo AutoModel"].software.token_copies


def test_checkpoints_without_reentrance_leave_out_the_last_matmul() -> None:
    """What `stops_early` says of blocks that are not compiled: three of four matmuls are recomputed."""
    block = Block()
    with CountMatmuls() as forward:
        output = checkpoint(block, torch.randn(2, 8, 16, requires_grad=True), use_reentrant=False)
    with CountMatmuls() as backward:
        output.sum().backward()
    assert (forward.count, backward.count) == (4, 3 + 2 * 4)


class Block(torch.nn.Module):
    """GPT's, with one head."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return result


class CountMatmuls(TorchDispatchMode):
    """Counts matmuls of linear layers, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


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
