"""The modes by name, and the ranks that each can use.

1d      t              any number
2d      q x q          1, 4, 9, 16, ...
2.5d    d x q x q      8 = 2 x 2 x 2, 12 = 3 x 2 x 2, 18 = 2 x 3 x 3, ...; d = 1 is 2d
3d      l x l x l      1, 8, 27, ...
"""

from __future__ import annotations

from math import isqrt

from hpnb.mesh import Axis
from hpnb.tensor_parallel.mode import TensorParallelMode

NAMES = ("1d", "2d", "2.5d", "3d")


def make(mode: str, axis: Axis, sequence_parallel: bool = False, depth: int = 1) -> TensorParallelMode:
    """The mode of that name on `axis`. All ranks call it: it makes the groups of a grid.

    Raises:
        ValueError: no such mode, options that it does not have, or a number of ranks that it cannot use.
    """
    from hpnb.tensor_parallel.tp_1d import TensorParallel1D

    if mode not in NAMES:
        raise ValueError(f"no tensor-parallel mode {mode!r}; use {', '.join(NAMES)}")
    if depth < 1:
        raise ValueError(f"depth={depth} is not a count; use 1 or more")
    if depth > 1 and mode != "2.5d":
        raise ValueError(f"mode {mode!r} has no depth; depth={depth} goes with mode='2.5d'")
    if mode == "1d":
        return TensorParallel1D(axis, sequence_parallel)
    if sequence_parallel:
        raise ValueError(
            f"mode {mode!r} cuts every activation over all ranks already; sequence_parallel goes with "
            "mode='1d'"
        )
    check_ranks(mode, axis.size, depth)
    from hpnb.tensor_parallel.tp_2d import TensorParallel2D
    from hpnb.tensor_parallel.tp_3d import TensorParallel3D

    return TensorParallel3D(axis) if mode == "3d" else TensorParallel2D(axis, depth)


def check_ranks(mode: str, ranks: int, depth: int = 1) -> None:
    """Raises ValueError if a grid mode cannot use so many ranks, with the nearest numbers that it can."""
    if mode == "3d":
        side = round(ranks ** (1 / 3))
        if side**3 != ranks:
            low = max(n for n in range(1, ranks + 1) if n**3 <= ranks)
            raise ValueError(
                f"3d needs l x l x l ranks, and {ranks} is no cube; {low**3} = {low} x {low} x {low} would "
                f"do, or {(low + 1) ** 3}, or mode='1d' on all {ranks}"
            )
    elif mode in ("2d", "2.5d"):
        square, rest = divmod(ranks, depth)
        if rest or isqrt(square) ** 2 != square:
            name = "q x q" if depth == 1 else f"{depth} x q x q"
            low = max(1, isqrt(ranks // depth))
            raise ValueError(
                f"{mode} needs {name} ranks, and {ranks} is not of that form; {depth * low**2} would do, or "
                f"{depth * (low + 1) ** 2}, or mode='1d' on all {ranks}"
            )
