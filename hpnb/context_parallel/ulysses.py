"""Ulysses: instead of sharding the tokens, shard the heads for the time of the attention.

    (B, H, s / cp, d)   some tokens of all heads
         | all-to-all
    (B, H / cp, s, d)   all tokens of some heads: an ordinary attention
         | all-to-all
    (B, H, s / cp, d)

Each rank sends (cp - 1) / cp of its shard of q, k, v and of the output in the forward, and as much of their
gradients in the backward. So the bytes per rank hardly change if s and cp grow together (Jacobs et al. 2023,
"DeepSpeed Ulysses", arXiv 2309.14509, section 3.2). A ring sends keys and values cp - 1 times; but it also
works with more ranks than heads. Where cp does not divide the key-value heads, they are repeated before they
are sent: to the least number that cp divides, or to one for each query head if cp divides neither.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hpnb import comm
from hpnb.context_parallel.blockwise import block_forward
from hpnb.context_parallel.ring import local_attention
from hpnb.context_parallel.shard_sequence import Chunk
from hpnb.context_parallel.visibility import Visibility
from hpnb.mesh import Axis

HEADS, TOKENS = 1, 2


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: Axis,
    visible: Visibility,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T scale) v over the keys of all ranks, for this rank's queries.

    Args:
        q: (B, H, s / cp, d), this rank's; k, v: (B, H_kv, s / cp, d). Shards are contiguous.
        visible: its `starts` are those of all queries, (B, s).

    Returns:
        (B, H, s / cp, d).

    Raises:
        ValueError: more ranks than heads.
    """
    heads = q.size(HEADS)
    if heads < axis.size:
        raise ValueError(too_few_heads_message(heads, axis.size))
    # Otherwise query heads would land on other ranks than the key-value heads of their groups.
    copies = heads if heads % axis.size else math.lcm(k.size(HEADS), axis.size)  # divides heads, as both do
    if copies > k.size(HEADS):
        k, v = (x.repeat_interleave(copies // k.size(HEADS), HEADS) for x in (k, v))
    # Heads of zeros up to a multiple of the ranks: they land on the last ranks and are cut off at the end.
    if missing := -heads % axis.size:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
    q, k, v = (comm.all_to_all(x, axis, split_dim=HEADS, concat_dim=TOKENS) for x in (q, k, v))
    all_tokens = Chunk(0, q.size(TOKENS))
    keys = visible.without_padding(all_tokens)
    k, v = (x[:, :, : keys.size] for x in (k, v))  # queries of padding stay: their outputs are not used
    is_causal = visible.is_triangle(all_tokens, keys)
    mask = None if is_causal and softcap is None else visible.mask(all_tokens, keys, slice(None), q.device)
    if softcap is not None:
        out = block_forward(q, k, v, scale, mask, softcap)[0].to(q.dtype)
    elif visible.runs is not None:  # packed texts: by the ring's blocks, on one rank
        out = local_attention(q, k, v, axis, visible, scale)
    else:
        mask = None if mask is None else mask[:, 0]  # (B, 1, s, s)
        grouped = q.size(HEADS) != k.size(HEADS)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    return comm.all_to_all(out, axis, split_dim=TOKENS, concat_dim=HEADS)[:, :heads]


def too_few_heads_message(heads: int, ranks: int) -> str:
    """The error message for an attention that has fewer heads than ranks."""
    return (
        f"Ulysses gives each of {ranks} ranks a head, and an attention has {heads} on a rank; use "
        f"cp_size={heads}{' or less' if heads > 1 else ''}, or context_parallel='ring'"
    )
