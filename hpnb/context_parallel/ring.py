"""Ring attention: keys and values travel round the ranks of the context axis, queries stay.

    step    rank 0 attends to    rank 1    rank 2    rank 3        and meanwhile
    0       keys of rank 0       1         2         3             the block goes on to rank r + 1
    1       keys of rank 3       0         1         2
    2       keys of rank 2       3         0         1
    3       keys of rank 1       2         3         0             nothing is sent

After cp steps every query has met every key, and no rank has held more than two blocks (Liu et al. 2023,
"Ring attention with blockwise transformers", arXiv 2310.01889). Each rank sends, for blocks of n bytes of
keys and values together,

    forward     (cp - 1) n
    backward    (cp - 1) n        keys and values once more
              + (cp - 1) n        their gradients, which travel one rank behind and end at home

Grouped queries make n small: keys and values are sent once a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hpnb.context_parallel.blockwise import block_backward, block_forward, merge_blocks
from hpnb.context_parallel.shard_sequence import Chunk, split_sequence, token_places
from hpnb.mesh import Axis
from hpnb.record.recorder import begin_communication


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees.

    Args:
        causal: only those that do not come after it.
        window: only so many before it, itself included; None is all.
        starts: (B, s_q) of this rank's queries: where the text of each begins, if texts are packed.
        length: tokens of the sequence without padding; keys from there on are seen by no query.
    """

    causal: bool
    window: int | None = None
    starts: torch.Tensor | None = None
    length: int | None = None

    def sees_nothing(self, queries: Chunk, keys: Chunk) -> bool:
        after = self.causal and keys.start >= queries.stop
        before = self.window is not None and queries.start - (keys.stop - 1) >= self.window
        return after or before or (self.length is not None and keys.start >= self.length)

    def mask(self, queries: Chunk, keys: Chunk, rows: slice, device: torch.device) -> torch.Tensor | None:
        """True where a query sees a key, (B or 1, 1, 1, s_q, s_k); None if all see all.

        Args:
            rows: of `starts` that are these queries'.
        """
        key = torch.arange(keys.start, keys.stop, device=device)  # (s_k,)
        query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)  # (s_q, 1)
        conditions = []
        if self.causal and keys.stop > queries.start + 1:
            conditions.append(key <= query)
        if self.window is not None and queries.stop - 1 - keys.start >= self.window:
            conditions.append(query - key < self.window)
        if self.length is not None and keys.stop > self.length:
            conditions.append((key < self.length).expand(queries.size, -1))
        if self.starts is not None:
            conditions.append(key >= self.starts[:, rows].unsqueeze(-1))  # (B, s_q, s_k)
        if not conditions:
            return None
        mask = conditions[0]
        for condition in conditions[1:]:
            mask = mask & condition
        return mask[:, None, None] if mask.dim() == 3 else mask[None, None, None]


@dataclass(frozen=True)
class Ring:
    """The ranks of a context axis, and the tokens that each of them has.

    Args:
        axis: of the mesh.
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

    def pairs(self, source: int, visible: Visibility, device: torch.device) -> Iterator[Pair]:
        """This rank's chunks of queries with the chunks of keys of rank `source`, where they see any."""
        first_query = 0
        for queries in self.chunks[self.axis.rank]:
            rows = slice(first_query, first_query + queries.size)
            first_query += queries.size
            first_key = 0
            for keys in self.chunks[source]:
                columns = slice(first_key, first_key + keys.size)
                first_key += keys.size
                if not visible.sees_nothing(queries, keys):
                    yield Pair(rows, columns, visible.mask(queries, keys, rows, device))

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


@dataclass(frozen=True)
class Pair:
    """Queries of this rank and keys of a block: their rows in the shards, and who sees whom."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ring,
    visible: Visibility,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T scale) v over the keys of all ranks, for this rank's queries.

    Args:
        q: (B, H, s / cp, d), this rank's; k, v: (B, H_kv, s / cp, d).

    Returns:
        (B, H, s / cp, d).
    """
    out: torch.Tensor = _RingAttention.apply(q, k, v, ring, visible, scale, softcap)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: Ring,
        visible: Visibility,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:3], v.size(-1)), dtype=wide)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        block, ranks, rank = torch.stack([k, v]), ring.axis.size, ring.axis.rank
        for step in range(ranks):
            arriving = ring.pass_on(block) if step < ranks - 1 else None
            for pair in ring.pairs((rank - step) % ranks, visible, q.device):
                keys, values = block[:, :, :, pair.keys]
                rows = pair.queries
                block_out, block_lse = block_forward(q[:, :, rows], keys, values, scale, pair.mask, softcap)
                out[:, :, rows], lse[:, :, rows] = merge_blocks(
                    out[:, :, rows], lse[:, :, rows], block_out, block_lse
                )
            if arriving is not None:
                block = arriving()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.visible, ctx.scale, ctx.softcap = ring, visible, scale, softcap
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, visible, ranks, rank = ctx.ring, ctx.visible, ctx.ring.axis.size, ctx.ring.axis.rank
        dout = grads[0].to(out.dtype)
        delta = (dout * out).sum(-1)  # (B, H, s_q)
        dq, block = torch.zeros_like(out[..., : q.size(-1)]), torch.stack([k, v])
        home = dblock = torch.empty(0)
        for step in range(ranks):
            arriving = ring.pass_on(block) if step < ranks - 1 else None
            # The gradients of the block that came in this step left rank r - 1 after the step before.
            coming = ring.pass_on(dblock) if step > 1 else None
            local = torch.zeros_like(block, dtype=out.dtype)
            for pair in ring.pairs((rank - step) % ranks, visible, q.device):
                rows, columns = pair.queries, pair.keys
                keys, values = block[:, :, :, columns]
                pieces = block_backward(
                    dout[:, :, rows], q[:, :, rows], keys, values, lse[:, :, rows], delta[:, :, rows],
                    ctx.scale, pair.mask, ctx.softcap,
                )  # fmt: skip
                dq[:, :, rows] += pieces[0]
                local[0, :, :, columns] += pieces[1]
                local[1, :, :, columns] += pieces[2]
            if step == 0:
                home = local  # stays: it is added when the others' sum comes home
            else:
                dblock = local if coming is None else local + coming()
            if arriving is not None:
                block = arriving()
        if ranks > 1:
            home = home + ring.pass_on(dblock)()
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None, None
