"""The predicted side: what a layout costs, as pure functions of shapes and rates.

`communication` and `wires` price the collectives, `fit` reads a wire off measured times, `transformer` counts
FLOPs and bytes, `model_states` weighs what a rank must keep, `overlap` says what a backward hides, `pipeline`
what a pipeline waits for, `uneven` what layers that are not equal cost it, `tensor`, `tensor_block` and
`tensor_memory` what the modes of tensor parallelism send and hold, and `laws` puts them together: which axis
of a layout can afford which wire. `step_memory`, `shard_seconds` and `gathers` are what a step of sharded
data parallelism holds, takes and waits for, `noise` says how large a batch helps, and `undivided` what heads
and words that do not divide cost. `cluster` plans for thousands of GPUs, `failures` says how often to save
there, `experts` what experts send, `published` has the runs that these are held to; their names are used with
the module's, as `theory.cluster.best_plan`.

`hpnb.theory.overlap` is the function, though a submodule has the same name; and so are the first three of
these.
"""

from hpnb.theory import cluster, experts, failures, published
from hpnb.theory.activation_rows import ACTIVATION_ROWS, ActivationRow
from hpnb.theory.communication import (
    ALGORITHMS,
    OPS,
    Plan,
    bytes_on_busiest_rank,
    bytes_sent,
    cheapest,
    knee,
    plan,
    ring_schedule,
    seconds,
    steps,
)
from hpnb.theory.fit import fit_wire
from hpnb.theory.gathers import Gathers, ahead, gathers
from hpnb.theory.laws import dp_tokens_to_hide, pp_compute_over_communication, tp_compute_over_communication
from hpnb.theory.layout_step import (
    FILLING,
    STEP_PARTS,
    LayerCost,
    LayoutPlan,
    LayoutTask,
    layout_bytes,
    layout_memory,
    layout_parts,
    layout_plans,
)
from hpnb.theory.model_states import ModelStates, model_states
from hpnb.theory.noise import fitted_wall, noise_scale, signal_and_noise, steps_at
from hpnb.theory.overlap import Overlap, even_buckets, exposed_seconds, exposed_share, overlap
from hpnb.theory.pipeline import best_microbatches, bubble, idle_seconds, in_flight, paced, step_seconds
from hpnb.theory.shard_seconds import shard_seconds
from hpnb.theory.step_memory import Moment, StepMemory, step_memory
from hpnb.theory.tensor import Collective, Sent, grid_sides, linear_bytes, linear_sent, ranks_for
from hpnb.theory.tensor_block import BlockSeconds, block_seconds, block_sent, cheapest_modes, shapes_sent
from hpnb.theory.tensor_memory import (
    activation_bytes,
    activation_terms,
    parameters_held,
    published_activation_bytes,
)
from hpnb.theory.transformer import Block, Matmul, model_flops, model_parameters, roofline_seconds
from hpnb.theory.undivided import (
    SEQUENCE_WAYS,
    attention_share,
    block_over_even,
    gathered_sent,
    kept_parts,
    loss_sent,
    over_even,
    recomputed_share,
    sequence_sent,
    vocabulary_sent,
)
from hpnb.theory.uneven import even, head_in_blocks, loads, tie_bytes, uniform_over_even
from hpnb.theory.wires import WIRES, Wire

__all__ = [
    "ACTIVATION_ROWS",
    "ALGORITHMS",
    "FILLING",
    "OPS",
    "SEQUENCE_WAYS",
    "STEP_PARTS",
    "WIRES",
    "ActivationRow",
    "Block",
    "BlockSeconds",
    "Collective",
    "Gathers",
    "LayerCost",
    "LayoutPlan",
    "LayoutTask",
    "Matmul",
    "ModelStates",
    "Moment",
    "Overlap",
    "Plan",
    "Sent",
    "StepMemory",
    "Wire",
    "activation_bytes",
    "activation_terms",
    "ahead",
    "attention_share",
    "best_microbatches",
    "block_over_even",
    "block_seconds",
    "block_sent",
    "bubble",
    "bytes_on_busiest_rank",
    "bytes_sent",
    "cheapest",
    "cheapest_modes",
    "cluster",
    "dp_tokens_to_hide",
    "even",
    "even_buckets",
    "experts",
    "exposed_seconds",
    "exposed_share",
    "failures",
    "fit_wire",
    "fitted_wall",
    "gathered_sent",
    "gathers",
    "grid_sides",
    "head_in_blocks",
    "idle_seconds",
    "in_flight",
    "kept_parts",
    "knee",
    "layout_bytes",
    "layout_memory",
    "layout_parts",
    "layout_plans",
    "linear_bytes",
    "linear_sent",
    "loads",
    "loss_sent",
    "model_flops",
    "model_parameters",
    "model_states",
    "noise_scale",
    "over_even",
    "overlap",
    "paced",
    "parameters_held",
    "plan",
    "pp_compute_over_communication",
    "published",
    "published_activation_bytes",
    "ranks_for",
    "recomputed_share",
    "ring_schedule",
    "roofline_seconds",
    "seconds",
    "sequence_sent",
    "shapes_sent",
    "shard_seconds",
    "signal_and_noise",
    "step_memory",
    "step_seconds",
    "steps",
    "steps_at",
    "tie_bytes",
    "tp_compute_over_communication",
    "uniform_over_even",
    "vocabulary_sent",
]
