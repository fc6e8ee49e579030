"""Grouped queries: the query heads that read one key-value head go to the rank that has it.

    12 heads, 3 key-value heads, 2 ranks      k, v: 2 + 1 key-value heads      q, projection: 8 + 4 heads

Roles count heads for q and the projection, and key-value heads for k and v. Split each by itself, and q would
be 6 + 6 heads. Rank 0, with key-value heads 0 and 1, would give three queries to each: the fourth head would
read 1 instead of 0. Rank 1 has only 2, and the seventh and eighth head read 1 in the full model. No shape
would show it. So a unit of q and of the projection becomes a group of heads, as many units as there are
key-value heads. A table of roles that says so already stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd

from hpnb.models import Attention, Part, Role


def keep_groups_together(
    blocks: Sequence[Part], roles: Mapping[str, Role], shapes: Mapping[str, Sequence[int]], ranks: int
) -> dict[str, Role]:
    """`roles` in which q and the projection of grouped queries have as many units as k and v.

    Args:
        ranks: a role with fewer key-value heads than ranks is left unchanged, and `check` refuses it.
    """
    together = dict(roles)
    for block in blocks:
        split = {
            name: role
            for name, role in roles.items()
            if name.startswith(f"{block.name}.") and role.cut_dim is not None and role.vocabulary is None
        }
        rows = {name: role.units for name, role in split.items() if role.kind == "row"}
        columns = {name: role for name, role in split.items() if role.kind == "column" and not role.bias}
        for key, role in columns.items():
            width = _width(key, role, shapes)
            if width == 1 and role.units in rows.values():
                continue  # neurons of an MLP
            for scope in _enclosing(key, block.name) if role.units >= ranks else ():
                multiples = {
                    name: other.units
                    for name, other in columns.items()
                    if name.startswith(scope) and other.units > role.units and other.units % role.units == 0
                }
                grouped = {n for name, n in multiples.items() if _width(name, columns[name], shapes) == width}
                if not grouped and role.units not in rows.values():  # k and v side by side in a unit
                    grouped = set(multiples.values())
                ends = {units for name, units in rows.items() if name.startswith(scope)}
                if not ends & {role.units, *grouped}:
                    continue  # the row is further out
                for name, other in split.items():
                    if name.startswith(scope) and other.units in grouped:
                        units = gcd(together[name].units, role.units)
                        together[name] = replace(together[name], units=units)
                break
    return together


def heads_per_unit(attention: Attention, roles: Mapping[str, Role], together: Mapping[str, Role]) -> int:
    """How many of the heads that `attention` counts lie in a unit that `keep_groups_together` has made."""
    made = (
        role.units // together[name].units
        for name, role in roles.items()
        if name.startswith(f"{attention.path}.") and role.units == attention.heads
    )
    return max(made, default=1)


def _enclosing(name: str, block: str) -> Iterator[str]:
    """What the names in the modules around a weight begin with, from the innermost to the block."""
    path = name.rpartition(".")[0]
    while path.startswith(f"{block}.") and (path := path.rpartition(".")[0]):
        yield f"{path}."


def _width(name: str, role: Role, shapes: Mapping[str, Sequence[int]]) -> int:
    """Of a unit of a column: for q and k, a head's, because the two are multiplied."""
    return role.sections(role.out_dim, shapes[name][role.out_dim])[0] // role.units
