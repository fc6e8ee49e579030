"""The models that hpnb can take apart, and the questions that are asked of them.

A model of your own joins them with `register`, a page of roles and an Anatomy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import (
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    ViTForImageClassification,
    ViTModel,
)

from hpnb.models import gpt2_parts, vit_parts
from hpnb.models.model_anatomy import Anatomy, Attention, apply_wrappers
from hpnb.models.role import Role, check

Questions = tuple[Callable[[Any], Anatomy], Callable[[Any], Mapping[str, Role]]]
Attentions = Callable[[Any], tuple[Attention, ...]]
M = TypeVar("M", bound=nn.Module)

REGISTERED: dict[type[nn.Module], Questions] = {
    ViTForImageClassification: (vit_parts.anatomy, vit_parts.roles),
    ViTModel: (vit_parts.anatomy, vit_parts.roles),
    GPT2LMHeadModel: (gpt2_parts.anatomy, gpt2_parts.roles),
    GPT2ForSequenceClassification: (gpt2_parts.anatomy, gpt2_parts.roles),
    GPT2Model: (gpt2_parts.anatomy, gpt2_parts.roles),
}

COUNT_HEADS: dict[type[nn.Module], Attentions] = {
    ViTForImageClassification: vit_parts.attentions,
    ViTModel: vit_parts.attentions,
    GPT2LMHeadModel: gpt2_parts.attentions,
    GPT2ForSequenceClassification: gpt2_parts.attentions,
    GPT2Model: gpt2_parts.attentions,
}


def register(
    kind: type[M],
    anatomy: Callable[[M], Anatomy],
    roles: Callable[[M], Mapping[str, Role]],
    attentions: Callable[[M], tuple[Attention, ...]] | None = None,
) -> None:
    """Let hpnb take models of class `kind` apart, and those of its subclasses that are not registered.

    It holds for this process: ranks register too, at best in the module that defines the class. A class that
    is registered again gets the new answers.

    Args:
        anatomy: gives the model's pieces; run one after the other, they are its forward.
        roles: gives {full name: Role}. Names that a model lacks do no harm; `hpnb.models.role` has `linear`,
            `conv1d` and `norm` for whole modules.
        attentions: gives the modules that count heads besides their weights, in order of blocks. Left out,
            there are none: an attention that folds heads by their width needs nothing else.

    Raises:
        TypeError: `kind` is no class of modules.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        given = kind.__name__ if isinstance(kind, type) else f"an object of class {type(kind).__name__}"
        raise TypeError(f"register takes a class of modules, not {given}; pass the class, not a model")
    REGISTERED[kind] = (anatomy, roles)
    COUNT_HEADS.pop(kind, None)
    if attentions is not None:
        COUNT_HEADS[kind] = attentions


def anatomy(model: nn.Module) -> Anatomy:
    """The embedding, blocks and head of `model`: where it may be cut.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: a GPT-2 with cross attention.
    """
    return apply_wrappers(model, REGISTERED[_kind(model)][0](model))


def roles(model: nn.Module) -> dict[str, Role]:
    """What each parameter of `model` is: {full name: Role}, in the order of `model.named_parameters()`.

    A tied parameter stands under its first name. Roles are those of whole weights, so ask before a strategy
    cuts them.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: the model has parameters that its kind does not have, or of shapes that do not fit their
            roles.
    """
    found = _roles(model)
    for name, role in found.items():
        check(name, role, model.get_parameter(name).shape)
    return found


def attentions(model: nn.Module) -> tuple[Attention, ...]:
    """The modules of `model` that count heads besides their weights, in order of blocks.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
    """
    kind = _kind(model)
    return COUNT_HEADS[kind](model) if kind in COUNT_HEADS else ()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: with `weight_decay` what decays, with 0 what does not.

    Frozen parameters are in neither. The model may be cut or sharded already.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: the model has parameters that its kind does not have.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, role in _roles(model).items():
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            groups[role.decay].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def _roles(model: nn.Module) -> dict[str, Role]:
    table = REGISTERED[_kind(model)][1](model)
    names = [name for name, _ in model.named_parameters()]
    if strange := [name for name in names if name not in table]:
        told = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        raise ValueError(
            f"{len(strange)} of {len(names)} parameters have no role in a {type(model).__name__}: {told}; "
            "ask before modules are added or exchanged"
        )
    return {name: table[name] for name in names}


def _kind(model: nn.Module) -> type[nn.Module]:
    """The registered class that is nearest to the model's own."""
    for kind in type(model).__mro__:
        if kind in REGISTERED:
            return kind
    *names, last = (kind.__name__ for kind in REGISTERED)
    raise TypeError(
        f"hpnb does not know the parts of a {type(model).__name__}; it knows those of {', '.join(names)} and "
        f"{last} (of a wrapped model, pass the model inside; hpnb.models.register adds another kind)"
    )
