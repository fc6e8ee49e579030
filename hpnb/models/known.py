"""The models that hpnb can take apart, and the questions that are asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import ViTForImageClassification, ViTModel

from hpnb.models import vit_parts
from hpnb.models.cut import Anatomy
from hpnb.models.role import Role

Questions = tuple[Callable[[Any], Anatomy], Callable[[Any], dict[str, Role]]]

KNOWN: dict[type[nn.Module], Questions] = {
    ViTForImageClassification: (vit_parts.anatomy, vit_parts.roles),
    ViTModel: (vit_parts.anatomy, vit_parts.roles),
}


def anatomy(model: nn.Module) -> Anatomy:
    """The embedding, blocks and head of `model`: where it may be cut.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
    """
    return _known(model)[0](model)


def roles(model: nn.Module) -> dict[str, Role]:
    """What each parameter of `model` is: {full name: Role}, in the order of `model.named_parameters()`.

    A tied parameter stands under its first name.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: the model has parameters that its kind does not have.
    """
    table = _known(model)[1](model)
    names = [name for name, _ in model.named_parameters()]
    if strange := [name for name in names if name not in table]:
        told = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        raise ValueError(
            f"{len(strange)} of {len(names)} parameters have no role in a {type(model).__name__}: {told}; "
            "ask before modules are added or exchanged"
        )
    return {name: table[name] for name in names}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: with `weight_decay` what decays, with 0 what does not.

    Frozen parameters are in neither.

    Raises:
        TypeError, ValueError: as `roles`.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, role in roles(model).items():
        parameter = model.get_parameter(name)
        if parameter.requires_grad:
            groups[role.decay].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def _known(model: nn.Module) -> Questions:
    for kind, questions in KNOWN.items():
        if isinstance(model, kind):
            return questions
    names = " and ".join(kind.__name__ for kind in KNOWN)
    raise TypeError(
        f"hpnb does not know the parts of a {type(model).__name__}; it knows those of {names} (of a wrapped "
        "model, pass the model inside)"
    )
