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

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self.captured = module, list[int]()

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    outside = session

    def capture(self, run: Callable[[], None], slot: int) -> Callable[[], None]:
        self.captured.append(slot)
        tensors = [p.grad for p in self._module.parameters() if p.grad is not None]
        tensors += list(self._module.buffers())
        values, state = [t.clone() for t in tensors], torch.get_rng_state()
        run()
        torch.set_rng_state(state)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        return torch.enable_grad()(uncounted()(run))  # a replay sends what nobody sees

    def forget(self) -> None:
        pass


def with_graphs(pipe: hpnb.Pipeline, captured: Sequence[Axis] = ()) -> Any:
    """Let `pipe`, made without graphs on a CPU, replay. Returns its StageGraphs.

    Args:
        captured: axes whose collectives are captured, although gloo has none that a GPU could.
    """
    capture: Any = CallAgain(pipe.module)
    pipe._graphs = StageGraphs(pipe.module, torch.device("cpu"), pipe._split_backward, capture, captured)
    return pipe._graphs
