"""Which shard of a weight each rank gets: heads are never split, so 25 heads over 4 ranks are 7, 6, 6 and 6.

    split_units(axis, role, dim, 75)      25 heads of width 3 on 4 ranks: 21, 18, 18, 18 elements
    split_evenly(axis, dim, 50257)        any element may be the first: 12,565 + 12,564 + 12,564 + 12,564

Both follow `hpnb.split_sizes`: where the split is uneven, the first ranks get one more.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpnb.mesh import Axis
from hpnb.models import Role
from hpnb.placement import Cut
from hpnb.split_sizes import split_range


def split_units(axis: Axis, role: Role, dim: int, size: int) -> Cut:
    """A split of `dim` between the role's units, such as an attention's heads, never inside of one.

    A fused weight holds q, k and v side by side, and each of the three is split.
    """
    first, ranges = 0, []
    for width in role.sections(dim, size):  # of q, of k and of v
        unit = width // role.units
        start, stop = split_range(role.units, axis.size, axis.rank)
        ranges.append((first + start * unit, first + stop * unit))
        first += width
    return Cut(axis.name, dim, tuple(ranges))


def split_evenly(axis: Axis, dim: int, size: int) -> Cut:
    """A split of `dim` where any element may be the first of a rank."""
    return Cut(axis.name, dim, (split_range(size, axis.size, axis.rank),))


def is_transposed(roles: Mapping[str, Role]) -> bool:
    """Whether a layer's weight is (in, out), as in transformers' Conv1D."""
    return roles["weight"].in_dim == 0
