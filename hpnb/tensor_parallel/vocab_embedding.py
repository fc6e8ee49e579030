"""An embedding and an output layer over a vocabulary that is cut: V words over t ranks, V / t each.

    embedding    E = [E_1 ; ... ; E_t], V/t x h each    a rank looks up its own words, and has zeros for the
                                                        others: all-reduce (b, s, h), backward nothing
    head         E^T = [E_1^T | ... | E_t^T]            columns: logits (b, s, V/t), backward all-reduce

(Shoeybi et al. 2019, arXiv 1909.08053, section 3.) Both take the same cut, so a tied weight stays one. The
logits are never put together: `cross_entropy.py` takes them as they are. V need not divide by t: 50,257 words
over 4 ranks are 12,565 + 12,564 + 12,564 + 12,564.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpnb.comm import all_reduce
from hpnb.mesh import Axis
from hpnb.split_sizes import split_sizes


class VocabParallelEmbedding(nn.Module):
    """Rows of an embedding, of which this rank has some: ids (...) -> (..., h), equal on all ranks.

    Args:
        old: the nn.Embedding whose place it takes, with the weight already cut: (V of this rank, h).
        words: V.
        axis: along which the words are cut.
    """

    weight: nn.Parameter

    def __init__(self, old: nn.Embedding, words: int, axis: Axis) -> None:
        super().__init__()
        if old.max_norm is not None or old.scale_grad_by_freq or old.sparse:
            raise ValueError(
                "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be cut along its "
                "words: each of them needs to see all words at once"
            )
        self.axis, self.words = axis, words
        share = split_sizes(words, axis.size)
        self.first, self.own = sum(share[: axis.rank]), share[axis.rank]
        padding = old.padding_idx
        here = padding is not None and self.first <= padding < self.first + self.own
        self.padding_idx = padding - self.first if padding is not None and here else None
        self.weight = nn.Parameter(old.weight) if not isinstance(old.weight, nn.Parameter) else old.weight
        self.train(old.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return F.embedding(ids, self.weight, self.padding_idx)
        own = ids - self.first
        elsewhere = (own < 0) | (own >= self.own)
        if self.own:
            found = F.embedding(own.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
            found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:  # more ranks than words
            found = self.weight.sum() * self.weight.new_zeros((*ids.shape, self.weight.size(1)))
        return all_reduce(found, self.axis)

    def extra_repr(self) -> str:
        return f"{self.own} of {self.words} words, width {self.weight.size(1)}"
