"""The role of each weight of a transformers model, read off the tensor plan that its configuration publishes.

    colwise                          column                 q, k, v, gate and up
    rowwise                          row                    o and down
    packed_colwise                   column, fused=2        gate and up side by side in one weight
    replicated_with_grad_allreduce   replicated             norms of q and k: a rank has some heads, so its
                                                            gradient is summed over the ranks
    colwise_gather_output,           column and row where q, k, v or gate, up lie side by side; else the
    rowwise_split_input              attention is replicated (norms over all heads need all of them)

An attention is split by key-value heads, each with the query heads that read it: Llama-3 8B has 8 of them, so
3 ranks get 3, 3 and 2, with 12, 12 and 8 query heads. Experts and latent attention have plans that hpnb does
not follow yet: such a model trains with data and pipeline parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from hpnb.models.model_anatomy import Attention, check_heads
from hpnb.models.plan_parts import anatomy, core_of
from hpnb.models.role import Role

COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
GATHERED = ("colwise_gather_output", "rowwise_split_input")
SUMMED = "replicated_with_grad_allreduce"
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads")


class _Group(NamedTuple):
    """The sharded weights of an attention or an MLP.

    Attributes:
        units: into how many pieces, which stay whole, each of its weights falls; 0 if it is replicated.
        widths: by layer, of what lies side by side in one weight.
        problem: why it cannot be sharded.
    """

    units: int
    widths: dict[str, tuple[int, ...]]
    attention: bool
    problem: str | None = None


def roles(model: Any) -> dict[str, Role]:
    parts = anatomy(model)
    vocabulary = set(_vocabulary(model))
    in_blocks, groups = {p for block in parts.blocks for p in block.module.parameters()}, _groups(model)
    styles = _styles(model)
    table: dict[str, Role] = {}
    for name, p in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        if p not in in_blocks:
            head = any(path == part.name or path.startswith(part.name + ".") for part in parts.head)
            table[name] = _outer_role(p, head, p in vocabulary, attribute == "bias")
        else:
            style = styles.get(name) or styles.get(path)
            parent = path if name in styles else path.rpartition(".")[0]
            if style is None and _inside_sharded(path, groups) and p.dim() < 2:
                style = SUMMED  # such as the parameters of an activation, used on a rank's neurons alone
            table[name] = _role(p, style, groups.get(parent), path, attribute == "bias")
    return table


def attentions(model: Any) -> tuple[Attention, ...]:
    """Attentions that are sharded; they count key-value heads, each with its queries."""
    found = ((path, group) for path, group in _groups(model).items() if group.attention and group.units)
    return tuple(
        Attention(path, group.units, partial(_resize, path, model.get_submodule(path), group.units))
        for path, group in found
    )


def check_sharding(model: Any, mode: str, sequence_parallel: bool) -> None:
    """
    Raises:
        ValueError: the plan has what hpnb cannot shard, or not in this mode.
    """
    kind = type(model).__name__
    if mode != "1d":
        raise ValueError(f"a {kind} is sharded by transformers' plan, which is for mode='1d', not {mode!r}")
    styles, modules = _styles(model), dict(model.named_modules())
    known = {*COLUMNS, *ROWS, SUMMED}
    unknown = {style: path for path, style in reversed(styles.items()) if style not in known}
    elsewhere = "use tp_size=1 and more ranks along dp and pp"
    if unknown:
        listed = ", ".join(f"{path} is {style!r}" for style, path in unknown.items())
        raise ValueError(f"hpnb cannot shard a {kind} by tensor parallelism, because {listed}; {elsewhere}")
    groups = _groups(model)
    for path, group in groups.items():
        if group.problem:
            raise ValueError(f"hpnb cannot shard {path} of this {kind}: {group.problem}; {elsewhere}")
    replicated = [path for path, group in groups.items() if not group.units]
    sharded = {path for path, style in styles.items() if style in (*COLUMNS, *ROWS)}
    for block in anatomy(model).blocks:
        for name, p in block.module.named_parameters(block.name):
            path = name.rpartition(".")[0]
            if p.dim() > 1 and path not in sharded and name not in sharded and path in modules:
                replicated.append(path)
                if path not in styles and _inside_sharded(path, groups):
                    raise ValueError(
                        f"hpnb cannot shard a {kind}: the plan names layers beside {path}, and not this one; "
                        f"{elsewhere}"
                    )
    if sequence_parallel and replicated:
        raise ValueError(
            f"sequence parallelism needs all matrices of a layer sharded, and {replicated[0]} of this {kind} "
            "is replicated; use sequence_parallel=False"
        )


# --- the plan ----------------------------------------------------------------------------------------------


def _styles(model: Any) -> dict[str, str]:
    """{path of a module or parameter: its style}, of those that this model has."""
    core, prefix = core_of(model)
    plan = core.config.base_model_tp_plan
    names = [name for name, _ in core.named_modules()] + [name for name, _ in core.named_parameters()]
    in_plan = ((name, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) for name in names)
    return {prefix + name: style for name, style in in_plan if style is not None}


def _groups(model: Any) -> dict[str, _Group]:
    members: dict[str, dict[str, str]] = {}
    modules = dict(model.named_modules())
    for path, style in _styles(model).items():
        if style in (*COLUMNS, *ROWS) and isinstance(modules.get(path), nn.Linear):
            members.setdefault(path.rpartition(".")[0], {})[path] = style
    return {
        parent: _group(model, core_of(model)[0].config, parent, layers) for parent, layers in members.items()
    }


def _inside_sharded(path: str, groups: dict[str, _Group]) -> bool:
    return any(group.units and f"{path}.".startswith(f"{parent}.") for parent, group in groups.items())


def _group(model: Any, config: Any, parent: str, styles: dict[str, str]) -> _Group:
    module = model.get_submodule(parent)
    layers: dict[str, Any] = {path: model.get_submodule(path) for path in styles}
    rows = [path for path, style in styles.items() if style in ROWS]
    columns = [path for path, style in styles.items() if style in COLUMNS]
    attention = "attention" in type(module).__name__.lower()
    if len(rows) != 1 or not columns:
        problem = f"it has {len(columns)} column- and {len(rows)} row-parallel layers, not some and 1"
        return _Group(0, {}, attention, problem)
    gathered = all(style in GATHERED for style in styles.values())
    packed: dict[str, tuple[int, ...]] = {}
    packed |= {path: (1, 1) for path in columns if styles[path] == "packed_colwise"}
    inner = layers[rows[0]].in_features  # neurons, or query heads times their width
    outputs = {path: layers[path].out_features for path in columns}
    if not attention:
        if gathered and any(size not in (inner, 2 * inner) for size in outputs.values()):
            return _Group(0, {}, False)
        packed |= {path: (1, 1) for path in columns if outputs[path] == 2 * inner}
        return _Group(inner, packed, False)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if head_dim is None or inner % head_dim:
        problem = f"its heads have no width that divides {inner}"
        return _Group(0, {}, True, None if gathered else problem)
    heads = inner // head_dim
    kv_heads = _kv_heads(config, module, outputs, head_dim, heads)
    if gathered:
        fused = len(columns) == 1 and outputs[columns[0]] == (heads + 2 * kv_heads) * head_dim
        if not fused:
            return _Group(0, {}, True)
        return _Group(kv_heads, {columns[0]: (heads, kv_heads, kv_heads)}, True)
    odd = next((path for path, size in outputs.items() if size % kv_heads), None)
    if odd is not None or heads % kv_heads:
        what = f"{heads} heads" if odd is None else f"the {outputs[odd]} outputs of {odd}"
        return _Group(0, {}, True, f"{what} do not fall to {kv_heads} key-value heads")
    return _Group(kv_heads, packed, True)


def _kv_heads(config: Any, module: Any, outputs: dict[str, int], head_dim: int, heads: int) -> int:
    for path, size in outputs.items():
        if path.endswith(".k_proj"):
            return size // head_dim
    groups = getattr(module, "num_key_value_groups", None)
    if groups:
        return heads // int(groups)
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _vocabulary(model: Any) -> Iterator[nn.Parameter]:
    """Weights with a row for each token, and the bias of logits."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            yield from module.parameters()


