"""A DualPipe-V step of a mixture of experts on 4 ranks (pp 2 x ep 2), and what is predicted of it.

The prediction knows the median time of each stage's F, I and W and the formula of the bytes: even routing,
computing that falls evenly between messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import hpnb
from hpnb.pipeline_parallel import Costs
from hpnb.pipeline_parallel.overlapped_pairs import (
    ExposedTime,
    even_segments,
    exposed_time,
    overlapped_pairs,
)
from hpnb.pipeline_parallel.schedule import Schedule
from hpnb.theory.experts import experts_sent
from hpnb.theory.links import Link

RANKS, PIPELINE, EXPERT_RANKS, CHOSEN = 4, 2, 2, 2


@dataclass(frozen=True)
class Size:
    """Of the model and of a step: tokens are those of a sequence, samples those of a rank."""

    hidden: int = 128
    layers: int = 8
    experts: int = 4
    tokens: int = 64
    samples: int = 16
    microbatches: int = 8
    precision: str = "fp32"

    @property
    def message_bytes(self) -> float:
        """Bytes that leave a rank with one dispatch, or combine, of a microbatch where routing is even."""
        tokens, width = self.samples // self.microbatches * self.tokens, 4 if self.precision == "fp32" else 2
        return experts_sent(tokens, self.hidden, EXPERT_RANKS, CHOSEN, bytes_per_value=width) / 4


@dataclass(frozen=True)
class Exposed:
    """A step one action after the other, and with forwards and backwards in pairs."""

    source: str
    apart: ExposedTime
    paired: ExposedTime


def boost_mixtral(size: Size, implementation: str) -> tuple[Any, dict[str, torch.Tensor], Schedule]:
    """A model of that size on this rank's stages, a batch for it, and the schedule."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=size.hidden, intermediate_size=2 * size.hidden, num_attention_heads=4,
        num_hidden_layers=size.layers, num_key_value_heads=4, num_local_experts=size.experts,
        num_experts_per_tok=CHOSEN, max_position_embeddings=size.tokens,
    )  # fmt: skip
    plugin = hpnb.HybridParallelPlugin(
        precision=size.precision, pp_size=PIPELINE, ep_size=EXPERT_RANKS, pp_style="dualpipe-v",
        num_microbatches=size.microbatches,
    )  # fmt: skip
    ids = torch.randint(256, (size.samples, size.tokens))  # before boost, where all ranks draw the same
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    boosted, *_ = hpnb.Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), 0.01))
    return boosted, {"input_ids": ids, "labels": ids}, plugin.schedule(size.microbatches)


def predict(schedule: Schedule, costs: Costs, link: Link, size: Size) -> Exposed:
    """What a model with even routing expects of a step.

    Args:
        costs: seconds of each stage's F, I and W without messages.
    """
    segments = even_segments(schedule, costs, size.layers // schedule.stages, size.message_bytes)

    def seconds(sent: float) -> float:
        return link.latency + sent / link.bandwidth

    none = (frozenset[int](),) * schedule.ranks
    return Exposed(
        "predicted",
        exposed_time(schedule, none, segments, seconds, link.latency),
        exposed_time(schedule, overlapped_pairs(schedule), segments, seconds, link.latency),
    )


def table(results: list[Exposed], link: Link, size: Size) -> str:
    """A line for each way of each result; a rank's messages and exposed time are those of the rank that
    exposes most."""
    lines = [
        f"dualpipe-v, pp {PIPELINE} x ep {EXPERT_RANKS}, {size.microbatches} microbatches, {size.layers} "
        f"layers with {size.experts} experts, link {link.bandwidth / 1e9:.3g} GB/s, "
        f"{link.latency * 1e6:.3g} us",
        f"{'':40}{'step':>12}{'messages':>12}{'exposed':>12}",
    ]
    for result in results:
        for name, one in (("one after the other", result.apart), ("in pairs", result.paired)):
            rank = max(range(len(one.exposed)), key=one.exposed.__getitem__)
            cells = "".join(f"{s * 1e3:9.1f} ms" for s in (one.makespan, one.sent[rank], one.exposed[rank]))
            lines.append(f"{result.source + ', ' + name:40}{cells}")
    lines.append("messages and exposed: of the rank that exposes most")
    return "\n".join(lines)
