"""Precision policies: which dtype weights, matmuls and the optimizer use.

    name        weights    matmuls    loss scale    optimizer steps
    fp32        float32    float32    no            the weights
    amp-fp16    float32    float16    yes           the weights
    amp-bf16    float32    bfloat16   no            the weights
    fp16        float16    float16    yes           float32 masters
    bf16        bfloat16   bfloat16   no            float32 masters
    fp64        float64    float64    no            the weights (for proofs)

"auto" is fp32 on a CPU, which has no units for 16 bits, and bf16 on a GPU, or fp16 if it has no bf16. A name
may also be written as a dtype: "bfloat16" and torch.bfloat16 are bf16. Buffers and norms with running
statistics stay float32, and complex tensors stay as they are (`cast.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hpnb.precision.cast import cast_module, explaining_dtypes
from hpnb.ranks.current_rank import device as this_device
from hpnb.ranks.gpu_limits import bf16_denied

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PrecisionPolicy:
    """One line of the table.

    Attributes:
        weights: of parameters and their gradients.
        compute: of matmuls; another than `weights` means autocast.
        scaled: whether the loss needs a scale, as it does in fp16.
    """

    name: str
    weights: torch.dtype
    compute: torch.dtype
    scaled: bool = False

    @property
    def masters(self) -> bool:
        """Weights are 16 bits, so the optimizer needs float32 copies."""
        return self.weights.itemsize == 2

    def autocast(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """What a forward and its loss run in; the backward does not."""
        if self.compute == self.weights:
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=self.compute)

    @contextmanager
    def computing(self, module: nn.Module, device: torch.device | str) -> Iterator[None]:
        """`autocast` for a forward of `module`, whose errors about dtypes say which buffers are wider."""
        with self.autocast(device), explaining_dtypes(module, self.weights):
            yield

    def cast(self, module: M) -> M:
        """`module` with weights of this policy, changed in place. float32 buffers stay so (`cast.py`)."""
        cast_module(module, self.weights)
        return module


AUTO = "auto"
_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32",
          "float64": "fp64", "double": "fp64"}  # fmt: skip
_POLICIES = {
    p.name: p
    for p in (
        PrecisionPolicy("fp32", torch.float32, torch.float32),
        PrecisionPolicy("amp-fp16", torch.float32, torch.float16, scaled=True),
        PrecisionPolicy("amp-bf16", torch.float32, torch.bfloat16),
        PrecisionPolicy("fp16", torch.float16, torch.float16, scaled=True),
        PrecisionPolicy("bf16", torch.bfloat16, torch.bfloat16),
        PrecisionPolicy("fp64", torch.float64, torch.float64),
    )
}


def precision_name(precision: str | torch.dtype) -> str:
    """The policy's name of "bf16", "bfloat16" or torch.bfloat16, and so on; "auto" stays.

    Raises:
        ValueError: there is no such policy.
    """
    name = str(precision).removeprefix("torch.") if isinstance(precision, str | torch.dtype) else ""
    name = _NAMES.get(name, name)
    if name != AUTO and name not in _POLICIES:
        raise ValueError(f"precision={precision!r} is not one of {', '.join(_POLICIES)}, or 'auto'")
    return name


def policy(precision: str | torch.dtype, device: torch.device | str | None = None) -> PrecisionPolicy:
    """The policy of this name or dtype.

    Args:
        device: decides what "auto" is, fp32 on a CPU and `best_16_bit` on a GPU; this rank's by default.

    Raises:
        ValueError: there is none.
    """
    name = precision_name(precision)
    if name == AUTO:
        on = this_device() if device is None else torch.device(device)
        name = best_16_bit(on) if on.type == "cuda" else "fp32"
    return _POLICIES[name]


def best_16_bit(device: torch.device | str) -> str:
    """bf16, or fp16 on a GPU without bf16 units: those before compute capability 8.0, as T4 and V100.

    With HPNB_NO_BF16=1 it is fp16 on every GPU.
    """
    device = torch.device(device)
    if device.type == "cuda" and bf16_denied():
        return "fp16"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "fp16"
    return "bf16"
