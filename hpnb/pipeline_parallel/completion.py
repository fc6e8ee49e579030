"""When a gradient is complete, and who is told.

A parameter's gradient grows with every microbatch. It is complete after the last W (or B) of its stage, and
only then may it be reduced over the replicas: once a step, bucket by bucket, while the last backwards of the
pipeline still run. A parameter with homes on two stages is complete when both have ended; if they are on two
ranks, when these have added up what each of them has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from hpnb.gradients import GradientSink, attach
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.split_backward import SplitBackward


class Completion:
    """Knows which action completes which gradients on this rank, and tells the sink.

    Args:
        row: this rank's actions.
        parameters: {stage: its trained parameters}, of this rank's stages.
        elsewhere: {parameter: the ranks that hold it}, for those on several; in the same order on all.
    """

    def __init__(
        self,
        row: Sequence[Action],
        parameters: Mapping[int, Sequence[nn.Parameter]],
        elsewhere: Mapping[nn.Parameter, Axis],
    ) -> None:
        self.sink: GradientSink | None = None
        self.last = {a.stage: a for a in row if a.op in ("W", "B")}
        self._parameters, self._elsewhere = parameters, elsewhere
        self._homes = Counter(id(p) for held in parameters.values() for p in held)
        self.correction: torch.Tensor | None = None
        self._before: dict[int, torch.Tensor] = {}
        self._open = Counter[int]()
        self._told: set[int] = set()
        self._reduces = self._matters = False

    def begin(self, reduce: bool, corrects: bool) -> None:
        """A step begins. `reduce` at its end; `corrects` if its gradients may have to be multiplied."""
        self._reduces, self.correction = reduce and self.sink is not None, None
        self._matters = self._reduces or corrects or bool(self._elsewhere)  # whether anybody has to be told
        self._open = self._homes.copy()
        self._before, self._told = {}, set()
        every = {id(p): p for held in self._parameters.values() for p in held}
        for key, p in every.items():
            if p.grad is None:
                continue
            if self._reduces and hasattr(self.sink, "grows"):
                self.sink.grows(p)  # type: ignore[union-attr]
            # What earlier steps have left is not to be multiplied, nor to be added up over its homes again.
            if p.grad is not None and (corrects or p in self._elsewhere):
                self._before[key], p.grad = p.grad, None

    @contextmanager
    def during(self, action: Action, split: SplitBackward) -> Iterator[None]:
        """Around a backward B: if it completes gradients, the sink is told as they come."""
        if self.last[action.stage] != action or not self._matters:
            with split.fused():
                yield
            return
        held, told = self._parameters[action.stage], set[int]()

        def complete(p: nn.Parameter) -> None:
            if id(p) not in told:
                told.add(id(p))
                self._one(p)

        hooks = attach(held, complete)
        try:
            with split.fused():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        for p in held:
            if p.grad is not None:
                complete(p)

    def weights(self, action: Action, split: SplitBackward) -> None:
        """W: add the weight gradients that I has left, and tell the sink of those that are complete."""
        key = (action.stage, action.microbatch)
        if self.last[action.stage] != action or not self._matters:
            split.weights(key)
            return
        waiting = {id(p) for p in split.pending(key)}
        for p in self._parameters[action.stage]:
            if id(p) not in waiting and p.grad is not None:
                self._one(p)
        split.weights(key, self._one)

    def finish(self) -> None:
        """All actions are done: add up what has homes on several ranks, and let the sink come to its end."""
        for p, axis in self._elsewhere.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=axis.group)
            self._tell(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.finish()
        # What nobody was told of: it got no gradient, or (ZeRO-3) only now from whole ones kept elsewhere.
        for p in {p: None for held in self._parameters.values() for p in held if id(p) not in self._told}:
            self._correct(p)
            if id(p) in self._before:
                before = self._before.pop(id(p))
                p.grad = before if p.grad is None else p.grad.add_(before)

    def drop(self) -> None:
        """The step failed: what was there before stays."""
        for p in (p for held in self._parameters.values() for p in held):
            if id(p) in self._before:
                p.grad = self._before.pop(id(p))
        if self.sink is not None:
            self.sink.drop()

    def _one(self, p: nn.Parameter) -> None:
        """One of its homes on this rank is done with it."""
        self._open[id(p)] -= 1
        if self._open[id(p)] == 0:
            self._correct(p)
            if p not in self._elsewhere:  # else `finish` does
                self._tell(p)

    def _correct(self, p: nn.Parameter) -> None:
        if self.correction is not None and p.grad is not None:
            p.grad.mul_(self.correction.to(p.grad.dtype))

    def _tell(self, p: nn.Parameter) -> None:
        self._told.add(id(p))
        if id(p) in self._before:
            assert p.grad is not None
            p.grad.add_(self._before.pop(id(p)))
        if self._reduces:
            assert self.sink is not None
            self.sink.ready(p)
