"""Activation checkpointing: a forward lets go of what it made, and makes it again when the backward needs it.

    "full"         a block keeps its input alone, (B, s, h), for a third more FLOPs
    "attention"    softmax(q k^T) v keeps q, k and v, and nothing of (B, heads, s, s): that is most of the
                   memory where no flash kernel is used, for a few per cent of the FLOPs

Dropout draws the same again. Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv 2205.05198),
section 5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hpnb.data_parallel.fsdp_units import find_blocks
from hpnb.mesh import Recomputation

RECOMPUTED = "hpnb_recomputed"  # what transformers is to call it


def again(model: nn.Module, what: Recomputation) -> None:
    """Let `model` compute again what is said, in place.

    Raises:
        ValueError: "attention" of a model that is not transformers'.
    """
    if what == "attention":
        _attention(model)
    elif what == "full":
        _blocks(model)


def _blocks(model: nn.Module) -> None:
    if isinstance(model, PreTrainedModel):
        # Renamed on its way to transformers 6.
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(model, new, None) or getattr(model, old)
        enable({"use_reentrant": False})
        return
    for block in find_blocks(model) or [model]:
        plain = block.forward

        def forward(*args: Any, own: nn.Module = block, plain: Any = plain, **kwargs: Any) -> Any:
            if not own.training or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return checkpoint(partial(plain, **kwargs), *args, use_reentrant=False)

        block.forward = forward


def _attention(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"activation_checkpointing='attention' finds none in a {type(model).__name__}, which is no model "
            "of transformers; use 'full'"
        )
    AttentionInterface.register(RECOMPUTED, _recomputed)
    AttentionMaskInterface.register(RECOMPUTED, sdpa_mask)
    model.set_attn_implementation(RECOMPUTED)


def _recomputed(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """softmax(q k^T) v, (B, heads, s, head) each."""
    if not module.training or not torch.is_grad_enabled():
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)
    return checkpoint(partial(sdpa_attention_forward, module, **kwargs), q, k, v, *args, use_reentrant=False)
