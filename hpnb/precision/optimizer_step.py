"""One step of an optimizer: check for overflow, unscale, clip and step, alike on all ranks.

    overflow   an element of a gradient is inf or nan on any rank: skip the step on all ranks
    c          factor/scale * min(1, max_norm / (norm + 1e-6)), norm = |gradients| * factor/scale of all ranks
    step       with gradients * c

Ranks that do not agree on an overflow diverge: one steps, the other does not, and both go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from hpnb import comm
from hpnb.grad_norm import total_norm
from hpnb.mesh import Axis
from hpnb.placement import check_axes
from hpnb.precision.loss_scaler import LossScaler
from hpnb.precision.masters import Masters, group_by_kind, multiply, parameters_of
from hpnb.ranks.current_rank import device as this_device


@dataclass(frozen=True)
class OptimizerStepResult:
    """What `step` did.

    Attributes:
        stepped: False if a gradient had overflowed on any rank of the axes.
        norm: (), of all gradients before clipping, unscaled; None without clipping and after a skipped step.
            It stays on the device, so that the CPU need not wait for it.
        scale: what the loss had been multiplied by.
    """

    stepped: bool
    norm: torch.Tensor | None
    scale: float


def step(
    optimizer: Optimizer,
    axes: Sequence[Axis] = (),
    *,
    scaler: LossScaler | None = None,
    max_norm: float = 0.0,
    factor: float | torch.Tensor = 1.0,
) -> OptimizerStepResult:
    """Unscale, clip and step, or skip the step. Call it instead of `optimizer.step()`.

    A step is skipped where a loss scaler finds an overflow. Without one, as in bf16 and float32, gradients
    that are nan make weights nan, as they do in PyTorch.

    Every rank of `axes` calls it. After a skipped step weights and state are as they were, and gradients stay
    for the caller to zero. Gradients are multiplied in float32 on their way to masters, or in place if there
    are none. The CPU waits for the device once if there is a scaler, and never otherwise.

    Args:
        axes: the ranks that agree on overflow, and along which gradients may be sharded (`hpnb.placement`).
            Without any, this rank decides alone. For a tensor-parallel model,
            `[mesh.dp, *hpnb.tensor_parallel.axes(model)]`: on a grid these are parts of mesh.tp.
        scaler: has multiplied the loss; it is updated.
        max_norm: clip the norm of all gradients to it, as torch.nn.utils.clip_grad_norm_ does; 0 is off.
        factor: multiply gradients by it before they are clipped; a tensor, (), is not read by the CPU.

    Raises:
        ValueError: max_norm is below 0, or gradients are sharded along an axis that is not in `axes`.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> hpnb.precision.step(optimizer, max_norm=1.0).norm.item()
    5.0
    >>> weight.tolist()
    [-0.59..., -0.79...]
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be above 0, or 0 for no clipping")
    if scaler is not None or max_norm > 0:
        check_axes(parameters_of(optimizer), axes)
    scale = 1.0 if scaler is None else scaler.scale
    if scaler is not None and _any_overflow(optimizer, axes):
        scaler.update(True)
        if hasattr(optimizer, "skip"):  # a ZeroOptimizer: model.zero_grad() does not reach its gradients
            optimizer.skip()
        return OptimizerStepResult(False, None, scale)
    norm: torch.Tensor | None = None
    coefficient: float | torch.Tensor = factor / scale
    if max_norm > 0:
        norm = total_norm(parameters_of(optimizer), axes) * coefficient
        coefficient = coefficient * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    masters = Masters.attached_to(optimizer)
    if masters is not None:
        masters.coefficient = coefficient
    else:
        multiply([p.grad for p in parameters_of(optimizer) if p.grad is not None], coefficient)
    optimizer.step()
    if scaler is not None:
        scaler.update(False)
    return OptimizerStepResult(True, norm, scale)


@torch.no_grad()
def _any_overflow(optimizer: Optimizer, axes: Sequence[Axis]) -> bool:
    """Whether an element of a gradient is inf or nan, on any rank of `axes`. Waits for the device.

    The largest absolute value decides, because a sum of squares can be inf although no element is.
    """
    parameters = parameters_of(optimizer)
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    overflows = torch.zeros((), device=this_device())  # the same message on all ranks, even without gradients
    for group in group_by_kind(grads):
        largest = torch.stack(torch._foreach_norm(group, math.inf)).max()  # nan if an element is
        overflows += largest.isfinite().logical_not().to(overflows)
    for axis in axes:
        overflows = comm.all_reduce(overflows, axis)
    return bool(overflows)
