"""Seeds of random numbers that follow from a few numbers, such as (seed, epoch, sample)."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """A seed of 64 bits that follows from `numbers`, none of them negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seeded_generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*numbers) // 2)  # as a signed number


def seed_generators(seed: int) -> None:
    """Seed those of Python, NumPy and PyTorch in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed // 2)
