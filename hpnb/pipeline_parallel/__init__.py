"""Pipeline parallelism: the layers of a model dealt out to ranks, microbatches walking through them.

schedule.py         Action, Schedule: what every rank does, in order, as plain data
schedules.py        those of the literature
check.py            can it be run?
simulate.py         what would it take, with given costs?

layers.py           what a model is cut from
partition.py        where to cut, layer_costs.py by what
stages.py           what one rank holds

pipeline.py         Pipeline: what a training loop calls
executor.py         one rank's list, action by action
split_backward.py   I and W
transfers.py        from rank to rank
boundary.py, microbatches.py, loss.py, grad_ready.py, tied_weights.py, step_result.py
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
