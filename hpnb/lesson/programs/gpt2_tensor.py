"""What notebook 07 runs on its ranks: heads that do not divide, a vocabulary and tokens that are split.

    pool.run(gpt2_tensor.time_heads, SIZE, 2, torch.float32)[0]             seconds of attention and MLP, by
    rank pool.run(gpt2_tensor.bytes_around_blocks, SIZE, 2, torch.float32)[0]    bytes that a split vocabulary
    costs pool.run(gpt2_tensor.compare_losses, 16, (509, 50_257))[0]              bytes of a loss, gathered
    and reduced

Every rank calls what is here, except `measure_kept_activations`, which starts ranks of its own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hpnb
from hpnb import comm, theory
from hpnb.hybrid import recompute
from hpnb.lesson.programs import vit_tensor
from hpnb.lesson.programs.device_timing import all_ranks, random_tokens, timing_gpt2
from hpnb.lesson.programs.layer_memory import measure_layers
from hpnb.lesson.programs.step_timing import relative_distance
from hpnb.models import GPT2Size
from hpnb.models import gpt2 as build_gpt2
from hpnb.pipeline_parallel.executor import contended
from hpnb.tensor_parallel import cross_entropy, parallelize

_WARMUP = 2  # repeats before the first that counts


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Float64 values that are the same on all ranks, on this rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(hpnb.device())


# --- heads -------------------------------------------------------------------------------------------


def split_heads(qkv: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """(s, 3 w) of q | k | v -> three of (heads, s, w / heads)."""
    return [part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in qkv.chunk(3, -1)]


def attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal attention of (s, 3 w), which is q | k | v of so many heads -> (s, w)."""
    q, k, v = split_heads(qkv, heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (heads, s, w / heads)
    return y.transpose(0, 1).flatten(1)


def rank_heads(
    qkv: torch.Tensor, out: torch.Tensor, heads: int, ranks: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of weights (h, 3 h), which are Q | K | V, and (h, h): (this rank's columns, its rows, its heads)."""
    counts = comm.split_sizes(heads, ranks)
    d = out.size(0) // heads
    local = slice(d * sum(counts[:rank]), d * sum(counts[: rank + 1]))
    columns = torch.cat([part[:, local] for part in qkv.chunk(3, 1)], 1)
    return columns, out[local], counts[rank]


def time_heads(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 9) -> list[dict[str, float]]:
    """Compute seconds of an attention and of an MLP on each rank, {"attention": s, "MLP": s} a rank.

    Forward and backward of `rows` rows, without what is sent. Ranks that share cores would measure each
    other: there the first rank computes every rank's share in turn, in CPU time.
    """
    axis = all_ranks("tp")
    model: Any = timing_gpt2(replace(size, layers=1), dtype)
    x = torch.randn(rows, size.length, size.hidden, device=hpnb.device(), dtype=dtype)
    if contended():
        took = [_cpu_seconds(model, x, axis.size, repeats) if axis.rank == 0 else []]
        dist.broadcast_object_list(took, axis.ranks[0], axis.group)
        return took[0]
    parallelize(model, axis)
    seconds: list[dict[str, float]] = [{} for _ in range(axis.size)]
    block = model.transformer.h[0]
    for name, module in {"attention": block.attn, "MLP": block.mlp}.items():
        tl = vit_tensor.record_step(module, partial(_first_output, module, x), repeats)
        for rank in tl.ranks:
            seconds[rank][name] = tl.work(rank)
    return seconds


def _first_output(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x.detach().requires_grad_())
    y: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return y


def _cpu_seconds(model: Any, x: torch.Tensor, ranks: int, repeats: int) -> list[dict[str, float]]:
    """The least of the repeats, because sharing a core can only add time. Shares take turns."""
    block, config = model.transformer.h[0], model.config
    width = config.n_embd // config.n_head
    heads = comm.split_sizes(config.n_head, ranks)
    neurons = comm.split_sizes(block.mlp.c_fc.weight.size(1), ranks)
    modules: dict[tuple[str, int], nn.Module] = {}
    for count in set(heads):
        attention = copy.deepcopy(block.attn)
        _narrow(attention.c_attn, 1, 3 * count * width)
        _narrow(attention.c_proj, 0, count * width)
        attention.num_heads, attention.split_size = count, count * width
        modules["attention", count] = attention
    for count in set(neurons):
        mlp = copy.deepcopy(block.mlp)
        _narrow(mlp.c_fc, 1, count)
        _narrow(mlp.c_proj, 0, count)
        modules["MLP", count] = mlp
    took: dict[tuple[str, int], list[float]] = {name: [] for name in modules}
    for _ in range(_WARMUP + 2 * repeats):
        for name, module in modules.items():
            began = time.thread_time()
            y = _first_output(module, x)
            y.backward(torch.ones_like(y))
            took[name].append(time.thread_time() - began)
            module.zero_grad(set_to_none=True)
    least = {name: min(times[_WARMUP:]) for name, times in took.items()}
    return [
        {"attention": least["attention", a], "MLP": least["MLP", m]}
        for a, m in zip(heads, neurons, strict=True)
    ]


def _narrow(layer: Any, dim: int, count: int) -> None:
    """Keep the first `count` inputs (dim 0) or outputs (dim 1) of a transformers Conv1D."""
    layer.weight = nn.Parameter(layer.weight.detach().narrow(dim, 0, count).clone())
    if dim == 1:
        layer.bias, layer.nf = nn.Parameter(layer.bias.detach()[:count].clone()), count


# --- vocabulary --------------------------------------------------------------------------------------


def bytes_around_blocks(size: GPT2Size, rows: int, dtype: torch.dtype) -> float:
    """Bytes that leave this rank in forward and backward for what lies around the blocks.

    Twice a GPT-2 of one block less one of two: what blocks send cancels.
    """
    batch, sent = random_tokens(size, rows), []
    for layers in (1, 2):
        model = timing_gpt2(replace(size, layers=layers), dtype)
        parallelize(model, all_ranks("tp"))
        with hpnb.record.traffic() as traffic:
            model(**batch).loss.backward()
        sent.append(traffic.total)
    return 2 * sent[0] - sent[1]


def compare_losses(tokens: int, vocabularies: Sequence[int]) -> dict[int, tuple[float, float, float]]:
    """{V: (bytes sent if logits are gathered, if three numbers are reduced, how far both losses are apart)}.

    Forward and backward of `tokens` tokens, float32.
    """
    axis, results = all_ranks("tp"), {}
    for vocab_size in vocabularies:
        share = comm.split_sizes(vocab_size, axis.size)
        generator = torch.Generator().manual_seed(axis.rank)
        logits = torch.randn(tokens, share[axis.rank], generator=generator).to(hpnb.device()).requires_grad_()
        targets = (torch.arange(tokens, device=hpnb.device()) * 31) % vocab_size
        with hpnb.record.traffic() as gathered:
            serial = F.cross_entropy(comm.gather(logits, axis, 1, total=vocab_size), targets)
            serial.backward()
        with hpnb.record.traffic() as reduced:
            total, count = cross_entropy(logits, targets, axis, vocab_size)
            (total / count).backward()
        off = abs(float((total / count - serial).detach() / serial.detach()))
        results[vocab_size] = gathered.total, reduced.total, off
    return results


# --- tokens ------------------------------------------------------------------------------------------

Layer = Callable[[torch.Tensor], torch.Tensor]


def compare_with_serial(layer: Layer, serial: Layer, x: torch.Tensor) -> tuple[float, float]:
    """(the output's or the input gradient's distance to one process's, bytes sent both ways).

    Args:
        layer: from this rank's tokens to this rank's, (s/t, h) -> (s/t, h).
        serial: the same of all tokens, on one rank alone.
        x: (s, h), equal on all ranks.
    """
    axis = all_ranks("tp")
    full = x.clone().requires_grad_()
    right = serial(full)
    weigh = random_values(*right.shape, seed=99)
    (right * weigh).sum().backward()
    assert full.grad is not None
    local, wanted, seed, grad = (comm.split(t, axis, 0) for t in (x, right.detach(), weigh, full.grad))
    local = local.clone().requires_grad_()
    with hpnb.record.traffic() as traffic:
        z = layer(local)
        (z * seed).sum().backward()
    assert local.grad is not None
    distance = max(relative_distance([z], [wanted]), relative_distance([local.grad], [grad]))
    off = torch.tensor(distance, device=x.device)
    dist.all_reduce(off, dist.ReduceOp.MAX, axis.group)
    return float(off), traffic.total


# --- what a layer keeps ------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptActivations:
    """One row of the published table, bytes of a layer on the first rank.

    Attributes:
        published: by the formula, as if heads divided.
        parts: what is predicted: the formula with the heads that this rank has, and what is beyond it.
        measured: of tensors that are alive.
    """

    name: str
    published: float
    parts: dict[str, float]
    measured: float

    @property
    def label(self) -> str:
        """The name, in lines."""
        return self.name.replace(", ", ",\n")

    @property
    def predicted(self) -> float:
        return sum(self.parts.values())


def measure_kept_activations(
    size: GPT2Size, rows: int, ranks: int, device: str = "auto"
) -> list[KeptActivations]:
    """Measure a layer in 16 bits by each row of the table, with fused GELU and attention product by product.

    Call it in the notebook's process: it starts ranks of its own.
    """
    block, table = size.block(rows), []
    for layer in measure_layers(replace(size, vocab_size=64), rows, ranks, device=device):
        count = ranks if layer.row.parallel else 1
        more = theory.imbalance(block.heads, count)
        factors = (more if "attention" in name else 1.0 for name in layer.terms)
        beyond = sum(nbytes * factor for nbytes, factor in zip(layer.terms.values(), factors, strict=True))
        parts = {**theory.activation_parts(layer.row, block, count, even=False), "beyond the formula": beyond}
        name = layer.row.name.replace(" + selective recomputation", ", attention again")
        table.append(KeptActivations(name, layer.formula, parts, float(layer.measured)))
    return table


def recompute_shares(size: GPT2Size, rows: int) -> dict[str, tuple[float, float]]:
    """{what is recomputed: (its share of a step's FLOPs by the formula, as counted)}, of blocks alone.

    On the CPU, where attention with dropout is product by product and every product is counted.
    """
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
