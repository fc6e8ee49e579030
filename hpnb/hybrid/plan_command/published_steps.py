"""Steps that others measured and published, with the model, the layout and the program of each.

Where a source names neither microbatches nor chunks, `PublishedStep` has None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpnb.hybrid.plan_command.read_model import shape_of_gpt2
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.plan_task import Software
from hpnb.theory.published_runs import MEGATRON, MEGATRON_CORE


@dataclass(frozen=True)
class PublishedStep:
    """One published step, in seconds; microbatch_size and chunks are None where the source does not say."""

    name: str
    model: ModelShape
    sequence: int
    batch: int
    layout: ParallelLayout
    seconds: float
    microbatch_size: int | None = None
    chunks: int | None = None


def gpt_shape(
    name: str, hidden: int, layers: int, heads: int, vocab_size: int, sequence: int, tied: bool = True
) -> ModelShape:
    """A GPT whose MLP has four times the hidden size, with learned positions."""
    shape = shape_of_gpt2(name, GPT2Size(hidden, layers, heads, 4 * hidden, vocab_size, sequence))
    return shape if tied else replace(shape, head_parameters=vocab_size * hidden)


# --- Megatron-LM on A100s ----------------------------------------------------------------------------

# Scores are written to memory and dropped out, and gradients are sent after the backward.
MEGATRON_LM = Software(
    fused=False, overlap=False, loss_bytes=52, action_seconds=0.0, shards_norms=True, scatters_hops=True
)


def megatron_rows() -> Iterator[PublishedStep]:
    for known in MEGATRON:
        gpt, size = known.run, known.plan.microbatch_size
        yield PublishedStep(
            known.name, gpt_shape(known.name, gpt.hidden, gpt.layers, gpt.heads, 51200, 2048),
            2048, gpt.batch,
            ParallelLayout(known.plan.dp, known.pp, known.tp, recomputation="full"),
            gpt.flops / known.tflops / 1e12 / known.gpus, size, known.plan.chunks,
        )  # fmt: skip


def korthikanti_rows() -> Iterator[PublishedStep]:
    # Seconds of table 5; calculon-ai/calculon (calculon/llm/validation.py, seqsel_tab5) has the same eight.
    for name, hidden, layers, heads, pp, dp, batch, size, chunks, full, selective in (
        ("22B", 6144, 48, 64, 1, 1, 4, 4, 1, 1.42, 1.10),
        ("175B", 12288, 96, 96, 8, 1, 64, 1, 3, 18.13, 13.75),
        ("530B", 20480, 105, 128, 35, 1, 280, 1, 3, 49.05, 37.83),
        ("1T", 25600, 128, 160, 64, 1, 512, 1, 1, 94.42, 71.49),
        ("530B on 2,240", 20480, 105, 128, 35, 8, 2240, 1, 3, None, 39.15),
    ):
        model = gpt_shape(name, hidden, layers, heads, 51200, 2048)
        one = ParallelLayout(dp, pp, 8, recomputation="full")
        if full is not None:
            yield PublishedStep(f"{name}, full", model, 2048, batch, one, full, size, chunks)
        other = replace(one, recomputation="attention", sequence_parallel=True)
        yield PublishedStep(f"{name}, selective", model, 2048, batch, other, selective, size, chunks)


# --- H100s ------------------------------------------------------------------------------------------

# Of that release: arguments.py has bf16 accumulate and reduce float32 gradients; cross_entropy.py, counted,
# moves 52 bytes an output; the README says --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap.
MEGATRON_CORE_2024 = Software(
    overlap_weights=True,
    tp_overlap=True,
    gradient_bytes=4,
    loss_bytes=52,
    action_seconds=0.0,
    shards_norms=True,
    fuses_messages=True,
    scatters_hops=True,
)
_STRONG = (  # GPUs, PFLOP/s of all: centres of the dots. The text has 47 % and 42 % of the peak for the ends.
    (96, 44.5), (144, 66.9), (288, 133.1), (576, 263.4), (1152, 517.8), (2304, 1004.9), (3072, 1310.0),
    (4608, 1912.5),
)  # fmt: skip


def core_rows() -> Iterator[PublishedStep]:
    for known in MEGATRON_CORE:
        gpt = known.run
        model = gpt_shape(known.name, gpt.hidden, gpt.layers, gpt.heads, 131072, 4096, tied=False)
        layout = ParallelLayout(48, known.pp, known.tp, zero_stage=1, sequence_parallel=known.tp > 1)
        seconds = gpt.flops / known.tflops / 1e12 / known.gpus
        yield PublishedStep(known.name, model, 4096, gpt.batch, layout, seconds)


def strong_rows() -> Iterator[PublishedStep]:
    gpt = next(known.run for known in MEGATRON_CORE if known.name == "177B")
    model = gpt_shape("177B", gpt.hidden, gpt.layers, gpt.heads, 131072, 4096, tied=False)
    for gpus, petaflops in _STRONG:
        layout = ParallelLayout(gpus // 48, 6, 8, zero_stage=1, sequence_parallel=True)
        yield PublishedStep(f"177B on {gpus:,}", model, 4096, 1152, layout, gpt.flops / petaflops / 1e15)


def llama_rows() -> Iterator[PublishedStep]:
    # 126 blocks on 16 ranks, one less on the first and on the last, which have embedding and head instead. So
    # the ranks that the others wait for have 8 blocks and nothing else, as if there were 128.
    model = ModelShape("llama-3-405b", 16384, 126, 128, 8, 128, 53248, 128256, 128256 * 16384, 128256 * 16384,
                       131072, gated=True)  # fmt: skip
    paced = replace(model, layers=128, outputs=1)
    for gpus, cp, dp, sequence, tflops in (
        (8192, 1, 64, 8192, 430), (16384, 1, 128, 8192, 400), (16384, 16, 8, 131072, 380),
    ):  # fmt: skip
        layout = ParallelLayout(dp, 16, 8, cp=cp, zero_stage=1, sequence_parallel=True)
        batch = 2**24 // sequence  # 16 M tokens
        seconds = model.training_flops(batch, sequence) / tflops / 1e12 / gpus
        name = f"405B on {gpus:,}" + (f", {sequence:,} tokens" if cp > 1 else "")
        yield PublishedStep(name, paced, sequence, batch, layout, seconds, 1)


_MPT = {  # hidden size, blocks, heads: scripts/train/yamls/pretrain
    "70b": (8192, 80, 64), "30b": (7168, 48, 56), "13b": (5120, 40, 40), "7b": (4096, 32, 32),
    "3b": (2560, 32, 20), "1b": (2048, 24, 16), "760m": (1536, 24, 12),
}  # fmt: skip
# Of scripts/train/benchmarking in llm-foundry's pull request 543: attention is Triton's of 2023, which
# reaches less of the peak than later kernels, and PyTorch 2.1 recomputes without reentrance. FSDP reduces
# every microbatch: ddp_sync_context of Composer 0.16 does nothing for it.
LLM_FOUNDRY = Software(loss_bytes=40, attention_share=0.344, stops_early=True, reduces_every_microbatch=True)
FOUNDRY = (  # model, GPUs, samples of a microbatch, microbatches, recomputed, tokens/s
    ("70b", 64, 8, 4, True, 66523), ("70b", 32, 2, 16, True, 28242), ("30b", 32, 14, 3, True, 73860),
    ("30b", 16, 10, 3, True, 36209), ("30b", 8, 3, 21, True, 16022), ("13b", 64, 2, 1, False, 307209),
    ("13b", 32, 2, 1, False, 153960), ("13b", 16, 2, 1, False, 76280), ("13b", 8, 2, 1, False, 38336),
    ("7b", 8, 6, 1, False, 85144), ("3b", 64, 6, 3, False, 1441663), ("3b", 32, 6, 3, False, 736701),
    ("3b", 16, 10, 3, False, 386285), ("1b", 64, 20, 1, False, 2841754), ("1b", 32, 20, 1, False, 1444183),
    ("1b", 16, 20, 1, False, 736596), ("1b", 8, 14, 1, False, 363645), ("760m", 32, 24, 1, False, 2175091),
    ("760m", 16, 24, 1, False, 1096819), ("760m", 8, 24, 2, False, 505177),
)  # fmt: skip
FOUNDRY_LENGTHS = (  # model, tokens of a sample, samples of a microbatch, microbatches, recomputed, tokens/s
    ("30b", 8192, 1, 21, True, 11072), ("30b", 4096, 1, 21, True, 14419), ("30b", 1024, 6, 21, True, 16672),
    ("13b", 32768, 1, 3, True, 15812), ("13b", 16384, 3, 3, True, 23881), ("13b", 4096, 10, 3, True, 37740),
    ("13b", 1024, 40, 3, True, 44019), ("7b", 65536, 1, 2, True, 15654), ("7b", 32768, 2, 2, True, 26550),
    ("7b", 8192, 8, 2, True, 55481), ("7b", 4096, 16, 2, True, 68893), ("7b", 1024, 64, 2, True, 81628),
    ("3b", 65536, 1, 2, True, 26099), ("3b", 32768, 3, 6, True, 46984), ("3b", 16384, 1, 6, False, 89223),
    ("3b", 8192, 3, 6, False, 132626), ("3b", 4096, 5, 6, False, 167712), ("3b", 1024, 20, 6, False, 216369),
    ("3b", 512, 40, 6, False, 223721), ("1b", 65536, 1, 2, True, 44050), ("1b", 32768, 1, 4, False, 96203),
    ("1b", 16384, 2, 4, False, 157194), ("1b", 8192, 3, 4, False, 233256), ("1b", 4096, 7, 4, False, 308282),
    ("1b", 1024, 18, 4, False, 391287), ("1b", 512, 56, 4, False, 418201),
    ("760m", 32768, 1, 2, False, 130333), ("760m", 16384, 3, 2, False, 222521),
    ("760m", 8192, 6, 2, False, 334602), ("760m", 4096, 12, 2, False, 443674),
    ("760m", 1024, 48, 2, False, 628648), ("760m", 512, 96, 2, False, 669998),
)  # fmt: skip


def foundry_row(
    row: str, name: str, gpus: int, sequence: int, size: int, count: int, recomputed: bool, tokens: int
) -> PublishedStep:
    hidden, layers, heads = _MPT[name]
    model = gpt_shape(name, hidden, layers, heads, 50368, sequence)
    layout = ParallelLayout(gpus, zero_stage=3, recomputation="full" if recomputed else False)
    batch = gpus * size * count
    return PublishedStep(row, model, sequence, batch, layout, batch * sequence / tokens, size, 1)


# Of examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml: fake_balanced_gate and enable_deepep. That gate
# sends token i to experts 8 i to 8 i + 7 (components/moe/layers.py), which all lie on one of the 8 ranks, and
# DeepEP sends a token once to a rank. Permutations are fused, and routing weights multiply inner values.
AUTOMODEL = Software(loss_bytes=40, fuses_messages=True, token_copies=1.0, fuses_permutations=True)


def automodel_rows() -> Iterator[PublishedStep]:
    # Layout and recomputation are the file's. Dense weights are sharded as in ZeRO 3; of experts there is one
    # copy.
    qwen = ModelShape("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 768, 151936, 151936 * 2048, 151936 * 2048, 4096,
                      gated=True, qk_norm=True, experts=128, chosen=8)  # fmt: skip
    layout = ParallelLayout(8, ep=8, zero_stage=3, recomputation="full")
    yield PublishedStep("Qwen3 30B on 8", qwen, 4096, 512, layout, 21.773, 4, 1)


# Of arXiv 2405.04434, section 3.1: BF16, and a token goes to 3 ranks at most. Float32 gradients, and norms
# and up projections that are recomputed, are those of V3's report. Fused permutations, and weights that are
# gathered during a forward, are assumed.
HAI_LLM = Software(
    overlap_weights=True,
    gradient_bytes=4,
    loss_bytes=52,
    action_seconds=0.0,
    fuses_messages=True,
    token_copies=3.0,
    fuses_permutations=True,
    split_backward=1.0,
    recomputes_latent=True,
)
# Of arXiv 2412.19437, section 3: matmuls in FP8 except attention, outputs and routers; a token goes to 4
# nodes at most, dispatched in FP8 with a float32 scale for each 128 values, by 20 of 132 SMs.
HAI_LLM_FP8 = replace(
    HAI_LLM,
    token_copies=4.0,
    dispatch_bytes=1 + 4 / 128,
    fp8_matmuls=True,
    message_sms=20 / 132,
    bidirectional=True,
)
DEEPSEEK_V2 = ModelShape(
    "deepseek-v2", 5120, 60, 128, 128, 192, 1536, 102400, 102400 * 5120, 102400 * 5120, 163840, gated=True,
    experts=160, chosen=6, shared_mlp=2 * 1536, wide_router=True, dense_layers=1, dense_mlp=12288,
    kv_lora_rank=512, q_lora_rank=1536, rope_head_size=64, value_head_size=128,
)  # fmt: skip
DEEPSEEK_V3 = ModelShape(
    "deepseek-v3", 7168, 61, 128, 128, 192, 2048, 129280, 129280 * 7168, 129280 * 7168, 163840, gated=True,
    experts=256, chosen=8, shared_mlp=2048, wide_router=True, dense_layers=3, dense_mlp=18432,
    kv_lora_rank=512, q_lora_rank=1536, rope_head_size=64, value_head_size=128,
)  # fmt: skip


def deepseek_v2_row(gpus: int) -> PublishedStep:
    """9,216 samples of 4,096 tokens, at 172,800 GPU hours for 10^12 tokens on as many GPUs as you say."""
    layout = ParallelLayout(gpus // 16, 16, ep=8, zero_stage=1, schedule="zb-h1", order=("pp", "dp", "tp"))
    seconds = 172.8e3 * 3600 * 9216 * 4096 / 1e12 / gpus
    return PublishedStep(f"236B on {gpus:,}", DEEPSEEK_V2, 4096, 9216, layout, seconds, 1, 1)


def deepseek_v3_row() -> PublishedStep:
    """15,360 samples of 4,096 tokens on 2,048 GPUs, which took 180,000 GPU hours for 10^12 tokens.

    A module predicts the token after the next (section 4.2). Bubbles and messages of DualPipe are predicted
    as those of DualPipe-V."""
    trained = replace(DEEPSEEK_V3, mtp_modules=1)
    layout = ParallelLayout(128, 16, ep=64, zero_stage=1, schedule="dualpipe-v", order=("pp", "dp", "tp"))
    batch, sequence, gpus = 15360, 4096, 2048
    seconds = 180e3 * 3600 * batch * sequence / 1e12 / gpus
    return PublishedStep("671B on 2,048", trained, sequence, batch, layout, seconds, 1, 1)
