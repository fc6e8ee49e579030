"""A microbatch without targets: its gradient is 0, also where the mean over no target is nan.

    loss_fn            (losses * mask).sum() / mask.sum()      0 / 0 if the mask is 0 everywhere
    its gradient       0, the weight of the microbatch, times nan

So the last stage and the loss function see a copy of such a microbatch, in which every label is class 0. The
mean is finite then, and the weight makes its gradient exactly 0. On a GPU every microbatch is copied, and the
GPU decides which copies get other labels: nobody waits for the number of targets.

A function that returns (sum, count) must see the labels as they are. So the copies begin once it has returned
a mean. Before that, in a first step, the backward of a loss that is nan starts from zeros at the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from hpnb.pipeline_parallel.boundary import tensors_in
from hpnb.pipeline_parallel.microbatches import find_labels, replace_labels

_SHOWN: ContextVar[tuple[Any, Any]] = ContextVar("copy and microbatch", default=(None, None))


def with_valid_labels(inputs: Any, lacks_targets: torch.Tensor) -> Any:
    """`inputs`, in which all labels are 0 if `lacks_targets`, a bool () on the device of the labels."""
    labels = find_labels(inputs)
    if labels is None or (lacks_targets.device.type == "cpu" and not lacks_targets):
        return inputs
    return replace_labels(inputs, labels.masked_fill(lacks_targets, 0))


def zeros_from(outputs: Any, inputs: Any) -> torch.Tensor | None:
    """(), 0: its backward gives each of the outputs a gradient of 0. None if no output takes one.

    Also None for a batch without labels. If it is empty its gradients are finite, and the loss function may
    call another model, whose gradients other ranks wait for.
    """
    if find_labels(inputs) is None:
        return None
    # A loss that the model has computed itself may be nan.
    differentiable = [t for t in tensors_in(outputs) if t.requires_grad and (t.dim() or bool(t.isfinite()))]
    return sum((t.sum() * 0 for t in differentiable), torch.zeros(())) if differentiable else None


@contextmanager
def standing_for(copy: Any, microbatch: Any) -> Iterator[None]:
    """Around a call of the loss function with a copy of a microbatch: `microbatch_of` finds it."""
    before = _SHOWN.set((copy, microbatch))
    try:
        yield
    finally:
        _SHOWN.reset(before)


def microbatch_of(inputs: Any) -> Any:
    """The microbatch that `inputs` stand for, for who counts targets inside a loss function."""
    copy, microbatch = _SHOWN.get()
    return microbatch if inputs is copy else inputs
