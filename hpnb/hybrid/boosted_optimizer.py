"""The user's optimizer, made to step what this rank holds.

    optimizer                       stays the object it is, and of its class, so a scheduler made before stays
      .step()                       -> hpnb.precision.step(inner): unscale, clip, step or skip, on all ranks
      .param_groups                 the same dicts, which inner shares: a new learning rate reaches what steps
    inner                           what steps: an optimizer of the class that was given (ZeRO 0 and 3), or a
                                    ZeroOptimizer (1 and 2), over this rank's parameters

The instance is given another class, made on the fly: a subclass of its own with the methods below. Parameters
that are on other ranks leave the groups, so that they are freed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from hpnb import precision
from hpnb.data_parallel import ZeroOptimizer
from hpnb.mesh import Axis
from hpnb.optimizer_state import (
    build_state_dict,
    gather_states,
    group_options,
    local_states,
    merge_stages,
    split_state_dict,
)
from hpnb.placement import placement_of
from hpnb.precision import LossScaler, Masters, OptimizerStepResult


@dataclass
class Stepper:
    """What stands behind a boosted optimizer.

    Attributes:
        inner: what steps.
        axes: with whom ranks agree on overflow and on the norm.
        scaler: whose scale gradients carry.
        max_norm: to which their norm is clipped; 0 is off.
        numbering: of each group the numbers of its parameters, as they were before boost.
        held: this rank's parameters, {number: parameter}, in the order of inner's groups.
        model: the boosted model.
        last: what the last step did.
    """

    inner: Optimizer
    axes: Sequence[Axis]
    scaler: LossScaler | None
    max_norm: float
    numbering: list[list[int]]
    held: dict[int, nn.Parameter]
    model: Any
    last: OptimizerStepResult | None = None


class BoostedOptimizer(Optimizer):
    """The methods of a boosted optimizer. `optimizer.last_step` is its last step's `OptimizerStepResult`:
    whether it stepped, the norm before clipping, the scale."""

    boosted: Stepper

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Unscale, clip and step; on all ranks, or on none where a gradient has overflowed on one."""
        if closure is not None:
            raise ValueError(
                "step(closure) cannot evaluate a loss on several ranks: run forward and backward before, "
                "then step() without a closure"
            )
        own = self.boosted
        self._opt_called = True  # which schedulers look for, to warn where they are stepped before
        own.last = precision.step(own.inner, own.axes, scaler=own.scaler, max_norm=own.max_norm)

    # Of schedulers: this step says itself that it was called, so they need not wrap it. And of PyTorch: the
    # hooks of a step run around inner's.
    step._wrapped_by_lr_sched = step.hooked = True  # type: ignore[attr-defined]

    @property
    def last_step(self) -> OptimizerStepResult | None:
        return self.boosted.last

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.boosted.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state as one process would have it: whole tensors, on the CPU, by the numbers that parameters
        had before boost. Every rank calls it and gets all of it."""
        own = self.boosted
        placements = {number: placement_of(p).without("pp") for number, p in own.held.items()}
        local = own.inner.state_dict()
        states = local_states(local, list(own.held))
        states = gather_states(states, placements, [axis for axis in own.axes if axis.name != "pp"])
        for axis in own.axes:
            if axis.name == "pp":  # whose ranks have other parameters, not shards of the same ones
                states = merge_stages(states, axis)
        groups = [
            {**group_options(group), "params": numbers}
            for group, numbers in zip(own.inner.param_groups, own.numbering, strict=True)
        ]
        return build_state_dict(states, groups, "masters" in local)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take such a state, of any layout or none; each rank takes its parts. Load the model before.

        Raises:
            ValueError: it is the state of other parameters, or of other groups of them.
        """
        placements = {number: placement_of(p).without("pp") for number, p in self.boosted.held.items()}
        local = split_state_dict(state_dict, self.boosted.numbering, placements)
        self.boosted.inner.load_state_dict(local)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise ValueError("a boosted optimizer has dealt out its parameters: add the group before boost")

    def held(self) -> dict[str, list[torch.Tensor]]:
        """What is held beside gradients and states, for a recorder of memory."""
        held = getattr(self.boosted.inner, "held", None)
        return held() if callable(held) else {}

    def _share(self) -> None:
        """Groups and states are inner's."""
        self.param_groups, self.state = self.boosted.inner.param_groups, self.boosted.inner.state


def adopt(optimizer: Optimizer, stepper: Stepper) -> None:
    """Change `optimizer` in place into what `stepper` stands behind."""
    kind = type(optimizer)
    vars(optimizer).pop("step", None)  # a scheduler's wrapper around the step of before
    optimizer.__class__ = type(kind.__name__, (BoostedOptimizer, kind), {})
    vars(optimizer)["boosted"] = stepper
    optimizer._share()  # type: ignore[attr-defined]


def stepper_of(optimizer: Any) -> Stepper:
    """What stands behind a boosted optimizer.

    Raises:
        ValueError: it was not boosted.
    """
    if not isinstance(optimizer, BoostedOptimizer):
        raise ValueError(f"this {type(optimizer).__name__} is not boosted; pass what booster.boost returned")
    return optimizer.boosted


# --- what steps ------------------------------------------------------------------------------------------


def plain(optimizer: Optimizer, wide: bool) -> Optimizer:
    """An optimizer of the same class over the same groups and state; with float32 masters if `wide`."""
    inner: Optimizer = object.__new__(type(optimizer))
    vars(inner).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    if wide:
        Masters(inner)
    return inner


def dealt_out(optimizer: Optimizer, axis: Axis, stage: int, **options: Any) -> ZeroOptimizer:
    """A ZeroOptimizer of the same class and groups, whose dicts it takes over."""
    kind = type(optimizer)
    takes = inspect.signature(kind.__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in takes}
    groups = [dict(group) for group in optimizer.param_groups]
    zero = ZeroOptimizer(groups, kind, axis, stage, **options, **defaults)
    for given, made in zip(optimizer.param_groups, zero.param_groups, strict=True):
        given.clear()
        given.update(made)
    zero.optimizer.param_groups[:] = optimizer.param_groups
    return zero


def keep(optimizer: Optimizer, here: Mapping[int, Any]) -> tuple[list[list[int]], dict[int, nn.Parameter]]:
    """Let go of parameters that are not `here` (by id), in place.

    Returns:
        The numbers of all parameters by group; and {number: parameter} of those that stay.
    """
    numbering: list[list[int]] = []
    held: dict[int, nn.Parameter] = {}
    count = 0
    for group in optimizer.param_groups:
        numbers = list(range(count, count + len(group["params"])))
        numbering.append(numbers)
        count += len(numbers)
        stays = [id(p) in here for p in group["params"]]
        held |= {n: p for n, p, stay in zip(numbers, group["params"], stays, strict=True) if stay}
        for p, stay in zip(group["params"], stays, strict=True):
            if not stay:
                optimizer.state.pop(p, None)
        for name in ("params", "param_names"):
            if name in group:
                group[name] = [value for value, stay in zip(group[name], stays, strict=True) if stay]
    return numbering, held
