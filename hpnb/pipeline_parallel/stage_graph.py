"""One stage of a pipeline as CUDA graphs: its forward and its backward are launched with one call each.

    eager    F: ~20 launches a block, each from Python        captured    F: copy the inputs in, launch once
             B: ~40 launches a block                                      B: copy the gradient in, launch once

A launch takes Python about 5 microseconds, and a kernel of a small microbatch takes the GPU less. A graph has
all launches of an action, with their addresses. So what changes from one microbatch to the next is copied to
static tensors before, and what is handed on is copied out of them after.

Transfers between stages stay outside. Gradients of parameters are added to static tensors, which are the
parameters' .grad. Dropout draws the numbers that it draws in an eager step: each replay takes the generator's
offset and moves it on (`torch.cuda.CUDAGraph.register_generator_state`, which PyTorch does for the default
generator). Dropouts of tensor parallelism that draw other numbers on each rank have further generators
(`dropout_rng.py`).

Collectives within a stage, those of tensor parallelism and ZeRO 3 over NCCL, are kernels of its graphs. A
side stream that they run on forks from the stream of the capture, and joins it where the result is waited
for. That has to be in the same action; otherwise the capture fails, and the stage runs eagerly. Python sees
no replayed collective, so a capture notes them, and `record.traffic` counts them at each replay. In a
timeline they are part of their action's span.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from hpnb.dropout_rng import CapturedRankStates, RankStateStart
from hpnb.pipeline_parallel.boundary import (
    Boundary,
    clone_leaf,
    detach_leaf,
    gradient_edges,
    grads_of,
    tensors_in,
)
from hpnb.pipeline_parallel.loss import LossFunction, call_criterion
from hpnb.pipeline_parallel.split_backward import SplitBackward
from hpnb.record.recorder import capturing
from hpnb.record.traffic import count_replay, uncounted

Replay = Callable[[], None]


class CudaCapture:
    """Captures CUDA graphs on a separate stream, with one memory pool for each slot. A test on a CPU has a
    class like it, which calls the functions again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pools: dict[int, tuple[Any, torch.cuda.CUDAGraph]] = {}  # by slot; and a graph that keeps it
        self._callers_stream = torch.cuda.current_stream(device)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around captures that follow one another."""
        # A live autograd graph of an earlier step would draw its stream into the capture, and cached memory
        # of eager steps would lie beside the pools.
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        here, collects = torch.cuda.current_stream(self._device), gc.isenabled()
        self._callers_stream = here
        self._stream.wait_stream(here)
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                self._allocate_workspaces()
                yield
        finally:
            here.wait_stream(self._stream)
            if collects:
                gc.enable()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside a session, around the allocation of tensors that belong to no slot."""
        with torch.cuda.stream(self._callers_stream):  # whose free memory is between the weights
            yield

    def capture(
        self, run: Callable[[], None], slot: int, rank_states: Sequence[RankStateStart] = ()
    ) -> Replay:
        """Record what `run` launches on static tensors, without running it, and return what launches it.
        What one graph of a slot frees, the next one reuses."""
        states = CapturedRankStates(rank_states)
        if slot not in self._pools:
            self._pools[slot] = self._make_pool()
        pool, _ = self._pools[slot]
        graph = torch.cuda.CUDAGraph()
        for generator in states.generators:
            graph.register_generator_state(generator)
        # Other threads may copy and wait meanwhile: those of the process group and of checkpoints.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            with states.capturing(torch.cuda.default_generators[torch.cuda.current_device()]):
                run()
        except BaseException:
            self._end_failed_capture(graph)
            del self._pools[slot]  # torch 2.11 leaves it recording, and no other capture may use it then
            raise
        graph.capture_end()

        def replay() -> None:
            states.seed()
            graph.replay()

        return replay if rank_states else graph.replay

    def forget(self) -> None:
        self._pools.clear()

    def _end_failed_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        with suppress(RuntimeError):  # the capture is invalid, which is why it ends here
            graph.capture_end()
        # It leaves the generator capturing, and dropout would raise. The end of another capture mends that.
        self._make_pool()

    def _make_pool(self) -> tuple[Any, torch.cuda.CUDAGraph]:
        """A memory pool, and an empty graph in it. PyTorch drops a pool with the last graph in it, and
        refuses another capture into it (torch 2.11), but all graphs of a slot may be captured anew."""
        pool, empty = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        empty.capture_begin(pool, capture_error_mode="thread_local")
        torch.zeros(1, device=self._device)  # PyTorch warns of a graph that has no kernel
        empty.capture_end()
        return pool, empty

    def _allocate_workspaces(self) -> None:
        """cuBLAS keeps a workspace for each stream and thread: allocate them outside of the pools."""
        x = torch.ones(16, 16, device=self._device, requires_grad=True)
        (x @ x).sum().backward()


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """What a graph of one stage computes.

    Attributes:
        run_stage: (stage, what the stage before gave, inputs) -> what this stage gives.
        boundary: the structure and shapes of what the stage before gives; None for stage 0.
        inputs: a microbatch; others have the same shapes.
        loss: the loss function, on the last stage; None where it runs eagerly, of outputs that are handed on.
        keeps_outputs: whether the outputs of the last stage are handed on although the loss is captured.
        rank_states: where states of this rank begin in its forward (`dropout_rng.py`).
    """

    stage: int
    run_stage: Callable[[int, Any, Any], Any]
    boundary: Boundary | None
    inputs: Any
    loss: LossFunction | None
    keeps_outputs: bool
    splits: bool
    split_backward: SplitBackward
    device: torch.device
    rank_states: Sequence[RankStateStart] = ()


