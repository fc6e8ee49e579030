"""One step of one rank: its list of actions, one after the other.

    for action in the list:
        post the receives that it and the next one need        nothing that is sent waits for its receiver
        wait for what it needs, compute, send the result       the process waits for nothing

    F   the activation from the stage before   ->  the stage's layers  ->  to the stage after
    I   the gradient from the stage after      ->  backward            ->  to the stage before
    W   what I has put aside                   ->  weight gradients
    B   as I, with W in it

On a GPU everything here only launches work: kernels wait for transfers and the process does not, so it is
always ahead of the device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from hpnb.overlapped_pair import Segments, recording_segments, run_pair
from hpnb.pipeline_parallel.boundary import Boundary, StepBoundaries, gradient_edges, tensors_in
from hpnb.pipeline_parallel.cuda_graphs import StepGraphs
from hpnb.pipeline_parallel.grad_ready import GradReady
from hpnb.pipeline_parallel.loss import BatchLoss
from hpnb.pipeline_parallel.rank_schedule import RankSchedule
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.stage_graph import StageGraph
from hpnb.pipeline_parallel.step_messages import StepMessages
from hpnb.pipeline_parallel.transfers import MessageQueue, Pair
from hpnb.ranks.current_rank import device, world_size
from hpnb.ranks.devices import usable_cores
from hpnb.ranks.gpu_turns import gpu_turns
from hpnb.record.recorder import Recorder, recording
from hpnb.record.timeline import Event

AHEAD = 1  # actions whose receives are posted before their turn


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What one step of one rank works with.

    Attributes:
        rank_schedule: the actions.
        run_stage: (stage, what the stage before gave, inputs) -> what this stage gives.
        microbatches: the inputs of each.
        queues: to and from other ranks.
        boundaries: the shapes of what passes between stages, as far as they are known.
        split_backward: puts weight gradients aside.
        loss: on the rank of the last stage, unless there is none to compute.
        sends_correction: whether gradients are multiplied by the loss's correction (`loss.py`), which then
            travels with one of them.
        grad_ready: None runs forwards only.
        recorder: notes when each action ran.
        keep_outputs: keep the outputs of the last stage.
        pairs: the steps whose forward overlaps the backward after it (`overlapped_pairs.py`).
        graphs: what is replayed instead of run (`cuda_graphs.py`).
    """

    rank_schedule: RankSchedule
    run_stage: Callable[[int, Any, Any], Any]
    microbatches: Sequence[Any]
    queues: Mapping[Pair, MessageQueue]
    boundaries: StepBoundaries
    split_backward: SplitBackward
    loss: BatchLoss | None = None
    sends_correction: bool = False
    grad_ready: GradReady | None = None
    recorder: Recorder | None = None
    keep_outputs: bool = True
    pairs: frozenset[int] = frozenset()
    graphs: StepGraphs = field(default_factory=StepGraphs)


