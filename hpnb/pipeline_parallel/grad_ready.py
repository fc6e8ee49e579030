"""When a gradient is complete, so that data parallelism may reduce it.

A parameter's gradient grows with every microbatch. It is complete after the last W (or B) of its stage, and
only then may it be reduced over the replicas: once a step, bucket by bucket, while the last backwards of the
pipeline still run. Which call notices it depends on how that last action runs:

    B, eager        `during_backward`: autograd's hooks report every gradient as it comes
    W, eager        `add_weight_gradients`: SplitBackward reports every gradient as it comes
    W or B, graph   `close_stage`: no hook sees a replay, so all gradients of the stage are reported after it

The gradient of a tied weight is complete once all stages that use it have ended. If they are on several
ranks, `finish` then sums it over these ranks (`tied_weights.py`): one all-reduce a weight, at the end of
every step, which nothing overlaps, whether gradients are reduced over the replicas or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpnb.gradients import GradientSink, hook_gradients, hook_owner_of
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.tied_weights import sum_tied_gradient

Gradients = GradientSink | nn.Module | Callable[[nn.Module], Any] | None


class GradReady:
    """Knows which action completes which gradients on this rank, and calls the sink's `ready` for them.

    A step calls `begin`, then `use_static_grads` if it replays CUDA graphs, then one of the three methods
    above for each of its W and B. At the end it calls `finish`, or `drop` if it has failed. Each stage of
    this rank that has a parameter is one use of it, and its gradient is complete when all uses are closed.

    Args:
        by_stage: {stage: its trainable parameters}, of this rank's stages.
        tied: {parameter: the ranks that have it}, for those on several; in the same order on all.

    Attributes:
        parameters: the trainable parameters of this rank, once each.
        correction: what every gradient of this step is multiplied by (`loss.py`). None until it is known, and
            in steps without one.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        by_stage: Mapping[int, Sequence[nn.Parameter]],
        tied: Mapping[nn.Parameter, Axis],
    ) -> None:
        self.follow(actions)
        self.correction: torch.Tensor | None = None
        self._by_stage, self._tied = by_stage, tied
        self._uses = Counter(p for of_stage in by_stage.values() for p in of_stage)  # stages with it
        self.parameters = list(self._uses)
        self._open_uses = Counter[nn.Parameter]()
        self._complete: set[nn.Parameter] = set()
        self.set_sink(None)
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}  # gradients that earlier steps have left
        self._without_grad: list[nn.Parameter] = []
        self._reduces = self._tracks_readiness = False

    def follow(self, actions: Sequence[Action]) -> None:
        """Take the actions of the next step, of the same stages."""
        self._last_action = {a.stage: a for a in actions if a.op in ("W", "B")}

    def set_sink(self, sink: GradientSink | None) -> None:
        """Call `sink` for each complete gradient from now on."""
        self.sink = sink
        # The parameter whose .grad grows: with ZeRO 3 the unsharded one, which only the sink knows.
        gradient_holder = getattr(sink, "gradient_holder", lambda p: p)
        self._holders: dict[nn.Parameter, nn.Parameter] = {p: gradient_holder(p) for p in self.parameters}
        self._parameter_of = {holder: p for p, holder in self._holders.items()}

    def check_hook_owner(self, microbatches: int) -> None:
        """Refuse a step without a sink if hooks would have gradients reduced after each microbatch."""
        first = self.parameters[:1]  # all are claimed together
        if self.sink is None and first and (owner := hook_owner_of(first[0])) is not None:
            shards = getattr(owner, "shards_parameters", False)
            who = "fully_shard" if shards else f"a {type(owner).__name__}"
            what = "hpnb.data_parallel.sink(pipe.module)" if shards else "it"
            raise ValueError(
                f"{who} reduces these gradients after every backward, and there are {microbatches} in a "
                f"step: set pipe.gradients to {what}"
            )

    def begin(self, reduce: bool, corrects: bool) -> None:
        """A step begins.

        Where this step's gradients are multiplied by a correction, or summed over the ranks of a tied weight,
        those that earlier steps have left are taken off their parameters first: .grad holds this step alone
        until its gradient is complete, and then the sum of both. `drop` puts them back.

        Args:
            reduce: this step's gradients are handed to the sink.
        """
        self._reduces, self.correction = reduce and self.sink is not None, None
        self._tracks_readiness = self._reduces or corrects or bool(self._tied)
        self._open_uses, self._complete, self._earlier = self._uses.copy(), set(), {}
        if (before_accumulation := getattr(self.sink, "before_accumulation", None)) is not None:
            for p in self.parameters:  # also without a gradient: what was reduced may have been zeroed since
                before_accumulation(p)
        self._without_grad = [holder for holder in self._holders.values() if holder.grad is None]
        for p, holder in self._holders.items():
            if holder.grad is not None and (corrects or p in self._tied):
                self._earlier[p], holder.grad = holder.grad, None

    @torch.no_grad()
    def use_static_grads(self, static_grads: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Make the tensors to which CUDA graphs add the .grad of their parameters. Captures come between
        `begin` and this: they run a sink's hooks, and `begin` has told the sink that gradients grow."""
        zeroed = []
        for p, grad in static_grads.items():
            if p.grad is grad:
                continue
            if p.grad is not None:  # of an earlier step
                grad.copy_(p.grad)
            else:
                zeroed.append(grad)
                parameter = self._parameter_of.get(p, p)  # of a holder, with ZeRO 3
                if self._earlier.get(parameter) is grad:
                    self._earlier[parameter] = grad.clone()
            p.grad = grad
        if zeroed:
            torch._foreach_zero_(zeroed)

    @contextmanager
    def during_backward(self, action: Action) -> Iterator[None]:
        """Around an eager backward B. If it completes gradients, the sink gets each of them as it comes."""
        if not self._ends_stage(action):
            yield
            return
        arrived: set[nn.Parameter] = set()

        def on_accumulated(holder: nn.Parameter) -> None:
            if holder in arrived:
                raise RuntimeError(
                    f"a gradient of shape {tuple(holder.shape)} came twice in one backward; with checkpoints "
                    "use use_reentrant=False"
                )
            arrived.add(holder)
            self._close_use(self._parameter_of[holder])

        holders = [self._holders[p] for p in self._by_stage[action.stage]]
        hooks = hook_gradients(holders, on_accumulated)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for holder in holders:  # those that only earlier microbatches have used
            if holder.grad is not None and holder not in arrived:
                on_accumulated(holder)

    def add_weight_gradients(self, action: Action, split_backward: SplitBackward) -> None:
        """An eager W: add the weight gradients that I has put aside. If it completes gradients, the sink gets
        each of them as it comes; first those that wait for no W."""
        key = (action.stage, action.microbatch)
        if not self._ends_stage(action):
            split_backward.add_weight_gradients(key)
            return
        waiting = split_backward.pending(key)
        for p in self._by_stage[action.stage]:
            if self._holders[p] not in waiting and self._holders[p].grad is not None:
                self._close_use(p)
        split_backward.add_weight_gradients(key, lambda holder: self._close_use(self._parameter_of[holder]))

    def close_stage(self, action: Action) -> None:
        """A replayed W or B is launched: the sink gets the gradients that it completes."""
        if self._ends_stage(action):
            for p in self._by_stage[action.stage]:
                if self._holders[p].grad is not None:
                    self._close_use(p)

    def finish(self) -> None:
        """All actions are done: sum the gradients of tied weights over their ranks, and finish the sink."""
        for p, axis in self._tied.items():
            holder = self._holders.get(p)
            if holder is None or not p.requires_grad:  # frozen, as it is on all of them
                continue
            if self._open_uses[p] > 0:  # a stage of this rank has it and left no gradient
                self._multiply_by_correction(p)
            sum_tied_gradient(holder, axis)
            self._hand_to_sink(p)
        for p in self.parameters if self._tracks_readiness else ():
            if p not in self._complete:  # some stage of this rank that has it left no gradient
                self._multiply_by_correction(p)
                self._restore_earlier(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.finish()

    def drop(self) -> None:
        """The step failed: remove the gradients that it began, and put back those that `begin` took away. A
        gradient from before that `begin` left in place keeps what this step has added."""
        for holder in self._without_grad:
            holder.grad = None
        for p, holder in self._holders.items():
            holder.grad = self._earlier.pop(p, holder.grad)
        if self.sink is not None:
            self.sink.drop()

    # --- inside ------------------------------------------------------------------------------------------

    def _ends_stage(self, action: Action) -> bool:
        """Whether `action` is the last of its stage, and somebody has to know."""
        return self._tracks_readiness and self._last_action[action.stage] == action

    def _close_use(self, p: nn.Parameter) -> None:
        """One of the stages of this rank that use `p` has ended."""
        self._open_uses[p] -= 1
        if self._open_uses[p] == 0:
            self._multiply_by_correction(p)
            if p not in self._tied:  # else `finish` does
                self._hand_to_sink(p)

    def _hand_to_sink(self, p: nn.Parameter) -> None:
        """The gradient of this step is final."""
        self._complete.add(p)
        self._restore_earlier(p)
        if self._reduces:
            assert self.sink is not None
            self.sink.ready(p)

    def _multiply_by_correction(self, p: nn.Parameter) -> None:
        grad = self._holders[p].grad
        if self.correction is not None and grad is not None:
            grad.mul_(self.correction.to(grad.dtype))

    def _restore_earlier(self, p: nn.Parameter) -> None:
        """Add what earlier steps have left."""
        holder, earlier = self._holders[p], self._earlier.pop(p, None)
        if earlier is not None:
            holder.grad = earlier if holder.grad is None else holder.grad.add_(earlier)


def take_over_reduction(gradients: Gradients, module: nn.Module) -> GradientSink | None:
    """The sink of whatever reduces gradients. From now on the pipeline calls it: a function that makes a
    reducer is called, and a reducer's hooks are removed, which would reduce after every microbatch."""
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
