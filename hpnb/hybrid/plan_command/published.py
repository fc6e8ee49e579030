"""What others measured and published, beside its prediction: one row of each program is fitted, no other.

    for group in GROUPS:
        for row in group.compare(): ...      # name, predicted and published seconds, whether it was fitted

A program has one constant that nobody publishes: the share of the peak that its matmuls reach. `GROUPS` has
it, and the row that it was fitted to; Megatron-Core's is fitted once, for four groups. llm-foundry has a
second one, the rate of its attention, fitted to its longest sequences. All other rows are held out. Where a
source names neither microbatches nor chunks, they are the fastest that fit, as its authors would have
chosen. `LEFT_OUT` says what cannot be predicted, and why.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpnb.hybrid.plan_command import published_steps as steps
from hpnb.hybrid.plan_command.layout_code import layout_code
from hpnb.hybrid.plan_command.published_steps import PublishedStep
from hpnb.mesh import ParallelLayout
from hpnb.theory.cluster import Cluster
from hpnb.theory.datasheets import find_gpu
from hpnb.theory.plan_memory import USABLE, plan_memory
from hpnb.theory.plan_step import plan_parts
from hpnb.theory.plan_task import PlanTask, Software, refusal

LEFT_OUT = {
    "MLPerf GPT-3, torchtitan's 70B and 405B": "what converts to FP8, another in each, is not predicted",
    "torchtitan's 8B in BF16": "its H100s were limited to 500 W and had other memory than the datasheet's",
    "Mixtral in Megatron-LM's README for experts": "its layouts are published without times",
    "GPT-OSS in NeMo AutoModel": "FlexAttention over windows, and biases added expert by expert, are not "
    "predicted",
}


@dataclass(frozen=True)
class ComparedRow:
    """A row, and seconds predicted and published."""

    group: str
    name: str
    layout: ParallelLayout
    predicted: float
    published: float
    fitted: bool

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


@dataclass(frozen=True)
class PublishedProgram:
    """Rows of one program on one kind of GPU.

    Attributes:
        share: of the peak, what matmuls reach; that of the group `share_of`, if that is named.
        fitted: the row that the `constant`, "share" or "attention_share", was fitted to; or none.
    """

    name: str
    source: str
    gpu: str
    software: Software
    share: float
    fitted: str | None
    rows: tuple[PublishedStep, ...]
    constant: str = "share"
    share_of: str = ""

    @property
    def constants(self) -> str:
        """Its constants in words, and where they are from."""
        share = f"share {self.share:.3f}, {f'of {self.share_of}' if self.share_of else 'fitted'}"
        if self.constant == "share":
            return share
        return f"{share}; attention at {self.software.attention_share:.3f} of that, fitted"

    def cluster(self, gpus: int) -> Cluster:
        return replace(find_gpu(self.gpu).cluster(gpus), share=self.share)

    def compare(self) -> list[ComparedRow]:
        return [self._compare(row) for row in self.rows]

    def _compare(self, row: PublishedStep) -> ComparedRow:
        task = PlanTask(row.model, self.cluster(row.layout.world_size), row.batch, row.sequence,
                        software=self.software)  # fmt: skip
        step, layout = min(_steps(task, row), key=lambda pair: pair[0])
        return ComparedRow(self.name, row.name, layout, step, row.seconds, row.name == self.fitted)


def _steps(task: PlanTask, row: PublishedStep) -> Iterator[tuple[float, ParallelLayout]]:
    """(seconds, layout) of all microbatches and chunks that the source leaves open, of those that fit."""
    samples, blocks = row.batch // row.layout.dp, row.model.blocks // row.layout.pp
    sizes = [n for n in range(1, samples + 1) if samples % n == 0]
    layouts = [
        replace(
            row.layout, microbatch_size=b, chunks=v, schedule="interleaved" if v > 1 else row.layout.schedule
        )
        for b in ([row.microbatch_size] if row.microbatch_size else sizes)
        for v in ([row.chunks] if row.chunks else range(1, blocks + 1))
    ]
    able = [layout for layout in layouts if refusal(task, layout) is None]
    limit = USABLE * task.cluster.memory
    fitting = [layout for layout in able if sum(plan_memory(task, layout).values()) <= limit]
    for layout in fitting or able:
        yield sum(plan_parts(task, layout).values()), layout


_LLAMA_SOURCE = (
    "arXiv 2407.21783, table 4; one sample a microbatch. Attention's FLOPs are counted without a mask, as in "
    "arXiv 2204.02311, whose utilization it names. Some versions print dp 4 for the third row, but only with "
    "dp 8 there are 16,384 GPUs, and as many tokens as in the others. Chunks are not named, and with 4 "
    "instead of 8 the errors are +4 %, +7 % and +1 %"
)
_V2_SOURCE = (
    "arXiv 2405.04434, sections 3.1 and 3.2.3: 172,800 GPU hours for 10^12 tokens, in BF16, with a "
    "zero-bubble pipeline, and with at most 3 ranks for a token. The number of GPUs is not named: 1,024 are "
    "assumed, and from 256 to 2,048 the error is -17 % to -8 %. Shared experts overlap messages, which is "
    "not predicted"
)
_V3_SOURCE = (
    "arXiv 2412.19437, section 3 and table 1: 180,000 GPU hours for 10^12 tokens, in FP8, with DualPipe, and "
    "with at most 4 nodes for a token. FP8 is predicted as twice the rate of BF16, and converting to it "
    "costs nothing; at the rate of BF16 the step takes 26.2 s. Experts are evenly loaded. The stages are not "
    "named: equal numbers of blocks are assumed, so that the ends, with two outputs each, take 16 % longer "
    "than the others, and with equal times the step would take 17.8 s. As DualPipe-V, where one rank has "
    "both ends for all microbatches, it would take 24.3 s. Memory is not compared, since activations in FP8 "
    "are not predicted"
)
_CORE_SHARE, _FOUNDRY_SHARE = 0.508, 0.549
GROUPS = (
    PublishedProgram(
        "Megatron-LM 2021", "arXiv 2104.04473, table 1; microbatches of examples/sc21/run_table_1.sh", "a100",
        steps.MEGATRON_LM, 0.71, "1.7B", tuple(steps.megatron_rows()),
    ),
    PublishedProgram(
        "Megatron-LM 2022", "arXiv 2205.05198, tables 3 and 5; its section 6.3 for 2,240 GPUs", "a100",
        steps.MEGATRON_LM, 0.786, "22B, full", tuple(steps.korthikanti_rows()),
    ),
    PublishedProgram(
        "Megatron-Core", "README of NVIDIA/Megatron-LM, July 2024, images/model_table.png", "h100",
        steps.MEGATRON_CORE_2024, _CORE_SHARE, "1.7B", tuple(steps.core_rows()),
    ),
    PublishedProgram(
        "Megatron-Core, one batch", "the same, images/strong_scaling.png, read from the picture", "h100",
        steps.MEGATRON_CORE_2024, _CORE_SHARE, None, tuple(steps.strong_rows()), share_of="Megatron-Core",
    ),
    PublishedProgram(
        "Llama 3", _LLAMA_SOURCE, "h100",
        replace(steps.MEGATRON_CORE_2024, gathers_context=True), _CORE_SHARE, None, tuple(steps.llama_rows()),
        share_of="Megatron-Core",
    ),
    PublishedProgram(
        "llm-foundry", "README of mosaicml/llm-foundry/scripts/train/benchmarking, BF16, sequences of 2,048",
        "h100", steps.LLM_FOUNDRY, _FOUNDRY_SHARE, "7b on 8",
        tuple(
            steps.foundry_row(f"{name} on {gpus}", name, gpus, 2048, size, count, recomputed, tokens)
            for name, gpus, size, count, recomputed, tokens in steps.FOUNDRY
        ),
    ),
    PublishedProgram(
        "llm-foundry, other lengths",
        "the same, 8 GPUs. 30b at 8,192 tokens, and 760m on 8 GPUs above, are slow beside their neighbours "
        "in the source", "h100", steps.LLM_FOUNDRY, _FOUNDRY_SHARE, "7b, 65,536 tokens",
        tuple(
            steps.foundry_row(f"{name}, {length:,} tokens", name, 8, length, size, count, recomputed, tokens)
            for name, length, size, count, recomputed, tokens in steps.FOUNDRY_LENGTHS
        ),
        "attention_share", "llm-foundry",
    ),
    PublishedProgram(
        "NeMo AutoModel", "docs/performance-summary.md of NVIDIA-NeMo/Automodel, October 2025, BF16", "h100",
        steps.AUTOMODEL, _CORE_SHARE, None, tuple(steps.automodel_rows()), share_of="Megatron-Core",
    ),
    PublishedProgram(
        "DeepSeek-V2", _V2_SOURCE, "h800",
        steps.HAI_LLM, _CORE_SHARE, None, (steps.deepseek_v2_row(1024),), share_of="Megatron-Core",
    ),
    PublishedProgram(
        "DeepSeek-V3", _V3_SOURCE, "h800",
        steps.HAI_LLM_FP8, _CORE_SHARE, None, (steps.deepseek_v3_row(),), share_of="Megatron-Core",
    ),
)  # fmt: skip


def summarize(rows: list[ComparedRow]) -> str:
    """Mean and worst error of the rows that were held out."""
    errors = [abs(row.ratio - 1) for row in rows if not row.fitted]
    return f"{len(errors)} held out: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}"


def published_table() -> str:
    """All rows in Markdown, as `hpnb/bench/results/PUBLISHED.md` has them."""
    lines = [
        "# Predicted steps beside published ones", "",
        "`python -m hpnb plan --published` prints this file, and a test compares them. One row of each",
        "program is fitted, by the share of the peak that matmuls reach, and one of llm-foundry by what its",
        "attention reaches of that; all others are held out. Layouts without a star are the source's; with",
        "one, microbatches or chunks are the fastest that fit.", "",
    ]  # fmt: skip
    for group in GROUPS:
        compared = group.compare()
        lines += [f"## {group.name}: {summarize(compared)}", "",
                  f"{group.source}. {group.gpu}, {group.constants}.", "",
                  "| run | layout | predicted (s) | published (s) | error | |",
                  "|---|---|---:|---:|---:|---|"]  # fmt: skip
        for source, row in zip(group.rows, compared, strict=True):
            star = "" if source.microbatch_size and source.chunks else " *"
            lines.append(
                f"| {row.name} | {layout_code(row.layout)}{star} | {row.predicted:.3f} | {row.published:.3f} "
                f"| {row.ratio - 1:+.1%} | {'fitted' if row.fitted else 'held out'} |"
            )
        lines.append("")
    lines += ["## Left out", "", *(f"- {what}: {why}." for what, why in LEFT_OUT.items())]
    return "\n".join(lines) + "\n"
