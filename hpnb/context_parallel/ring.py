"""Ring attention: keys and values travel round the ranks of the context axis, queries stay.

            keys and values of rank
    step    on rank 0    1    2    3
    0               0    1    2    3     every rank r sends the block that it attends to on to rank r + 1
    1               3    0    1    2     the same
    2               2    3    0    1     the same
    3               1    2    3    0     nothing is sent

Each rank merges the block of a step into a running output O and log-sum-exp L of the scores (`blockwise.py`):

    L' = log(exp L + exp L_block)      O' = exp(L - L') O + exp(L_block - L') O_block

After cp steps every query has met every key. In the forward a rank holds at most two blocks at a time, beside
the keys and values of its tokens (Liu et al. 2023, "Ring attention with blockwise transformers", arXiv
2310.01889). In the backward it holds up to four gradients of blocks as well: that of its block, that of
this step's block, the one that leaves and the one that arrives. It sends cp - 1 messages forward and
2 (cp - 1) backward. For n bytes of keys and values, w bytes a value:

    forward     (cp - 1) n
    backward    (cp - 1) n                  keys and values once more
              + (cp - 1) n max(w, 4) / w    their gradients, in float32 or wider: twice the bytes in 16 bits

A gradient travels one rank behind its block, and ends on the rank that has the keys. Grouped queries make n
small: keys and values are sent once per group of query heads.

Blocks whose queries see all keys, or a triangle of them, are computed by fused kernels (`fused.py`). With a
zigzag (`shard_sequence.py`) and a causal mask that is every block:

    keys of this rank       both chunks of queries see both chunks of keys, as a triangle
    of a lower rank         both chunks of queries see the first chunk of keys
    of a higher rank        the second chunk of queries sees both chunks of keys

Packed texts are such blocks, too. Matrix products (`blockwise.py`) compute the blocks that need another mask,
as at the edge of a window, and every block with a soft cap or in float64 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hpnb.context_parallel.blockwise import merge_blocks
from hpnb.context_parallel.fused import BlockAttention
from hpnb.context_parallel.shard_sequence import Chunk, split_sequence, token_places
from hpnb.context_parallel.visibility import Pair, Visibility, find_pairs, find_pairs_with_all
from hpnb.gradients import differentiable_once
from hpnb.mesh import Axis
from hpnb.record.recorder import begin_communication

NO_SECOND_DERIVATIVE = (
    "ring and all-gather context parallelism",
    "attention over blocks of keys has no second backward; use cp_size=1",
)


@dataclass(frozen=True)
class Ring:
    """The ranks of a context axis, and the tokens that each of them has.

    Args:
        chunks: of every rank (`split_sequence`).
    """

    axis: Axis
    chunks: tuple[tuple[Chunk, ...], ...]

    @classmethod
    def of(cls, axis: Axis, local_length: int, zigzag: bool) -> Ring:
        return cls(axis, split_sequence(local_length * axis.size, axis.size, zigzag))

    def places(self, device: torch.device) -> torch.Tensor:
        """(s / cp,): where this rank's tokens stand in the sequence."""
        return token_places(self.chunks[self.axis.rank], device)

    def pairs(
        self, source: int, visible: Visibility, device: torch.device, fused: bool = False
    ) -> list[Pair]:
        """This rank's queries with the keys of rank `source`, where they see any; see `find_pairs`."""
        return find_pairs(self.chunks[self.axis.rank], self.chunks[source], visible, device, fused)

    def pairs_with_all(self, visible: Visibility, device: torch.device, fused: bool = False) -> list[Pair]:
        """This rank's queries with the keys of all ranks in the order of the sequence."""
        length = max(chunk.stop for chunks in self.chunks for chunk in chunks)
        return find_pairs_with_all(self.chunks[self.axis.rank], length, visible, device, fused)

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send `tensor` to the next rank; call the result for what the rank before has sent."""
        axis, tensor = self.axis, tensor.contiguous()
        received = torch.empty_like(tensor)
        ended = begin_communication("send", axis.name, tensor.nbytes, axis.ranks)
        to, source = (axis.ranks[(axis.rank + step) % axis.size] for step in (1, -1))
        sending = dist.P2POp(dist.isend, tensor, to, axis.group)
        receiving = dist.P2POp(dist.irecv, received, source, axis.group)
        works = dist.batch_isend_irecv([sending, receiving])  # posted together: nobody waits for itself

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            if ended is not None:
                ended()
            return received

        return wait


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ring,
    visible: Visibility,
    scale: float,
    softcap: float | None = None,
    fused: bool = True,
) -> torch.Tensor:
    """softmax(q k^T scale) v over the keys of all ranks, for this rank's queries.

    Args:
        q: (B, H, s / cp, d), this rank's; k, v: (B, H_kv, s / cp, d).
        fused: use a fused kernel for the blocks that one computes. Otherwise all go by matrix products.

    Returns:
        (B, H, s / cp, d).
    """
    out: torch.Tensor = _RingAttention.apply(
        q, k, v, ring, visible, BlockAttention(q, k, v, scale, softcap, fused)
    )
    return out


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: Axis,
    visible: Visibility,
    scale: float,
) -> torch.Tensor:
    """The same where this rank of `axis` has all tokens: (B, H, s, d), (B, H_kv, s, d) -> (B, H, s, d)."""
    # Its group stays that of all ranks, which is never used: on an axis of one rank nothing is sent.
    alone = replace(axis, size=1, rank=0, ranks=(axis.ranks[axis.rank],))
    return ring_attention(q, k, v, Ring(alone, ((Chunk(0, q.size(2)),),)), visible, scale)


class _RingAttention(torch.autograd.Function):
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
        fused = attention.kernel is not None
        block, ranks, rank = torch.stack([k, v]), ring.axis.size, ring.axis.rank
        for step in range(ranks):
            arriving = ring.pass_on(block) if step < ranks - 1 else None
            for pair in ring.pairs((rank - step) % ranks, visible, q.device, fused):
                merge_pair(attention, pair, q, block, out, lse)
            if arriving is not None:
                block = arriving()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.visible, ctx.attention = ring, visible, attention
        return out

    @staticmethod
    @differentiable_once(*NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, visible, ranks, rank = ctx.ring, ctx.visible, ctx.ring.axis.size, ctx.ring.axis.rank
        attention, dout = ctx.attention, grads[0]
        fused = attention.kernel is not None
        dq, block = torch.zeros_like(q, dtype=lse.dtype), torch.stack([k, v])
        local_grad = dblock = torch.empty(0)  # local_grad: of this rank's block, by this rank's queries
        for step in range(ranks):
            arriving = ring.pass_on(block) if step < ranks - 1 else None
            # Rank r - 1 had this block one step ago, and its sum arrives now. In step 1 nothing arrives:
            # rank r - 1 has that block's first summand and keeps it until the end (`local_grad`).
            coming = ring.pass_on(dblock) if step > 1 else None
            block_grad = torch.zeros_like(block, dtype=lse.dtype)
            for pair in ring.pairs((rank - step) % ranks, visible, q.device, fused):
                add_gradients(attention, pair, dout, q, block, out, lse, dq, block_grad)
            if step == 0:
                local_grad = block_grad
            else:
                dblock = block_grad if coming is None else block_grad.add_(coming())
            if arriving is not None:
                block = arriving()
        if ranks > 1:
            local_grad = local_grad + ring.pass_on(dblock)()
        return dq.to(q.dtype), local_grad[0].to(k.dtype), local_grad[1].to(v.dtype), None, None, None


# --- one pair of a chunk of queries and a chunk of keys ----------------------------------------------------


def merge_pair(
    attention: BlockAttention, pair: Pair, q: torch.Tensor, block: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor,
) -> None:  # fmt: skip
    """Merge the attention of one pair into out (B, H, s_q, d) and lse (B, H, s_q).

    Args:
        q: (B, H, s_q, d).
        block: keys and values, (2, B, H_kv, s_k, d).
    """
    keys, values = block[:, pair.samples, :, pair.keys]
    query_index = pair.samples, slice(None), pair.queries
    forward = attention.forward(pair, q[query_index], keys, values)
    out[query_index], lse[query_index] = merge_blocks(out[query_index], lse[query_index], *forward)


def add_gradients(
    attention: BlockAttention, pair: Pair, dout: torch.Tensor, q: torch.Tensor, block: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor, dblock: torch.Tensor,
) -> None:  # fmt: skip
    """Add the gradients of one pair to dq and dblock, given out and lse over all keys."""
    key_index = slice(None), pair.samples, slice(None), pair.keys
    query_index = pair.samples, slice(None), pair.queries
    keys, values = block[key_index]
    pieces = attention.backward(
        pair, dout[query_index], q[query_index], keys, values, out[query_index], lse[query_index]
    )
    dq[query_index] += pieces[0]
    for gradient, piece in zip(dblock[key_index], pieces[1:], strict=True):
        gradient += piece