class StageGraph:
    """The graphs of one stage, for microbatches of one form, in one slot.

    Args:
        grads: gives the static gradient of a parameter, to which the graphs add.

    Attributes:
        parameters: those to whose gradients the backward adds.
        outputs_require_grad: which of the stage's outputs take a gradient, where it has no loss.
    """

    def __init__(
        self, work: StageWork, capture: CudaCapture, slot: int, grads: Callable[[nn.Parameter], torch.Tensor]
    ) -> None:
        self._work, self.has_loss = work, work.loss is not None
        self._hidden: Any = None
        with capture.outside():
            self._inputs = tree_map(_static, work.inputs)
            if work.boundary is not None:
                specs = work.boundary.specs
                empty = [torch.zeros(shape, dtype=dtype, device=work.device) for shape, dtype in specs]
                self._hidden = work.boundary.assemble(empty)
        self._input_tensors = tensors_in(self._inputs)
        self._hidden_tensors = tensors_in(self._hidden)
        self._leaves = (
            [] if work.boundary is None else work.boundary.select_differentiable(self._hidden_tensors)
        )
        # What the graphs write, at the same place in every replay.
        self._starts: list[GradientEdge] = []
        self._started_from: list[torch.Tensor] = []  # what the backward starts from
        self._outputs: Any = None
        self.outputs_require_grad: list[bool] = []
        self._result: Any = None  # of the loss function
        self._input_grads: list[torch.Tensor] = []
        with (
            torch.enable_grad(),
            work.split_backward.without_min_flops(),
            without_autocast_cache(),
            _without_rng_snapshots(),
        ):
            self._replay_forward = _capture_counted(capture, self._run_forward, slot, work.rank_states)
            self.parameters = reached_parameters(self._starts)
            before = {p: p.grad for p in self.parameters}
            with capture.outside():
                self._start_grads = [torch.zeros_like(t) for t in self._started_from]
                for p in self.parameters:
                    p.grad = grads(p)
            try:
                self._replay_backward = _capture_counted(capture, self._run_backward, slot)
                if work.splits:
                    self._replay_weights = _capture_counted(capture, self._run_weights, slot)
                if any(p.grad is not grads(p) for p in self.parameters):
                    raise RuntimeError("a hook exchanges .grad of a parameter, to which a graph has to add")
            finally:
                for p, grad in before.items():
                    p.grad = grad
        self._starts, self._started_from = [], []  # the launches are in the graphs
        self._work = replace(work, inputs=None)  # the static inputs are here; the batch may go

    # --- what is captured --------------------------------------------------------------------------------

    def _run_forward(self) -> None:
        work = self._work
        outputs = work.run_stage(work.stage, self._hidden, self._inputs)
        if work.loss is None:
            started_from = tensors_in(outputs)
            self.outputs_require_grad = [t.requires_grad for t in started_from]
        else:  # which may read sharded logits: only who reads the outputs gathers them
            self._result = call_criterion(work.loss, outputs, self._inputs)
            started_from = tensors_in(self._result)[:1]
        self._started_from = [t for t in started_from if t.requires_grad]
        self._starts = gradient_edges(self._started_from)
        self._started_from = [t.detach() for t in self._started_from]
        self._result = tree_map(detach_leaf, self._result)
        hands_on = work.loss is None or work.keeps_outputs
        self._outputs = tree_map(detach_leaf, outputs) if hands_on else None

    def _run_backward(self) -> None:
        work = self._work
        for leaf in self._leaves:
            leaf.grad = None
        split = work.split_backward
        with split.deferring(self) if work.splits else split.fused():
            if self._starts:
                torch.autograd.backward(self._starts, self._start_grads)
        self._input_grads = grads_of(self._leaves)

    def _run_weights(self) -> None:
        self._work.split_backward.add_weight_gradients(self)

    # --- what is replayed --------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, hidden: Any, inputs: Any) -> tuple[Any, Any]:
        """F. Returns (what the stage gives, what the loss function returned); None where there is none."""
        _copy_all(self._hidden_tensors + self._input_tensors, tensors_in(hidden) + tensors_in(inputs))
        self._replay_forward()
        # Copies: this slot's next microbatch may come before the last reader is done.
        return tree_map(clone_leaf, self._outputs), tree_map(clone_leaf, self._result)

    @torch.no_grad()
    def backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """I or B. Returns the gradients of those inputs that are sent one back."""
        _copy_all(self._start_grads, grads)
        self._replay_backward()
        return [grad.clone() for grad in self._input_grads]

    def add_weight_gradients(self) -> None:
        """W."""
        self._replay_weights()


