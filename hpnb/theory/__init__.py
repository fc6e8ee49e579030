"""The predicted side: what a layout costs, as pure functions of shapes and rates.

`communication` and `wires` price the collectives, `fit` reads a wire off measured times, `transformer` counts
FLOPs and bytes, `model_states` weighs what a rank must keep, `overlap` says what a backward hides, `pipeline`
what a pipeline waits for, and `laws` puts them together: which axis of a layout can afford which wire.

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
from hpnb.theory.transformer import Block, Matmul, model_flops, model_parameters, roofline_seconds
from hpnb.theory.wires import WIRES, Wire

__all__ = [
    "ALGORITHMS",
    "OPS",
    "WIRES",
    "Block",
    "Matmul",
    "ModelStates",
    "Overlap",
    "Plan",
    "Wire",
    "best_microbatches",
    "bubble",
    "bytes_on_busiest_rank",
    "bytes_sent",
    "cheapest",
    "dp_tokens_to_hide",
    "even_buckets",
    "exposed_seconds",
    "exposed_share",
    "fit_wire",
    "idle_seconds",
    "in_flight",
    "knee",
    "model_flops",
    "model_parameters",
    "model_states",
    "overlap",
    "paced",
    "plan",
    "pp_compute_over_communication",
    "ring_schedule",
    "roofline_seconds",
    "seconds",
    "step_seconds",
    "steps",
    "tp_compute_over_communication",
]
