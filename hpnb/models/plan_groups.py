"""Which modules of a layer tensor parallelism shards, read off the tensor plan of the model's configuration.

    attention    q, k, v: columns    o: rows      by key-value heads, each with the query heads that read it
    latent       q_b, kv_b: columns  o: rows      by heads; q_a, kv_a and their norms are replicated
    MLP          gate, up: columns   down: rows   by neurons
    experts      the same, of every expert        by neurons; each rank has a part of each expert

Such a group takes replicated hidden states and gives replicated ones. So a group that hpnb does not know how
to shard can be replicated without touching the others: `units` is 0 then and `reason` says why. Shapes decide
as much as the plan does. ESM-C's plan shards q and k, although its norms of them need all heads; that
attention is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from hpnb.models.plan_parts import core_of

COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
GATHERED = ("colwise_gather_output", "rowwise_split_input")
PACKED = ("packed_colwise", "packed_rowwise")
CUTS = (*COLUMNS, *ROWS, "packed_rowwise")
SUMMED, LATENT, EXPERTS, IDENTITY = (
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert",
)  # fmt: skip
Modules = dict[str, Any]  # {path: module} of the model
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads")


class Group(NamedTuple):
    """The sharded weights of an attention, an MLP or a layer of experts.

    Attributes:
        styles: {path: style} of its members, which are linear layers or parameters of the module itself.
        units: how many pieces that cannot be split further each weight has; 0 if it is replicated.
        widths: {path: relative widths} of weights that hold several matrices side by side.
        reason: why it is replicated, unless the plan says so.
        summed: paths of replicated parameters of which each rank uses its heads' or neurons' share.
        latent: {path: n} of the projections down of latent attention. Their last n outputs are the rotary
            part of keys, which all heads read as it is; the other outputs go through one more matrix.
        row_members: of experts: the weights whose results are summed over the ranks.
    """

    kind: str
    styles: dict[str, str]
    units: int = 0
    widths: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    reason: str | None = None
    summed: tuple[str, ...] = ()
    latent: Mapping[str, int] = MappingProxyType({})
    row_members: tuple[str, ...] = ()


def styles_of(model: Any) -> dict[str, str]:
    """{path of a module or parameter: its style}, of those that this model has."""
    core, prefix = core_of(model)
    plan = core.config.base_model_tp_plan
    names = [name for name, _ in core.named_modules()] + [name for name, _ in core.named_parameters()]
    in_plan = ((name, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))) for name in names)
    return {prefix + name: style for name, style in in_plan if style is not None}


def groups_of(model: Any) -> dict[str, Group]:
    """{path of a module: its group}."""
    styles, modules = styles_of(model), dict(model.named_modules())
    members: dict[str, dict[str, str]] = {}
    for path, style in styles.items():
        if style in CUTS and (path not in modules or isinstance(modules[path], nn.Linear)):
            members.setdefault(path.rpartition(".")[0], {})[path] = style
    inside_of: dict[str, dict[str, str]] = {parent: {} for parent in members}
    for path, style in styles.items():
        for parent in _with_ancestors(path):
            if parent in inside_of:
                inside_of[parent][path] = style
    groups = {}
    for parent, cuts in members.items():
        inside = inside_of[parent]
        if inside.get(parent) == EXPERTS or all(path not in modules for path in cuts):
            groups[parent] = _experts(model, parent, cuts, inside)
        elif _is_attention(modules[parent]):
            groups[parent] = _attention(model, modules, parent, cuts, inside)
        else:
            groups[parent] = _mlp(model, modules, parent, cuts)
    return groups


def _with_ancestors(path: str) -> list[str]:
    """`path` and the paths of all modules around it: "a.b" and "a" of "a.b"."""
    names = path.split(".")
    return [".".join(names[:length]) for length in range(len(names), 0, -1)]


def _is_attention(module: nn.Module) -> bool:
    counts = any(hasattr(module, name) for name in (*HEAD_COUNTS, "head_dim", "num_key_value_groups"))
    return counts or "attention" in type(module).__name__.lower()


# --- attention ----------------------------------------------------------------------------------------------


def _attention(
    model: Any, modules: Modules, parent: str, styles: dict[str, str], inside: dict[str, str]
) -> Group:
    config, module = core_of(model)[0].config, modules[parent]
    group = Group("attention", styles)
    linear = {path: modules[path] for path in styles if path in modules}
    rows, columns = _rows_and_columns(linear, styles)
    gathered = all(styles[path] in GATHERED for path in linear)
    if len(rows) != 1 or not columns:
        return group._replace(reason=None if gathered else _counts(columns, rows))
    inner = linear[rows[0]].in_features  # query heads times their width
    latent = [path for path, style in inside.items() if style == LATENT]
    names = ("v_head_dim", "head_dim") if latent else ("head_dim", "head_size")
    head_dim = next((getattr(module, name) for name in names if getattr(module, name, None)), None)
    if head_dim is None or inner % head_dim:
        return group._replace(reason=None if gathered else f"its heads have no width that divides {inner}")
    heads, outputs = inner // head_dim, {path: linear[path].out_features for path in columns}
    kv_heads = heads if latent else _kv_heads(config, module, outputs, head_dim, heads)
    packed: dict[str, tuple[int, ...]] = {path: (1, 1) for path in columns if styles[path] in PACKED}
    if gathered:
        fused = len(columns) == 1 and outputs[columns[0]] == (heads + 2 * kv_heads) * head_dim
        if not fused:
            return group
        packed = {columns[0]: (heads, kv_heads, kv_heads)}
    odd = next((path for path, size in outputs.items() if size % kv_heads), None)
    if odd is not None or heads % kv_heads:
        what = f"{heads} heads" if odd is None else f"the {outputs[odd]} outputs of {odd}"
        return group._replace(reason=f"{what} cannot be divided by {kv_heads} key-value heads")
    sizes = {path: p.numel() for path, p in _parameters(model, parent) if path in styles}
    if odd := next((path for path, size in sizes.items() if size % kv_heads), None):
        what = f"the {sizes[odd]} numbers of {odd}"
        return group._replace(reason=f"{what} cannot be divided by {kv_heads} key-value heads")
    rest = [(path, p) for path, p in _parameters(model, parent) if not _is_of(path, styles)]
    group = group._replace(units=kv_heads, widths=packed)
    if latent:
        summed = tuple(path for path, _ in rest if _is_of(path, _only(inside, SUMMED)))
        inputs = {linear[path].in_features for path in columns}
        for path, p in rest:  # what is replicated must come before a column, or choose tokens
            indexes = any("indexer" in name.lower() for name in path.split(".")[:-1])
            if p.size(0) not in inputs and not (indexes or path in summed or _is_of(path, latent)):
                return Group(
                    "attention", styles, reason=f"{path} of shape {tuple(p.shape)} is not in the plan"
                )
        return group._replace(summed=summed, latent=dict.fromkeys(latent, int(config.qk_rope_head_dim)))
    for path, p in rest:
        if p.dim() > 1 or p.numel() not in (1, head_dim):
            reason = (
                f"{path} of shape {tuple(p.shape)} is not in the plan, and is not of one head ({head_dim})"
            )
            return Group("attention", styles, reason=reason)
    return group._replace(summed=tuple(path for path, _ in rest))


def _kv_heads(config: Any, module: Any, outputs: dict[str, int], head_dim: int, heads: int) -> int:
    for path, size in outputs.items():
        if path.endswith(".k_proj"):
            return size // head_dim
    groups = getattr(module, "num_key_value_groups", None)
    if groups:
        return heads // int(groups)
    return int(getattr(config, "num_key_value_heads", None) or heads)


# --- MLP and experts ----------------------------------------------------------------------------------------


def _mlp(model: Any, modules: Modules, parent: str, styles: dict[str, str]) -> Group:
    group = Group("mlp", styles)
    linear = {path: modules[path] for path in styles if path in modules}
    rows, columns = _rows_and_columns(linear, styles)
    gathered = all(style in GATHERED for style in styles.values())
    if len(rows) != 1 or not columns or len(linear) < len(styles):
        return group._replace(reason=None if gathered else _counts(columns, rows))
    inner = linear[rows[0]].in_features  # neurons
    outputs = {path: linear[path].out_features for path in columns}
    packed = {
        path: (1, 1)
        for path in columns
        if styles[path] in PACKED or (gathered and outputs[path] == 2 * inner)
    }
    if any(size != inner * len(packed.get(path, (1,))) for path, size in outputs.items()):
        reason = f"{', '.join(columns)} do not give the {inner} inputs of {rows[0]}"
        return group._replace(reason=None if gathered else reason)
    rest = [(path, p) for path, p in _parameters(model, parent) if not _is_of(path, styles)]
    for path, p in rest:  # one number is that of an activation; the gradient of others may be whole or a part
        if p.numel() > 1:
            return group._replace(reason=f"{path} of shape {tuple(p.shape)} is not in the plan")
    return group._replace(units=inner, widths=packed, summed=tuple(path for path, _ in rest))


def _experts(model: Any, parent: str, styles: dict[str, str], inside: dict[str, str]) -> Group:
    group = Group("experts", styles)
    parameters = dict(_parameters(model, parent))
    if IDENTITY in inside.values():
        return group._replace(reason="some of its experts give back their input")
    if rest := next((path for path in parameters if path not in styles), None):
        return group._replace(reason=f"{rest} is not in the plan")
    transposed = "packed_rowwise" in styles.values()
    rows = [path for path, style in styles.items() if style in (COLUMNS if transposed else ROWS)]
    columns = [path for path in styles if path not in rows]
    if len(rows) != 1 or not columns or any(p.dim() != 3 for p in parameters.values()):
        return group._replace(reason=_counts(columns, rows))
    inner = parameters[rows[0]].size(expert_dims(styles[rows[0]])[0])
    sizes = {path: parameters[path].size(expert_dims(styles[path])[0]) for path in columns}
    if any(size not in (inner, 2 * inner) for size in sizes.values()):
        return group._replace(reason=f"{', '.join(columns)} do not give the {inner} inputs of {rows[0]}")
    widths = {path: (1, 1) for path in columns if sizes[path] > inner}
    return group._replace(units=inner, widths=widths, row_members=tuple(rows))


def expert_dims(style: str) -> tuple[int, int]:
    """(the dim that is sharded, the other one) of the weights of all experts, (experts, outputs, inputs)."""
    return (1, 2) if style in COLUMNS else (2, 1)


# --- what both need -----------------------------------------------------------------------------------------


def _rows_and_columns(linear: dict[str, Any], styles: dict[str, str]) -> tuple[list[str], list[str]]:
    rows = [path for path in linear if styles[path] in ROWS]
    return rows, [path for path in linear if styles[path] in COLUMNS]


def _counts(columns: list[str], rows: list[str]) -> str:
    return f"it has {len(columns)} column- and {len(rows)} row-parallel weights, not some and 1"


def _parameters(model: Any, parent: str) -> list[tuple[str, nn.Parameter]]:
    return list(model.get_submodule(parent).named_parameters(parent))


def _is_of(path: str, members: Any) -> bool:
    """Whether the parameter at `path` is a member, or of one."""
    return path in members or path.rpartition(".")[0] in members


def _only(styles: dict[str, str], style: str) -> dict[str, str]:
    return {path: other for path, other in styles.items() if other == style}
