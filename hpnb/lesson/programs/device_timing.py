"""What a step costs one device: a model and pictures on it, its matmuls timed, the rate of its memory.

For timing, so values hardly matter: they are drawn on the device, which for a large model takes no time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

import hpnb
from hpnb.models import ViTSize, roles, vit
from hpnb.theory import Block

_REPEATS = 5


def timed_ranks() -> int:
    """As many ranks as a clock bears: one a GPU, and on a CPU at most 4 and as many as cores, but 2."""
    ranks = hpnb.ranks.default_ranks()
    if hpnb.ranks.choose_device("auto", ranks).device == "cuda":
        return ranks
    return max(2, min(ranks, hpnb.ranks.usable_cores()))


def vit_and_loss(
    size: ViTSize, images: int, dtype: torch.dtype, classes: int = 3
) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """A ViT on this rank's device, and a function from it (or from what wraps it) to the loss of `images`."""
    where = hpnb.device()
    gc.collect()  # hooks tie replicas into cycles: what an earlier cell built may still be there
    model = vit(size, classes=classes, dtype=dtype, device="meta").to_empty(device=where)
    with torch.no_grad():
        for name, role in roles(model).items():
            parameter = model.get_parameter(name)
            if role.bias or role.kind == "norm":
                parameter.fill_(0.0 if role.bias else 1.0)
            else:
                parameter.normal_(std=0.02)
    pixels = torch.randn(images, 3, size.image, size.image, device=where, dtype=dtype)
    labels = torch.arange(images, device=where) % classes

    def loss(wrapped: torch.nn.Module) -> torch.Tensor:
        found: torch.Tensor = wrapped(pixel_values=pixels, labels=labels).loss
        return found

    return model, loss


def matmul_seconds(block: Block, dtype: torch.dtype) -> dict[str, float]:
    """{name: seconds} of each matmul of a block's forward on this rank's device."""
    found = {}
    for one in block.matmuls:
        a = torch.randn(one.count, one.m, one.k, device=hpnb.device()).to(dtype)
        b = torch.randn(one.count, one.k, one.n, device=hpnb.device()).to(dtype)
        found[one.name] = _seconds(lambda a=a, b=b: torch.matmul(a, b))  # type: ignore[misc]
    return found


def memory_rate(nbytes: int = 0) -> float:
    """Bytes/s that this rank's device reads and writes while it copies, by default more than caches hold."""
    where = hpnb.device()
    values = torch.ones((nbytes or (1 << 30 if where.type == "cuda" else 1 << 26)) // 4, device=where)
    there = torch.empty_like(values)
    return 2 * values.nbytes / _seconds(lambda: there.copy_(values))


def _seconds(work: Callable[[], object]) -> float:
    """The least of a few repeats, each long enough to be timed."""
    work()
    calls = 20 if hpnb.device().type == "cuda" else 1
    with hpnb.record.timeline() as recorder:
        for _ in range(_REPEATS):
            with recorder.span():
                for _ in range(calls):
                    work()
    return min(event.duration for event in recorder.events()) / calls
