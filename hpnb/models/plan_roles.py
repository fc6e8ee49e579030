"""The role of each weight of a transformers model, read off the tensor plan that its configuration publishes.

    colwise                          column                 q, k, v, gate and up; attention sinks
    rowwise                          row                    o and down
    packed_colwise                   column, widths (1, 1)  gate and up side by side in one weight
    replicated_with_grad_allreduce   replicated             norms of q and k: a rank has some heads, so its
                                                            gradient is summed over the ranks
    colwise_gather_output,           column and row where q, k, v or gate, up lie side by side; else the
    rowwise_split_input              attention is replicated (norms over all heads need all of them)
    mla_kv_a_proj                    replicated, with partial_outputs: all heads read the rotary keys
    moe_tp_experts                   column and row         of every expert: each rank has some of its neurons

An attention is split by key-value heads, each with the query heads that read it: Llama-3 8B has 8 of them, so
3 ranks get 3, 3 and 2, with 12, 12 and 8 query heads. `plan_groups.py` says which modules are sharded. What
hpnb does not know how to shard is replicated on the tensor-parallel ranks, with a warning that names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hpnb.models.model_anatomy import Attention, check_heads
from hpnb.models.plan_groups import (
    HEAD_COUNTS,
    ROWS,
    Group,
    expert_dims,
    groups_of,
)
from hpnb.models.plan_parts import anatomy
from hpnb.models.role import Role


def roles(model: Any) -> dict[str, Role]:
    parts = anatomy(model)
    vocabulary = set(_vocabulary(model))
    in_blocks = {p for block in parts.blocks for p in block.module.parameters()}
    member_of, summed, latent = _places(groups_of(model))
    table: dict[str, Role] = {}
    for name, p in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        bias, matrix = attribute == "bias", p.dim() > 1
        if p not in in_blocks:
            head = any(path == part.name or path.startswith(part.name + ".") for part in parts.head)
            table[name] = _outer_role(p, head, p in vocabulary, bias)
        elif name in summed:
            table[name] = Role("norm", 0, 1 if matrix else None, bias=bias, sum_grads=True)
        elif name in member_of or path in member_of:
            member = name if name in member_of else path
            table[name] = _sharded_role(p, member, member_of[member], bias)
        else:
            outputs = latent.get(path, 0)
            table[name] = (
                Role("head", 0, 1, True, partial_outputs=outputs) if matrix else Role("norm", 0, bias=bias)
            )
    for name, role in table.items():
        weight = table.get(f"{name.removesuffix('bias')}weight") if role.bias else None
        if weight is not None and weight.kind == "head" and role.kind == "norm":  # both are replicated
            table[name] = replace(role, kind="head")
    return table


def attentions(model: Any) -> tuple[Attention, ...]:
    """Attentions that are sharded; they count key-value heads, each with its queries."""
    sharded = (
        (path, group) for path, group in groups_of(model).items() if group.kind == "attention" and group.units
    )
    return tuple(_attention(path, model.get_submodule(path), group.units) for path, group in sharded)


def _attention(path: str, module: Any, kv_heads: int) -> Attention:
    attributes = ((name, getattr(module, name, None)) for name in HEAD_COUNTS)
    counts = {name: count for name, count in attributes if isinstance(count, int)}
    config = getattr(module, "config", None)
    return Attention(path, kv_heads, partial(_resize, path, module, counts, config, kv_heads))


def check_sharding(model: Any, mode: str, sequence_parallel: bool) -> None:
    """Refuse other modes than 1D, and a model of which nothing would be sharded."""
    kind = type(model).__name__
    if mode != "1d":
        raise ValueError(f"a {kind} is sharded by transformers' plan, which is for mode='1d', not {mode!r}")
    groups = groups_of(model)
    reasons = {path: group.reason for path, group in groups.items() if group.reason}
    if not any(group.units for group in groups.values()):
        first = anatomy(model).blocks[0].name
        path, reason = next(
            iter(reasons.items()), (first, "the plan names no columns and rows of one module in it")
        )
        raise ValueError(
            f"hpnb can shard nothing in the layers of this {kind} (of {path}: {reason}); use tp_size=1 and "
            "more ranks along dp and pp, or register its roles with hpnb.models.register"
        )
    replicated = list(_replicated(model, groups))
    if sequence_parallel and replicated:
        raise ValueError(
            f"sequence parallelism needs all matrices of a layer sharded, and {replicated[0]} of this {kind} "
            "is replicated; use sequence_parallel=False"
        )
    if reasons:
        path, reason = next(iter(reasons.items()))
        warnings.warn(
            f"{path} of this {kind} is replicated on all tensor-parallel ranks, because {reason}; "
            "hpnb.models.register takes other roles",
            stacklevel=2,
        )


def _replicated(model: Any, groups: dict[str, Group]) -> Iterator[str]:
    """Paths of the layers' matrices that every tensor-parallel rank has in full."""
    member_of, summed, _ = _places(groups)
    for block in anatomy(model).blocks:
        for name, p in block.module.named_parameters(block.name):
            path = name.rpartition(".")[0]
            if p.dim() > 1 and name not in member_of and path not in member_of and name not in summed:
                yield path


def _places(groups: dict[str, Group]) -> tuple[dict[str, Group], set[str], dict[str, int]]:
    """Of the groups that are sharded: {member: its group}, parameters with summed gradients, latents."""
    sharded = [group for group in groups.values() if group.units]
    members = {member: group for group in sharded for member in group.styles}
    latent = {path: size for group in sharded for path, size in group.latent.items()}
    return members, {path for group in sharded for path in group.summed}, latent


def _vocabulary(model: Any) -> Iterator[nn.Parameter]:
    """Weights with a row for each token, and the bias of logits."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    computes_more = type(embedding).forward is not nn.Embedding.forward and not hasattr(
        embedding, "embed_scale"
    )
    if computes_more or sum(1 for _ in embedding.parameters()) > 1:  # such as a norm of what it looks up
        if output is not None and output.weight is not embedding.weight:
            yield from output.parameters()
        return
    for module in (embedding, output):
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


def _sharded_role(p: nn.Parameter, member: str, group: Group, bias: bool) -> Role:
    style, widths, matrix = group.styles[member], group.widths.get(member, ()), p.dim() > 1
    if group.kind == "experts":
        cut, other = expert_dims(style)
        if member in group.row_members:
            return Role("row", other, cut, decay=True, units=group.units)
        return Role("column", cut, other, decay=True, units=group.units, widths=widths)
    if style in ROWS:
        return Role("row", 0, 1, decay=True, units=group.units) if matrix else Role("row", 0, bias=True)
    return Role("column", 0, 1 if matrix else None, decay=matrix, bias=bias, units=group.units, widths=widths)


def _resize(
    path: str, attention: Any, counts: dict[str, int], config: Any, before: int, kv_heads: int
) -> None:
    """To `kv_heads` key-value heads, with as many queries each as with the `before` that `counts` are of."""
    check_heads(path, kv_heads)

    def scaled(heads: int) -> int:
        return heads * kv_heads // before

    for name, count in counts.items():
        setattr(attention, name, scaled(count))
    if config is not None:  # which some attentions ask; the other layers' stays as it is
        attention.config = copy(config)
        attention.config.num_attention_heads = scaled(config.num_attention_heads)
        if getattr(config, "num_key_value_heads", None):
            attention.config.num_key_value_heads = kv_heads
