"""The hybrid plugin with fewer options, for data parallelism alone.

TorchDDPPlugin()              replicas, float32                         zero_stage 0
LowLevelZeroPlugin(stage=2)   optimizer state and gradients sharded     zero_stage 1 or 2
GeminiPlugin()                parameters sharded as well                zero_stage 3
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from hpnb.hybrid.plugin_options import SCALER_OPTIONS
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.precision import precision_name

_DDP_OPTIONS = (
    "broadcast_buffers", "ddp_bucket_cap_mb", "find_unused_parameters", "check_reduction",
    "gradient_as_bucket_view", "static_graph", "max_norm", "seed",
)  # fmt: skip
_SHARDED_OPTIONS = (*SCALER_OPTIONS, "max_norm", "communication_dtype", "cpu_offload", "seed")
_ZERO_OPTIONS = (*_SHARDED_OPTIONS, "zero_bucket_size_in_m", "overlap_communication")
_GEMINI_OPTIONS = (*_SHARDED_OPTIONS, "activation_checkpointing")


class TorchDDPPlugin(HybridParallelPlugin):
    """Every data-parallel rank has the whole model.

    Args:
        precision: by default "fp32", or the mixed_precision that `hpnb.Booster` is given.
        options: of `HybridParallelPlugin`: broadcast_buffers, ddp_bucket_cap_mb, find_unused_parameters,
            check_reduction, gradient_as_bucket_view, static_graph, max_norm, seed.

    >>> hpnb.TorchDDPPlugin("bf16", max_norm=1.0).precision
    'bf16'
    """

    def __init__(self, precision: str | torch.dtype | None = None, **options: Any) -> None:
        _check_options(self, options, _DDP_OPTIONS)
        self._has_default_precision = precision is None
        super().__init__(precision="fp32" if precision is None else precision, **options)

    def set_default_precision(self, precision: str | torch.dtype) -> None:
        """Train in this precision if none was asked for when the plugin was made."""
        if self._has_default_precision:
            self.precision, self._has_default_precision = precision_name(precision), False


class LowLevelZeroPlugin(HybridParallelPlugin):
    """ZeRO stage 1 or 2.

    Args:
        options: of `HybridParallelPlugin`: max_norm, zero_bucket_size_in_m, communication_dtype,
            overlap_communication, cpu_offload, seed, and those of the loss scaler.

    Raises:
        ValueError: another stage.

    >>> hpnb.LowLevelZeroPlugin(stage=2, precision="bf16").zero_stage
    2
    """

    def __init__(self, stage: int = 1, precision: str | torch.dtype = "auto", **options: Any) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} is not 1 or 2; 3 is GeminiPlugin, 0 is TorchDDPPlugin")
        _check_options(self, options, _ZERO_OPTIONS)
        super().__init__(zero_stage=stage, precision=precision, **options)


class GeminiPlugin(HybridParallelPlugin):
    """ZeRO stage 3: parameters are sharded too.

    Args:
        options: of `HybridParallelPlugin`: max_norm, communication_dtype, cpu_offload,
            activation_checkpointing, seed, and those of the loss scaler.

    >>> hpnb.GeminiPlugin(precision="bf16").zero_stage
    3
    """

    def __init__(self, precision: str | torch.dtype = "auto", **options: Any) -> None:
        _check_options(self, options, _GEMINI_OPTIONS)
        super().__init__(zero_stage=3, precision=precision, **options)


def _check_options(plugin: object, options: Collection[str], known: Collection[str]) -> None:
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"{type(plugin).__name__} takes no {unknown[0]}; it takes {', '.join(known)}, and "
            "HybridParallelPlugin has all options"
        )
