"""Do all layouts train as one GPU does? The losses of 50 steps, each with a batch of its own.

    distance of two runs     ||a - b|| / ||a||, over the losses of all steps
    what is allowed          3 x that of one GPU's from itself with samples in the opposite order
    or, with tp              1.5 x as far from the losses in twice the bits as one GPU's are

In 16 bits no two orders of summation give the same losses, so a layout may be as far off as an order is.
Where two orders happen to agree, the last digit of a float32 stands in for their distance.

Tensor parallelism also rounds elsewhere: each rank rounds its part of a product before the parts are added.
So its rounding errors are others than one GPU's, and no order of samples shows how large they may be. It
trains as well if they are no larger than one GPU's. Losses with twice the bits have nearly none. On GPUs
these are losses in float32, with matmuls in TF32, whose mantissa has three bits more than that of bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from hpnb.bench.results import distance_over_noise
from hpnb.bench.tasks import TrainingTask

ALLOWED = 3.0
ALLOWED_ROUNDING = 1.5


def loss_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """||a - b|| / ||a||.

    Raises:
        ValueError: they have different numbers of steps.
    """
    if len(a) != len(b):
        raise ValueError(f"losses of {len(a)} and of {len(b)} steps cannot be compared")
    return math.dist(a, b) / math.hypot(*a)


@dataclass(frozen=True)
class WideTask(TrainingTask):
    """A task with twice the bits that begins with the same weights."""

    @classmethod
    def of(cls, task: TrainingTask) -> WideTask:
        """Its forwards have as many bytes of activations as those of `task`."""
        return cls(**vars(replace(task, bits=2 * task.bits, rows=max(1, task.rows // 2))))

    def build(self) -> nn.Module:
        narrow = TrainingTask(**vars(self) | {"bits": self.bits // 2})
        return narrow.build().to(self.dtype)


def describe(layout: str, name: str, distance: float, noise: float, rounding: float | None = None) -> str:
    """The line for a layout, from its distance and that of reversed samples.

    Args:
        rounding: with tp, how far it is from the losses with twice the bits, over how far one GPU's are.
    """
    times = distance_over_noise(distance, noise)
    agrees = times <= ALLOWED * (1 + 1e-9) or (rounding is not None and rounding <= ALLOWED_ROUNDING)
    verdict = "coincide" if agrees else "TOO FAR APART"
    beside = "" if rounding is None else f", {rounding:.2f} x one GPU's rounding"
    return f"{layout:10} {name:34} {distance:.2e}   {times:6.2f} x the order's{beside}: {verdict}"
