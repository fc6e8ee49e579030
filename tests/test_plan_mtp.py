"""Multi-token prediction in `hpnb plan`: the modules that DeepSeek-V3 trains behind its last block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_plan_deepseek import TINY, V2, V3, Config, build, count
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from hpnb.__main__ import main
from hpnb.hybrid.plan_command.layout_code import parse_layout_code
from hpnb.hybrid.plan_command.published import GROUPS
from hpnb.hybrid.plan_command.published_steps import DEEPSEEK_V3
from hpnb.hybrid.plan_command.read_model import read_model, shape_of_config
from hpnb.mesh import ParallelLayout
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.plan_bytes import plan_bytes
from hpnb.theory.plan_memory import module_bytes, rank_memory
from hpnb.theory.plan_step import plan_parts, rank_parameters, stage_seconds
from hpnb.theory.plan_task import PlanTask, refusal

TABLE = 129280 * 7168


def shape_with(modules: int, **changes: Any) -> ModelShape:
    return replace(shape_of_config(Config("deepseek_v3", **{**TINY, **changes})), mtp_modules=modules)


def write_config(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def task_of(model: ModelShape, gpus: int = 512) -> PlanTask:
    return PlanTask(model, find_gpu("h800").cluster(gpus), 2048, 4096)


def tiny_module(config: Any) -> Any:
    """One module of transformers, which builds it for generation alone."""
    return MtpLayer(config.get_mtp_config(), DeepseekV3DecoderLayer, DeepseekV3RMSNorm, 0)


# --- parameters and FLOPs ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=str)
@pytest.mark.parametrize("modules", [1, 2])
def test_parameters_are_those_of_transformers(modules: int, change: dict[str, Any]) -> None:
    model = build(Config("deepseek_v3", **{**TINY, **change, "num_nextn_predict_layers": modules}))
    with torch.device("meta"):
        more = MtpModel(model, modules)
    everything = {id(p): p for m in (model, more) for p in m.parameters()}  # tables are shared
    shape = shape_with(modules, **change)
    assert shape.parameters == sum(p.numel() for p in everything.values())
    assert shape_with(0, **change).parameters == count(model)
    experts = [p.numel() for name, p in more.named_parameters() if ".experts." in name]
    of_modules = shape.model_expert_parameters - shape_with(0, **change).model_expert_parameters
    assert of_modules == sum(experts)


def test_the_checkpoint_of_v3_has_the_module_and_its_tables_once_more(tmp_path: Path) -> None:
    """Its 16-bit and 8-bit values are 684,489,830,400, and with scales and biases 685 billion."""
    name = write_config(tmp_path, {**V3, "num_nextn_predict_layers": 1})
    without, shape = read_model(name), read_model(name, mtp=True)
    assert without.parameters == 671_026_404_352
    assert shape.parameters - without.parameters == 11_610_067_968
    assert shape.parameters + 2 * TABLE == 684_489_830_400


def test_flops_are_those_of_a_forward() -> None:
    """A module of transformers and the outputs that it gives, attention without its mask."""
    config = Config("deepseek_v3", **TINY, attn_implementation="eager", experts_implementation="eager")
    main_model = transformers.AutoModelForCausalLM.from_config(config)
    module, x = tiny_module(main_model.config), torch.randn(2, 64, 512)
    positions = torch.arange(64)[None]
    rotary = main_model.model.rotary_emb(x, positions)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        main_model.lm_head(module(x, x, rotary, None, positions, None))
    more = shape_with(1).training_flops(2, 64) - shape_with(0).training_flops(2, 64)
    assert more / 3 == counter.get_total_flops()


def kept_bytes(module: torch.nn.Module, *arguments: Any) -> int:
    """Bytes that autograd keeps of a forward, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*arguments)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_module_keeps_what_autograd_keeps(dtype: torch.dtype) -> None:
    """Beside its block. What it takes of the last block, and the input of its last norm, which float32 norms
    keep, are counted with the outputs."""
    config = Config("deepseek_v3", **TINY, attn_implementation="sdpa")
    rotary_emb = transformers.AutoModelForCausalLM.from_config(config).model.rotary_emb
    module, samples, length = tiny_module(config).to(dtype), 2, 128
    embedded, x = (torch.randn(samples, length, 512, dtype=dtype, requires_grad=True) for _ in range(2))
    positions = torch.arange(length)[None]
    rotary = rotary_emb(x, positions)
    measured = kept_bytes(module, embedded, x, rotary, None, positions, None)
    measured -= kept_bytes(module.mtp_block, x, None, positions, None, False, rotary)
    shape = replace(shape_of_config(config), mtp_modules=1)
    task = PlanTask(shape, find_gpu("h800").cluster(1), samples, length, value_bytes=dtype.itemsize)
    of_outputs = 2 * 4 * samples * length * 512 if dtype == torch.float32 else 0
    predicted = module_bytes(task, ParallelLayout(microbatch_size=samples), compiled=False)
    assert predicted + of_outputs == pytest.approx(measured, rel=0.02)


