"""The state of an optimizer in a checkpoint: written shard by shard, and read back into any layout.

    exp_avg/vit.layers.0.mlp.fc1.weight    tensors as large as their parameter, under the parameter's name
    value/.../vit.layers.0.mlp.fc1.weight  other values
    optimizer/counters/0 ...               counters, those that a rank writes in one entry
    optimizer, names/0 ...                 the options of each group and the loss scaler; who is in a group

A tensor as large as its parameter is sharded as the parameter is now, whatever the layout was when it was
saved (`hpnb.optimizer_state` has the rule). A tied weight stands under its first name. Masters are the
weights in the model's own files, so they are not here, unless an optimizer is saved alone (`master/...`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb.data_parallel import ZeroOptimizer
from hpnb.hybrid.boosted_optimizer import BoostedOptimizer, boosted_optimizer
from hpnb.hybrid.checkpoint.agreement import attempt
from hpnb.hybrid.checkpoint.gather_weights import offers_shard
from hpnb.hybrid.checkpoint.state_files import ShardedState, StateReader, pack
from hpnb.mesh import Axis
from hpnb.optimizer_state import check_group_sizes, group_options, is_sharded_state
from hpnb.placement import Placement, placement_of
from hpnb.precision import LossScaler, Masters
from hpnb.ranks.current_rank import rank

GROUPS, NAMES, MASTER, VALUE = "optimizer", "names/", "master", "value/"
COUNTERS = "optimizer/counters/"  # a file has a cost for each entry, so all counters of a rank are one
_UPDATE_RULE = ("decoupled_weight_decay", "amsgrad", "bias_correction", "nesterov", "centered", "maximize")
_HOW_TO_COMPUTE = ("fused", "foreach", "capturable")  # options that the loading optimizer keeps


def _local_states(
    boosted: BoostedOptimizer,
) -> tuple[Optimizer, dict[str, tuple[torch.Tensor, Placement]]]:
    """The optimizer of PyTorch that has the states on this rank, and {name of a parameter: (the key of its
    state in it, its placement)}."""
    inner: Any = boosted.inner
    tensors = list[torch.Tensor](boosted.parameters.values())
    holder: Optimizer = inner
    if isinstance(inner, ZeroOptimizer):  # which has states of pieces, on some ranks none
        tensors = [inner.shards[p] for p in boosted.parameters.values() if p in inner.shards]
        holder = inner.optimizer
    return holder, {parameter_name(t): (t, placement_of(t).without("pp")) for t in tensors}


def parameter_name(p: torch.Tensor) -> str:
    """The name of a parameter in the full model; of a tied one its first name."""
    placement = placement_of(p)
    return placement.tied_to or placement.name


def update_rule(optimizer: Optimizer) -> str:
    """The optimizer of PyTorch whose state and update `optimizer` has: a subclass is what it comes from, and
    Adam, AdamW and HybridAdam are one, because an option tells them apart."""
    names = [c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")]
    name = names[0] if names and names[0] != "Optimizer" else type(optimizer).__name__
    return "Adam" if name == "AdamW" else name


# --- save --------------------------------------------------------------------------------------------------


def optimizer_shards(
    optimizer: Optimizer, copied: Callable[[torch.Tensor], torch.Tensor], with_masters: bool
) -> ShardedState:
    """What this rank writes of the optimizer's state, with `copied` applied to each tensor, and if asked for
    with the float32 masters of 16-bit weights."""
    boosted = boosted_optimizer(optimizer)
    (inner, by_name), saved = _local_states(boosted), ShardedState()
    counters: dict[str, torch.Tensor] = {}
    masters = Masters.attached_to(inner) if with_masters else None
    for name, (t, placement) in by_name.items():
        if placement.tied_to is not None or not offers_shard(placement, boosted.axes):
            continue
        state: dict[str, Any] = dict(inner.state.get(t, {}))
        if masters is not None and masters.of(t) is not t:
            state[MASTER] = masters.of(t)
        for key, value in state.items():
            label = f"{key}/{name}"
            if not isinstance(value, torch.Tensor):
                saved.values[VALUE + label] = pack(f"the state of {name}", value)
            elif is_sharded_state(key, value.shape, t.shape):
                saved.tensors[label] = placement, copied(value)
            elif not value.dim():
                if _writes_counters(placement, boosted.axes):
                    counters[label] = value
            else:
                saved.tensors[label] = Placement(label, tuple(value.shape)), copied(value)
    groups = [
        {"options": group_options(group), "numbers": numbers}
        for group, numbers in zip(boosted.inner.param_groups, boosted.numbering, strict=True)
    ]
    scaler = None if boosted.scaler is None else boosted.scaler.state_dict()
    user = boosted.user_optimizer
    about = {"kind": type(user).__name__, "rule": update_rule(user), "groups": groups, "scaler": scaler}
    saved.values[GROUPS] = pack("the optimizer", about)
    if counters:
        saved.values[f"{COUNTERS}{rank()}"] = pack("the optimizer", _to_cpu(counters))
    if _writes_names(boosted.axes):
        names = {n: (parameter_name(p), placement_of(p).shape) for n, p in boosted.parameters.items()}
        saved.values[f"{NAMES}{rank()}"] = pack("the optimizer", names)
    return saved


def _writes_names(axes: Sequence[Axis]) -> bool:
    """Whether this rank writes which parameters it has: of ranks with the same stages the first. Every rank
    reads all entries, so one a rank would be read ranks x ranks times."""
    return all(axis.rank == 0 for axis in axes if axis.name != "pp")


def _writes_counters(placement: Placement, axes: Sequence[Axis]) -> bool:
    """Whether this rank writes the counters of a tensor, which are equal on all ranks with a shard of it: of
    those along dp and cp the one whose shard begins the tensor, or the first if it is not sharded there."""
    data = ("edp",) if "ep" in placement.axes else ("dp", "dp_cp")
    for axis in axes:
        if axis.name.partition(".")[0] in data:
            cut = next((cut for cut in placement.cuts if cut.axis == axis.name), None)
            if cut is None or not prod(placement.shape):
                is_first = axis.rank == 0
            else:  # an empty shard has no elements to begin with
                is_first = cut.size > 0 and cut.ranges[0][0] == 0
            if not is_first:
                return False
    return True


def _to_cpu(counters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All counters in one transfer per dtype and device."""
    labels_by_kind: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for label, value in counters.items():
        labels_by_kind.setdefault((value.dtype, value.device), []).append(label)
    on_cpu: dict[str, torch.Tensor] = {}
    for labels in labels_by_kind.values():
        values = torch.stack([counters[label] for label in labels]).cpu().unbind()
        on_cpu |= zip(labels, values, strict=True)
    return on_cpu


