"""What is measured: a training program that is built, warm, and can take one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpnb.bench.layouts import Shape
from hpnb.bench.tasks import BatchFeed, Task


@dataclass
class Program:
    """On a rank.

    Attributes:
        step: forward, backward, optimizer, of the batch at hand.
        loss: of the last step, the mean over the batch of all ranks; all ranks call it.
        feed: the batch at hand.
        bubble: measured and simulated idle share of one more step, which is recorded; where there is one.
        replicas: what is the same on every rank of `among`, if gradients are summed; where the program says
            so.
        among: ranks along dp; None for all.
    """

    step: Callable[[], object]
    loss: Callable[[], float]
    feed: BatchFeed
    bubble: Callable[[], tuple[float, float]] | None = None
    replicas: Callable[[], Iterable[torch.Tensor]] = tuple
    among: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Candidate:
    """How to build one. It is called on every rank.

    Attributes:
        name: as a table shows it; hpnb's begin with "hpnb".
        same: whether weights begin with the same values as all others', so that losses can be compared.
        extra: only asked for by --thorough.
    """

    name: str
    build: Callable[[Task, Shape], Program]
    same: bool = True
    extra: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith("hpnb")
