"""Cross entropy in two passes over logits, the second of which leaves their gradient in their place.

    first       m = max_v z_v,  s = sum_v exp(z_v - m),  z_t of the target       reads (c, V)
    between     words that are cut over ranks: (m, s, z_t) of all of them        three numbers a token
                loss = log s + m - z_t
    second      z_v <- exp(z_v - m - log s) - [v = t]                            reads and writes (c, V)

Each is a few lines of PyTorch, of which torch.compile makes one kernel: nothing of size (c, V) exists beside
the logits. In eager PyTorch log_softmax, its exponential, the minus one and the return to 16 bits are passes
of their own over float32 tensors twice as large. (Milakov & Gimelshein 2018, arXiv 1805.02867, are the source
of a maximum and a sum in one reading.)

Logits may have more columns than there are words: those are taken for -inf, and their gradient is 0. Matrix
products want rows of a multiple of 16 bytes, and 50,257 words are odd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hpnb.data.tokenizer import IGNORE_INDEX

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class VocabShard:
    """Which of the words a rank has.

    Attributes:
        first: number of its first word.
        combine: makes (m, s, z_t), each (c,), of this rank's words those of all words.
    """

    first: int
    combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Three]


def loss_and_gradient(
    logits: torch.Tensor,
    words: int,
    targets: torch.Tensor,
    here: VocabShard | None,
    backend: Any,
    trains: bool,
) -> torch.Tensor:
    """(), the summed loss of `logits` (c, V'), which become its gradient if it `trains`.

    Args:
        words: V, how many of the V' columns are words; of the others the gradient is 0.
        targets: (c,), numbers of words; -100 counts for nothing.
        here: which words these are; None is all.
        backend: of torch.compile; None runs the passes as they are.
    """
    first, second = (_first, _second) if backend is None else _compiled(backend)
    counted = targets != IGNORE_INDEX
    own = targets if here is None else targets - here.first
    own = own.masked_fill(~counted | (own < 0) | (own >= words), -1)  # -1: no column of this rank
    most, total, at = first(logits, own, words)
    if here is not None:
        most, total, at = here.combine(most, total, at)
    log_sum = most + total.log()
    loss = torch.where(counted, log_sum - at, 0.0).sum()
    if trains:
        second(logits, own, words, torch.where(counted, log_sum, torch.inf))  # exp(z - inf) is 0
    return loss


@cache
def _compiled(backend: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # A second number of tokens makes it dynamic, and there are no more compilations after that.
    return torch.compile(_first, backend=backend), torch.compile(_second, backend=backend)


def _first(logits: torch.Tensor, own: torch.Tensor, words: int) -> Three:
    """(m, s, z_t), each (c,), float32 at least; z_t is 0 where the target is not here."""
    wide = _wide(logits, words)
    most = wide.amax(-1, keepdim=True)
    total = (wide - most).exp().sum(-1)
    at = logits.gather(-1, own.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(wide.dtype)
    return most.squeeze(-1), total, torch.where(own >= 0, at, 0.0)


def _second(logits: torch.Tensor, own: torch.Tensor, words: int, log_sum: torch.Tensor) -> None:
    columns = torch.arange(logits.size(-1), device=logits.device)
    softmax = (_wide(logits, words) - log_sum.unsqueeze(-1)).exp()
    logits.copy_(softmax - (columns == own.unsqueeze(-1)).to(softmax.dtype))


def _wide(logits: torch.Tensor, words: int) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if words == logits.size(-1):
        return wide
    columns = torch.arange(logits.size(-1), device=logits.device)
    return wide.masked_fill(columns >= words, -torch.inf)
