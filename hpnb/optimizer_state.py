"""Optimizer state that depends on no layout: gathered to be saved, split to be loaded.

    {"state": {number: {"exp_avg": tensor, "step": tensor}},
     "param_groups": [...], "masters": {number: tensor}}

This is the state dict of one process that has the whole model; `number` counts the parameters of all groups.

    exp_avg      has the shape of its parameter, so it is sharded as its parameter's placement says
    step         is a counter: every rank that holds a shard has the same one, and the first rank's is saved
    master       the float32 copy of a 16-bit parameter travels with the state of that parameter

ZeroOptimizer gathers and splits along dp, a boosted optimizer along the other axes of its mesh as well. So a
state moves from any layout to any other, and to or from a plain optimizer of PyTorch. `hybrid/checkpoint`
writes the same state to files shard by shard, without gathering it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.placement import FLAT, Placement, gather_full
from hpnb.ranks.current_rank import device as this_device

State = dict[str, Any]  # of one parameter, or a whole state dict
MASTER = "hpnb.master"  # the key of a master among the states of its parameter


def is_sharded_state(key: str, shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Whether the state under `key` has an element for each of its parameter's, and is sharded with it.

    The step of a parameter without dims has its shape too, and is a counter all the same.
    """
    return tuple(shape) == tuple(parameter_shape) and (bool(shape) or key != "step")


def group_options(group: Mapping[str, Any], but: Sequence[str] = ()) -> State:
    """The options of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", *but)}


# Options that choose an implementation of the same update.
_NOT_COMPARED = ("foreach", "fused", "capturable", "differentiable")


def group_numbers(groups: Sequence[Mapping[str, Any]]) -> State:
    """{"param_groups[0]['lr']": 0.1, ...}: the numbers in the options of groups, to 12 digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.tolist() if value.numel() == 1 and not value.is_meta else None
        if isinstance(value, list | tuple):
            return tuple(rounded(item) for item in value)
        return float(f"{value:.12g}") if isinstance(value, float) else value

    return {
        f"param_groups[{i}][{name!r}]": rounded(value)
        for i, group in enumerate(groups)
        for name, value in group_options(group, _NOT_COMPARED).items()
        if isinstance(value, int | float | list | tuple | torch.Tensor)
    }


def check_group_sizes(saved: Sequence[int], wanted: Sequence[int]) -> None:
    """Compare the numbers of parameters per group."""
    if list(saved) != list(wanted):
        raise ValueError(
            f"the state to be loaded has groups of {list(saved)} parameters, and this optimizer of "
            f"{list(wanted)}; it needs the state of the same parameters in the same groups"
        )


# --- gather ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sharded:
    """Describes a tensor that is sharded as its parameter is, while ranks exchange what they hold."""

    dtype: torch.dtype


def local_states(state_dict: Mapping[str, Any], numbers: Sequence[int]) -> dict[int, State]:
    """{number: state, with its master} of an optimizer whose i-th parameter has the number `numbers[i]`."""
    masters = state_dict.get("masters", {})
    states: dict[int, State] = {}
    for i, number in enumerate(numbers):
        state = dict(state_dict["state"].get(i, {}))
        if i in masters:
            state[MASTER] = masters[i]
        states[number] = state
    return states


def gather_states(
    states: Mapping[int, State], placements: Mapping[int, Placement], axes: Sequence[Axis]
) -> dict[int, State]:
    """Gather the states of parameters along `axes`; tensors are copied to the CPU. All ranks of the axes call
    it, and all get everything.

    Args:
        states: {number: state}, with shards of tensors. A rank that holds no element of a parameter leaves
            it out.
        placements: {number: placement} of every parameter, equal numbers on all ranks of the axes. Cuts along
            other axes are not undone, so leave them out.
    """
    described: dict[int, State] = {}
    for number, state in states.items():
        shard_shape = placements[number].local_shape
        described[number] = {key: _describe(key, value, shard_shape) for key, value in state.items()}
    peers: dict[str, list[dict[int, Placement]]] = {}
    for axis in axes:
        messages: list[Any] = [None] * axis.size
        dist.all_gather_object(messages, (dict(placements), described), axis.group)
        peers[axis.name] = [theirs for theirs, _ in messages]
        described = _first_of([theirs for _, theirs in messages])
    by_name = {axis.name: axis for axis in axes}
    gathered: dict[int, State] = {}
    for number, where in placements.items():  # in one order on all ranks, because each tensor is a message
        state = gathered[number] = described.get(number, {})
        around = {name: [theirs[number] for theirs in peers[name]] for name in where.axes}
        for key, value in state.items():
            if isinstance(value, _Sharded):
                shard = states.get(number, {}).get(key)
                if shard is None:  # this rank holds no element
                    shard = torch.zeros(where.local_shape, dtype=value.dtype, device=this_device())
                full = gather_full(shard.detach(), where, around, by_name)
                state[key] = full.to("cpu", copy=True)
    return {number: state for number, state in sorted(gathered.items()) if state}


