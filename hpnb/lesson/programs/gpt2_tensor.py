"""What notebook 07 runs on its ranks: an attention of heads, sharded tokens, bytes sent, recomputed FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import hpnb
from hpnb import comm, theory
from hpnb.hybrid import recompute
from hpnb.lesson.programs import vit_tensor
from hpnb.lesson.programs.device_timing import all_ranks, random_tokens, timing_gpt2
from hpnb.lesson.programs.layer_times import ranges_overlap
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.mesh import Axis
from hpnb.models import GPT2Size
from hpnb.models import gpt2 as build_gpt2
from hpnb.tensor_parallel import parallelize

Layer = Callable[..., torch.Tensor]


def cpu_ranks(pool: hpnb.Ranks, ranks: int = 4) -> hpnb.Ranks:
    """So many ranks on the CPU: `pool` if it is that, and new ones otherwise."""
    right = pool.choice.device == "cpu" and pool.size == ranks
    return pool if right else hpnb.Ranks(ranks, device="cpu")


def nearer_in_words(fullest: float, formula: float, repeats: Mapping[str, Sequence[float]]) -> str:
    """For prose: whether the fullest rank over the mean is nearer to the formula or to 1; where the repeats
    overlap, {heads: seconds}, the run decides neither.
    """
    if any(ranges_overlap(a, b) for a, b in combinations(repeats.values(), 2)):
        return "Here the repeats overlap, so this run doesn't decide whether one more head costs time"
    if abs(fullest - formula) <= abs(fullest - 1):
        return "This run is nearer to the formula than to 1"
    return "This run is nearer to 1: the time of kernels doesn't follow their FLOPs here"


def fullest_range(split: Sequence[int], repeats: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """The least and the most that the fullest rank over the mean can be, with any repeats of heads."""
    most, low, high = max(split), 0.0, 0.0
    for heads in split:
        others, fullest = repeats[f"{heads} heads"], repeats[f"{most} heads"]
        low += 1.0 if heads == most else max(others) / min(fullest)
        high += 1.0 if heads == most else min(others) / max(fullest)
    return len(split) / low, len(split) / high


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Float64 values that are the same on all ranks, on this rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(hpnb.device())


def split_heads(qkv: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """(..., s, 3 w), which is q | k | v of so many heads -> three of (..., heads, s, w / heads)."""
    return tuple(part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in qkv.chunk(3, -1))


def attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal attention of (..., s, 3 w), which is q | k | v of so many heads -> (..., s, w)."""
    q, k, v = split_heads(qkv, heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (..., heads, s, w / heads)
    return y.transpose(-3, -2).flatten(-2)


def compare_with_serial(
    layer: Layer, x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, heads: int, axis: Axis
) -> tuple[float, float]:
    """(the output's or the input gradient's distance to one process's, bytes sent both ways).

    `layer` is called with x (s/t, h), qkv (h, 3 h), out (h, h), heads and axis; `x` has all tokens, (s, h).
    """
    full = x.clone().requires_grad_()
    right = attention(full @ qkv, heads) @ out
    weigh = random_values(*right.shape, seed=99)
    (right * weigh).sum().backward()
    assert full.grad is not None
    local, wanted, seed, grad = (comm.split(t, axis, 0) for t in (x, right.detach(), weigh, full.grad))
    local = local.clone().requires_grad_()
    with hpnb.record.traffic() as traffic:
        z = layer(local, qkv, out, heads, axis)
        (z * seed).sum().backward()
    assert local.grad is not None
    distance = max(relative_distance([z], [wanted]), relative_distance([local.grad], [grad]))
    off = torch.tensor(distance, device=x.device)
    dist.all_reduce(off, dist.ReduceOp.MAX, axis.group)
    return float(off), traffic.total


def compare_attentions(layers: Sequence[Layer]) -> dict[str, tuple[float, float]]:
    """{layer's name: what `compare_with_serial` says of it}, for 64 tokens and 24 heads of 8, in float64."""
    heads, h = 24, 192
    shapes = (64, h), (h, 3 * h), (h, h)
    x, qkv, out = (random_values(*shape, seed=sum(shape)) / h**0.5 for shape in shapes)
    axis = all_ranks("tp")
    return {layer.__name__: compare_with_serial(layer, x, qkv, out, heads, axis) for layer in layers}


def attention_bytes(way: str, tokens: int, hidden: int, ranks: int, bytes_per_value: int) -> float:
    """Bytes that leave a rank in forward and backward of an attention: "megatron", "ulysses" or "ring", which
    sends keys and values again in the backward.
    """
    names = {name.lower(): name for name in theory.SEQUENCE_WAYS}
    sent = theory.sequence_bytes(names[way], tokens, hidden, ranks, bytes_per_value)
    return 1.5 * sent if way == "ring" else sent


def least_and_most(counted: Mapping[str, float]) -> str:
    """A title: which of "megatron", "ulysses" and "ring" send the fewest and which the most bytes."""
    names = {"megatron": "Megatron's method", "ulysses": "Ulysses", "ring": "the ring"}
    least, most = (
        " and ".join(names[way] for way, sent in counted.items() if sent == pick(counted.values()))
        for pick in (min, max)
    )
    return f"Fewest bytes of activations by {least}, most by {most}"


def compare_gpt2(ids: torch.Tensor) -> dict[str, float]:
    """Distances of a sharded GPT-2 from one process's: gradients, and weights after a step; float64.

    The "laptop" size, whose heads and vocabulary do not divide. `ids` (b, s) are equal on all ranks.
    """
    ids = ids.to(hpnb.device())
    serial, sharded = (build_gpt2("laptop", dtype=torch.float64, device=hpnb.device()) for _ in range(2))
    parallelize(sharded, all_ranks("tp"))
    logits = serial(input_ids=ids).logits[:, :-1]  # position i predicts token i + 1
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    sharded(input_ids=ids, labels=ids).loss.backward()
    for model in (serial, sharded):
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    return vit_tensor.distances_from(serial, sharded)


def bytes_around_blocks(size: GPT2Size, batch: int, dtype: torch.dtype) -> float:
    """Bytes that leave this rank in forward and backward for what lies around the blocks: twice a GPT-2 of
    one block less one of two, so what blocks send cancels.
    """
    inputs, sent = random_tokens(size, batch), []
    for layers in (1, 2):
        model = timing_gpt2(replace(size, layers=layers), dtype)
        parallelize(model, all_ranks("tp"))
        with hpnb.record.traffic() as traffic:
            model(**inputs).loss.backward()
        sent.append(traffic.total)
    return 2 * sent[0] - sent[1]


def recompute_shares(size: GPT2Size, rows: int) -> dict[str, tuple[float, float]]:
    """{what is recomputed: (its share of a step's FLOPs by the formula, as counted)}, of blocks alone.

    On the CPU, where attention with dropout is product by product and every product is counted. Rank 0 counts
    for all: other ranks return nothing.
    """
    if hpnb.rank() > 0:
        return {}
    block, flops = size.block(rows), {}
    for what in ("", "attention", "full"):
        counts = []
        for layers in (1, 2):
            model = build_gpt2(replace(size, layers=layers, vocab_size=64), dropout=0.1, device="cpu")
            recompute.enable_recomputation(model, what or False)  # type: ignore[arg-type]
            ids = torch.zeros(rows, size.length, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                model.transformer(input_ids=ids).last_hidden_state.sum().backward()
            counts.append(counter.get_total_flops())
        flops[what] = counts[1] - counts[0]
    return {
        what: (theory.recomputed_share(block, what), flops[what] / flops[""] - 1)
        for what in ("attention", "full")
    }
