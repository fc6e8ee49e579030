"""A step of a GPT-2 on any layout, in five parts, and what its fullest rank holds: what one ranks layouts by.

A layout is dp x pp x tp = d x p x t ranks. A batch of B rows goes through d pipelines in m microbatches of
r = B/(d m) rows. On one rank alone a block takes c + k r seconds for a microbatch, forward and backward, and
so do the two ends (embedding, head and loss) together, with constants of their own: c is what small kernels
cost whatever their size, k is work, of which tp does a t-th. Then, of a mean rank,

    computing     m (L (c + k r/t) + ends) / p
    exposed tp    (4 L + 2) m / p all-reduces of r s h values, in line
    bubble        sum of stages + (m-1) largest stage + 2 (p-1) hops, less the two above
    exposed dp    buckets of the gradient behind the backward of the last microbatch
    optimizer     of the parameters that the rank steps

Memory is counted at the fullest rank: states by ZeRO, activations of the microbatches in flight (1F1B: p - r
of them on rank r), and three times the logits, in float32, on the last.

What is left out shows as a ratio: norms and dropout, which every rank of tp does whole; what communication
takes from the computing beside it; stages that wait for each other for reasons of the machine's.
Narayanan et al. 2021 (arXiv 2104.04473), sections 2 and 3, weigh the axes against each other in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpnb.theory.communication import bytes_sent, seconds
from hpnb.theory.links import Link
from hpnb.theory.model_states import model_states
from hpnb.theory.overlap import exposed_seconds
from hpnb.theory.pipeline import in_flight, paced
from hpnb.theory.tensor_memory import activation_bytes
from hpnb.theory.transformer import Block

STEP_PARTS = ("computing", "bubble", "exposed tp", "exposed dp", "optimizer")
FILLING = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 1 / 3}  # of 1F1B's filling and draining, with F = I = W
BUCKET = 25 * 2**20
_HEADS = 2  # all-reduces of tp at the ends: of looked-up words forward, of the head's input backward


@dataclass(frozen=True)
class LayoutPlan:
    """A layout, and how a step goes through it.

    Attributes:
        microbatches: of each pipeline; 1 without one.
        zero: stage of ZeRO over dp. Stage 3 is for plans without a pipeline.
        style: of the schedule, one of FILLING.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    microbatches: int = 1
    zero: int = 0
    style: str = "1f1b"

    def __post_init__(self) -> None:
        if min(self.dp, self.pp, self.tp, self.microbatches) < 1:
            raise ValueError(f"dp={self.dp}, pp={self.pp}, tp={self.tp}, microbatches={self.microbatches}: "
                             "each must be 1 or more")  # fmt: skip
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r} is no stage of ZeRO; use 0, 1, 2 or 3")
        if self.style not in FILLING:
            raise ValueError(f"style={self.style!r} has no closed form here; use {', '.join(FILLING)}")

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        sizes = {"dp": self.dp, "pp": self.pp, "tp": self.tp}
        words = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"
        words += f", {self.style}" if self.style != "1f1b" else ""
        return words + (f", ZeRO {self.zero}" if self.zero else "")


@dataclass(frozen=True)
class LayerCost:
    """Seconds of `rows` rows on one rank: fixed + row x rows."""

    fixed: float
    row: float

    def __call__(self, rows: float, share: float = 1.0) -> float:
        return self.fixed + self.row * rows * share


