"""Which options of a plugin leave this rank a part of the model. What needs the full model asks here, so that
no check forgets an axis."""

from __future__ import annotations

from hpnb.hybrid.plugins import HybridParallelPlugin


def sharding_options(plugin: HybridParallelPlugin, stages: bool = True, flattened: bool = True) -> list[str]:
    """Options such as "tp_size=2" with which this rank has shards of tensors, or of a few stages alone.

    Args:
        stages: count the pipeline, whose stages have full tensors.
        flattened: count ZeRO 3 also on one rank, where a shard has all elements, in one dimension.
    """
    is_sharded = plugin.dp_size * plugin.cp_size > plugin.zero_replicas
    zero = ["zero_stage=3"] if plugin.zero_stage == 3 and (flattened or is_sharded) else []
    sizes = {"tp_size": plugin.tp_size, "pp_size": plugin.pp_size if stages else 1, "ep_size": plugin.ep_size}
    return zero + [f"{option}={size}" for option, size in sizes.items() if size > 1]
