"""What ZeRO can deal out, and in which order; what it refuses, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from hpnb.data_parallel.buckets import Bucket, assign_buckets
from hpnb.data_parallel.ddp import DataParallel
from hpnb.data_parallel.reducer import Reducer
from hpnb.gradients import reduced_by
from hpnb.mesh import Axis
from hpnb.placement import placement_of

Group = Mapping[str, Any]

# Of these, what happens to an element depends on that element alone.
ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax,
               optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop)  # fmt: skip


def treats_elements_alike(optimizer_class: type[Optimizer]) -> bool:
    """Whether the class says so, or steps as one of `ELEMENTWISE` does."""
    said = getattr(optimizer_class, "elementwise", None)
    if said is not None:
        return bool(said)
    return inspect.unwrap(optimizer_class.step) in {inspect.unwrap(known.step) for known in ELEMENTWISE}


def assign_buckets_in_backward_order(groups: Sequence[Group], bucket_mb: float) -> list[Bucket]:
    """The groups' trained parameters in buckets, in the order in which these will be full.

    That is a guess: a group may be spread over the model, as all biases are, and is then complete when the
    backward is. So the k-th of n parameters is expected after k/n of it, and among equals the last group's.
    """
    turns: list[tuple[float, Bucket]] = []
    for group in reversed(groups):
        trained = [p for p in group["params"] if p.requires_grad]
        seen = 0
        for bucket in assign_buckets(reversed(trained), bucket_mb):
            seen += len(bucket.parameters)
            turns.append((seen / len(trained), bucket))
    return [bucket for _, bucket in sorted(turns, key=lambda turn: turn[0])]  # which keeps equals in order


def names_of_parameters(groups: Iterable[Group]) -> dict[nn.Parameter, str]:
    """{trained parameter: what to call it}."""
    found: dict[nn.Parameter, str] = {}
    count = 0
    for group in groups:
        numbers = range(count, count + len(group["params"]))
        names = group.get("param_names") or [f"parameter {i}" for i in numbers]
        found.update({p: n for p, n in zip(group["params"], names, strict=True) if p.requires_grad})
        count += len(numbers)
    return found


# --- what is refused -----------------------------------------------------------------------------------


def check_class(stage: int, optimizer_class: type[Optimizer]) -> None:
    """Refuse other stages, and optimizers that cannot work on pieces."""
    if stage not in (1, 2):
        raise ValueError(
            f"stage={stage!r} is not a stage of ZeroOptimizer, which are 1 and 2; stage 3 is "
            "hpnb.fully_shard, and stage 0 hpnb.DataParallel with a plain optimizer"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ValueError(
            f"optimizer_class={optimizer_class!r} must be a class like torch.optim.AdamW: ZeroOptimizer "
            "makes the optimizer itself, over this rank's pieces"
        )
    if issubclass(optimizer_class, optim.LBFGS | optim.SparseAdam):
        needs = "evaluates the loss in its step" if issubclass(optimizer_class, optim.LBFGS) else "is sparse"
        raise ValueError(f"{optimizer_class.__name__} {needs}, which ZeRO cannot deal out; AdamW would work")


def check_parameters(names: Mapping[nn.Parameter, str], axis: Axis) -> None:
    """Refuse parameters that are not there, or not replicated along `axis`."""
    if not names:
        raise ValueError("none of the parameters requires a gradient: there is nothing to step")
    for p, name in names.items():
        if p.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} is on the meta device; give it memory (to_empty) and "
                "values before ZeRO deals it out"
            )
        if axis.name in placement_of(p).axes:
            raise ValueError(
                f"{name} of shape {tuple(p.shape)} is cut along {axis.name} already; ZeRO deals out what is "
                "replicated along its axis"
            )


def replica_around(names: Mapping[nn.Parameter, str], axis: Axis, leave: bool) -> DataParallel | None:
    """The DataParallel around these parameters, if there is one.

    Args:
        leave: the reduction stays with it; otherwise it must train these parameters and no others.
    """
    owners = {id(who): who for who in map(reduced_by, names)}
    replica, *others = owners.values()
    if replica is None and not others:
        return None
    if others or not isinstance(replica, DataParallel):
        told = ", ".join("nobody" if who is None else type(who).__name__ for who in owners.values())
        raise ValueError(
            f"the gradients of these parameters are reduced by {told} already; a ZeroOptimizer needs "
            "parameters that nobody reduces, or that one DataParallel does"
        )
    if replica.axis.ranks != axis.ranks:
        raise ValueError(
            f"DataParallel reduces along {replica.axis.name} over ranks {replica.axis.ranks}, and ZeRO would "
            f"along {axis.name} over {axis.ranks}; give both the same axis"
        )
    if leave and (isinstance(replica.sink, Reducer) or getattr(replica.sink, "below", None) is not None):
        return replica
    theirs = {p for p in replica.module.parameters() if p.requires_grad}
    if leave or theirs != set(names) or not isinstance(replica.sink, Reducer):
        raise ValueError(
            f"a DataParallel trains {len(theirs)} parameters, and this ZeroOptimizer would take over the "
            f"reduction of {len(names)}; it needs all of them, from a DataParallel that has no other"
        )
    return replica
