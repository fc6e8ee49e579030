r"""All-gather: every rank gathers the keys and values of all ranks, and computes its own queries.

    cp = 2, zigzag            all keys, in the order of the sequence
                              0 1    2 3    4 5    6 7
    queries of rank 0   0 1   \\     .      .      .           \\  a triangle
                        6 7   all    all    all    \\          .   nothing
    queries of rank 1   2 3   all    \\     .      .
                        4 5   all    all    \\     .

A chunk of queries has two blocks at most, whatever cp is: all keys before it, and a triangle. A ring has one
or two for each of cp steps, and each of its kernels has less work. In return nothing is computed while keys
and values travel, and a rank has those of the whole sequence for the time of one attention. They are not
kept: the backward gathers them once more, and reduce-scatters their gradients. Each rank sends, for its n
bytes of keys and values in w bytes a value, what a ring sends:

    forward     (cp - 1) n
    backward    (cp - 1) n  +  (cp - 1) n max(w, 4) / w of gradients, in float32 or wider

Llama 3 was trained so, because grouped queries make n small beside the computing, and because masks of packed
texts are as simple as on one rank (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch

from hpnb.comm import gather_slices, sum_slices
from hpnb.context_parallel.fused import BlockAttention
from hpnb.context_parallel.ring import NO_SECOND_DERIVATIVE, Ring, add_gradients, merge_pair
from hpnb.context_parallel.shard_sequence import Chunk
from hpnb.context_parallel.visibility import Visibility
from hpnb.gradients import differentiable_once

TOKENS = 3  # of keys and values as one tensor, (2, B, H_kv, s, d)


def all_gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ring,
    visible: Visibility,
    scale: float,
    softcap: float | None = None,
    fused: bool = True,
) -> torch.Tensor:
    """softmax(q k^T scale) v over the keys of all ranks, for this rank's queries: (B, H, s / cp, d).

    The arguments are those of `ring_attention`.
    """
    out: torch.Tensor = _AllGatherAttention.apply(
        q, k, v, ring, visible, BlockAttention(q, k, v, scale, softcap, fused)
    )
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: Ring,
        visible: Visibility,
        attention: BlockAttention,
    ) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.size(-1)), dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        block = _gather(torch.stack([k, v]), ring)  # (2, B, H_kv, s, d)
        for pair in ring.pairs_with_all(visible, q.device, attention.kernel is not None):
            merge_pair(attention, pair, q, block, out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.visible, ctx.attention = ring, visible, attention
        return out

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, attention = ctx.ring, ctx.attention
        block = _gather(torch.stack([k, v]), ring)
        dq, dblock = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(block, dtype=lse.dtype)
        for pair in ring.pairs_with_all(ctx.visible, q.device, attention.kernel is not None):
            add_gradients(attention, pair, grads[0], q, block, out, lse, dq, dblock)
        dk, dv = _sum_and_scatter(dblock, ring)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _gather(block: torch.Tensor, ring: Ring) -> torch.Tensor:
    """(2, B, H_kv, s / cp, d) of every rank -> (2, B, H_kv, s, d) in the order of the sequence."""
    if ring.axis.size == 1:
        return block
    by_rank = gather_slices(block, ring.axis, TOKENS, (block.size(TOKENS),) * ring.axis.size)
    chunks = _chunks_by_rank(ring)
    pieces = zip(chunks, by_rank.split([chunk.size for chunk in chunks], TOKENS), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda one: one[0].start)], TOKENS)


def _sum_and_scatter(dblock: torch.Tensor, ring: Ring) -> torch.Tensor:
    """The way back: sums over the ranks, of which each rank gets those of its tokens."""
    if ring.axis.size == 1:
        return dblock
    by_rank = [dblock[:, :, :, chunk.start : chunk.stop] for chunk in _chunks_by_rank(ring)]
    return sum_slices(torch.cat(by_rank, TOKENS), ring.axis, TOKENS)


def _chunks_by_rank(ring: Ring) -> list[Chunk]:
    return [chunk for chunks in ring.chunks for chunk in chunks]
