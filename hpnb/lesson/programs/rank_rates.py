"""What one rank alone takes, for the predictions of notebook 08: layers, the optimizer, and what tp adds.

All ranks measure at the same time, so that each has its share of the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import hpnb
from hpnb.lesson.programs.device_timing import timing_gpt2
from hpnb.lesson.programs.layer_times import seconds_in_turn, time_layers
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size
from hpnb.theory import LayerCost, LayoutTask, Link

MIN_BUCKETS = 4  # of a gradient: a single bucket could not overlap with anything
_MLP_PRODUCTS = 9  # of the MLP's first product: the FLOPs of a block's matmuls, forward and backward


@dataclass(frozen=True)
class RankRates:
    """What one rank alone takes, while the others do the same: forward and backward of a `block` and of
    embedding, head and loss; seconds of AdamW for a `parameter`; FLOP/s of a block's largest `matmul`.
    """

    block: LayerCost
    ends: LayerCost
    parameter: float
    matmul: float


def measure_rates(size: GPT2Size, few: int, many: int, dtype: torch.dtype) -> RankRates:
    """Times of layers for `few` samples and for `many`, and a line through the two. Every rank calls it."""
    small = replace(size, layers=2)
    times = [time_layers(small, samples, dtype, repeats=5) for samples in (few, many)]
    block = _line(few, many, [layers.block for layers in times])
    ends = _line(few, many, [layers.costs[0] + layers.costs[-1] for layers in times])
    return RankRates(block, ends, _optimizer_seconds(size, dtype), _matmul_rate(size, many, dtype))


def _line(few: int, many: int, took: Sequence[float]) -> LayerCost:
    sample = max((took[1] - took[0]) / (many - few), took[1] / many * 0.5)  # noise must not make it negative
    return LayerCost(max(0.0, took[0] - sample * few), sample)


def _optimizer_seconds(size: GPT2Size, dtype: torch.dtype) -> float:
    """Seconds of AdamW for each parameter of one block."""
    block = timing_gpt2(size, dtype).transformer.h[0]
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True)
    if dtype.itemsize == 2:
        hpnb.precision.Masters(optimizer)
    took = seconds_in_turn({"step": optimizer.step}, repeats=5)["step"]
    return statistics.median(took) / sum(int(p.numel()) for p in block.parameters())


def _matmul_rate(size: GPT2Size, samples: int, dtype: torch.dtype) -> float:
    m, k, n = samples * size.length, size.hidden, size.mlp
    a, b = (torch.randn(*shape, device=hpnb.device()).to(dtype) for shape in ((m, k), (k, n)))
    took = seconds_in_turn({"matmul": lambda: a @ b}, repeats=9)["matmul"]
    return 2 * m * k * n / statistics.median(took)  # as in the machine card


def time_undivided(
    pool: hpnb.Ranks, size: GPT2Size, samples: int, dtype: torch.dtype, layout: ParallelLayout
) -> dict[str, float]:
    """What tp may add to a rank's computing, besides collectives, in seconds of a step of `samples` samples.

    "norms" are the norms and residual additions that each rank of tp computes for all tokens, less those of
    its share; "thin matmuls" what products with a t-th of the columns take more than a t-th of the time, or
    less. Launches hardly count in either: a block has as many of them without tp.
    """
    m, t = layout.count_microbatches(samples // layout.dp), layout.tp
    took = pool.run(_time_undivided, size, samples // layout.dp // m, dtype, t)
    norm, norm_share, full, shard = (statistics.median(times) for times in zip(*took, strict=True))
    blocks = m * size.layers / layout.pp
    norms = 0.0 if layout.sequence_parallel or t == 1 else 2 * (norm - norm_share)  # two in a block
    return {"norms": blocks * norms, "thin matmuls": blocks * (shard - full / t)}


def _time_undivided(
    size: GPT2Size, samples: int, dtype: torch.dtype, shards: int
) -> tuple[float, float, float, float]:
    """Seconds of a norm and a residual addition, forward and backward, of all tokens and of a share of them,
    and of a block's products with all of their columns and with those of one shard."""
    like: Any = {"dtype": dtype, "device": hpnb.device()}
    tokens = torch.randn(samples * size.length, size.hidden, **like)
    scale = torch.ones(size.hidden, **like, requires_grad=True)
    full = torch.randn(size.hidden, size.mlp, **like)
    shard = full[:, : size.mlp // shards].contiguous()

    def norm(values: torch.Tensor) -> None:
        x = values.detach().requires_grad_()
        (F.layer_norm(x, (size.hidden,), scale, scale) + x).backward(values)

    def products(weight: torch.Tensor) -> None:
        for _ in range(_MLP_PRODUCTS):  # in a row: launched while the ones before are computed
            tokens @ weight

    took = seconds_in_turn({
        "norm": lambda: norm(tokens),
        "norm of a share": lambda: norm(tokens[: len(tokens) // shards]),
        "full": lambda: products(full),
        "shard": lambda: products(shard),
    }, repeats=6)  # fmt: skip
    seconds = [statistics.median(times) for times in took.values()]
    return seconds[0], seconds[1], seconds[2], seconds[3]


def layout_task(size: GPT2Size, batch: int, dtype: torch.dtype, rates: RankRates, link: Link) -> LayoutTask:
    """For `hpnb.theory.layout_parts`, `layout_bytes` and `layout_memory`: a batch of so many samples."""
    block = size.block(1, None, dtype.itemsize)
    return LayoutTask(
        block, size.layers, size.vocab_size, batch, rates.block, rates.ends, rates.parameter, link,
        buckets=MIN_BUCKETS,
    )  # fmt: skip
