"""CUDA graphs on a CPU: a capture that calls the captured function again, to test what is around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hpnb
from hpnb.pipeline_parallel.cuda_graphs import StageGraphs


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
        return torch.enable_grad()(run)

    def forget(self) -> None:
        pass


def with_graphs(pipe: hpnb.Pipeline) -> Any:
    """Let `pipe`, made without graphs on a CPU, replay. Returns its StageGraphs."""
    capture = CallAgain(pipe.module)
    pipe._graphs = StageGraphs(pipe.module, torch.device("cpu"), pipe._split_backward, capture)
    return pipe._graphs
