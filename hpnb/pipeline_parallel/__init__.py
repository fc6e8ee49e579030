"""Pipeline parallelism: a model is partitioned into stages, and microbatches pass through them.

schedule.py         Schedule: what every rank does, in order; action.py: one operation
schedules.py        the schedules of the literature
check.py            can it be run? draw_grid.py shows where not
simulate.py         what each rank does when, given the cost of each action

layers.py           the layers of a model
partition.py        which stage gets which layers; layer_costs.py: by what
stages.py           the layers that one rank has; tied_weights.py: weights that several stages use

pipeline.py         Pipeline: what a training loop calls; step_result.py: what a step returns
executor.py         runs one rank's list (rank_schedule.py); action_times.py: how long each action took
transfers.py        messages between ranks; symmetric_transfers.py: by the copy engines of GPUs
step_queues.py      which of these ways a step takes
step_messages.py    the messages of one step; boundary.py: their shapes
microbatches.py     splits a batch, counts targets; loss.py: the exact loss of the whole batch
criterion_check.py  is a loss a mean over targets? halves_check.py, label_shift.py
split_backward.py   I and W; weight_gradient_rules.py: of which modules
grad_ready.py       when a gradient may be reduced
cuda_graphs.py      replays stages as CUDA graphs: stage_graph.py, graph_slots.py, capture_watch.py
overlapped_pairs.py which forwards and backwards run together
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpnb.lazy_names import lazy_names
from hpnb.pipeline_parallel import schedules
from hpnb.pipeline_parallel.schedule import Action, Schedule, ScheduleError
from hpnb.pipeline_parallel.simulate import Costs

if TYPE_CHECKING:
    from hpnb.pipeline_parallel.layers import Builder
    from hpnb.pipeline_parallel.partition import cut
    from hpnb.pipeline_parallel.pipeline import Pipeline
    from hpnb.pipeline_parallel.stages import Stages, full_state_dict

__all__ = [
    "Action",
    "Builder",
    "Costs",
    "Pipeline",
    "Schedule",
    "ScheduleError",
    "Stages",
    "cut",
    "full_state_dict",
    "schedules",
]

# They import transformers.
_LAZY = {"Pipeline": "pipeline", "Builder": "layers", "cut": "partition", "Stages": "stages"}
_LAZY["full_state_dict"] = "stages"

__getattr__ = lazy_names(__name__, _LAZY)
