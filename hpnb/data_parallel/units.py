"""Which parameters are gathered as one: each block of a model is a unit, and the rest is the root's.

    units   wte wpe | h.0 | h.1 | ... | h.47 | ln_f lm_head
            root      one block each           root

A unit should be large enough to fill the wire (see `hpnb.theory.knee`), and small enough that two of them fit
beside the rest. A parameter that several units use (tied embeddings) is the root's, which stays whole for as
long as any unit computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hpnb.gradients import reduced_by


def blocks(module: nn.Module) -> list[nn.Module]:
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


def find(module: nn.Module, units: Iterable[nn.Module | str] | None) -> dict[str, nn.Module]:
    """{name: module} of the units named (by module or by name; None finds the blocks), without the root.

    Raises:
        ValueError: a unit that is not in the module, or has no forward.
    """
    names = {m: name for name, m in module.named_modules()}
    by_name = dict(module.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for unit in blocks(module) if units is None else units:
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


def deal(
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
