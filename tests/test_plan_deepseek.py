"""DeepSeek in `hpnb plan`: latent attention, shared experts, and first blocks without experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hpnb.__main__ import main
from hpnb.hybrid.plan_command.layout_code import parse_layout_code
from hpnb.hybrid.plan_command.main import make_task
from hpnb.hybrid.plan_command.published import GROUPS, PublishedProgram
from hpnb.hybrid.plan_command.published_steps import DEEPSEEK_V2, DEEPSEEK_V3
from hpnb.hybrid.plan_command.read_model import read_model, shape_of_config
from hpnb.mesh import ParallelLayout
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.plan_memory import block_bytes, plan_memory, rank_memory
from hpnb.theory.plan_messages import links
from hpnb.theory.plan_step import rank_blocks, rank_dense_blocks, stage_seconds
from hpnb.theory.plan_task import PlanTask, refusal

Config = transformers.AutoConfig.for_model

# config.json of the model, without what does not concern its size.
V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
V2 = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 2, "n_routed_experts": 160, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
TINY = {
    "vocab_size": 101, "hidden_size": 512, "intermediate_size": 1400, "moe_intermediate_size": 288,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 192, "kv_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 24, "max_position_embeddings": 128,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "as they are": {},
    "queries from hidden values, biases": {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
    "experts everywhere": {"first_k_dense_replace": 0, "n_shared_experts": 1},
    "no experts": {"first_k_dense_replace": 9},
    "a tied table": {"tie_word_embeddings": True, "attention_bias": True},
}
KINDS = ("deepseek_v2", "deepseek_v3")


def build(config: Any) -> Any:
    """On the meta device."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def task_of(config: dict[str, Any], gpus: int, batch: int, sequence: int = 4096) -> PlanTask:
    return make_task(shape_of_config(Config(**config)), find_gpu("h800"), gpus, batch, sequence)


# --- parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind: str, change: str) -> None:
    config = Config(kind, **{**TINY, **CHANGES[change]})
    shape, model = shape_of_config(config), build(config)
    assert shape.parameters == count(model)
    assert shape.block_parameters == count(model.model.layers[-1])
    assert shape.dense_layers == 0 or shape.dense_block.block_parameters == count(model.model.layers[0])
    experts = [p.numel() for name, p in model.named_parameters() if ".experts." in name]
    assert shape.model_expert_parameters == sum(experts)


@pytest.mark.parametrize(
    ("config", "parameters", "published", "active"),
    # arXiv 2412.19437 and 2405.04434, abstracts: parameters in billions, and those of a token
    [(V3, 671_026_404_352, 671, 37), (V2, 235_741_434_880, 236, 21)],
    ids=["V3", "V2"],
)
def test_published_models_have_their_sizes(
    tmp_path: Path, config: dict[str, Any], parameters: int, published: float, active: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model(str(tmp_path))
    assert shape.parameters == parameters == count(build(Config(**config)))
    assert round(shape.parameters / 1e9) == published
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("config", "shape"), [(V3, DEEPSEEK_V3), (V2, DEEPSEEK_V2)], ids=["V3", "V2"])
def test_published_rows_have_these_models(config: dict[str, Any], shape: ModelShape) -> None:
    read = shape_of_config(Config(**config))
    assert replace(read, name="", shards_attention=True) == replace(shape, name="")


def test_sizes_that_cannot_be_are_refused() -> None:
    shape = shape_of_config(Config("deepseek_v3", **TINY))
    with pytest.raises(ValueError, match="3 of 3 blocks without experts"):
        replace(shape, dense_layers=3)
    with pytest.raises(ValueError, match="use experts=0"):
        replace(shape, experts=0, chosen=1)


# --- FLOPs and bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["as they are", "experts everywhere", "no experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_of_a_forward(kind: str, change: str) -> None:
    """All matmuls that torch counts, attention without its mask."""
    config = Config(kind, **{**TINY, **CHANGES[change]})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.arange(2 * 64).view(2, 64) % 101
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids)
    # transformers multiplies rotary frequencies with positions as a matmul
    rotary = 2 * 64 * config.qk_rope_head_dim // 2
    counted = counter.get_total_flops()
    predicted = shape_of_config(config).training_flops(2, 64) / 3
    assert predicted == pytest.approx(counted, abs=4 * rotary)


