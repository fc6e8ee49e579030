"""The state of a training beside its weights: what is saved of it, and how it comes back.

    exp_avg/vit.layers.0.mlp.fc1.weight    tensors of the optimizer, by the parameter's name, of whole shape
    step/vit.layers.0.mlp.fc1.weight       counters
    optimizer, names/0 .. names/n-1        options of each group, and who is in it; the loss scaler
    lr_scheduler, loader, extra            as they say themselves
    pipeline/per_target                    what a loss function counts for each target
    random/0 .. random/n-1                 where each rank's generators stand

What is as large as its parameter is cut as the parameter is now, whatever it was when it was saved. A tied
weight stands under its first name. Masters are the weights of the model's own files, so they are not here,
unless an optimizer is saved by itself (`master/...`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb.data_parallel import ZeroOptimizer
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.boosted_optimizer import Stepper, stepper_of
from hpnb.hybrid.checkpoint.agreement import attempt
from hpnb.hybrid.checkpoint.dcp import Pieces, Stored, packed
from hpnb.hybrid.checkpoint.gather_weights import along_ranks, speaks_for
from hpnb.placement import Placement, placement_of
from hpnb.precision import Masters
from hpnb.ranks.current_rank import device, rank

Copied = Callable[[torch.Tensor], torch.Tensor]
GROUPS, NAMES, MASTER, VALUE = "optimizer", "names/", "master", "value/"
COUNTERS = "optimizer/counters/"  # all of a rank in one: a file has a cost for each thing that is in it
PER_TARGET = "pipeline/per_target"
_HOW = (
    "fused",
    "foreach",
    "capturable",
)  # options that say how to compute, and not what: the optimizer keeps its own


# --- an optimizer -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """What the states of this rank belong to.

    Attributes:
        inner: the optimizer of PyTorch that has them.
        by_name: {name of a parameter: (by what the state is known, where that lies in the whole)}.
    """

    inner: Optimizer
    by_name: dict[str, tuple[torch.Tensor, Placement]]


def _held(stepper: Stepper) -> _Held:
    inner: Any = stepper.inner
    tensors = list[torch.Tensor](stepper.held.values())
    if isinstance(inner, ZeroOptimizer):  # which has states of pieces, on some ranks none
        tensors = [inner.pieces[p] for p in stepper.held.values() if p in inner.pieces]
        inner = inner.optimizer
    return _Held(inner, {name_of(t): (t, along_ranks(placement_of(t))) for t in tensors})


def name_of(p: torch.Tensor) -> str:
    """What a parameter is called in the whole model; a tied one by its first name."""
    where = placement_of(p)
    return where.tied_to or where.name


def _as_large(key: str, shape: Sequence[int], parameter: Sequence[int]) -> bool:
    """Whether what a state has under `key` is as large, and cut, as its parameter; a counter is not."""
    return tuple(shape) == tuple(parameter) and (bool(shape) or key != "step")


def of_optimizer(optimizer: Optimizer, copied: Copied, masters: bool) -> Pieces:
    """What this rank has of its state.

    Args:
        copied: what to do with each tensor.
        masters: with the float32 masters of 16-bit weights.
    """
    stepper = stepper_of(optimizer)
    held, found = _held(stepper), Pieces()
    counters: dict[str, torch.Tensor] = {}
    known = Masters.attached_to(held.inner) if masters else None
    for name, (t, place) in held.by_name.items():
        if placement_of(t).tied_to is not None or not speaks_for(place, stepper.axes):
            continue
        state: dict[str, Any] = dict(held.inner.state.get(t, {}))
        if known is not None and known.of(t) is not t:
            state[MASTER] = known.of(t)
        for key, value in state.items():
            label = f"{key}/{name}"
            if not isinstance(value, torch.Tensor):
                found.values[VALUE + label] = packed(f"the state of {name}", value)
            elif _as_large(key, value.shape, t.shape):
                found.tensors[label] = place, copied(value)
            elif not value.dim():
                counters[label] = value
            else:
                found.tensors[label] = Placement(label, tuple(value.shape)), copied(value)
    groups = [
        {"options": _options(theirs), "numbers": numbers}
        for theirs, numbers in zip(stepper.inner.param_groups, stepper.numbering, strict=True)
    ]
    scaler = None if stepper.scaler is None else stepper.scaler.state_dict()
    kind = kind_of(optimizer)
    found.values[GROUPS] = packed("the optimizer", {"kind": kind, "groups": groups, "scaler": scaler})
    found.values[f"{COUNTERS}{rank()}"] = packed("the optimizer", _brought(counters))
    names = {number: (name_of(p), placement_of(p).shape) for number, p in stepper.held.items()}
    found.values[f"{NAMES}{rank()}"] = packed("the optimizer", names)
    return found


def _brought(counters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All of them from the device at once."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for label, value in counters.items():
        kinds.setdefault((value.dtype, value.device), []).append(label)
    found: dict[str, torch.Tensor] = {}
    for labels in kinds.values():
        found |= zip(labels, torch.stack([counters[label] for label in labels]).cpu().unbind(), strict=True)
    return found


def kind_of(thing: Any) -> str:
    """What kind of optimizer or schedule it is, for a sentence."""
    return type(thing).__name__


def _options(group: Mapping[str, Any], but: Sequence[str] = ()) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names", *but)}


class Loading:
    """The state of an optimizer, read into memory of its own, and compared with the optimizer. All ranks make
    it; `apply` takes it over.

    Raises:
        ValueError: it is the state of other parameters, or of other groups of them.
    """

    def __init__(self, optimizer: Optimizer, stored: Stored, group: dist.ProcessGroup) -> None:
        self._optimizer, self._stepper = optimizer, stepper_of(optimizer)
        self._held = _held(self._stepper)
        told = [label for label in stored.values if label == GROUPS or label.startswith(NAMES)]
        said = stored.read({}, told, group)
        self._said: Any = attempt(lambda: self._checked(said), group)
        self._state: dict[str, dict[str, Any]] = {name: {} for name in self._held.by_name}
        into: dict[str, tuple[Placement, torch.Tensor]] = attempt(lambda: dict(self._memory(stored)), group)
        values = [label for label in stored.values if label.startswith(VALUE) and self._is_here(label)]
        values += [label for label in stored.values if label.startswith(COUNTERS)]
        found = stored.read(into, values, group)
        for counters in [found.pop(label) for label in list(found) if label.startswith(COUNTERS)]:
            found |= {label: value for label, value in counters.items() if self._is_here(label)}
        for label, value in found.items():
            key, _, name = label.removeprefix(VALUE).partition("/")
            self._state[name][key] = value

    @torch.no_grad()
    def apply(self) -> None:
        """Let the optimizer have it. The model has its weights already."""
        inner, stepper = self._held.inner, self._stepper
        zero = stepper.inner if isinstance(stepper.inner, ZeroOptimizer) else None
        if zero is not None:
            zero.refresh()
        masters, numbers = Masters.attached_to(inner), dict[int, int]()
        groups: list[dict[str, Any]] = []
        for told, theirs in zip(self._said["groups"], inner.param_groups, strict=True):
            first = len(numbers)
            numbers |= {id(p): first + i for i, p in enumerate(theirs["params"])}
            own = {key: theirs[key] for key in _HOW if key in theirs}
            params = list(range(first, len(numbers)))
            groups.append({**_options(told["options"], _HOW), **own, "params": params})
        state, kept = dict[int, dict[str, Any]](), dict[int, torch.Tensor]()
        for name, (t, _) in self._held.by_name.items():
            found, number = self._state[name], numbers[id(t)]
            master = found.pop(MASTER, None)
            if masters is not None and masters.of(t) is not t:  # as the model's files have set it
                kept[number] = masters.of(t).clone() if master is None else master
            if found:
                state[number] = found
        inner.load_state_dict({"state": state, "param_groups": groups, "masters": kept})
        if zero is not None:
            zero.param_groups, zero.state = inner.param_groups, inner.state
        self._optimizer.param_groups, self._optimizer.state = inner.param_groups, inner.state
        if stepper.scaler is not None and self._said["scaler"] is not None:
            stepper.scaler.load_state_dict(self._said["scaler"])

    def _checked(self, told: dict[str, Any]) -> Any:
        needs = "it needs the state of the same parameters in the same groups"
        if (said := told.pop(GROUPS, None)) is None:
            raise ValueError(
                "the checkpoint has no state of an optimizer; leave the optimizer out to load the rest"
            )
        kind = kind_of(self._optimizer)
        options = {option for group in said["groups"] for option in group["options"]}
        if said["kind"] != kind and (lacks := sorted(self._optimizer.defaults.keys() - options)):
            raise ValueError(
                f"the state to be loaded is of {said['kind']}, without {lacks[0]!r}, and this is {kind}; "
                f"load it into {said['kind']}"
            )
        names = {number: one for theirs in told.values() for number, one in theirs.items()}
        saved = [len(group["numbers"]) for group in said["groups"]]
        wanted = [len(numbers) for numbers in self._stepper.numbering]
        if saved != wanted:
            raise ValueError(
                f"the state to be loaded has groups of {saved} parameters, and this optimizer of {wanted}; "
                f"{needs}"
            )
        for number, p in self._stepper.held.items():
            at = next(i for i, numbers in enumerate(self._stepper.numbering) if number in numbers)
            name, shape = name_of(p), placement_of(p).shape
            there = dict(names[n] for n in said["groups"][at]["numbers"] if n in names).get(name)
            if there is None or tuple(there) != shape:
                what = "no" if there is None else f"shape {tuple(there)}, and not {shape}, for"
                raise ValueError(f"the state to be loaded has {what} {name} in group {at}; {needs}")
        return said

    def _is_here(self, label: str) -> bool:
        return label.removeprefix(VALUE).partition("/")[2] in self._held.by_name

    def _memory(self, stored: Stored) -> Iterator[tuple[str, tuple[Placement, torch.Tensor]]]:
        """For each tensor to be read, and which part of the whole it is."""
        for label, shape in stored.shapes.items():
            if not self._is_here(label):
                continue
            key, _, name = label.partition("/")
            t, place = self._held.by_name[name]
            if _as_large(key, shape, place.shape):
                made = torch.empty(t.shape, dtype=stored.dtypes[label], device=t.device)
            elif shape and place.local_shape != place.shape:
                raise ValueError(
                    f"{key!r} of {name} has shape {shape} and cannot be cut as its parameter of shape "
                    f"{place.shape} is here; use zero_stage=0, 1 or 2 and tp_size=1"
                )
            else:
                made, place = torch.empty(shape, dtype=stored.dtypes[label]), Placement(label, shape)
            self._state[name][key] = made
            yield label, (place, made)


# --- the rest -----------------------------------------------------------------------------------------------


def of_pipeline(model: Boosted, copied: Copied) -> Pieces:
    """What the pipeline remembers between steps, where its loss is."""
    value = model.per_target
    if not isinstance(value, torch.Tensor):
        return Pieces()
    return Pieces({PER_TARGET: (Placement(PER_TARGET, ()), copied(value))})


def random_state() -> dict[str, Any]:
    """Where the generators of this rank stand: Python's, NumPy's, PyTorch's."""
    kind, numbers, *rest = np.random.get_state()
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": (kind, torch.from_numpy(np.asarray(numbers).astype(np.int64)), *rest)}  # fmt: skip
    if device().type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Let them go on from there."""
    kind, numbers, *rest = state["numpy"]
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), *rest))
    if "cuda" in state and device().type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device())


def of_random() -> Pieces:
    return Pieces(values={f"random/{rank()}": packed("a random state", random_state())})
