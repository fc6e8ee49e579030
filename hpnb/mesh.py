"""A Mesh makes the process groups of a Layout: with whom a rank talks, along each axis.

    mesh = Mesh(Layout(dp=2, tp=2))         # inside running ranks; a collective
    dist.all_reduce(x, group=mesh.tp.group)
    mesh.dp.rank, mesh.dp.size, mesh.dp.ranks

The numbers are in `hpnb.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hpnb.layout import AXES as AXES
from hpnb.layout import MICROBATCHES_PER_STAGE as MICROBATCHES_PER_STAGE
from hpnb.layout import Layout as Layout
from hpnb.layout import ParallelLayout as ParallelLayout
from hpnb.layout import Recomputation as Recomputation
from hpnb.ranks.process_group import new_group


@dataclass(frozen=True)
class Axis:
    """One direction of a mesh as one rank sees it.

    Attributes:
        name: "dp", "pp", "tp", "cp", "dp_cp", "ep", "edp", or a part of one ("tp.0", "tp.1") after `split`.
        size: ranks in this group.
        rank: this process's rank in it, 0 to size - 1.
        group: a process group, also at size 1.
        ranks: the global ranks of the group, in order.

    >>> def sizes():
    ...     axis = hpnb.Mesh(hpnb.Layout(tp=2)).tp
    ...     return axis.name, axis.size, axis.rank, axis.ranks
    >>> hpnb.launch(sizes, ranks=2, device="cpu")
    [('tp', 2, 0, (0, 1)), ('tp', 2, 1, (0, 1))]
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup = field(repr=False, compare=False)
    ranks: tuple[int, ...]

    def __deepcopy__(self, _: dict[int, object]) -> Axis:
        """Itself: the copy of a model communicates over the same group."""
        return self

    def split(self, *sizes: int) -> tuple[Axis, ...]:
        """Fold this axis into a grid, outermost size first: one Axis a dimension, named "tp.0", "tp.1", ...

        2D tensor parallelism folds 4 ranks into 2 x 2, 2.5D folds 8 into 2 x 2 x 2. Every rank of the world
        must call it with the same sizes, those of other groups along the axis too: over NCCL a new group is
        split off from that of all ranks.

        Raises:
            ValueError: the sizes do not multiply to the size of the axis.
        """
        if not sizes or any(size < 1 for size in sizes) or prod(sizes) != self.size:
            wanted = " x ".join(map(str, sizes)) or "nothing"
            raise ValueError(
                f"axis {self.name} has {self.size} ranks and cannot be folded into {wanted} "
                f"= {prod(sizes) if sizes else 0}; the sizes must multiply to {self.size}"
            )
        axes = []
        for dim, size in enumerate(sizes):
            stride = prod(sizes[dim + 1 :])
            index = self.rank // stride % size
            first = self.rank - index * stride
            members = tuple(self.ranks[first + i * stride] for i in range(size))
            axes.append(_make_axis(f"{self.name}.{dim}", members))
        return tuple(axes)

    def among(self, ranks: Sequence[int]) -> Axis:
        """A smaller axis of these ranks of this one; every other rank gets an axis of itself alone.

        Every rank of the world must call it with the same ranks, as with `split`.

        Raises:
            ValueError: ranks that this axis does not have, or none.
        """
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size:
            raise ValueError(f"ranks {list(ranks)} are not among 0 to {self.size - 1} of axis {self.name}")
        members = tuple(self.ranks[rank] for rank in chosen)
        return _make_axis(self.name, members if self.rank in chosen else (self.ranks[self.rank],), members)


