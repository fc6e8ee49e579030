"""Cross entropy in two passes over the logits, the second of which leaves their gradient in their place.

    first       m = max_v z_v,  s = sum_v exp(z_v - m),  z_t of the target       reads (c, V)
    between     of a sharded vocabulary: (m, s, z_t) of all ranks                three numbers a token
                loss = log s + m - z_t
    second      z_v <- exp(z_v - m - log s) - [v = t]                            reads and writes (c, V)

Each pass is a few lines of PyTorch that torch.compile makes one kernel of, so nothing of size (c, V) exists
beside the logits. In eager PyTorch, log_softmax, its exponential, the minus one and the return to 16 bits are
separate passes over float32 tensors of twice the size. (Milakov & Gimelshein 2018, arXiv 1805.02867, compute
a maximum and a sum in one reading.)

Logits may have more columns than the vocabulary has tokens: the padding counts as -inf, and its gradient is
0. Matrix products need rows of a multiple of 16 bytes, and 50,257 is odd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hpnb.data.tokenizer import IGNORE_INDEX

MaxSumTarget = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (m, s, z_t), (c,) each


@dataclass(frozen=True)
class VocabShard:
    """Which tokens of the vocabulary a rank has.

    Attributes:
        first: the id of its first token.
        combine: (m, s, z_t) of this rank's tokens -> those of the whole vocabulary.
    """

    first: int
    vocab_size: int
    combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], MaxSumTarget]


def loss_and_gradient(
    logits: torch.Tensor,
    vocab_size: int,
    targets: torch.Tensor,
    shard: VocabShard | None,
    backend: Any,
    for_grad: bool,
) -> torch.Tensor:
    """(), the summed loss of `logits` (c, V'), which are overwritten by their gradient if `for_grad`.

    Args:
        vocab_size: V, how many of the V' columns are tokens; of the others the gradient is 0.
        targets: (c,), ids of tokens; -100 counts for nothing.
        shard: which tokens the columns are; None is all.
        backend: of torch.compile; None runs the passes as they are.
    """
    reduce_logits, write_gradient = _PASSES if backend is None else _compile_passes(backend)
    counted = targets != IGNORE_INDEX
    columns = targets if shard is None else targets - shard.first
    elsewhere = ~counted | (columns < 0) | (columns >= vocab_size)
    columns = columns.masked_fill(elsewhere, -1)
    largest, total, target_logit = reduce_logits(logits, columns, vocab_size)
    if shard is not None:
        largest, total, target_logit = shard.combine(largest, total, target_logit)
    log_sum = largest + total.log()
    loss = torch.where(counted, log_sum - target_logit, 0.0).sum()
    if for_grad:
        log_sum = torch.where(counted, log_sum, torch.inf)  # exp(z - inf) is 0
        write_gradient(logits, columns, vocab_size, log_sum)
    return loss


def _reduce_logits(logits: torch.Tensor, columns: torch.Tensor, vocab_size: int) -> MaxSumTarget:
    """(m, s, z_t), each (c,), float32 at least; z_t is 0 where this rank does not have the target."""
    wide = _mask_padding(logits, vocab_size)
    largest = wide.amax(-1, keepdim=True)
    total = (wide - largest).exp().sum(-1)
    target_logit = logits.gather(-1, columns.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(wide.dtype)
    return largest.squeeze(-1), total, torch.where(columns >= 0, target_logit, 0.0)


def _write_gradient(
    logits: torch.Tensor, columns: torch.Tensor, vocab_size: int, log_sum: torch.Tensor
) -> None:
    all_columns = torch.arange(logits.size(-1), device=logits.device)
    softmax = (_mask_padding(logits, vocab_size) - log_sum.unsqueeze(-1)).exp()
    logits.copy_(softmax - (all_columns == columns.unsqueeze(-1)).to(softmax.dtype))


def _mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocab_size == logits.size(-1):
        return wide
    all_columns = torch.arange(logits.size(-1), device=logits.device)
    return wide.masked_fill(all_columns >= vocab_size, -torch.inf)


_PASSES = (_reduce_logits, _write_gradient)


@cache
def _compile_passes(backend: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # A second number of tokens makes them dynamic, and there are no more compilations after that.
    return torch.compile(_reduce_logits, backend=backend), torch.compile(_write_gradient, backend=backend)
