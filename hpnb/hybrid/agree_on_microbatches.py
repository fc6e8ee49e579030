"""How many microbatches all replicas run, where one of them sends something to the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpnb.hybrid.plugins import HybridParallelPlugin


def agree_on_microbatches(
    plugin: HybridParallelPlugin, config: Any, microbatches: int, device: torch.device
) -> int:
    """The same number on all replicas where a microbatch sends something: parameters in ZeRO 3, tokens to
    experts, or what a loss over the routers of all ranks needs, as the model's `config` says."""
    axis = plugin.mesh.dp_cp
    sums_routers = getattr(config, "output_router_logits", False)
    alone = axis.size == 1 or (plugin.zero_stage < 3 and plugin.ep_size == 1 and not sums_routers)
    if alone or plugin.num_microbatches is not None:
        return microbatches
    most = torch.tensor(microbatches, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=axis.group)
    return int(most)
