"""What passes from one stage to the next: tensors, in tuples or dicts, whose shapes the batch decides.

The receiver must know the shapes before anything arrives. When a microbatch of some signature passes for the
first time, the sender sends them too. From then on both sides know them, since both have the same batch. A
signature is the shapes and dtypes of the inputs, whether the step trains, and the dtype of autocast. A batch
that is padded to another length is just another signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hpnb.pipeline_parallel.transfers import TensorSpec


@dataclass(frozen=True)
class Boundary:
    """The structure of what one stage gives to the next.

    Attributes:
        structure: how tuples, lists and dicts nest.
        specs: shape and dtype of each tensor, in order.
        requires_grad: which of the tensors are sent a gradient back.
        others: (position, value) of what is no tensor, such as None; it is the same in every step.
    """

    structure: TreeSpec
    specs: tuple[TensorSpec, ...]
    requires_grad: tuple[bool, ...]
    others: tuple[tuple[int, Any], ...] = ()

    @staticmethod
    def of(value: Any) -> Boundary:
        leaves, structure = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor))
        specs = tuple((t.shape, t.dtype) for t in tensors)
        return Boundary(structure, specs, tuple(t.requires_grad for t in tensors), others)

    @property
    def gradient_specs(self) -> list[TensorSpec]:
        """Of the gradients that come back."""
        return self.select_differentiable(self.specs)

    def select_differentiable(self, items: Sequence[Any]) -> list[Any]:
        """Those of `items`, one a tensor, whose tensor is sent a gradient back."""
        return [item for item, takes_grad in zip(items, self.requires_grad, strict=True) if takes_grad]

    def assemble(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value that the next stage takes, from tensors that arrived: they are leaves of a new graph."""
        for tensor, requires_grad in zip(tensors, self.requires_grad, strict=True):
            tensor.requires_grad_(requires_grad)
        leaves: list[Any] = list(tensors)
        for position, other in self.others:
            leaves.insert(position, other)
        return tree_unflatten(leaves, self.structure)

    def __str__(self) -> str:
        tensors = [
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}{' with gradient' * requires_grad}"
            for (shape, dtype), requires_grad in zip(self.specs, self.requires_grad, strict=True)
        ]
        return ", ".join([*tensors, *(f"{other!r}" for _, other in self.others)])


KnownBoundaries = dict[tuple[int, Hashable], Boundary]  # by stage and signature of a microbatch


class StepBoundaries:
    """The boundaries of one step: those that earlier steps have seen, and those that this one sees first.

    `commit` adds those of this step to those that are known.
    """

    def __init__(self, known: KnownBoundaries, signatures: Sequence[Hashable]) -> None:
        self._known, self._signatures = known, signatures
        self._new: dict[tuple[int, int], Boundary] = {}  # by stage and microbatch

    def get(self, stage: int, microbatch: int) -> Boundary | None:
        """What `stage` gives for this microbatch; None if that is not known yet."""
        known = self._known.get((stage, self._signatures[microbatch]))
        return self._new.get((stage, microbatch)) or known

    def learn(self, stage: int, microbatch: int, boundary: Boundary) -> None:
        self._new[stage, microbatch] = boundary

    def is_known(self, stage: int, microbatch: int, boundary: Boundary) -> bool:
        """Whether earlier steps have seen it, so the next stage knows it as well."""
        known = self._known.get((stage, self._signatures[microbatch]))
        if known is not None and known != boundary:
            gave = f"stage {stage} gave {boundary} for a microbatch like one for which it gave {known}; "
            if (known.specs, known.others) != (boundary.specs, boundary.others):
                raise ValueError(
                    f"{gave}microbatches are alike if their tensors have the same shapes and dtypes, so no "
                    "number or text of the batch may decide the shape of activations: let the shape of a "
                    "tensor decide it, or make a Pipeline for each value"
                )
            raise ValueError(
                f"{gave}where parameters were frozen or thawed since the last step, call .forget() on every "
                "rank before the next one: of the model that boost returned, or of the Pipeline"
            )
        return known is not None

    def commit(self) -> None:
        """The step is done: later steps know its boundaries."""
        self._known.update({(s, self._signatures[m]): made for (s, m), made in self._new.items()})


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in what a stage gives, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def detach_leaf(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def clone_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def grads_of(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Their gradients after a backward, and zeros where it has not come to a leaf."""
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def gradient_edges(tensors: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Where a backward starts. Edges instead of the tensors, so that what was sent need not be kept."""
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
