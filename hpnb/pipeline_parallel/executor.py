"""One step of one rank: its list of actions, one after the other.

    for action in the list:
        post the receives that it and the next one need        so that no sender waits
        wait for what it needs, compute, send the result       `step_messages.py`, over `transfers.py`

    F   the activation from the stage before   ->  the stage's layers  ->  to the stage after
    I   the gradient from the stage after      ->  backward            ->  to the stage before
    W   what I has put aside                   ->  weight gradients
    B   as I, with W in it

On the last stage F also computes the loss, and I or B starts from it. With a loss that returns (sum, count),
backwards start before the count N of the batch is known, from a guess N' (`loss.py`). The first backward
after the last stage's last forward learns N by an all-reduce over the replicas. The correction N'/N then
travels with that microbatch's gradient, and every rank multiplies its gradients by it (`grad_ready.py`).

Where each rank has a GPU, everything here only launches work: kernels wait for transfers and the process does
not, so it is always ahead of the device. The exceptions are a message of unknown shape, until the sender has
sent the shape, and a first step (`step_queues.py`). On a CPU, and where ranks share a GPU, the process waits
for every tensor that it receives.

A stage that has a CUDA graph (`cuda_graphs.py`) goes through the same steps, and a replay of the graph
computes F, I, W or B. `graphs`, `_input_grads` and `_loss_inputs` are for these stages alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from hpnb.overlapped_pair import run_pair
from hpnb.pipeline_parallel.action_times import ActionTimes
from hpnb.pipeline_parallel.boundary import (
    Boundary,
    StepBoundaries,
    detach_leaf,
    gradient_edges,
    grads_of,
    tensors_in,
)
from hpnb.pipeline_parallel.cuda_graphs import StepGraphs
from hpnb.pipeline_parallel.grad_ready import GradReady
from hpnb.pipeline_parallel.loss import BatchLoss
from hpnb.pipeline_parallel.rank_schedule import RankSchedule
from hpnb.pipeline_parallel.schedule import Action
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.pipeline_parallel.stage_graph import StageGraph
from hpnb.pipeline_parallel.step_messages import StepMessages
from hpnb.pipeline_parallel.transfers import MessageQueue, Route
from hpnb.ranks.current_rank import device, world_size
from hpnb.ranks.devices import usable_cores
from hpnb.ranks.gpu_turns import gpu_turns
from hpnb.record.recorder import Recorder, recording

AHEAD = 1  # actions whose receives are posted before their turn


@dataclass(kw_only=True, eq=False)
class StepExecutor:
    """Runs the actions of one rank once.

    Args:
        run_stage: (stage, activations of the stage before, inputs) -> activations of this stage.
        boundaries: the shapes of what passes between stages, as far as they are known.
        loss: on the rank of the last stage; None on the others.
        sends_correction: whether gradients are multiplied by the loss's correction (`loss.py`), which then
            travels with one of them.
        grad_ready: tracks which gradients are complete, after the last W or B of their stage, and passes them
            to the sink, which reduces them (with ZeRO 3 it also gathers weights); None runs forwards only.
        overlapped_positions: where in the list a forward overlaps the backward after it
            (`overlapped_pairs.py`).
        graphs: what is replayed instead of run (`cuda_graphs.py`).

    Attributes:
        outputs: {microbatch: outputs of the last stage}, if `keep_outputs`.
    """

    rank_schedule: RankSchedule
    run_stage: Callable[[int, Any, Any], Any]
    microbatches: Sequence[Any]
    queues: Mapping[Route, MessageQueue]
    boundaries: StepBoundaries
    split_backward: SplitBackward
    loss: BatchLoss | None = None
    sends_correction: bool = False
    grad_ready: GradReady | None = None
    recorder: Recorder | None = None
    keep_outputs: bool = True
    overlapped_positions: frozenset[int] = frozenset()
    graphs: StepGraphs = field(default_factory=StepGraphs)

    def __post_init__(self) -> None:
        self._schedule, self._last_stage = self.rank_schedule.schedule, self.rank_schedule.last_stage
        self._messages = StepMessages(self.rank_schedule, self.queues, self.boundaries, self.sends_correction)
        self.times = ActionTimes(self.recorder, gpu_turns(), contended())
        self.outputs: dict[int, Any] = {}
        # By (stage, microbatch): the edges where a backward starts, and their gradients as far as they are
        # known. They are the only reference to the autograd graph of a microbatch. `_receive_gradients` takes
        # them out, so activations are freed by the backward, but for what W needs after I.
        self._backward_starts: dict[tuple[int, int], tuple[list[GradientEdge], list[torch.Tensor]]] = {}
        # By (stage, microbatch): the received activations for which a gradient is sent back.
        self._received_inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        # By (stage, microbatch): the gradients that a replayed backward sends back.
        self._input_grads: dict[tuple[int, int], list[torch.Tensor]] = {}
        # By microbatch: outputs of a graph from which the loss is computed eagerly.
        self._loss_inputs: dict[int, list[torch.Tensor]] = {}

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that this rank has sent to another."""
        return self._messages.largest

    def run(self) -> None:
        """Run the actions, and wait until all gradients are reduced (on a GPU: until that is launched)."""
        with (
            torch.set_grad_enabled(self.grad_ready is not None),
            nullcontext() if self.recorder is None else recording(self.recorder),
            _no_garbage_collection(),
        ):
            self._run_actions()
            self.boundaries.commit()
            self._messages.flush()
            if self.grad_ready is not None:
                self.grad_ready.finish()

    def _run_actions(self) -> None:
        actions, position = self.rank_schedule.actions, 0
        while position < len(actions):
            overlaps = self._overlaps_next(position)
            after = position + (2 if overlaps else 1)
            # A receive of this turn may wait until its shape is known; one that is posted ahead must not.
            for action in actions[position:after]:
                self._messages.post_receives(action, blocking=True)
            for action in actions[after : after + AHEAD]:
                self._messages.post_receives(action, blocking=False)
            self._prefetch_weights(position, overlaps)
            if overlaps:
                self._run_pair(*actions[position:after])
            else:
                self._run_action(actions[position])
            position = after

    def _run_action(self, action: Action) -> None:
        match action.op:
            case "F":
                activations = self._receive_activations(action)
                outputs = self._forward(action, activations)
                self._send_activations(action, outputs)
            case "W":
                self._weight_gradients(action)
            case "I" | "B":
                starts, grads = self._receive_gradients(action)
                self._backward(action, starts, grads)
                self._send_gradients(action)

    def _prefetch_weights(self, position: int, overlaps: bool) -> None:
        """ZeRO 3 gathers the first block of the next action while this one computes its last."""
        sink = None if self.grad_ready is None else self.grad_ready.sink
        if sink is None or not sink.shards_parameters:
            return
        actions = self.rank_schedule.actions
        action, later = actions[position], (actions[i] for i in range(position + 1, len(actions)))
        replayed = self.graphs.graphs  # a graph gathers all that it needs, and keeps nothing
        if overlaps or action.op == "W" or (action.stage, action.microbatch) in replayed:
            sink.begin_action(None, None)
            return
        following = next((a for a in later if a.op != "W"), None)
        eager = following is not None and (following.stage, following.microbatch) not in replayed
        coming = (following.stage, following.op == "F") if following is not None and eager else None
        sink.begin_action((action.stage, action.op == "F"), coming)

    def _overlaps_next(self, position: int) -> bool:
        """Whether the action at `position` of the list overlaps the next one.

        Not where ranks share a GPU, which run one at a time anyway. Nor where the backward carries the loss's
        correction, which is known only after this forward.
        """
        if position not in self.overlapped_positions or self.times.shares_gpu:
            return False
        return not self._messages.carries_correction(self.rank_schedule.actions[position + 1])

    def _run_pair(self, forward: Action, backward: Action) -> None:
        """A forward and a backward that do not need each other: one computes while the tokens of the other
        travel to experts and back."""
        activations, (starts, grads) = self._receive_activations(forward), self._receive_gradients(backward)
        outputs, _ = run_pair(
            lambda: self._forward(forward, activations), lambda: self._backward(backward, starts, grads)
        )
        self._send_activations(forward, outputs)
        self._send_gradients(backward)

    # --- the actions -----------------------------------------------------------------------------------

    def _receive_activations(self, action: Action) -> Any:
        """The activations of the stage before; None on the first stage."""
        stage, m = action.stage, action.microbatch
        if stage == 0:
            return None
        source = self._schedule.source(action)
        assert source is not None
        boundary = self.boundaries.get(stage - 1, m)
        assert boundary is not None, "its receive was posted, so its shape is known"
        activations = boundary.assemble(self._messages.take(source))
        if self.grad_ready is not None:
            # `assemble` has made them leaves that require gradients.
            self._received_inputs[stage, m] = boundary.select_differentiable(tensors_in(activations))
        return activations

    def _forward(self, action: Action, activations: Any) -> Any:
        stage, m = action.stage, action.microbatch
        graphs, inputs = self.graphs, self.microbatches[m]
        if stage == self._last_stage:
            assert self.loss is not None
            inputs = self.loss.inputs_of(m)
        with self.times.measure(action):
            if (graph := graphs.graphs.get((stage, m))) is not None:
                # The graph copies the activations into its static inputs, which get the gradients.
                self._received_inputs.pop((stage, m), None)
                outputs, result = graph.forward(activations, inputs)
                self._backward_starts[stage, m] = [], []  # nothing for autograd; `_receive_gradients` pops it
                if stage == self._last_stage:
                    self._finish_replayed_forward(m, graph, outputs, result)
                return outputs
            with graphs.watch_forward(stage, m):
                outputs = self.run_stage(stage, activations, inputs)
                if stage == self._last_stage:
                    self._finish_forward(m, outputs)
        return outputs

    def _send_activations(self, action: Action, outputs: Any) -> None:
        stage, m = action.stage, action.microbatch
        if stage == self._last_stage:
            return
        tensors = tensors_in(outputs)
        if (stage, m) not in self.graphs.graphs:
            if self.grad_ready is not None:
                self._backward_starts[stage, m] = gradient_edges(tensors), []
            self._messages.send_shape(action, Boundary.of(outputs))
        self._messages.give(action, [tensor.detach() for tensor in tensors])

    def _finish_forward(self, m: int, outputs: Any) -> None:
        """The last stage has computed its outputs: compute the loss of microbatch `m`."""
        if self.keep_outputs:
            self.outputs[m] = tree_map(detach_leaf, outputs)
        assert self.loss is not None
        loss, loss_gradient = self.loss(m, outputs)  # of the microbatch; d loss of the batch / d loss
        if self.grad_ready is not None:
            starts = gradient_edges([loss])
            if not starts and any(t.requires_grad for t in tensors_in(outputs)):
                raise ValueError(
                    "the loss has no gradient, though the outputs have: compute the loss from the outputs "
                    "without detach()"
                )
            self._backward_starts[self._last_stage, m] = starts, [loss_gradient] * len(starts)

    def _finish_replayed_forward(self, m: int, graph: StageGraph, outputs: Any, result: Any) -> None:
        """A graph of the last stage has computed its outputs, and the loss if that could be captured."""
        assert self.loss is not None
        if not graph.has_loss:
            tensors = tensors_in(outputs)
            flags = zip(tensors, graph.outputs_require_grad, strict=True)
            self._loss_inputs[m] = [t.requires_grad_() for t, requires_grad in flags if requires_grad]
            self._finish_forward(m, outputs)
            return
        if self.keep_outputs:
            self.outputs[m] = outputs  # `graph.forward` returns clones, so no replay overwrites them
        _, loss_gradient = self.loss.from_result(m, outputs, result)
        self._backward_starts[self._last_stage, m] = [], [loss_gradient]

    def _receive_gradients(self, action: Action) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where the backward starts, and with which gradients.

        One message also carries the correction of the loss, as its last tensor, which is passed to
        `grad_ready`. On the last stage the correction is computed here, by a collective of all replicas.
        """
        assert self.grad_ready is not None
        starts, grads = self._backward_starts.pop((action.stage, action.microbatch))
        carries_correction = self._messages.carries_correction(action)
        if (source := self._schedule.source(action)) is not None:
            grads = self._messages.take(source)
            if carries_correction:
                self.grad_ready.correction = grads.pop()  # the last tensor of the message
        elif carries_correction:
            assert self.loss is not None
            self.grad_ready.correction = self.loss.correction()
        return starts, grads

    def _backward(self, action: Action, starts: list[GradientEdge], grads: list[torch.Tensor]) -> None:
        grad_ready = self.grad_ready
        assert grad_ready is not None
        key = action.stage, action.microbatch
        with self.times.measure(action):
            if (graph := self.graphs.graphs.get(key)) is not None:
                if starts:  # of a loss that runs eagerly
                    _run_backward(starts, grads)
                    grads = grads_of(self._loss_inputs.pop(action.microbatch))
                self._input_grads[key] = graph.backward(grads)
                if action.op == "B":
                    grad_ready.close_stage(action)
            elif action.op == "I":
                with self.split_backward.deferring(key):
                    _run_backward(starts, grads)
            else:
                with grad_ready.during_backward(action), self.split_backward.fused():
                    _run_backward(starts, grads)

    def _send_gradients(self, action: Action) -> None:
        if action.stage == 0:
            return
        key = action.stage, action.microbatch
        if key in self._input_grads:
            result = self._input_grads.pop(key)
        else:
            result = grads_of(self._received_inputs.pop(key))
        if self._messages.carries_correction(action):
            assert self.grad_ready is not None
            assert self.grad_ready.correction is not None
            result.append(self.grad_ready.correction)  # the last tensor of the message
        self._messages.give(action, result)

    def _weight_gradients(self, action: Action) -> None:
        assert self.grad_ready is not None
        graph = self.graphs.graphs.get((action.stage, action.microbatch))
        with self.times.measure(action):
            if graph is not None:
                graph.add_weight_gradients()
                self.grad_ready.close_stage(action)
            else:
                self.grad_ready.add_weight_gradients(action, self.split_backward)


@cache
def contended() -> bool:
    """Whether there are more ranks than cores, so that wall clocks would show who got a core."""
    return device().type == "cpu" and world_size() > usable_cores()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python collects no garbage meanwhile: a rank that does it in the middle of a step delays all others."""
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