def test_flops_of_v3_agree_with_its_rate() -> None:
    """arXiv 2412.19437: 37 B parameters of a token; 6 FLOPs each, and attention."""
    shape = shape_of_config(Config(**V3))
    attention = 3 * 61 * 128 * 2 * 4096 * (192 + 128)
    table = shape.embedding_parameters  # which multiplies nothing
    assert shape.training_flops(1, 4096) / 4096 == pytest.approx(
        6 * (shape.active_parameters - table) + attention, rel=0.001
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_keeps_what_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    """Values are as large as keys, so that the attention of a CPU is fused, and blocks are not compiled."""
    config = Config(kind, **{**TINY, "v_head_dim": 48}, attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shape, samples, length = shape_of_config(config), 2, 128
    task = PlanTask(shape, find_gpu("h800").cluster(1), samples, length, value_bytes=dtype.itemsize)
    for layer, one in ((0, replace(task, model=shape.dense_block)), (2, task)):
        x = torch.randn(samples, length, 512, dtype=dtype, requires_grad=True)
        positions = torch.arange(length)[None]
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.model.layers[layer](
                x, position_embeddings=model.model.rotary_emb(x, positions), position_ids=positions
            )
        measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        predicted = block_bytes(one, ParallelLayout(microbatch_size=samples), compiled=False)
        assert predicted == pytest.approx(measured, rel=0.05), layer
        if dtype == torch.bfloat16:  # float32 copies for norms, and one for a router
            wide = [t for t in kept.values() if t.dtype == torch.float32 and t.size(-1) == 512]
            narrow = replace(one, model=replace(one.model, wide_router=False))
            router = predicted - block_bytes(narrow, ParallelLayout(microbatch_size=samples), compiled=False)
            copies = len([t for t in wide if t.numel() == samples * length * 512]) - one.model.norms
            assert router == copies * 4 * samples * length * 512
            assert copies == (layer > 0)


# --- layouts -------------------------------------------------------------------------------------------


def test_first_blocks_are_on_the_first_ranks() -> None:
    """61 blocks on 4 ranks are 15, 16, 15, 15; the first three have no experts."""
    task = task_of(V3, 512, 1024)
    layout = parse_layout_code("dp128-pp4-ep64-zero1-1f1b-mb1")
    assert rank_blocks(61, layout) == (15, 16, 15, 15)
    assert rank_dense_blocks(task.model, layout) == (3, 0, 0, 0)
    folded = replace(layout, schedule="dualpipe-v")
    assert rank_dense_blocks(task.model, folded) == (3, 0, 0, 0)
    interleaved = replace(layout, pp=16, dp=32, ep=32, schedule="interleaved", chunks=2)
    assert sum(rank_dense_blocks(task.model, interleaved)) == 3
    stages = stage_seconds(task, layout)
    assert stages[0]["ep"] == pytest.approx(12 / 16 * stages[1]["ep"])
    model = task.model
    with_experts = model.block_parameters - model.expert_parameters * 63 / 64
    expected = 3 * model.dense_block.block_parameters + 12 * with_experts + model.embedding_parameters
    assert rank_memory(task, layout, 0)["parameters"] == pytest.approx(2 * expected)
    assert rank_memory(task, layout, 2)["parameters"] == pytest.approx(2 * 15 * with_experts)
    total = sum(rank_memory(task, replace(layout, ep=1), rank)["parameters"] for rank in range(4))
    assert total == pytest.approx(2 * model.parameters, rel=1e-4)


# On 32 ranks the third is the first with two blocks of experts.
@pytest.mark.parametrize(
    "code",
    [
        "dp64-pp8-ep64-zero1-1f1b-mb1",
        "dp32-pp16-ep32-zero1-dualpipe-v-mb1",
        "dp16-pp32-ep16-zero1-1f1b-mb1",
    ],
)
def test_the_fullest_rank_is_the_fullest_of_all(code: str) -> None:
    task, layout = task_of(V3, 512, 2048), parse_layout_code(code)
    ranks = [sum(rank_memory(task, layout, rank).values()) for rank in range(layout.pp)]
    assert sum(plan_memory(task, layout).values()) == max(ranks)


def test_tensor_parallelism_shards_what_the_plan_says() -> None:
    """transformers' plan of V2 shards heads, that of V3 leaves the attention on every rank."""
    v2, v3 = (shape_of_config(Config(kind, **TINY)) for kind in KINDS)
    assert v2.head_share(4) == 1 / 4
    assert v3.head_share(4) == 1
    assert v3.rank_weights(4) - v2.rank_weights(4) == 3 / 4 * (v2.attention_weights - 512 * (192 + 96 + 16))
    assert sum(v2.reduced_values) - sum(v3.reduced_values) == 512 + 192 + 96 + 16
    for shape in (v2, v3):
        task = PlanTask(shape, find_gpu("h800").cluster(8), 64, 128)
        assert refusal(task, parse_layout_code("dp1-tp8-mb8")) is None
        with_sp = refusal(task, parse_layout_code("dp1-tp8-mb8-sp"))
        assert with_sp is not None
        assert "leave sp out" in with_sp[1]
    dense = replace(v2, experts=0, dense_layers=0, dense_mlp=0, chosen=1, shared_mlp=0)
    refused = refusal(PlanTask(dense, find_gpu("h800").cluster(8), 64, 128), parse_layout_code("tp8-mb8-sp"))
    assert refused is not None
    assert "latent attention is not sharded" in refused[1]


def test_one_rank_of_a_model_with_experts_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert main(["plan", str(tmp_path), "--layout", "dp64-pp8-ep64-zero1-1f1b-mb1", "--rank", "3"]) == 2
    said = capsys.readouterr().err
    assert "depends on values" in said
    assert "--explain dp64-pp8-ep64-zero1-1f1b-mb1" in said
    assert said.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value_size", [48, 24])
def test_one_rank_of_latent_attention_is_as_full_as_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value_size: int
) -> None:
    """Without experts. A CPU's fused attention needs values that are as large as keys."""
    sizes = {**TINY, **CHANGES["no experts"], "v_head_dim": value_size, "vocab_size": 4096}
    config = Config("deepseek_v2", **sizes)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    words = ["--layout", "dp2-pp3-zero1-1f1b-mb4", "--rank", "2", "--batch", "32", "--json"]
    assert main(["plan", str(tmp_path), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    counted, predicted = printed["counted"], printed["predicted"]
    for states in ("parameters", "gradients", "optimizer"):
        assert counted[states] == pytest.approx(predicted[states], rel=1e-3)
    if value_size == 48:
        assert sum(counted.values()) == pytest.approx(sum(predicted.values()), rel=0.1)
    else:  # scores are kept
        assert counted["activations"] > 1.2 * predicted["activations"]


def test_the_command_plans_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V2, "num_hidden_layers": 8}))
    arguments = [str(tmp_path), "--gpus", "64", "--gpu", "h800", "--explain", "dp64-ep8-zero3-mb1-full"]
    assert main(["plan", *arguments, "--picture", str(tmp_path / "plan.png")]) == 0
    printed = capsys.readouterr().out
    shape = read_model(str(tmp_path))
    first = printed.splitlines()[0]
    assert (
        f"{shape.parameters / 1e9:.3f} B parameters ({shape.active_parameters / 1e9:.3f} B of a token)"
        in first
    )
    assert ", edp " in printed


