"""What `python -m hpnb.bench gpt2-xl` and `vit-l16` train: one model, and the same batches for all programs.

    gpt2-xl    48 blocks of 1600, 1024 tokens, 50257 words; 20 heads as published peers, 25 in the original
    vit-l16    24 blocks of 1024, 224 x 224 pixels, 1000 classes
    tiny       the same code within seconds on a CPU, in float32

Work is counted without norms, softmax and GELU, and nothing twice that is computed again:

    GPT-2   72 B s l h^2 (1 + s/(6 h) + V/(12 l h))       Narayanan et al. 2021, arXiv 2104.04473, 5.1
    ViT     the same blocks, with patches and classifier in place of logits     `ViTSize.training_flops`

A model forgets how to predict uniform tokens within no time, so these follow Zipf's law: word k has the share
1 / (k ln V). Pixels are noise whose brightness tells the class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

import hpnb
from hpnb.bench.layouts import Shape
from hpnb.bench.weights import draw_weights
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize
from hpnb.pipeline_parallel.partition import balanced

What = Literal["gpt2-xl", "vit-l16"]
MICROBATCHES = 4  # a rank of a pipeline: 16 on four, as the published peers
HEADS = 20
CLASSES = 1000
_TINY_GPT2 = GPT2Size(hidden=64, layers=8, heads=4, mlp=256, vocab_size=251, length=16)
_TINY_VIT = ViTSize(hidden=64, layers=8, heads=4, mlp=256, patch=8, image=32)


@dataclass(frozen=True)
class Task:
    """A model, and how many rows a step has.

    Attributes:
        what: "gpt2-xl" or "vit-l16".
        batch: images or sequences of a step, over all ranks.
        rows: of one forward at most, where there is no pipeline; t ranks that share all layers take t times
            as many, for each holds a t-th of what they leave.
        bits: 16 is bf16 with float32 masters where the program can have them, 32 is float32.
        loss_chunk: tokens at a time of hpnb's loss; 0 is all of them.
        microbatches: of a pipeline; 0 is `MICROBATCHES` a rank of it.
        lr: of AdamW.
    """

    what: What
    size: GPT2Size | ViTSize
    batch: int
    rows: int
    bits: int
    loss_chunk: int = 0
    microbatches: int = 0
    lr: float = 1e-4

    @property
    def title(self) -> str:
        size = self.size
        if isinstance(size, GPT2Size):
            words, batch = f"{size.vocab_size} words", f"{self.batch} x {size.length} tokens"
        else:
            words, batch = f"{size.tokens} tokens", f"{self.batch} images"
        kind = "bf16" if self.bits == 16 else "float32"
        return (
            f"{self.what}: {size.layers} blocks of {size.hidden}, {size.heads} heads, {words}, {kind}, "
            f"global batch {batch}"
        )

    @property
    def unit(self) -> str:
        """What is counted a second."""
        return "tokens" if isinstance(self.size, GPT2Size) else "images"

    @property
    def units(self) -> int:
        """Tokens or images of a step, over all ranks."""
        return self.batch * (self.size.length if isinstance(self.size, GPT2Size) else 1)

    @property
    def flops(self) -> int:
        """Of a step, over all ranks."""
        if isinstance(self.size, GPT2Size):
            return self.size.training_flops(self.batch)
        return self.size.training_flops(self.batch, CLASSES)

    def on_one(self, ranks: int) -> Task:
        """The same batch per GPU, on one of `ranks`."""
        return replace(self, batch=self.batch // ranks)

    def parts(self, shape: Shape) -> int:
        """Into how many microbatches a replica splits its rows: for a pipeline, or to fit memory.

        Raises:
            ValueError: rows that do not divide.
        """
        mine = self.batch // shape.dp
        fitting = math.ceil(mine / (self.rows * shape.tp))
        parts = fitting if shape.pp == 1 else self.microbatches or MICROBATCHES * shape.pp
        if self.batch % shape.dp or mine % parts:
            raise ValueError(
                f"a batch of {self.batch} does not divide into {shape.dp} x {parts} microbatches; "
                f"{shape.dp * parts} or a multiple of it would"
            )
        return parts

    def build(self) -> nn.Module:
        """transformers' own model, float32, with the same values on all ranks, drawn on the device."""
        made: Any
        if isinstance(self.size, GPT2Size):
            made = hpnb.models.gpt2(self.size, device="meta")
        else:
            made = hpnb.models.vit(self.size, classes=CLASSES, device="meta")
        with torch.device("meta"):  # without the hooks by which hpnb's accepts batches of no rows
            model = type(made)(made.config)
        draw_weights(model)
        if self.bits == 16:  # or programs with 16-bit weights would begin elsewhere than those with float32
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        return model.train()  # type: ignore[no-any-return]

    def draw(self, step: int) -> dict[str, torch.Tensor]:
        """The global batch of that step, the same on every rank."""
        where = hpnb.device()
        g = torch.Generator(where).manual_seed(1 + step)
        if isinstance(self.size, GPT2Size):
            share = torch.rand((self.batch, self.size.length), generator=g, device=where)
            ids = (
                share * math.log(self.size.vocab_size)
            ).exp().long() - 1  # (B, s), word k as often as 1 / k
            ids = ids.clamp(0, self.size.vocab_size - 1)
            return {"input_ids": ids, "labels": ids}
        side = self.size.image
        labels = torch.randint(0, CLASSES, (self.batch,), generator=g, device=where)
        pixels = torch.randn((self.batch, 3, side, side), generator=g, device=where)
        return {"pixel_values": pixels + (labels / CLASSES).view(-1, 1, 1, 1), "labels": labels}

    def cut(self, stages: int) -> list[int]:
        """Layers of each stage, embedding and head among them, by FLOPs: the same cut for every program."""
        size = self.size
        block = size.block()
        if isinstance(size, GPT2Size):
            head = 2.0 * size.length * size.hidden * size.vocab_size
        else:
            head = 2.0 * size.hidden * CLASSES
        return list(balanced([0.0, *[float(block.forward_flops)] * size.layers, head], stages))


