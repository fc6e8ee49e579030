"""Pretrained weights for a ViT with a classifier for the task at hand.

Positions are interpolated where images have another size: an image of n patches a side meets an m x m map of
positions, enlarged or shrunk as a picture.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from transformers import ViTForImageClassification

from hpnb.models import pretrained
from hpnb.models.vit_size import ViTSize

HEAD = ("classifier.weight", "classifier.bias")
POSITIONS = "vit.embeddings.position_embeddings"


def load(
    source: str, classes: int, image_size: int | None, dropout: float, requested: ViTSize | None
) -> ViTForImageClassification:
    """The ViT in `source`, a local folder or a name on the hub, in float32 on the CPU.

    Args:
        requested: the size that it must have, its images aside; None takes any.
    """

    def prepare(config: Any) -> None:
        if requested is not None:
            sizes = {name: size for name, size in vars(requested).items() if name != "image"}
            pretrained.check_size(source, vars(ViTSize.of(config)), sizes)
        config.hidden_dropout_prob, config.attention_probs_dropout_prob = dropout, 0.0
        config.problem_type = None  # the labels to come say which loss it is
        if config.num_labels != classes:
            config.num_labels = classes

    model = pretrained.read_pretrained(
        ViTForImageClassification,
        source,
        "vit",
        prepare,
        head=HEAD,
        is_block_weight=lambda name: ".layer" in name,
    )
    side = model.config.image_size
    if image_size is None and isinstance(requested, ViTSize) and requested.image != side:
        warnings.warn(
            f"{source} was trained with images of {side} pixels and keeps them, although the size asks for "
            f"{requested.image}: pass image_size={requested.image} to resize its positions, or {side}",
            stacklevel=3,
        )
    if image_size is None or image_size == side:
        return model
    return _resized(model, image_size)


def _resized(model: ViTForImageClassification, image: int) -> ViTForImageClassification:
    """The same ViT for images of another size: a new map of positions, everything else as it is."""
    state, config = model.state_dict(), model.config
    before, after = ViTSize.of(config), replace(ViTSize.of(config), image=image)
    config.image_size = image
    state[POSITIONS] = _positions(state[POSITIONS], before.image // before.patch, after.image // after.patch)
    with torch.device("meta"):
        resized = ViTForImageClassification(config)
    resized.load_state_dict(state, assign=True)
    return resized


def _positions(old: torch.Tensor, side: int, new: int) -> torch.Tensor:
    """(1, 1 + side^2, h) -> (1, 1 + new^2, h); the class token's stays."""
    grid = old[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)  # (1, h, side, side)
    grid = torch.nn.functional.interpolate(grid, size=(new, new), mode="bicubic")
    return torch.cat([old[:, :1], grid.flatten(2).mT], dim=1)
