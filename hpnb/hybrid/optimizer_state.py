"""The state of an optimizer as if it had run on one process: put together to be saved, cut to be loaded.

    tensors as large as their parameter     are cut as the parameter is, along dp (ZeRO) and tp
    a counter                               is the same wherever there is a part
    parameters of other stages              come from the ranks along pp that have them

so a state goes from any layout to any other, or to a plain optimizer of PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.placement import Placement, gather_full, placement_of

if TYPE_CHECKING:
    from hpnb.hybrid.boosted_optimizer import Stepper

State = dict[str, Any]
MASTER = "hpnb.master"  # a master travels with the state of its parameter, and is saved beside it
_PIPELINE = "pp"  # along which ranks hold other parameters, not parts of the same


def whole(stepper: Stepper) -> State:
    """What one process would save: {"state", "param_groups"}, and "masters" where weights are 16 bits.

    Every rank calls it and gets all of it, with tensors on the CPU.
    """
    inner, local = stepper.inner, stepper.inner.state_dict()
    places = {number: _place(stepper, number) for number in stepper.held}
    axes = {axis.name: axis for axis in stepper.axes if axis.name != _PIPELINE}
    peers = _peers(places, axes)
    found: dict[int, State] = {}
    for i, (number, p) in enumerate(stepper.held.items()):
        state = dict(local["state"].get(i, {}))
        if i in local.get("masters", {}):
            state[MASTER] = local["masters"][i]
        where = places[number]
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if where.cuts and _as_large(key, value, p):
                    others = {name: [theirs[number] for theirs in peers[name]] for name in where.axes}
                    value = gather_full(value.to(p.device), where, others, axes)
                state[key] = value.detach().to("cpu", copy=True)
        if state:
            found[number] = state
    everything = _over_stages(found, stepper)
    masters = {n: state.pop(MASTER) for n, state in everything.items() if MASTER in state}
    groups = [
        {**_options(group), "params": numbers}
        for group, numbers in zip(inner.param_groups, stepper.numbering, strict=True)
    ]
    made: State = {"state": {n: s for n, s in sorted(everything.items()) if s}, "param_groups": groups}
    return {**made, "masters": dict(sorted(masters.items()))} if "masters" in local else made


def part(stepper: Stepper, given: Mapping[str, Any]) -> State:
    """Of a whole state what this rank's inner optimizer loads; nothing is sent.

    Raises:
        ValueError: it is the state of other parameters, or of other groups of them.
    """
    saved = [len(group["params"]) for group in given["param_groups"]]
    wanted = [len(numbers) for numbers in stepper.numbering]
    if saved != wanted:
        raise ValueError(
            f"the state to be loaded has groups of {saved} parameters, and this optimizer of {wanted}; it "
            "needs the state of the same parameters in the same groups"
        )
    theirs = [n for group in given["param_groups"] for n in group["params"]]  # their numbers, in our order
    state: dict[int, State] = {}
    masters: dict[int, torch.Tensor] = {}
    for i, number in enumerate(stepper.held):
        where, told = _place(stepper, number), given["state"].get(theirs[number])
        if told is not None:
            state[i] = {key: _taken(key, value, where) for key, value in told.items()}
        if theirs[number] in given.get("masters", {}):
            masters[i] = _taken(MASTER, given["masters"][theirs[number]], where)
    groups, count = [], 0
    for group, numbers in zip(given["param_groups"], stepper.numbering, strict=True):
        size = sum(number in stepper.held for number in numbers)
        groups.append({**_options(group), "params": list(range(count, count + size))})
        count += size
    return {"state": state, "param_groups": groups, "masters": masters}


def _place(stepper: Stepper, number: int) -> Placement:
    """Where a parameter's state lies. A ZeroOptimizer puts its own cuts along dp together by itself."""
    where = placement_of(stepper.held[number])
    return replace(where, cuts=tuple(cut for cut in where.cuts if cut.axis != _PIPELINE))


def _peers(
    places: Mapping[int, Placement], axes: Mapping[str, Axis]
) -> dict[str, list[dict[int, Placement]]]:
    found: dict[str, list[dict[int, Placement]]] = {}
    for axis in axes.values():
        found[axis.name] = [{} for _ in range(axis.size)]
        dist.all_gather_object(found[axis.name], dict(places), axis.group)
    return found


def _over_stages(mine: dict[int, State], stepper: Stepper) -> dict[int, State]:
    """What all stages have; of a tied parameter what the first has."""
    (pipeline,) = (axis for axis in stepper.axes if axis.name == _PIPELINE)
    everyone: list[dict[int, State]] = [mine]
    if pipeline.size > 1:
        everyone = [{} for _ in range(pipeline.size)]
        dist.all_gather_object(everyone, mine, pipeline.group)
    found: dict[int, State] = {}
    for theirs in everyone:
        for number, state in theirs.items():
            found.setdefault(number, state)
    return found


def _taken(key: str, value: Any, where: Placement) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if tuple(value.shape) == where.shape and (value.dim() or key != "step"):
        return where.take(value.detach()).clone()
    return value.detach().clone()


def _as_large(key: str, value: torch.Tensor, p: torch.Tensor) -> bool:
    return value.shape == p.shape and (value.dim() > 0 or key != "step")


def _options(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