@dataclass(frozen=True)
class LayoutTask:
    """What is trained, and on what.

    Attributes:
        block: shape of one, for one row of a batch; its bytes_per_value is of weights and values.
        layers, vocabulary: of the model; embedding and head are one table.
        rows: of a whole batch.
        each, ends: seconds of a block, and of embedding, head and loss together, forward and backward.
        parameter: seconds of the optimizer's step, a parameter.
        buckets: of a gradient, at least.
        host: ranks of a host; tp neighbours are closest, dp's farthest apart.
        inside, between: the link of a rank within its host, and to another one.
    """

    block: Block
    layers: int
    vocabulary: int
    rows: int
    each: LayerCost
    ends: LayerCost
    parameter: float
    inside: Link
    between: Link | None = None
    host: int = 1 << 30
    buckets: int = 1

    @property
    def table(self) -> int:
        """Parameters that lie in no block."""
        return (self.vocabulary + self.block.sequence + 2) * self.block.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block.parameters + self.table

    @property
    def flops(self) -> float:
        """Matmul FLOPs of a step."""
        head = 6 * self.rows * self.block.sequence * self.block.hidden * self.vocabulary
        return self.layers * replace(self.block, batch=self.rows).training_flops + head

    @property
    def tokens(self) -> int:
        return self.rows * self.block.sequence

    def refused(self, plan: LayoutPlan) -> str | None:
        """Why the plan cannot be run; None if it can."""
        if self.rows % (plan.dp * plan.microbatches):
            return f"{self.rows} rows do not go into {plan.dp} pipelines x {plan.microbatches} microbatches"
        if plan.pp > self.layers or plan.tp > self.block.heads:
            return f"{self.layers} blocks of {self.block.heads} heads are too few for {plan}"
        if plan.zero and plan.dp == 1:
            return f"ZeRO {plan.zero} deals out over dp, and there is one replica"
        return "ZeRO 3 gathers weights for each microbatch" if plan.zero == 3 and plan.pp > 1 else None

    def link(self, plan: LayoutPlan, axis: str) -> Link:
        """That of the axis's slowest hop, with dp outermost and tp innermost."""
        span = {"tp": plan.tp, "pp": plan.pp * plan.tp, "dp": plan.ranks}[axis]
        inside = span <= self.host or self.between is None
        return self.inside if inside or self.between is None else self.between


def stage_blocks(layers: int, stages: int) -> tuple[int, ...]:
    """As hpnb's uniform cut deals them out: what does not divide goes to stages in the middle."""
    least, more = divmod(layers, stages)
    start = (stages - more) // 2
    return tuple(least + (start <= stage < start + more) for stage in range(stages))


def layout_parts(task: LayoutTask, plan: LayoutPlan) -> dict[str, float]:
    """{part: seconds} of a step, mean over the ranks; their sum is the step.

    Raises:
        ValueError: the plan cannot be run.
    """
    if (why := task.refused(plan)) is not None:
        raise ValueError(f"{plan}: {why}")
    p, t, m, rows = plan.pp, plan.tp, plan.microbatches, task.rows / plan.dp / plan.microbatches
    value = task.block.bytes_per_value
    message = rows * task.block.sequence * task.block.hidden * value
    sums = seconds("all_reduce", message, t, task.link(plan, "tp")) if t > 1 else 0.0
    block, ends = task.each(rows, 1 / t), task.ends(rows, 1 / t)
    stages = [n * (block + 4 * sums) for n in stage_blocks(task.layers, p)]
    stages[0] += sums
    stages[-1] += ends + sums
    computing = m * (task.layers * block + ends) / p
    inline = (4 * task.layers + _HEADS) * m * sums / p
    hops = 2 * (p - 1) * seconds("send", message, 2, task.link(plan, "pp")) if p > 1 else 0.0
    span = paced(stages, m) + hops
    idle = span - computing - inline - (1 - FILLING[plan.style]) * (p - 1) / p * sum(stages)
    held = task.parameters / (p * t)
    return {
        "computing": computing,
        "bubble": max(idle, 0.0) if p > 1 else 0.0,
        "exposed tp": inline,
        "exposed dp": _exposed(task, plan, value * held, sum(stages) / p),
        "optimizer": task.parameter * held / (plan.dp if plan.zero else 1),
    }


def _exposed(task: LayoutTask, plan: LayoutPlan, gradient: float, stage: float) -> float:
    """Seconds that gradients, and weights under ZeRO, stick out. `stage`: of one microbatch, both ways."""
    if plan.dp == 1:
        return 0.0
    link, d, behind = task.link(plan, "dp"), plan.dp, 2 / 3 * stage
    buckets = max(task.buckets, round(gradient / BUCKET))
    if plan.zero == 0:
        return exposed_seconds(behind, gradient, buckets, d, link)
    last = seconds("reduce_scatter", gradient / buckets, d, link)
    reduced = max(last, buckets * last - (buckets - 1) * behind / buckets)
    if plan.zero < 3:
        return reduced + seconds("all_gather", gradient, d, link)
    n = task.layers
    g, r = (seconds(op, gradient / (n + 1), d, link) for op in ("all_gather", "reduce_scatter"))
    return 2 * g + r + n * (max(0.0, g - stage / 3 / n) + max(0.0, g + r - behind / n))


