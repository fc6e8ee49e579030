"""A sink for a model whose experts are replicated on fewer ranks than its other weights.

router, attention, ...   summed over dp x cp      every rank has a copy
experts                  summed over edp          only ranks with the same experts have a copy
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpnb.data_parallel.reducer import Reducer
from hpnb.gradients import GradientSink
from hpnb.mesh import Axis
from hpnb.placement import placement_of


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether it is sharded along the expert axis, whose ranks hold different experts."""
    return "ep" in placement_of(parameter).axes


class SplitReducer(GradientSink):
    """Two reducers, and each parameter goes to its own. Arguments are those of `Reducer`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        axis: Axis,
        expert_axis: Axis,
        **options: Any,
    ) -> None:
        experts = {name: p for name, p in parameters.items() if is_expert(p)}
        others = {name: p for name, p in parameters.items() if name not in experts}
        self.reducers = [
            Reducer(replicated, along, **options)
            for replicated, along in ((others, axis), (experts, expert_axis))
            if any(p.requires_grad for p in replicated.values())
        ]
        self.axis, self.average = axis, self.reducers[0].average
        self.names = {p: name for reducer in self.reducers for p, name in reducer.names.items()}
        self._reducer_of = {id(p): reducer for reducer in self.reducers for p in reducer.names}

    def begin_backward(self) -> None:
        for reducer in self.reducers:
            reducer.begin_backward()

    def before_accumulation(self, parameter: torch.nn.Parameter) -> None:
        self._reducer_of[id(parameter)].before_accumulation(parameter)

    def ready(self, parameter: torch.nn.Parameter) -> None:
        self._reducer_of[id(parameter)].ready(parameter)

    def finish(self) -> None:
        try:
            for reducer in self.reducers:
                reducer.finish()
        finally:
            self.drop()

    def drop(self) -> None:
        for reducer in self.reducers:
            reducer.drop()
