"""Which parameters are gathered as one: each block of a model is a unit, and the rest is the root's.

    units   wte wpe | h.0 | h.1 | ... | h.47 | ln_f lm_head
            root      one block each           root

A unit should be large enough to fill the wire (see `hpnb.theory.knee`), and small enough that two of them fit
beside the rest. A parameter that several units use (tied embeddings) is the root's, which stays whole for as
long as any unit computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hpnb.data_parallel.flat_params import FlatParam
from hpnb.gradients import reduced_by


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The items of every outermost nn.ModuleList in `module`; if there is none, of every nn.Sequential.

    Of an item that is only a container, and so has no forward to gather before, the items in turn.
    """
    return list(_items(module, nn.ModuleList)) or list(_items(module, nn.Sequential))


def _items(module: nn.Module, kind: type[nn.ModuleList] | type[nn.Sequential]) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, kind) and not isinstance(module, ParametrizationList):
            yield from _computing(child)
        else:
            yield from _items(child, kind)


def _computing(module: nn.Module) -> Iterator[nn.Module]:
    if contains_only(module):
        for child in module.children():
            yield from _computing(child)
    else:
        yield module


def contains_only(module: nn.Module) -> bool:
    """Whether `module` is a list or dict without a forward."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return isinstance(module, kinds) and type(module).forward is nn.Module.forward


def find_units(module: nn.Module, units: Iterable[nn.Module | str] | None) -> dict[str, nn.Module]:
    """{name: module} of the units named (by module or by name; None finds the blocks), without the root.

    Raises:
        ValueError: a unit that is not in the module, or has no forward.
    """
    names = {m: name for name, m in module.named_modules()}
    by_name = dict(module.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for unit in find_blocks(module) if units is None else units:
        it = by_name.get(unit) if isinstance(unit, str) else unit
        if it is None or it not in names:
            what = repr(unit) if isinstance(unit, str) else type(unit).__name__
            some = ", ".join(repr(name) for name in list(names.values())[1:6])
            raise ValueError(f"unit {what} is not in the module; it has {some}, ...")
        if contains_only(it):
            inside = ", ".join(repr(f"{names[it]}.{key}") for key in list(it._modules)[:3])
            raise ValueError(
                f"unit {names[it]!r} is a {type(it).__name__}, which has no forward to gather before; "
                f"name its items instead: {inside}, ..."
            )
        if it is not module:
            found[names[it]] = it
    return found


def assign_parameters(
    module: nn.Module, units: dict[str, nn.Module], sharded: frozenset[nn.Module] = frozenset()
) -> dict[str, dict[str, nn.Parameter]]:
    """{name of the unit: {name of the parameter: parameter}}, in the order of the module; the root is "".

    A parameter belongs to the innermost unit around it. Those of modules in `sharded` are left out.

    Raises:
        ValueError: somebody else reduces the gradient of a parameter, or it lies both inside and outside of a
            module that is sharded already.
    """
    inner = {m: name for name, m in units.items()} | dict.fromkeys(sharded)
    name_of, used_by = dict[nn.Parameter, str](), defaultdict[nn.Parameter, set[str | None]](set)

    def walk(at: nn.Module, path: str, unit: str | None) -> None:
        unit = inner.get(at, unit)
        for key, p in at._parameters.items():
            if p is not None:
                name_of.setdefault(p, path + key)
                used_by[p].add(unit)
        for key, child in at._modules.items():
            if child is not None:
                walk(child, f"{path}{key}.", unit)

    walk(module, "", "")
    dealt: dict[str, dict[str, nn.Parameter]] = {name: {} for name in ("", *units)}
    for p, name in name_of.items():
        users = used_by[p]
        if users == {None}:
            continue
        if None in users:
            raise ValueError(
                f"{name} is used inside and outside of a module that is sharded already; "
                "leave that one to the fully_shard of the whole"
            )
        if (other := reduced_by(p)) is not None:
            raise ValueError(
                f"the gradient of {name} is reduced by {type(other).__name__} already; shard the module "
                "instead of wrapping it"
            )
        owner = users.pop() if len(users) == 1 else ""
        assert owner is not None
        dealt[owner][name] = p
    return {name: parameters for name, parameters in dealt.items() if parameters or not name}


class FSDPUnit:
    """What is gathered and freed as one.

    Args:
        parameters: {name: parameter}, to be split into flats: one a dtype, trained and frozen apart.
        modules: all that may hold one of them under some name, its own and others.
        make: makes a flat, given its parameters and what to call when they all have gradients.
        complete: called in a backward when all gradients of one of the flats have come.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence[nn.Module],
        make: Callable[[Mapping[str, nn.Parameter], Callable[[FlatParam], None]], FlatParam],
        complete: Callable[[FSDPUnit, FlatParam], None],
    ) -> None:
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name, p in parameters.items():
            kinds.setdefault((p.dtype, p.requires_grad), {})[name] = p
        self.flats = tuple(make(kind, partial(complete, self)) for kind in kinds.values())
        whole_of = {s: w for flat in self.flats for s, w in zip(flat.shares, flat.wholes, strict=True)}
        self._places = [
            (module._parameters, key, p, whole_of[p])
            for module in modules
            for key, p in module._parameters.items()
            if p in whole_of
        ]
        self.inside = False  # whether the module has its whole parameters
        self.uses = 0  # forwards whose backward has not gone through it

    @property
    def has_frozen(self) -> bool:
        return any(flat.has_frozen for flat in self.flats)

    @property
    def missing(self) -> int:
        """How many gradients this backward has not brought yet."""
        return sum(flat.missing for flat in self.flats)

    def start(self) -> None:
        """Start to gather."""
        for flat in self.flats:
            flat.start()

    def enter(self) -> None:
        """From here on the module has its whole parameters. `start` was called before."""
        for flat in self.flats:
            flat.wait()
        if not self.inside:
            self.inside = True
            for flat in self.flats:
                flat.refresh()
            for parameters, key, _, whole in self._places:
                parameters[key] = whole

    def leave(self) -> None:
        """From here on the module has its shares."""
        if self.inside:
            self.inside = False
            for parameters, key, share, _ in self._places:
                parameters[key] = share

    def free(self) -> None:
        for flat in self.flats:
            flat.free()
