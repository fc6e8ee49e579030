"""What a boosted model refuses of the model inside: methods of transformers that would write, or run, this
rank's part as if it were the model, and what DistributedDataParallel asks of a module before it wraps it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hpnb.hybrid.plugins import HybridParallelPlugin

REDUCED_ALREADY = (
    "the gradients of this module are reduced by a Booster already, and DistributedDataParallel would "
    "divide them by the ranks again; use what booster.boost returned as it is, without accelerate.prepare"
)


def refuse_of_full_model(name: str, kind: type[nn.Module], plugin: HybridParallelPlugin, module: Any) -> None:
    """Raise if the attribute `name` of a boosted `kind`, of which this rank has `module`, is one of these."""
    if name == "_ddp_params_and_buffers_to_ignore":
        raise ValueError(REDUCED_ALREADY)
    sizes = {"tp_size": plugin.tp_size, "pp_size": plugin.pp_size}
    parts = [f"{option}={size}" for option, size in sizes.items() if size > 1]
    if plugin.zero_stage == 3 and plugin.dp_size > 1:
        parts.append(f"zero_stage=3 on {plugin.dp_size} ranks")
    if name in ("save_pretrained", "push_to_hub") and parts and hasattr(kind, name):
        raise AttributeError(
            f"{name} would write only this rank's part of the {kind.__name__}, because its weights are "
            f"sharded ({', '.join(parts)}); all ranks call booster.save_model(model, folder), which "
            "from_pretrained reads"
        ) from None
    if name == "generate" and plugin.pp_size > 1 and hasattr(kind, name):
        raise AttributeError(
            f"generate needs all layers of the {kind.__name__}, and with pp_size={plugin.pp_size} this "
            f"rank has stages {module.numbers} alone; use pp_size=1, or save with "
            "booster.save_model(model, folder) and generate on one process with from_pretrained(folder)"
        ) from None
