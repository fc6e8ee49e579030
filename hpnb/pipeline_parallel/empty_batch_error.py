"""What an error says if a criterion or a model was called with no samples, and failed because of that.

17 samples in batches of 8 over two replicas end with one sample. The second replica has none, and takes part
in the step with an empty batch. So does a microbatch for which no sample is left.
PyTorch's "cannot reshape tensor of 0 elements into shape [0, -1]" says nothing of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

_REMEDY = {
    "criterion": (
        "A criterion has to return a sum of 0 that depends on its outputs then, such as losses.sum(): "
        "reshape by sizes or by flatten (losses.reshape(labels.shape), logits.reshape(-1, width)), because a "
        "-1 beside a size of 0 is ambiguous"
    ),
    "model": (
        "Its forward has to return outputs of 0 samples that depend on its weights then: reshape by sizes or "
        "by flatten, because a -1 beside a size of 0 is ambiguous"
    ),
}


class EmptyBatchError(ValueError):
    """A criterion or a model raised an error when it was called with no samples."""


@contextmanager
def explaining_empty_batch(what: Literal["criterion", "model"], inputs: Any) -> Iterator[None]:
    """Errors of `what` inside, which was called with `inputs`, say so if these have no samples.

    Raises:
        EmptyBatchError: from the error, if that is one of Python's classes, as PyTorch's operators raise.
    """
    try:
        yield
    except Exception as error:
        says_why = isinstance(error, EmptyBatchError) or type(error).__module__ != "builtins"
        if says_why or isinstance(error, StopIteration) or not _has_no_samples(inputs):
            raise
        raise EmptyBatchError(
            f"the {what} raised {type(error).__name__} ({error}) for an empty batch: this replica has no "
            "samples in this call, because the last ones are fewer than replicas, or than microbatches. "
            f"{_REMEDY[what]}. Or leave such batches out, by plugin.prepare_dataloader(..., drop_last=True)"
        ) from error


def _has_no_samples(inputs: Any) -> bool:
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # of a class that PyTorch does not look into
    sizes = {x.size(0) for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.dim()}
    return sizes == {0}
