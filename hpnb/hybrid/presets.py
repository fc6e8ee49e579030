"""The hybrid plugin with fewer options, for data parallelism alone.

TorchDDPPlugin()              replicas, float32                         zero_stage 0
LowLevelZeroPlugin(stage=2)   optimizer state and gradients sharded     zero_stage 1 or 2
GeminiPlugin()                parameters sharded as well                zero_stage 3
"""

from __future__ import annotations

import torch

from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.mesh import Recomputation
from hpnb.precision import precision_name


class TorchDDPPlugin(HybridParallelPlugin):
    """Every data-parallel rank has the whole model. Options as in `HybridParallelPlugin`.

    Args:
        precision: by default "fp32", or the mixed_precision that `hpnb.Booster` is given.

    >>> hpnb.TorchDDPPlugin("bf16", max_norm=1.0).precision
    'bf16'
    """

    def __init__(
        self,
        precision: str | torch.dtype | None = None,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        max_norm: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._has_default_precision = precision is None
        super().__init__(
            precision="fp32" if precision is None else precision,
            broadcast_buffers=broadcast_buffers,
            ddp_bucket_cap_mb=ddp_bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            max_norm=max_norm,
            seed=seed,
        )

    def set_default_precision(self, precision: str | torch.dtype) -> None:
        """Train in this precision if none was asked for when the plugin was made."""
        if self._has_default_precision:
            self.precision, self._has_default_precision = precision_name(precision), False


class LowLevelZeroPlugin(HybridParallelPlugin):
    """ZeRO stage 1 or 2. Options as in `HybridParallelPlugin`.

    Raises:
        ValueError: another stage.

    >>> hpnb.LowLevelZeroPlugin(stage=2, precision="bf16").zero_stage
    2
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str | torch.dtype = "auto",
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        zero_bucket_size_in_m: float = 12.0,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        seed: int | None = None,
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(f"stage={stage!r} is not 1 or 2; 3 is GeminiPlugin, 0 is TorchDDPPlugin")
        super().__init__(
            zero_stage=stage,
            precision=precision,
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_scale=max_scale,
            max_norm=max_norm,
            zero_bucket_size_in_m=zero_bucket_size_in_m,
            communication_dtype=communication_dtype,
            overlap_communication=overlap_communication,
            cpu_offload=cpu_offload,
            seed=seed,
        )


class GeminiPlugin(HybridParallelPlugin):
    """ZeRO stage 3: parameters are sharded too. Options as in `HybridParallelPlugin`.

    >>> hpnb.GeminiPlugin(precision="bf16").zero_stage
    3
    """

    def __init__(
        self,
        precision: str | torch.dtype = "auto",
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        communication_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: Recomputation = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            zero_stage=3,
            precision=precision,
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_scale=max_scale,
            max_norm=max_norm,
            communication_dtype=communication_dtype,
            cpu_offload=cpu_offload,
            activation_checkpointing=activation_checkpointing,
            seed=seed,
        )
