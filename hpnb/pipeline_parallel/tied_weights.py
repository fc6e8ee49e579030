"""Tied weights: one weight that several stages use, such as GPT-2's embedding and head.

Each rank that has one or several of these stages computes with a copy. The copies start equal
(`tie_weights`), and the gradient of each is the sum of all copies' gradients (`sum_tied_gradient`, at the end
of every step), so they stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hpnb.mesh import Axis
from hpnb.record.traffic import uncounted


@dataclass(frozen=True)
class TiedWeight:
    """One weight that several stages use: each has it, and its gradient is the sum of theirs.

    Attributes:
        names: in the whole model, in its order.
        stages: the stage of each name.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


def tie_weights(
    module: nn.Module, tied_weights: Sequence[TiedWeight], axis: Axis, rank_of: Mapping[int, int]
) -> dict[nn.Parameter, Axis]:
    """{parameter of this rank: the ranks that have it}, for those on several. The first of these ranks
    broadcasts its value to the others.

    Every rank of the world calls it, with the tied weights of the same cut, because all ranks take part in
    making a group.

    Args:
        rank_of: {stage: the rank of the axis that has it}.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    ranks_of: dict[nn.Parameter, Axis] = {}
    for tied in tied_weights:
        ranks = sorted({rank_of[stage] for stage in tied.stages})
        if len(ranks) == 1:
            continue
        group = axis.among(ranks)
        if axis.rank in ranks:
            # One, because all names of a tied weight are the same object where a rank has several.
            (parameter,) = {named[name] for name in tied.names if name in named}
            dist.broadcast(parameter.data, src=group.ranks[0], group=group.group)
            ranks_of[parameter] = group
    return ranks_of


def check_frozen_alike(
    module: nn.Module, tied_weights: Sequence[TiedWeight], ranks_of: Mapping[nn.Parameter, Axis]
) -> None:
    """Every rank that has a copy of a tied weight calls it.

    Raises:
        ValueError: a weight that is trained on some of its ranks and frozen on others. One of them would wait
            for the other's gradient, or the copies would part.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    for p, ranks in ranks_of.items():
        trained = [p.requires_grad] * ranks.size
        with uncounted():
            dist.all_gather_object(trained, p.requires_grad, group=ranks.group)
        if len(set(trained)) > 1:
            names = next(
                tied.names for tied in tied_weights if any(named.get(name) is p for name in tied.names)
            )
            raise ValueError(
                f"{' and '.join(names)} are one weight, trained on {sum(trained)} of its ranks and frozen "
                f"on {trained.count(False)}. A rank has it by the name in its stage: freeze or thaw it "
                "by all these names"
            )


def sum_tied_gradient(holder: nn.Parameter, ranks: Axis) -> None:
    """Make the gradient of `holder` the sum of those of all copies: one all-reduce over the `ranks` that have
    one. A copy without a gradient in this step adds zeros."""
    if holder.grad is None:
        holder.grad = torch.zeros_like(holder)
    dist.all_reduce(holder.grad, group=ranks.group)
