"""One step of an optimizer, with all that can stand between gradients and weights.

    overflow   an element of a gradient is inf or nan, on any rank: skip, on all ranks
    c          1/scale * min(1, max_norm / (norm + 1e-6)), with norm = |gradients| / scale over all ranks
    step       with gradients * c

Ranks that do not agree on an overflow drift apart: one steps, the other does not, and both go on.
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
from hpnb.precision.masters import Masters, alike, multiply, parameters_of
from hpnb.ranks.current_rank import device as this_device


@dataclass(frozen=True)
class OptimizerStepResult:
    """What `step` did.

    Attributes:
        stepped: False if a gradient had overflowed, here or on a rank that was asked.
        norm: (), of all gradients before clipping, scale divided out; None if nobody needed it. It stays on
            the device, so that the host need not wait for it.
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
) -> OptimizerStepResult:
    """Unscale, clip and step, or skip; to be called in place of `optimizer.step()`.

    Every rank of `axes` calls it. After a skipped step weights and state are as they were, and gradients stay
    for the caller to zero. Gradients are multiplied in float32 on their way to masters, or in place where
    there are none. The host waits for the device only if there is a scaler, once.

    Args:
        axes: with whom to agree on overflow, and along which gradients may be cut (`hpnb.placement`).
            Without any, this rank decides alone.
        scaler: whose scale the gradients carry; it is updated.
        max_norm: clip the norm of all gradients to it, as torch.nn.utils.clip_grad_norm_ does; 0 is off.

    Raises:
        ValueError: max_norm is below 0, or gradients are cut along an axis that is not in `axes`.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be above 0, or 0 for no clipping")
    if scaler is not None or max_norm > 0:
        check_axes(parameters_of(optimizer), axes)
    scale = 1.0 if scaler is None else scaler.scale
    if scaler is not None and _overflow(optimizer, axes):
        scaler.update(True)
        if hasattr(optimizer, "skip"):  # a ZeroOptimizer, whose gradients not everybody's zero_grad reaches
            optimizer.skip()
        return OptimizerStepResult(False, None, scale)
    norm: torch.Tensor | None = None
    coefficient: float | torch.Tensor = 1.0 / scale
    if max_norm > 0:
        norm = total_norm(parameters_of(optimizer), axes) / scale
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
def _overflow(optimizer: Optimizer, axes: Sequence[Axis]) -> bool:
    """Whether an element of a gradient is inf or nan, on any rank of `axes`. Waits for the device.

    Elements decide, by their largest absolute value: a sum of squares can be inf where no element is.
    """
    parameters = parameters_of(optimizer)
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    found = torch.zeros((), device=this_device())  # as on all ranks, whatever is offloaded or empty here
    for group in alike(grads):
        largest = torch.stack(torch._foreach_norm(group, math.inf)).max()  # nan if one is
        found += largest.isfinite().logical_not().to(found)
    for axis in axes:
        found = comm.all_reduce(found, axis)
    return bool(found)
