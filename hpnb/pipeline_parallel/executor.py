"""One step of one rank: its list of actions, one after the other.

    for action in the list:
        post the receives that it and the next one need        nothing that is sent waits for its receiver
        wait for what it needs, compute, send what it made     the host waits for nothing

    F   the activation from the stage before   ->  the stage's layers  ->  to the stage after
    I   the gradient from the stage after      ->  backward            ->  to the stage before
    W   what I has put aside                   ->  weight gradients
    B   as I, with W in it

What is sent where, and in which order, is read off the schedule (`Schedule.queues`). On a GPU everything here
only launches: kernels wait for transfers, the host does not, and so it is always ahead of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from hpnb.pipeline_parallel import boundary
from hpnb.pipeline_parallel.boundary import Boundary
from hpnb.pipeline_parallel.grad_ready import GradReady
from hpnb.pipeline_parallel.loss import Loss
from hpnb.pipeline_parallel.schedule import Action, Schedule
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.transfers import Arrival, MessageQueue, Pair, Shape
from hpnb.ranks.current_rank import device, world_size
from hpnb.ranks.devices import usable_cores
from hpnb.record.recorder import Recorder

AHEAD = 1  # actions whose receives are posted before their turn
Known = dict[tuple[int, Any], Boundary]  # by stage and signature of a microbatch
Stage = Callable[[int, Any, Any], Any]  # (number, what the stage before gave, inputs) -> what this one gives


class RankSchedule:
    """What one rank's part of a schedule amounts to, whatever the batch.

    Attributes:
        row: the rank's actions.
        place: {an action whose result travels: (the pair of ranks, its place among their messages)}.
        late: the microbatch with whose gradient the correction travels: the first one that goes back after
            the last stage has been through all its forwards. -1 if there are forwards alone.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.row = schedule, rank, schedule.actions[rank]
        self.place = {a: (pair, i) for pair, row in schedule.queues.items() for i, a in enumerate(row)}
        last = schedule.stages - 1
        ends = [a for a in schedule.actions[schedule.rank_of[last]] if a.stage == last]
        forwards = [i for i, a in enumerate(ends) if a.op == "F"]
        self.late = next((a.microbatch for a in ends[forwards[-1] :] if a.op in ("I", "B")), -1)


