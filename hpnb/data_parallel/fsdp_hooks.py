"""When the units of a module are gathered, freed and reduced: hooks around their forwards and backwards.

    before a forward     start the gathers of the unit and of the next ones, wait for the unit's, put it in
    after it             shares back in place; free the unit, and watch for the gradient of its output
    before its backward  the same as before the forward, with the units in reverse
    after it             that is when all its parameters have gradients: free it, start their reduction
    at the end           reduce what is left, wait for all, free the root

The order of units is that of the last forward. Should it change, only the prefetch misses. All ranks make the
same calls in the same order, since they run the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hpnb.background import Background
from hpnb.data_parallel.flat_params import FlatParam, FSDPPolicy
from hpnb.data_parallel.fsdp_units import FSDPUnit, assign_parameters, find_units
from hpnb.gradients import after_backward, claim, in_backward
from hpnb.mesh import Axis
from hpnb.record.recorder import communication

_KEY = "_hpnb_sharded"


def fsdp_state_of(module: nn.Module) -> FSDPState | None:
    """What shards `module`, if `fully_shard` was called for it."""
    found: FSDPState | None = module.__dict__.get(_KEY)
    return found


class FSDPState:
    """Gathers and frees the units of one module around their forwards and backwards."""

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        units: Iterable[nn.Module | str] | None,
        policy: FSDPPolicy,
        prefetch: int,
        reshard: bool,
        find_unused: bool,
    ) -> None:
        self.axis, self.policy, self.prefetch = axis, policy, prefetch
        self.find_unused, self.reshard = find_unused, reshard and not find_unused
        self.sync = True
        self._computing = self._in_backward = False
        self._reducing: list[FlatParam] = []

        sharded = frozenset(m for m in module.modules() if fsdp_state_of(m) is not None)
        named = find_units(module, units)
        dealt = assign_parameters(module, named, sharded)
        if not any(dealt.values()):
            raise ValueError(f"{type(module).__name__} has no parameters to shard")
        wire, everywhere = Background(axis, policy.device), list(module.modules())

        def make(parameters: Mapping[str, nn.Parameter], complete: Callable[[FlatParam], None]) -> FlatParam:
            return FlatParam(parameters, axis, wire, policy, complete)

        self.units = []
        for name, parameters in dealt.items():
            unit = FSDPUnit(parameters, everywhere, make, self._complete)
            self.units.append(unit)
            self._hook(named[name] if name else module, unit)
        self.root = self.units[0]
        self.flats = [flat for unit in self.units for flat in unit.flats]
        claim((p for flat in self.flats for p in flat.shares), self)
        self._whole_of = {s: (w, flat) for flat in self.flats
                          for s, w in zip(flat.shares, flat.wholes, strict=True)}  # fmt: skip
        # Units in the order of the last forward, and before each the ones that its backward needs next.
        self._seen: list[FSDPUnit] = []
        self._order: list[FSDPUnit] = []
        self._next_back: dict[FSDPUnit, list[FSDPUnit]] = {}
        module.register_state_dict_pre_hook(lambda *_: self._recover())
        module.__dict__[_KEY] = self

    def _hook(self, module: nn.Module, unit: FSDPUnit) -> None:
        module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(self._after_forward, unit), always_call=True)

    # --- forward ----------------------------------------------------------------------------

    def _before_forward(self, unit: FSDPUnit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit is self.root:
            self._recover()
        if self._in_backward:  # a checkpoint computes it again
            self._gather(unit, self._next_back.get(unit, []))
            return None
        if unit is self.root:
            self._begin()
        ahead: list[FSDPUnit] = []
        if self._computing:
            at = len(self._seen)
            self._seen.append(unit)
            if at < len(self._order) and self._order[at] is unit:
                ahead = self._order[at + 1 : at + 1 + self.prefetch]
        self._gather(unit, self.units if self.find_unused and unit is self.root else ahead)
        if torch.is_grad_enabled() and unit.has_frozen:
            self._watch_inputs(unit, (args, kwargs))
        if unit is self.root and self.policy.dtype is not None:
            return tree_map(self._converted, (args, kwargs))
        return None

    def _begin(self) -> None:
        """A forward of the whole module: what is still whole may be older than the optimizer's last step."""
        for flat in self.flats:
            if (name := flat.moved()) is not None:
                raise RuntimeError(
                    f"the data of {name} was replaced after fully_shard, so an optimizer's step would be "
                    "lost: convert or move the module before, and load with load_full_state_dict"
                )
        self._release()
        self._computing, self._seen = True, []
        for unit in self.units:
            unit.uses = 0

    def _after_forward(self, unit: FSDPUnit, _: nn.Module, __: Any, output: Any) -> None:
        if self._in_backward:
            return  # its backward follows at once
        unit.leave()
        trains = torch.is_grad_enabled()
        if trains:
            unit.uses += 1
            for t in _tensors(output):
                if t.requires_grad:
                    t.register_hook(partial(self._before_backward, unit))
        if unit is not self.root:
            if self.reshard or not trains:
                unit.free()
            return
        self._computing = False
        if self._seen != self._order:
            self._learn(self._seen)
        for other in self.units[1:]:
            if not trains or self.reshard:  # gathered ahead, and then not used
                other.free()
        if not trains:
            self._release()
            self._meet_host()

    def _learn(self, order: list[FSDPUnit]) -> None:
        self._order, self._next_back = order, {}
        for at, unit in enumerate(order):
            back = [u for u in reversed(order[1:at] if at else order[1:]) if u is not unit]
            self._next_back[unit] = back[: self.prefetch]

    def _gather(self, unit: FSDPUnit, ahead: Iterable[FSDPUnit]) -> None:
        # Before the unit's own kernels are launched, for the wire waits for what was launched before it.
        unit.start()
        for other in ahead:
            other.start()
        unit.enter()

    def _watch_inputs(self, unit: FSDPUnit, inputs: Any) -> None:
        """What is frozen has no gradient whose coming says that the backward is through; its inputs have."""
        waited = [t for t in _tensors(inputs) if t.requires_grad]
        left = len(waited)

        def came(_: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                unit.uses -= 1
                self._let_go(unit)

        if unit is not self.root:
            for t in waited:
                t.register_hook(came)

    def _converted(self, value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.policy.dtype) if floats else value

    # --- backward ---------------------------------------------------------------------------

    def _before_backward(self, unit: FSDPUnit, _: torch.Tensor) -> None:
        if self._in_backward and unit.inside:  # the gradient of another output has come before
            return
        self._in_backward = True
        after_backward(self._end)
        self._gather(unit, self._next_back.get(unit, ()))

    def _complete(self, unit: FSDPUnit, flat: FlatParam) -> None:
        """All gradients of `flat` have come."""
        if not self._in_backward:
            self._in_backward = True
            after_backward(self._end)
        self._let_go(unit)
        if self.sync and not self.find_unused:
            self._reduce(flat)

    def _let_go(self, unit: FSDPUnit) -> None:
        """Free a unit whose backward is through."""
        through = unit.missing == 0 and (unit.uses <= 0 or not unit.has_frozen)
        if through and unit is not self.root and not self.find_unused:
            unit.leave()
            unit.free()

    def _reduce(self, flat: FlatParam) -> None:
        self._settle()  # whole gradients of one unit travel at a time
        flat.reduce()
        self._reducing.append(flat)

    def _settle(self, used: Mapping[FlatParam, list[bool]] | None = None) -> None:
        while self._reducing:
            flat = self._reducing.pop()
            flat.finish(None if used is None else used[flat])

    def _end(self) -> None:
        """The backward is over. It is called once for every unit that was in it; the first does it all."""
        if not self._in_backward:
            return
        try:
            if self.sync:
                self._reduce_all()
        finally:
            self._in_backward = False
            self._release()
        self._meet_host()

    def _reduce_all(self) -> None:
        """Reduce all gradients that are there: on all ranks those of the same flats."""
        if self.find_unused:
            used = self._used()
            for flat in used:
                self._settle(used)
                flat.reduce()
                self._reducing.append(flat)
            self._settle(used)
            return
        for flat in self.flats:
            if flat.holds:
                self._reduce(flat)
        self._settle()

    def _used(self) -> dict[FlatParam, list[bool]]:
        """For each parameter whether any rank has a gradient of it, where at least one has been trained."""
        flats = [flat for flat in self.flats if flat.trains]
        flags = [whole.grad is not None for flat in flats for whole in flat.wholes]
        counts = torch.tensor(flags, dtype=torch.int32).to(self.policy.device)
        if self.axis.size > 1:
            with communication("all_reduce", self.axis.name, counts.nbytes, self.axis.ranks):
                dist.all_reduce(counts, group=self.axis.group)
        anywhere = iter(counts.tolist())
        return {flat: [next(anywhere) > 0 for _ in flat.wholes] for flat in flats}

    # --- as a sink, for a pipeline that says itself when a step is over --------------------------

    @property
    def average(self) -> bool:
        return self.policy.average

    def detach(self) -> FSDPState:
        """Reduce nothing at the end of a backward any more, but when `finish` is called."""
        self.sync = False
        return self

    def holder(self, parameter: nn.Parameter) -> nn.Parameter:
        """Whose gradient grows during backwards: that of the whole parameter."""
        return self._whole_of.get(parameter, (parameter, None))[0]

    def ready(self, parameter: nn.Parameter) -> None:
        """The whole gradient is kept to the end, since a unit's are sent as one."""
        flat = self._whole_of[parameter][1]
        flat.holds = flat.holds or self.holder(parameter).grad is not None

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what all backwards since the last time have left."""
        self._reduce_all()
        self._meet_host()

    def drop(self) -> None:
        """The step failed."""
        self._in_backward = self._computing = False
        self._reducing.clear()
        for flat in self.flats:
            flat.drop()
        self._release()

    # --- in between -------------------------------------------------------------------------

    def _release(self) -> None:
        """Shares back in place, nothing whole."""
        for unit in self.units:
            unit.leave()
            unit.free()
        for flat in self.flats:
            flat.missing = flat.trains

    def _recover(self) -> None:
        """Clear up after a forward or backward that an exception ended."""
        if self._in_backward and not in_backward():
            self._in_backward = False
            self._reducing.clear()
            for flat in self.flats:
                flat.drop()
            self._release()
        if self._computing:
            self._computing = False
            self._release()

    def _meet_host(self) -> None:
        """With shares on the CPU: what is copied from or to them has arrived, so an optimizer may step."""
        if self.policy.offload and self.policy.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _tensors(getattr(leaf, field.name))
        elif isinstance(leaf, Mapping):
            for item in leaf.values():
                yield from _tensors(item)
