"""Which weights of a block go through the node that sums their gradients over the ranks, and when.

    block's forward begins   `ReplicatedGradSum.begin` makes the node of its replicated weights
    layer's forward          the node's output stands for norm.weight, and in the forward of the module around
                             it for what is in an nn.ParameterList, which has no forward
    block's forward ends     the node is dropped

A weight that no forward has used is watched in the first backward: a gradient that it gets was not summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hpnb.tensor_parallel.replicated_grad_sum import ReplicatedGradSum
from hpnb.tensor_parallel.sequence_parallel import WITHOUT_IT


def reader_of(path: str, model: nn.Module) -> str:
    """The path of the module in whose forward the parameters at `path` are used: itself, or, for one that has
    no forward, such as an nn.ParameterList, the module that it is in."""
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path


class SummedWeights:
    """Use a weight in a forward through the node that sums its gradient over the ranks.

    As in FSDP, another tensor stands under the weight's name while the forward runs, so `named_parameters`
    lacks the weight then. If several blocks share the module, the node is that of the block that runs. If
    none runs, because the layer is called by itself, each weight gets a node and a message alone.

    A weight that a block reads from a layer that it does not call, as in `F.linear(x, self.up.weight)`, has
    no such node. If the first backward gives it a gradient, that is a summand, and is refused.
    """

    def __init__(
        self, path: str, module: nn.Module, names: Sequence[str], grad_sums: Sequence[ReplicatedGradSum]
    ) -> None:
        self.path, self.module, self.names, self.grad_sums = path, module, names, grad_sums
        self._parameters: dict[str, nn.Parameter] = {}
        self._was_replaced = False
        self._watched: set[str] = set()  # weights whose first gradient is looked at, until it has come

    def replace(self, *_: Any) -> None:
        """A hook before the forward that uses them."""
        self._was_replaced = True
        running = (grad_sum for grad_sum in self.grad_sums if grad_sum.is_begun)
        grad_sum = next(running, self.grad_sums[0])
        for name in self.names:
            parameter = self.module._parameters[name]
            assert parameter is not None
            self._parameters[name] = parameter
            self.module._parameters[name] = grad_sum.weight(parameter)  # type: ignore[assignment]

    def restore(self, *_: Any) -> None:
        """A hook after it."""
        for name, parameter in self._parameters.items():
            self.module._parameters[name] = parameter
        self._parameters.clear()

    def watch(self) -> None:
        """After the first forward of a block with gradients: whether weights that it has not used get one."""
        for name in () if self._was_replaced else self.names:
            parameter = self.module._parameters[name]
            if parameter is not None and parameter.requires_grad:
                self._watched.add(name)
                parameter.register_hook(partial(self._check_gradient, name))

    def _check_gradient(self, name: str, grad: torch.Tensor | None) -> None:
        if grad is None or name not in self._watched:  # None: this backward has not used it either
            return
        self._watched.remove(name)
        if not self._was_replaced and bool(grad.any()):
            raise ValueError(
                f"{self.path}.{name} is used without a call of {self.path}, and ranks sum the gradients of "
                f"layers that are called; call the layer, or {WITHOUT_IT}"
            )


class EndOfForward:
    """Ends the sum of a block's gradients; after the first forward, weights are watched that it lacks."""

    def __init__(self, grad_sum: ReplicatedGradSum) -> None:
        self.grad_sum = grad_sum
        self.weights: list[SummedWeights] = []

    def call(self) -> None:
        if self.grad_sum.is_begun:
            while self.weights:
                self.weights.pop().watch()
        self.grad_sum.end()
