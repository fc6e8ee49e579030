"""Dynamic loss scaling: the largest scale at which gradients do not overflow.

    step        .  .  .  x  .  x  .  .  .  .  .     x overflows and is skipped; growth_interval=4,
    scale       8  8  8  8  8  8  4  4  4  4  8     hysteresis=2: the first x is forgiven, the second halves
"""

from __future__ import annotations

import math

import torch


class LossScaler:
    """A scale that shrinks after overflows, and grows after many steps without one.

    The first hysteresis - 1 overflows since the scale last grew (or since the start) only cost their step;
    every later one multiplies the scale by backoff_factor, down to min_scale. growth_interval steps in a row
    without overflow multiply it by growth_factor, up to max_scale, and forgive what was before. So do
    Megatron-LM and Colossal-AI. torch.amp.GradScaler is hysteresis=1 without bounds and asks no other rank.

    Attributes:
        scale: what the next loss is multiplied by.
        skipped: steps that overflowed so far.

    Raises:
        ValueError: an option that cannot work.

    >>> scaler = hpnb.precision.LossScaler(initial_scale=1024.0, hysteresis=1)
    >>> scaler.update(True)  # an overflow
    >>> scaler.scale, scaler.skipped
    (512.0, 1)
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
    ) -> None:
        if not 0 < min_scale <= initial_scale <= max_scale < math.inf:
            raise ValueError(
                f"initial_scale={initial_scale} must lie between min_scale={min_scale} and "
                f"max_scale={max_scale}, and all above 0"
            )
        if not growth_factor > 1 or not 0 < backoff_factor < 1:
            raise ValueError(
                f"growth_factor={growth_factor} must be above 1, and backoff_factor={backoff_factor} "
                "between 0 and 1"
            )
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(
                f"growth_interval={growth_interval} and hysteresis={hysteresis} count steps; use 1 or more"
            )
        self.min_scale, self.max_scale = min_scale, max_scale
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.scale = float(initial_scale)
        self.skipped = 0
        self._clean = 0  # steps in a row without overflow, since the scale last grew
        self._overflows = 0  # since the scale last grew

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """loss * scale, in float32 at least: fp16 ends at 65504."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    def update(self, overflow: bool) -> None:
        """Account for one step."""
        if overflow:
            self.skipped += 1
            self._overflows += 1
            self._clean = 0
            if self._overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._clean += 1
        if self._clean >= self.growth_interval:  # more, if it was loaded
            self._clean = self._overflows = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, float]:
        """The scale and its counters, without the options."""
        return {
            "scale": self.scale,
            "skipped": self.skipped,
            "clean": self._clean,
            "overflows": self._overflows,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over the scale and counters of another scaler."""
        self.scale, self.skipped = float(state["scale"]), int(state["skipped"])
        self._clean, self._overflows = int(state["clean"]), int(state["overflows"])
