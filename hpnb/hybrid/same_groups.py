"""Every rank steps with the same numbers: learning rate, momentum, weight decay and the like.

Weights are equal on all ranks because gradients are equal and every rank computes the same update. A rank
with another learning rate trains another model, and nothing fails. So the numbers of an optimizer's groups
are compared when it is boosted and before its first step. Later steps send nothing, and a scheduler changes
the numbers on every rank alike.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from hpnb.optimizer_state import group_numbers
from hpnb.record.traffic import uncounted


def check_same_groups(optimizer: Optimizer) -> None:
    """Compare the numbers in the groups of `optimizer` over all ranks, which call it.

    Raises:
        ValueError: on every rank, with the first number that differs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    numbers = group_numbers(optimizer.param_groups)
    by_rank = [numbers] * dist.get_world_size()
    with uncounted():
        dist.all_gather_object(by_rank, numbers)
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        for name in {**first, **other}:
            if (a := first.get(name)) != (b := other.get(name)):
                raise ValueError(
                    f"the optimizer has {name}={a} on rank 0 and {name}={b} on rank {rank}, so ranks would "
                    "train different models; give it the same numbers on every rank"
                )