class StepExecution:
    """Runs one rank's part of a schedule once.

    Args:
        stages: computes a stage of this rank.
        inputs: of each microbatch.
        signatures: of each microbatch's inputs.
        known: what passes between stages, as far as it is known; it learns.
        loss: on the rank of the last stage, unless there is none to compute.
        corrects: whether gradients are corrected (see `Loss`); None if that has to be said first.
        completion: None for forwards only.
        keep: whether to keep the outputs of the last stage.
    """

    def __init__(
        self,
        plan: RankSchedule,
        stages: Stage,
        queues: Mapping[Pair, MessageQueue],
        inputs: Sequence[Any],
        signatures: Sequence[Any],
        known: Known,
        loss: Loss | None,
        corrects: bool | None,
        completion: GradReady | None,
        split: SplitBackward,
        recorder: Recorder | None,
        keep: bool,
    ) -> None:
        self._plan, self._schedule, self._row = plan, plan.schedule, plan.row
        self._stages, self._queues, self._inputs, self._signatures = stages, queues, inputs, signatures
        self._known = known
        self._told: dict[tuple[int, int], Boundary] = {}  # (stage, microbatch): what this step has learned
        self._loss, self._completion, self._split = loss, completion, split
        self._recorder, self._keep, self._contended = recorder, keep, contended()
        self._says_whether, self.corrects = corrects is None, corrects
        self._late, self._place = plan.late, plan.place
        self.outputs: dict[int, Any] = {}
        self.cpu_seconds: dict[Action, float] = {}
        # What is under way, by (stage, microbatch): where its backward starts and with which gradients, if
        # they are known; and the leaves whose gradients go back to the stage before.
        self._starts: dict[tuple[int, int], tuple[list[GradientEdge], list[torch.Tensor]]] = {}
        self._leaves: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._given: dict[Action, list[torch.Tensor]] = {}  # by an action of this rank, for another of it
        self._arrivals: dict[Action, Arrival] = {}
        self._posted = dict.fromkeys(queues, 0)

    def run(self) -> None:
        for step, action in enumerate(self._row):
            for ahead in range(1 + AHEAD):
                if step + ahead < len(self._row):
                    self._post(self._row[step + ahead], urgent=ahead == 0)
            match action.op:
                case "F":
                    self._forward(action)
                case "W":
                    self._weights(action)
                case _:
                    self._backward(action)
        self._known.update({(s, self._signatures[m]): made for (s, m), made in self._told.items()})
        for queue in self._queues.values():
            queue.flush()

    # --- the actions -----------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        value = None
        if s > 0:
            (before,) = self._schedule.needs(action)
            passed = self._boundary(s - 1, m)
            assert passed is not None, "what is taken was posted, and what was posted is known"
            value = passed.put_together(self._take(before))
            if self._completion is not None:
                self._leaves[s, m] = passed.backwards(boundary.tensors_of(value))
        with self._span(action):
            value = self._stages(s, value, self._inputs[m])
            if s == self._schedule.stages - 1:
                self._end(m, value)
                return
        tensors = boundary.tensors_of(value)
        if self._completion is not None:
            self._starts[s, m] = boundary.edges(tensors), []
        self._say(action, Boundary.of(value))
        self._give(action, [tensor.detach() for tensor in tensors])

    def _end(self, m: int, outputs: Any) -> None:
        """The last stage has computed its outputs."""
        if self._keep:
            self.outputs[m] = _detached(outputs)
        if self._loss is None:
            return
        start, seed = self._loss(m, outputs)
        if self._completion is not None:
            found = boundary.edges([start])
            if not found and any(t.requires_grad for t in boundary.tensors_of(outputs)):
                raise ValueError(
                    "the loss has no gradient, though the outputs have: compute it from them, attached"
                )
            self._starts[self._schedule.stages - 1, m] = found, [seed] * len(found)

    def _backward(self, action: Action) -> None:
        s, m = action.stage, action.microbatch
        assert self._completion is not None
        starts, grads = self._starts.pop((s, m))
        if s == self._schedule.stages - 1:
            if m == self._late:
                self._learn_correction()
        else:
            grads = self._take(self._schedule.needs(action)[-1])
            if m == self._late and self.corrects:
                self._completion.correction = grads.pop()
        with self._span(action):
            if action.op == "I":
                with self._split.deferring((s, m)):
                    _run_backward(starts, grads)
            else:
                with self._completion.during(action, self._split):
                    _run_backward(starts, grads)
        if s > 0:
            leaves = self._leaves.pop((s, m))
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            if m == self._late and self.corrects:
                assert self._completion.correction is not None
                found.append(self._completion.correction)
            self._give(action, found)

    def _weights(self, action: Action) -> None:
        assert self._completion is not None
        with self._span(action):
            self._completion.weights(action, self._split)

    # --- what passes between stages ----------------------------------------------------------------------

    def _boundary(self, stage: int, microbatch: int) -> Boundary | None:
        return self._told.get((stage, microbatch)) or self._known.get((stage, self._signatures[microbatch]))

    def _say(self, action: Action, made: Boundary) -> None:
        """Tell the next stage what is coming, if it cannot know; make sure of it, if it does."""
        known = self._known.get((action.stage, self._signatures[action.microbatch]))
        if known is None:
            self._told[action.stage, action.microbatch] = made
            if action in self._place:
                self._queues[self._place[action][0]].send_object(made)
        elif known != made:
            raise ValueError(
                f"stage {action.stage} gave {made} for a microbatch like one for which it gave {known}; "
                "where parameters are frozen or thawed between steps, call .forget() on every rank"
            )

    def _like(self, message: Action, urgent: bool) -> Sequence[Shape] | None:
        """What `message` consists of; None if that cannot be known yet."""
        s, m = message.stage, message.microbatch
        queue = self._queues[self._place[message][0]]
        if message.op == "F":
            passed = self._boundary(s, m)
            if passed is None and urgent:
                passed = self._told[s, m] = queue.receive_object()
            return None if passed is None else passed.shapes
        passed = self._boundary(s - 1, m)
        if passed is None:
            return None
        if m != self._late:
            return passed.gradients
        if self._says_whether:
            if not urgent:
                return None
            self.corrects = queue.receive_object()
        return [*passed.gradients, *[(torch.Size(), torch.float64)] * bool(self.corrects)]

    def _post(self, action: Action, urgent: bool) -> None:
        """Make room for what `action` needs from another rank, and for all that is sent before it."""
        for need in self._schedule.needs(action):
            if need not in self._place or self._place[need][0][1] != self._plan.rank:
                continue
            pair, place = self._place[need]
            row = self._schedule.queues[pair]
            while self._posted[pair] <= place:
                message = row[self._posted[pair]]
                like = self._like(message, urgent)
                if like is None:
                    return
                self._arrivals[message] = self._queues[pair].post(like)
                self._posted[pair] += 1

    def _give(self, action: Action, tensors: list[torch.Tensor]) -> None:
        """Hand on what `action` has made, to another rank or to this one."""
        if action not in self._place:
            self._given[action] = tensors
            return
        queue = self._queues[self._place[action][0]]
        if self._says_whether and action.op != "F" and action.microbatch == self._late:
            queue.send_object(self.corrects)
        queue.send(tensors)

    def _take(self, message: Action) -> list[torch.Tensor]:
        if message in self._arrivals:
            return self._arrivals.pop(message).wait()
        return self._given.pop(message)

    def _learn_correction(self) -> None:
        assert self._loss is not None
        assert self._completion is not None
        self.corrects = self._loss.counts_itself
        if self.corrects:
            self._completion.correction = self._loss.correction()

    # --- what is recorded ----------------------------------------------------------------------------------

    def _span(self, action: Action) -> AbstractContextManager[None]:
        if self._recorder is None:
            return nullcontext()
        span = self._recorder.span(action.op, action.stage, action.microbatch)
        return self._with_cpu_time(action, span) if self._contended else span

    @contextmanager
    def _with_cpu_time(self, action: Action, span: AbstractContextManager[None]) -> Iterator[None]:
        began = time.thread_time()
        with span:
            yield
        self.cpu_seconds[action] = time.thread_time() - began


@cache
def contended() -> bool:
    """Whether ranks share cores, so that a clock on the wall says who got one."""
    return device().type == "cpu" and world_size() > usable_cores()


def _run_backward(starts: Sequence[GradientEdge], grads: Sequence[torch.Tensor]) -> None:
    if starts:
        torch.autograd.backward(starts, grads)


def _detached(outputs: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs)