class StepExecutor:
    """Runs one rank's part of a schedule once.

    Attributes:
        outputs: {microbatch: what the last stage gave}, where they are kept.
        seconds: {action: its CPU time} where ranks share cores, {action: its GPU time, measured alone} where
            they share a GPU; only of a recorded step.
        communications: {action: what it communicated within its stage}, where ranks share a GPU.
        segments: {action: its CPU time between the messages of experts}, of a recorded step.
    """

    def __init__(self, config: StepConfig) -> None:
        self._config, self._grad_ready = config, config.grad_ready
        self._schedule, self._last_stage = config.rank_schedule.schedule, config.rank_schedule.last_stage
        self._messages = StepMessages(
            config.rank_schedule, config.queues, config.boundaries, config.sends_correction
        )
        self._contended, self._turns = contended(), gpu_turns()
        # Of each (stage, microbatch) whose backward is to come: where it starts and with which gradients, as
        # far as they are known; and the leaves whose gradients go back to the stage before.
        self._starts: dict[tuple[int, int], tuple[list[GradientEdge], list[torch.Tensor]]] = {}
        self._leaves: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._input_grads: dict[tuple[int, int], list[torch.Tensor]] = {}  # of replayed backwards
        self._loss_leaves: dict[int, list[torch.Tensor]] = {}  # what an eager loss of a graph's outputs takes
        self.outputs: dict[int, Any] = {}
        self.seconds: dict[Action, float] = {}
        self.communications: dict[Action, list[Event]] = {}
        self.segments: dict[Action, Segments] = {}

    @property
    def by_turns(self) -> bool:
        """Whether ranks share a GPU, so that actions are measured by turns."""
        return self._turns is not None

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that this rank has sent to another."""
        return self._messages.largest

    def run(self) -> None:
        """Go through the actions, and wait until all gradients are reduced or on their way."""
        recorder = self._config.recorder
        with (
            torch.set_grad_enabled(self._grad_ready is not None),
            nullcontext() if recorder is None else recording(recorder),
            _no_garbage_collection(),
        ):
            self._run_actions()
            self._config.boundaries.commit()
            self._messages.flush()
            if self._grad_ready is not None:
                self._grad_ready.finish()

    def _run_actions(self) -> None:
        actions, step = self._config.rank_schedule.actions, 0
        while step < len(actions):
            pair = self._pair_at(step)
            group = actions[step : step + (2 if pair else 1)]
            for ahead, coming in enumerate(actions[step : step + len(group) + AHEAD]):
                self._messages.post_receives(coming, urgent=ahead < len(group))
            if pair:
                self._run_pair(*group)
            else:
                self._run_action(group[0])
            step += len(group)

    def _run_action(self, action: Action) -> None:
        match action.op:
            case "F":
                self._give_activations(action, self._forward(action, self._take_activations(action)))
            case "W":
                self._weight_gradients(action)
            case "I" | "B":
                starts, grads = self._take_gradients(action)
                self._backward(action, starts, grads)
                self._give_gradients(action)

    def _pair_at(self, step: int) -> bool:
        """Whether the action at `step` overlaps the next one. Ranks that share a GPU take turns with it
        instead, and a backward that carries the loss's correction waits until this is known."""
        if step not in self._config.pairs or self._turns is not None or self._grad_ready is None:
            return False
        return not self._messages.carries_correction(self._config.rank_schedule.actions[step + 1])

    def _run_pair(self, forward: Action, backward: Action) -> None:
        """A forward and a backward that do not need each other: one computes while the other's messages
        travel."""
        value, (starts, grads) = self._take_activations(forward), self._take_gradients(backward)
        value, _ = run_pair(
            lambda: self._forward(forward, value), lambda: self._backward(backward, starts, grads)
        )
        self._give_activations(forward, value)
        self._give_gradients(backward)

    # --- the actions -----------------------------------------------------------------------------------

    def _take_activations(self, action: Action) -> Any:
        """What the stage before has given, if there is one."""
        stage, m = action.stage, action.microbatch
        if stage == 0:
            return None
        (before,) = self._schedule.needs(action)
        boundary = self._config.boundaries.get(stage - 1, m)
        assert boundary is not None, "its receive was posted, for which the shapes had to be known"
        value = boundary.assemble(self._messages.take(before))
        if self._grad_ready is not None:
            self._leaves[stage, m] = boundary.with_gradient(tensors_in(value))
        return value

    def _forward(self, action: Action, value: Any) -> Any:
        stage, m = action.stage, action.microbatch
        graphs, inputs = self._config.graphs, self._config.microbatches[m]
        with self._recorded(action):
            if (graph := graphs.graphs.get((stage, m))) is not None:
                self._leaves.pop((stage, m), None)
                value, result = graph.forward(value, inputs)
                self._starts[stage, m] = [], []
                if stage == self._last_stage:
                    self._finish_replayed_forward(m, graph, value, result)
                return value
            with graphs.watch_forward(stage):
                value = self._config.run_stage(stage, value, inputs)
                if stage == self._last_stage:
                    self._finish_forward(m, value)
        return value

    def _give_activations(self, action: Action, value: Any) -> None:
        stage, m = action.stage, action.microbatch
        if stage == self._last_stage:
            return
        tensors = tensors_in(value)
        if (stage, m) not in self._config.graphs.graphs:
            if self._grad_ready is not None:
                self._starts[stage, m] = gradient_edges(tensors), []
            self._messages.announce(action, Boundary.of(value))
        self._messages.give(action, [tensor.detach() for tensor in tensors])

    def _finish_forward(self, m: int, outputs: Any) -> None:
        """The last stage has computed its outputs: compute the loss of microbatch `m`."""
        if self._config.keep_outputs:
            self.outputs[m] = _detach(outputs)
        if self._config.loss is None:
            return
        value, gradient = self._config.loss(m, outputs)
        if self._grad_ready is not None:
            edges = gradient_edges([value])
            if not edges and any(t.requires_grad for t in tensors_in(outputs)):
                raise ValueError(
                    "the loss has no gradient, though the outputs have: compute it from them, attached"
                )
            self._starts[self._last_stage, m] = edges, [gradient] * len(edges)

    def _finish_replayed_forward(self, m: int, graph: StageGraph, outputs: Any, result: Any) -> None:
        """A graph of the last stage has computed its outputs, and the loss if that could be captured."""
        assert self._config.loss is not None
        if not graph.has_loss:
            tensors = tensors_in(outputs)
            trained = zip(tensors, graph.trained_outputs, strict=True)
            self._loss_leaves[m] = [t.requires_grad_() for t, takes_gradient in trained if takes_gradient]
            self._finish_forward(m, outputs)
            return
        if self._config.keep_outputs:
            self.outputs[m] = outputs
        _, gradient = self._config.loss.accept(m, outputs, result)
        self._starts[self._last_stage, m] = [], [gradient]

    def _take_gradients(self, action: Action) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where the backward starts, and with which gradients."""
        assert self._grad_ready is not None
        starts, grads = self._starts.pop((action.stage, action.microbatch))
        carries_correction = self._messages.carries_correction(action)
        if action.stage < self._last_stage:
            grads = self._messages.take(self._schedule.needs(action)[-1])
            if carries_correction:
                self._grad_ready.correction = grads.pop()
        elif carries_correction:
            assert self._config.loss is not None
            self._grad_ready.correction = self._config.loss.correction()
        return starts, grads

    def _backward(self, action: Action, starts: list[GradientEdge], grads: list[torch.Tensor]) -> None:
        grad_ready, split_backward = self._grad_ready, self._config.split_backward
        assert grad_ready is not None
        graphs, work = self._config.graphs, (action.stage, action.microbatch)
        with self._recorded(action):
            if (graph := graphs.graphs.get(work)) is not None:
                if starts:  # of a loss that runs eagerly
                    _run_backward(starts, grads)
                    leaves = self._loss_leaves.pop(action.microbatch)
                    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
                self._input_grads[work] = graph.backward(grads)
                if action.op == "B":
                    grad_ready.complete(action)
            elif action.op == "I":
                with split_backward.deferring(work):
                    _run_backward(starts, grads)
            else:
                with grad_ready.during_backward(action, split_backward):
                    _run_backward(starts, grads)

    def _give_gradients(self, action: Action) -> None:
        if action.stage == 0:
            return
        work = action.stage, action.microbatch
        if work in self._input_grads:
            result = self._input_grads.pop(work)
        else:
            leaves = self._leaves.pop(work)
            result = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        if self._messages.carries_correction(action):
            assert self._grad_ready is not None
            assert self._grad_ready.correction is not None
            result.append(self._grad_ready.correction)
        self._messages.give(action, result)

    def _weight_gradients(self, action: Action) -> None:
        assert self._grad_ready is not None
        graph = self._config.graphs.graphs.get((action.stage, action.microbatch))
        with self._recorded(action):
            if graph is not None:
                graph.add_weight_gradients()
                self._grad_ready.complete(action)
            else:
                self._grad_ready.add_weight_gradients(action, self._config.split_backward)

    # --- what is recorded ----------------------------------------------------------------------------------

    def _recorded(self, action: Action) -> AbstractContextManager[None]:
        if self._config.recorder is None:
            return nullcontext()
        span = self._config.recorder.span(action.op, action.stage, action.microbatch)
        if self._turns is not None:
            return self._with_gpu_time(action, span)
        return span if device().type == "cuda" else self._with_cpu_time(action, span)

    @contextmanager
    def _with_gpu_time(self, action: Action, span: AbstractContextManager[None]) -> Iterator[None]:
        assert self._turns is not None
        assert self._config.recorder is not None
        since = self._config.recorder.num_spans()
        with self._turns.turn() as turn, span:
            yield
        self.seconds[action] = turn.seconds
        self.communications[action] = self._config.recorder.communications(since)

    @contextmanager
    def _with_cpu_time(self, action: Action, span: AbstractContextManager[None]) -> Iterator[None]:
        began = time.thread_time()
        with span, recording_segments(action, self.segments):
            yield
        if self._contended:
            self.seconds[action] = time.thread_time() - began


@cache
def contended() -> bool:
    """Whether there are more ranks than cores, so that wall clocks would show who got a core."""
    return device().type == "cpu" and world_size() > usable_cores()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Let Python collect garbage after the step: in the middle of it a rank would delay all others."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run_backward(starts: Sequence[GradientEdge], grads: Sequence[torch.Tensor]) -> None:
    if starts:
        torch.autograd.backward(starts, grads)


def _detach(outputs: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs)
