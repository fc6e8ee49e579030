"""One weight with homes on several ranks: equal at the start, and its gradient is the sum of all homes'.

A weight that is both embedding and head is on the first stage and on the last. Each of them computes with its
own copy; copies that start equal and get equal gradients stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.stages import Stages


def tie_weights(stages: Stages, axis: Axis, rank_of: Mapping[int, int]) -> dict[nn.Parameter, Axis]:
    """{parameter of this rank: the ranks that hold it}, for those on several; they take the first's value.

    Every rank of the world calls it, with stages of the same cut: a new group is a matter of all.

    Args:
        rank_of: {stage: the place on the axis that has it}.
    """
    named = dict(stages.named_parameters(remove_duplicate=False))
    found: dict[nn.Parameter, Axis] = {}
    for tied in stages.tied:
        places = sorted({rank_of[stage] for stage in tied.stages})
        if len(places) == 1:
            continue
        holders = axis.among(places)
        if axis.rank in places:
            (parameter,) = {named[name] for name in tied.names if name in named}
            dist.broadcast(parameter.data, src=holders.ranks[0], group=holders.group)
            found[parameter] = holders
    return found
