"""What to parallelise, as numbers and switches: a plugin says how, and `hpnb.Booster` does it.

    plugin = hpnb.HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, zero_stage=1)
    booster = hpnb.Booster(plugin=plugin)

The ranks lie as a box, dp x pp x tp, with tp innermost, and dp is whatever is left: with 8 ranks the plugin
above has dp = 8 / (2 * 2) = 2. A plugin may be made before there are ranks. What can be known without them is
checked at once, against the table in `refused.py`; process groups are made when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import isqrt
from typing import Any, Literal

import torch
import torch.distributed as dist

from hpnb.data import Loader
from hpnb.data.dataset import Rows
from hpnb.hybrid.refused import REFUSED
from hpnb.hybrid.stage_manager import StageManager
from hpnb.mesh import Layout, Mesh
from hpnb.pipeline_parallel import Schedule, schedules
from hpnb.pipeline_parallel.partition import How
from hpnb.precision import LossScaler, PrecisionPolicy, policy
from hpnb.ranks.current_rank import device as this_device
from hpnb.ranks.current_rank import world_size

Checkpointing = Literal[False, "full", "attention"]
FILL = 4  # microbatches a rank of a pipeline, where nobody says: a fifth of a 1F1B step is then idle


@dataclass(eq=False, repr=False)
class HybridParallelPlugin:
    """Data, pipeline and tensor parallelism in one; names and defaults are Colossal-AI's where it has them.

    Args:
        tp_size, pp_size: ranks along the tensor and the pipeline axis; the rest is data parallel.
        zero_stage: 0 keeps replicas; 1 deals out the optimizer's states over them, 2 gradients too, 3
            parameters too.
        precision: "fp16", "bf16", "fp32", "fp64", or "amp-fp16", "amp-bf16" for float32 weights
            (`hpnb.precision.policy`).
        num_microbatches: of a batch in `execute_pipeline`. It wins over
        microbatch_size: samples of a microbatch, of which there are then as many as the batch needs. With
            neither, four a rank of the pipeline, and at most one a sample.
        pp_style: a schedule's name (`hpnb.pipeline_parallel.schedules`).
        num_model_chunks: stages a rank; "zb-v" and "dualpipe-v" have two whatever is said here.
        tp_mode, tp_depth: "1d", "2d", "2.5d" or "3d", and the depth of "2.5d".
        enable_sequence_parallelism: cut what lies between the matrices along the tokens (1d).
        enable_sequence_overlap: taken for what it says, which is always done.
        enable_all_optimization: the next three, on GPUs, and Adam in one pass over memory: for 16-bit weights
            that of `hpnb.precision.flat_adam` (on CPUs too), else PyTorch's fused kernel.
        enable_fused_normalization: PyTorch's LayerNorm is one kernel, so there is nothing to do.
        enable_flash_attention: scaled_dot_product_attention of PyTorch, which chooses the kernel.
        enable_jit_fused: torch.compile on GPUs, of whole blocks, or between linears if tp_size > 1 or the
            schedule splits backwards (`hpnb.hybrid.compile_blocks`); and Adam as above.
        max_norm: clip the norm of all gradients to it; 0 is off.
        broadcast_buffers, ddp_bucket_cap_mb, find_unused_parameters, check_reduction,
            gradient_as_bucket_view, static_graph: of `hpnb.DataParallel`; find_unused_parameters also with
            ZeRO. ddp_copy_engines: its copy_engines.
        zero_bucket_size_in_m: million elements that travel at once with ZeRO 1 and 2.
        cpu_offload: ZeRO's shares and its optimizer live on the CPU.
        communication_dtype: gradients travel in it with ZeRO; by default in their own.
        overlap_communication: reduce during the backward.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: of
            the loss scaler, with "fp16" and "amp-fp16" (`hpnb.precision.LossScaler`).
        activation_checkpointing: compute again in the backward what a block ("full") or an attention's
            softmax and its products ("attention") have made; False keeps it.
        loss_chunk: tokens at a time for a GPT2LMHeadModel's loss (`hpnb.models.chunk_loss`); 0 is all. On
            GPUs it also makes an odd vocabulary even, and products with it several times as fast; try 4096.
        cut: where to cut a model into stages: "uniform", "parameters", "flops", "time", or layers by stage.
        seed: of dropout. Ranks along tp draw alike, others differently: seed + dp * pp_size + pp. By default
            what `launch_from_torch`, or torch.manual_seed, was given.

    Attributes:
        mesh: `.dp`, `.pp`, `.tp`, each an `hpnb.Axis`. All ranks ask for it at one point of the program.

    Raises:
        ValueError: sizes and switches that cannot compose, with what would; later, ranks that are not a
            multiple of pp_size x tp_size.
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
    activation_checkpointing: Checkpointing = False
    loss_chunk: int = 0
    cut: How = "uniform"
    seed: int | None = None
    _mesh: Mesh | None = field(default=None, init=False)
    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        counts = ["tp_size", "pp_size", "num_model_chunks", "tp_depth"]
        counts += [n for n in ("num_microbatches", "microbatch_size") if getattr(self, n) is not None]
        for name in counts:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a count; use 1 or more")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage!r} is no stage of ZeRO; use 0, 1, 2 or 3")
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm={self.max_norm} must be above 0, or 0 for no clipping")
        for name in ("ddp_bucket_cap_mb", "zero_bucket_size_in_m"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0")
        if not isinstance(self.loss_chunk, int) or self.loss_chunk < 0:
            raise ValueError(f"loss_chunk={self.loss_chunk!r} is no number of tokens; use 0 for all at once")
        if self.activation_checkpointing not in (False, "full", "attention"):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r} is not known; use False, 'full' "
                "or 'attention'"
            )
        _ = self.policy, self.scaler()
        for refusal in REFUSED:
            if (said := refusal.found(self)) is not None:
                raise ValueError(f"{refusal.what} cannot compose, for {refusal.why}: {said}")

    def __repr__(self) -> str:
        said = [
            f"{knob.name}={getattr(self, knob.name)!r}"
            for knob in fields(self)
            if knob.init and getattr(self, knob.name) != knob.default
        ]
        return f"{type(self).__name__}({', '.join(said)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mesh": None}  # whoever it is sent to has groups of its own

    # --- who is where ------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """Ranks along the data axis."""
        inner = self.pp_size * self.tp_size
        ranks = world_size()
        if ranks % inner:
            below, above = ranks // inner * inner, (ranks // inner + 1) * inner
            raise ValueError(
                f"pp_size={self.pp_size} x tp_size={self.tp_size} needs a multiple of {inner} ranks, and "
                f"{ranks} are running; start {f'{below} or {above}' if below else above}"
            )
        return ranks // inner

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            self._mesh = Mesh(Layout(dp=self.dp_size, pp=self.pp_size, tp=self.tp_size))
        return self._mesh

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.mesh.dp.group

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.mesh.pp.group

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.mesh.tp.group

    @property
    def stage_manager(self) -> StageManager:
        """Where this rank stands: .is_first_stage(), .is_last_stage(), .stage, .num_stages."""
        return StageManager.of(self.mesh.pp, self.schedule(self.least_microbatches))

    # --- what follows from the numbers -------------------------------------------------------------------

    @property
    def policy(self) -> PrecisionPolicy:
        """Which dtype does what."""
        return policy(self.precision)

    @property
    def row_shares(self) -> int:
        """Of which a microbatch's rows must be a multiple: the grids of tensor parallelism deal them out."""
        square = isqrt(self.tp_size // self.tp_depth)
        side: int = round(self.tp_size ** (1 / 3))
        shares = {"1d": 1, "2d": square, "2.5d": self.tp_depth * square, "3d": side * side}
        return shares[self.tp_mode]

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

    def scaled_lr(self, lr: float) -> float:
        """`lr` times the data-parallel size, by which the global batch grows (Goyal et al. 2017, arXiv
        1706.02677, section 2.1). Nothing applies it unasked."""
        return lr * self.dp_size

    @property
    def least_microbatches(self) -> int:
        """What the schedule needs at least."""
        return 2 * self.pp_size if self.pp_style == "dualpipe-v" else 1

    def microbatches(self, samples: int) -> int:
        """Into how many microbatches a batch of so many samples is split."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        if self.microbatch_size is not None:
            wanted = -(-samples // self.microbatch_size)
        else:
            wanted = 1 if self.pp_size == 1 else min(samples, FILL * self.pp_size)
        return max(wanted, self.least_microbatches)

    def schedule(self, microbatches: int) -> Schedule:
        """Of so many microbatches; made once."""
        if microbatches not in self._schedules:
            if self.pp_size == 1:  # a rank that has all of the model takes it as one stage
                made = schedules.make("1f1b", 1, microbatches)
            else:
                made = schedules.make(self.pp_style, self.pp_size * self.chunks, microbatches, self.chunks)
            self._schedules[microbatches] = made
        return self._schedules[microbatches]

    @property
    def chunks(self) -> int:
        """Stages a rank of a pipeline."""
        there_and_back = self.pp_style in ("zb-v", "dualpipe-v") and self.num_model_chunks == 1
        return 2 if there_and_back else self.num_model_chunks

    # --- data --------------------------------------------------------------------------------------------

    def prepare_dataloader(
        self,
        dataset: Rows,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Any = None,
    ) -> Loader:
        """Batches of `batch_size` samples a data-parallel rank; batch k is the same samples in every layout
        with the same global batch.

        Args:
            dataset: anything with __len__ and __getitem__.
            collate_fn: a list of samples to a batch of tensors; by default torch's.
            transform: done to a loaded batch on this rank, such as `hpnb.data.ImageTransform`.

        Returns:
            An `hpnb.data.Loader`: it has a length and `set_epoch`, and the last batch may be ragged.
        """
        return Loader(
            dataset,
            batch_size,
            self.mesh.dp,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate=collate_fn,
            transform=transform,
            num_workers=num_workers,
            pin_memory=pin_memory and this_device().type == "cuda",
        )
