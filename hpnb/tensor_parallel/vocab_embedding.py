"""An embedding and an output layer over a sharded vocabulary: V tokens over t ranks, V / t each.

    embedding    E = [E_1 ; ... ; E_t], V/t x h each    a rank looks up its own tokens, and has zeros for the
                                                        others: all-reduce (b, s, h), backward nothing
    head         E^T = [E_1^T | ... | E_t^T]            columns: logits (b, s, V/t), backward all-reduce

(Shoeybi et al. 2019, arXiv 1909.08053, section 3.) Both take the same shard of E, so a tied weight stays one.
`vocab_cross_entropy.py` takes the logits as they are. They are gathered only if somebody reads them, if the
model has no `loss_function` or somebody has set one, or for outputs that are a tuple (`sharded_logits.py`).
V need not divide by t: 50,257 tokens over 4 ranks are 12,565 + 12,564 + 12,564 + 12,564. 3D shards the
vocabulary over one axis, and each shard again over a second one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hpnb.comm import all_reduce
from hpnb.mesh import Axis
from hpnb.models.in_vocabulary import check_in_vocabulary
from hpnb.split_sizes import split_range


def check_embedding(old: nn.Embedding) -> None:
    """Raises ValueError if it cannot be sharded along its vocabulary."""
    if old.max_norm is not None or old.scale_grad_by_freq or old.sparse:
        raise ValueError(
            "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be sharded along "
            "its vocabulary: each of them needs all rows at once; leave them out, or keep the model full"
        )


class VocabParallelEmbedding(nn.Module):
    """Some rows of an embedding's weight: ids (...) -> (..., h), equal on all ranks.

    Args:
        old: the nn.Embedding that it replaces, with the weight already sharded: (V of this rank, h).
        vocab_size: V.
        axes: along which the vocabulary is sharded, one after the other.
    """

    weight: nn.Parameter

    def __init__(self, old: nn.Embedding, vocab_size: int, *axes: Axis) -> None:
        super().__init__()
        self.axes, self.vocab_size = axes, vocab_size
        self.vocab_start, vocab_end = 0, vocab_size
        for axis in axes:
            start, end = split_range(vocab_end - self.vocab_start, axis.size, axis.rank)
            self.vocab_start, vocab_end = self.vocab_start + start, self.vocab_start + end
        self.rows = vocab_end - self.vocab_start
        padding = old.padding_idx
        is_local = padding is not None and self.vocab_start <= padding < vocab_end
        self.padding_idx = padding - self.vocab_start if padding is not None and is_local else None
        self.register_parameter("weight", old.get_parameter("weight"))
        scale = getattr(old, "embed_scale", None)  # of Gemma, which multiplies what it looks up
        self.register_buffer("embed_scale", torch.as_tensor(scale) if scale is not None else None, False)
        self.train(old.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_token = (ids >= 0) & (ids < self.vocab_size)
        check_in_vocabulary(ids, is_token, f"token ids of 0 to {self.vocab_size - 1}")
        local_ids = ids - self.vocab_start
        elsewhere = (local_ids < 0) | (local_ids >= self.rows)
        if self.rows:
            hidden = F.embedding(local_ids.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
            hidden = hidden.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        else:  # more ranks than tokens
            hidden = self.weight.sum() * self.weight.new_zeros((*ids.shape, self.weight.size(1)))
        for axis in reversed(self.axes):
            hidden = all_reduce(hidden, axis)
        scale = self._buffers["embed_scale"]
        return hidden if scale is None else hidden * scale.to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.rows} of {self.vocab_size} tokens, width {self.weight.size(1)}"
