"""Which of DataParallel, ZeroOptimizer and fully_shard reduces the gradients, and which optimizer steps.

    zero_stage 0      DataParallel reduces, an optimizer of the user's class steps
    zero_stage 1, 2   ZeroOptimizer reduces and steps; without a pipeline a DataParallel says when
    zero_stage 3      fully_shard reduces, an optimizer of the user's class steps

With a pipeline the executor tells the reducer about each finished gradient. Without one, hooks do. Gradients
are summed, because losses are divided by the number of targets on all ranks already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpnb import data_parallel
from hpnb.data_parallel import DataParallel
from hpnb.data_parallel.fsdp_units import modules_with_forward
from hpnb.hybrid.boosted_optimizer import make_zero_optimizer, twin
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.training.hybrid_adam import HybridAdam
from hpnb.pipeline_parallel import Pipeline
from hpnb.precision import Masters
from hpnb.ranks.current_rank import device as this_device


def apply_data_parallel(
    module: nn.Module, plugin: HybridParallelPlugin, pipe: Pipeline | None, optimizer: Optimizer | None
) -> tuple[DataParallel | None, Optimizer | None]:
    """Shard or replicate `module` over dp, and connect the pipeline, if there is one, to its reducer. Returns
    the DataParallel whose hooks reduce after a plain backward, or None; and the optimizer that steps."""
    axis, stage = plugin.mesh.dp_cp, plugin.zero_stage
    if stage == 3:
        replicas, shards = plugin.zero_axes
        units = None
        if pipe is not None:
            units = [inner for block in pipe.module.units for inner in modules_with_forward(block)]
        data_parallel.fully_shard(
            module,
            shards,
            replicas=replicas,
            expert_axes=plugin.expert_zero_axes,
            units=units,
            communication_dtype=plugin.communication_dtype,
            prefetch=int(plugin.overlap_communication),
            average=False,
            find_unused_parameters=plugin.find_unused_parameters,
            cpu_offload=plugin.cpu_offload,
        )
        if pipe is not None:
            pipe.gradients = data_parallel.sink(module)
        return None, _twin_with_masters(plugin, optimizer)
    trained = any(p.requires_grad for p in module.parameters())
    zero: Optimizer | None = None
    if optimizer is not None and stage and trained:
        zero = make_zero_optimizer(
            optimizer,
            axis,
            stage,
            bucket_mb=plugin.zero_bucket_size_in_m * 1e6 * plugin.policy.weights.itemsize / 2**20,
            average=False,
            cpu_offload=plugin.cpu_offload,
            communication_dtype=plugin.communication_dtype,
            overlap_communication=plugin.overlap_communication,
            find_unused_parameters=plugin.find_unused_parameters,
            expert_axis=plugin.mesh.edp,
        )
    replica: DataParallel | None = None
    if trained and (axis.size > 1 or zero is not None) and (pipe is None or zero is None):
        replica = DataParallel(
            module,
            axis,
            plugin.ddp_bucket_cap_mb,
            broadcast_buffers=False,  # the Boosted model does it, for a pipeline too
            find_unused_parameters=plugin.find_unused_parameters,
            check_reduction=plugin.check_reduction,
            gradient_as_bucket_view=plugin.gradient_as_bucket_view,
            static_graph=plugin.static_graph,
            overlap_communication=plugin.overlap_communication,
            copy_engines=plugin.ddp_copy_engines,
            average=False,
            expert_axis=plugin.mesh.edp,
        )
    if pipe is not None:
        pipe.gradients = zero if zero is not None else replica  # type: ignore[assignment]
        replica = None
    return replica, _twin_with_masters(plugin, optimizer) if zero is None else zero


def _twin_with_masters(plugin: HybridParallelPlugin, optimizer: Optimizer | None) -> Optimizer | None:
    if optimizer is None:
        return None
    inner = twin(optimizer)
    if plugin.policy.masters:
        Masters(inner)
    return inner


def use_fused_adam(optimizer: Optimizer) -> None:
    """One kernel for Adam, on GPUs, unless the user has chosen an implementation, also by fused=False."""
    if this_device().type != "cuda" or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        chosen = any(group.get(option) is not None for option in ("fused", "foreach"))
        if not chosen and not group.get("capturable") and not group.get("differentiable"):
            group["fused"] = True


def flatten_masters(plugin: HybridParallelPlugin, inner: Optimizer, backend: Any) -> None:
    """Step Adam in one pass over memory, where weights have masters."""
    masters = Masters.attached_to(inner)
    asked = plugin.enable_all_optimization or plugin.enable_jit_fused
    if masters is None or not asked or plugin.cpu_offload:  # a CPU has PyTorch's fused kernel
        return
    kinds = (torch.optim.Adam, torch.optim.AdamW, HybridAdam)
    # ZeRO's shards stay where they are gathered from.
    masters.flatten(kinds, backend=backend, move_weights=plugin.zero_stage == 0)
