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
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import nn

from hpnb.meta_device import fill_buffers

Inputs = Mapping[str, Any]
TARGETS = ("labels", "label", "targets", "target")  # entries of a batch that only the loss reads


@dataclass(frozen=True)
class Part:
    """A piece of a model: its dotted path in the model, and the module itself. The path is "" for parameters
    of the model itself (`root_parameters`)."""

    name: str
    module: nn.Module

    def full_name(self, name: str) -> str:
        """The name in the model of what is called `name` in the part."""
        return f"{self.name}.{name}" if self.name else name


def root_parameters(model: nn.Module, *names: str) -> Part:
    """The part of parameters that lie on the model itself, such as a class token.

        tokens = root_parameters(net, "cls_token", "positions")      # a Part of the embedding
        tokens.module.cls_token                                      # in `embed`

    Raises:
        ValueError: the model itself has no parameter of such a name.
    """
    holder = nn.Module()
    for name in names:
        if model._parameters.get(name) is None:
            have = ", ".join(name for name, p in model._parameters.items() if p is not None) or "none"
            raise ValueError(f"a {type(model).__name__} itself has no parameter {name!r}; it has {have}")
        holder.register_parameter(name, model._parameters[name])
    return Part("", holder)


@dataclass(frozen=True)
class Anatomy(ABC):
    """The pieces of one model, in the order in which its forward uses them.

    Every parameter of the model lies in exactly one part, unless it is tied. One that lies on the model
    itself (a class token) gets a part by `root_parameters`. A block that the forward runs twice, or that
    stands in two slots of a list, is listed twice. A pipeline keeps its copies equal as it does with tied
    weights; sequence parallelism and the tensor-parallel grids refuse it.

    What all blocks read besides hidden states, such as rotary tables, is an attribute that you set on the
    Anatomy: a module without parameters, a tensor, a configuration. It goes along with every stage, to its
    device. A buffer of such a module must not be in the state dict: register it with persistent=False.

        parts = LlamaParts((Part("tok", net.tok),), blocks, (Part("norm", net.norm), Part("out", net.out)))
        parts.rotary = net.rotary                        # and in `run`: self.rotary(positions)

    A mask comes from `inputs`, in `run`, and not from an attribute, because it belongs to a batch. Grouped
    queries need nothing here: `roles` gives k and v as many units as there are key-value heads.

    Attributes:
        embedding: from the inputs to hidden states.
        blocks: hidden states to hidden states. There may be none, as in a small generator; sequence
            parallelism and the grids, which split hidden states in front of the first one, then refuse it.
        head: from hidden states to outputs.
        tied: a tuple of full names for each parameter that has several, the first one first.
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

    @property
    def has_router_loss(self) -> bool:
        """Whether the outputs that `finish` gives have the balancing loss of the routers of all blocks."""
        return False

    def with_parts(
        self, embedding: tuple[Part, ...] = (), blocks: tuple[Part, ...] = (), head: tuple[Part, ...] = ()
    ) -> Self:
        """The same with these parts alone; every attribute stays."""
        other = copy(self)
        for name, value in (("embedding", embedding), ("blocks", blocks), ("head", head)):
            object.__setattr__(other, name, value)  # frozen, and a subclass may take other arguments
        return other

    def shared(self) -> dict[str, nn.Module | torch.Tensor]:
        """Modules and tensors that are attributes: what all blocks read besides hidden states."""
        known = {f.name for f in fields(Anatomy)}
        return {
            name: value
            for name, value in vars(self).items()
            if name not in known and isinstance(value, nn.Module | torch.Tensor)
        }

    def move_shared(self, device: torch.device) -> None:
        """Move these to `device`: modules in place, tensors as attributes of this Anatomy alone."""
        for name, value in self.shared().items():
            if isinstance(value, nn.Module):
                fill_buffers(value, device, name)
            elif value.is_meta and device.type != "meta":
                raise ValueError(
                    f"the tensor {name} of {type(self).__name__} is on the meta device and in no state dict, "
                    "so nothing would fill it: make it on the CPU"
                )
            object.__setattr__(self, name, value.to(device))

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
        needs it. Stages without the embedding are asked, too: take it from `inputs`, or from a field."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how many tokens a batch has, which sequence parallelism "
            "under a pipeline needs to know: give the class a method tokens(self, inputs) that returns "
            "(samples, tokens of each), such as inputs['input_ids'].shape; or leave sequence parallelism "
            "out, as for blocks that slice hidden states by tokens or multiply along them"
        )

    def check_stages(self, needs_tokens: bool = False) -> None:
        """Called before a pipeline makes stages of it.

        Args:
            needs_tokens: whether stages will call `tokens`.

        Raises:
            NotImplementedError: they will, and there is none.
        """
        if needs_tokens and type(self).tokens is Anatomy.tokens:
            self.tokens({})


@dataclass(frozen=True)
class WrappedAnatomy(Anatomy):
    """An anatomy that does what `inner` does, and something around it: a subclass says what.

    Attributes:
        inner: the anatomy of the model without the change.
    """

    inner: Anatomy = field(kw_only=True)

    def embed(self, inputs: Inputs) -> torch.Tensor:
        return self.inner.embed(inputs)

    def run(self, block: Part, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return self.inner.run(block, hidden, inputs)

    def finish(self, hidden: torch.Tensor, inputs: Inputs) -> Any:
        return self.inner.finish(hidden, inputs)

    def tokens(self, inputs: Inputs) -> tuple[int, int]:
        return self.inner.tokens(inputs)

    def check_stages(self, needs_tokens: bool = False) -> None:
        self.inner.check_stages(needs_tokens)

    @property
    def has_router_loss(self) -> bool:
        return self.inner.has_router_loss

    def with_parts(
        self, embedding: tuple[Part, ...] = (), blocks: tuple[Part, ...] = (), head: tuple[Part, ...] = ()
    ) -> Self:
        """The inner one has these alone as well, or a stage would keep the weights of all the others."""
        other = super().with_parts(embedding, blocks, head)
        object.__setattr__(other, "inner", self.inner.with_parts(embedding, blocks, head))
        return other

    def shared(self) -> dict[str, nn.Module | torch.Tensor]:
        return self.inner.shared()

    def move_shared(self, device: torch.device) -> None:
        self.inner.move_shared(device)

    @classmethod
    def around(cls, inner: Anatomy, **attributes: Any) -> WrappedAnatomy:
        parts = (inner.embedding, inner.blocks, inner.head, inner.tied)
        return cls(*parts, causal=inner.causal, inner=inner, **attributes)


_WRAPPERS = "_hpnb_anatomy_wrappers"


def wrap_anatomy(model: nn.Module, wrapper: Callable[[Anatomy], Anatomy], innermost: bool = False) -> None:
    """From now on `anatomy(model)` gives `wrapper` of what it gave: a strategy has changed how the parts run.

    The wrapper stays with the model, also with a copy of it.

    Args:
        innermost: it is applied before all that the model has, which ask it for the tokens of a batch.
    """
    others = vars(model).get(_WRAPPERS, ())
    setattr(model, _WRAPPERS, (wrapper, *others) if innermost else (*others, wrapper))


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
    """One attention of a model: a module whose first argument is hidden states.

    Tensor parallelism gives it some of the heads. On a grid it has some of the samples too, and its other
    arguments are split with them if their first dimension has an entry per sample, as in a mask (B, s) or
    (B, 1, s, s). `hpnb.models.register` has the rule.

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


