"""One rank alone, on tensors without values, takes the memory that it takes among real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

import hpnb
from hpnb.__main__ import main
from hpnb.hybrid.plan_command.layout_code import parse_layout_code
from hpnb.hybrid.plan_command.logical_rank import logical_rank, make_step, plan_rank
from hpnb.hybrid.plan_command.main import make_task
from hpnb.hybrid.plan_command.read_model import read_model
from hpnb.record import CATEGORIES, MemoryProfile
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.plan_task import PlanTask

SIZES = {
    "gpt2": {"n_embd": 192, "n_layer": 4, "n_head": 6, "vocab_size": 1000, "n_positions": 64},
    "llama": {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
              "intermediate_size": 384, "vocab_size": 1000, "max_position_embeddings": 64,
              "tie_word_embeddings": False},
}  # fmt: skip

ONE_AXIS, PIPELINES = (pytest.mark.sampled(2, of=name) for name in ("replicas", "pipelines"))


def write_config(folder: Path, kind: str, **sizes: int) -> str:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(transformers.AutoConfig.for_model(kind, **{**SIZES[kind], **sizes}).to_dict()))
    return str(path)


def task_of(name: str, code: str, batch: int) -> PlanTask:
    gpus = parse_layout_code(code).world_size
    return make_task(read_model(name), find_gpu("h100"), gpus, batch, None)


def record_step(name: str, task: PlanTask, code: str) -> MemoryProfile:
    import products_16_bits  # noqa: F401

    return make_step(name, task, parse_layout_code(code), "bf16")()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(4, device="cpu") as ranks:
        yield ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "code", "rank"),
    [
        pytest.param("gpt2", "dp4-mb2", 1, marks=ONE_AXIS),
        pytest.param("gpt2", "dp4-zero1-mb4", 3, marks=ONE_AXIS),
        pytest.param("gpt2", "dp4-zero2-mb2", 2, marks=ONE_AXIS),
        pytest.param("gpt2", "dp4-zero3-mb4-full", 1, marks=ONE_AXIS),
        ("gpt2", "dp2-tp2-zero1-mb8-sp", 2),
        pytest.param("gpt2", "dp2-pp2-zero3-1f1b-mb1", 3, marks=PIPELINES),
        pytest.param("gpt2", "pp2-tp2-1f1b-mb2-full", 2, marks=PIPELINES),
        pytest.param("gpt2", "dp2-pp2-zero2-interleaved2-mb2", 2, marks=PIPELINES),
        pytest.param("gpt2", "pp4-zb-h1-mb2", 2, marks=PIPELINES),
        # Eight busy ranks on two cores: what one has received ahead, and so its peak, follows their pace.
        pytest.param("llama", "dp2-pp2-tp2-zero1-1f1b-mb2", 7, marks=pytest.mark.slow),
    ],
)
def test_a_rank_alone_takes_what_it_takes_among_others(
    four_ranks: hpnb.Ranks, tmp_path: Path, kind: str, code: str, rank: int
) -> None:
    name = write_config(tmp_path, kind)
    task, layout = task_of(name, code, 16), parse_layout_code(code)
    alone = plan_rank(name, task, layout, "bf16", rank)
    if layout.world_size == 4:
        real = four_ranks.run(record_step, name, task, code)[rank]
    else:
        real = hpnb.launch(record_step, name, task, code, ranks=layout.world_size, device="cpu")[rank]
    assert alone.peak == pytest.approx(real.peak, rel=0.01)
    for category in CATEGORIES:
        wanted = getattr(real.at_peak, category)
        assert getattr(alone.at_peak, category) == pytest.approx(wanted, rel=0.03, abs=4096), category
    for category in ("parameters", "gradients", "optimizer", "activations"):  # also where the peak is not
        assert alone.peak_of(category) == pytest.approx(real.peak_of(category), rel=0.03, abs=4096), category


@pytest.mark.slow  # the command counts one of 32, below
def test_one_rank_of_a_thousand_and_the_process_is_as_before(tmp_path: Path) -> None:
    name, code = write_config(tmp_path, "gpt2", n_layer=8), "dp64-pp8-tp2-zero1-1f1b-mb1"
    task, layout = task_of(name, code, 512), parse_layout_code(code)
    first, middle, last = (plan_rank(name, task, layout, "bf16", rank) for rank in (512, 518, 1023))
    ends = [profile.at_peak.parameters for profile in (first, last)]
    assert (
        min(ends) > middle.at_peak.parameters + 1000 * 192 * 0.9
    )  # both ends hold half the table, in 2 bytes
    assert middle.peak_of("activations") < first.peak_of("activations")  # 1F1B: 5 in flight, not 8
    assert not dist.is_initialized()
    assert torch.empty(1, device="meta").is_meta
    assert hpnb.device().type != "meta"


def test_the_command_counts_one_rank(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = write_config(tmp_path, "gpt2")
    words = ["plan", name, "--layout", "dp8-pp2-tp2-zero1-1f1b-mb1", "--rank", "17", "--batch", "32"]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["rank"], printed["ranks"], printed["layout"]) == (17, 32, "dp8-pp2-tp2-zero1-1f1b-mb1")
    assert set(printed["counted"]) == set(CATEGORIES) == set(printed["predicted"])
    ratio = printed["counted"]["parameters"] / printed["predicted"]["parameters"]
    assert ratio == pytest.approx(1, rel=0.02)
    assert main([*words, "--of", "32"]) == 0
    out = capsys.readouterr().out
    assert "rank 17 of 32: pipeline rank 0 of 2" in out
    assert "counted" in out
    assert "for blocks that\nare not compiled." in out  # a rank alone runs a CPU's kernels
    assert "messages of a pipeline stay until the step ends" in out
    assert "softmax" not in out  # of the loss, which another stage has
    (line,) = (line.split() for line in out.splitlines() if line.startswith("parameters"))
    assert "MB at the peak" in out
    assert float(line[1]) == pytest.approx(printed["counted"]["parameters"] / 1e6, abs=1e-3)


@pytest.mark.parametrize(
    ("code", "rank"), [("dp1-tp2-mb2", 1), ("dp1-tp3-mb2", 2), ("dp2-pp2-tp2-1f1b-mb2", 7)]
)
def test_a_rank_without_values_compares_none_with_other_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, rank: int
) -> None:
    """The first backward of a registered model does, and was refused: hidden states differ by 100 %."""
    name = write_config(tmp_path, "llama", num_hidden_layers=2, num_key_value_heads=3 if "tp3" in code else 2)
    words = ["plan", name, "--layout", code, "--rank", str(rank), "--batch", "8", "--json"]
    assert main(words) == 0, capsys.readouterr().err
    printed = json.loads(capsys.readouterr().out)
    assert printed["counted"]["parameters"] == pytest.approx(printed["predicted"]["parameters"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gpt2", "--rank", "3"], "--layout dp16-pp8-tp8-zero1-1f1b-mb1 --rank 37"),
        (["gpt2", "--layout", "dp8"], "--layout dp16-pp8-tp8-zero1-1f1b-mb1 --rank 37"),
        (["gpt2", "--layout", "dp8-mb1", "--rank", "8"], "dp8-mb1 has 8 ranks, 0 to 7"),
        (["gpt2", "--layout", "dp8-mb1", "--rank", "-1"], "dp8-mb1 has 8 ranks, 0 to 7"),
        (
            ["gpt2", "--layout", "dp8-mb1", "--rank", "1", "--of", "16"],
            "dp16 would fit them; or use --gpus 8",
        ),
        (["gpt2", "--layout", "pp16-1f1b-mb1", "--rank", "1"], "use 12 or fewer"),
    ],
)
def test_what_is_no_rank_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert told in error
    assert "\n" not in error


def test_a_rank_of_a_group_is_no_logical_rank(tmp_path: Path) -> None:
    def inside() -> str:
        with pytest.raises(ValueError, match="no rank of a group") as caught:
            logical_rank(lambda: lambda: MemoryProfile(()), 0, 4)
        return str(caught.value)

    assert "another one" in hpnb.launch(inside, ranks=1, device="cpu")[0]
