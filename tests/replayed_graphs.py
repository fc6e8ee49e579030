"""CUDA graphs on a CPU: a capture that calls the captured function again, to test what is around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import hpnb
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.cuda_graphs import StageGraphs
from hpnb.record.traffic import uncounted


class CallAgain:
    """Replays by calling the function. As on a GPU, nothing that a capture runs is left behind.

    Attributes:
        captured: the slot of each capture.
    """

    def __init__(self, pipe: hpnb.Pipeline) -> None:
        self._pipe, self.captured = pipe, list[int]()

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    outside = session

    def capture(self, run: Callable[[], None], slot: int) -> Callable[[], None]:
        self.captured.append(slot)
        holders = self._pipe._grad_ready._holders.values()  # with ZeRO 3 other parameters than the module's
        tensors = [p.grad for p in holders if p.grad is not None]
        tensors += list(self._pipe.module.buffers())
        values, state = [t.clone() for t in tensors], torch.get_rng_state()
        run()
        torch.set_rng_state(state)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        graph: Any = run.__self__  # type: ignore[attr-defined]
        static = graph._input_tensors if run == graph._run_forward else []

        def replay() -> None:
            # What is copied to them inside of `record.traffic` does not count as a change, by which a model
            # knows that a mask is old.
            torch.autograd.graph.increment_version(static)
            with torch.enable_grad(), uncounted():  # a replay sends what nobody sees
                run()

        return replay

    def forget(self) -> None:
        pass


def with_graphs(pipe: hpnb.Pipeline, captured: Sequence[Axis] = ()) -> Any:
    """Let `pipe`, made without graphs on a CPU, replay. Returns its StageGraphs.

    Args:
        captured: axes whose collectives are captured, although gloo has none that a GPU could.
    """
    capture: Any = CallAgain(pipe)
    pipe._graphs = StageGraphs(pipe.module, torch.device("cpu"), pipe._split_backward, capture, captured)
    return pipe._graphs
