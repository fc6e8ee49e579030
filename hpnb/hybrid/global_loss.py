"""A model's outputs on data-parallel ranks: the loss is that of all ranks, and gradients are its gradients.

    loss = sum_r total_r / N          total_r: the sum over this rank's n_r targets;  N = sum_r n_r
         = sum_r (n_r / N) mean_r     mean_r: what a criterion gives, total_r / n_r

Gradients are summed over the ranks, so each rank owes d/dw (n_r / N) mean_r. But mean_r is computed from the
outputs by whoever trains, and may then be divided by a number of accumulated batches, or joined with other
terms. So the factor sits where all of that comes from: each tensor of the outputs passes through an identity

    forward   y = x          backward   dx = (n_r / N) dy

and any linear combination of means over this rank's targets has the exact gradient. `outputs.loss` has the
same backward, and the value of all ranks. The n_r are summed on the devices: no host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.tensor_parallel.lazy_logits import LazyLogits


class Weigher:
    """Weighs the outputs of one model over the ranks of `axis`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._sums = False  # whether the backward under way is that of a sum

    @contextmanager
    def of_a_sum(self) -> Iterator[None]:
        """A backward inside starts from total_r / N: there are no means to weigh."""
        self._sums = True
        try:
            yield
        finally:
            self._sums = False

    def __call__(self, outputs: Any, count: torch.Tensor) -> Any:
        """`outputs`, changed or in a new form, with the factor in place.

        Args:
            count: (), float64: this rank's targets.
        """
        loss = getattr(outputs, "loss", None)
        if self.axis.size == 1 or (loss is None and not torch.is_grad_enabled()):
            return outputs
        total = torch.zeros_like(count)
        if loss is not None:  # the mean of nothing may be nan, and counts nothing
            total = torch.where(count > 0, loss.detach().double() * count, 0.0)
        sums = comm.all_reduce(torch.stack([count, total]), self.axis)
        share = count / sums[0].clamp(min=1)

        def weighed(x: Any) -> Any:
            trained = isinstance(x, torch.Tensor) and x.requires_grad
            return _Weighed.apply(x, None, share, self) if trained else x

        if not isinstance(outputs, ModelOutput):
            return _mapped(outputs, weighed)
        for name in list(outputs.keys()):
            if name == "loss":
                assert loss is not None
                value = (sums[1] / sums[0].clamp(min=1)).to(loss.dtype)
                outputs[name] = _Weighed.apply(loss, value, share, self)
            elif name == "logits" and isinstance(outputs, LazyLogits) and outputs.is_lazy:  # sharded along tp
                outputs.local_logits = weighed(outputs.local_logits)
            else:
                outputs[name] = tree_map(weighed, outputs[name])
        return outputs


def _mapped(outputs: Any, change: Callable[[Any], Any]) -> Any:
    """`outputs` of a model of the user's own."""
    if is_dataclass(outputs) and not isinstance(outputs, type):
        found = {field.name: tree_map(change, getattr(outputs, field.name)) for field in fields(outputs)}
        return replace(outputs, **found)
    if not isinstance(outputs, torch.Tensor | tuple | list | dict):
        raise TypeError(
            f"the model returns a {type(outputs).__name__}, in which tensors are not to be found; return a "
            "tensor, a tuple or dict of tensors, a dataclass, or a ModelOutput of transformers"
        )
    return tree_map(change, outputs)


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, value: torch.Tensor | None, share: torch.Tensor, weigher: Weigher
    ) -> torch.Tensor:
        ctx.share, ctx.weigher = share, weigher
        return x.view_as(x) if value is None else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.weigher._sums:
            return grads[0], None, None, None
        # A rank without targets owes nothing, be its own mean nan.
        return torch.where(ctx.share > 0, grads[0] * ctx.share.to(grads[0].dtype), 0.0), None, None, None


# --- a loss that is computed when it is read ------------------------------------------------------------


def with_loss(outputs: Any, loss: Callable[[Any], torch.Tensor]) -> Any:
    """`outputs` of a transformers model without a loss, whose `.loss` is `loss(outputs)` once it is read.

    Where a criterion computes its own from the logits, nothing is computed twice.
    """
    kind = type(outputs)
    if not isinstance(outputs, ModelOutput) or "loss" in outputs or not hasattr(outputs, "loss"):
        return outputs
    if isinstance(getattr(kind, "loss", None), property):  # it does so already
        return outputs
    if kind not in _made:
        _made[kind] = type(kind.__name__, (_WithLoss, kind), {})
    outputs.__class__ = _made[kind]
    # A function of the outputs, not one that holds them: a cycle would keep the logits for the whole step.
    outputs.__dict__["_compute_loss"] = loss
    return outputs


class _WithLoss(ModelOutput):  # type: ignore[misc]
    @property
    def loss(self) -> torch.Tensor:
        held = self.__dict__
        if held.get("loss") is None:
            held["loss"] = held["_compute_loss"](self)
        found: torch.Tensor = held["loss"]
        return found

    def __getitem__(self, key: Any) -> Any:
        return self.loss if key == "loss" else super().__getitem__(key)


_made: dict[type, type] = {}
