"""The loss over all data-parallel ranks, and outputs whose gradients are the gradients of that loss.

    loss = sum_r total_r / N          total_r: the sum over this rank's n_r targets;  N = sum_r n_r
         = sum_r (n_r / N) mean_r     mean_r: what a criterion gives, total_r / n_r

Gradients are summed over the ranks, so each rank has to contribute d/dw (n_r / N) mean_r. But the user
computes mean_r from the outputs of one or several forwards, each with its n_r / N, and may divide it by a
number of accumulated batches or add other terms. So `booster.backward` multiplies the loss by the mean share
n_r / N of the forwards before it, and each tensor of the outputs passes through an identity

    forward   y = x          backward   dx = share / (mean share) dy

and any linear combination of means over this rank's targets has the exact gradient. With ZeRO 3 the loss is
not multiplied, and outputs carry their full share. An input that needs a gradient may come from another
boosted model, such as a generator before a discriminator. That model multiplies by its share, so the input
passes through an identity whose backward divides by this model's factor. If this rank's share is the
same in all these forwards, as usual, the factors are 1, so second derivatives are exact too: a gradient
penalty.
`outputs.loss` has the same backward, and the value over all ranks. The n_r are summed on the GPUs, so no CPU
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers.utils import ModelOutput

from hpnb import comm
from hpnb.mesh import Axis
from hpnb.tensor_parallel.lazy_logits import LazyLogits


class _Backward:
    """What the loss of the backward that runs has been multiplied by; a class, since autograd has threads.

    Attributes:
        is_weighted: whether somebody has multiplied it.
        share: by what; None if the backward starts from total_r / N, which leaves nothing to multiply.
    """

    is_weighted = False
    share: torch.Tensor | float | None = None


class _Forwards:
    """The shares of forwards of all boosted models in training since `mean_share` was called."""

    total: torch.Tensor | float = 0.0
    number = 0
    mean: torch.Tensor | float | None = None  # that it returned


def mean_share(axis: Axis) -> torch.Tensor | float | None:
    """(), float64, by which to multiply a loss: 0 if this rank had no targets in any forward. Over the ranks
    it sums up to 1, so a term made of parameters alone counts once. None without other ranks."""
    if _Forwards.number:
        _Forwards.mean = _Forwards.total / _Forwards.number
        _Forwards.total, _Forwards.number = 0.0, 0
    if axis.size == 1:
        return None
    return 1 / axis.size if _Forwards.mean is None else _Forwards.mean


@contextmanager
def loss_weighted(share: torch.Tensor | float | None = None) -> Iterator[None]:
    """Around a backward whose loss has been multiplied by `share`, or starts from total_r / N already."""
    before = _Backward.is_weighted, _Backward.share
    _Backward.is_weighted, _Backward.share = True, share
    try:
        yield
    finally:
        _Backward.is_weighted, _Backward.share = before


@dataclass(eq=False)
class _Share:
    """n_r / N of a forward, (), float64, which is known after it; `trains` if a loss may be made of it."""

    trains: bool = False
    value: torch.Tensor | None = None

    def factor(self) -> torch.Tensor | None:
        """What outputs have still to multiply their gradients by; None is 1."""
        if not _Backward.is_weighted:
            return self.value
        return None if _Backward.share is None or self.value is None else self.value / _Backward.share


class Weigher:
    """Multiplies the gradients of a model's outputs by this rank's share of all targets along `axis`."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._counts: list[torch.Tensor] | None = []  # of forwards with gradients before `take_counts`

    def enter(self, inputs: Any, training: bool) -> tuple[Any, _Share]:
        """`inputs` of a forward, and what `__call__` needs after it."""
        share = _Share(training and torch.is_grad_enabled())
        trained = torch.is_grad_enabled() and any(map(_is_trained, tree_leaves(inputs)))
        if self.axis.size == 1 or not trained:
            return inputs, share
        divide = lambda x: _ScaleGradient.apply(x, None, share, True) if _is_trained(x) else x  # noqa: E731
        return tree_map(divide, inputs), share

    def take_counts(self) -> list[int]:
        """The targets that each forward before this call has counted on this rank, by which its outputs are
        weighed; once, since it waits for the device."""
        counts, self._counts = self._counts or [], None
        return [int(count) for count in counts]

    def __call__(self, outputs: Any, count: torch.Tensor, share: _Share) -> Any:
        """`outputs`, the same object or a new one, with the factor in place; `count`, () in float64, is of
        this rank's targets, and `share` what `enter` returned."""
        loss = getattr(outputs, "loss", None)
        if self.axis.size == 1 or (loss is None and not torch.is_grad_enabled()):
            return outputs
        if self._counts is not None and torch.is_grad_enabled():
            self._counts.append(count)
        total = torch.zeros_like(count)
        if loss is not None:  # the mean over no targets may be nan, and must not count
            total = torch.where(count > 0, loss.detach().double() * count, 0.0)
        sums = comm.all_reduce(torch.stack([count, total]), self.axis)
        share.value = count / sums[0].clamp(min=1)
        if share.trains and not _Backward.is_weighted:  # no forward of a step, or of recomputation
            _Forwards.total, _Forwards.number = _Forwards.total + share.value, _Forwards.number + 1

        def weigh(x: Any) -> Any:
            return _ScaleGradient.apply(x, None, share, False) if _is_trained(x) else x

        if not isinstance(outputs, ModelOutput):
            return _map_tensors(outputs, weigh)
        for name in list(outputs.keys()):
            if name == "loss":
                assert loss is not None
                value = (sums[1] / sums[0].clamp(min=1)).to(loss.dtype)
                outputs[name] = _ScaleGradient.apply(loss, value, share, False)
            elif name == "logits" and isinstance(outputs, LazyLogits) and outputs.is_lazy:  # sharded along tp
                outputs.local_logits = weigh(outputs.local_logits)
            else:
                outputs[name] = _in_containers(outputs[name], weigh)
        return outputs


