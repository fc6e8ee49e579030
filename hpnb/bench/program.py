"""A training program of a benchmark: built, warm, and able to take one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpnb.bench.tasks import BatchFeed, TrainingTask
from hpnb.mesh import ParallelLayout


@dataclass
class Program:
    """A program on a rank.

    Attributes:
        step: forward, backward and optimizer, of the batch in `feed`. loss: of the last step, the mean over
        the batch of all ranks; all ranks call it. bubble: measured and simulated idle share of one more step,
        which is recorded; where there is one. replicas: tensors that are equal on every rank of `dp_group`,
        if gradients are summed; where the program
            says so.
        dp_group: ranks along dp; None for all.
    """

    step: Callable[[], object]
    loss: Callable[[], float]
    feed: BatchFeed
    bubble: Callable[[], tuple[float, float]] | None = None
    replicas: Callable[[], Iterable[torch.Tensor]] = tuple
    dp_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Candidate:
    """How to build a program, on every rank.

    Attributes:
        name: as a table shows it; hpnb's begin with "hpnb".
        same: whether weights begin with the same values as all others', so that losses can be compared.
        extra: only asked for by --thorough.
    """

    name: str
    build: Callable[[TrainingTask, ParallelLayout], Program]
    same: bool = True
    extra: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith("hpnb")
