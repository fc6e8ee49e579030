"""A region of 1D tensor parallelism: some column-parallel layers and the row-parallel layer that ends it.

    x --> q ----+                    self-attention: q, k and v read x, and the backward sums dx once
    x --> k, v -+--> attention --> o

    x --> q ----+                    cross attention: the backward sums dx, and dm
    m --> k, v -+--> attention --> o

Each rank computes a summand of the gradient of what a column reads, and the ranks' summands must be added.
The sum belongs to the tensor, whichever module has made it. The first column that reads x arranges the sum,
by an autograd node of `enter_region`; columns that get the same tensor object afterwards read the output of
that node too. Another tensor gets another node and another sum, even if it is a copy with the same values.

With sequence parallelism, x is this rank's tokens and the node gathers those of all ranks. The forward of an
attention reads the shape of its input, so there the module's arguments are gathered before its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpnb.gradients import in_backward
from hpnb.tensor_parallel.async_all_reduce import (
    NO_COMMUNICATION,
    WeightsWithDeferredGrads,
    enter_region,
)
from hpnb.tensor_parallel.module_hooks import tensors_of
from hpnb.tensor_parallel.sequence_parallel import WITHOUT_IT, SequenceSharding
from hpnb.tensor_parallel.sharded_linear import ShardedLinear


class ParallelLinear(ShardedLinear):
    """A linear layer of a column-row pair.

    Attributes:
        region: with which columns it shares inputs. None for a column whose input's gradient is summed
            elsewhere, and for a row without columns.
    """

    def __init__(self, old: nn.Module, transposed: bool, adds_bias: bool = True) -> None:
        super().__init__(old, transposed, adds_bias)
        self.region: ParallelRegion | None = None


@dataclass(frozen=True)
class _Input:
    """A tensor that columns have read.

    Attributes:
        x: the tensor, as a column got it.
        version: how often it had been changed in place by then; None if nobody counts.
        with_grad: whether gradients were enabled then. Without them `inside` has no node.
        inside: the output of `enter_region`, which the columns multiply.
        weights: of all layers of the region. Their gradients come from the node that made `inside`.
    """

    x: torch.Tensor
    version: int | None
    with_grad: bool
    inside: torch.Tensor
    weights: Mapping[ParallelLinear, WeightsWithDeferredGrads]


class ParallelRegion:
    """The inputs of some columns in the forward that runs, each with the sum of its gradient.

    Which layers are a region decides how much can be shared and overlapped. It does not change a result.

    Args:
        path: of the module that has the layers, for messages.
        row: the layer with which the region's forward ends.
    """

    def __init__(
        self,
        path: str,
        sharding: SequenceSharding,
        columns: Sequence[ParallelLinear],
        row: ParallelLinear | None = None,
    ) -> None:
        self.path, self.sharding, self.columns, self.row = path, sharding, tuple(columns), row
        self.layers = self.columns if row is None else (*self.columns, row)
        self._inputs: list[_Input] = []
        self._used: set[ParallelLinear] = set()  # columns that have read one of them
        self._gathers_arguments = False  # whether the forward of the module runs, with gathered arguments

    # --- for the layers -----------------------------------------------------------------------------------

    def enter(self, x: torch.Tensor, column: ParallelLinear) -> tuple[torch.Tensor, WeightsWithDeferredGrads]:
        """(x as `column` multiplies it, the weights that it uses for this forward)."""
        if (known := self._find(x)) is None:
            if self.sharding.enabled and not self._holds_tokens(x):
                return self._pass_gathered(x, column)
            if column in self._used:  # by a forward that did not get to the row
                self._forget()
            known = self._add(x)
        self._used.add(column)
        if self.row is None and len(self._used) == len(self.columns):
            self._forget()
        return known.inside, known.weights[column]

    def leave(self, row: ParallelLinear) -> WeightsWithDeferredGrads | None:
        """The weights that `row` uses, with which the forward ends; None if no column has entered."""
        last = self._last()
        self._forget()
        return None if last is None else last.weights[row]

    # --- hooks --------------------------------------------------------------------------------------------

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """The x of a column whose forward may have been replaced, as that of a head by a loss in chunks."""
        self.end()
        return self._add(x).inside

    def gather_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With sequence parallelism: gather the first argument that is tokens of this rank, and all like it.
        Another one must not need a gradient, which would be a summand on each rank."""
        self.end()  # what is left of a forward that failed
        first = next(filter(self._holds_tokens, tensors_of(module, args, kwargs)), None)
        if first is None:
            return None  # the columns gather what they read

        def gather(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value.shape == first.shape and value.is_floating_point():
                return (self._find(value) or self._add(value)).inside
            if value.requires_grad:
                raise ValueError(
                    f"{self.path} gets a tensor of shape {tuple(value.shape)} that needs a gradient, beside "
                    f"this rank's tokens {tuple(first.shape)}: with sequence parallelism each rank would "
                    f"compute only a summand of that gradient; {WITHOUT_IT}"
                )
            return value

        gathered = tuple(map(gather, args)), {name: gather(value) for name, value in kwargs.items()}
        self._gathers_arguments = True
        return gathered

    def check_output(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raises ValueError if the module has added gathered tokens to those of this rank."""
        first = output[0] if isinstance(output, tuple) and output else output
        if not (self._gathers_arguments and isinstance(first, torch.Tensor) and first.dim() == 3):
            return
        if tuple(first.shape[:2]) == self.sharding.shape and not self.sharding.holds_tokens(first):
            raise ValueError(
                f"{self.path} returns {tuple(first.shape)}, the tokens of all ranks, instead of this rank's, "
                "which its row-parallel layer gives: with sequence parallelism its input may go into its "
                f"column-parallel layers alone; {WITHOUT_IT}"
            )

    def end(self, *_: Any) -> None:
        """The forward of the module is over."""
        self._forget()
        self._gathers_arguments = False

    # --- the inputs ---------------------------------------------------------------------------------------

    def _find(self, x: torch.Tensor) -> _Input | None:
        with_grad, version = torch.is_grad_enabled(), version_of(x)
        for known in self._inputs:
            same = known.inside is x or (known.x is x and known.version == version is not None)
            if same and known.with_grad == with_grad:
                return known
        return None

    def _add(self, x: torch.Tensor) -> _Input:
        inside, weights = enter_region(x, self.layers, self.sharding.region_entry())
        of_layer = dict(zip(self.layers, weights, strict=True))
        self._inputs.append(_Input(x, version_of(x), torch.is_grad_enabled(), inside, of_layer))
        return self._inputs[-1]

    def _last(self) -> _Input | None:
        with_grad = torch.is_grad_enabled()
        return next((known for known in reversed(self._inputs) if known.with_grad == with_grad), None)

    def _forget(self) -> None:
        self._inputs.clear()
        self._used.clear()

    def _holds_tokens(self, x: torch.Tensor) -> bool:
        """Whether x is this rank's tokens. In the module's forward, a batch of one token could be either."""
        gathered = self._gathers_arguments and tuple(x.shape[:2]) == self.sharding.shape
        return self.sharding.holds_tokens(x) and not gathered

    def _pass_gathered(
        self, x: torch.Tensor, column: ParallelLinear
    ) -> tuple[torch.Tensor, WeightsWithDeferredGrads]:
        """x was computed inside the module from arguments already gathered, so it needs no gather and no
        sum: the nodes of the arguments sum the gradient."""
        if not self._gathers_arguments and not in_backward():  # where a part of the forward is recomputed
            raise ValueError(
                f"a column-parallel layer of {self.path} gets a tensor of shape {tuple(x.shape)}: with "
                f"sequence parallelism it takes this rank's tokens, (1, {self.sharding.tokens}, in); "
                f"{WITHOUT_IT}"
            )
        if (last := self._last()) is not None:
            return x, last.weights[column]
        return enter_alone(x, column)


def enter_alone(x: torch.Tensor, layer: ParallelLinear) -> tuple[torch.Tensor, WeightsWithDeferredGrads]:
    """(x, the weights that `layer` uses) where its region has no x: a part of the forward is recomputed, or
    the layer is called by itself. Nothing is sent."""
    x, (weights,) = enter_region(x, [layer], NO_COMMUNICATION)
    return x, weights


def version_of(x: torch.Tensor) -> int | None:
    """How often x has been changed in place. None under torch.inference_mode, where nobody counts, so that
    what was computed from x before may be out of date."""
    return None if x.is_inference() else x._version
