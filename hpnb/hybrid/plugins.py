"""What to parallelize, as numbers and switches: a plugin says how, and `hpnb.Booster` does it.

    plugin = hpnb.HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, zero_stage=1)
    booster = hpnb.Booster(plugin=plugin)

The ranks form a box, dp x pp x cp x tp, with tp innermost. dp is what is left: with 8 ranks the plugin above
has dp = 8 / (2 * 2) = 2. The options are plain data (`plugin_options.py`), checked at once and without ranks
(`refused.py`). Process groups are made by `connect`, which is a collective. No property is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hpnb.data import IterableLoader, Loader
from hpnb.data.batch_agreement import check_same_dataset
from hpnb.data.dataset import MapDataset
from hpnb.data.iterable_loader import is_iterable_dataset
from hpnb.hybrid.colossal_config import plugin_options
from hpnb.hybrid.plugin_options import PluginOptions
from hpnb.hybrid.refused import REFUSED
from hpnb.mesh import Axis, Mesh, ParallelLayout
from hpnb.pipeline_parallel import Schedule
from hpnb.ranks.current_rank import device as this_device
from hpnb.ranks.current_rank import world_size


@dataclass(eq=False, repr=False)
class HybridParallelPlugin(PluginOptions):
    """Data, pipeline and tensor parallelism in one. Names and defaults are Colossal-AI's where it has them.

    Inside running ranks, making a plugin is a collective: every rank makes the same one.

    Args:
        tp_size, pp_size, cp_size: ranks along the tensor, the pipeline and the context axis. The rest is
            data parallel.
        zero_stage: 0 replicates; 1 shards the optimizer state over dp, 2 also gradients, 3 also parameters.
        zero_replicas: with zero_stage 3, how many ranks hold each shard (HSDP); the ranks of dp x cp are
            divided by it. One replica a node keeps all-gathers within nodes.
        precision: "fp16", "bf16", "fp32", "fp64", or "amp-fp16", "amp-bf16" for float32 weights
            (`hpnb.precision.policy`); a dtype such as torch.bfloat16 too. "auto", the default, is fp32 on a
            CPU, and on a GPU bf16, or fp16 if it has no bf16; `plugin.policy.name` says which. With 16 bits
            float32 buffers stay float32 (in transformers' models as from_pretrained(dtype=) has them), and
            norms with running statistics; complex tensors stay as they are (`hpnb.precision.cast`).
        num_microbatches: of a batch in `execute_pipeline`; if it is set, microbatch_size is ignored.
        microbatch_size: samples of a microbatch; a batch then has as many microbatches as it needs. Without
            either there are four for each rank of a pipeline, and at most one a sample; one without a
            pipeline.
        pp_style: a schedule's name (`hpnb.pipeline_parallel.schedules`).
        num_model_chunks: pipeline stages on each rank. "zb-v" and "dualpipe-v" always have two.
        tp_mode, tp_depth: "1d", "2d", "2.5d" or "3d", and the depth of "2.5d".
        context_parallel: how attention runs over cp: "ring", "all-gather" or "ulysses"
            (`hpnb.context_parallel`).
        ep_size: ranks over which a mixture's experts are sharded, taken from dp x cp
            (`hpnb.expert_parallel`).
        selection_bias_rate: how far a step moves the routers' selection bias towards equal loads; 0 leaves
            it, and DeepSeek-V3 used 0.001 (`hpnb.expert_parallel.SelectionBias`).
        enable_sequence_parallelism: split what lies between the matrices along the tokens (1d).
        enable_sequence_overlap: sums of gradients in sequence parallelism overlap the computation of weight
            gradients; False waits for each.
        enable_all_optimization: the next three, on GPUs, and Adam in one pass over memory: with 16-bit
            weights `hpnb.precision.flat_adam` (on CPUs too), otherwise PyTorch's fused kernel.
        enable_fused_normalization: accepted; PyTorch's LayerNorm is one kernel already.
        enable_flash_attention: PyTorch's scaled_dot_product_attention. A model that cannot use it, such as
            Gemma 2 or GPT-OSS, is refused; enable_all_optimization keeps its attention.
        enable_jit_fused: torch.compile on GPUs: of whole blocks, or between linears if tp_size > 1 or the
            schedule splits backwards (`hpnb.hybrid.compile_blocks`). With 16-bit weights also Adam in one
            pass (`hpnb.precision.flat_adam`); PyTorch's fused kernel takes enable_all_optimization.
        enable_cuda_graphs: `execute_pipeline` replays each stage's forward and backward as CUDA graphs, which
            makes small microbatches faster, also with pp_size=1. A stage that cannot be captured runs as
            before, with a warning: one with messages inside (cp_size or ep_size above 1; tp_size and ZeRO 3
            without NCCL), and ZeRO 3 with cpu_offload or find_unused_parameters. ZeRO 3 gathers blocks in its
            graphs, which keep full gradients and activations in memory between steps.
        max_norm: clip the norm of all gradients to it; 0 is off. `optimizer.last_step.norm` is the norm
            before. `torch.nn.utils.clip_grad_norm_` is refused where it is wrong (`torch_clipping.py`).
        broadcast_buffers, ddp_bucket_cap_mb, find_unused_parameters, check_reduction,
            gradient_as_bucket_view, static_graph: of `hpnb.DataParallel`; find_unused_parameters also with
            ZeRO. ddp_copy_engines is its copy_engines.
        zero_bucket_size_in_m: million elements in a gradient bucket of ZeRO 1 and 2.
        cpu_offload: ZeRO's shards and its optimizer live on the CPU.
        communication_dtype: dtype in which ZeRO sends gradients; by default their own.
        overlap_communication: reduce during the backward.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: of
            the loss scaler, with "fp16" and "amp-fp16" (`hpnb.precision.LossScaler`).
        activation_checkpointing: recompute whole blocks ("full") or the attention's softmax and its products
            ("attention") in the backward; False keeps all activations. "attention" is for models of
            transformers, whose attention function runs twice as it is.
        loss_chunk: tokens at a time for a GPT2LMHeadModel's loss (`hpnb.models.chunk_loss`); 0 is all. On
            GPUs it also pads an odd vocabulary, which makes its products several times as fast; try 4096.
        cut: where to partition a model into stages: "uniform", "parameters", "flops", "time", or a list of
            layers for each stage.
        seed: of dropout. Ranks along tp draw the same numbers, others differ: seed + dp * pp_size + pp. By
            default the seed that `launch_from_torch` or torch.manual_seed got.

    Attributes:
        mesh: `.dp`, `.pp`, `.cp`, `.tp`, `.ep`, each an `hpnb.Axis`.

    Raises:
        ValueError: sizes and switches that cannot compose, and what would work; from `connect` and `layout`,
            a number of ranks that is not a multiple of pp_size x tp_size x cp_size.

    >>> plugin = hpnb.HybridParallelPlugin(pp_size=2, precision="fp32", num_microbatches=4)
    >>> plugin.schedule(4).simulate().makespan  # forwards of 1 s, backwards of 2 s
    15.0
    """

    _mesh: Mesh | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for refusal in REFUSED:
            if (problem := refusal.find(self)) is not None:
                raise ValueError(f"{refusal.what} cannot compose, because {refusal.why}: {problem}")
        self._connect_if_ranks_run()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mesh": None}  # a process that receives it has groups of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect_if_ranks_run()

    @staticmethod
    def from_config(config: Mapping[str, Any], **options: Any) -> HybridParallelPlugin:
        """The plugin that a configuration of Colossal-AI's first tutorials asks for; `options` win.

        Its entries parallel, NUM_MICRO_BATCHES, NUM_CHUNKS, fp16 and clip_grad_norm are read
        (`hpnb.hybrid.colossal_config`); the others are for the program.

        Raises:
            ValueError: an entry that is not known.

        >>> config = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2), clip_grad_norm=1.0)
        >>> hpnb.HybridParallelPlugin.from_config(config)
        HybridParallelPlugin(pp_size=2, num_microbatches=4, max_norm=1.0)
        """
        return HybridParallelPlugin(**{**plugin_options(config), **options})

    # --- ranks -------------------------------------------------------------------------------------------

    def connect(self) -> Mesh:
        """Make the process groups. This is a collective: every rank calls it. Making or receiving a plugin
        inside running ranks does it already, and so does `hpnb.Booster`.

        Raises:
            ValueError: the number of ranks is not a multiple of pp_size x tp_size x cp_size.
            RuntimeError: no ranks are running.
        """
        if self._mesh is None:
            self._mesh = Mesh(self.layout.mesh_layout)
            _ = self.zero_axes, self.expert_zero_axes  # their groups are kept, as those of the mesh
        return self._mesh

    def _connect_if_ranks_run(self) -> None:
        if dist.is_initialized() and world_size() % self.replica_size == 0:
            self.connect()

    @property
    def mesh(self) -> Mesh:
        if self._mesh is not None:
            return self._mesh
        _ = self.layout  # a number of ranks that does not fit is the better message
        raise RuntimeError(
            "this plugin was made before there were ranks, and its process groups are not made yet: make the "
            "Booster first, or call plugin.connect() on every rank"
        )

    @property
    def zero_axes(self) -> tuple[Axis | None, Axis]:
        """(the axis over which shards are equal, or None; the axis over which ZeRO shards)."""
        return _replicas_and_shards(self.mesh.dp_cp, self.zero_replicas)

    @property
    def expert_zero_axes(self) -> tuple[Axis | None, Axis]:
        """The same of experts that are sharded over ep: parts of edp, whose ranks hold the same experts."""
        return _replicas_and_shards(self.mesh.edp, self.zero_replicas)

    @property
    def layout(self) -> ParallelLayout:
        """The sizes of all axes and how a step runs on them, on the ranks that are running."""
        return self.layout_on(world_size())

    @property
    def dp_size(self) -> int:
        """Ranks along the data axis."""
        return self.layout.dp

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
        """This rank's place in the pipeline: .is_first_stage(), .is_last_stage(), .stage, .num_stages."""
        return StageManager.of(self.mesh.pp, self.schedule(self.least_microbatches))

    def scaled_lr(self, lr: float) -> float:
        """`lr` times the data-parallel size, by which the global batch grows (Goyal et al. 2017, arXiv
        1706.02677, section 2.1). Nothing applies it unasked."""
        return lr * self.dp_size

    # --- data --------------------------------------------------------------------------------------------

    def prepare_dataloader(
        self,
        dataset: MapDataset | Iterable[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Any = None,
    ) -> Any:
        """Batches of `batch_size` samples for each data-parallel rank. Every rank calls it.

        Batch k is the same set of samples in every layout with the same global batch; of a stream, unless it
        has shards for each replica.

        Args:
            dataset: anything with __len__ and __getitem__, or a stream: an IterableDataset of PyTorch or of
                `datasets`.
            collate_fn: a list of samples to a batch of tensors; by default torch's.
            transform: is applied to a loaded batch on this rank, such as `hpnb.data.ImageTransform`.

        Returns:
            An `hpnb.data.Loader`: it has a length and `set_epoch`, and the last batch may be ragged. Of a
            stream an `hpnb.data.IterableLoader`, without a length.

        Raises:
            ValueError: the dataset has another length on another rank.
        """
        axis = self.connect().dp
        is_stream = is_iterable_dataset(dataset)
        kind: Any = IterableLoader if is_stream else Loader
        loader = kind(
            dataset,
            batch_size,
            axis,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            transform=transform,
            num_workers=num_workers,
            pin_memory=pin_memory and this_device().type == "cuda",
        )
        if not is_stream:
            check_same_dataset(loader.dataset)
        return loader


@dataclass(frozen=True)
class StageManager:
    """Where one rank stands in its pipeline. Without a pipeline it has the first stage and the last.

        pp_style     1f1b           zb-v (there and back)
        rank         0 1 2 3        0 1 2 3
        stages       0 1 2 3        0 1 2 3
                                    7 6 5 4
        last stage         *        *

    Attributes:
        stage, num_stages: the rank's place along the pipeline, and how many ranks it has.
        stages: the numbers of the model's stages that are here; a rank may have several.
    """

    stage: int
    num_stages: int
    stages: tuple[int, ...]
    _last: int

    @staticmethod
    def of(axis: Axis, schedule: Schedule) -> StageManager:
        return StageManager(axis.rank, axis.size, tuple(schedule.stages_of(axis.rank)), schedule.stages - 1)

    def is_first_stage(self) -> bool:
        """Whether this rank has the model's first stage, which takes the inputs."""
        return 0 in self.stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the model's last stage, which gives the outputs and the loss."""
        return self._last in self.stages


def _replicas_and_shards(axis: Axis, replicas: int) -> tuple[Axis | None, Axis]:
    """`axis` as so many replicas x shards, or as replicas alone where it cannot be split so."""
    if replicas == 1:
        return None, axis
    count = replicas if axis.size % replicas == 0 else axis.size  # of experts, with ep above a node's ranks
    copies, shards = axis.split(count, axis.size // count)
    return copies, shards
