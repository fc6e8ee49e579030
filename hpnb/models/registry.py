"""The models that hpnb can take apart: their parts, the roles of their weights, their attentions.

`register` adds a model of your own: an Anatomy, and for tensor parallelism a table of roles.
"""

# ruff: noqa: E402
from __future__ import annotations

from hpnb.ranks.forkserver import start_ahead

start_ahead("hpnb.models.registry")  # in a notebook, the rank server imports transformers meanwhile

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers import (
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    PreTrainedModel,
    ViTForImageClassification,
    ViTModel,
)

from hpnb.models import gpt2_parts, plan_parts, plan_roles, vit_parts
from hpnb.models.model_anatomy import Anatomy, Attention, Part, apply_wrappers
from hpnb.models.role import Role, check
from hpnb.ranks.caller_globals import share_table

M = TypeVar("M", bound=nn.Module)


def _no_roles(model: nn.Module) -> dict[str, Role]:
    return {}


def _no_attentions(model: nn.Module) -> tuple[Attention, ...]:
    return ()


def _takes_any_sharding(model: nn.Module, mode: str, sequence_parallel: bool) -> None:
    pass


class Registration(NamedTuple):
    """The functions that describe models of one class; see `register`."""

    anatomy: Callable[[Any], Anatomy]
    roles: Callable[[Any], Mapping[str, Role]] = _no_roles
    attentions: Callable[[Any], tuple[Attention, ...]] = _no_attentions
    check_sharding: Callable[[Any, str, bool], None] = _takes_any_sharding


_VIT = Registration(vit_parts.anatomy, vit_parts.roles, vit_parts.attentions)
_GPT2 = Registration(gpt2_parts.anatomy, gpt2_parts.roles, gpt2_parts.attentions)
_PLAN = Registration(plan_parts.anatomy, plan_roles.roles, plan_roles.attentions, plan_roles.check_sharding)
REGISTERED: dict[type[nn.Module], Registration] = {
    ViTForImageClassification: _VIT,
    ViTModel: _VIT,
    GPT2LMHeadModel: _GPT2,
    GPT2ForSequenceClassification: _GPT2,
    GPT2Model: _GPT2,
}

_BUILT_IN = frozenset(REGISTERED)
share_table(__name__, "REGISTERED", _BUILT_IN)


