"""Models and batches for timing. Weights are drawn on the device, which takes no time even for a large model:
values hardly matter for timing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch

import hpnb
from hpnb import models
from hpnb.mesh import AXES, Axis, Layout, Mesh
from hpnb.models import GPT2Size, ViTSize

Batch = Mapping[str, torch.Tensor]


def timed_ranks() -> int:
    """How many ranks to time: one a GPU; on a CPU one a core, but at least 2 and at most 4."""
    ranks = hpnb.ranks.default_ranks()
    if hpnb.ranks.choose_device("auto", ranks).device == "cuda":
        return ranks
    return max(2, min(ranks, hpnb.ranks.usable_cores()))


def warmup_steps() -> int:
    """Steps before the first that counts."""
    return 3 if hpnb.device().type == "cuda" else 1


def all_ranks(axis: str) -> Axis:
    """All ranks, along one axis: "dp", "pp" or "tp"."""
    return getattr(Mesh(one_axis(axis, hpnb.world_size())), axis)  # type: ignore[no-any-return]


def one_axis(axis: str, ranks: int) -> Layout:
    """A layout of `ranks` along one axis."""
    dp, pp, tp = (ranks if name == axis else 1 for name in AXES)
    return Layout(dp, pp, tp)


def matmul_workspace() -> int:
    """Bytes that PyTorch keeps on this rank's GPU for cuBLAS beside all tensors; 0 on a CPU.

    Each thread that multiplies has a workspace: the one of the forward and autograd's. On an H100 under
    torch 2.11 they have 32 MiB each, on most other GPUs 8 MiB; torch 2.15 gives them back after each product.
    So they are dropped here, made anew and measured.
    """
    device = hpnb.device()
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    x = torch.ones(128, 128, device=device, requires_grad=True)
    gradient = torch.autograd.grad(torch.addmm(x[0], x, x).sum(), x)
    del x, gradient
    return torch.cuda.memory_allocated(device) - before


def draw_weights(model: torch.nn.Module) -> None:
    """Fill a model on its device: biases 0, norms 1, matrices from a normal distribution."""
    with torch.no_grad():
        for name, role in models.roles(model).items():
            parameter = model.get_parameter(name)
            if role.bias or role.kind == "norm":
                parameter.fill_(0.0 if role.bias else 1.0)
            else:
                parameter.normal_(std=0.02)


def vit_and_batch(size: ViTSize, images: int, dtype: torch.dtype, classes: int = 3) -> tuple[Any, Batch]:
    """A ViT and random pictures with labels, on this rank's device."""
    device = hpnb.device()
    gc.collect()  # hooks tie replicas into cycles: what an earlier cell built may still be there
    model = models.vit(size, classes=classes, dtype=dtype, device="meta").to_empty(device=device)
    draw_weights(model)
    generator = torch.Generator(device).manual_seed(0)  # GPUs begin with different states
    shape = (images, 3, size.image, size.image)
    pixels = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    return model, {"pixel_values": pixels, "labels": torch.arange(images, device=device) % classes}


def vit_and_loss(
    size: ViTSize, images: int, dtype: torch.dtype
) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """A ViT on this rank's device, and a function from it (or from what wraps it) to the loss of `images`."""
    model, batch = vit_and_batch(size, images, dtype)

    def loss(wrapped: torch.nn.Module) -> torch.Tensor:
        value: torch.Tensor = wrapped(**batch).loss
        return value

    return model, loss


def random_gpt2(size: GPT2Size, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """A GPT-2 with tied embeddings whose weights are drawn on `device`, by default this rank's."""
    gc.collect()  # what an earlier cell built may still be there
    model = models.gpt2(size, dtype=dtype, device="meta").to_empty(device=device or hpnb.device())
    model.lm_head.weight = model.transformer.wte.weight  # `to_empty` has made two of the one
    model.loss_type = "ForCausalLM"  # else transformers says on stderr that it guesses this
    draw_weights(model)
    return model


def timing_gpt2(size: GPT2Size, dtype: torch.dtype) -> Any:
    """A GPT-2 on this rank's device: as the library draws it on a CPU, drawn on the device on a GPU.

    On a CPU the last one is drawn once and copied, because drawing takes several times as long.
    """
    if hpnb.device().type != "cpu":
        return random_gpt2(size, dtype)
    gc.collect()
    return deepcopy(_drawn_gpt2(size, dtype))


def bytes_kept_for_timing(size: GPT2Size, dtype: torch.dtype) -> int:
    """Bytes of the model that `timing_gpt2` copies on a CPU: `record.memory` counts it beside the copy."""
    return sum(p.nbytes for p in _drawn_gpt2(size, dtype).parameters())


@lru_cache(maxsize=1)
def _drawn_gpt2(size: GPT2Size, dtype: torch.dtype) -> Any:
    return models.gpt2(size, dtype=dtype)


def random_tokens(size: GPT2Size, rows: int) -> Batch:
    """`rows` of `size.length` random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocab_size, (rows, size.length), generator=generator).to(hpnb.device())
    return {"input_ids": ids, "labels": ids}
