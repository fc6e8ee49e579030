"""When ZeRO-3 gathers, frees and reduces its units: hooks around their forwards and backwards.

    before a forward     gather the unit and start to gather the next ones; register the full parameters
    after it             register the shards again, free the unit, and hook the gradient of its output
    before its backward  the same as before the forward, with the units in reverse order
    after it             all its parameters have gradients: free it and start the reduce-scatter
    at the end           reduce what is left, wait for all, free the root

`fsdp_prefetch.py` says which units come next. All ranks run the same units, so they make the same calls in
the same order.

A forward may run while the backward of another pipeline stage does, on another thread
(`hpnb.overlapped_pair`). The two have no unit but the root in common, so each frees what it alone has used,
and what starts or ends a forward or a backward leaves the other's units as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hpnb.background import Background
from hpnb.data_parallel.copied_hooks import HookOfOriginal, do_nothing, refuse_forward
from hpnb.data_parallel.flat_params import FlatParam, FSDPPolicy
from hpnb.data_parallel.fsdp_capture import capturing_gathers, why_not_captured
from hpnb.data_parallel.fsdp_checks import (
    explain_parts,
    refuse_second_derivative_of_zero3,
    zero3_unused_message,
)
from hpnb.data_parallel.fsdp_prefetch import PrefetchOrder
from hpnb.data_parallel.fsdp_reductions import Reductions, find_used
from hpnb.data_parallel.fsdp_units import FSDPUnit, assign_parameters, tensors_in
from hpnb.data_parallel.split_reducer import is_expert
from hpnb.gradients import GradientSink, after_backward, in_backward, set_hook_owner
from hpnb.mesh import Axis
from hpnb.placement import keep_placements, placement_of

# A module's hooks hold its state. A second strong reference from here would keep weights and gradients of a
# dropped module that lies in a cycle until the collection after the one that finds the module.
_states: WeakKeyDictionary[nn.Module, ReferenceType[FSDPState]] = WeakKeyDictionary()


def fsdp_state_of(module: nn.Module) -> FSDPState | None:
    """What shards `module`, if `fully_shard` was called for it. A copy of the module has none."""
    state = _states.get(module)
    return None if state is None else state()


class FSDPState(GradientSink):
    """Gathers and frees the units of one module around their forwards and backwards.

    What the hooks note for each other:

        _in_forward, _in_backward    the root's forward runs; a backward runs, and `_end_backward` is queued
        _running_forward             units whose forward has begun and not ended
        sync                         reduce in the backward; off in no_sync, and if a pipeline calls `ready`
        _failed_inside               an exception ended the forward of a unit, and goes on to the root's
        unit.unsharded_registered    the modules have the full parameters
        unit.pending_backwards       for units with frozen parameters: see `_hook_input_gradients`
        _kept                        units that a pipeline's next action begins with: nobody frees them
        _first_units                 {action: the unit that it began with}, learned from the first one like it
        flat.missing                 gradients that the running backward has not brought yet
        flat.has_gradients           full gradients that have not been reduced
    """

    shards_parameters = True

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        module_of: Mapping[str, nn.Module],
        policy: FSDPPolicy,
        *,
        prefetch: int,
        reshard_after_forward: bool,
        find_unused: bool,
        experts: tuple[Axis, FSDPPolicy] | None = None,
    ) -> None:
        self.axis, self.policy, self.average = axis, policy, policy.average
        self.replica_axis = None if policy.replicas is None else policy.replicas.axis
        self.find_unused, self.reshard_after_forward = find_unused, reshard_after_forward and not find_unused
        self.why_not_captured = why_not_captured(policy.offload, find_unused)
        self.sync = True
        self._in_forward = self._in_backward = self._failed_inside = False
        self._running_forward: set[FSDPUnit] = set()
        self._reductions = Reductions()
        self._prefetch = PrefetchOrder[FSDPUnit](prefetch)
        self._action: object = None
        self._coming: object = None
        self._first_units: dict[object, FSDPUnit] = {}
        self._kept: set[FSDPUnit] = set()

        already = frozenset(m for m in module.modules() if fsdp_state_of(m) is not None)
        assigned = assign_parameters(module, module_of, already)
        if not any(assigned.values()):
            raise ValueError(f"{type(module).__name__} has no parameters to shard")
        expert_axis, expert_policy = (axis, policy) if experts is None else experts
        for name, p in (pair for parameters in assigned.values() for pair in parameters.items()):
            along = (expert_axis if is_expert(p) else axis).name
            if along in placement_of(p).axes:  # in a copy of a sharded module
                raise ValueError(f"{name} of shape {tuple(p.shape)} is sharded along {along} already")
        # A pipeline reads parameters of the root from modules beside the tree, too (`Stages.root_holders`).
        modules = [*module.modules(), *getattr(module, "root_holders", ())]
        background = Background(axis, policy.device)
        of_experts = background if experts is None else Background(expert_axis, policy.device)

        def make_flat_param(
            parameters: Mapping[str, nn.Parameter], on_complete: Callable[[FlatParam], None]
        ) -> FlatParam:
            if is_expert(next(iter(parameters.values()))):
                return FlatParam(parameters, expert_axis, of_experts, expert_policy, on_complete)
            return FlatParam(parameters, axis, background, policy, on_complete)

        self._unit_names = {p: name for name, members in assigned.items() if name for p in members.values()}
        self.units = []
        for name, parameters in assigned.items():
            unit = FSDPUnit(parameters, modules, make_flat_param, self._on_complete)
            self.units.append(unit)
            self._register_hooks(module_of[name] if name else module, unit)
        self.root = self.units[0]
        self.flat_params = [flat for unit in self.units for flat in unit.flat_params]
        self.gather_axes = tuple(dict.fromkeys(flat.axes[0] for flat in self.flat_params))
        set_hook_owner((p for flat in self.flat_params for p in flat.sharded_params), self)
        self._unsharded_of = dict(pair for unit in self.units for pair in unit.unsharded_of.items())
        module.register_state_dict_pre_hook(HookOfOriginal(lambda *_: self._recover(), in_a_copy=do_nothing))
        keep_placements(module)
        _states[module] = ref(self)

    def _register_hooks(self, module: nn.Module, unit: FSDPUnit) -> None:
        before = HookOfOriginal(partial(self._before_forward, unit), in_a_copy=refuse_forward)
        after = HookOfOriginal(partial(self._after_forward, unit), in_a_copy=do_nothing)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    # --- forward ----------------------------------------------------------------------------

    def _before_forward(self, unit: FSDPUnit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if unit is self.root:
            self._recover()
        if self._recomputes():
            self._unshard(unit, self._prefetch.next_in_backward(unit))
            return None
        if unit is self.root:
            self._begin_forward()
        self._running_forward.add(unit)
        ahead = self._prefetch.visit(unit) if self._in_forward else []
        if unit is not self.root:
            ahead = [*ahead, *self._keep_first_of_next_action(unit, self._prefetch.is_last_of_forward(unit))]
        self._unshard(unit, self.units if self.find_unused and unit is self.root else ahead)
        if torch.is_grad_enabled() and unit.has_frozen:
            self._hook_input_gradients(unit, (args, kwargs))
        if unit is self.root and self.policy.dtype is not None:
            return tree_map(self._to_compute_dtype, (args, kwargs))
        return None

    def _begin_forward(self) -> None:
        """Start from shards: what is still unsharded may be older than the optimizer's last step."""
        for flat in self.flat_params:
            if (name := flat.find_replaced()) is not None:
                raise RuntimeError(
                    f"the data of {name} was replaced after fully_shard, so an optimizer's step would be "
                    "lost: convert or move the module before, and load with load_full_state_dict"
                )
        self._reshard_all()
        self._in_forward, self._failed_inside = True, False
        self._prefetch.start_forward()
        for unit in self.units:
            unit.pending_backwards = 0

    def _after_forward(self, unit: FSDPUnit, _: nn.Module, __: Any, output: Any) -> None:
        if output is None and (error := sys.exception()) is not None:
            if unit is self.root and not self._failed_inside:
                explain_parts(error, self._unit_names)
            self._failed_inside = True
        if self._recomputes():
            return  # the unit's backward follows at once
        self._running_forward.discard(unit)
        unit.register_sharded()
        trains, ahead = torch.is_grad_enabled(), self._prefetch.learn_order() if unit is self.root else None
        if trains:
            unit.pending_backwards += 1
            for t in tensors_in(output):
                if t.requires_grad:
                    t.register_hook(partial(self._before_backward, unit, ahead))
        if unit is not self.root:
            if (self.reshard_after_forward or not trains) and unit not in self._kept:
                unit.reshard()
            return
        self._in_forward = False
        for other in self.units[1:]:
            gathered_ahead = not trains or self.reshard_after_forward
            if gathered_ahead and not other.unsharded_registered and other not in self._kept:
                other.reshard()  # it was not used, here or by another backward
        if not trains:
            self._reshard_all()
            self._synchronize_offload()

    def _recomputes(self) -> bool:
        """Whether the forward that runs is one of activation checkpointing, inside of a backward."""
        return self._in_backward and in_backward()

    def _unshard(self, unit: FSDPUnit, ahead: Iterable[FSDPUnit]) -> None:
        # Start all gathers before the unit's kernels are queued: a gather waits for what is queued before.
        unit.unshard()
        for other in ahead:
            other.unshard()
        unit.register_unsharded()

    def _hook_input_gradients(self, unit: FSDPUnit, inputs: Any) -> None:
        """A unit's backward has ended when all its parameters have gradients. With frozen ones it may go on:
        gradients of its inputs come later, and need the weights. So those are counted too."""
        trained = [t for t in tensors_in(inputs) if t.requires_grad]
        missing = len(trained)

        def on_gradient(_: torch.Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                unit.pending_backwards -= 1
                self._reshard_after_backward(unit)

        if unit is not self.root:
            for t in trained:
                t.register_hook(on_gradient)

    def _to_compute_dtype(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.policy.dtype) if is_float else value

    # --- backward ---------------------------------------------------------------------------

    def _before_backward(self, unit: FSDPUnit, ahead: list[FSDPUnit] | None, _: torch.Tensor) -> None:
        refuse_second_derivative_of_zero3()
        if self._in_backward and unit.unsharded_registered:  # the gradient of another output has come before
            return
        self._in_backward = True  # perhaps it was already, after a backward that an exception ended
        after_backward(self._end_backward)
        ahead = self._prefetch.next_in_backward(unit) if ahead is None else ahead
        if unit is not self.root:
            ahead = [*ahead, *self._keep_first_of_next_action(unit, self._prefetch.is_last_of_backward(unit))]
        self._unshard(unit, ahead)

    def _on_complete(self, unit: FSDPUnit, flat: FlatParam) -> None:
        """All gradients of `flat` are complete."""
        if not self._in_backward:
            self._in_backward = True
            after_backward(self._end_backward)
        self._reshard_after_backward(unit)
        if self.sync and not self.find_unused:
            self._reductions.start(flat)

    def _reshard_after_backward(self, unit: FSDPUnit) -> None:
        """Free a unit whose backward is complete."""
        is_complete = unit.missing == 0 and (unit.pending_backwards <= 0 or not unit.has_frozen)
        if is_complete and unit is not self.root and not self.find_unused:
            unit.register_sharded()
            if unit not in self._kept:
                unit.reshard()

    def _end_backward(self) -> None:
        """The backward is over. Autograd calls this once for every unit in it; the first call does it all."""
        if not self._in_backward:
            return
        try:
            if self.sync:
                self._reduce_all()
        finally:
            self._in_backward = False
            self._reshard_all()
        self._synchronize_offload()

    def _reduce_all(self) -> None:
        """Reduce all gradients that are there: those of the same FlatParams on all ranks."""
        used = find_used(self.flat_params, self.policy.device) if self.find_unused else None
        if used is None:
            self._refuse_unused()
        for flat in self.flat_params if used is None else used:
            if flat.has_gradients or used is not None:
                self._reductions.start(flat, used)
        self._reductions.finish(used)
        self._reductions.forget()

    def _refuse_unused(self) -> None:
        """Raise if a parameter got no gradient, as ZeRO 1 and 2 do. One of an earlier backward counts."""
        self._reductions.finish()
        ended = self._reductions.ended
        names = [n for f in self.flat_params if f not in ended for n in f.names_without_gradient()]
        if names:
            for flat in self.flat_params:
                flat.drop_gradients()
            raise RuntimeError(zero3_unused_message(names, sum(f.num_trained for f in self.flat_params)))

    # --- as a GradientSink, for a pipeline that says itself when a step is over ---------------------

    def begin_action(self, action: object, coming: object) -> None:
        """From now on the last unit of `action` has the first one of `coming` gathered."""
        self._action, self._coming = action, coming

    def _keep_first_of_next_action(self, unit: FSDPUnit, is_last: bool) -> list[FSDPUnit]:
        """If `unit` is the last one of this action, keep the unit that the pipeline's next action begins with
        from being freed. Returns it, to be gathered ahead. Notes the first unit of this action, too."""
        self._kept.discard(unit)
        if self._action is None:
            return []
        self._first_units.setdefault(self._action, unit)
        first = self._first_units.get(self._coming)
        if first is None or not is_last or not self._prefetch.num_ahead or self.find_unused:
            return []
        self._kept.add(first)
        return [first]

    def capturing(self) -> AbstractContextManager[None]:
        return capturing_gathers(self.flat_params, self.reset)

    def hand_over(self) -> GradientSink:
        """From now on the end of a backward reduces nothing: `ready` and `finish` do."""
        self.sync = False
        return self

    def gradient_holder(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter whose .grad grows during backwards: the unsharded one."""
        return self._unsharded_of.get(parameter, (parameter, None))[0]

    def ready(self, parameter: nn.Parameter) -> None:
        """Reduce a FlatParam once its last gradient is final; `finish` reduces those that lack one."""
        unsharded, flat = self._unsharded_of[parameter]
        flat.has_gradients |= unsharded.grad is not None
        if unsharded.grad is not None and self._reductions.count_ready(flat) and not self.find_unused:
            self._reductions.start(flat)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what all backwards since the last `finish` have left."""
        self._reduce_all()
        self._synchronize_offload()

    def drop(self) -> None:
        """The step failed: forget its gradients."""
        self._reductions.drop(undo=not self.sync)
        for flat in self.flat_params:
            flat.drop_gradients()
        self.reset()

    def reset(self) -> None:
        """No forward or backward runs, or it failed: free all units, and keep none for a next action."""
        self._in_backward = self._in_forward = False
        self._running_forward.clear()
        self._kept.clear()
        self.begin_action(None, None)
        self._reshard_all()

    # --- in between -------------------------------------------------------------------------

    def _reshard_all(self) -> None:
        """Register the shards and free what is unsharded, except for units whose forward runs, and for those
        that a pipeline's next action begins with."""
        for unit in self.units:
            if unit not in self._running_forward and unit not in self._kept:
                unit.register_sharded()
                unit.reshard()
        for flat in self.flat_params:
            flat.missing = flat.num_trained

    def _recover(self) -> None:
        """Clear up after a forward or backward that an exception ended: drop what has not been reduced. The
        root's next forward calls this, and so does every state_dict()."""
        if self._in_backward and not in_backward():
            self.drop()
        self._running_forward.clear()
        if self._in_forward:
            self._in_forward = False
            self._reshard_all()

    def _synchronize_offload(self) -> None:
        """With shards on the CPU: copies from and to them have arrived, so an optimizer may step."""
        if self.policy.offload and self.policy.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
