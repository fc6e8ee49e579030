"""Pretrained weights for a GPT-2 that continues texts, or that classifies them.

A file may hold the whole model or the transformer alone, whose names lack "transformer." in front, as in the
first releases. These hold the causal mask too, as `attn.bias` and `attn.masked_bias`; today it is computed. A
model for shorter sequences keeps the first positions of the longer one.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

from hpnb.models import pretrained
from hpnb.models.gpt2_size import GPT2Size

_BLOCK = re.compile(r"(^|\.)h\.\d+\.")
_OLD_MASKS = (".attn.bias", ".attn.masked_bias")


def load(
    source: str,
    classes: int | None,
    vocab_size: int | None,
    length: int | None,
    dropout: float,
    attention: str,
    requested: GPT2Size | None,
) -> GPT2LMHeadModel | GPT2ForSequenceClassification:
    """The GPT-2 in `source`, a local folder or a name on the hub, in float32 on the CPU.

    Args:
        classes: None for a language model, else how many outputs the classifier has.
        vocab_size, requested: what it must have, positions aside; None takes any.
        length: how many positions are kept; None keeps all.
    """

    def prepare(config: Any) -> None:
        if requested is not None:
            sizes = {name: size for name, size in vars(requested).items() if name != "length"}
            pretrained.check_size(source, vars(GPT2Size.of(config)), sizes)
        _check(source, config, vocab_size, length)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
        config.use_cache = False
        if classes is not None:
            config.problem_type = None  # the labels to come say which loss it is
            if config.num_labels != classes:
                config.num_labels = classes
            _set_pad_token(source, config)

    model = pretrained.read_pretrained(
        GPT2LMHeadModel if classes is None else GPT2ForSequenceClassification,
        source,
        "gpt2",
        prepare,
        head=() if classes is None else ("score.weight",),
        is_block_weight=lambda name: bool(_BLOCK.search(name)) and not name.endswith(_OLD_MASKS),
        attention=attention,
    )
    if length is not None and length < model.config.n_positions:
        _shorten(model, length)
    return model


def _check(source: str, config: Any, vocab_size: int | None, length: int | None) -> None:
    if config.add_cross_attention:
        raise ValueError(f"{source} has cross attention, which cannot be cut; use a GPT-2 without it")
    if vocab_size is not None and vocab_size != config.vocab_size:
        problem = f"{source} has vocab_size={config.vocab_size}, not {vocab_size}"
        raise ValueError(f"{problem}; leave vocab_size out to take it as it is")
    if length is not None and not 1 <= length <= config.n_positions:
        raise ValueError(f"{source} has positions for 1 to {config.n_positions} tokens, not for {length}")


def _set_pad_token(source: str, config: Any) -> None:
    """A classifier reads the last token that is no padding, so it must know what pads: the end of a text."""
    if config.pad_token_id is None:
        if not isinstance(config.eos_token_id, int):
            problem = f"{source} names no token that pads and no single one that ends a text"
            raise ValueError(f"{problem}; set pad_token_id in its config.json")
        config.pad_token_id = config.eos_token_id
    if not 0 <= config.pad_token_id < config.vocab_size:
        problem = (
            f"{source} pads with token {config.pad_token_id}, but has tokens 0 to {config.vocab_size - 1}"
        )
        raise ValueError(f"{problem}; set pad_token_id in its config.json")


def _shorten(model: Any, length: int) -> None:
    positions = model.transformer.wpe.weight.detach()[:length].clone()
    model.transformer.wpe = nn.Embedding.from_pretrained(positions, freeze=False)
    model.config.n_positions = length
