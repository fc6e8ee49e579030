"""What ZeRO 1 and 2 can shard, and what they refuse, with the reason."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from hpnb.data_parallel.ddp import DataParallel
from hpnb.data_parallel.reducer import Reducer
from hpnb.data_parallel.split_reducer import SplitReducer
from hpnb.gradients import hook_owner_of
from hpnb.mesh import Axis
from hpnb.placement import placement_of

Group = Mapping[str, Any]

# The update of an element depends on that element alone.
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax,
               optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop)  # fmt: skip


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Whether the class says so, or steps as one of `ELEMENTWISE` does."""
    declared = getattr(optimizer_class, "elementwise", None)
    if declared is not None:
        return bool(declared)
    return inspect.unwrap(optimizer_class.step) in {inspect.unwrap(known.step) for known in ELEMENTWISE}


def trained_parameter_names(groups: Iterable[Group]) -> dict[nn.Parameter, str]:
    """{trained parameter: its name in its group or its model (`hpnb.placement`), or its number}."""
    trained: dict[nn.Parameter, str] = {}
    count = 0
    for group in groups:
        numbered = enumerate(group["params"], count)
        names = group.get("param_names") or [placement_of(p, f"parameter {i}").name for i, p in numbered]
        trained.update({p: n for p, n in zip(group["params"], names, strict=True) if p.requires_grad})
        count += len(group["params"])
    return trained


def check_class(stage: int, optimizer_class: type[Optimizer]) -> None:
    """Refuse other ZeRO stages, and optimizers that cannot work on shards."""
    if stage not in (1, 2):
        raise ValueError(
            f"stage={stage!r} is not a stage of ZeroOptimizer, which are 1 and 2; stage 3 is "
            "hpnb.fully_shard, and stage 0 hpnb.DataParallel with a plain optimizer"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(
            f"optimizer_class={optimizer_class!r} must be a class like torch.optim.AdamW: ZeroOptimizer "
            "makes the optimizer itself, over this rank's shards"
        )
    if issubclass(optimizer_class, optim.LBFGS | optim.SparseAdam):
        needs = "evaluates the loss in its step" if issubclass(optimizer_class, optim.LBFGS) else "is sparse"
        raise ValueError(f"{optimizer_class.__name__} {needs}, which ZeRO cannot shard; AdamW would work")


def check_parameters(names: Mapping[nn.Parameter, str], axis: Axis) -> None:
    """Refuse parameters that are not there, or not replicated along `axis`."""
    if not names:
        raise ValueError("none of the parameters requires a gradient: there is nothing to step")
    for p, name in names.items():
        if p.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} is on the meta device; give it memory (to_empty) and "
                "values before ZeRO shards it"
            )
        if axis.name in placement_of(p).axes:
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} is sharded along {axis.name} already; ZeRO shards what is "
                "replicated along its axis"
            )


def find_ddp(
    names: Mapping[nn.Parameter, str], axis: Axis, average: bool, ddp_reduces: bool
) -> DataParallel | None:
    """The DataParallel around these parameters, if there is one.

    Args:
        average: what the ZeroOptimizer is to do with sums; DataParallel must do the same.
        ddp_reduces: a DataParallel goes on to reduce. Otherwise it must train exactly these parameters.
    """
    owners = {id(owner): owner for owner in map(hook_owner_of, names)}
    ddp, *others = owners.values()
    if ddp is None and not others:
        return None
    if others or not isinstance(ddp, DataParallel):
        kinds = ", ".join("nobody" if o is None else type(o).__name__ for o in owners.values())
        raise ValueError(
            f"the gradients of these parameters are reduced by {kinds} already; a ZeroOptimizer needs "
            "parameters that nobody reduces, or that one DataParallel does"
        )
    if ddp.axis.ranks != axis.ranks:
        raise ValueError(
            f"DataParallel reduces along {ddp.axis.name} over ranks {ddp.axis.ranks}, and ZeRO would "
            f"along {axis.name} over {axis.ranks}; give both the same axis"
        )
    if ddp.sink.average != average:
        raise ValueError(
            f"average={average} here, and average={ddp.sink.average} in the DataParallel of the same "
            "parameters; give both the same"
        )
    if isinstance(ddp.sink, SplitReducer):
        raise ValueError(
            f"a DataParallel reduces these {len(names)} parameters, and the experts among them along another "
            "axis, which a ZeroOptimizer cannot take over: make the ZeroOptimizer before the DataParallel, "
            "with expert_axis=mesh.edp and average=False, or leave the DataParallel out"
        )
    keeps_reducing = getattr(ddp.sink, "reducing_sink", None) is not None
    if ddp_reduces and (isinstance(ddp.sink, Reducer) or keeps_reducing):
        return ddp
    trained = {p for p in ddp.module.parameters() if p.requires_grad}
    if ddp_reduces or trained != set(names) or not isinstance(ddp.sink, Reducer):
        raise ValueError(
            f"a DataParallel trains {len(trained)} parameters, and this ZeroOptimizer would take over the "
            f"reduction of {len(names)}; it needs all of them, and no other ZeroOptimizer on the DataParallel"
        )
    return ddp
