"""What notebook 10 runs on its ranks: shapes, and an attention beside one process's. The replay is in
`context_replay.py`, its sentences in `long_contexts_words.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import hpnb
from hpnb.context_parallel import ContextParallel
from hpnb.lesson.programs.context_replay import (
    Replayed,
    context_axis,
    packed_exposed,
    predict_parts,
    replay_exposed,
)
from hpnb.lesson.programs.device_timing import Batch
from hpnb.lesson.programs.gpt2_tensor import random_values
from hpnb.lesson.programs.long_contexts_words import (
    covers_in_words,
    fewest_bytes_title,
    least_exposed_in_words,
    parts_over_card,
    ratios_beside,
    record_replay,
    reloaded_title,
    rows_title,
    source_in_words,
    touching_in_words,
    winners_in_words,
    wins_in_words,
)
from hpnb.lesson.programs.step_timing import largest_over_ranks, relative_distance
from hpnb.mesh import Axis
from hpnb.models import GPT2Size
from hpnb.precision import best_16_bit, policy
from hpnb.theory.context import Attention, BothWays

__all__ = [
    "Compared",
    "Layer",
    "Replayed",
    "compare_with_full",
    "context_axis",
    "covers_in_words",
    "fewest_bytes_title",
    "kept_size",
    "largest_gap",
    "least_exposed_in_words",
    "least_variation",
    "packed_exposed",
    "parts_over_card",
    "predict_parts",
    "random_qkv",
    "ratios_beside",
    "record_replay",
    "reloaded_distance",
    "reloaded_title",
    "replay_exposed",
    "rows_title",
    "source_in_words",
    "timed_shapes",
    "touching_in_words",
    "train_alone",
    "training_steps",
    "winners_in_words",
    "wins_in_words",
]

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_TIMED = {"cpu": (Attention(1, 8, 8, 32, 1, 4), tuple(1 << k for k in (6, 8, 10, 12))),
          "cuda": (Attention(1, 16, 16, 64, 1, 2), tuple(1 << k for k in range(10, 17)))}  # fmt: skip
_KEPT = {"cpu": (GPT2Size(64, 2, 4, 256, 509, 2048), torch.float32),
         "cuda": (GPT2Size(1024, 2, 16, 4096, 8192, 4096), torch.bfloat16)}  # fmt: skip
_STEPS = {"cpu": 14, "cuda": 30}


def timed_shapes(device: str) -> list[Attention]:
    """The attentions that are timed, one for each sequence length: small on a CPU."""
    shape, lengths = _TIMED[device]
    return [replace(shape, sequence=length) for length in lengths]


def kept_size(device: str) -> tuple[GPT2Size, torch.dtype]:
    """The GPT-2 whose activations are measured, of two blocks, and its dtype: of 16 bits on a GPU."""
    size, dtype = _KEPT[device]
    return size, dtype if device == "cpu" else policy(best_16_bit(device)).compute


def training_steps(device: str) -> int:
    """Steps of the training with right and wrong positions: fewer on a CPU."""
    return _STEPS[device]


def random_qkv(
    sequence: int, heads: int = 8, kv_heads: int = 8, head_size: int = 16
) -> tuple[torch.Tensor, ...]:
    """q (1, heads, sequence, head_size), k and v with kv_heads, in float64, the same on all ranks."""
    counts = (heads, kv_heads, kv_heads)
    return tuple(random_values(1, n, sequence, head_size, seed=i) for i, n in enumerate(counts))


@dataclass(frozen=True)
class Compared:
    """An attention of sharded tokens beside one process's: {"output" or "gradients of q, k, v": relative
    distance on the rank where it is largest}, and bytes that left this rank.
    """

    distances: dict[str, float]
    sent: BothWays


def compare_with_full(
    layer: Layer, qkv: Sequence[torch.Tensor], places: torch.Tensor, axis: Axis
) -> Compared:
    """Run `layer` on this rank's tokens, and one process's attention on all of them.

    Args:
        layer: (q, k, v) of this rank's tokens, (1, heads, s / cp, d) each, -> output of the same shape as q.
        qkv: of all tokens, equal on all ranks.
        places: (s / cp,) where this rank's tokens stand.
    """
    full = q, k, v = [part.clone().requires_grad_() for part in qkv]
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    seed = random_values(*right.shape, seed=99)
    (right * seed).sum().backward()
    local = [part[:, :, places].clone().requires_grad_() for part in qkv]
    with hpnb.record.traffic() as traffic:
        out = layer(*local)
        forward = traffic.total
        (out * seed[:, :, places]).sum().backward()
        sent = BothWays(forward, traffic.total - forward)
    grads = [part.grad for part in local if part.grad is not None]
    wanted = [part.grad[:, :, places] for part in full if part.grad is not None]
    distances = {"output": relative_distance([out], [right[:, :, places]]),
                 "gradients of q, k, v": relative_distance(grads, wanted)}  # fmt: skip
    return Compared(largest_over_ranks(distances, axis), sent)


def train_alone(batches: Sequence[Batch]) -> torch.Tensor:
    """Losses of a "laptop" GPT-2 in float64 that one process trains by SGD on these batches, on the CPU."""
    model: torch.nn.Module = hpnb.models.gpt2("laptop", dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def reloaded_distance(model: torch.nn.Module, context: ContextParallel, batch: Batch, shard: Batch) -> float:
    """How far logits of this rank's tokens are from those of one process that loads the weights of `model`, a
    "laptop" GPT-2 under context parallelism that was trained on `shard`, this rank's part of `batch`.
    """
    alone = hpnb.models.gpt2("laptop").to(hpnb.device())
    alone.load_state_dict(model.state_dict())
    places = context.shard_batch(batch)["position_ids"][0].to(hpnb.device())
    with torch.no_grad():
        right = alone(input_ids=batch["input_ids"].to(hpnb.device())).logits[:, places]
        inputs = {name: x for name, x in shard.items() if name != "labels"}
        return relative_distance([model(**inputs).logits], [right])


def least_variation(norms: Mapping[str, Sequence[Sequence[float]]], steps: int) -> float:
    """The largest over the smallest norm of row 0 in the last steps, of the run where it is least.

    `norms` are {run: for each step, the norm of each row's gradient}.
    """
    first = ([rows[0] for rows in run[-steps:]] for run in norms.values())
    return min(max(sizes) / min(sizes) for sizes in first)


def largest_gap(losses: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The largest distance between two runs' losses in a step, "most", and that step, counted from 1."""
    gaps = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return {"most": max(gaps), "step": 1 + gaps.index(max(gaps))}