def merge_stages(states: Mapping[int, State], axis: Axis) -> dict[int, State]:
    """The states of all pipeline stages; of a tied parameter the first one's. All ranks of `axis` call it."""
    messages: list[dict[int, State]] = [dict(states)]
    if axis.size > 1:
        messages = [{} for _ in range(axis.size)]
        dist.all_gather_object(messages, dict(states), axis.group)
    return dict(sorted(_first_of(messages).items()))


def build_state_dict(
    states: Mapping[int, State], param_groups: Sequence[Mapping[str, Any]], with_masters: bool
) -> State:
    """The state dict of one process.

    Args:
        param_groups: the options of each group, with the numbers of its parameters.
        with_masters: whether there is an entry for masters, as `hpnb.precision.Masters` has it.
    """
    masters = {number: state[MASTER] for number, state in states.items() if MASTER in state}
    plain = {number: {k: v for k, v in state.items() if k != MASTER} for number, state in states.items()}
    made: State = {"state": {n: s for n, s in plain.items() if s}, "param_groups": list(param_groups)}
    return {**made, "masters": masters} if with_masters else made


def _describe(key: str, value: Any, shard_shape: Sequence[int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_sharded_state(key, value.shape, shard_shape):
        return _Sharded(value.dtype)
    return value.detach().to("cpu", copy=True)


def _first_of(messages: Sequence[Mapping[int, State]]) -> dict[int, State]:
    """What the ranks sent, by number; of several states of one parameter the first rank's."""
    merged: dict[int, State] = {}
    for states in messages:
        for number, state in states.items():
            if state:
                merged.setdefault(number, dict(state))
    return merged


# --- split -------------------------------------------------------------------------------------------------


def split_state_dict(
    state_dict: Mapping[str, Any], numbering: Sequence[Sequence[int]], placements: Mapping[int, Placement]
) -> State:
    """This rank's part of a state dict of one process, for an optimizer over this rank's shards. Nothing is
    sent, and the part shares no memory with `state_dict`.

    Args:
        numbering: the numbers of the parameters of each group.
        placements: {number: placement} of the parameters of which this rank has a shard, group by group.
    """
    saved_groups = state_dict["param_groups"]
    check_group_sizes([len(group["params"]) for group in saved_groups], [len(n) for n in numbering])
    flat = (number for numbers in numbering for number in numbers)
    saved_numbers = dict(zip(flat, (n for group in saved_groups for n in group["params"]), strict=True))
    states, masters = dict[int, State](), dict[int, Any]()
    for i, (number, where) in enumerate(placements.items()):
        saved = saved_numbers[number]
        if saved in state_dict["state"]:
            state = state_dict["state"][saved]
            states[i] = {key: _take_shard(key, value, where) for key, value in state.items()}
        if saved in state_dict.get("masters", {}):
            masters[i] = _take_shard(MASTER, state_dict["masters"][saved], where)
    groups, count = list[State](), 0
    for group, numbers in zip(saved_groups, numbering, strict=True):
        size = sum(number in placements for number in numbers)
        groups.append({**group_options(group), "params": list(range(count, count + size))})
        count += size
    return {"state": states, "param_groups": groups, "masters": masters}


def _take_shard(key: str, value: Any, where: Placement) -> Any:
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if is_sharded_state(key, value.shape, where.shape):
        return where.take(value.detach()).clone()
    if value.dim() and (where.local_shape != where.shape or any(cut.dim == FLAT for cut in where.cuts)):
        raise ValueError(
            f"{key!r} of shape {tuple(value.shape)} cannot be split as its parameter of shape {where.shape} "
            "is: it is the state of another model, or of an optimizer that needs elementwise=False"
        )
    return value.detach().clone()
