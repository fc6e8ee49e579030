"""What `Booster.boost` makes of the user's optimizer: it steps what this rank holds, on all ranks or on none.

    optimizer.step()   -> BoostedOptimizer.step -> hpnb.precision.step(inner): unscale, clip, step or skip
    inner              an optimizer of the same class (ZeRO 0 and 3), or a ZeroOptimizer around the class
                       (ZeRO 1 and 2), over this rank's parameters

The user's optimizer is changed in place: it keeps its class, and its groups, now with this rank's parameters
only, are inner's groups. So a learning-rate scheduler that was made before boost stays attached. Its methods
below are replaced on the instance, as PyTorch's schedulers replace `step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from hpnb import precision
from hpnb.data_parallel import ZeroOptimizer
from hpnb.data_parallel.reducer import thawed_message
from hpnb.hybrid.same_groups import check_same_groups
from hpnb.hybrid.torch_clipping import GradientVersions
from hpnb.mesh import Axis
from hpnb.optimizer_state import (
    build_state_dict,
    gather_states,
    group_options,
    local_states,
    merge_stages,
    split_state_dict,
)
from hpnb.placement import Placement, placement_of
from hpnb.precision import LossScaler, OptimizerStepResult
from hpnb.precision.masters import parameters_of

# The user's optimizer has methods of what stands behind it. A strong value here would keep both for ever as
# soon as it leads back to the key, as through a criterion that refers to the trainer with the optimizer.
_boosted: WeakKeyDictionary[Optimizer, ref[BoostedOptimizer]] = WeakKeyDictionary()
_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "tensors_by_category")


class BoostedOptimizer:
    """Stands behind the user's optimizer and does its work.

    Args:
        optimizer: the user's; its groups hold this rank's parameters only (`drop_remote_parameters`).
        inner: the optimizer that steps: `twin(optimizer)`, or a ZeroOptimizer.
        axes: the ranks that agree on an overflow and on the gradient norm.
        numbering: the numbers of the parameters of each group, as they were before boost.
        parameters: {number: parameter} of this rank, in the order of inner's groups.

    Attributes:
        gradient_factor: the next step multiplies gradients by it; 1.0 again after it. The same on all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        inner: Optimizer,
        axes: Sequence[Axis],
        *,
        scaler: LossScaler | None,
        max_norm: float,
        numbering: list[list[int]],
        parameters: dict[int, nn.Parameter],
        model: Any,
    ) -> None:
        self.inner, self.axes = inner, axes
        self.gradient_factor: float | torch.Tensor = 1.0
        self.scaler, self.max_norm, self.model = scaler, max_norm, model
        self.numbering, self.parameters = numbering, parameters
        self.gradient_versions = GradientVersions(model.plugin)
        self._compares_groups = True  # before the first step
        # ZeRO 3 has hooks for all parameters, and a rank without replicas reduces nothing.
        stage, replicas = model.plugin.zero_stage, model.plugin.mesh.dp_cp.size
        is_reduced = stage in (1, 2) or (stage == 0 and replicas > 1)
        self._frozen = {p for p in parameters.values() if is_reduced and not p.requires_grad}
        self._optimizer_ref = ref(optimizer)  # which holds this object
        vars(optimizer).update({name: getattr(self, name) for name in _METHODS}, last_step=None)
        _boosted[optimizer] = ref(self)
        self.share_groups()

    def step(self, closure: Any = None) -> None:
        """Unscale, clip and step; on all ranks, or on none where a gradient has overflowed on one.

        Raises:
            ValueError: at the first step, another learning rate or other option on another rank.
            RuntimeError: parameters that were frozen in boost are trained now, which only ZeRO 3 can reduce.
        """
        if closure is not None:
            raise ValueError(
                "step(closure) cannot evaluate a loss on several ranks: run forward and backward before, "
                "then step() without a closure"
            )
        if any(p.requires_grad for p in self._frozen):
            named = self.model.named_parameters()
            raise RuntimeError(thawed_message([n for n, p in named if p in self._frozen and p.requires_grad]))
        self.gradient_versions.check()
        if self._compares_groups:
            check_same_groups(self.inner)
            self._compares_groups = False
        factor, self.gradient_factor = self.gradient_factor, 1.0
        result = precision.step(
            self.inner, self.axes, scaler=self.scaler, max_norm=self.max_norm, factor=factor
        )
        self.record(result)
        if result.stepped and self.model.selection_bias is not None:
            self.model.selection_bias.step()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so schedulers need not wrap it

    def record(self, result: OptimizerStepResult) -> None:
        """Let the user read what the step did as `optimizer.last_step`."""
        if (optimizer := self._optimizer_ref()) is not None:
            # Schedulers look for _opt_called, and warn if they are stepped first.
            vars(optimizer).update(last_step=result, _opt_called=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradient_versions.forget()
        self.inner.zero_grad(set_to_none)

    def end_backward(self) -> None:
        """Gradients are what the backward has left; a change before the step would be the user's."""
        self.gradient_versions.note(parameters_of(self.inner))

    def state_dict(self) -> dict[str, Any]:
        """The state as one process would have it: full tensors on the CPU, by the numbers that parameters had
        before boost. Every rank calls it and gets all of it."""
        local = self.inner.state_dict()
        states = local_states(local, list(self.parameters))
        states = gather_states(states, self._placements(), [a for a in self.axes if a.name != "pp"])
        for axis in self.axes:
            if axis.name == "pp":  # its ranks have other parameters, not shards of the same ones
                states = merge_stages(states, axis)
        groups = [
            {**group_options(group), "params": numbers}
            for group, numbers in zip(self.inner.param_groups, self.numbering, strict=True)
        ]
        return build_state_dict(states, groups, "masters" in local)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take such a state, of any layout or none; each rank takes its shards. Load the model before."""
        self.inner.load_state_dict(split_state_dict(state_dict, self.numbering, self._placements()))
        self.share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise ValueError("a boosted optimizer has sharded its parameters: add the group before boost")

    def tensors_by_category(self) -> dict[str, list[torch.Tensor]]:
        """What inner holds beside gradients and state, for a recorder of memory."""
        list_inner = getattr(self.inner, "tensors_by_category", None)
        return list_inner() if callable(list_inner) else {}

    def share_groups(self) -> None:
        """Let the user's optimizer have inner's groups and state, after a load has replaced them."""
        if (optimizer := self._optimizer_ref()) is not None:
            optimizer.param_groups, optimizer.state = self.inner.param_groups, self.inner.state

    @property
    def user_optimizer(self) -> Optimizer:
        optimizer = self._optimizer_ref()
        assert optimizer is not None, "whoever asks has the user's optimizer"
        return optimizer

    def _placements(self) -> dict[int, Placement]:
        return {number: placement_of(p).without("pp") for number, p in self.parameters.items()}


def is_boosted(optimizer: Any) -> bool:
    return isinstance(optimizer, Optimizer) and optimizer in _boosted


def boosted_optimizer(optimizer: Any) -> BoostedOptimizer:
    """What stands behind a boosted optimizer."""
    behind = _boosted[optimizer]() if is_boosted(optimizer) else None
    if behind is None:
        raise ValueError(f"this {type(optimizer).__name__} is not boosted; pass what booster.boost returned")
    return behind


# --- the optimizer that steps ----------------------------------------------------------------------------


def twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class over the same groups, state and hooks."""
    other: Optimizer = object.__new__(type(optimizer))
    vars(other).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return other


def make_zero_optimizer(optimizer: Optimizer, axis: Axis, stage: int, **options: Any) -> ZeroOptimizer:
    """A ZeroOptimizer of the same class and groups; both then share the dicts of the groups."""
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [dict(group) for group in optimizer.param_groups]
    zero = ZeroOptimizer(groups, kind, axis, stage, **options, **defaults)
    for users_group, zero_group in zip(optimizer.param_groups, zero.param_groups, strict=True):
        users_group.clear()
        users_group.update(zero_group)
    zero.optimizer.param_groups[:] = optimizer.param_groups
    return zero


def drop_remote_parameters(
    optimizer: Optimizer, local_ids: Collection[int]
) -> tuple[list[list[int]], dict[int, nn.Parameter]]:
    """Remove parameters that are not in `local_ids` from the groups, in place, so that they are freed.
    Returns the numbers of all parameters by group, and {number: parameter} of those that stay."""
    numbering: list[list[int]] = []
    parameters: dict[int, nn.Parameter] = {}
    count = 0
    for group in optimizer.param_groups:
        numbers = list(range(count, count + len(group["params"])))
        numbering.append(numbers)
        count += len(numbers)
        stays = [id(p) in local_ids for p in group["params"]]
        parameters |= {n: p for n, p, stay in zip(numbers, group["params"], stays, strict=True) if stay}
        for p, stay in zip(group["params"], stays, strict=True):
            if not stay:
                optimizer.state.pop(p, None)
        for name in ("params", "param_names"):
            if name in group:
                group[name] = [value for value, stay in zip(group[name], stays, strict=True) if stay]
    return numbering, parameters