# --- load --------------------------------------------------------------------------------------------------


def _readable(stored: StateReader, work: Callable[[], Any]) -> Any:
    """What `work` makes of values that were read, which somebody else may have written."""
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{stored.folder}: {error}") from error
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{stored.folder} has no readable state of an optimizer ({type(error).__name__}: {error}); load "
            "another checkpoint"
        ) from error


def _check_type(what: str, value: Any, kind: Any) -> Any:
    """`value`, if it is of `kind`; a TypeError otherwise."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} is a {type(value).__name__}")
    return value


class OptimizerLoader:
    """An optimizer's state that is read and fits it, until `apply` hands it over. All ranks make it."""

    def __init__(self, optimizer: Optimizer, stored: StateReader, group: dist.ProcessGroup) -> None:
        self._boosted = boosted_optimizer(optimizer)
        self._inner, self._by_name = _local_states(self._boosted)
        described = [label for label in stored.values if label == GROUPS or label.startswith(NAMES)]
        descriptions = stored.read({}, described, group)
        self._saved: Any = attempt(lambda: _readable(stored, lambda: self._check(descriptions)), group)
        self._state: dict[str, dict[str, Any]] = {name: {} for name in self._by_name}
        targets: dict[str, tuple[Placement, torch.Tensor]]
        targets = attempt(lambda: dict(self._targets(stored)), group)
        labels = [label for label in stored.values if label.startswith(VALUE) and self._is_local(label)]
        labels += [label for label in stored.values if label.startswith(COUNTERS)]
        values = stored.read(targets, labels, group)
        attempt(lambda: _readable(stored, lambda: self._take(values)), group)
        attempt(lambda: _readable(stored, self._try_to_load), group)

    def _take(self, values: dict[str, Any]) -> None:
        """Sort what was read by parameter."""
        for counters in [values.pop(label) for label in list(values) if label.startswith(COUNTERS)]:
            values |= {
                label: _check_type(label, value, torch.Tensor)
                for label, value in counters.items()
                if self._is_local(label)
            }
        for label, value in values.items():
            key, _, name = label.removeprefix(VALUE).partition("/")
            self._state[name][key] = value

    def _groups(self) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """The groups of a state dict, and {id of a parameter: its number in them}."""
        numbers = dict[int, int]()
        groups: list[dict[str, Any]] = []
        for saved, group in zip(self._saved["groups"], self._inner.param_groups, strict=True):
            first = len(numbers)
            numbers |= {id(p): first + i for i, p in enumerate(group["params"])}
            kept = {key: group[key] for key in _HOW_TO_COMPUTE if key in group}
            params = list(range(first, len(numbers)))
            groups.append({**group_options(saved["options"], _HOW_TO_COMPUTE), **kept, "params": params})
        return groups, numbers

    def _try_to_load(self) -> None:
        """Let a copy of the optimizer load the states of a few parameters, one for each set of keys: what it
        refuses is known before anything is changed."""
        inner = self._inner
        if type(inner).load_state_dict is not Optimizer.load_state_dict:
            return  # it may keep states elsewhere, which a copy would share
        groups, numbers = self._groups()
        by_keys = {
            frozenset(state): (numbers[id(self._by_name[name][0])], state)
            for name, state in self._state.items()
            if state
        }
        states = {n: {k: v for k, v in state.items() if k != MASTER} for n, state in by_keys.values()}
        copy(inner).load_state_dict({"state": states, "param_groups": groups})

    @torch.no_grad()
    def apply(self) -> None:
        """Hand the state over. The model has its weights already."""
        inner, boosted = self._inner, self._boosted
        zero = boosted.inner if isinstance(boosted.inner, ZeroOptimizer) else None
        if zero is not None:
            zero.refresh()
        known_masters, (groups, numbers) = Masters.attached_to(inner), self._groups()
        states, masters = dict[int, dict[str, Any]](), dict[int, torch.Tensor]()
        for name, (t, _) in self._by_name.items():
            state, number = self._state[name], numbers[id(t)]
            master = state.pop(MASTER, None)
            if known_masters is not None and known_masters.of(t) is not t:  # as the model's files have set it
                masters[number] = known_masters.of(t).clone() if master is None else master
            if state:
                states[number] = state
        inner.load_state_dict({"state": states, "param_groups": groups, "masters": masters})
        if zero is not None:
            zero.param_groups, zero.state = inner.param_groups, inner.state
        boosted.share_groups()
        if boosted.scaler is not None and self._saved["scaler"] is not None:
            boosted.scaler.load_state_dict(self._saved["scaler"])

    def _check(self, descriptions: dict[str, Any]) -> Any:
        """What is saved of the groups, if they are those of this optimizer."""
        if (saved := descriptions.pop(GROUPS, None)) is None:
            raise ValueError(
                "the checkpoint has no state of an optimizer; leave the optimizer out to load the rest"
            )
        self._check_update_rule(saved)
        self._check_types(saved)
        numbering = self._boosted.numbering
        check_group_sizes([len(group["numbers"]) for group in saved["groups"]], [len(n) for n in numbering])
        names = {number: name for of_rank in descriptions.values() for number, name in of_rank.items()}
        group_of = {number: at for at, numbers in enumerate(numbering) for number in numbers}
        in_groups = [dict(names[n] for n in group["numbers"] if n in names) for group in saved["groups"]]
        for number, p in self._boosted.parameters.items():
            at, name, shape = group_of[number], parameter_name(p), placement_of(p).shape
            saved_shape = in_groups[at].get(name)
            if saved_shape is None or tuple(saved_shape) != shape:
                what = "no" if saved_shape is None else f"shape {tuple(saved_shape)}, and not {shape}, for"
                raise ValueError(
                    f"the state to be loaded has {what} {name} in group {at}; it needs the state of the same "
                    "parameters in the same groups"
                )
        return saved

    def _check_update_rule(self, saved: Any) -> None:
        """Raise if the saved state belongs to an optimizer that computes something else."""
        optimizer = self._boosted.user_optimizer
        kind = type(optimizer).__name__
        if saved["rule"] != update_rule(optimizer):
            raise ValueError(
                f"the state to be loaded is of {saved['kind']}, and this is {kind}; load it into "
                f"{saved['kind']}"
            )
        for number, (before, now) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=False)):
            for option in _UPDATE_RULE:
                was, is_now = before["options"].get(option), now.get(option)
                if None not in (was, is_now) and was != is_now:
                    raise ValueError(
                        f"the state to be loaded is of {saved['kind']} with {option}={was} in group "
                        f"{number}, and this {kind} has {option}={is_now}; make it with {option}={was}"
                    )

    def _check_types(self, saved: Any) -> None:
        """Raise ValueError if options or scaler are of other types than an optimizer has."""
        for before, now in zip(saved["groups"], self._boosted.inner.param_groups, strict=False):
            for name, value in _check_type("options", before["options"], dict).items():
                known = now.get(name)
                if isinstance(known, float | int) and not isinstance(known, bool):
                    _check_type(name, value, float | int | torch.Tensor)
        if saved["scaler"] is not None:
            LossScaler().load_state_dict(saved["scaler"])

    def _is_local(self, label: str) -> bool:
        return label.removeprefix(VALUE).partition("/")[2] in self._by_name

    def _targets(self, stored: StateReader) -> Iterator[tuple[str, tuple[Placement, torch.Tensor]]]:
        """(label, (placement, memory)) of each tensor to be read."""
        for label, shape in stored.shapes.items():
            if not self._is_local(label):
                continue
            key, _, name = label.partition("/")
            t, placement = self._by_name[name]
            dtype = stored.dtypes[label]
            if is_sharded_state(key, shape, placement.shape):
                memory = torch.empty(t.shape, dtype=dtype, device=t.device)
            elif shape and placement.local_shape != placement.shape:
                raise ValueError(
                    f"{key!r} of {name} has shape {shape} and cannot be cut as its parameter of shape "
                    f"{placement.shape} is here; use zero_stage=0, 1 or 2 and tp_size=1"
                )
            else:
                memory, placement = torch.empty(shape, dtype=dtype), Placement(label, shape)
            self._state[name][key] = memory
            yield label, (placement, memory)
