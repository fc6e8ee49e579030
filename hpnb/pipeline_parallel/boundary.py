"""What passes from one stage to the next: tensors, in tuples or dicts, whose shapes the batch decides.

The receiver must make room before anything arrives, so it has to know the shapes. The first time that a
microbatch of some signature (shapes and dtypes of its inputs) passes, the sender says them; from then on both
sides know, since both have the same batch. Nothing is said twice, and a batch padded to another length is
just another signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hpnb.pipeline_parallel.transfers import Shape


@dataclass(frozen=True)
class Boundary:
    """The form of what one stage gives to the next.

    Attributes:
        form: how tuples, lists and dicts nest.
        shapes: of each tensor, in order.
        trained: which of the tensors are sent a gradient back.
        others: (place, value) of what is no tensor, such as None; it is the same in every step.
    """

    form: TreeSpec
    shapes: tuple[Shape, ...]
    trained: tuple[bool, ...]
    others: tuple[tuple[int, Any], ...] = ()

    @staticmethod
    def of(value: Any) -> Boundary:
        leaves, form = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
        return Boundary(
            form, tuple((t.shape, t.dtype) for t in tensors), tuple(t.requires_grad for t in tensors), others
        )

    @property
    def gradients(self) -> list[Shape]:
        """Of what comes back."""
        return self.backwards(self.shapes)

    def backwards(self, items: Sequence[Any]) -> list[Any]:
        """Those of `items`, one a tensor, whose tensor is sent a gradient back."""
        return [item for item, trained in zip(items, self.trained, strict=True) if trained]

    def put_together(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the next stage is given: leaves of a new graph."""
        for tensor, trained in zip(tensors, self.trained, strict=True):
            tensor.requires_grad_(trained)
        leaves: list[Any] = list(tensors)
        for place, other in self.others:
            leaves.insert(place, other)
        return tree_unflatten(leaves, self.form)

    def __str__(self) -> str:
        tensors = [
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}{' with gradient' * trained}"
            for (shape, dtype), trained in zip(self.shapes, self.trained, strict=True)
        ]
        return ", ".join([*tensors, *(f"{other!r}" for _, other in self.others)])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a stage gives, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def edges(tensors: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Where a backward starts. Edges, and not the tensors: what has been sent need not be kept."""
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
