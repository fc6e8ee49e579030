"""A Layout says how many ranks each axis has; a ParallelLayout adds how they train; a Mesh says with whom.

A layout arranges world_size = dp * pp * tp ranks as a box. With the default order dp is outermost and
tp innermost, so the ranks of one tp group are neighbours (they talk most), and those of one dp group
are furthest apart (they talk least):

    rank = (dp_index * pp + pp_index) * tp + tp_index

`Layout` and `ParallelLayout` are numbers only and work anywhere; `Mesh` makes process groups, inside ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hpnb.ranks.process_group import new_group

AXES = ("dp", "pp", "tp")
TP_MODES = ("1d", "2d", "2.5d", "3d")
Recomputation = Literal[False, "full", "attention"]


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each axis, and in which order the axes are nested.

    Args:
        dp, pp, tp: ranks along the data, pipeline and tensor axis, each at least 1.
        order: the axes from the outermost to the innermost.

    Raises:
        ValueError: a size below 1, or an order that does not name each axis once.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for name in AXES:
            if not _is_count(size := getattr(self, name)):
                raise ValueError(f"Layout {name}={size!r} is not a count; use 1 where an axis is not split")
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"Layout order={self.order!r} must name dp, pp and tp once, outermost first")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in nesting order, outermost first."""
        return tuple(getattr(self, name) for name in self.order)

    @property
    def world_size(self) -> int:
        return prod(self.shape)

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"dp": i, "pp": j, "tp": k} of `rank`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside {self}, which has ranks 0 to {self.world_size - 1}")
        coordinates, rest = {}, rank
        for name in reversed(self.order):
            rest, coordinates[name] = divmod(rest, getattr(self, name))
        return {name: coordinates[name] for name in AXES}

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        index = {"dp": dp, "pp": pp, "tp": tp}
        rank = 0
        for name in self.order:
            size = getattr(self, name)
            if not 0 <= index[name] < size:
                raise ValueError(f"{name}={index[name]} is outside {self}; it goes from 0 to {size - 1}")
            rank = rank * size + index[name]
        return rank

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks along `axis`: those that differ in that coordinate alone."""
        if axis not in AXES:
            raise ValueError(f"no axis {axis!r}; a Layout has dp, pp and tp")
        others = [name for name in self.order if name != axis]
        groups = []
        for indices in product(*(range(getattr(self, name)) for name in others)):
            fixed = dict(zip(others, indices, strict=True))
            groups.append(tuple(self.rank(**fixed, **{axis: i}) for i in range(getattr(self, axis))))
        return groups

    def __str__(self) -> str:
        return "Layout(" + ", ".join(f"{name}={getattr(self, name)}" for name in self.order) + ")"


@dataclass(frozen=True)
class ParallelLayout(Layout):
    """A whole training layout: how many ranks lie along each axis, and how a step runs on them.

    This is the one description of a layout. The planner searches over it, the benchmarks name their layouts
    by it, and the plugin's fields can be read from it. It is a `Layout`, so `Mesh(layout)`,
    `hpnb.plot.mesh(layout)` and everything else that takes a `Layout` takes it as well; `mesh_layout` is the
    plain `Layout`, for comparing or printing the sizes alone.

        ParallelLayout(dp=2, pp=4, num_microbatches=8, zero_stage=1, schedule="zb-h1")

    Args:
        dp, pp, tp: ranks along each axis.
        num_microbatches: microbatches of a step in each pipeline. It wins over
        microbatch_size: samples of a microbatch; see `count_microbatches` for what happens without either.
        zero_stage: 0 replicates; 1 shards optimizer state over dp, 2 also gradients, 3 also weights.
        schedule: name of the pipeline schedule (`hpnb.pipeline_parallel.schedules`).
        chunks: model chunks (stages) on each rank of a pipeline.
        recomputation: what the backward recomputes: nothing (False), whole blocks ("full") or the attention's
            softmax and its products ("attention").
        sequence_parallel: split along the tokens what lies between the tensor-parallel matrices (1d only).
        tp_mode, tp_depth: "1d", "2d", "2.5d" or "3d" tensor parallelism, and the depth of "2.5d".
        order: the axes from the outermost to the innermost.

    What does not compose is refused by whoever runs the layout, since that depends on the model as well.

    Raises:
        ValueError: a count below 1, a ZeRO stage that is not 0, 1, 2 or 3, or an unknown mode.
    """

    num_microbatches: int | None = None
    zero_stage: int = 0
    microbatch_size: int | None = field(default=None, kw_only=True)
    schedule: str = field(default="1f1b", kw_only=True)
    chunks: int = field(default=1, kw_only=True)
    recomputation: Recomputation = field(default=False, kw_only=True)
    sequence_parallel: bool = field(default=False, kw_only=True)
    tp_mode: str = field(default="1d", kw_only=True)
    tp_depth: int = field(default=1, kw_only=True)
    order: tuple[str, ...] = field(default=AXES, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_microbatches", "microbatch_size", "chunks", "tp_depth"):
            value = getattr(self, name)
            optional = name in ("num_microbatches", "microbatch_size")
            if not (_is_count(value) or (optional and value is None)):
                raise ValueError(f"{name}={value!r} is not a count; use 1 or more")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage={self.zero_stage!r} is no stage of ZeRO; use 0, 1, 2 or 3")
        if self.recomputation not in (False, "full", "attention"):
            raise ValueError(f"recomputation={self.recomputation!r}; use False, 'full' or 'attention'")
        if self.tp_mode not in TP_MODES:
            raise ValueError(f"tp_mode={self.tp_mode!r}; use one of {', '.join(TP_MODES)}")

    @property
    def mesh_layout(self) -> Layout:
        """The sizes and their order alone."""
        return Layout(self.dp, self.pp, self.tp, self.order)

    @property
    def chunks_per_rank(self) -> int:
        """`chunks`; but the V-shaped schedules have two chunks a rank even if `chunks` is left at 1."""
        return 2 if self.schedule in ("zb-v", "dualpipe-v") and self.chunks == 1 else self.chunks

    @property
    def min_microbatches(self) -> int:
        """The fewest microbatches with which the schedule works."""
        return 2 * self.pp if self.schedule == "dualpipe-v" else 1

    def count_microbatches(self, samples: int) -> int:
        """Number of microbatches of a batch of so many samples, which one pipeline trains in a step.

        Where neither field names a number, a pipeline gets `MICROBATCHES_PER_STAGE` for each of its ranks,
        and at most one a sample; without a pipeline the batch is not split.
        """
        if self.num_microbatches is not None:
            return self.num_microbatches
        if self.microbatch_size is not None:
            count = -(-samples // self.microbatch_size)
        else:
            count = 1 if self.pp == 1 else min(samples, MICROBATCHES_PER_STAGE * self.pp)
        return max(count, self.min_microbatches)

    def __str__(self) -> str:
        """As people say it: "dp 2 x pp 4, zb-h1, ZeRO 1"; axes of size 1 and usual values are left out."""
        sizes = [f"{axis} {size}" for axis in AXES if (size := getattr(self, axis)) > 1]
        extras = [
            (self.tp_mode != "1d", f"tensor parallelism {self.tp_mode}"),
            (self.schedule != "1f1b", self.schedule),
            (self.chunks > 1, f"{self.chunks} chunks"),
            (self.zero_stage > 0, f"ZeRO {self.zero_stage}"),
            (self.recomputation, f"recomputation {self.recomputation}"),
            (self.sequence_parallel, "sequence parallel"),
        ]
        return ", ".join([" x ".join(sizes) or "1 rank", *(text for shown, text in extras if shown)])


MICROBATCHES_PER_STAGE = 4  # 1F1B with four microbatches a stage idles for a fifth of its step


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class Axis:
    """One direction of a mesh as one rank sees it.

    Attributes:
        name: "dp", "pp", "tp", or a part of one ("tp.0", "tp.1") after `split`.
        size: ranks in this group.
        rank: this process's rank in it, 0 to size - 1.
        group: a process group, also at size 1.
        ranks: the global ranks of the group, in order.
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
    """The process groups of a Layout: `mesh.dp`, `mesh.pp`, `mesh.tp`, each an `Axis`.

    Every rank of the world makes the same Mesh at the same point of the program, since making a group
    is itself a collective.

    Args:
        layout: its world size must equal the number of ranks.

    Raises:
        ValueError: another number of ranks is running than the layout has.
        RuntimeError: no process group is up.
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
        for name in layout.order:
            members = next(group for group in layout.groups(name) if me in group)
            self.axes[name] = _make_axis(name, members)

    @property
    def dp(self) -> Axis:
        return self.axes["dp"]

    @property
    def pp(self) -> Axis:
        return self.axes["pp"]

    @property
    def tp(self) -> Axis:
        return self.axes["tp"]

    @property
    def coordinates(self) -> dict[str, int]:
        return {name: self.axes[name].rank for name in AXES}

    def __repr__(self) -> str:
        here = ", ".join(f"{name}={axis.rank} of {axis.size}" for name, axis in self.axes.items())
        return f"Mesh({here})"


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
    inner = layout.pp * layout.tp
    if world % inner == 0:
        fit = Layout(world // inner, layout.pp, layout.tp, layout.order)
    elif world % layout.tp == 0:
        fit = Layout(1, world // layout.tp, layout.tp, layout.order)
    else:
        fit = Layout(dp=world, order=layout.order)
    return f"{fit} would fit, or start {layout.world_size} ranks"