# --- the last stage ------------------------------------------------------------------------------------

PIPELINES = ("dp64-pp8-ep64-zero1-1f1b-mb1", "dp64-pp8-ep64-zero1-dualpipe-v-mb1")


def test_both_ends_of_dualpipe_share_the_outputs() -> None:
    layout, task = parse_layout_code(PIPELINES[1]), task_of(replace(DEEPSEEK_V3, layers=63, mtp_modules=1))
    both_ways = replace(task, software=replace(task.software, bidirectional=True))
    folded, shared = ([parts["matmuls"] for parts in stage_seconds(one, layout)] for one in (task, both_ways))
    assert sum(folded) == pytest.approx(sum(shared))
    assert shared == list(reversed(shared))
    outputs = 2 * 6 * 4096 * (TABLE + 7168**2) / task.rate
    dense = folded[0] - outputs - folded[-1]  # 3 of 4 blocks instead of experts
    assert shared[0] == pytest.approx(folded[-1] + dense * 3 / 2 / 2 + outputs / 2, rel=0.02)
    assert stage_seconds(both_ways, replace(layout, schedule="1f1b")) == stage_seconds(
        task, replace(layout, schedule="1f1b")
    )


@pytest.mark.parametrize("code", PIPELINES)
def test_the_last_stage_alone_has_more_than_one_more_block(code: str) -> None:
    """60 blocks and a module are 61 blocks of which the last has a projection, and outputs of its own."""
    blocks = shape_of_config(Config(**V3))
    layout, tokens = parse_layout_code(code), 4096
    plain, task = task_of(blocks), task_of(replace(blocks, layers=60, mtp_modules=1))
    last = 0 if "dualpipe" in code else 7
    more = [[b[part] - a[part] for part in a] for a, b in
            zip(stage_seconds(plain, layout), stage_seconds(task, layout), strict=True)]  # fmt: skip
    assert [rank for rank, parts in enumerate(more) if any(parts)] == [last]
    matmuls = stage_seconds(task, layout)[last]["matmuls"] - stage_seconds(plain, layout)[last]["matmuls"]
    assert matmuls == pytest.approx(6 * tokens * (TABLE + 2 * 7168**2) / task.rate)
    for rank in range(8):
        before, after = rank_memory(plain, layout, rank), rank_memory(task, layout, rank)
        table = TABLE if last else 0  # the first stage has the embedding anyway
        parameters = 2 * 7168**2 + 3 * 7168 + table if rank == last else 0
        assert after["parameters"] - before["parameters"] == 2 * parameters
        assert after["optimizer"] - before["optimizer"] == pytest.approx(12 * parameters / 64)
        if rank == last:
            logits = 2 * tokens * 129280
            assert after["activations"] - before["activations"] > logits
        else:
            assert after == before


def test_both_ends_sum_the_gradient_of_the_shared_embedding() -> None:
    layout = parse_layout_code(PIPELINES[0])
    without, task = task_of(replace(DEEPSEEK_V3, layers=62)), task_of(replace(DEEPSEEK_V3, mtp_modules=1))
    assert plan_bytes(task, layout)["pp"] - plan_bytes(without, layout)["pp"] == 2 * 2 * TABLE / 8
    assert plan_parts(task, layout)["exposed pp"] > plan_parts(without, layout)["exposed pp"]
    folded = replace(layout, schedule="dualpipe-v")
    assert plan_bytes(task, folded)["pp"] == plan_bytes(without, folded)["pp"]
    for schedule in (layout, folded):  # as many messages of experts
        assert plan_bytes(task, schedule)["ep"] == plan_bytes(without, schedule)["ep"]


