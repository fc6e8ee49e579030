"""A batch is split into microbatches, and the targets of each are counted.

    batch (B, ...)  ->  m microbatches of B/m samples; where that is uneven, the first ones have one more
    loss            =   sum over microbatches and replicas of (sum of losses) / (count of all targets)

A mean of means is not the mean: with 5 samples in 2 microbatches the third sample would weigh 1/6 and the
fourth 1/4. So each microbatch's mean is weighted by its count, and divided once by the count of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.split_sizes import split_sizes

TARGET_NAMES = ("labels", "label", "targets", "target")  # what targets are called in a batch


def split_batch(batch: Any, microbatches: int, *, multiple: int = 1, allow_empty: bool = False) -> list[Any]:
    """Split every tensor of `batch` along its first dim; all other values, and tensors without dims, go to
    every microbatch.

    Args:
        multiple: the size of every microbatch is a multiple of this; the last one that has samples also takes
            the remainder.
        allow_empty: with fewer samples than microbatches, give the last ones no samples.
    """
    samples = batch_size(batch)
    if samples < microbatches and not allow_empty:
        raise ValueError(
            f"a batch of {samples} samples cannot be split into {microbatches} microbatches; "
            f"use a batch of at least {microbatches}, or a schedule with at most {samples} microbatches"
        )
    leaves, structure = tree_flatten(batch)
    sizes = [multiple * share for share in split_sizes(samples // multiple, microbatches)]
    last = max((i for i, size in enumerate(sizes) if size), default=0)
    sizes[last] += samples % multiple
    columns = [leaf.split(sizes) if _has_samples(leaf) else [leaf] * microbatches for leaf in leaves]
    return [tree_unflatten([column[i] for column in columns], structure) for i in range(microbatches)]


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Join the outputs of all microbatches: tensors along their first dim, tensors without dims into one
    of shape (m,). Of other values the first microbatch's is taken."""
    flat = [tree_flatten(output) for output in outputs]
    joined = [_join_leaves(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, flat[0][1])


def signatures(microbatches: Sequence[Any]) -> list[Hashable]:
    """What decides the shapes of everything that is computed from each microbatch."""
    structure = str(tree_flatten(microbatches[0])[1])  # all have the same
    return [(structure, tuple(_leaf_signature(leaf) for leaf in tree_flatten(m)[0])) for m in microbatches]


def _leaf_signature(leaf: Any) -> Hashable:
    # Of texts and numbers only the type, because they may differ in every step: they must not decide shapes.
    # None and bools may, because they decide paths.
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if leaf is None or isinstance(leaf, bool) else type(leaf).__name__


def batch_size(batch: Any) -> int:
    """How many samples a batch has: the size of the first dim of all its tensors."""
    sizes = {leaf.size(0) for leaf in tree_flatten(batch)[0] if _has_samples(leaf)}
    if not sizes:
        raise ValueError("the batch has no tensor with a first dim to split into microbatches")
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of the batch have {sorted(sizes)} rows; each must have as many as there are samples"
        )
    return int(sizes.pop())


def count_samples(inputs: Any) -> int:
    """The samples of a microbatch: the size of the first dim of its first tensor."""
    return next(int(leaf.size(0)) for leaf in tree_flatten(inputs)[0] if _has_samples(leaf))


def count_targets(inputs: Any, causal: bool = False) -> torch.Tensor | int:
    """How many targets a loss over this microbatch is the mean of: those that are not -100.

    Targets are the entry of a mapping called "labels" ("label", "target", "targets"), or the last entry of a
    tuple or list of several, if it is a tensor of integers; otherwise every sample counts one.

    Args:
        causal: the target of a position is the next position's, so the first of each sequence is none.
    """
    labels = find_labels(inputs)
    if labels is None:
        return count_samples(inputs)
    if causal and labels.dim() > 1:
        labels = labels[:, 1:]
    return labels.ne(IGNORE_INDEX).sum()


def find_labels(inputs: Any) -> torch.Tensor | None:
    """The targets of a batch, if they are integers with a dim of samples (see `count_targets`)."""
    labels = None
    if isinstance(inputs, Mapping):
        labels = next((inputs[name] for name in TARGET_NAMES if name in inputs), None)
    elif isinstance(inputs, tuple | list) and len(inputs) > 1:
        labels = inputs[-1]
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point() and labels.dtype != torch.bool:
        return labels if labels.dim() else None
    return None


def replace_labels(inputs: Any, labels: torch.Tensor) -> Any:
    """A copy of a batch that has labels (`find_labels`), with others instead."""
    if isinstance(inputs, Mapping):
        name = next(name for name in TARGET_NAMES if name in inputs)
        return {**inputs, name: labels}
    replaced = [*inputs[:-1], labels]
    if isinstance(inputs, list):
        return replaced
    return type(inputs)(*replaced) if hasattr(inputs, "_fields") else tuple(replaced)


def find_unnamed_targets(inputs: Any) -> str | None:
    """The entry of a mapping that looks like targets under a name that `count_targets` does not know.

    That is an entry of integers with a -100 among them, in a mapping without any of TARGET_NAMES.
    """
    if not isinstance(inputs, Mapping) or any(name in inputs for name in TARGET_NAMES):
        return None
    for name, value in inputs.items():
        signed = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32, torch.int16)
        if signed and bool(value.eq(IGNORE_INDEX).any()):
            return str(name)
    return None


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors and arrays on `device`; a mapping of any kind becomes a dict."""
    if isinstance(batch, Mapping):
        batch = dict(batch)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, batch)


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _join_leaves(leaves: tuple[Any, ...]) -> Any:
    if all(map(_has_samples, leaves)):
        return torch.cat(leaves)
    return torch.stack(leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0]
