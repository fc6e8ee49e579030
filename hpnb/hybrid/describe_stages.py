"""What each rank of a pipeline got, in a line a stage: `booster.boost(..., verbose=True)` prints it once.

    stage 0 of 2 on pipeline rank 0: transformer.wte.weight to transformer.h.1.mlp.c_proj.bias, ...
    stage 1 of 2 on pipeline rank 1: transformer.h.2.ln_1.weight to transformer.ln_f.bias, ...
"""

from __future__ import annotations

from math import prod

import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.stages import Stages
from hpnb.placement import placement_of


def describe_stages(module: nn.Module, pp: Axis) -> str:
    """The trained parameters of all stages, of which every rank of `pp` passes its part; all of them call it.
    They count in full, also where tensor parallelism or ZeRO shards them."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    stages = {0: [p for p in names if p.requires_grad]}
    if isinstance(module, Stages):
        stages = {stage: module.trained(stage) for stage in module.numbers}
    here = [
        (stage, pp.rank, [names[p] for p in parameters], sum(prod(placement_of(p).shape) for p in parameters))
        for stage, parameters in stages.items()
    ]
    everywhere = [here]
    if pp.size > 1:
        everywhere = [[] for _ in range(pp.size)]
        dist.all_gather_object(everywhere, here, pp.group)
    lines = sorted(line for of_rank in everywhere for line in of_rank)
    return "\n".join(
        f"stage {stage} of {len(lines)} on pipeline rank {rank}: "
        + (f"{of_stage[0]} to {of_stage[-1]}, {count:,} parameters" if of_stage else "no trained parameters")
        for stage, rank, of_stage, count in lines
    )
