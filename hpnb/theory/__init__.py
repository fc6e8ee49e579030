"""The predicted side: what a layout costs, as pure functions of shapes and rates.

    links, fit_link, communication      latency and bandwidth; what a collective costs; a link fitted to times
    transformer, model_states           FLOPs and bytes of a block; weights, gradients, optimizer state
    overlap, compute_over_communication what a backward hides; which axis can afford which link
    pipeline, uneven_stages             bubbles; what a heavy head and a tied embedding cost a pipeline
    tensor_layer, tensor_block          messages of a linear layer and of a block in 1D, 2D, 2.5D and 3D
    tensor_memory, activation_table     activations and parameters on a rank; the published activation table
    uneven_shards                       heads and vocabularies that do not divide
    step_memory, zero_step_time         memory and time of a step with ZeRO
    zero3_prefetch, gradient_noise      when ZeRO-3's all-gathers arrive; how large a batch helps
    layout_step, cluster, planner       a step on any layout, from one rank or datasheets; the best one
    replay                              a recorded step on another interconnect
    model_shape, datasheets             any transformer and any GPU in numbers
    plan_step, plan_messages, plan_memory    time and memory of their steps, for `python -m hpnb plan`
    context                             a ring and Ulysses: bytes, and what is exposed of their time
    failures, experts, published_runs   how often to save; mixtures of experts; what others have measured

Names of `cluster`, `planner`, `context`, `failures`, `experts` and `published_runs` are used with the
module's, as in `theory.planner.best_layout`. Import `model_shape`, `datasheets` and `plan_*` as modules.
The name `hpnb.theory.overlap` is the function, although a submodule has the same name.
"""

from hpnb.theory import cluster, context, experts, failures, planner, published_runs
from hpnb.theory.activation_table import ACTIVATION_ROWS, ActivationRow
from hpnb.theory.communication import (
    ALGORITHMS,
    OPS,
    bytes_sent,
    cheapest,
    knee,
    seconds,
    steps,
)
from hpnb.theory.compute_over_communication import (
    dp_tokens_to_hide,
    tp_compute_over_communication,
)
from hpnb.theory.fit_link import fit_link
from hpnb.theory.gradient_noise import fitted_wall, noise_scale, signal_and_noise, steps_at
from hpnb.theory.layout_step import (
    STEP_PARTS,
    LayerCost,
    LayoutTask,
    layout_bytes,
    layout_memory,
    layout_parts,
)
from hpnb.theory.links import LINKS, REPLAY_LINK, Link
from hpnb.theory.model_states import model_states
from hpnb.theory.overlap import even_buckets, exposed_seconds, exposed_share, overlap
from hpnb.theory.pipeline import (
    best_microbatches,
    bubble,
    in_flight,
    pipeline_seconds,
    step_seconds,
)
from hpnb.theory.planner import task_layouts
from hpnb.theory.replay import replay
from hpnb.theory.step_memory import StepMemory, step_memory
from hpnb.theory.tensor_block import block_seconds, block_sent, cheapest_modes, shapes_sent
from hpnb.theory.tensor_layer import Collective, grid_sides, linear_sent, ranks_for
from hpnb.theory.tensor_memory import (
    activation_bytes,
    activation_terms,
    published_activation_bytes,
)
from hpnb.theory.transformer import Block, Matmul, model_flops, model_parameters
from hpnb.theory.uneven_shards import (
    SEQUENCE_WAYS,
    activation_parts,
    block_imbalance,
    gathered_logits_bytes,
    imbalance,
    recomputed_share,
    sequence_bytes,
    sharded_loss_bytes,
    vocabulary_bytes,
)
from hpnb.theory.uneven_stages import (
    even_split,
    head_in_blocks,
    stage_loads,
)
from hpnb.theory.zero3_prefetch import GatherTimeline, prefetch_plan, simulate_gathers
from hpnb.theory.zero_step_time import zero_step_seconds

__all__ = [
    "ACTIVATION_ROWS",
    "ALGORITHMS",
    "LINKS",
    "OPS",
    "REPLAY_LINK",
    "SEQUENCE_WAYS",
    "STEP_PARTS",
    "ActivationRow",
    "Block",
    "Collective",
    "GatherTimeline",
    "LayerCost",
    "LayoutTask",
    "Link",
    "Matmul",
    "StepMemory",
    "activation_bytes",
    "activation_parts",
    "activation_terms",
    "best_microbatches",
    "block_imbalance",
    "block_seconds",
    "block_sent",
    "bubble",
    "bytes_sent",
    "cheapest",
    "cheapest_modes",
    "cluster",
    "context",
    "dp_tokens_to_hide",
    "even_buckets",
    "even_split",
    "experts",
    "exposed_seconds",
    "exposed_share",
    "failures",
    "fit_link",
    "fitted_wall",
    "gathered_logits_bytes",
    "grid_sides",
    "head_in_blocks",
    "imbalance",
    "in_flight",
    "knee",
    "layout_bytes",
    "layout_memory",
    "layout_parts",
    "linear_sent",
    "model_flops",
    "model_parameters",
    "model_states",
    "noise_scale",
    "overlap",
    "pipeline_seconds",
    "planner",
    "prefetch_plan",
    "published_activation_bytes",
    "published_runs",
    "ranks_for",
    "recomputed_share",
    "replay",
    "seconds",
    "sequence_bytes",
    "shapes_sent",
    "sharded_loss_bytes",
    "signal_and_noise",
    "simulate_gathers",
    "stage_loads",
    "step_memory",
    "step_seconds",
    "steps",
    "steps_at",
    "task_layouts",
    "tp_compute_over_communication",
    "vocabulary_bytes",
    "zero_step_seconds",
]
