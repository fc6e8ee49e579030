"""The options of a `HybridParallelPlugin` as plain data, with what follows from the numbers alone.

    options.layout_on(8)   the same as one `hpnb.ParallelLayout`, for planner, benchmarks and messages
    options.policy         which dtype does what; options.scaler() the loss scaler that goes with it

Nothing here needs running ranks. Options that cannot be combined are refused in `refused.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import isfinite, isqrt

import torch

from hpnb.mesh import ParallelLayout, Recomputation
from hpnb.pipeline_parallel import Schedule, schedules
from hpnb.pipeline_parallel.partition import How
from hpnb.precision import LossScaler, PrecisionPolicy, policy, precision_name

# Which values an option takes, by its annotation: an int fits float; a bool fits no number.
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "float": (float, int), "int": (int,), "str": (str,), "int | None": (int, type(None)),
    "torch.dtype | None": (torch.dtype, type(None)), "Recomputation": (bool, str), "How": (str, list, tuple),
}  # fmt: skip
_CHECKED_BY_LAYOUT = (
    "tp_size", "pp_size", "cp_size", "ep_size", "num_model_chunks", "num_microbatches", "microbatch_size",
    "tp_depth", "zero_replicas",
)  # fmt: skip
SCALER_OPTIONS = (
    "initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis",
    "max_scale",
)  # fmt: skip
_MOST_STAGE_RUNS = 1 << 20  # stages x microbatches; a schedule of more takes minutes to make


@dataclass(eq=False, repr=False)
class PluginOptions:
    """What `HybridParallelPlugin` documents, checked one by one."""

    tp_size: int = 1
    pp_size: int = 1
    zero_stage: int = 0
    precision: str | torch.dtype = "auto"
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    max_norm: float = 0.0
    tp_mode: str = "1d"
    tp_depth: int = 1
    cp_size: int = 1
    context_parallel: str = "ring"
    ep_size: int = 1
    selection_bias_rate: float = 0.0
    enable_sequence_parallelism: bool = False
    enable_sequence_overlap: bool = True
    enable_all_optimization: bool = False
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_cuda_graphs: bool = False
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
    zero_replicas: int = 1
    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.precision = precision_name(self.precision)
        for option in fields(self):
            if option.name not in _CHECKED_BY_LAYOUT and (kinds := _TYPES.get(str(option.type))) is not None:
                self._check_type(option.name, kinds)
        self.pp_style = self.pp_style.lower()
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is no seed; use 0 to 2**63 - 1")
        if self.communication_dtype is not None and not self.communication_dtype.is_floating_point:
            raise ValueError(
                f"communication_dtype={self.communication_dtype} holds no fractions; use torch.bfloat16, "
                "torch.float16 or torch.float32"
            )
        for name in ("tp_size", "pp_size", "cp_size", "ep_size", "num_model_chunks", "zero_replicas"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a count; use 1 or more")
        if isinstance(self.cut, list | tuple) and not all(type(n) is int and n >= 1 for n in self.cut):
            raise ValueError(f"cut={str(self.cut)[:80]} is no list of layers a stage; give each 1 or more")
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
        microbatches = self.num_microbatches if isinstance(self.num_microbatches, int) else 1
        if self.pp_size * self.num_model_chunks * microbatches > _MOST_STAGE_RUNS:
            raise ValueError(
                f"pp_size={self.pp_size} x num_model_chunks={self.num_model_chunks} x "
                f"num_microbatches={self.num_microbatches} is more than {_MOST_STAGE_RUNS:,}; use fewer"
            )
        if self.selection_bias_rate < 0:
            raise ValueError(f"selection_bias_rate={self.selection_bias_rate} must be above 0, or 0 for none")
        self.max_norm = float(self.max_norm)
        _ = self._layout_of_one_replica(), self.policy, self._make_scaler()  # each refuses what it cannot use

    def _check_type(self, name: str, kinds: tuple[type, ...]) -> None:
        value = getattr(self, name)
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not fits or (isinstance(value, float) and not isfinite(value) and name != "max_norm"):
            words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            shown = f"{str(value)[:80]!r}, a {type(value).__name__}" if not fits else value
            raise ValueError(f"{name}={shown} cannot be used; give a finite {words}")

    def __repr__(self) -> str:
        options = [option for option in fields(self) if option.init]
        changed = [(o.name, getattr(self, o.name)) for o in options if getattr(self, o.name) != o.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"

    # --- the layout --------------------------------------------------------------------------------------

    def layout_on(self, ranks: int) -> ParallelLayout:
        """The layout on so many ranks, of which dp takes what pp, cp and tp leave."""
        layout, replica_size = self._layout_of_one_replica(), self.replica_size
        if ranks % replica_size:
            cp = f"cp_size={self.cp_size} x " if self.cp_size > 1 else ""
            below, above = ranks // replica_size * replica_size, (ranks // replica_size + 1) * replica_size
            raise ValueError(
                f"pp_size={self.pp_size} x {cp}tp_size={self.tp_size} needs a multiple of {replica_size} "
                f"ranks, and there are {ranks}; use {f'{below} or {above}' if below else above}"
            )
        replicas = ranks // replica_size * self.cp_size
        for name in ("ep_size", "zero_replicas"):
            if replicas % (size := getattr(self, name)):
                fits = " or ".join(str(n) for n in range(1, replicas + 1) if replicas % n == 0)
                raise ValueError(
                    f"{name}={size} does not divide the {replicas} ranks of dp x cp; use {name}={fits}"
                )
        return replace(layout, dp=ranks // replica_size, ep=self.ep_size)

    @property
    def replica_size(self) -> int:
        """Ranks that train the same samples."""
        return self.pp_size * self.cp_size * self.tp_size

    def _layout_of_one_replica(self) -> ParallelLayout:
        return ParallelLayout(
            pp=self.pp_size,
            tp=self.tp_size,
            cp=self.cp_size,
            context_parallel=self.context_parallel,
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
        return self._make_scaler() if self.policy.scaled else None

    def _make_scaler(self) -> LossScaler:
        return LossScaler(*(getattr(self, name) for name in SCALER_OPTIONS))
