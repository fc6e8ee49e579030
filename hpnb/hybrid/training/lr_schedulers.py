"""Learning rates that rise for a while and then fall: of step k of T, after k steps were done.

    with W steps of warm-up     cosine to a least rate e                            linear to 0
    k < W                       base (k + 1) / W                                    base (k + 1) / (W + 1)
    W <= k < T                  e + (base - e) (1 + cos(pi (k - W) / (T - W))) / 2  base (T - k) / (T - W)
    k >= T                      e                                                   0

Steps are those of the optimizer, so call `step()` after each of them, not once an epoch. A rate follows from
k alone: nothing is lost by rounding on the way, or on a resume. Warm-up: Goyal et al. 2017 (arXiv
1706.02677), section 2.2. Cosine: Loshchilov & Hutter 2017 (arXiv 1608.03983), equation 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class _Warmup(LambdaLR):
    """A LambdaLR whose factor in step k is `rate(k, base)` over the group's base rate; a base of 0 stays."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        if total_steps < 1 or not 0 <= warmup_steps <= total_steps:
            raise ValueError(
                f"{warmup_steps} steps of warm-up in {total_steps} steps: total_steps must be 1 or more, and "
                f"warmup_steps 0 to {max(1, total_steps)}"
            )
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        groups = range(len(optimizer.param_groups))
        super().__init__(optimizer, [self._factors_of(group) for group in groups], last_epoch)

    def _factors_of(self, group: int) -> Callable[[int], float]:
        return lambda k: self._factor(k, group)

    def _factor(self, k: int, group: int) -> float:
        base = float(self.base_lrs[group])
        return self.rate(k, base) / base if base else 0.0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; also one from before this was a LambdaLR, which has no lr_lambdas."""
        super().load_state_dict({"lr_lambdas": [None] * len(self.lr_lambdas), **state_dict})

    def rate(self, k: int, base: float) -> float:
        """The rate of step k where that of the group was `base`."""
        raise NotImplementedError


class CosineAnnealingWarmupLR(_Warmup):
    """Linear warm-up, then half a cosine down to `eta_min`, which stays.

    Args:
        total_steps: of the optimizer, warm-up included.
        warmup_steps: of them.
        eta_min: the least rate.
        last_epoch: steps done minus one, when it goes on from elsewhere; better load a state dict.

    Raises:
        ValueError: more steps of warm-up than steps, or no steps.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    >>> scheduler = hpnb.CosineAnnealingWarmupLR(optimizer, total_steps=6, warmup_steps=2)
    >>> rates = []
    >>> for _ in range(7):
    ...     rates.append(round(scheduler.get_last_lr()[0], 2))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def rate(self, k: int, base: float) -> float:
        if k >= self.total_steps:
            return self.eta_min
        if k < self.warmup_steps:
            return base * (k + 1) / self.warmup_steps
        along = (k - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * along)) / 2


class LinearWarmupLR(_Warmup):
    """Linear warm-up, then linearly down to 0, which stays. Arguments as of CosineAnnealingWarmupLR.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    >>> hpnb.LinearWarmupLR(optimizer, total_steps=4, warmup_steps=1).get_last_lr()
    [0.5]
    """

    def rate(self, k: int, base: float) -> float:
        if k >= self.total_steps:
            return 0.0
        if k < self.warmup_steps:
            return base * (k + 1) / (self.warmup_steps + 1)
        return base * (self.total_steps - k) / (self.total_steps - self.warmup_steps)
