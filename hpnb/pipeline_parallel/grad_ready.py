"""When a gradient is complete, so that data parallelism may reduce it.

A parameter's gradient grows with every microbatch. It is complete after the last W (or B) of its stage, and
only then may it be reduced over the replicas: once a step, bucket by bucket, while the last backwards of the
pipeline still run. The gradient of a tied weight is complete once all stages that use it have ended; if they
are on several ranks, once these have summed what each of them has.
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
    """Knows which action completes which gradients on this rank, and calls the sink's `ready` for them.

    Args:
        actions: this rank's.
        parameters: {stage: its trained parameters}, of this rank's stages.
        tied: {parameter: the ranks that have it}, for those on several; in the same order on all.

    Attributes:
        parameters: the trained parameters of this rank, once each.
        correction: what every gradient of this step is multiplied by (`loss.py`), once it is known.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        parameters: Mapping[int, Sequence[nn.Parameter]],
        tied: Mapping[nn.Parameter, Axis],
    ) -> None:
        self.follow(actions)
        self.correction: torch.Tensor | None = None
        self._by_stage, self._tied = parameters, tied
        self.parameters = list({p: None for of_stage in parameters.values() for p in of_stage})
        self._uses = Counter(id(p) for of_stage in parameters.values() for p in of_stage)  # stages with it
        self._open_uses = Counter[int]()
        self._completed: set[int] = set()
        self.set_sink(None)
        self._earlier: dict[int, torch.Tensor] = {}  # gradients that earlier steps have left
        self._without_grad: list[nn.Parameter] = []
        self._reduces = self._must_complete = False

    def follow(self, actions: Sequence[Action]) -> None:
        """Take the actions of the next step, of the same stages."""
        self._last_action = {a.stage: a for a in actions if a.op in ("W", "B")}

    def set_sink(self, sink: GradientSink | None) -> None:
        """Call `sink` for each complete gradient from now on."""
        self.sink = sink
        # Where gradients grow: with ZeRO-3 on the unsharded parameters, which only the sink knows.
        gradient_holder = getattr(sink, "gradient_holder", lambda p: p)
        self._holders: dict[int, nn.Parameter] = {id(p): gradient_holder(p) for p in self.parameters}
        self._parameter_of = {id(self._holders[id(p)]): p for p in self.parameters}

    def begin(self, reduce: bool, corrects: bool) -> None:
        """A step begins. `reduce` at its end; `corrects` if its gradients are multiplied by a correction."""
        self._reduces, self.correction = reduce and self.sink is not None, None
        self._must_complete = self._reduces or corrects or bool(self._tied)
        self._open_uses, self._completed, self._earlier = self._uses.copy(), set(), {}
        if (before_accumulation := getattr(self.sink, "before_accumulation", None)) is not None:
            for p in self.parameters:  # also without a gradient: what was reduced may have been zeroed since
                before_accumulation(p)
        self._without_grad = [holder for holder in self._holders.values() if holder.grad is None]
        if len(self._without_grad) == len(self._holders):
            return
        for p in self.parameters:
            holder = self._holders[id(p)]
            # What earlier steps have left must not be multiplied, nor summed over the ranks of a tied weight.
            if holder.grad is not None and (corrects or p in self._tied):
                self._earlier[id(p)], holder.grad = holder.grad, None

    @contextmanager
    def during_backward(self, action: Action, split_backward: SplitBackward) -> Iterator[None]:
        """Around a backward B: if it completes gradients, the sink hears of each as it comes.

        Raises:
            RuntimeError: a gradient came twice, as it does where reentrant checkpoints share a parameter.
        """
        if self._last_action[action.stage] != action or not self._must_complete:
            with split_backward.fused():
                yield
            return
        arrived: set[int] = set()

        def complete(holder: nn.Parameter) -> None:
            if id(holder) in arrived:
                raise RuntimeError(
                    f"a gradient of shape {tuple(holder.shape)} came twice in one backward; with checkpoints "
                    "use use_reentrant=False"
                )
            arrived.add(id(holder))
            self._close_use(self._parameter_of[id(holder)])

        holders = [self._holders[id(p)] for p in self._by_stage[action.stage]]
        hooks = attach(holders, complete)
        try:
            with split_backward.fused():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        for holder in holders:  # those that only earlier microbatches have used
            if holder.grad is not None and id(holder) not in arrived:
                complete(holder)

    def add_weight_gradients(self, action: Action, split_backward: SplitBackward) -> None:
        """W: add the weight gradients that I has put aside, and call the sink for those that are complete."""
        key = (action.stage, action.microbatch)
        if self._last_action[action.stage] != action or not self._must_complete:
            split_backward.add_weight_gradients(key)
            return
        waiting = {id(holder) for holder in split_backward.pending(key)}
        for p in self._by_stage[action.stage]:
            holder = self._holders[id(p)]
            if id(holder) not in waiting and holder.grad is not None:
                self._close_use(p)

        def ready(holder: nn.Parameter) -> None:
            self._close_use(self._parameter_of[id(holder)])

        split_backward.add_weight_gradients(key, ready)

    def complete(self, action: Action) -> None:
        """A replayed W or B is launched: call the sink for the gradients that it completes. No hook sees them
        one by one."""
        if self._last_action[action.stage] == action and self._must_complete:
            for p in self._by_stage[action.stage]:
                if self._holders[id(p)].grad is not None:
                    self._close_use(p)

    @torch.no_grad()
    def use_static_grads(self, static: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Let the gradients of this step grow in `static`, to which graphs add; after `begin`."""
        zeroed = []
        for p, grad in static.items():
            if p.grad is grad:
                continue
            if p.grad is not None:  # of an earlier step
                grad.copy_(p.grad)
            else:
                zeroed.append(grad)
                if self._earlier.get(id(p)) is grad:
                    self._earlier[id(p)] = grad.clone()
            p.grad = grad
        if zeroed:
            torch._foreach_zero_(zeroed)

    def finish(self) -> None:
        """All actions are done: sum the gradients of tied weights over their ranks, and finish the sink."""
        for p, axis in self._tied.items():
            holder = self._holders.get(id(p))
            if holder is None or not p.requires_grad:  # frozen, as it is on all of them
                continue
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder)
            dist.all_reduce(holder.grad, group=axis.group)
            self._complete(p)
        for p in self.parameters if self._must_complete else ():
            if id(p) not in self._completed:  # no backward of this step has used it to the end
                self._correct(p)
                self._restore_earlier(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.finish()

    def drop(self) -> None:
        """The step failed: remove gradients that it began; one that was there before may have grown."""
        for holder in self._without_grad:
            holder.grad = None
        for p in self.parameters:
            holder = self._holders[id(p)]
            holder.grad = self._earlier.pop(id(p), holder.grad)
        if self.sink is not None:
            self.sink.drop()

    def _close_use(self, p: nn.Parameter) -> None:
        """One of the stages of this rank that use `p` has ended."""
        self._open_uses[id(p)] -= 1
        if self._open_uses[id(p)] == 0:
            self._correct(p)
            if p not in self._tied:  # else `finish` does
                self._complete(p)

    def _complete(self, p: nn.Parameter) -> None:
        """The gradient of this step is final."""
        self._completed.add(id(p))
        self._restore_earlier(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.ready(p)

    def _correct(self, p: nn.Parameter) -> None:
        grad = self._holders[id(p)].grad
        if self.correction is not None and grad is not None:
            grad.mul_(self.correction.to(grad.dtype))

    def _restore_earlier(self, p: nn.Parameter) -> None:
        """Add what earlier steps have left."""
        holder, earlier = self._holders[id(p)], self._earlier.pop(id(p), None)
        if earlier is not None:
            holder.grad = earlier if holder.grad is None else holder.grad.add_(earlier)


def sink_of(gradients: Gradients, module: nn.Module) -> GradientSink | None:
    """The sink of whatever reduces gradients, which no longer listens to backwards itself.

    Raises:
        ValueError: it does not reduce gradients.
    """
    reducer: Any = gradients
    is_reducer = hasattr(reducer, "sink") or hasattr(reducer, "ready") or isinstance(reducer, nn.Module)
    if callable(reducer) and not is_reducer:
        reducer = reducer(module)
    if hasattr(reducer, "hand_over"):
        reducer = reducer.hand_over()
    sink: GradientSink | None = getattr(reducer, "sink", reducer)
    if sink is not None and not all(hasattr(sink, name) for name in ("ready", "finish", "drop", "axis")):
        raise ValueError(
            f"this {type(reducer).__name__} does not reduce gradients; pass hpnb.DataParallel(pipe.module, "
            "mesh.dp), a hpnb.ZeroOptimizer of pipe.parameters(), hpnb.data_parallel.sink(pipe.module) "
            "where it is fully sharded, or a function that makes one of the module"
        )
    return sink