# --- roles -------------------------------------------------------------------------------------------------


def _outer_role(p: nn.Parameter, head: bool, vocabulary: bool, bias: bool) -> Role:
    tokens = 0 if vocabulary else None
    if head and (p.dim() > 1 or vocabulary):
        return Role("head", 0, 1 if p.dim() > 1 else None, decay=p.dim() > 1, bias=bias, vocabulary=tokens)
    if p.dim() > 1:
        return Role("embedding", 1, decay=True, vocabulary=tokens)
    return Role("norm" if head else "embedding", 0, bias=bias)


def _role(p: nn.Parameter, style: str | None, group: _Group | None, path: str, bias: bool) -> Role:
    matrix = p.dim() > 1
    if style == SUMMED:
        return Role("norm", 0, 1 if matrix else None, bias=bias, sum_grads=True)
    if group is None or not group.units or style not in (*COLUMNS, *ROWS):
        return Role("head", 0, 1, decay=True) if matrix else Role("norm", 0, bias=bias)
    if style in ROWS:
        return Role("row", 0, 1, decay=True, units=group.units) if matrix else Role("row", 0, bias=True)
    widths = group.widths.get(path, ())
    return Role("column", 0, 1 if matrix else None, decay=matrix, bias=bias, units=group.units, widths=widths)


def _resize(path: str, attention: Any, before: int, kv_heads: int) -> None:
    """From `before` key-value heads to `kv_heads`, with as many queries each as now."""
    check_heads(path, kv_heads)

    def scaled(heads: int) -> int:
        return heads * kv_heads // before

    for name in _HEADS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, scaled(getattr(attention, name)))
    config = getattr(attention, "config", None)
    if config is not None:  # which some attentions ask; the other layers' stays as it is
        attention.config = copy(config)
        attention.config.num_attention_heads = scaled(config.num_attention_heads)
        if getattr(config, "num_key_value_heads", None):
            attention.config.num_key_value_heads = kv_heads
