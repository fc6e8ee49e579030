"""ZeRO-3's units: parameters that are gathered and freed together. Each block is one, the rest is the root's.

    model    wte wpe | h.0 | h.1 | ... | h.47 | ln_f lm_head
    unit      root      one block each           root

A unit should be large enough to use the link well (see `hpnb.theory.knee`), and small enough that two of them
fit beside the rest. A parameter that several units use (tied embeddings) belongs to the root, which stays
unsharded for as long as any unit computes.

A module computes with what is registered under its parameters' names: the unsharded parameters during a
forward or a backward, the sharded ones otherwise. A backward needs the unsharded ones registered too, because
activation checkpointing inside a unit runs its forward again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from hpnb.data_parallel.flat_params import FlatParam
from hpnb.data_parallel.split_reducer import is_expert
from hpnb.gradients import hook_owner_of


class FSDPUnit:
    """What is gathered and freed together, and where its parameters are registered.

    Args:
        parameters: {name: parameter}. One FlatParam is made for each dtype, for trained and frozen apart,
            and for experts and others.
        modules: all modules that may have one of the parameters registered under some name.
        make_flat_param: called with parameters, and with what to call when they all have gradients.
        on_complete: called in a backward when all gradients of one FlatParam are there.

    Attributes:
        unsharded_of: {sharded parameter: (unsharded parameter, its FlatParam)}.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence[nn.Module],
        make_flat_param: Callable[[Mapping[str, nn.Parameter], Callable[[FlatParam], None]], FlatParam],
        on_complete: Callable[[FSDPUnit, FlatParam], None],
    ) -> None:
        kinds: dict[tuple[torch.dtype, bool, bool], dict[str, nn.Parameter]] = {}
        for name, p in parameters.items():
            kinds.setdefault((p.dtype, p.requires_grad, is_expert(p)), {})[name] = p
        complete = partial(on_complete, self)
        self.flat_params = tuple(make_flat_param(kind, complete) for kind in kinds.values())
        self.unsharded_of = {
            sharded: (unsharded, flat)
            for flat in self.flat_params
            for sharded, unsharded in zip(flat.sharded_params, flat.unsharded_params, strict=True)
        }
        self._registrations = [
            (module._parameters, key, p, self.unsharded_of[p][0])
            for module in modules
            for key, p in module._parameters.items()
            if p in self.unsharded_of
        ]
        self.unsharded_registered = False
        # Forwards whose backward has not gone through this unit. Only units with frozen parameters need it.
        self.pending_backwards = 0

    @property
    def has_frozen(self) -> bool:
        return any(flat.has_frozen for flat in self.flat_params)

    @property
    def missing(self) -> int:
        """How many gradients the current backward has not brought yet."""
        return sum(flat.missing for flat in self.flat_params)

    def unshard(self) -> None:
        """Start to gather the full parameters."""
        for flat in self.flat_params:
            flat.unshard()

    def register_unsharded(self) -> None:
        """Wait for the full parameters, and register them in the modules. `unshard` was called before."""
        for flat in self.flat_params:
            flat.wait_for_unshard()
        if not self.unsharded_registered:
            self.unsharded_registered = True
            for flat in self.flat_params:
                flat.follow_requires_grad()
                flat.follow_hooks()
            for parameters, key, _, unsharded in self._registrations:
                parameters[key] = unsharded

    def register_sharded(self) -> None:
        """Register the sharded parameters, which everybody outside of a forward or backward sees."""
        if self.unsharded_registered:
            self.unsharded_registered = False
            for parameters, key, sharded, _ in self._registrations:
                parameters[key] = sharded

    def reshard(self) -> None:
        """Free the full parameters."""
        for flat in self.flat_params:
            flat.reshard()


# --- which module is a unit, and which parameter belongs to it ------------------------------------------


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The items of every outermost nn.ModuleList in `module`; if there is none, of every nn.Sequential.

    An item without a forward, such as another list, has nothing to gather before, so its children are taken.
    """
    return list(_items(module, nn.ModuleList)) or list(_items(module, nn.Sequential))


def _items(module: nn.Module, kind: type[nn.ModuleList] | type[nn.Sequential]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, kind) and not isinstance(module, ParametrizationList):
            yield from modules_with_forward(child)
        else:
            yield from _items(child, kind)


def modules_with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, or if it has no forward of its own, the outermost modules inside of it that have one."""
    if has_no_forward(module):
        for child in module.children():
            yield from modules_with_forward(child)
    else:
        yield module


def has_no_forward(module: nn.Module) -> bool:
    """Whether `module` only holds others, as a list or dict does, or a block whose caller runs its parts."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def find_units(module: nn.Module, units: Iterable[nn.Module | str] | None) -> dict[str, nn.Module]:
    """{name: module} of `units` (modules or their names; None finds the blocks), without the root."""
    names = {m: name for name, m in module.named_modules()}
    by_name = dict(module.named_modules(remove_duplicate=False))
    unit_of_name: dict[str, nn.Module] = {}
    for unit in find_blocks(module) if units is None else units:
        candidate = by_name.get(unit) if isinstance(unit, str) else unit
        if candidate is None or candidate not in names:
            what = repr(unit) if isinstance(unit, str) else type(unit).__name__
            some = ", ".join(repr(name) for name in list(names.values())[1:6])
            raise ValueError(f"unit {what} is not in the module; it has {some}, ...")
        name = names[candidate]
        if has_no_forward(candidate):
            items = ", ".join(repr(f"{name}.{key}") for key in list(candidate._modules)[:3])
            raise ValueError(
                f"unit {name!r} is a {type(candidate).__name__}, which has no forward to gather before; "
                f"name its items instead: {items}, ..."
            )
        if candidate is not module:
            unit_of_name[name] = candidate
    return unit_of_name


def assign_parameters(
    module: nn.Module, units: Mapping[str, nn.Module], already_sharded: frozenset[nn.Module] = frozenset()
) -> dict[str, dict[str, nn.Parameter]]:
    """{name of the unit: {name of the parameter: parameter}}, in the order of the module; the root is "".

    A parameter belongs to the innermost unit around it, and one of several units to the root. Parameters of
    modules in `already_sharded` are left out; below, the unit of these is None.
    """
    unit_of_module = {m: name for name, m in units.items()} | dict.fromkeys(already_sharded)
    name_of, used_by = dict[nn.Parameter, str](), defaultdict[nn.Parameter, set[str | None]](set)

    def walk(current: nn.Module, path: str, unit: str | None) -> None:
        unit = unit_of_module.get(current, unit)
        for key, p in current._parameters.items():
            if p is not None:
                name_of.setdefault(p, path + key)
                used_by[p].add(unit)
        for key, child in current._modules.items():
            if child is not None:
                walk(child, f"{path}{key}.", unit)

    walk(module, "", "")
    assigned: dict[str, dict[str, nn.Parameter]] = {name: {} for name in ("", *units)}
    for p, name in name_of.items():
        users = used_by[p]
        if users == {None}:
            continue
        if None in users:
            raise ValueError(
                f"{name} is used inside and outside of a module that is sharded already; "
                "leave that one to the fully_shard of the full model"
            )
        if (other := hook_owner_of(p)) is not None:
            raise ValueError(
                f"the gradient of {name} is reduced by {type(other).__name__} already; shard the module "
                "instead of wrapping it"
            )
        owner = users.pop() if len(users) == 1 else ""  # of several users: the root
        assert owner is not None
        assigned[owner][name] = p
    return {name: parameters for name, parameters in assigned.items() if parameters or not name}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
