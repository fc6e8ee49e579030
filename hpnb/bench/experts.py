"""How much of the experts' all-to-all stays exposed in a DualPipe-V step: predicted, and replayed.

    python -m hpnb.bench experts --bandwidth 0.2

A Mixtral on 4 ranks (pp 2 x ep 2) trains one step. On a CPU these ranks share cores, so nothing about time is
measured on the clock. Each rank's CPU time between its messages is taken, and the step is replayed with the
bytes that were counted and with the link that you name. The prediction knows the median time of each stage's
F, I and W and the formula of the bytes: even routing, computing that falls evenly between messages.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Exposed:
    """A step one action after the other, and with forwards and backwards in pairs."""

    source: str
    apart: ExposedTime
    paired: ExposedTime


def run(bandwidth: float, latency: float, hidden: int, layers: int, microbatches: int) -> None:
    """Train, predict and replay on a link of so many GB/s and microseconds; print the table."""
    compare(Link(latency * 1e-6, bandwidth * 1e9), Size(hidden, layers, microbatches=microbatches))


def compare(link: Link, size: Size) -> list[Exposed]:
    results = hpnb.launch(_measure, link, size, ranks=RANKS, device="cpu", timeout=900.0)[0]
    print(table(results, link, size))
    return results


def table(results: list[Exposed], link: Link, size: Size) -> str:
    lines = [
        f"dualpipe-v, pp {PIPELINE} x ep {EXPERT_RANKS}, {size.microbatches} microbatches, {size.layers} "
        f"layers with {size.experts} experts, link {link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} us",
        f"{'':40}{'step':>10}{'messages':>12}{'exposed':>12}",
    ]
    for result in results:
        for name, one in (("one after the other", result.apart), ("in pairs", result.paired)):
            rank = max(range(len(one.exposed)), key=one.exposed.__getitem__)
            lines.append(
                f"{result.source + ', ' + name:40}{one.makespan * 1e3:7.0f} ms{one.sent[rank] * 1e3:9.0f} ms"
                f"{one.exposed[rank] * 1e3:9.0f} ms"
            )
    lines.append("messages and exposed: of the rank that exposes most")
    lines.append("replayed from measured CPU time: no message was timed")
    return "\n".join(lines)


def _measure(link: Link, size: Size) -> list[Exposed]:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=size.hidden, intermediate_size=2 * size.hidden, num_attention_heads=4,
        num_hidden_layers=size.layers, num_key_value_heads=4, num_local_experts=size.experts,
        num_experts_per_tok=CHOSEN, max_position_embeddings=size.tokens,
    )  # fmt: skip
    plugin = hpnb.HybridParallelPlugin(
        precision="fp32", pp_size=PIPELINE, ep_size=EXPERT_RANKS, pp_style="dualpipe-v",
        num_microbatches=size.microbatches,
    )  # fmt: skip
    ids = torch.randint(256, (size.samples, size.tokens))  # before boost, where all ranks draw the same
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    boosted, *_ = hpnb.Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), 0.01))
    for _ in range(2):  # the first step learns shapes
        step = boosted.run({"input_ids": ids, "labels": ids}, None, trains=True, record=True)
    replayed = Exposed(
        "replayed",
        step.exposed_time(link, overlapped=False),
        step.exposed_time(link, overlapped=True),
    )
    schedule = plugin.schedule(size.microbatches)
    costs = Costs.measured(step.timeline)
    tokens = size.samples // size.microbatches * size.tokens
    nbytes = experts_sent(tokens, size.hidden, EXPERT_RANKS, CHOSEN, bytes_per_value=4) / 4
    segments = even_segments(schedule, costs, size.layers // schedule.stages, nbytes)

    def seconds(sent: float) -> float:
        return link.latency + sent / link.bandwidth

    none = (frozenset[int](),) * schedule.ranks
    predicted = Exposed(
        "predicted",
        exposed_time(schedule, none, segments, seconds, link.latency),
        exposed_time(schedule, overlapped_pairs(schedule), segments, seconds, link.latency),
    )
    return [predicted, replayed]
