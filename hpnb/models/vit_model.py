"""A ViT for image classification: from scratch, equal on every rank, or from pretrained weights.

    hpnb.models.vit("laptop", classes=3)                                         # trains on a laptop
    hpnb.models.vit("b16", classes=10, image_size=32, dtype=torch.bfloat16, device=hpnb.device())
    hpnb.models.vit(classes=3, pretrained="google/vit-large-patch16-224-in21k")  # with a new classifier
    with torch.device("meta"):
        hpnb.models.vit("l16", classes=1000)                                     # shapes without memory

The class is transformers' own, unmodified. Attention is PyTorch's scaled_dot_product_attention.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import ViTConfig, ViTForImageClassification

from hpnb.models.placeholder_sample import accept_empty_batch
from hpnb.models.registry import anatomy
from hpnb.models.seeded_init import seeded_init
from hpnb.models.vit_load import load
from hpnb.models.vit_size import SIZES, ViTSize


def vit(
    size: str | ViTSize | None = None,
    *,
    classes: int,
    image_size: int | None = None,
    pretrained: str | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> ViTForImageClassification:
    """A ViTForImageClassification in training mode, which takes pixel_values (B, 3, image, image).

    Args:
        size: "laptop", "b16", "l16" or a ViTSize; by default "laptop", or that of `pretrained`.
        classes: how many outputs the classifier has.
        image_size: side of the images in pixels, a multiple of the patch; by default that of the size.
            Pretrained positions are interpolated to it (Dosovitskiy et al. 2021, section 3.2).
        pretrained: a folder that save_pretrained wrote, or a name on the Hugging Face hub. Its classifier is
            kept if it has as many classes, else initialised from the seed.
        dropout: fraction of the values set to 0 after the embedding, the attention and the MLP.
        dtype: of the weights; float32 by default. Values are drawn in float32, so that a model in float64
            starts where the one in float32 does.
        device: where the model ends up; by default PyTorch's default device. Values are drawn on the CPU: the
            same ones whatever the device. On "meta" nothing is drawn.
        seed: of what is drawn. The generators of the caller are left as they were.

    Raises:
        ValueError: sizes that do not fit, or weights that are not a ViT's.
        OSError: the pretrained weights cannot be had.

    >>> sum(p.numel() for p in hpnb.models.vit("laptop", classes=3).parameters())
    413699
    """
    if classes < 2:
        raise ValueError(f"classes={classes} leaves nothing to distinguish; use 2 or more")
    target = torch.get_default_device() if device is None else torch.device(device)
    requested = _size(size) if size is not None or pretrained is None else None
    with seeded_init(seed, target):
        if pretrained is None:
            assert requested is not None
            shape = requested if image_size is None else replace(requested, image=image_size)
            model = _scratch(shape, classes, dropout)
        elif target.type == "meta":
            raise ValueError(f"the meta device holds no values of {pretrained}; leave pretrained out there")
        else:
            model = load(pretrained, classes, image_size, dropout, requested)
    accept_empty_batch(anatomy(model))
    return model.to(device=target, dtype=dtype or torch.float32).train()


def _size(size: str | ViTSize | None) -> ViTSize:
    if isinstance(size, ViTSize):
        return size
    if size is not None and size not in SIZES:
        raise ValueError(f"no ViT of size {size!r}; use {', '.join(SIZES)} or a ViTSize(...)")
    return SIZES[size or "laptop"]


def _scratch(size: ViTSize, classes: int, dropout: float) -> ViTForImageClassification:
    config = ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.mlp,
        patch_size=size.patch,
        image_size=size.image,
        num_labels=classes,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config)
