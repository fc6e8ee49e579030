"""Where a transformer may be split: an embedding, equal blocks one after the other, and a head.

    hidden = embed(inputs)                        # (B, s, h)
    for block in blocks:
        hidden = run(block, hidden, inputs)       # (B, s, h) in and out: a pipeline may split here
    outputs = finish(hidden, inputs)

This is the model's own forward, taken apart. One tensor of one shape passes between two blocks, so a pipeline
stage needs this tensor and the batch, and nothing else of the other stages. `fully_shard` takes the blocks as
its units. A weight with two uses (an embedding that is also the output layer) is listed as tied, because its
two uses may end up on two stages.

Some modules also count heads, beside the shapes of their weights. Tensor parallelism leaves a rank n of an
attention's heads, and tells the attention so:

    for attention in hpnb.models.attentions(model):
        ...                                          # shard the weights at attention.path
        attention.resize(n)                          # heads as wide as before, n of them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A piece of a model: its dotted path in the model, and the module itself."""

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
        needs it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how many tokens a batch has, which sequence parallelism "
            "under a pipeline needs to know; give it a method tokens(inputs)"
        )


@dataclass(frozen=True)
class WrappedAnatomy(Anatomy):
    """An anatomy that does what `inner` does, and something around it: a subclass says what.

    Attributes:
        inner: the anatomy of the model without the change.
    """

    inner: Anatomy = field(kw_only=True)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        return self._inner.embed(inputs)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return self._inner.run(block, hidden, inputs)

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        return self._inner.finish(hidden, inputs)

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        return self.inner.tokens(inputs)

    @property
    def _inner(self) -> Anatomy:
        """The inner one, with the parts that this one has: a pipeline stage has only some of the model's."""
        return replace(self.inner, embedding=self.embedding, blocks=self.blocks, head=self.head)

    @classmethod
    def around(cls, inner: Anatomy, **attributes: Any) -> WrappedAnatomy:
        parts = (inner.embedding, inner.blocks, inner.head, inner.tied)
        return cls(*parts, causal=inner.causal, inner=inner, **attributes)


_WRAPPERS = "_hpnb_anatomy_wrappers"


def wrap_anatomy(model: nn.Module, wrapper: Callable[[Anatomy], Anatomy]) -> None:
    """From now on `anatomy(model)` gives `wrapper` of what it gave: a strategy has changed how the parts run.

    The wrapper stays with the model, also with a copy of it.
    """
    setattr(model, _WRAPPERS, (*vars(model).get(_WRAPPERS, ()), wrapper))


def apply_wrappers(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    for wrapper in vars(model).get(_WRAPPERS, ()):
        anatomy = wrapper(anatomy)
    return anatomy


def tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one and the same: ((first name, other name, ...), ...), or ().

    The first name is the one that `model.named_parameters()` gives.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    return tuple(tuple(names) for names in names_of.values() if len(names) > 1)


@dataclass(frozen=True)
class Attention:
    """One attention of a model.

    Attributes:
        path: its module's dotted path in the model.
        heads: how many heads it computes with now.
        resize: makes it compute with another number of heads of the same width. It leaves the weights alone,
            and what their own modules say of their shapes, such as the nf of transformers' Conv1D.
            ValueError for fewer than 1.
    """

    path: str
    heads: int
    resize: Callable[[int], None]


def check_heads(path: str, heads: int) -> None:
    if heads < 1:
        raise ValueError(f"{path} cannot compute with {heads} heads; 1 is the least")
