"""The predicted side: what a layout costs, as pure functions of shapes and rates.

`communication` and `wires` price the collectives, `fit` reads a wire off measured times, `transformer` counts
FLOPs and bytes, `model_states` weighs what a rank must keep, `overlap` says what a backward hides, `pipeline`
what a pipeline waits for, `tensor`, `tensor_block` and `tensor_memory` what the modes of tensor parallelism
send and hold, and `laws` puts them together: which axis of a layout can afford which wire.

`hpnb.theory.overlap` is the function, though a submodule has the same name.
"""

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
from hpnb.theory.laws import dp_tokens_to_hide, pp_compute_over_communication, tp_compute_over_communication
from hpnb.theory.model_states import ModelStates, model_states
from hpnb.theory.overlap import Overlap, even_buckets, exposed_seconds, exposed_share, overlap
from hpnb.theory.pipeline import best_microbatches, bubble, idle_seconds, in_flight, paced, step_seconds
from hpnb.theory.tensor import Collective, Sent, grid_sides, linear_bytes, linear_sent, ranks_for
from hpnb.theory.tensor_block import BlockSeconds, block_seconds, block_sent, cheapest_modes, shapes_sent
from hpnb.theory.tensor_memory import (
    activation_bytes,
    activation_terms,
    parameters_held,
    published_activation_bytes,
)
from hpnb.theory.transformer import Block, Matmul, model_flops, model_parameters, roofline_seconds
from hpnb.theory.wires import WIRES, Wire

__all__ = [
    "ALGORITHMS",
    "OPS",
    "WIRES",
    "Block",
    "BlockSeconds",
    "Collective",
    "Matmul",
    "ModelStates",
    "Overlap",
    "Plan",
    "Sent",
    "Wire",
    "activation_bytes",
    "activation_terms",
    "best_microbatches",
    "block_seconds",
    "block_sent",
    "bubble",
    "bytes_on_busiest_rank",
    "bytes_sent",
    "cheapest",
    "cheapest_modes",
    "dp_tokens_to_hide",
    "even_buckets",
    "exposed_seconds",
    "exposed_share",
    "fit_wire",
    "grid_sides",
    "idle_seconds",
    "in_flight",
    "knee",
    "linear_bytes",
    "linear_sent",
    "model_flops",
    "model_parameters",
    "model_states",
    "overlap",
    "paced",
    "parameters_held",
    "plan",
    "pp_compute_over_communication",
    "published_activation_bytes",
    "ranks_for",
    "ring_schedule",
    "roofline_seconds",
    "seconds",
    "shapes_sent",
    "step_seconds",
    "steps",
    "tp_compute_over_communication",
]