def task(
    what: What, device: str, ranks: int, *, tiny: bool = False, batch: int | None = None,
    heads: int | None = None, rows: int | None = None, microbatches: int = 0,
) -> Task:  # fmt: skip
    """The usual task of that name.

    Args:
        device: "cpu" or "cuda".
        batch: over all ranks; by default 16 sequences of gpt2-xl, or 128 images, a rank.
        heads: of gpt2-xl.
        rows: of a forward; by default a rank's share of the batch.

    Raises:
        ValueError: a batch below 1 or one that does not divide by the ranks, or heads that do not fit.
    """
    size: GPT2Size | ViTSize
    if what == "gpt2-xl":
        shape = _TINY_GPT2 if tiny else GPT2_SIZES["1.5b"]
        size, share = replace(shape, heads=heads or (shape.heads if tiny else HEADS)), 4 if tiny else 16
    else:
        size, share = (_TINY_VIT, 4) if tiny else (SIZES["l16"], 128)
        size = replace(size, heads=heads or size.heads)
    batch = share * ranks if batch is None else batch
    if batch < ranks or batch % ranks:
        raise ValueError(f"a batch of {batch} cannot be dealt out evenly to {ranks} ranks; {ranks} could")
    chunk = 0 if what == "vit-l16" else 16 if tiny else 4096
    bits = 16 if device == "cuda" else 32
    return Task(what, size, batch, rows or batch // ranks, bits, chunk, microbatches)


class BatchFeed:
    """The rows of one replica, for a program that is stepped again and again.

    Args:
        replica, replicas: which of how many.
        backwards: rows in the opposite order, so that sums are taken in another one.

    Attributes:
        batch: on this rank's device.
    """

    def __init__(self, task: Task, replica: int = 0, replicas: int = 1, backwards: bool = False) -> None:
        self.task, self.replica, self.replicas, self.backwards = task, replica, replicas, backwards
        self.batch: dict[str, torch.Tensor] = {}
        self.turn(0)

    def turn(self, step: int) -> None:
        """Have the batch of that step."""
        mine = self.task.batch // self.replicas
        rows = slice(self.replica * mine, (self.replica + 1) * mine)
        drawn = {name: value[rows] for name, value in self.task.draw(step).items()}
        self.batch = {name: value.flip(0) if self.backwards else value for name, value in drawn.items()}

    def split(self, parts: int) -> list[dict[str, torch.Tensor]]:
        """The batch in as many microbatches of one size."""
        columns = {name: value.chunk(parts) for name, value in self.batch.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(parts)]
