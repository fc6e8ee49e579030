"""What `python -m hpnb.bench tensor` trains: a ViT on images, or a GPT-2 on sequences of full length.

Every rank builds the whole model and the whole batch, with the same values: tensor parallelism shares one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.bench.weights import draw_weights
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize

CLASSES = 10
MODELS = {"cuda": ("vit", "gpt2"), "cpu": ("vit",)}  # by the kind of device, if none is asked for


@dataclass(frozen=True)
class Task:
    """A model, and so many images or sequences a step."""

    size: ViTSize | GPT2Size
    count: int
    dtype: torch.dtype

    @property
    def model(self) -> str:
        return "vit" if isinstance(self.size, ViTSize) else "gpt2"

    @property
    def name(self) -> str:
        size, kind = self.size, str(self.dtype).removeprefix("torch.")
        if isinstance(size, ViTSize):
            what, batch = f"ViT, {size.tokens} tokens", f"{self.count} images"
        else:
            what, batch = f"GPT-2, {size.vocab_size} words", f"{self.count} x {size.length} tokens"
        return f"{what}, {size.layers} blocks of {size.hidden}, {size.heads} heads, {kind}, {batch}"

    def build(self) -> nn.Module:
        """The whole model on this rank, drawn on the device, which takes no time."""
        size, options = self.size, {"device": "meta", "dtype": self.dtype}
        model: Any
        if isinstance(size, ViTSize):
            model = hpnb.models.vit(size, classes=CLASSES, **options)  # type: ignore[arg-type]
        else:
            model = hpnb.models.gpt2(size, **options)  # type: ignore[arg-type]
        draw_weights(model)
        return model  # type: ignore[no-any-return]

    def batch(self) -> dict[str, torch.Tensor]:
        """What the model is called with."""
        torch.manual_seed(1)
        size, where = self.size, hpnb.device()
        if isinstance(size, ViTSize):
            pixels = torch.randn(self.count, 3, size.image, size.image, device=where)
            labels = torch.arange(self.count, device=where) % CLASSES
            return {"pixel_values": pixels.to(self.dtype), "labels": labels}
        ids = torch.randint(0, size.vocab_size, (self.count, size.length), device=where)
        return {"input_ids": ids, "labels": ids}


def task(device: torch.device, model: str, batch: int | None = None, heads: int | None = None) -> Task:
    """What is trained on this kind of device.

    Args:
        model: "vit" or "gpt2".
        batch: images or sequences of a step, over all ranks; None is the usual number.
        heads: of a GPT-2, if not the usual number.

    Raises:
        ValueError: no batch, or heads that do not fit.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} is no batch; use 1 or more")
    gpu = device.type != "cpu"
    dtype = torch.bfloat16 if gpu else torch.float32
    if model == "vit":
        return Task(SIZES["l16" if gpu else "laptop"], batch or (64 if gpu else 16), dtype)
    size = replace(GPT2_SIZES["1.5b" if gpu else "laptop"], heads=heads or (20 if gpu else 4))
    return Task(size, batch or (8 if gpu else 4), dtype)
