"""How long a rank's process takes to launch a training step, beside how long the step takes.

A GPU runs behind its process. If the process takes about as long to launch a step as the step lasts, the GPU
waits for launches, and a faster GPU would not help.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

import hpnb
from hpnb.lesson.programs import device_timing, step_timing
from hpnb.models import ViTSize


class Launch(NamedTuple):
    """Seconds until a rank's process has launched a step, and until the step is done."""

    launched: float
    done: float


def vit_launches(size: ViTSize, images: int, dtype: torch.dtype, repeats: int = 9) -> list[Launch]:
    """One for each rank: the median of `repeats` forwards and backwards without messages.

    Every rank calls it. All ranks begin a step together, and each stops its clock. First steps warm up.
    """
    device, steps = hpnb.device(), []
    model, loss = device_timing.vit_and_loss(size, images, dtype)
    warmup = device_timing.warmup_steps()
    for _ in range(warmup + repeats):
        step_timing.wait_for_device(device)
        dist.barrier()
        begin = time.perf_counter()
        step_timing.forward_and_backward(model, loss)
        launched = time.perf_counter() - begin
        step_timing.wait_for_device(device)
        steps.append(Launch(launched, time.perf_counter() - begin))
    middle = step_timing.median_by(steps[warmup:], lambda step: step.done)
    everyone = [middle] * hpnb.world_size()
    dist.all_gather_object(everyone, middle)
    return everyone