# --- what was published ------------------------------------------------------------------------------------


def program() -> PublishedProgram:
    return next(group for group in GROUPS if group.name == "DeepSeek-V3")


def test_the_published_step_is_that_of_the_report() -> None:
    """arXiv 2412.19437: 2,664 thousand GPU hours for 14.8 trillion tokens, on 2,048 H800s."""
    (row,) = program().rows
    assert row.layout.world_size == 2048
    step = row.batch * row.sequence / 14.8e12 * 2664e3 * 3600 / 2048
    assert row.seconds == pytest.approx(step, rel=0.001)


def test_experts_travel_about_as_long_as_their_tokens_are_computed() -> None:
    """Section 3.2.1: without overlap, computing and communication of blocks are about 1 to 1."""
    (row,), software = program().rows, program().software
    task = PlanTask(row.model, program().cluster(2048), row.batch, row.sequence, software=software)
    parts = stage_seconds(task, replace(row.layout, schedule="1f1b"))[7]  # with blocks alone
    assert 0.6 < parts["ep"] / (parts["matmuls"] + parts["memory"]) < 1.2


def test_ranks_of_a_stage_are_neighbours_where_the_order_says_so() -> None:
    """64 ranks of ep on 8 nodes; with dp outermost and 16 stages they are on 64 nodes."""
    (row,) = program().rows
    near = links(program().cluster(2048), row.layout)
    far = links(program().cluster(2048), replace(row.layout, order=("dp", "pp", "tp")))
    assert near["ep"].bandwidth == pytest.approx(63 / 56 * far["ep"].bandwidth)
    assert near["dp"].bandwidth > far["dp"].bandwidth


def test_models_without_experts_are_what_they_were() -> None:
    shape = ModelShape("", 64, 2, 4, 2, 16, 128, 10, 640, 0, 32)
    assert shape.attention_weights == 64 * 16 * (2 * 4 + 2 * 2)
    assert shape.score_size == shape.value_size == 16
    assert shape.reduced_values == (128, 128)
    assert shape.allows_sequence_parallel
