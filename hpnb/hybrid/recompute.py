"""Activation checkpointing: the forward drops activations, and the backward recomputes them.

    "full"         a block keeps only its input, (B, s, h), and costs a third more FLOPs
    "attention"    softmax(q k^T) v keeps q, k and v, but nothing of (B, heads, s, s). Without a flash kernel
                   that is most of the memory, for a few per cent of the FLOPs

Dropout draws the same mask again. Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv
2205.05198), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

RECOMPUTED = "hpnb_recomputed"  # the name under which transformers finds the recomputed attention


def enable_recomputation(
    model: nn.Module, what: Recomputation, blocks: Sequence[nn.Module] | None = None
) -> None:
    """Let `model` recompute what `what` names, in place.

    Args:
        blocks: the modules that "full" recomputes; by default the model's blocks.

    Raises:
        ValueError: "attention" for a model that is not from transformers, or whose attention transformers
            cannot exchange.
    """
    if what == "attention":
        _recompute_attention(model)
    elif what == "full" and blocks is None and isinstance(model, PreTrainedModel):
        # The method is renamed on its way to transformers 6.
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(model, new, None) or getattr(model, old)
        enable({"use_reentrant": False})
    elif what == "full":
        for block in (find_blocks(model) or [model]) if blocks is None else blocks:
            _recompute_block(block)


def _recompute_block(block: nn.Module) -> None:
    block.forward = partial(_run_recomputed, block, block.forward)  # a partial, so that deepcopy follows it


def _run_recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)


def _recompute_attention(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"activation_checkpointing='attention' finds no attention in a {type(model).__name__}, which is "
            "not a model of transformers; use 'full'"
        )
    AttentionInterface.register(RECOMPUTED, _recomputed)
    AttentionMaskInterface.register(RECOMPUTED, sdpa_mask)
    model.set_attn_implementation(RECOMPUTED)  # which only warns where it can do nothing
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    fixed = [type(m).__name__ for m in models if m.config._attn_implementation != RECOMPUTED]
    if fixed:
        raise ValueError(
            f"activation_checkpointing='attention' cannot exchange the attention of a {fixed[0]}, which does "
            "not call transformers' attention interface, so nothing would be recomputed; use 'full'"
        )


def _recomputed(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """softmax(q k^T) v, (B, heads, s, head) each."""
    if not module.training or not torch.is_grad_enabled():
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)
    return checkpoint(partial(sdpa_attention_forward, module, **kwargs), q, k, v, *args, use_reentrant=False)
