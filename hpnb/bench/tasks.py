"""What the benchmarks train: one model, and the same batches for all programs.

    gpt2-xl    48 blocks of 1600, 1024 tokens, 50257 words; 20 heads as published peers, 25 in the original
    vit-l16    24 blocks of 1024, 224 x 224 pixels, 1000 classes
    tiny       the same code within seconds on a CPU, in float32

FLOPs are counted without norms, softmax and GELU, and without recomputation:

    GPT-2   72 B s l h^2 (1 + s/(6 h) + V/(12 l h))       Narayanan et al. 2021, arXiv 2104.04473, 5.1
    ViT     the same blocks, with patches and classifier instead of logits      `ViTSize.training_flops`

A model learns uniform tokens within a few steps, so these follow Zipf's law: token k has the share 1 / (k ln
V). Pixels are noise whose brightness tells the class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize
from hpnb.pipeline_parallel.partition import balanced

MICROBATCHES_PER_STAGE = 4  # 16 on four ranks, as the published peers
HEADS = 20
CLASSES = 1000
_TINY_GPT2 = GPT2Size(hidden=64, layers=8, heads=4, mlp=256, vocab_size=251, length=16)
_TINY_VIT = ViTSize(hidden=64, layers=8, heads=4, mlp=256, patch=8, image=32)
_DTYPES = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}


@dataclass(frozen=True)
class TrainingTask:
    """A model, and the batch of a step.

    Attributes:
        what: its name in titles and files.
        batch: images or sequences of a step, over all ranks.
        rows: samples of one forward at most, where there is no pipeline. With tensor parallelism t times as
            many, because each of t ranks holds a t-th of the activations.
        bits: 16 is bf16 with float32 masters where the program can have them; 32 is float32, 64 float64.
        loss_chunk: tokens at a time of hpnb's loss; 0 is all of them.
        microbatches: of a pipeline; 0 is `MICROBATCHES_PER_STAGE` for each of its ranks.
        lr: of AdamW.
        rows_are_set: whether `rows` is less than a rank's share of the batch, so that a title has to say it.
    """

    what: str
    size: GPT2Size | ViTSize
    batch: int
    rows: int
    bits: int
    loss_chunk: int = 0
    microbatches: int = 0
    lr: float = 1e-4
    rows_are_set: bool = False

    @property
    def title(self) -> str:
        """Runs with the same title are compared, so it is part of the format of results."""
        size = self.size
        if isinstance(size, GPT2Size):
            words, batch = f"{size.vocab_size} words", f"{self.batch} x {size.length} tokens"
        else:
            words, batch = f"{size.tokens} tokens", f"{self.batch} images"
        dtype = "bf16" if self.bits == 16 else f"float{self.bits}"
        forwards = f"forwards of up to {self.rows} samples, " if self.rows_are_set else ""
        return (
            f"{self.what}: {size.layers} blocks of {size.hidden}, {size.heads} heads, {words}, {dtype}, "
            f"{forwards}global batch {batch}"
            f"{f' in {self.microbatches} microbatches' if self.microbatches else ''}"
        )

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.bits]

    @property
    def unit(self) -> str:
        """What throughput counts."""
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

    def on_one_rank(self, ranks: int) -> TrainingTask:
        """The same batch per GPU, on one of `ranks`."""
        return replace(self, batch=self.batch // ranks)

    def count_microbatches(self, layout: ParallelLayout) -> int:
        """Into how many microbatches a replica splits its batch: for a pipeline, or to fit memory.

        Raises:
            ValueError: the batch does not divide.
        """
        samples = self.batch // layout.dp
        count = math.ceil(samples / (self.rows * layout.tp))
        if layout.pp > 1:
            count = self.microbatches or MICROBATCHES_PER_STAGE * layout.pp
        if self.batch % layout.dp or samples % count:
            raise ValueError(
                f"a batch of {self.batch} does not divide into {layout.dp} x {count} microbatches; "
                f"{layout.dp * count} or a multiple of it would"
            )
        return count

    def build(self) -> nn.Module:
        """transformers' own model in float32 (float64 for 64 bits), with the same values on all ranks.
        Weights
        are drawn on the device, normal and 0.02 wide, so no full model is on the host."""
        on_meta: Any
        if isinstance(self.size, GPT2Size):
            on_meta = hpnb.models.gpt2(self.size, device="meta")
        else:
            on_meta = hpnb.models.vit(self.size, classes=CLASSES, device="meta")
        with torch.device("meta"):  # without the hooks by which hpnb's model accepts empty batches
            model = type(on_meta)(on_meta.config)
        model = model.to(torch.float64) if self.bits == 64 else model
        model.to_empty(device=hpnb.device()).tie_weights()
        torch.manual_seed(0)
        with torch.no_grad():
            roles = hpnb.models.roles(model)
            for name, p in model.named_parameters():
                p.normal_(std=0.02)
                if roles[name].kind == "norm" and not roles[name].bias:
                    p.add_(1.0)
                if self.bits == 16:  # programs with 16-bit weights begin with the same values as the others
                    p.copy_(p.bfloat16())
        return model.train()  # type: ignore[no-any-return]

    def draw_batch(self, step: int) -> dict[str, torch.Tensor]:
        """The global batch of that step, the same on every rank."""
        device = hpnb.device()
        g = torch.Generator(device).manual_seed(1 + step)
        if isinstance(self.size, GPT2Size):
            uniform = torch.rand((self.batch, self.size.length), generator=g, device=device)  # (B, s)
            ids = (uniform * math.log(self.size.vocab_size)).exp().long() - 1  # token k as often as 1 / k
            ids = ids.clamp(0, self.size.vocab_size - 1)
            return {"input_ids": ids, "labels": ids}
        side = self.size.image
        labels = torch.randint(0, CLASSES, (self.batch,), generator=g, device=device)
        pixels = torch.randn((self.batch, 3, side, side), generator=g, device=device)
        return {"pixel_values": pixels + (labels / CLASSES).view(-1, 1, 1, 1), "labels": labels}

    def split_layers(self, stages: int) -> list[int]:
        """Layers of each stage, with embedding and head, balanced by FLOPs: the same for every program."""
        size = self.size
        if isinstance(size, GPT2Size):
            head = 2.0 * size.length * size.hidden * size.vocab_size
        else:
            head = 2.0 * size.hidden * CLASSES
        return list(balanced([0.0, *[float(size.block().forward_flops)] * size.layers, head], stages))


def make_task(
    what: str, device: str, ranks: int, *, tiny: bool = False, batch: int | None = None,
    heads: int | None = None, rows: int | None = None, microbatches: int = 0,
) -> TrainingTask:  # fmt: skip
    """The usual task of that name, "gpt2-xl" or "vit-l16".

    Args:
        device: "cpu" or "cuda".
        batch: over all ranks; by default 16 sequences of gpt2-xl, or 128 images, a rank.
        heads: of gpt2-xl.
        rows: samples of a forward; by default a rank's share of the batch.

    Raises:
        ValueError: a batch below 1 or one that does not divide by the ranks, rows below 1, or heads that do
            not fit.
    """
    size: GPT2Size | ViTSize
    if what == "gpt2-xl":
        usual = _TINY_GPT2 if tiny else replace(GPT2_SIZES["1.5b"], heads=HEADS)
        size, per_rank = replace(usual, heads=heads or usual.heads), 4 if tiny else 16
    else:
        size, per_rank = (_TINY_VIT, 4) if tiny else (SIZES["l16"], 128)
        size = replace(size, heads=heads or size.heads)
    batch = per_rank * ranks if batch is None else batch
    if batch < ranks or batch % ranks:
        raise ValueError(f"a batch of {batch} cannot be split evenly over {ranks} ranks; {ranks} could")
    if rows is not None and rows < 1:
        raise ValueError(f"forwards of {rows} samples compute nothing; use 1 or more")
    chunk = 0 if what == "vit-l16" else 16 if tiny else 4096
    bits = 16 if device == "cuda" else 32
    share = batch // ranks
    is_set = rows is not None and rows < share  # more than that changes no program
    return TrainingTask(what, size, batch, rows or share, bits, chunk, microbatches, rows_are_set=is_set)


def cast_inputs(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


class BatchFeed:
    """The samples of one replica, for a program that is stepped again and again.

    Args:
        replica, replicas: which of how many.
        backwards: samples in the opposite order, so that sums are taken in another one.

    Attributes:
        batch: on this rank's device.
    """

    def __init__(
        self, task: TrainingTask, replica: int = 0, replicas: int = 1, backwards: bool = False
    ) -> None:
        self.task, self.replica, self.replicas, self.backwards = task, replica, replicas, backwards
        self.batch: dict[str, torch.Tensor] = {}
        self.draw(0)

    def draw(self, step: int) -> None:
        samples = self.task.batch // self.replicas
        rows = slice(self.replica * samples, (self.replica + 1) * samples)
        batch = {name: value[rows] for name, value in self.task.draw_batch(step).items()}
        self.batch = {name: value.flip(0) if self.backwards else value for name, value in batch.items()}

    def split(self, count: int) -> list[dict[str, torch.Tensor]]:
        """The batch in so many microbatches of one size."""
        columns = {name: value.chunk(count) for name, value in self.batch.items()}
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