def register(
    kind: type[M],
    anatomy: Callable[[M], Anatomy],
    roles: Callable[[M], Mapping[str, Role]] | None = None,
    attentions: Callable[[M], tuple[Attention, ...]] | None = None,
) -> None:
    """Let hpnb take apart models of class `kind`, and those of its subclasses that are not registered.

    Call it in the module that defines the class, or in the script or notebook: `hpnb.launch` and `hpnb.Ranks`
    send their ranks what is registered. Functions that do not pickle are not sent; register them inside the
    function that runs on the ranks. Registering a class again replaces its functions.

    Args:
        anatomy: gives the model's pieces; run one after the other, they are its forward.
        roles: gives {full name: Role}. Names that a model lacks do no harm; `hpnb.models.role` has
            `embedding`, `linear`, `conv1d` and `norm` for whole modules. `units` counts what a split must not
            go through: heads for q and o, key-value heads for k and v, neurons for an MLP. The heads that
            read one key-value head stay with it on a rank, so key-value heads may be the units of all four.
            Left out, or with an empty dict, every layout without tensor parallelism works, pipelines and ZeRO
            included.
        attentions: gives the modules that count heads besides their weights, in order of blocks. Left out,
            there are none: an attention that folds heads by their width needs nothing else. "3d" needs them
            where an attention takes a mask.

    The grids "2d", "2.5d" and "3d" split the samples of a batch. What an attention gets beside hidden states
    is split if its first dimension has an entry per sample, by position, by name or in a tuple; in "2d" and
    "2.5d" so is what a block gets. Other arguments stay as they are, such as a mask (1, 1, s, s). Where a
    batch has as many samples as tokens, what has fewer than 4 dimensions could be either and is refused,
    unless it is called attention_mask or position_ids. So is what needs a gradient.

    `hpnb.models.check(model, batch)` runs what is registered, and says what differs from the model.

    Raises:
        TypeError: `kind` is no class of modules.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        got = kind.__name__ if isinstance(kind, type) else f"an object of class {type(kind).__name__}"
        raise TypeError(f"register takes a class of modules, not {got}; pass the class, not a model")
    REGISTERED[kind] = Registration(anatomy, roles or _no_roles, attentions or _no_attentions)


def is_known(model: nn.Module) -> bool:
    """Whether hpnb, `register` or a plan of transformers describes the class of this model."""
    return any(kind in REGISTERED for kind in type(model).__mro__) or plan_parts.has_plan(model)


def has_roles(model: nn.Module) -> bool:
    """Whether the weights of this model have roles, without which tensor parallelism cannot shard it."""
    return bool(_table_of(model))


def is_not_built_in(model: nn.Module) -> bool:
    """Whether `register` or a plan of transformers described the class of this model, and not hpnb."""
    nearest = next((kind for kind in type(model).__mro__ if kind in REGISTERED), None)
    return plan_parts.has_plan(model) if nearest is None else nearest not in _BUILT_IN


def anatomy(model: nn.Module) -> Anatomy:
    """The embedding, blocks and head of `model`: where it may be split.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: a GPT-2 with cross attention; a model of transformers whose pipeline plan names no list of
            layers or leaves weights out; or what is registered gives no Anatomy of tuples of Parts.
    """
    parts = registration_of(model).anatomy(model)
    _check_anatomy(model, parts)
    return apply_wrappers(model, _name_places(model, parts))


def roles(model: nn.Module) -> dict[str, Role]:
    """What each parameter of `model` is: {full name: Role}, in the order of `model.named_parameters()`.

    A tied parameter stands under its first name. Roles are those of unsplit weights, so ask before a strategy
    shards them.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: the model has parameters that its kind does not have, or of shapes that do not fit their
            roles; its class is registered without roles, or what is registered gives no dict of Roles.

    >>> hpnb.models.roles(hpnb.models.vit("laptop", classes=3))["vit.layers.0.mlp.fc1.weight"].kind
    'column'
    """
    table = _roles(model)
    for name, role in table.items():
        check(name, role, model.get_parameter(name).shape)
        weight = table.get(f"{name.removesuffix('bias')}weight") if role.bias else None
        if name.endswith(".bias") and weight is not None and weight.kind != role.kind:
            raise ValueError(
                f"{name} has the role {role.kind!r}, and its weight the role {weight.kind!r}; a bias has the "
                "kind of its weight"
            )
    return table


def attentions(model: nn.Module) -> tuple[Attention, ...]:
    """The modules of `model` that count heads besides their weights, in order of blocks.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
    """
    return registration_of(model).attentions(model)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: with `weight_decay` what decays, with 0 what does not.

    Frozen parameters are in neither. The model may be sharded already.

    Raises:
        TypeError: a model of another kind, or one that is wrapped.
        ValueError: the model has parameters that its kind does not have, or no roles.
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


def _check_anatomy(model: nn.Module, parts: Any) -> None:
    if not isinstance(parts, Anatomy):
        raise ValueError(
            f"the function that gives the parts of a {type(model).__name__} returned {_describe(parts)}; "
            "return an object of your subclass of hpnb.models.Anatomy"
        )
    for section in ("embedding", "blocks", "head"):
        value = getattr(parts, section)
        wrong = [value]
        if isinstance(value, tuple | list):
            wrong = [p for p in value if not (isinstance(p, Part) and isinstance(p.module, nn.Module))]
        if wrong:
            raise ValueError(
                f"{section} of the {type(parts).__name__} of a {type(model).__name__} has "
                f"{_describe(wrong[0])} where a tuple of Part(name, module) is needed; one part alone is "
                "(Part(name, module),)"
            )
    if isinstance(parts.tied, str) or any(isinstance(names, str) for names in parts.tied):
        raise ValueError(
            f"tied of the {type(parts).__name__} of a {type(model).__name__} is {parts.tied!r}, where a "
            "tuple with a tuple of names for each weight is needed; one tied weight alone is "
            "((first_name, other_name),), and hpnb.models.tied(model) gives all"
        )


def _name_places(model: nn.Module, parts: Anatomy) -> Anatomy:
    """A block that is listed several times under one name gets the other names that it has in the model.

    `named_modules()` gives a block that stands in two slots of a list under its first name alone.
    """
    listed = [(block.name, block.module) for block in parts.blocks]
    if len(set(listed)) == len(listed):
        return parts
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    blocks: list[Part] = []
    for i, block in enumerate(parts.blocks):
        earlier = [other.name for other in blocks if other.module is block.module]
        free = [name for name in names.get(block.module, []) if name not in earlier]
        again = (block.name, block.module) in listed[:i]
        blocks.append(Part(free[0], block.module) if again and free else block)
    return parts.with_parts(parts.embedding, tuple(blocks), parts.head)


def explain_alias(model: nn.Module, name: str, known: Collection[str]) -> str | None:
    """A sentence, if `name` is in no part because its tensor lies there under another of its names.

    Args:
        known: names of what lies in parts.
    """
    tensors = model.state_dict(keep_vars=True)
    other = next((other for other in known if tensors.get(other) is tensors[name]), None)
    if other is None:
        return None
    return (
        f"{name} and {other} are one weight of this {type(model).__name__}, and only {other} lies in a Part: "
        "put the module of the other name into one, too (a block once for each place at which it runs), or "
        "leave the model one name for it"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Part):
        what = "one that is in no tuple" if isinstance(value.module, nn.Module) else "whose module is none"
        return f"Part({value.name!r}, ..), {what}"
    return "None" if value is None else f"a {type(value).__name__}"


SEE_CHECK = "; hpnb.models.check(model, batch) says what else is missing"


def _table_of(model: nn.Module) -> Mapping[str, Role]:
    """What is registered as the roles of this model."""
    table = registration_of(model).roles(model)
    if not isinstance(table, Mapping):
        pairs = "; dict(pairs) makes one of pairs" if isinstance(table, list | tuple) else ""
        raise ValueError(
            f"the function that gives the roles of a {type(model).__name__} returned {_describe(table)}; "
            f"return a dict of {{name of a parameter: Role}}{pairs}"
        )
    return table


def _roles(model: nn.Module) -> dict[str, Role]:
    table, kind = _table_of(model), type(model).__name__
    if not table:
        raise ValueError(
            f"{kind} is registered without roles, so nothing says how its weights may be sharded: pass them "
            f"to hpnb.models.register({kind}, parts, roles) for tensor parallelism and decay_groups; "
            "pipelines, data parallelism and ZeRO need none"
        )
    names = [name for name, _ in model.named_parameters()]
    if wrong := [name for name in names if name in table and not isinstance(table[name], Role)]:
        raise ValueError(
            f"the role of {wrong[0]} in a {kind} is {table[wrong[0]]!r}, which is no "
            "hpnb.models.Role; hpnb.models.role.linear(path, 'column', units) gives those of an nn.Linear"
        )
    if unknown := [name for name in names if name not in table]:
        listed = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        add = "add them to the roles that you register, or " if is_not_built_in(model) else ""
        raise ValueError(
            f"{len(unknown)} of {len(names)} parameters have no role in a {kind}: {listed}; "
            f"{add}ask before modules are added or exchanged{SEE_CHECK}"
        )
    return {name: table[name] for name in names}


def registration_of(model: nn.Module) -> Registration:
    """That of the nearest registered class."""
    for kind in type(model).__mro__:
        if kind in REGISTERED:
            return REGISTERED[kind]
    if plan_parts.has_plan(model):
        return _PLAN
    *names, last = (kind.__name__ for kind in REGISTERED)
    plans = ""
    if isinstance(model, PreTrainedModel):
        plans = ", and of models to which transformers gives a tensor and a pipeline plan, such as Llama"
    raise TypeError(
        f"hpnb does not know the parts of a {type(model).__name__}; it knows those of {', '.join(names)} and "
        f"{last}{plans}. {how_to_register(model)}"
    )


def how_to_register(model: nn.Module) -> str:
    """What to do about a model that is not known, as the end of a message."""
    kind = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return (
            f"A {kind} is an encoder and a decoder, which are no single row of blocks, so it cannot be "
            "registered either: use data parallelism and ZeRO, which take it as it is"
        )
    return (
        "Data parallelism and ZeRO take it as it is. Of a wrapped model, pass the model inside. "
        f"hpnb.models.register({kind}, parts, roles) adds it: call it in the module that defines the model, "
        "in the script or notebook that launches the ranks, or, if the functions do not pickle, inside the "
        "function that runs on the ranks; "
        "hpnb.models.check(model, batch) checks it, and examples/own_model.py shows how"
    )
