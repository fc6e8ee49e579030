"""A criterion under ZeRO 3 or expert parallelism must not use this rank's shards of weights.

    loss = cross_entropy(outputs, labels) + 0.05 * head.weight.square().sum()

`execute_pipeline` weighs what a criterion returns by the rank's share of the targets, which is right for
samples, and for weights that all ranks have: the shares add up to 1. A shard is on one rank, so its gradient
would count by one share alone. The graph between the outputs and the loss shows whether a shard is in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hpnb.placement import placement_of

# Over these, or over parts such as "dp.1", ZeRO 3 shards; over ep, expert parallelism.
_DATA_AXES = {"dp", "cp", "dp_cp", "edp", "ep"}


def refuse_sharded_terms(loss: Any, outputs: Any) -> None:
    """
    Args:
        loss: what the criterion returned of `outputs`.

    Raises:
        ValueError: the loss depends on a parameter that is sharded over ranks with other samples, and not
            through the outputs.
    """
    sharded: dict[str, bool] = {}  # {name: whether expert parallelism shards it}
    seen = {t.grad_fn for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)}
    nodes = [t.grad_fn for t in tree_leaves(loss) if isinstance(t, torch.Tensor)]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None:
            placement = placement_of(leaf)
            if any(axis.partition(".")[0] in _DATA_AXES for axis in placement.axes):
                sharded[placement.name] = "ep" in placement.axes
    if sharded:
        used = " and ".join(sorted(sharded)[:2])
        who, instead = "ZeRO 3", "zero_stage 0, 1 or 2"
        if any(sharded.values()):
            who, instead = "expert parallelism", "ep_size=1"
        raise ValueError(
            f"the criterion uses {used}, of which {who} leaves a rank a shard, so that the gradient of this "
            f"term would count by the rank's share of the batch: use {instead}, or, for a norm of weights, "
            "the optimizer's weight_decay"
        )