def set_heads(path: str, attention: Any, count: str, width: str | None, heads: int) -> None:
    """Let `attention` compute `heads` heads; `count` and `width` name its attributes for their number and for
    the width of all of them."""
    check_heads(path, heads)
    setattr(attention, count, heads)
    if width is not None:
        setattr(attention, width, heads * attention.head_dim)


def tokens_of_ids(anatomy: Anatomy, inputs: Inputs) -> tuple[int, int]:
    """`Anatomy.tokens` of a model that reads input_ids (B, s)."""
    batch_size, length = inputs["input_ids"].shape
    return batch_size, length


def check_token_ids(kind: str, inputs: Inputs, refused: Sequence[str]) -> torch.Tensor:
    """The input_ids (B, s) of a batch for a `kind` of model that is cut."""
    if given := [name for name in refused if inputs.get(name) is not None]:
        raise ValueError(f"a {kind} that is cut takes no {given[0]}; give it input_ids (B, s) alone")
    ids: torch.Tensor | None = inputs.get("input_ids")
    if ids is None:
        names = ", ".join(map(str, inputs)) or "nothing"
        raise ValueError(f"a {kind} that is cut takes input_ids (B, s), and this batch has {names}")
    if ids.dim() != 2:
        raise ValueError(f"input_ids of shape {tuple(ids.shape)} are not (B, s), sequences of tokens")
    return ids
