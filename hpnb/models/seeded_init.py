"""Weights that start alike on every rank and every device: drawn from a seed, on the CPU, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing(seed: int, target: torch.device) -> Iterator[None]:
    """Draw from `seed` on the CPU and in float32, and leave generators and defaults as they were.

    For a model that is to be on "meta" nothing is drawn.
    """
    before = torch.get_default_dtype()
    place = torch.device("meta" if target.type == "meta" else "cpu")
    with place, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds the GPUs too
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
