"""Where a ViT of timm may be split, and the role of each of its weights.

    import timm
    from hpnb.models import timm_vit

    model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10, drop_path_rate=0.1)
    timm_vit.register(type(model))                    # once for each class
    batch = {"x": images, "labels": labels}           # "x" is what the forward of timm calls its images

    patch_embed      images (B, 3, h, w) -> (B, s-t, h); t tokens in front, of class and distillation
    blocks.0 ..      x = x + drop_path(ls1(attn(norm1(x))));  x = x + drop_path(ls2(mlp(norm2(x))))
    norm             then the class token goes to `head`, by way of `pre_logits` if there is a representation

With a distillation token the logits of two heads are averaged, or both given with `distilled_training`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb.models import registry
from hpnb.models.model_anatomy import Anatomy, Attention, Inputs, Part, root_parameters, set_heads, tied
from hpnb.models.role import Role, linear, norm

_TOKENS = ("cls_token", "dist_token", "pos_embed")
_EMBEDDING = ("patch_embed", "pos_drop", "patch_drop", "norm_pre")
_HEAD = ("norm", "fc_norm", "pre_logits", "head_drop", "head", "head_dist")


def register(kind: type[nn.Module]) -> None:
    """Let hpnb take apart models of `kind`, timm's VisionTransformer or one with the same pieces."""
    registry.register(kind, anatomy, roles, attentions)


@dataclass(frozen=True)
class TimmViTAnatomy(Anatomy):
    """Of a VisionTransformer of timm.

    Attributes:
        both_heads: give the logits of both heads while training, as timm's `distilled_training`.
        length: s, the tokens of an image with those in front.
    """

    both_heads: bool = False
    length: int = 0

    def embed(self, inputs: Inputs) -> torch.Tensor:
        pieces = {part.name: part.module for part in self.embedding}
        root: Any = pieces.pop("")
        x: torch.Tensor = pieces.pop("patch_embed")(inputs["x"])  # (B, s-t, h)
        tokens = [getattr(root, name) for name in _TOKENS[:2] if hasattr(root, name)]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in tokens), x], dim=1) + root.pos_embed
        for piece in pieces.values():
            x = piece(x)
        return x  # (B, s, h)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        out: torch.Tensor = block.module(hidden)
        return out

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        return len(inputs["x"]), self.length

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        pieces = {part.name: part.module for part in self.head}
        hidden = pieces.pop("norm")(hidden)
        head, distilled = pieces.pop("head"), pieces.pop("head_dist", None)
        before_head = nn.Sequential(*pieces.values())  # fc_norm, pre_logits, head_drop
        logits = head(before_head(hidden[:, 0]))
        if distilled is None:
            return logits
        logits_dist = distilled(before_head(hidden[:, 1]))
        both = self.both_heads and head.training
        return (logits, logits_dist) if both else (logits + logits_dist) / 2


def anatomy(model: Any) -> TimmViTAnatomy:
    for name, fits in (("global_pool", ("token",)), ("reg_token", (None,)), ("attn_pool", (None,)),
                       ("no_embed_class", (False,)), ("dynamic_img_size", (False,))):  # fmt: skip
        if (value := getattr(model, name, fits[0])) not in fits:
            raise ValueError(
                f"this {type(model).__name__} has {name}={value!r}, and hpnb.models.timm_vit takes "
                f"{fits[0]!r}; register parts of your own (examples/own_model.py)"
            )
    tokens = [name for name in _TOKENS if getattr(model, name, None) is not None]
    first = (root_parameters(model, *tokens), *_parts(model, _EMBEDDING))
    blocks = (Part(f"blocks.{i}", block) for i, block in enumerate(model.blocks))
    both_heads = bool(getattr(model, "distilled_training", False))
    length = model.pos_embed.size(1)
    head = _parts(model, _HEAD)
    return TimmViTAnatomy(first, tuple(blocks), head, tied(model), both_heads=both_heads, length=length)


def roles(model: Any) -> dict[str, Role]:
    """Of all that such a ViT may have, except norms of queries and keys."""
    return dict(_table(model))


def _table(model: Any) -> Iterator[tuple[str, Role]]:
    for name in _TOKENS:  # (1, t, h): added, not multiplied
        yield name, Role("embedding", out_dim=2)
    yield from linear("patch_embed.proj", "embedding")
    for name in ("norm_pre", "norm", "fc_norm"):
        yield from norm(name)
    for i, block in enumerate(model.blocks):
        for name in (f"blocks.{i}.norm1", f"blocks.{i}.norm2"):
            yield from norm(name)
        for name in (f"blocks.{i}.ls1.gamma", f"blocks.{i}.ls2.gamma"):  # LayerScale
            yield name, Role("norm", out_dim=0)
        heads, neurons = block.attn.num_heads, block.mlp.fc1.out_features
        yield from linear(f"blocks.{i}.attn.qkv", "column", units=heads, fused=3)
        yield from linear(f"blocks.{i}.attn.proj", "row", units=heads)
        yield from linear(f"blocks.{i}.mlp.fc1", "column", units=neurons)
        yield from linear(f"blocks.{i}.mlp.fc2", "row", units=neurons)
    for name in ("pre_logits.fc", "head", "head_dist"):
        yield from linear(name, "head")


def attentions(model: Any) -> tuple[Attention, ...]:
    modules = ((f"blocks.{i}.attn", block.attn) for i, block in enumerate(model.blocks))
    return tuple(
        Attention(path, module.num_heads, partial(set_heads, path, module, "num_heads", "attn_dim"))
        for path, module in modules
    )


def _parts(model: Any, names: tuple[str, ...]) -> tuple[Part, ...]:
    return tuple(Part(name, getattr(model, name)) for name in names if getattr(model, name, None) is not None)
