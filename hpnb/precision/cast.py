"""The dtypes of a model: parameters get one, and few buffers follow.

    parameter        the dtype of the weights
    buffer           at least that dtype, and never rounded from 32 bits to 16
    complex tensor   left as it is

A table of positions in bf16 turns 513 into 512, and a counter in bf16 stops at 256. So float32 buffers stay
float32, as they do in FSDP2's mixed precision, with two exceptions:

- A model of transformers has the buffers that its from_pretrained(dtype=torch.bfloat16) loads: those of its
  state dict in 16 bits, unless its class keeps them in float32, and others, such as inv_freq, in float32.
- A norm with running statistics needs them in the dtype of its weights. So all of it stays float32.

A float32 table that is added to hidden states of 16 bits makes them float32, and the next matrix has 16 bits.
PyTorch refuses this, and `explaining_dtypes` says what to do. Only a buffer that has the dtype of all of a
model's parameters is rounded: from float64 to float32, or from one dtype of 16 bits to the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def cast_module(module: nn.Module, weights: torch.dtype) -> None:
    """Give `module` parameters of dtype `weights`, in place, and buffers by the rules above."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    rounded = _buffers_that_transformers_rounds(module, weights)
    cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # modules that share a buffer still do
    for buffer in module.buffers():
        dtype = weights if id(buffer) in rounded else _dtype_of_buffer(buffer, dtypes, weights)
        cast[id(buffer)] = buffer, buffer.to(dtype)
    statistics = {
        id(p): cast[id(norm.running_mean)][1].dtype
        for norm in module.modules()
        if isinstance(norm, _NormBase) and norm.running_mean is not None
        for p in norm.parameters(recurse=False)
    }

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in cast:
            return cast[id(tensor)][1]
        dtype = statistics.get(id(tensor), weights)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module._apply(change)


@contextmanager
def explaining_dtypes(module: nn.Module, weights: torch.dtype) -> Iterator[None]:
    """Errors of PyTorch inside about dtypes that differ name float32 buffers, which may be why."""
    try:
        yield
    except RuntimeError as error:
        wide = [] if weights.itemsize > 2 else _wide_buffers(module)
        says_so = _MISMATCH.search(str(error)) and "amp-" not in str(error)
        if type(error) is RuntimeError and wide and says_so:
            name, dtype = wide[0]
            others = f", as {len(wide) - 1} more buffers do" if len(wide) > 1 else ""
            narrow = str(weights).removeprefix("torch.")
            error.args = (
                f"{error}. With weights of {narrow}, the buffer {name} keeps {str(dtype)[6:]}{others}. If "
                "the forward adds it to hidden states or multiplies them by it, they become as wide, and "
                "weights do not fit them: convert it there, as in x + table.to(x.dtype), or call "
                f"register_buffer with a table of {narrow}, or use precision='amp-bf16'",
            )
        raise


# What PyTorch's operators say, on CPUs and GPUs, and in compiled graphs.
_MISMATCH = re.compile(
    r"same dtype|mixed dtype|expected scalar type|should be the same|dtypes? to be|same type|query\.dtype"
)


def _wide_buffers(module: nn.Module) -> list[tuple[str, torch.dtype]]:
    statistics = {
        id(b) for m in module.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)
    }
    return [
        (name, b.dtype)
        for name, b in module.named_buffers()
        if b.is_floating_point() and b.dtype.itemsize > 2 and b.dim() and id(b) not in statistics
    ]


def _dtype_of_buffer(buffer: torch.Tensor, parameters: set[torch.dtype], weights: torch.dtype) -> torch.dtype:
    dtype = buffer.dtype
    if not dtype.is_floating_point or dtype.itemsize < weights.itemsize:
        return weights if dtype.is_floating_point else dtype
    if parameters != {dtype} or dtype == torch.float32:
        return dtype
    return weights if dtype.itemsize == 2 else torch.promote_types(weights, torch.float32)


def _buffers_that_transformers_rounds(module: nn.Module, weights: torch.dtype) -> set[int]:
    """Buffers that from_pretrained of a model of transformers, here or inside of `module`, would round."""
    if weights.itemsize > 2:
        return set()
    rounded = set()
    for inner in module.modules():
        plan_of: Any = getattr(inner, "_get_dtype_plan", None)  # of a transformers.PreTrainedModel
        if plan_of is None:
            continue
        kept = [re.compile(pattern.replace("*", ".*")) for pattern in plan_of(weights)]
        saved = inner.state_dict(keep_vars=True)
        rounded |= {
            id(buffer)
            for name, buffer in inner.named_buffers()
            if name in saved and buffer.is_floating_point() and not any(k.search(name) for k in kept)
        }
    return rounded
