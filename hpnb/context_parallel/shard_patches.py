"""The tokens of a ViT on the ranks of a context axis: each rank has as many patches as any other.

    embeddings     (B, s, h)         all patches and the class token, computed by every rank
       | shard_tokens                each rank keeps its slice, padded with zeros where cp does not divide s
    layers         (B, s / cp, h)    attention to the s tokens of all ranks, and never to padding
    layernorm      (B, s / cp, h)
       | broadcast_class_token       the first token of rank 0
    classifier     (B, 1, h)         the same logits on every rank

The ranks of cp have the same labels and compute the same loss. It is divided by the targets of all ranks of
dp x cp, which count every sample cp times. So a rank contributes a cp-th of the classifier's gradient, and
the backward of the broadcast sums these cp-ths on rank 0. The gradients of the layers are those of a rank's
tokens, as in a language model. The sum over dp x cp is therefore exact.

Shards are contiguous: every token sees all others, so there is no causal work to balance by a zigzag. Every
rank computes the embeddings of all patches, which is under 1 % of the FLOPs of a ViT-B/16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from transformers import ViTForImageClassification

from hpnb import comm
from hpnb.context_parallel.shard_sequence import padded_length
from hpnb.mesh import Axis
from hpnb.models.model_anatomy import Inputs, WrappedAnatomy, wrap_anatomy
from hpnb.models.registry import anatomy


def shard_patches(model: ViTForImageClassification, axis: Axis) -> Callable[[Inputs], int]:
    """Let the layers of `model` run on this rank's tokens, in place.

    Returns:
        A function of a batch that returns s, the tokens of an image.
    """
    parts = anatomy(model)
    embeddings, layernorm = parts.embedding[0].module, parts.head[0].module
    no_parts = parts.with_parts()  # the model's weights would stay with a pipeline stage
    embeddings.register_forward_hook(lambda module, args, hidden: shard_tokens(hidden, axis))
    layernorm.register_forward_hook(lambda module, args, hidden: broadcast_class_token(hidden, axis))
    wrap_anatomy(model, partial(PatchShards.around, ranks=axis.size), innermost=True)
    return lambda inputs: no_parts.tokens(inputs)[1]


def shard_tokens(hidden: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's tokens, (B, s, h) -> (B, s / cp, h), with s padded by zeros to a multiple of cp."""
    length = padded_length(hidden.size(1), axis.size, zigzag=False) // axis.size
    local = hidden[:, axis.rank * length : (axis.rank + 1) * length]
    return F.pad(local, (0, 0, 0, length - local.size(1)))


def broadcast_class_token(hidden: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The first token of rank 0: (B, s / cp, h) -> (B, 1, h). The backward sums over the ranks."""
    return comm.broadcast(hidden[:, :1], axis)


@dataclass(frozen=True)
class PatchShards(WrappedAnatomy):
    """Of a ViT whose layers get this rank's tokens; `ranks` are those of the context axis."""

    ranks: int = field(kw_only=True)

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        samples, length = self.inner.tokens(inputs)
        return samples, padded_length(length, self.ranks, zigzag=False) // self.ranks
