"""Dispatch is a permutation of rows, and combine is its inverse.

    n tokens, each to k experts     E = 4 experts on ep = 2 ranks: rank 0 has experts 0 1, rank 1 has 2 3

    chosen (n, k)   token 0: 2 0    token 1: 2 1                 rows   t0->2  t0->0  t1->2  t1->1
    sorted by expert                                             rows   t0->0  t1->1 | t0->2  t1->2
    all-to-all                                                   to rank 0           | to rank 1

A row is a copy of a token's hidden state, one for each of its k experts. Sorted by expert, rows are sorted by
rank as well, so one uneven all-to-all (`comm.exchange_rows`) moves them. First the ranks exchange how many
rows each expert gets. No row is dropped or padded, however uneven the routing is. Results travel back by the
same all-to-all with sent and received sizes swapped, and each token adds up its k rows, times the router's
weights, which never leave their rank. The backward sends the same bytes once more. Lepikhin et al. 2020
(GShard, arXiv 2006.16668) dispatch so with a capacity; Gale et al. 2022 (arXiv 2211.15841) without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpnb.comm import exchange_rows
from hpnb.mesh import Axis
from hpnb.overlapped_pair import wait_for
from hpnb.record.recorder import communication


@dataclass(frozen=True)
class Dispatch:
    """Where the rows of this rank's n tokens go, and what comes here.

    Attributes:
        order: (n k,): row i, sorted by expert, is row `order[i]` of `chosen.reshape(-1)`; row j is a copy of
            the hidden state of token j // k.
        tokens_per_expert: (E,): how many of this rank's rows each expert gets.
        sent, received: how many rows go to, and come from, each rank of the axis.
        experts: (sum(received),): which of this rank's experts each received row is for.
    """

    order: torch.Tensor
    tokens_per_expert: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    experts: torch.Tensor


@torch.no_grad()
def plan_dispatch(chosen: torch.Tensor, num_experts: int, axis: Axis) -> Dispatch:
    """Sort rows by expert and agree on sizes. All ranks of `axis` call it, and all raise if one must.

    Args:
        chosen: (n, k): the experts of each token, 0 to num_experts - 1.
        num_experts: E, on all ranks of the axis together.

    Raises:
        ValueError: the experts cannot be shared equally, or a token chose one that does not exist.
    """
    check_divides(num_experts, axis.size)
    flat = chosen.reshape(-1)
    by_expert, order = flat.sort(stable=True)
    # Not bincount, whose shape depends on values: on a GPU the CPU would wait for it.
    bounds = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=flat.device).to(flat))
    counts = bounds.diff()  # (E,)
    counts = torch.where(counts.sum() == len(flat), counts, -1)  # what tells all ranks of a wrong number
    by_rank = counts.view(axis.size, -1)  # (ep, E / ep)
    received = by_rank
    if axis.size > 1:
        received = torch.empty_like(by_rank)  # received[r, e]: rows from rank r for expert e of this rank
        with communication("all_to_all", axis.name, counts.nbytes, axis.ranks):
            message = dist.all_to_all_single(received, by_rank.contiguous(), group=axis.group, async_op=True)
            wait_for(message, counts.nbytes * (axis.size - 1) // axis.size)
    sizes = torch.stack([by_rank.sum(1), received.sum(1)]).tolist()  # the only place where the CPU waits
    if min(*sizes[0], *sizes[1]) < 0:
        wrong = [expert for expert in flat.tolist() if not 0 <= expert < num_experts]
        who = "a router" if wrong else f"a router on rank {sizes[1].index(min(sizes[1]))} of axis {axis.name}"
        which = f"expert {wrong[0]}" if wrong else "an expert that is none"
        raise ValueError(f"{who} chose {which} of {num_experts}; use numbers from 0 to {num_experts - 1}")
    local_experts = torch.arange(by_rank.size(1), device=flat.device).repeat(axis.size)
    experts = local_experts.repeat_interleave(received.reshape(-1), output_size=sum(sizes[1]))
    return Dispatch(order, counts, tuple(sizes[0]), tuple(sizes[1]), experts)


def dispatch_rows(hidden: torch.Tensor, plan: Dispatch, axis: Axis) -> torch.Tensor:
    """(n, h) tokens of this rank -> (sum(received), h) rows for this rank's experts."""
    k = max(1, len(plan.order) // max(1, len(hidden)))  # 1 for a rank without tokens
    return exchange_rows(hidden[plan.order // k], axis, plan.sent, plan.received)


def combine_rows(rows: torch.Tensor, weights: torch.Tensor, plan: Dispatch, axis: Axis) -> torch.Tensor:
    """(sum(received), h) results of this rank's experts -> (n, h) sums over each token's k experts.

    Args:
        weights: (n, k), the router's.
    """
    back = exchange_rows(rows, axis, plan.received, plan.sent)  # (n k, h), sorted by expert
    place = torch.empty_like(plan.order)
    place[plan.order] = torch.arange(len(place), device=place.device)  # the inverse permutation
    results = back[place].view(*weights.shape, rows.size(-1))  # (n, k, h)
    return (results * weights.unsqueeze(-1)).sum(1)


def check_divides(num_experts: int, ranks: int, where: str = "the model") -> None:
    """Refuse ranks that cannot hold equally many experts."""
    if num_experts % ranks == 0:
        return
    if num_experts == 1:
        raise ValueError(f"{where} has 1 expert, which {ranks} ranks cannot share; use ep_size=1")
    fits = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    raise ValueError(
        f"{where} has {num_experts} experts, which {ranks} ranks cannot hold in equal numbers; use an "
        f"ep_size of {', '.join(map(str, fits[:-1]))} or {fits[-1]}"
    )
