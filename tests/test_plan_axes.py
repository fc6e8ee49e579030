"""cp, ep and ZB-V in `hpnb plan`: bytes and memory beside real ranks, and times that move the right way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hpnb
from hpnb.hybrid.plan_command.layout_code import parse_layout_code
from hpnb.hybrid.plan_command.logical_rank import make_step
from hpnb.hybrid.plan_command.main import make_task
from hpnb.hybrid.plan_command.read_model import CLASSES, read_model, shape_of_config
from hpnb.hybrid.plan_command.run_lines import plugin_options
from hpnb.hybrid.plan_command.search import candidates, make_plan, search
from hpnb.pipeline_parallel import Costs
from hpnb.pipeline_parallel.overlapped_pairs import even_segments, exposed_time, overlapped_pairs
from hpnb.pipeline_parallel.schedules import make
from hpnb.record import MemoryProfile
from hpnb.theory import Link
from hpnb.theory.context import attention_flops, ring_exposed, ring_step_seconds, tokens_to_overlap
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.experts import exposed_messages, paired_share
from hpnb.theory.plan_bytes import plan_bytes
from hpnb.theory.plan_memory import plan_memory, rank_memory, rank_moments
from hpnb.theory.plan_messages import attention_of
from hpnb.theory.plan_step import plan_parts
from hpnb.theory.plan_task import PlanTask, refusal

Config = transformers.AutoConfig.for_model
_TINY = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 384, "vocab_size": 500, "max_position_embeddings": 64,
         "tie_word_embeddings": False}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {**_TINY, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 64, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
             "qk_nope_head_dim": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 8, "n_head": 4, "vocab_size": 500, "n_positions": 64,
             "bos_token_id": 0, "eos_token_id": 0},
    "vit": {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 512,
            "image_size": 32, "patch_size": 4, "num_labels": CLASSES},  # 65 tokens, an odd number
    "llama": _TINY,
    "mixtral": {**_TINY, **_EXPERTS},
    "qwen3_moe": {**_TINY, **_EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 64, "head_dim": 16},
    "deepseek_v3": {**_DEEPSEEK, "v_head_dim": 32},  # not the size of keys
    "deepseek_v2": {**_DEEPSEEK, "v_head_dim": 48, "n_shared_experts": 2},
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000}
LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
            "tie_word_embeddings": False, "max_position_embeddings": 131072}  # fmt: skip


def task_of(config: dict[str, Any], gpus: int, batch: int, sequence: int, **more: Any) -> PlanTask:
    model = shape_of_config(Config(**config))
    return make_task(model, find_gpu("h100"), gpus, batch, sequence, **more)


def step_seconds(task: PlanTask, code: str) -> float:
    return sum(plan_parts(task, parse_layout_code(code)).values())


# --- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_parameters_of_experts_are_those_of_transformers(kind: str) -> None:
    config = Config(kind, **SIZES[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert shape.layers * shape.expert_parameters == experts
    assert shape.parameters - shape.active_parameters == experts / 2  # two of four


def test_mixtral_has_its_published_sizes() -> None:
    shape = shape_of_config(Config(**MIXTRAL))
    assert shape.parameters == 46_702_792_704
    assert shape.active_parameters == pytest.approx(12.9e9, rel=0.005)  # arXiv 2401.04088


# --- beside real ranks -----------------------------------------------------------------------------------


def record_step(name: str, task: PlanTask, code: str) -> tuple[dict[str, float], MemoryProfile]:
    """Bytes by axis of a step, and its memory.

    Weights and tokens are drawn on the rank, whose generator stands where the test before has left it. How
    evenly they are routed, and so the bytes of experts, depends on that draw: it is seeded.
    """
    import products_16_bits  # noqa: F401

    torch.manual_seed(0)
    record = make_step(name, task, parse_layout_code(code), "bf16")
    record()
    with hpnb.record.traffic() as sent:
        profile = record()  # two steps
    return {axis: nbytes / 2 for axis, nbytes in sent.bytes.items()}, profile


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(4, device="cpu") as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        # Every axis stands in one that always runs, and one of the other families is drawn.
        ("vit", "pp2-cp2-zero1-1f1b-mb8"),
        ("mixtral", "dp4-ep2-zero3-mb4"),
        ("deepseek_v3", "dp2-tp2-mb8"),
        *(
            pytest.param(kind, code, marks=pytest.mark.sampled(1))
            for kind, code in (
                ("gpt2", "pp4-zb-v-mb2"),
                ("llama", "cp4-zero2-mb16"),
                ("qwen3_moe", "dp2-pp2-ep2-dualpipe-v-mb2"),
                ("deepseek_v3", "cp4-mb16-ulysses"),
                ("deepseek_v2", "dp2-cp2-mb8-all-gather"),
            )
        ),
        *(
            pytest.param(kind, code, marks=pytest.mark.slow)
            for kind, codes in (
                ("gpt2", ("dp2-pp2-zero1-1f1b-mb4", "tp4-mb16", "pp2-cp2-1f1b-mb8")),
                ("vit", ("cp4-mb16", "dp2-cp2-zero3-mb8-full", "cp4-zero2-mb8-ulysses")),
                ("vit", ("dp2-cp2-mb8-all-gather",)),
                ("llama", ("dp4-zero3-mb2", "dp2-cp2-zero3-mb8-full", "cp2-tp2-mb16-ulysses")),
                ("llama", ("dp2-cp2-mb8-all-gather",)),
                ("mixtral", ("dp4-ep4-mb4", "dp2-cp2-ep2-zero1-mb4", "dp2-cp2-ep4-zero3-mb8-full")),
                ("mixtral", ("dp2-tp2-mb8", "dp2-tp2-ep2-mb8")),
                ("qwen3_moe", ("dp2-pp2-ep2-1f1b-mb4",)),
                ("deepseek_v3", ("dp2-pp2-ep2-1f1b-mb4", "dp4-ep4-zero3-mb4", "dp2-cp2-mb8")),
                ("deepseek_v2", ("dp2-tp2-mb8-full", "dp4-ep4-mb4")),
            )
            for code in codes
        ),
    ],
)
def test_bytes_and_states_are_those_of_real_ranks(
    four_ranks: hpnb.Ranks, tmp_path: Path, kind: str, code: str
) -> None:
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(Config(kind, **SIZES[kind]).to_dict()))
    layout = parse_layout_code(code)
    task = make_task(read_model(str(path)), find_gpu("h100"), 4, 16, None)
    results = four_ranks.run(record_step, str(path), task, code)
    counted: dict[str, float] = {}
    for sent, _ in results:
        for axis, nbytes in sent.items():
            name = "dp" if axis == "dp_cp" else axis
            counted[name] = counted.get(name, 0.0) + nbytes / 4
    predicted = plan_bytes(task, layout)
    for axis in predicted.keys() | counted.keys():
        off = 0.05 if axis == "ep" else 0.005  # routers are not quite even
        assert predicted.get(axis, 0.0) == pytest.approx(counted.get(axis, 0.0), rel=off, abs=4096), axis
    for rank, (_, profile) in enumerate(results):
        memory = rank_memory(task, layout, layout.coordinates(rank)["pp"])
        for states in ("parameters", "optimizer"):
            assert memory[states] == pytest.approx(
                profile.peak_of(states), rel=0.15 if layout.tp > 1 else 0.01
            )
    if kind == "vit" and not layout.recomputation:  # states are its fullest moment, not activations
        moments = [rank_moments(task, layout, layout.coordinates(r)["pp"], False).moments for r in range(4)]
        for of_rank, (_, profile) in zip(moments, results, strict=True):
            most = max(moment.activations for moment in of_rank)
            assert most == pytest.approx(profile.peak_of("activations"), rel=0.1)
    # Where values have another size than keys, a CPU's attention is not fused.
    fused = kind in ("llama", "mixtral", "deepseek_v2") and layout.context_parallel != "all-gather"
    if fused and layout.cp * layout.ep > 1 and not layout.recomputation:
        peaks = [profile.peak_of("activations") for _, profile in results]  # by chance some have more rows
        moments = rank_moments(task, layout, 0, False).moments  # the fullest may be one with more gradients
        predicted_peak = max(moment.activations for moment in moments)
        assert predicted_peak == pytest.approx(sum(peaks) / len(peaks), rel=0.15)


# --- times -----------------------------------------------------------------------------------------------


def test_experts_on_one_node_are_faster_than_across_nodes() -> None:
    task = task_of(MIXTRAL, 64, 256, 4096)
    inside, across = (
        plan_parts(task, parse_layout_code(code)) for code in ("dp64-ep8-mb1", "dp32-pp2-ep8-1f1b-mb1")
    )
    assert across["ep"] > 3 * inside["ep"] > 0
    assert plan_parts(task, parse_layout_code("dp64-mb1"))["ep"] == 0


def test_experts_are_planned_with_zero_3() -> None:
    """It shards what ep replicates: dense weights over dp, experts over the ranks that have the same."""
    task = task_of(MIXTRAL, 16, 256, 4096)
    codes = ("dp16-ep8-zero2-mb1", "dp16-ep8-zero3-mb1")
    states = [plan_memory(task, parse_layout_code(code))["parameters"] for code in codes]
    dense = task.model.parameters - task.model.model_expert_parameters
    experts = task.model.model_expert_parameters / 16
    assert states[0] == pytest.approx(2 * (dense + 2 * experts))
    assert states[1] == pytest.approx(2 * (dense / 16 + experts))
    alike, sharded = (plan_bytes(task, parse_layout_code(code))["edp"] for code in codes)
    assert sharded > 2 * alike > 0
    one_copy = parse_layout_code("dp8-ep8-zero3-mb1")
    assert plan_bytes(task_of(MIXTRAL, 8, 256, 4096), one_copy)["edp"] == 0
    seconds = [plan_parts(task, parse_layout_code(code))["exposed dp"] for code in codes]
    assert seconds[1] > seconds[0]
    searched = search(task_of(MIXTRAL, 16, 64, 4096), progress=False)
    assert {3} < {plan.layout.zero_stage for plan in searched.plans if plan.layout.ep > 1}


def test_one_copy_of_experts_is_not_gathered() -> None:
    """Of a block that ZeRO 3 gathers ahead, experts are gathered where other ranks have the same."""
    ahead = []
    for gpus, code in ((16, "dp16-ep8-zero3-mb1"), (8, "dp8-ep8-zero3-mb1")):
        moments = rank_moments(task_of(MIXTRAL, gpus, gpus, 4096), parse_layout_code(code), 0).moments
        ahead.append(next(moment.temporary for moment in moments if moment.name == "turn"))
    experts = task_of(MIXTRAL, 8, 8, 4096).model.expert_parameters / 8
    assert ahead[0] - ahead[1] == pytest.approx(2 * experts)


def test_dualpipe_v_overlaps_messages_of_experts() -> None:
    """Across nodes, where they take longest; what computing hides of them still costs half of its time."""
    task = task_of(MIXTRAL, 64, 256, 4096)
    alone, beside = (
        plan_parts(task, parse_layout_code(f"dp32-pp2-ep8-{schedule}-mb1"))
        for schedule in ("1f1b", "dualpipe-v")
    )
    assert 0.1 * alone["ep"] < beside["ep"] < 0.8 * alone["ep"]
    assert beside["matmuls"] == pytest.approx(alone["matmuls"])
    assert beside["bubble"] < alone["bubble"]


@pytest.mark.sampled(8, cover=True)
@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 16), (8, 64), (16, 120)])
def test_exposed_messages_are_those_of_the_simulated_pairs(
    ranks: int, microbatches: int, layers: int, ratio: float
) -> None:
    """A chunk computes 0.5 s forward and 1 s backward; its messages take `ratio` times as long."""
    schedule = make("dualpipe-v", 2 * ranks, microbatches, 2)
    segments = even_segments(schedule, Costs(0.5, 0.5, 0.5, 0.0), layers, 1.0)
    message = ratio * 1.5 / (4 * layers)
    pairs = overlapped_pairs(schedule)
    simulated = exposed_time(schedule, pairs, segments, lambda nbytes: nbytes * message)
    mean = sum(simulated.exposed) / ranks / microbatches / 2 / layers  # of a microbatch and layer
    paired = sum(map(len, pairs)) / ranks / microbatches / 2
    assert paired_share(ranks, microbatches) == pytest.approx(paired)
    predicted = exposed_messages(0.5 / layers, 1.0 / layers, message, layers, paired)
    assert predicted == pytest.approx(mean, rel=0.02)


def test_imbalance_prolongs_experts_and_their_messages() -> None:
    even, uneven = (
        plan_parts(task_of(MIXTRAL, 8, 16, 4096, imbalance=imbalance), parse_layout_code("dp8-ep8-mb1"))
        for imbalance in (1.0, 1.5)
    )
    assert 1.3 < uneven["ep"] / even["ep"] < 1.5  # latency aside
    assert 1.2 < uneven["matmuls"] / even["matmuls"] < 1.5
    memory = [plan_memory(task_of(MIXTRAL, 8, 16, 4096, imbalance=n), parse_layout_code("dp8-ep8-mb1"))
              for n in (1.0, 1.5)]  # fmt: skip
    assert memory[1]["activations"] > 1.2 * memory[0]["activations"]
    with pytest.raises(ValueError, match="1 to 8 times"):
        task_of(MIXTRAL, 8, 16, 4096, imbalance=9)


def test_a_ring_is_hidden_by_long_sequences_alone() -> None:
    """The exposed share falls with the tokens of a rank; Ulysses exposes all of its messages."""
    exposed = []
    for sequence in (8192, 32768, 131072):
        task = task_of(LLAMA_8B, 64, 8, sequence)
        parts = plan_parts(task, parse_layout_code("dp8-cp8-mb1"))
        exposed.append(parts["cp"] / sum(parts.values()))
    assert exposed[0] > 3 * exposed[1] > 0
    assert exposed[2] < 0.01
    task = task_of(LLAMA_8B, 64, 8, 131072)
    ulysses, gathered, ring = (
        plan_parts(task, parse_layout_code(f"dp8-cp8-mb1{mode}"))["cp"]
        for mode in ("-ulysses", "-all-gather", "")
    )
    assert ulysses > ring
    assert gathered > ring


def test_long_sequences_are_planned_with_context_parallelism() -> None:
    """Two samples of 131,072 tokens on 16 GPUs: no rank can hold one."""
    result = search(task_of(LLAMA_8B, 16, 2, 131072), progress=False)
    assert result.plans[0].layout.cp > 1
    assert all(plan.layout.cp * plan.layout.tp > 1 for plan in result.plans)


@pytest.mark.slow  # a search of 4 s; layouts with ep are compared with real ranks above
def test_experts_are_planned_with_expert_parallelism() -> None:
    best = search(task_of(MIXTRAL, 16, 64, 4096), progress=False).plans[0].layout
    assert best.ep > 1


VIT_16K = {"model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
           "intermediate_size": 4096, "image_size": 1024, "patch_size": 8}  # fmt: skip


def test_large_images_are_planned_with_context_parallelism() -> None:
    """16,385 tokens an image: 8 GPUs share 4 images only by splitting them. An image of 197 tokens is not
    split by the search, and planned where it is asked for."""
    task = task_of(VIT_16K, 8, 4, 16385)
    result = search(task, progress=False)
    assert any(plan.layout.cp == 2 for plan in result.plans)
    assert all(task.sequence >= 2048 * plan.layout.cp for plan in result.plans)
    small = make_task(read_model("vit-l16"), find_gpu("h100"), 8, 64, None)
    assert all(layout.cp == 1 for layout in candidates(small))
    alone, split = (make_plan(small, parse_layout_code(code)) for code in ("dp8-mb8", "dp4-cp2-mb16"))
    assert alone.parts["cp"] == 0 < split.parts["cp"]
    assert split.parts["matmuls"] == pytest.approx(alone.parts["matmuls"], rel=0.02)  # 99 of 197 tokens
    assert split.memory["activations"] == pytest.approx(alone.memory["activations"], rel=0.02)
    many = make_task(read_model("vit-l16"), find_gpu("h100"), 256, 64, None)
    with pytest.raises(ValueError, match="197 tokens, fewer than cp=256"):
        make_plan(many, parse_layout_code("cp256"))


def test_an_image_computes_twice_beside_the_messages_of_a_ring() -> None:
    """No causal mask halves its pairs, and its keys and values are as many bytes as those of a text."""
    image = task_of(VIT_16K, 8, 8, 16385)
    layout = parse_layout_code("dp4-cp2-mb1")
    attention = attention_of(image, layout)
    assert (attention.sequence, attention.causal) == (16386, False)
    text = replace(attention, causal=True)
    assert attention_flops(attention).forward == pytest.approx(2 * attention_flops(text).forward, rel=1e-3)
    rate, link = 1e14, Link(0.0, 1e11)
    assert tokens_to_overlap(attention, rate, link) == tokens_to_overlap(text, rate, link) / 2
    tokens = tokens_to_overlap(attention, rate, link)
    for factor, hidden in ((0.5, False), (2.0, True)):
        near = replace(attention, sequence=round(factor * tokens * 4))
        exposed = ring_exposed(near, 4, link, ring_step_seconds(near, 4, rate))
        assert (exposed.forward == 0) == hidden


def test_no_candidate_is_refused_by_the_plugin() -> None:
    """What the planner proposes, hpnb runs: options are refused when a plugin is made."""
    for config, sequence in (
        (MIXTRAL, 8192),
        ({**LLAMA_8B, "num_hidden_layers": 8}, 16384),
        ({**VIT_16K, "num_hidden_layers": 8}, 16385),
    ):
        task = task_of(config, 8, 16, sequence)
        shapes = {
            (one.pp, one.cp, one.tp, one.ep, one.zero_stage, one.schedule, one.recomputation,
             one.sequence_parallel, one.context_parallel): one
            for one in candidates(task) if refusal(task, one) is None
        }  # fmt: skip
        assert len(shapes) > 100
        for layout in shapes.values():
            options = {**plugin_options(task, layout), "enable_all_optimization": False}
            hpnb.HybridParallelPlugin(**options, precision="bf16").layout_on(8)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("dp2-cp4-mb1", "multiple of 8"),
        ("dp8-ep3-mb1", "use ep=1 or 2 or 4 or 8"),
        ("dp4-pp2-ep2-dualpipe-v-mb2", "from 4 microbatches"),
        ("dp4-tp2-mb1-sp", "leave sp out"),
        ("dp8-ep8-mb3", "cannot be split"),
    ],
)
def test_what_does_not_compose_is_a_sentence(code: str, said: str) -> None:
    task = task_of(MIXTRAL, 8, 16, 4100)
    with pytest.raises(ValueError, match=said):
        make_plan(task, parse_layout_code(code))
    llama = task_of({**LLAMA_8B}, 8, 16, 4096)
    with pytest.raises(ValueError, match="0 experts"):
        make_plan(llama, parse_layout_code("dp8-ep8-mb1"))


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_v_fills_as_the_simulator_says(name: str, ranks: int) -> None:
    """Equal forward, input gradient and weight gradient, and no hops."""
    m = 4 * ranks
    timeline = make(name, 2 * ranks, m, 2).simulate(Costs(0.5, 0.5, 0.5, 0.0))
    from hpnb.theory.pipeline import pipeline_parts

    parts = pipeline_parts([{"work": 3.0}] * ranks, m, name)
    assert sum(parts.values()) == pytest.approx(timeline.makespan)
    with pytest.raises(ValueError, match="from 8 microbatches"):
        make_plan(replace(task_of(LLAMA_8B, 4, 16, 4096)), parse_layout_code(f"pp4-{name}-mb4"))
