"""Where a transformer may be cut: an embedding, equal blocks one after the other, and a head.

    hidden = embed(inputs)                        # (B, s, h)
    for block in blocks:
        hidden = run(block, hidden, inputs)       # (B, s, h) in and out: here a pipeline may cut
    outputs = finish(hidden, inputs)

That is the model's own forward, taken apart. What passes between two blocks is one tensor of one shape, so a
stage of a pipeline needs nothing of the others but this tensor and the batch. `fully_shard` takes the blocks
as its units. A weight with two homes (an embedding that is also the output layer) is listed as tied: its two
uses may end up on two stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A piece of a model: its dotted path in it, and the module itself."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Anatomy(ABC):
    """The pieces of one model, in the order in which its forward uses them.

    Every parameter of the model lies in exactly one part, unless it is tied.

    Attributes:
        embedding: from the inputs to hidden states.
        blocks: hidden states to hidden states.
        head: from hidden states to outputs.
        tied: full names of parameters that are one and the same, the first one first.
        causal: whether the targets are the inputs, shifted by one.
    """

    embedding: tuple[Part, ...]
    blocks: tuple[Part, ...]
    head: tuple[Part, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    causal: bool = field(default=False, kw_only=True)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.embedding, *self.blocks, *self.head)

    @abstractmethod
    def embed(self, inputs: Inputs) -> torch.Tensor:
        """The batch as the model takes it -> hidden states (B, s, h). Needs the embedding alone."""

    @abstractmethod
    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """One block, (B, s, h) -> (B, s, h). What else it needs, such as a mask, it takes from `inputs`."""

    @abstractmethod
    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        """Hidden states after the last block -> the model's outputs, without a loss. Needs the head alone."""

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        """(B, s) of the hidden states that `embed` makes of this batch; sequence parallelism under a pipeline
        asks."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how many tokens a batch has, which sequence parallelism "
            "under a pipeline needs to know; give it a method tokens(inputs)"
        )


_AROUND = "_hpnb_anatomy"


def wrap(model: nn.Module, around: Callable[[Anatomy], Anatomy]) -> None:
    """From now on `anatomy(model)` is `around` of what it was: a strategy has changed how the parts run."""
    setattr(model, _AROUND, around)


def wrapping(model: nn.Module, around: Callable[[Anatomy], Anatomy]) -> Callable[[Anatomy], Anatomy]:
    """`around` of what `wrap` has been told of `model` before, if it has."""
    inner = model.__dict__.get(_AROUND)
    return around if inner is None else lambda found: around(inner(found))


def wrapped(model: nn.Module, found: Anatomy) -> Anatomy:
    around = model.__dict__.get(_AROUND)
    return found if around is None else around(found)


def tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one and the same: ((first name, other name, ...), ...), or ().

    The first name is the one that `model.named_parameters()` gives.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)