def test_every_rank_of_tensor_parallelism_has_the_projection() -> None:
    layout = ParallelLayout(8, 1, 4, microbatch_size=1)
    more = [rank_parameters(task_of(shape_with(n), 32), layout)[0] for n in (0, 1)]
    shape = shape_with(1)
    rest = shape.block_parameters - shape.expert_parameters - shape.replicated_weights + 3 * 512
    assert more[1] - more[0] == pytest.approx(shape.replicated_weights + 2 * 512**2 + rest / 4)
    sent = [plan_bytes(task_of(shape_with(n), 32), layout)["tp"] for n in (0, 1)]
    assert sent[1] > sent[0] * 4 / 3.1  # of a block, and twice of outputs


def test_the_last_stage_must_have_all_modules() -> None:
    task, layout = task_of(replace(DEEPSEEK_V3, mtp_modules=3)), parse_layout_code(PIPELINES[0])
    assert refusal(task, layout) is None
    refused = refusal(task, replace(layout, dp=16, pp=32, ep=16))
    assert refused is not None
    assert "3 modules of multi-token prediction" in refused[1]
    assert "the last of 32 pipeline stages has 2 blocks" in refused[1]


# --- the command ---------------------------------------------------------------------------------------

SMALL = {**V3, "num_hidden_layers": 8, "num_nextn_predict_layers": 1}
ASK = ("--gpus", "64", "--gpu", "h800", "--explain", "dp64-ep64-zero3-mb1-full")


def test_the_command_says_what_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [write_config(tmp_path, SMALL), *ASK, "--picture", str(tmp_path / "plan.png")]
    assert main(["plan", *arguments]) == 0
    without = capsys.readouterr().out
    assert "num_nextn_predict_layers=1 is not counted" in without
    assert "--mtp counts it" in without
    assert main(["plan", *arguments, "--mtp"]) == 0
    counted = capsys.readouterr().out
    assert "this program trains without" in counted
    for printed, mtp in ((without, False), (counted, True)):
        parameters = read_model(arguments[0], mtp=mtp).parameters
        assert f"{parameters / 1e9:.3f} B parameters" in printed.splitlines()[0]
    for flags, modules in (([], 0), (["--mtp"], 1)):
        assert main(["plan", *arguments, *flags, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["mtp_modules"] == modules
    assert main(["plan", *arguments, "--run-file", str(tmp_path / "run.toml")]) == 2
    assert "--mtp counts it" in capsys.readouterr().err


@pytest.mark.parametrize("config", [V2, {**V3, "num_nextn_predict_layers": 0}], ids=["V2", "V3"])
def test_a_model_without_modules_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    name = write_config(tmp_path, {**config, "num_hidden_layers": 8})
    for model in (name, "gpt2"):
        assert main(["plan", model, "--mtp"]) == 2
        said = capsys.readouterr().err
        assert "has no num_nextn_predict_layers" in said
        assert "leave --mtp out" in said
    ask = [word.replace("ep64", "ep32") for word in ASK]
    assert main(["plan", name, *ask, "--picture", str(tmp_path / "plan.png")]) == 0
    assert "num_nextn" not in capsys.readouterr().out


@pytest.mark.slow  # test_logical_rank.py counts one rank, and what --mtp says is above
def test_one_rank_is_of_the_model_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without experts; a module has some."""
    config = Config("deepseek_v3", **{**TINY, "first_k_dense_replace": 9, "v_head_dim": 48})
    words = [write_config(tmp_path, config.to_dict()), "--layout", "dp2-pp3-zero1-1f1b-mb4", "--rank", "2",
             "--batch", "32"]  # fmt: skip
    assert main(["plan", *words]) == 0
    assert "num_nextn_predict_layers=1 is not counted" in capsys.readouterr().out
    assert main(["plan", *words, "--mtp"]) == 2
    assert "leave --mtp out" in capsys.readouterr().err


def test_the_published_row_has_the_module() -> None:
    """arXiv 2412.19437, section 4.2: the depth of multi-token prediction is 1."""
    (row,) = next(group for group in GROUPS if group.name == "DeepSeek-V3").rows
    assert row.model == replace(DEEPSEEK_V3, mtp_modules=1)
