"""What notebook 07 runs on its ranks: heads that do not divide, a cut vocabulary, cut tokens.

    pool.run(undivided.computing, SIZE, 2, torch.float32)[0]         each rank's seconds of attention and MLP
    pool.run(undivided.around, SIZE, 2, torch.float32)[0]            bytes that a cut vocabulary costs a step
    pool.run(undivided.losses, 16, (509, 50_257))[0]                 bytes of a loss, gathered and reduced

Every rank calls what is here, but `kept`, which measures what a layer keeps on ranks of its own.
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
from hpnb.lesson.programs import gpt2_pipeline, vit_tensor
from hpnb.lesson.programs.layer_memory import measure_layers
from hpnb.lesson.programs.step_timing import distance
from hpnb.models import GPT2Size
from hpnb.models import gpt2 as build
from hpnb.pipeline_parallel.executor import contended
from hpnb.tensor_parallel import cross_entropy, parallelize

_D = torch.float64
_WARM = 2  # repeats before the first that counts


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers that are the same on all ranks, float64, on this rank's device."""
    made = torch.randn(*shape, dtype=_D, generator=torch.Generator().manual_seed(seed))
    return made.to(hpnb.device())


# --- heads -------------------------------------------------------------------------------------------


def apart(qkv: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """(s, 3 w) of q | k | v -> three of (heads, s, w / heads)."""
    return [each.unflatten(-1, (heads, -1)).transpose(0, 1) for each in qkv.chunk(3, -1)]


def attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal attention of (s, 3 w), which is q | k | v of so many heads -> (s, w)."""
    q, k, v = apart(qkv, heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (heads, s, w / heads)
    return y.transpose(0, 1).flatten(1)


def own_heads(
    qkv: torch.Tensor, out: torch.Tensor, heads: int, ranks: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Of weights (h, 3 h), which are Q | K | V, and (h, h): (this rank's columns, its rows, its heads)."""
    share = comm.split_sizes(heads, ranks)
    d = out.size(0) // heads
    mine = slice(d * sum(share[:rank]), d * sum(share[: rank + 1]))
    columns = torch.cat([each[:, mine] for each in qkv.chunk(3, 1)], 1)
    return columns, out[mine], share[rank]


def computing(size: GPT2Size, rows: int, dtype: torch.dtype, repeats: int = 9) -> list[dict[str, float]]:
    """Seconds that each rank computes of an attention and of an MLP, {"attention": s, "MLP": s} a rank.

    Forward and backward of `rows` rows; what is sent is not counted. Where ranks share cores they would
    measure each other: there the first computes every rank's share in turn, in CPU time.
    """
    axis = vit_tensor.tensor_axis()
    model: Any = gpt2_pipeline.gpt2(replace(size, layers=1), dtype)
    x = torch.randn(rows, size.length, size.hidden, device=hpnb.device(), dtype=dtype)
    if contended():
        took = [_cpu_seconds(model, x, axis.size, repeats) if axis.rank == 0 else []]
        dist.broadcast_object_list(took, axis.ranks[0], axis.group)
        return took[0]
    parallelize(model, axis)
    found: list[dict[str, float]] = [{} for _ in range(axis.size)]
    for name, module in {"attention": model.transformer.h[0].attn, "MLP": model.transformer.h[0].mlp}.items():
        tl = vit_tensor.record(module, partial(_first, module, x), repeats)
        for rank in tl.ranks:
            found[rank][name] = tl.work(rank)
    return found


def _first(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made = module(x.detach().requires_grad_())
    y: torch.Tensor = made[0] if isinstance(made, tuple) else made
    return y


def _cpu_seconds(model: Any, x: torch.Tensor, ranks: int, repeats: int) -> list[dict[str, float]]:
    """The least of the repeats: what shares a core can only add. Shares take turns."""
    block, config = model.transformer.h[0], model.config
    width = config.n_embd // config.n_head
    heads = comm.split_sizes(config.n_head, ranks)
    neurons = comm.split_sizes(block.mlp.c_fc.weight.size(1), ranks)
    modules: dict[tuple[str, int], nn.Module] = {}
    for own in set(heads):
        attention = copy.deepcopy(block.attn)
        _narrow(attention.c_attn, 1, 3 * own * width)
        _narrow(attention.c_proj, 0, own * width)
        attention.num_heads, attention.split_size = own, own * width
        modules["attention", own] = attention
    for own in set(neurons):
        mlp = copy.deepcopy(block.mlp)
        _narrow(mlp.c_fc, 1, own)
        _narrow(mlp.c_proj, 0, own)
        modules["MLP", own] = mlp
    took: dict[tuple[str, int], list[float]] = {name: [] for name in modules}
    for _ in range(_WARM + 2 * repeats):
        for name, module in modules.items():
            began = time.thread_time()
            y = _first(module, x)
            y.backward(torch.ones_like(y))
            took[name].append(time.thread_time() - began)
            module.zero_grad(set_to_none=True)
    least = {name: min(times[_WARM:]) for name, times in took.items()}
    return [
        {"attention": least["attention", a], "MLP": least["MLP", m]}
        for a, m in zip(heads, neurons, strict=True)
    ]


def _narrow(layer: Any, dim: int, own: int) -> None:
    """Keep the first `own` inputs (dim 0) or outputs (dim 1) of a transformers Conv1D."""
    layer.weight = nn.Parameter(layer.weight.detach().narrow(dim, 0, own).clone())
    if dim == 1:
        layer.bias, layer.nf = nn.Parameter(layer.bias.detach()[:own].clone()), own


# --- words -------------------------------------------------------------------------------------------


def around(size: GPT2Size, rows: int, dtype: torch.dtype) -> float:
    """Bytes that leave this rank in forward and backward for what lies around the blocks.

    Twice a GPT-2 of one block less one of two: what blocks send cancels.
    """
    axis, batch, sent = vit_tensor.tensor_axis(), gpt2_pipeline.words(size, rows), []
    for layers in (1, 2):
        model = gpt2_pipeline.gpt2(replace(size, layers=layers), dtype)
        parallelize(model, axis)
        with hpnb.record.traffic() as traffic:
            model(**batch).loss.backward()
        sent.append(traffic.total)
    return 2 * sent[0] - sent[1]


def losses(tokens: int, vocabularies: Sequence[int]) -> dict[int, tuple[float, float, float]]:
    """{V: (bytes sent if logits are gathered, if three numbers are reduced, how far both losses are apart)}.

    Forward and backward of `tokens` tokens, float32.
    """
    axis, found = vit_tensor.tensor_axis(), {}
    for words in vocabularies:
        share = comm.split_sizes(words, axis.size)
        draw = torch.Generator().manual_seed(axis.rank)
        mine = torch.randn(tokens, share[axis.rank], generator=draw).to(hpnb.device()).requires_grad_()
        targets = (torch.arange(tokens, device=hpnb.device()) * 31) % words
        with hpnb.record.traffic() as gathered:
            whole = F.cross_entropy(comm.gather(mine, axis, 1, total=words), targets)
            whole.backward()
        with hpnb.record.traffic() as reduced:
            total, count = cross_entropy(mine, targets, axis, words)
            (total / count).backward()
        off = abs(float((total / count - whole).detach() / whole.detach()))
        found[words] = gathered.total, reduced.total, off
    return found


# --- tokens ------------------------------------------------------------------------------------------

Way = Callable[[torch.Tensor], torch.Tensor]  # (s/t, h) -> (s/t, h), this rank's tokens


def compared(way: Way, whole: Way, x: torch.Tensor) -> tuple[float, float]:
    """(the output's or the input gradient's distance to one process's, bytes sent both ways).

    Args:
        way: from this rank's tokens to this rank's.
        whole: the same of all tokens, by one rank alone.
        x: (s, h), equal on all ranks.
    """
    axis = vit_tensor.tensor_axis()
    every = x.clone().requires_grad_()
    right = whole(every)
    weigh = drawn(*right.shape, seed=99)
    (right * weigh).sum().backward()
    assert every.grad is not None
    mine, wanted, seed, grad = (comm.split(each, axis, 0) for each in (x, right.detach(), weigh, every.grad))
    mine = mine.clone().requires_grad_()
    with hpnb.record.traffic() as traffic:
        z = way(mine)
        (z * seed).sum().backward()
    assert mine.grad is not None
    off = torch.tensor(max(distance([z], [wanted]), distance([mine.grad], [grad])), device=x.device)
    dist.all_reduce(off, dist.ReduceOp.MAX, axis.group)
    return float(off), traffic.total


# --- what a layer keeps ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """One row of the published table, bytes of a layer on the first rank.

    Attributes:
        published: by the formula, as if heads divided.
        parts: what is predicted: the formula with the heads that this rank has, and what is beyond it.
        measured: of tensors that live.
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


def kept(size: GPT2Size, rows: int, ranks: int, device: str = "auto") -> list[Kept]:
    """Measure a layer in 16 bits by each row of the table, with fused GELU and attention product by product.

    Call it in the notebook's process: it starts ranks of its own.
    """
    block, found = size.block(rows), []
    for one in measure_layers(replace(size, vocab_size=64), rows, ranks, device=device):
        count = ranks if one.row.parallel else 1
        more = theory.over_even(block.heads, count)
        own = (more if "attention" in name else 1.0 for name in one.terms)
        beyond = sum(nbytes * factor for nbytes, factor in zip(one.terms.values(), own, strict=True))
        parts = {**theory.kept_parts(one.row, block, count, even=False), "beyond the formula": beyond}
        name = one.row.name.replace(" + selective recomputation", ", attention again")
        found.append(Kept(name, one.formula, parts, float(one.measured)))
    return found


def again(size: GPT2Size, rows: int) -> dict[str, tuple[float, float]]:
    """{what is computed again: (its share of a step's FLOPs by the formula, as counted)}, of blocks alone.

    On the CPU, where attention with dropout is product by product and every product is counted.
    """
    block, flops = size.block(rows), {}
    for what in ("", "attention", "full"):
        found = []
        for layers in (1, 2):
            model = build(replace(size, layers=layers, vocab_size=64), dropout=0.1, device="cpu")
            recompute.enable_recomputation(model, what or False)  # type: ignore[arg-type]
            ids = torch.zeros(rows, size.length, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                model.transformer(input_ids=ids).last_hidden_state.sum().backward()
            found.append(counter.get_total_flops())
        flops[what] = found[1] - found[0]
    told = {what: theory.recomputed_share(block, what) for what in ("attention", "full")}
    return {what: (share, flops[what] / flops[""] - 1) for what, share in told.items()}
