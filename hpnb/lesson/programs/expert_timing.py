"""How long a layer of experts computes on unequal ranks, for notebook 11: sizes, rows, and times of them.

    routed_rows                     which experts each token is for
    timed_layer, timed_experts      a layer in a size at which computing takes time
    rows_seconds, sorted_rows       how long unequal ranks compute, and how unequal they are

Every rank calls what is here, except `sorted_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import hpnb
from hpnb import comm
from hpnb.lesson.programs.gpt2_pipeline import time_in_turn
from hpnb.lesson.programs.gpt2_tensor import random_values
from hpnb.mesh import Axis

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (r, h), (r,) expert of this rank -> (r, h)


@dataclass(frozen=True)
class LayerSize:
    """One layer of experts, each of two matrices.

    Attributes:
        tokens: of one rank.
        hidden, width: of a token, and inside an expert.
    """

    tokens: int
    hidden: int
    width: int
    dtype: torch.dtype


_TIMED = {"cpu": LayerSize(512, 192, 384, torch.float32),
          "cuda": LayerSize(4096, 2048, 4096, torch.bfloat16)}  # fmt: skip


def expert_axis() -> Axis:
    """All ranks, along the expert axis."""
    ranks = hpnb.world_size()
    return hpnb.Mesh(hpnb.Layout(dp=ranks, ep=ranks)).ep


def routed_rows(tokens: int, num_experts: int, k: int, popular: float = 1.0, seed: int = 0) -> torch.Tensor:
    """(tokens, k) different experts of each token, drawn at random, on the CPU.

    Args:
        popular: how much likelier expert 2 is than each of the others.
    """
    weights = torch.ones(num_experts)
    weights[min(2, num_experts - 1)] = popular
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights.expand(tokens, -1), k, generator=generator)


def timed_layer(popular: float, num_experts: int, k: int) -> tuple[torch.Tensor, ...]:
    """(tokens (n, h), chosen (n, k), weights (n, k)) of this rank, in a size at which computing takes time.

    Args:
        popular: how much likelier expert 2 is than each of the others.
    """
    size, rank = _TIMED[hpnb.device().type], hpnb.rank()
    chosen = routed_rows(size.tokens, num_experts, k, popular, seed=rank).to(hpnb.device())
    x = random_values(size.tokens, size.hidden, seed=rank).to(size.dtype)
    return x, chosen, torch.full(chosen.shape, 1 / k, device=hpnb.device(), dtype=size.dtype)


def timed_experts(local: int) -> Compute:
    """`local` experts of two matrices, applied to rows (r, h) with their numbers (r,)."""
    size, device = _TIMED[hpnb.device().type], hpnb.device()
    up = torch.randn(local, size.hidden, size.width, device=device, dtype=size.dtype) / size.hidden**0.5
    down = torch.randn(local, size.width, size.hidden, device=device, dtype=size.dtype) / size.width**0.5

    def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rows)
        for expert in range(local):
            here = (experts == expert).nonzero().squeeze(1)
            out[here] = F.gelu(rows[here] @ up[expert]) @ down[expert]
        return out

    return compute


def rows_seconds(
    rows_of_ranks: Mapping[str, Sequence[float]], local: int, scale: float = 1.0
) -> dict[str, float]:
    """{name: seconds of the slowest rank} to compute so many rows, if each rank has a processor to itself.

    A rank's time is the least of fifteen turns: on shared cores other work only adds to it.

    Args:
        rows_of_ranks: {name: rows of each rank}.
        local: experts of a rank, among which its rows are shared equally.
        scale: all rows times this.
    """
    size, device, axis = _TIMED[hpnb.device().type], hpnb.device(), expert_axis()
    compute, calls = timed_experts(local), {}
    for name, rows in rows_of_ranks.items():
        n = round(rows[axis.rank] * scale)
        x = torch.randn(n, size.hidden, device=device, dtype=size.dtype)
        calls[name] = partial(compute, x, torch.arange(n, device=device) % local)
    with torch.no_grad():
        took = time_in_turn(calls, repeats=15)
    least = torch.tensor([[min(took[name]) for name in calls]], dtype=torch.float64, device=device)
    return dict(zip(calls, comm.gather(least, axis, 0).amax(0).tolist(), strict=True))


def sorted_rows(steps: Sequence[Mapping[str, torch.Tensor]], ranks: int) -> list[float]:
    """Rows of the busiest rank, of the next one, and so on: means over steps and layers.

    Args:
        steps: {layer: rows of each expert (E,)} of each step, as `ExpertLoads.steps`.
    """
    loads = [load.view(ranks, -1).sum(1) for step in steps for load in step.values()]
    means: list[float] = torch.stack(loads).sort(descending=True).values.double().mean(0).tolist()
    return means
