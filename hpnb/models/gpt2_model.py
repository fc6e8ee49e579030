"""A GPT-2 that continues texts or classifies them: from scratch, equal on every rank, or pretrained.

    hpnb.models.gpt2("laptop")                                     # logits of the next token, (B, s, 509)
    hpnb.models.gpt2("124m", classes=2, dropout=0.1)               # logits of a text, (B, 2)
    hpnb.models.gpt2(classes=2, pretrained="openai-community/gpt2", length=256)
    with torch.device("meta"):
        hpnb.models.gpt2("1.5b")                                   # shapes without memory

The classes are transformers' own, unmodified: GPT2LMHeadModel and GPT2ForSequenceClassification.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from hpnb.models.gpt2_load import load
from hpnb.models.gpt2_size import GPT2_SIZES, GPT2Size
from hpnb.models.placeholder_sample import accept_empty_batch, drop_empty_mask
from hpnb.models.registry import anatomy
from hpnb.models.seeded_init import seeded_init

END_OF_TEXT = 50256  # in GPT-2's vocabulary, of which it is the last


def gpt2(
    size: str | GPT2Size | None = None,
    *,
    classes: int | None = None,
    vocab_size: int | None = None,
    length: int | None = None,
    pretrained: str | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    attention: str = "sdpa",
) -> GPT2LMHeadModel | GPT2ForSequenceClassification:
    """A GPT-2 in training mode, which takes input_ids (B, s), and attention_mask (B, s) if there is padding.

    Args:
        size: "laptop", "124m", "355m", "774m", "1.5b" or a GPT2Size; by default "laptop", or that of
            `pretrained`.
        classes: how many outputs a classifier of texts has; None for a language model. A classifier reads
            the last token of a sequence that is not config.pad_token_id, by default the one that ends a text:
            50256, or the last of a smaller vocabulary.
        vocab_size: how many tokens there are; by default those of the size, or of `pretrained`.
        length: positions, the longest sequence; by default as the size or `pretrained` has them. Of
            pretrained positions the first are kept.
        pretrained: a folder that save_pretrained wrote, or a name on the Hugging Face hub. Its classifier is
            kept if it has as many classes, else initialised from the seed.
        dropout: fraction of the values set to 0 after the embedding, the attention and the MLP, and of the
            attention's weights.
        dtype: of the weights; float32 by default. Values are drawn in float32, so that a model in float64
            starts where the one in float32 does.
        device: where the model ends up; by default PyTorch's default device. Values are drawn on the CPU: the
            same ones whatever the device. On "meta" nothing is drawn.
        seed: of what is drawn. The generators of the caller are left as they were.
        attention: "sdpa", PyTorch's scaled_dot_product_attention, or "eager", product by product.

    Raises:
        ValueError: sizes that do not fit, or weights that are not a GPT-2's.
        OSError: the pretrained weights cannot be had.

    >>> hpnb.models.gpt2("laptop").config.n_layer
    4
    """
    if classes is not None and classes < 2:
        raise ValueError(
            f"classes={classes} leaves nothing to distinguish; use 2 or more, or None for a language model"
        )
    if attention not in ("sdpa", "eager"):
        raise ValueError(f"attention={attention!r} is not known here; use 'sdpa' or 'eager'")
    target = torch.get_default_device() if device is None else torch.device(device)
    requested = _size(size) if size is not None or pretrained is None else None
    if requested is not None and vocab_size is not None:
        requested = replace(requested, vocab_size=vocab_size)
    with seeded_init(seed, target):
        if pretrained is None:
            assert requested is not None
            shape = requested if length is None else replace(requested, length=length)
            model = _scratch(shape, classes, dropout, attention)
        elif target.type == "meta":
            raise ValueError(f"the meta device holds no values of {pretrained}; leave pretrained out there")
        else:
            model = load(pretrained, classes, vocab_size, length, dropout, attention, requested)
    accept_empty_batch(anatomy(model))
    model.transformer.register_forward_pre_hook(drop_empty_mask, with_kwargs=True)
    return model.to(device=target, dtype=dtype or torch.float32).train()


def _size(size: str | GPT2Size | None) -> GPT2Size:
    if isinstance(size, GPT2Size):
        return size
    if size is not None and size not in GPT2_SIZES:
        raise ValueError(f"no GPT-2 of size {size!r}; use {', '.join(GPT2_SIZES)} or a GPT2Size(...)")
    return GPT2_SIZES[size or "laptop"]


def _scratch(
    size: GPT2Size, classes: int | None, dropout: float, attention: str
) -> GPT2LMHeadModel | GPT2ForSequenceClassification:
    end = min(END_OF_TEXT, size.vocab_size - 1)
    config = GPT2Config(
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_inner=size.mlp,
        vocab_size=size.vocab_size,
        n_positions=size.length,
        bos_token_id=end,
        eos_token_id=end,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        attn_implementation=attention,
    )
    if classes is None:
        return GPT2LMHeadModel(config)
    config.num_labels, config.pad_token_id = classes, end
    return GPT2ForSequenceClassification(config)