class Mesh:
    """The process groups of a Layout: `mesh.dp`, `mesh.pp`, `mesh.tp`, `mesh.cp`, `mesh.ep`, each an `Axis`.

    Every rank of the world makes the same Mesh at the same point of the program, since making a group
    is itself a collective.

    Args:
        layout: its world size must equal the number of ranks.

    Attributes:
        dp_cp: dp and cp as one axis, along which gradients are summed: its ranks have the same weights and
            other tokens. Without context parallelism it is `dp`.
        ep: ranks of dp x cp that together hold each expert once, and send each other tokens.
        edp: ranks of dp x cp that hold the same experts, along which the gradients of experts are summed.

    Raises:
        ValueError: another number of ranks is running than the layout has.
        RuntimeError: no process group is up.

    >>> hpnb.launch(lambda: str(hpnb.Mesh(hpnb.Layout(pp=2))), ranks=2, device="cpu")[1]
    'Mesh(dp=0 of 1, pp=1 of 2, tp=0 of 1)'
    """

    def __init__(self, layout: Layout) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "a Mesh needs running ranks: make it inside a function given to hpnb.launch or Ranks.run, "
                "or after hpnb.launch_from_torch under torchrun"
            )
        world = dist.get_world_size()
        if layout.world_size != world:
            raise ValueError(
                f"{layout} needs {' x '.join(map(str, layout.shape))} = {layout.world_size} ranks, "
                f"and {world} are running; {_nearest(layout, world)}"
            )
        self.layout = layout
        me = dist.get_rank()
        self.axes: dict[str, Axis] = {}
        for name in (*layout.order, *(("dp_cp",) if layout.cp > 1 else ())):
            members = next(group for group in layout.groups(name) if me in group)
            self.axes[name] = _make_axis(name, members)
        if layout.cp == 1:
            lone = next((axis for axis in self.axes.values() if axis.size == 1), None)  # whose group will do
            self.axes["cp"] = replace(lone, name="cp") if lone else _make_axis("cp", (me,))
            self.axes["dp_cp"] = self.axes["dp"]
        if layout.ep > 1:
            for name in ("ep", "edp"):
                self.axes[name] = _make_axis(name, next(g for g in layout.groups(name) if me in g))
        else:
            self.axes["ep"] = replace(self.axes["cp"], name="ep")
            if layout.cp > 1:
                self.axes["ep"] = _make_axis("ep", (me,))
            self.axes["edp"] = self.axes["dp_cp"]
        self.dp, self.pp, self.tp, self.cp = (self.axes[name] for name in ("dp", "pp", "tp", "cp"))
        self.dp_cp, self.ep, self.edp = (self.axes[name] for name in ("dp_cp", "ep", "edp"))

    @property
    def coordinates(self) -> dict[str, int]:
        return {name: self.axes[name].rank for name in self.layout.axes}

    def __getattr__(self, name: str) -> Any:
        if name in ("name", "size", "rank", "group", "ranks", "split"):  # what a function asks an Axis for
            raise AttributeError(
                f"a Mesh has no {name!r}: dp, pp, tp and cp have one each; pass an axis, such as mesh.dp"
            )
        raise AttributeError(f"a Mesh has no attribute {name!r}")

    def __repr__(self) -> str:
        axes = ((name, self.axes[name]) for name in self.layout.order)
        here = ", ".join(f"{name}={axis.rank} of {axis.size}" for name, axis in axes)
        return f"Mesh({here})"


def axis_of(axis: Axis | Mesh, name: str) -> Axis:
    """`axis`, or of a mesh its axis of that name."""
    if isinstance(axis, Mesh):
        return axis.axes[name]
    if not isinstance(axis, Axis):
        raise ValueError(
            f"axis={axis!r} is no axis of a mesh; use mesh.{name}, with mesh = hpnb.Mesh(layout)"
        )
    return axis


# Groups by world, name and members. A group holds threads, descriptors and, on a GPU, hundreds of MB until
# the process group of all ranks goes; so a mesh that is made again gets the groups that are there.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]]
_groups = WeakKeyDictionary()


def _make_axis(name: str, members: Sequence[int], requested: tuple[int, ...] = ()) -> Axis:
    world = dist.group.WORLD
    assert world is not None
    groups = _groups.setdefault(world, {})
    key = (name, tuple(members), requested)  # the same on all ranks of a call, so they make groups together
    if key not in groups:
        groups[key] = new_group(members, name)
    return Axis(name, len(members), list(members).index(dist.get_rank()), groups[key], tuple(members))


def _nearest(layout: Layout, world: int) -> str:
    """What would fit `world` ranks while keeping as much of the layout as can be kept."""
    inner = layout.pp * layout.tp * layout.cp
    if world % inner == 0:
        fit = Layout(world // inner, layout.pp, layout.tp, layout.order, cp=layout.cp)
    elif world % layout.tp == 0:
        fit = Layout(1, world // layout.tp, layout.tp, layout.order)
    else:
        fit = Layout(dp=world, order=layout.order)
    return f"{fit} would fit, or start {layout.world_size} ranks"
