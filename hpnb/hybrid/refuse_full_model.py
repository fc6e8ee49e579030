"""What a boosted model refuses of the model inside: methods of transformers that would write, or run, this
rank's part as if it were the model, what DistributedDataParallel asks of a module before it wraps it, and a
forward that not all ranks would call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.sharding_options import sharding_options
from hpnb.pipeline_parallel.stages import Stages

_stages_of_criterion: ContextVar[int] = ContextVar("_stages_of_criterion", default=1)

REDUCED_ALREADY = (
    "the gradients of this module are reduced by a Booster already, and DistributedDataParallel would "
    "divide them by the ranks again; use what booster.boost returned as it is, without accelerate.prepare"
)


def refuse_of_full_model(name: str, kind: type[nn.Module], plugin: HybridParallelPlugin, module: Any) -> None:
    """Raise if the attribute `name` of a boosted `kind`, of which this rank has `module`, is one of these."""
    if name == "_ddp_params_and_buffers_to_ignore":
        raise ValueError(REDUCED_ALREADY)
    options = sharding_options(plugin)
    if name in ("save_pretrained", "push_to_hub") and options and hasattr(kind, name):
        raise AttributeError(
            f"{name} would write only this rank's part of the {kind.__name__}, because its weights are "
            f"sharded ({', '.join(options)}); all ranks call booster.save_model(model, folder), which "
            "from_pretrained reads"
        ) from None
    if name == "generate" and plugin.pp_size > 1 and hasattr(kind, name):
        raise AttributeError(
            f"generate needs all layers of the {kind.__name__}, and with pp_size={plugin.pp_size} this "
            f"rank has stages {module.numbers} alone; use pp_size=1, or save with "
            "booster.save_model(model, folder) and generate on one process with from_pretrained(folder)"
        ) from None
    splits_in_two = plugin.cp_size > 1 and plugin.context_parallel != "ulysses"
    if name == "generate" and splits_in_two and hasattr(kind, name):
        raise AttributeError(
            f"generate runs the {kind.__name__} on sequences of any length, and context_parallel="
            f"{plugin.context_parallel!r} splits multiples of {2 * plugin.cp_size} tokens alone: use "
            "context_parallel='ulysses', or save with booster.save_model(model, folder) and generate on one "
            "process with from_pretrained(folder)"
        ) from None


@contextmanager
def criterion_of_stages(stages: int) -> Iterator[None]:
    """Within it a pipeline of so many stages runs, and calls its criterion on the last one alone."""
    before = _stages_of_criterion.set(stages)
    try:
        yield
    finally:
        _stages_of_criterion.reset(before)


def refuse_forward(module: nn.Module) -> None:
    """Raise if a boosted model, of which this rank has `module`, may not be called here and now."""
    if (stages := _stages_of_criterion.get()) > 1:
        raise RuntimeError(
            f"a pipeline of {stages} stages calls its criterion on the ranks of the last stage alone, and a "
            "boosted model has to be called on all ranks: in the criterion, call the other model as it was "
            "before boost (frozen, on hpnb.device()); or train both with pp_size=1"
        )
    if isinstance(module, Stages):
        raise RuntimeError(
            f"this rank has stages {module.numbers} of the model alone; call "
            "booster.execute_pipeline(data_iter, model, criterion, optimizer)"
        )
    # One that wraps a model with this one in it has not asked.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(REDUCED_ALREADY)
