"""The options of a `HybridParallelPlugin` as plain data, with what follows from the numbers alone.

    options.layout_on(8)   the same as one `hpnb.ParallelLayout`, for planner, benchmarks and messages
    options.policy         which dtype does what; options.scaler() the loss scaler that goes with it

Nothing here needs running ranks. Options that cannot be combined are refused in `refused.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import isqrt

import torch

from hpnb.mesh import ParallelLayout, Recomputation
from hpnb.pipeline_parallel import Schedule, schedules
from hpnb.pipeline_parallel.partition import How
from hpnb.precision import LossScaler, PrecisionPolicy, policy


@dataclass(eq=False, repr=False)
class PluginOptions:
    """What `HybridParallelPlugin` documents, checked one by one.

    Raises:
        ValueError: a count below 1, an unknown stage, mode or precision.
    """

    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int = 0
    precision: str = "fp16"
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    max_norm: float = 0.0
    tp_mode: str = "1d"
    tp_depth: int = 1
    enable_sequence_parallelism: bool = False
    enable_sequence_overlap: bool = False
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    broadcast_buffers: bool = True
    ddp_bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    ddp_copy_engines: bool = False
    zero_bucket_size_in_m: float = 12.0
    cpu_offload: bool = False
    communication_dtype: torch.dtype | None = None
    overlap_communication: bool = True
    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    activation_checkpointing: Recomputation = False
    loss_chunk: int = 0
    cut: How = "uniform"
    seed: int | None = None
    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "num_model_chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a count; use 1 or more")
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm={self.max_norm} must be above 0, or 0 for no clipping")
        for name in ("ddp_bucket_cap_mb", "zero_bucket_size_in_m"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")
        if not isinstance(self.loss_chunk, int) or self.loss_chunk < 0:
            raise ValueError(
                f"loss_chunk={self.loss_chunk!r} is not a number of tokens; use 0 for all at once"
            )
        if self.activation_checkpointing not in (False, "full", "attention"):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r} is not known; use False, 'full' "
                "or 'attention'"
            )
        _ = self._layout_of_one_replica(), self.policy, self.scaler()  # each refuses what it cannot use

    def __repr__(self) -> str:
        options = [option for option in fields(self) if option.init]
        changed = [(o.name, getattr(self, o.name)) for o in options if getattr(self, o.name) != o.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"

    # --- the layout --------------------------------------------------------------------------------------

    def layout_on(self, ranks: int) -> ParallelLayout:
        """The layout on so many ranks, of which dp takes what pp and tp leave.

        Raises:
            ValueError: they are not a multiple of pp_size x tp_size.
        """
        layout = self._layout_of_one_replica()
        replica_size = self.pp_size * self.tp_size
        if ranks % replica_size:
            below, above = ranks // replica_size * replica_size, (ranks // replica_size + 1) * replica_size
            raise ValueError(
                f"pp_size={self.pp_size} x tp_size={self.tp_size} needs a multiple of {replica_size} ranks, "
                f"and {ranks} are running; start {f'{below} or {above}' if below else above}"
            )
        return replace(layout, dp=ranks // replica_size)

    def _layout_of_one_replica(self) -> ParallelLayout:
        return ParallelLayout(
            pp=self.pp_size,
            tp=self.tp_size,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            zero_stage=self.zero_stage,
            schedule=self.pp_style,
            chunks=self.num_model_chunks,
            recomputation=self.activation_checkpointing,
            sequence_parallel=self.enable_sequence_parallelism,
            tp_mode=self.tp_mode,
            tp_depth=self.tp_depth,
        )

    @property
    def chunks(self) -> int:
        """Pipeline stages of the model on each rank."""
        return self._layout_of_one_replica().chunks_per_rank

    @property
    def least_microbatches(self) -> int:
        """The fewest microbatches with which the schedule works."""
        return self._layout_of_one_replica().min_microbatches

    def microbatches(self, samples: int) -> int:
        """Into how many microbatches a batch of so many samples is split."""
        return self._layout_of_one_replica().count_microbatches(samples)

    @property
    def row_multiple(self) -> int:
        """The number of samples in a microbatch must be a multiple of it, because grids split the samples."""
        square_side = isqrt(self.tp_size // self.tp_depth)
        cube_side: int = round(self.tp_size ** (1 / 3))
        return {
            "1d": 1,
            "2d": square_side,
            "2.5d": self.tp_depth * square_side,
            "3d": cube_side * cube_side,
        }[self.tp_mode]

    def schedule(self, microbatches: int) -> Schedule:
        """The pipeline schedule of so many microbatches. It is made once."""
        if microbatches not in self._schedules:
            # Without a pipeline a rank runs the whole model as one stage.
            style, stages, chunks = "1f1b", 1, 1
            if self.pp_size > 1:
                style, stages, chunks = self.pp_style, self.pp_size * self.chunks, self.chunks
            self._schedules[microbatches] = schedules.make(style, stages, microbatches, chunks)
        return self._schedules[microbatches]

    # --- precision ---------------------------------------------------------------------------------------

    @property
    def policy(self) -> PrecisionPolicy:
        """Which dtype does what."""
        return policy(self.precision)

    def scaler(self) -> LossScaler | None:
        """A new loss scaler, if the precision needs one."""
        if not self.policy.scaled:
            return None
        return LossScaler(
            self.initial_scale,
            self.min_scale,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            self.hysteresis,
            self.max_scale,
        )
