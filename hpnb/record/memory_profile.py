"""Who holds memory on a rank, and when: a MemoryProfile is frozen data, filled by a recorder.

Every byte belongs to one category for as long as its storage lives:

    parameters   storages of the model's parameters and buffers
    gradients    storages of .grad
    optimizer    storages of the optimizer's state
    activations  storages that autograd kept for the backward
    temporary    everything else; on CUDA also the allocator's rounding and the kernels' workspaces
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes in use on one rank at `time` (seconds from the start of the record)."""

    time: float
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary


@dataclass(frozen=True)
class MemoryProfile:
    """Samples of one rank in order of time. `device` is "cpu" (exact tensor bytes) or "cuda"
    (the categories add up to what the allocator had handed out)."""

    samples: tuple[MemorySample, ...]
    rank: int = 0
    device: str = "cpu"

    @cached_property
    def at_peak(self) -> MemorySample:
        """The first sample with the largest total."""
        return max(self.samples, key=lambda s: s.total, default=MemorySample(0.0))

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.at_peak.total

    def peak_of(self, category: str) -> int:
        """The most bytes of one category at any time."""
        if category not in CATEGORIES:
            raise ValueError(f"no category {category!r} in a MemoryProfile; it has {', '.join(CATEGORIES)}")
        return max((int(getattr(s, category)) for s in self.samples), default=0)
