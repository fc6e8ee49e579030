"""A batch in microbatches, and how many targets each of them has.

    batch (B, ...)  ->  m microbatches of B/m samples, the first ones one more where it is uneven
    loss            =   sum over microbatches and replicas of (sum of losses) / (count of all targets)

A mean of means is not the mean: with 5 samples in 2 microbatches the third sample would count 1/6 and the
fourth 1/4. So a mean over a microbatch is weighted by its count, and one division by that of all ends it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hpnb.comm import shares

IGNORED = -100  # a target that does not count, as everywhere in PyTorch and transformers
TARGETS = ("labels", "label", "targets", "target")  # what they are called in a batch


def split(batch: Any, microbatches: int) -> list[Any]:
    """`batch`, m times, with its share of every tensor's first dim; what is no tensor goes to all.

    Raises:
        ValueError: fewer samples than microbatches, or tensors that disagree on how many there are.
    """
    rows = rows_of(batch)
    if rows < microbatches:
        raise ValueError(
            f"a batch of {rows} samples cannot be split into {microbatches} microbatches; "
            f"use a batch of at least {microbatches}, or a schedule with at most {rows} microbatches"
        )
    return deal(batch, microbatches)


def deal(batch: Any, microbatches: int, multiple: int = 1) -> list[Any]:
    """As `split`, but with fewer samples than microbatches the last ones have no rows.

    Args:
        multiple: of which all have rows but the last that has any, which takes what is left over.

    Raises:
        ValueError: tensors that disagree on how many samples there are.
    """
    leaves, form = tree_flatten(batch)
    rows = rows_of(batch)
    sizes = [multiple * share for share in shares(rows // multiple, microbatches)]
    last = max((i for i, size in enumerate(sizes) if size), default=0)
    sizes[last] += rows % multiple
    cut = [leaf.split(sizes) if _has_rows(leaf) else [leaf] * microbatches for leaf in leaves]
    return [tree_unflatten([parts[i] for parts in cut], form) for i in range(microbatches)]


def join(outputs: Sequence[Any]) -> Any:
    """Outputs of all microbatches as one: tensors end to end along their first dim, scalars as (m,)."""
    flat = [tree_flatten(output) for output in outputs]
    joined = [_joined(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, flat[0][1])


def signatures(inputs: Sequence[Any]) -> list[Hashable]:
    """What decides the shapes of everything that is computed from each microbatch."""
    form = str(tree_flatten(inputs[0])[1])  # all have the same
    return [(form, tuple(_looks(leaf) for leaf in tree_flatten(one)[0])) for one in inputs]


def _looks(leaf: Any) -> Hashable:
    # Not the values of other things: a name or a number may be another in every step.
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if leaf is None or isinstance(leaf, bool) else type(leaf).__name__


def rows_of(batch: Any) -> int:
    """How many rows all tensors of a batch have.

    Raises:
        ValueError: none has a first dim, or they disagree.
    """
    found = {leaf.size(0) for leaf in tree_flatten(batch)[0] if _has_rows(leaf)}
    if not found:
        raise ValueError("the batch has no tensor with a first dim to split into microbatches")
    if len(found) > 1:
        raise ValueError(
            f"the tensors of the batch have {sorted(found)} rows; each must have as many as there are samples"
        )
    (rows,) = found
    return int(rows)


def samples(inputs: Any) -> int:
    """The rows of a microbatch: those of its first tensor."""
    return next(int(leaf.size(0)) for leaf in tree_flatten(inputs)[0] if _has_rows(leaf))


def targets(inputs: Any, causal: bool = False) -> torch.Tensor | int:
    """How many targets a loss over this microbatch is the mean of: those that are not -100.

    Targets are the entry of a mapping called "labels" ("label", "target", "targets"), or the last tensor of a
    tuple, if they are whole numbers; else every sample counts one.

    Args:
        causal: the target of a position is the next position's, so the first of each row is none.
    """
    found = _labels(inputs)
    if found is None:
        return samples(inputs)
    if causal and found.dim() > 1:
        found = found[:, 1:]
    return found.ne(IGNORED).sum()


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors and arrays on `device`; a mapping of any kind becomes a dict."""
    if isinstance(batch, Mapping):
        batch = dict(batch)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(move, batch)


def _labels(inputs: Any) -> torch.Tensor | None:
    found = None
    if isinstance(inputs, Mapping):
        found = next((inputs[name] for name in TARGETS if name in inputs), None)
    elif isinstance(inputs, tuple | list) and len(inputs) > 1:
        found = inputs[-1]
    if isinstance(found, torch.Tensor) and not found.is_floating_point() and found.dtype != torch.bool:
        return found if found.dim() else None
    return None


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _joined(parts: tuple[Any, ...]) -> Any:
    if all(map(_has_rows, parts)):
        return torch.cat(parts)
    return torch.stack(parts) if isinstance(parts[0], torch.Tensor) else parts[0]
