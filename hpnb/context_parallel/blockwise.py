"""Attention of some queries to some of the keys, so that results for all keys can be merged.

    scores  S = q k^T / sqrt(d)        of one block of keys
    lse     L = log sum exp S          (B, H, s_q)
    out     O = exp(S - L) v           softmax over this block alone

Two blocks of keys a and b together give

    L = log(exp L_a + exp L_b)         O = exp(L_a - L) O_a + exp(L_b - L) O_b

which is the running softmax of Rabe and Staats 2021 (arXiv 2112.05682) and Dao et al. 2022 (FlashAttention,
arXiv 2205.14135). In the backward each block needs only the final L and D = sum(dO * O):

    P = exp(S - L)    dv = P^T dO    dS = P * (dO v^T - D)    dq = dS k    dk = dS^T q

Keys and values may have fewer heads than queries (grouped queries): H = g H_kv.
"""

from __future__ import annotations

import torch

Masked = torch.Tensor | None  # bool, True where a query may see a key; broadcasts to (B, H_kv, g, s_q, s_k)


def block_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: Masked,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block of keys.

    Args:
        q: (B, H, s_q, d); k, v: (B, H_kv, s_k, d).
        scale: of the scores, usually 1 / sqrt(d).
        softcap: scores become softcap * tanh(score / softcap), if given.

    Returns:
        out (B, H, s_q, d) and lse (B, H, s_q), in float32 or wider. A query that sees no key of the block
        has lse -inf and out 0.
    """
    scores = _scores(q, k, scale, softcap)[0]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)  # (B, H_kv, g, s_q)
    weights = torch.exp(scores - _finite(lse).unsqueeze(-1))
    out = weights @ v.to(weights.dtype).unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def block_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    mask: Masked,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq, dk, dv) of one block of keys, given lse (B, H, s_q) over all keys.

    Args:
        dout: (B, H, s_q, d), in the dtype of `lse`.
        delta: (B, H, s_q), the sum of dout * out over d.
    """
    groups = k.size(1)
    scores, slope = _scores(q, k, scale, softcap)
    weights = torch.exp(scores - _finite(lse.unflatten(1, (groups, -1))).unsqueeze(-1))
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    dout = dout.unflatten(1, (groups, -1))  # (B, H_kv, g, s_q, d)
    dv = (weights.transpose(-1, -2) @ dout).sum(2)
    dscores = weights * (
        dout @ v.to(dout.dtype).unsqueeze(2).mT - delta.unflatten(1, (groups, -1)).unsqueeze(-1)
    )
    if slope is not None:
        dscores = dscores * slope
    dq = dscores @ k.to(dout.dtype).unsqueeze(2) * scale
    dk = (dscores.mT @ q.to(dout.dtype).unflatten(1, (groups, -1)) * scale).sum(2)
    return dq.flatten(1, 2), dk, dv


def merge_blocks(
    out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys of both, each given by its out (..., s_q, d) and lse (..., s_q)."""
    total = torch.logaddexp(lse, block_lse)
    finite = _finite(total)
    return (
        out * torch.exp(lse - finite).unsqueeze(-1) + block_out * torch.exp(block_lse - finite).unsqueeze(-1),
        total,
    )


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(B, H_kv, g, s_q, s_k), and the derivative of the soft cap if there is one."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.size(1), -1))  # (B, H_kv, g, s_q, d)
    scores = grouped @ k.to(wide).unsqueeze(2).mT * scale
    if softcap is None:
        return scores, None
    capped = torch.tanh(scores / softcap)
    return capped * softcap, 1 - capped.square()


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf, so that exp(-inf - lse) is 0 and not nan."""
    return torch.where(lse.isinf(), torch.zeros_like(lse), lse)