def layout_bytes(task: LayoutTask, plan: LayoutPlan) -> float:
    """Bytes that leave a rank in a step, mean over the ranks: activations, gradients, weights, the tie.

    Without what is small: losses, counts, and of cut logits nothing but the three sums of each token.
    """
    p, t, d, value = plan.pp, plan.tp, plan.dp, task.block.bytes_per_value
    activation = task.tokens / d * task.block.hidden * value  # of all microbatches
    tp = (4 * task.layers + _HEADS) / p * bytes_sent("all_reduce", activation, t)
    tp += (
        3 / p * bytes_sent("all_reduce", 4.0 * (task.tokens - task.rows) / d, t)
    )  # a row's last asks nothing
    pp = 2 * (p - 1) / p * activation
    # In a pipeline both ends hold the table of words, sum its gradient, and either is reduced over dp.
    words = value * task.vocabulary * task.block.hidden / t
    tie = 2 / p * bytes_sent("all_reduce", words, 2) if p > 1 else 0.0
    gradient = value * task.parameters / (p * t) + (words / p if p > 1 else 0.0)
    times = 3 if plan.zero == 3 else 2
    again = value * task.table if plan.zero == 3 else 0.0  # what lies in no block is gathered once
    return tp + pp + tie + bytes_sent("all_gather", times * gradient - again, d)


def layout_memory(task: LayoutTask, plan: LayoutPlan) -> float:
    """Bytes at the peak of the fullest rank, with AdamW."""
    p, t, m, w = plan.pp, plan.tp, plan.microbatches, task.block.bytes_per_value
    rows = max(1, round(task.rows / plan.dp / m))
    micro = replace(task.block, batch=rows)
    tokens = rows * micro.sequence
    kept = activation_bytes(micro, "1d", t, mlp_copies=5)
    words = task.vocabulary * micro.hidden / t
    logits = 4.0 * task.vocabulary * tokens / t
    found = []
    for stage, blocks in enumerate(stage_blocks(task.layers, p)):
        last = stage == p - 1
        held = blocks * task.block.parameters / t + (words if last or stage == 0 else 0)
        held += micro.sequence * micro.hidden if stage == 0 else 0
        states = model_states(held, plan.dp, plan.zero, weight_bytes=w, gradient_bytes=w,
                              optimizer_bytes=8 if w >= 4 else 12).total  # fmt: skip
        flying = in_flight(plan.style, p, m, stage) if p > 1 else 1
        inputs = w * tokens * micro.hidden
        activations = flying * (blocks * kept + inputs)
        turn = 3 * logits + 2 * inputs if last else 0.0
        whole = w * (task.table + 2 * task.block.parameters) if plan.zero == 3 else 0.0
        found.append(states + max(activations + turn, w * words if last or stage == 0 else 0.0) + whole)
    return max(found)


def layout_plans(
    task: LayoutTask, ranks: int, microbatch_rows: int, zero: Sequence[int] = (0,)
) -> list[LayoutPlan]:
    """All layouts of `ranks` ranks that can be run, microbatches of `microbatch_rows` rows in pipelines.

    Args:
        zero: which stages of ZeRO are tried.
    """
    found = []
    for dp in (n for n in range(ranks, 0, -1) if ranks % n == 0):
        for pp in (n for n in range(1, ranks // dp + 1) if ranks // dp % n == 0):
            m = max(1, task.rows // dp // microbatch_rows) if pp > 1 else 1
            made = [LayoutPlan(dp, pp, ranks // dp // pp, m, stage) for stage in zero]
            found += [plan for plan in made if task.refused(plan) is None]
    return found
