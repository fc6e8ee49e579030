"""Where a ViT may be split, and the role of each of its weights.

    embeddings      patches (B, 3, image, image) -> (B, s-1, h), class token in front, positions added
    layers.0 ..     x = x + attention(norm(x));  x = x + mlp(norm(x))                         (B, s, h)
    layernorm       then the class token alone, (B, h), goes to the classifier: (B, classes)

A pipeline splits between two layers; tensor parallelism splits the matrices in each. Weight decay leaves
biases, norms, positions and the class token alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import ViTForImageClassification, ViTModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from hpnb.models.model_anatomy import Anatomy, Attention, Inputs, Part, set_heads, tied
from hpnb.models.role import Role, linear, norm


@dataclass(frozen=True)
class ViTAnatomy(Anatomy):
    """Of a ViTForImageClassification, whose head is norm and classifier, or of a ViTModel, whose head is the
    norm and a pooler if it has one."""

    classifies: bool = True
    patch: int = 16

    def embed(self, inputs: Inputs) -> torch.Tensor:
        if inputs.get("attention_mask") is not None:
            raise ValueError("a ViT that is cut takes no attention_mask; leave it out: all patches are seen")
        (patches,) = (part.module for part in self.embedding)
        dtype = patches.get_parameter("patch_embeddings.projection.weight").dtype
        hidden: torch.Tensor = patches(
            inputs["pixel_values"].to(dtype),  # as the model does: pictures are float32
            bool_masked_pos=inputs.get("bool_masked_pos"),
            interpolate_pos_encoding=bool(inputs.get("interpolate_pos_encoding")),
        )
        return hidden

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        out: torch.Tensor = block.module(hidden, None)  # every patch sees every patch: no mask
        return out

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        batch_size, _, height, width = inputs["pixel_values"].shape
        return batch_size, (height // self.patch) * (width // self.patch) + 1  # and the class token

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        layernorm, *last = (part.module for part in self.head)
        hidden = layernorm(hidden)  # (B, s, h)
        if self.classifies:
            (classifier,) = last
            return ImageClassifierOutput(logits=classifier(hidden[:, 0, :]))  # (B, classes)
        pooled = last[0](hidden) if last else None  # (B, h)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


def anatomy(model: ViTForImageClassification | ViTModel) -> ViTAnatomy:
    core, path = _core(model)
    classifies = core is not model
    head = [Part(f"{path}layernorm", core.layernorm)]
    if classifies:
        head.append(Part("classifier", model.classifier))
    elif core.pooler is not None:
        head.append(Part(f"{path}pooler", core.pooler))
    blocks = (Part(f"{path}layers.{i}", block) for i, block in enumerate(core.layers))
    embedding = (Part(f"{path}embeddings", core.embeddings),)
    return ViTAnatomy(embedding, tuple(blocks), tuple(head), tied(model), classifies, core.config.patch_size)


def roles(model: ViTForImageClassification | ViTModel) -> dict[str, Role]:
    """Roles of all that a ViT may have: a bias or a pooler that this one lacks is in the table too."""
    core, path = _core(model)
    config = core.config
    return dict(_table(path, len(core.layers), config.num_attention_heads, config.intermediate_size))


def _table(path: str, layers: int, heads: int, mlp: int) -> Iterator[tuple[str, Role]]:
    vector = Role("embedding", out_dim=2)  # (1, 1, h) or (1, s, h): added, not multiplied
    yield f"{path}embeddings.cls_token", vector
    yield f"{path}embeddings.mask_token", vector
    yield f"{path}embeddings.position_embeddings", vector
    # (h, 3, patch, patch): a matrix that is applied to every patch
    yield from linear(f"{path}embeddings.patch_embeddings.projection", "embedding")
    for block in (f"{path}layers.{i}" for i in range(layers)):
        yield from norm(f"{block}.layernorm_before")
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from linear(f"{block}.attention.{name}", "column", units=heads)
        yield from linear(f"{block}.attention.o_proj", "row", units=heads)
        yield from norm(f"{block}.layernorm_after")
        yield from linear(f"{block}.mlp.fc1", "column", units=mlp)
        yield from linear(f"{block}.mlp.fc2", "row", units=mlp)
    yield from norm(f"{path}layernorm")
    yield from linear(f"{path}pooler.dense", "head")
    yield from linear("classifier", "head")


def attentions(model: ViTForImageClassification | ViTModel) -> tuple[Attention, ...]:
    core, path = _core(model)
    modules = ((f"{path}layers.{i}.attention", block.attention) for i, block in enumerate(core.layers))
    # Its forward folds heads by their width and never asks for the width of all.
    return tuple(
        Attention(name, m.num_attention_heads, partial(set_heads, name, m, "num_attention_heads", None))
        for name, m in modules
    )


def _core(model: ViTForImageClassification | ViTModel) -> tuple[ViTModel, str]:
    """The ViTModel, and its path in `model`."""
    return (model, "") if isinstance(model, ViTModel) else (model.vit, "vit.")
