"""When a gradient is complete, and who is told.

A parameter's gradient grows with every microbatch. It is complete after the last W (or B) of its stage, and
only then may it be reduced over the replicas: once a step, bucket by bucket, while the last backwards of the
pipeline still run. A parameter with homes on two stages is complete when both have ended; if they are on two
ranks, when these have added up what each of them has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.gradients import GradientSink, attach
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.split_backward import SplitBackward

Gradients = GradientSink | nn.Module | Callable[[nn.Module], Any] | None


class GradReady:
    """Knows which action completes which gradients on this rank, and tells the sink.

    Args:
        row: this rank's actions.
        parameters: {stage: its trained parameters}, of this rank's stages.
        elsewhere: {parameter: the ranks that hold it}, for those on several; in the same order on all.

    Attributes:
        every: the trained parameters of this rank.
    """

    def __init__(
        self,
        row: Sequence[Action],
        parameters: Mapping[int, Sequence[nn.Parameter]],
        elsewhere: Mapping[nn.Parameter, Axis],
    ) -> None:
        self.follow(row)
        self.correction: torch.Tensor | None = None
        self._parameters, self._elsewhere = parameters, elsewhere
        self.every = list({p: None for held in parameters.values() for p in held})
        self._homes = Counter(id(p) for held in parameters.values() for p in held)
        self._open = Counter[int]()
        self._told: set[int] = set()
        self.set_sink(None)
        self._before: dict[int, torch.Tensor] = {}
        self._empty: list[nn.Parameter] = []
        self._reduces = self._matters = False

    def follow(self, row: Sequence[Action]) -> None:
        """The actions of the next step, of the same stages."""
        self.last = {a.stage: a for a in row if a.op in ("W", "B")}

    def set_sink(self, sink: GradientSink | None) -> None:
        """Whom to tell."""
        self.sink = sink
        # Where gradients grow: with ZeRO-3 those of the whole parameters, which only the sink knows.
        holder = getattr(sink, "holder", lambda p: p)
        self._held: dict[int, nn.Parameter] = {id(p): holder(p) for p in self.every}
        self._home_of = {id(self._held[id(p)]): p for p in self.every}

    def begin(self, reduce: bool, corrects: bool) -> None:
        """A step begins. `reduce` at its end; `corrects` if its gradients may have to be multiplied."""
        self._reduces, self.correction = reduce and self.sink is not None, None
        self._matters = self._reduces or corrects or bool(self._elsewhere)  # whether anybody has to be told
        self._open, self._told, self._before = self._homes.copy(), set(), {}
        if (grows := getattr(self.sink, "grows", None)) is not None:
            for p in self.every:  # those without a gradient too: what was reduced may have been zeroed since
                grows(p)
        self._empty = [held for held in self._held.values() if held.grad is None]
        if len(self._empty) == len(self._held):
            return
        for p in self.every:
            held = self._held[id(p)]
            # What earlier steps have left is not to be multiplied, nor to be added up over its homes again.
            if held.grad is not None and (corrects or p in self._elsewhere):
                self._before[id(p)], held.grad = held.grad, None

    @contextmanager
    def during(self, action: Action, split: SplitBackward) -> Iterator[None]:
        """Around a backward B: if it completes gradients, the sink is told as they come.

        Raises:
            RuntimeError: a gradient came twice, as it does where reentrant checkpoints share a parameter.
        """
        if self.last[action.stage] != action or not self._matters:
            with split.fused():
                yield
            return
        came: set[int] = set()

        def complete(held: nn.Parameter) -> None:
            if id(held) in came:
                raise RuntimeError(
                    f"a gradient of shape {tuple(held.shape)} came twice in one backward; with checkpoints, "
                    "use_reentrant=False"
                )
            came.add(id(held))
            self._one(self._home_of[id(held)])

        here = [self._held[id(p)] for p in self._parameters[action.stage]]
        hooks = attach(here, complete)
        try:
            with split.fused():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        for held in here:  # those that earlier microbatches alone have used
            if held.grad is not None and id(held) not in came:
                complete(held)

    def weights(self, action: Action, split: SplitBackward) -> None:
        """W: add the weight gradients that I has left, and tell the sink of those that are complete."""
        key = (action.stage, action.microbatch)
        if self.last[action.stage] != action or not self._matters:
            split.weights(key)
            return
        waiting = {id(held) for held in split.pending(key)}
        for p in self._parameters[action.stage]:
            held = self._held[id(p)]
            if id(held) not in waiting and held.grad is not None:
                self._one(p)
        split.weights(key, lambda held: self._one(self._home_of[id(held)]))

    def finish(self) -> None:
        """All actions are done: add up what has homes on several ranks, and let the sink come to its end."""
        for p, axis in self._elsewhere.items():
            held = self._held.get(id(p))
            if held is None or not p.requires_grad:  # frozen, as it is on all of them
                continue
            if held.grad is None:
                held.grad = torch.zeros_like(held)
            dist.all_reduce(held.grad, group=axis.group)
            self._tell(p)
        for p in self.every if self._matters else ():
            if id(p) not in self._told:  # no backward of this step has used it to the end
                self._correct(p)
                self._restore(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.finish()

    def drop(self) -> None:
        """The step failed: gradients that it began are gone; one that was there before may have grown."""
        for held in self._empty:
            held.grad = None
        for p in self.every:
            self._held[id(p)].grad = self._before.pop(id(p), self._held[id(p)].grad)
        if self.sink is not None:
            self.sink.drop()

    def _one(self, p: nn.Parameter) -> None:
        """One of its homes on this rank is done with it."""
        self._open[id(p)] -= 1
        if self._open[id(p)] == 0:
            self._correct(p)
            if p not in self._elsewhere:  # else `finish` does
                self._tell(p)

    def _tell(self, p: nn.Parameter) -> None:
        """Its gradient of this step is what it is to be."""
        self._told.add(id(p))
        self._restore(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.ready(p)

    def _correct(self, p: nn.Parameter) -> None:
        grad = self._held[id(p)].grad
        if self.correction is not None and grad is not None:
            grad.mul_(self.correction.to(grad.dtype))

    def _restore(self, p: nn.Parameter) -> None:
        """Add what earlier steps had left."""
        held, before = self._held[id(p)], self._before.pop(id(p), None)
        if before is not None:
            held.grad = before if held.grad is None else held.grad.add_(before)


def sink_of(given: Gradients, module: nn.Module) -> GradientSink | None:
    """Whatever was given as the sink it is, no longer listening to backwards on its own."""
    found: Any = given
    known = hasattr(found, "sink") or hasattr(found, "ready") or isinstance(found, nn.Module)
    if callable(found) and not known:
        found = found(module)
    if hasattr(found, "detach"):
        found.detach()
    sink: GradientSink | None = getattr(found, "sink", found)
    if sink is not None and not all(hasattr(sink, name) for name in ("ready", "finish", "drop", "axis")):
        raise ValueError(
            f"this {type(found).__name__} does not reduce gradients; pass hpnb.DataParallel(pipe.module, "
            "mesh.dp), a hpnb.ZeroOptimizer of pipe.parameters(), hpnb.data_parallel.sink(pipe.module) "
            "where it is fully sharded, or a function that makes one of the module"
        )
    return sink