def _capture_counted(
    capture: CudaCapture, run: Callable[[], None], slot: int, rank_states: Sequence[RankStateStart] = ()
) -> Replay:
    """Capture `run`. What it sends is counted at each replay, and not now, when nothing is sent."""
    with capturing() as communications, uncounted():
        replay = capture.capture(run, slot, *([rank_states] if rank_states else []))
    if not (events := communications()):
        return replay

    def replay_counted() -> None:
        replay()
        count_replay(events)

    return replay_counted


def reached_parameters(starts: Sequence[GradientEdge]) -> list[nn.Parameter]:
    """The leaves that a backward from `starts` adds gradients to, each once, without those that are no
    parameters."""
    reached: dict[nn.Parameter, None] = {}
    seen, waiting = set(), [edge.node for edge in starts]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            reached[variable] = None
        waiting += [after for after, _ in node.next_functions if after is not None]
    return list(reached)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Around captures: a cast weight from the cache would be one of another step.

    Around the eager steps before, too. `torch.compile` compiles again when this switch has changed. In a
    capture it must not, because it times new kernels, which waits for the GPU.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _without_rng_snapshots() -> AbstractContextManager[Any]:
    """Checkpoints keep the generator's state for recomputation, which a capture does not allow. Stages that
    draw random numbers and recompute are not captured (`capture_watch.py`), so there is nothing to keep."""
    return patch.object(torch.utils.checkpoint, "get_device_states", lambda *_: ([], []))


def _copy_all(static: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    if static:
        torch._foreach_copy_(static, list(values))


def _static(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