def _is_trained(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _map_tensors(outputs: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to each tensor in the outputs of a model that is not from transformers."""
    if is_dataclass(outputs) and not isinstance(outputs, type):
        values = {
            field.name: _in_containers(getattr(outputs, field.name), change) for field in fields(outputs)
        }
        return replace(outputs, **values)
    if not isinstance(outputs, torch.Tensor | tuple | list | dict):
        raise TypeError(
            f"the model returns a {type(outputs).__name__}, in which hpnb finds no tensors; return a "
            "tensor, a tuple or dict of tensors, a dataclass, or a ModelOutput of transformers"
        )
    return _in_containers(outputs, change)


def _in_containers(outputs: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to each tensor, also in subclasses of dict and list, which are leaves to PyTorch."""

    def at_leaf(x: Any) -> Any:
        if isinstance(x, dict | list):
            copied = copy(x)
            for key in x if isinstance(x, dict) else range(len(x)):
                copied[key] = _in_containers(x[key], change)
            return copied
        if isinstance(x, tuple):
            raise TypeError(
                f"the model returns a {type(x).__name__}, which hpnb cannot make anew; return a tuple, a "
                "namedtuple or a dataclass"
            )
        return change(x)

    return tree_map(at_leaf, outputs)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, value: torch.Tensor | None, share: _Share, divides: bool
    ) -> torch.Tensor:
        ctx.share, ctx.divides = share, divides
        return x.view_as(x) if value is None else value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), factor = grads, ctx.share.factor()
        if factor is None:
            return grad, None, None, None
        scaled = grad / factor.to(grad.dtype) if ctx.divides else grad * factor.to(grad.dtype)
        # A rank without targets contributes nothing, even if its own mean is nan.
        return torch.where(factor > 0, scaled, 0.0), None, None, None


# --- a loss that is computed when it is read ------------------------------------------------------------


class LazyLoss(ModelOutput):  # type: ignore[misc]
    """Mixed into a transformers output: computes the loss once, when somebody reads it."""

    _compute_loss: Callable[[Any], torch.Tensor] | None = None

    @property
    def loss(self) -> torch.Tensor | None:
        if self.__dict__.get("loss") is None and self._compute_loss is not None:
            self.__dict__["loss"] = self._compute_loss(self)
        return self.__dict__.get("loss")

    @loss.setter
    def loss(self, loss: torch.Tensor | None) -> None:
        self.__dict__["loss"] = loss

    def __getitem__(self, key: Any) -> Any:
        return self.loss if key == "loss" else super().__getitem__(key)


def with_lazy_loss(outputs: Any, compute_loss: Callable[[Any], torch.Tensor]) -> Any:
    """`outputs` of a transformers model without a loss, whose loss becomes `compute_loss(outputs)` when read:
    a criterion that computes its own loss from the logits then costs nothing twice. Other outputs are
    returned as they are. `compute_loss` must not keep the outputs, because that cycle would keep the logits
    for the step."""
    output_class: Any = type(outputs)
    if not isinstance(outputs, ModelOutput) or "loss" in outputs or not hasattr(outputs, "loss"):
        return outputs
    if isinstance(getattr(output_class, "loss", None), property):
        return outputs
    values = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    lazy = _lazy_class(output_class)(**values)
    vars(lazy)["_compute_loss"] = compute_loss
    return lazy


@cache
def _lazy_class(output_class: Any) -> Any:
    return type(output_class.__name__, (LazyLoss, output_class), {})
