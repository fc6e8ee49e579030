"""A Layout says how many ranks each axis has; a ParallelLayout adds how they train. Both are numbers only.

A layout arranges world_size = dp * pp * cp * tp ranks as a box. With the default order dp is outermost and
tp innermost, so the ranks of one tp group are neighbours (they talk most), and those of one dp group
are furthest apart (they talk least):

    rank = ((dp_index * pp + pp_index) * cp + cp_index) * tp + tp_index

The context axis cp is for sequences that no rank can hold. Where its size is 1 it is left out of everything
that lists axes. The expert axis ep takes its ranks from dp x cp. `hpnb.mesh` makes the process groups of a
layout, inside ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Literal

AXES = ("dp", "pp", "tp")
TP_MODES = ("1d", "2d", "2.5d", "3d")
CP_MODES = ("ring", "all-gather", "ulysses")
CP_MODES_IN_WORDS = "'ring', 'all-gather' or 'ulysses'"
Recomputation = Literal[False, "full", "attention"]


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each axis, and in which order the axes are nested.

    Args:
        dp, pp, tp: ranks along the data, pipeline and tensor axis, each at least 1.
        order: the axes from the outermost to the innermost. Where it does not name cp, cp is just outside tp.
        cp: ranks along the context axis.
        ep: ranks over which experts are sharded. They are ranks of dp x cp, so ep adds none.

    Raises:
        ValueError: a size below 1, an order that does not name each axis once, or an ep that does not divide
            dp x cp.

    >>> layout = hpnb.Layout(dp=2, tp=2)
    >>> layout.world_size, layout.groups("tp")
    (4, [(0, 1), (2, 3)])
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES
    cp: int = field(default=1, kw_only=True)
    ep: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*AXES, "cp", "ep"):
            if not _is_count(size := getattr(self, name)):
                raise ValueError(f"Layout {name}={size!r} is not a count; use 1 where an axis is not split")
        order = [name for name in self.order if name != "cp" or self.cp > 1]
        if self.cp > 1 and "cp" not in order and "tp" in order:
            order.insert(order.index("tp"), "cp")
        if sorted(order) != sorted(self.axes):
            raise ValueError(
                f"Layout order={tuple(self.order)!r} must name {', '.join(self.axes[:-1])} and tp once, "
                "outermost first"
            )
        object.__setattr__(self, "order", tuple(order))
        if (self.dp * self.cp) % self.ep:
            fits = [n for n in range(1, self.dp * self.cp + 1) if self.dp * self.cp % n == 0]
            raise ValueError(
                f"ep={self.ep} takes its ranks from dp={self.dp} x cp={self.cp}, which it does not divide; "
                f"use ep={' or '.join(map(str, fits))}"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes: dp, pp and tp, and cp where it has ranks."""
        return AXES if self.cp == 1 else ("dp", "pp", "cp", "tp")

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
        return {name: coordinates[name] for name in self.axes}

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """The rank at these coordinates."""
        index = {"dp": dp, "pp": pp, "tp": tp, "cp": cp}
        rank = 0
        for name in self.order:
            size = getattr(self, name)
            if not 0 <= index[name] < size:
                raise ValueError(f"{name}={index[name]} is outside {self}; it goes from 0 to {size - 1}")
            rank = rank * size + index[name]
        return rank

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks along `axis`: those that differ in that coordinate alone.

        Along "dp_cp" they may differ in both coordinates: these ranks have the same weights and other tokens.
        Neighbours among them are an "ep" group, which has each expert once; the ranks of an "edp" group have
        the same experts.
        """
        if axis == "ep":
            return [g[i : i + self.ep] for g in self.groups("dp_cp") for i in range(0, len(g), self.ep)]
        if axis == "edp":
            return [group[i :: self.ep] for group in self.groups("dp_cp") for i in range(self.ep)]
        along = ("dp", "cp") if axis == "dp_cp" else (axis,)
        if any(name not in (*AXES, "cp") for name in along):
            raise ValueError(f"no axis {axis!r}; a Layout has dp, pp, tp, cp and ep")
        others = [name for name in self.order if name not in along]
        groups = []
        for indices in product(*(range(getattr(self, name)) for name in others)):
            fixed = dict(zip(others, indices, strict=True))
            moves = product(*(range(getattr(self, name)) for name in along))
            groups.append(tuple(self.rank(**fixed, **dict(zip(along, i, strict=True))) for i in moves))
        return groups

    def __str__(self) -> str:
        names = (*self.order, *(("ep",) if self.ep > 1 else ()))
        return "Layout(" + ", ".join(f"{name}={getattr(self, name)}" for name in names) + ")"


@dataclass(frozen=True)
class ParallelLayout(Layout):
    """A whole training layout: how many ranks lie along each axis, and how a step runs on them.

    This is the one description of a layout. The planner searches over it, the benchmarks name their layouts
    by it, and the plugin's fields can be read from it. It is a `Layout`, so `Mesh(layout)`,
    `hpnb.plot.mesh(layout)` and everything else that takes a `Layout` takes it as well; `mesh_layout` is the
    plain `Layout`, for comparing or printing the sizes alone.

        ParallelLayout(dp=2, pp=4, num_microbatches=8, zero_stage=1, schedule="zb-h1")

    Args:
        dp, pp, tp, cp, ep: ranks along each axis.
        num_microbatches: microbatches of a step in each pipeline. It wins over
        microbatch_size: samples of a microbatch; see `count_microbatches` for what happens without either.
        zero_stage: 0 replicates; 1 shards optimizer state over dp, 2 also gradients, 3 also weights.
        schedule: name of the pipeline schedule (`hpnb.pipeline_parallel.schedules`).
        chunks: model chunks (stages) on each rank of a pipeline.
        recomputation: what the backward recomputes: nothing (False), whole blocks ("full") or the attention's
            softmax and its products ("attention").
        sequence_parallel: split along the tokens what lies between the tensor-parallel matrices (1d only).
        tp_mode, tp_depth: "1d", "2d", "2.5d" or "3d" tensor parallelism, and the depth of "2.5d".
        context_parallel: how attention runs over cp, "ring", "all-gather" or "ulysses".
        order: the axes from the outermost to the innermost.

    What does not compose is refused by whoever runs the layout, since that depends on the model as well.

    Raises:
        ValueError: a count below 1, a ZeRO stage that is not 0, 1, 2 or 3, or an unknown mode.

    >>> hpnb.ParallelLayout(dp=2, pp=2, zero_stage=1, schedule="1f1b").world_size
    4
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
    context_parallel: str = field(default="ring", kw_only=True)
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
        if self.context_parallel not in CP_MODES:
            raise ValueError(f"context_parallel={self.context_parallel!r}; use {CP_MODES_IN_WORDS}")

    @property
    def mesh_layout(self) -> Layout:
        """The sizes and their order alone."""
        return Layout(self.dp, self.pp, self.tp, self.order, cp=self.cp, ep=self.ep)

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
        sizes = [f"{axis} {size}" for axis in (*self.axes, "ep") if (size := getattr(self, axis)) > 1]
        extras = [
            (self.tp_mode != "1d", f"tensor parallelism {self.tp_mode}"),
            (self.schedule != "1f1b", self.schedule),
            (self.chunks > 1, f"{self.chunks} chunks"),
            (self.zero_stage > 0, f"ZeRO {self.zero_stage}"),
            (self.recomputation, f"recomputation {self.recomputation}"),
            (self.sequence_parallel, "sequence parallel"),
            (self.context_parallel != "ring", self.context_parallel),
        ]
        return ", ".join([" x ".join(sizes) or "1 rank", *(text for shown, text in extras if shown)])


MICROBATCHES_PER_STAGE = 4  # 1F1B with four microbatches a stage idles for a fifth of its step


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
