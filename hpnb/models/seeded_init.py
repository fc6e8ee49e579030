"""Initial weights, equal on every rank and every device: drawn from a seed, on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_init(seed: int, target: torch.device) -> Iterator[None]:
    """Draw from `seed` on the CPU and in float32, and leave generators and defaults as they were.

    For a model that is to be on "meta" nothing is drawn.
    """
    default_dtype = torch.get_default_dtype()
    device = torch.device("meta" if target.type == "meta" else "cpu")
    with device, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds the GPUs too
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default_dtype)
