"""A planner for clusters: what a step of a GPT takes on a thousand GPUs, which layout is best, what it holds.

A cluster is numbers from datasheets, two latencies, and one number that stands nowhere: the share of its peak
that matmuls reach, fitted to one measured run (`calibrated`). A layout dp x pp x tp = d x p x t takes a batch
through d pipelines in m microbatches of b rows, a GPU having v chunks of the model. Of a mean rank a step has
seven parts:

    matmuls     blocks and logits / (p t), over share x peak
    memory      bytes of norms, dropouts, gelu and softmax, which are no matmuls, over memory bandwidth
    tp          all-reduces of b s h values in line: 4 of each block, 6 if its forward is computed again
    bubble      the (p-1)/v stages of filling and draining, and waiting for the last one, which has the logits
    pp          2 v hops of each microbatch: a t-th of the activation, gathered again where it arrives
    dp          the gradient's all-reduce, behind nothing
    optimizer   28 bytes a parameter, over memory bandwidth

Bytes of 16-bit values and 1-byte masks that no matmul moves, forward + backward:

    per token and hidden value    two norms 8 + 12, two dropouts onto the residual 14 + 22     22 + 34, whole
                                  gelu of 4 h values                                           16 + 24, / t
    per score, a s^2 b            product 2 + 2, softmax 4 + 6, dropout 5 + 5, products 2 + 6  13 + 19, / t

A forward that is computed again moves its bytes again; a fused attention moves no scores. What is left out:
what kernels cost whatever their size, so microbatches of one row look best; sums of words, of logits and of a
tied table; hops while the pipeline fills and drains; stragglers; the network's other users.

After Narayanan et al. 2021 (arXiv 2104.04473): section 2 for the bubble, 3 for the trade, 4.1 for the hops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpnb.theory.communication import seconds
from hpnb.theory.layout_step import stage_blocks
from hpnb.theory.links import Link
from hpnb.theory.model_states import model_states
from hpnb.theory.transformer import Block, model_flops, model_parameters

CLUSTER_PARTS = ("matmuls", "memory", "tp", "bubble", "pp", "dp", "optimizer")
_WHOLE, _CUT, _SCORES = (22, 34), (16, 24), (13, 19)  # bytes, forward and backward
_ADAM = 28  # bytes a parameter: float32 weight and moments in and out, 16-bit gradient in and weight out


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal GPUs.

    Attributes:
        gpus, host: of all, and of one host.
        peak: matmul FLOP/s of a GPU's datasheet.
        memory, memory_bandwidth: bytes of a GPU, and bytes/s.
        inside: a GPU's link within its host.
        between: one network card, of which a host has `cards`.
        share: of the peak, what large matmuls reach.
    """

    gpus: int
    host: int
    peak: float
    memory: float
    memory_bandwidth: float
    inside: Link
    between: Link
    cards: int
    share: float = 1.0

    def link(self, span: int, near: int) -> Link:
        """What a ring sees whose ranks lie within `span` consecutive ones, `near` of them in each host.

        A ring enters and leaves a host once. All rings of a host share its cards, so one has as many of them
        as it has members there: near/host of all. It is never faster than within a host. Sends are no rings:
        for them `near` says how many ranks of a host there are for each one that sends across its border.
        """
        if self.host % span == 0:
            return self.inside
        shared = self.between.bandwidth * self.cards * near / self.host
        return replace(self.between, bandwidth=min(self.inside.bandwidth, shared))


@dataclass(frozen=True)
class GPTRun:
    """A GPT and its batch.

    Attributes:
        batch: rows of a step, of `sequence` tokens.
        recompute: whether every block's forward is computed again for its backward.
        fused_attention: whether scores stay on the chip.
    """

    hidden: int
    layers: int
    heads: int
    batch: int
    sequence: int = 2048
    vocabulary: int = 51200
    recompute: bool = True
    fused_attention: bool = False

    @property
    def parameters(self) -> int:
        return model_parameters(self.layers, self.hidden, self.vocabulary, self.sequence)

    @property
    def flops(self) -> int:
        """Matmul FLOPs of a step, recomputed ones among them."""
        return model_flops(
            self.layers, self.hidden, self.vocabulary, self.sequence, self.batch, self.recompute
        )


@dataclass(frozen=True)
class ClusterPlan:
    """dp outermost, tp innermost; `rows` of a microbatch; `chunks` of the model on a GPU; ZeRO 0 or 1."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    rows: int = 1
    chunks: int = 1
    zero: int = 0

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        words = f"dp {self.dp} x pp {self.pp} x tp {self.tp}"
        words += f", {self.chunks} chunks" if self.chunks > 1 else ""
        return words + (f", ZeRO {self.zero}" if self.zero else "")


def refused(run: GPTRun, cluster: Cluster, plan: ClusterPlan) -> str | None:
    """Why the plan cannot be run, memory aside; None if it can."""
    d, p, t, v = plan.dp, plan.pp, plan.tp, plan.chunks
    if min(d, p, t, v, plan.rows) < 1 or plan.zero not in (0, 1):
        return f"{plan}, rows {plan.rows}: counts must be 1 or more, and ZeRO 0 or 1"
    if plan.gpus != cluster.gpus:
        return f"{plan} is of {plan.gpus} GPUs, and the cluster has {cluster.gpus}"
    if run.batch % (d * plan.rows):
        return f"{run.batch} rows do not go into {d} pipelines of microbatches of {plan.rows}"
    if run.heads % t or p > run.layers:
        return f"{run.heads} heads and {run.layers} blocks cannot be dealt out to tp {t} and pp {p}"
    if cluster.host % t and t % cluster.host:
        return f"tp {t} neither divides a host of {cluster.host} nor fills whole ones"
    if v > 1 and (p == 1 or run.layers % (p * v) or run.batch // d // plan.rows % p):
        return f"{v} chunks want blocks that divide by {p * v}, and microbatches that divide by {p}"
    return None


def _valid(run: GPTRun, cluster: Cluster, plan: ClusterPlan) -> None:
    if (why := refused(run, cluster, plan)) is not None:
        raise ValueError(why)


# --- time --------------------------------------------------------------------------------------------


def cluster_parts(run: GPTRun, cluster: Cluster, plan: ClusterPlan) -> dict[str, float]:
    """{part: seconds} of a step, mean over the ranks; their sum is the step.

    Raises:
        ValueError: the plan cannot be run.
    """
    _valid(run, cluster, plan)
    d, p, t, v, m = plan.dp, plan.pp, plan.tp, plan.chunks, run.batch // plan.dp // plan.rows
    rate, forwards = cluster.share * cluster.peak, 1 + run.recompute
    block = Block(run.hidden, run.heads, run.sequence, plan.rows)
    activation = 2.0 * plan.rows * run.sequence * run.hidden  # bytes
    held = run.parameters / (p * t)

    # of one block and microbatch
    matmuls = (forwards + 2) * block.forward_flops / t / rate
    memory = _moved(run, block, t) / cluster.memory_bandwidth
    links = {axis: cluster.link(*_lies(plan, axis, cluster)) for axis in ("tp", "pp", "dp")}
    sums = 2 * (forwards + 1) * seconds("all_reduce", activation, t, links["tp"])

    # of one microbatch and stage
    logits = 6 * plan.rows * run.sequence * run.hidden * run.vocabulary / t / rate
    stages = [n * (matmuls + memory + sums) for n in stage_blocks(run.layers, p)]
    stages[-1] += logits
    span = m * max(stages) + (sum(stages) - max(stages)) / v
    hop = seconds("send", activation / t, 2, links["pp"]) + seconds("all_gather", activation, t, links["tp"])
    return {
        "matmuls": m * (run.layers * matmuls + logits) / p,
        "memory": m * run.layers * memory / p,
        "tp": m * run.layers * sums / p,
        "bubble": span - m * sum(stages) / p,
        "pp": 2 * m * v * hop if p > 1 else 0.0,
        "dp": seconds("all_reduce", 2 * held, d, links["dp"]),
        "optimizer": _ADAM * held / (d if plan.zero else 1) / cluster.memory_bandwidth,
    }


def _moved(run: GPTRun, block: Block, t: int) -> float:
    """Bytes of one block and microbatch that no matmul moves, on a rank, forward and backward."""

    def both(forward: int, backward: int) -> int:
        return forward * (1 + run.recompute) + backward

    values = block.batch * block.sequence * block.hidden
    scores = 0 if run.fused_attention else block.batch * block.heads * block.sequence**2
    return values * (both(*_WHOLE) + both(*_CUT) / t) + scores * both(*_SCORES) / t


def _lies(plan: ClusterPlan, axis: str, cluster: Cluster) -> tuple[int, int]:
    """(consecutive ranks that a group of the axis spans, its members in a host), as `Cluster.link` wants."""
    inner, host = plan.pp * plan.tp, cluster.host
    return {
        "tp": (plan.tp, min(plan.tp, host)),
        # only the t ranks of one stage cross a border at a time; and no message takes more than one card
        "pp": (inner, max(1, min(host // min(plan.tp, host), host // cluster.cards))),
        "dp": (plan.gpus, max(1, host // inner)),
    }[axis]


def tflops(run: GPTRun, cluster: Cluster, plan: ClusterPlan) -> float:
    """TFLOP/s of a GPU, recomputed FLOPs counted, as Narayanan et al. 2021 count them."""
    return run.flops / sum(cluster_parts(run, cluster, plan).values()) / plan.gpus / 1e12


def calibrated(cluster: Cluster, run: GPTRun, plan: ClusterPlan, measured: float) -> Cluster:
    """The cluster whose matmuls reach the share of the peak that explains one run.

    Args:
        measured: TFLOP/s of a GPU, recomputed FLOPs counted.

    Raises:
        ValueError: no share up to 1 explains it.
    """
    step, low, high = run.flops / measured / plan.gpus / 1e12, 0.0, 1.0
    for _ in range(60):  # matmuls are in the bubble as well, so halve the interval
        share = (low + high) / 2
        slow = sum(cluster_parts(run, replace(cluster, share=share), plan).values()) > step
        low, high = (share, high) if slow else (low, share)
    if not high < 1 - 1e-9:
        raise ValueError(
            f"{measured:g} TFLOP/s would take matmuls at more than the peak of {cluster.peak / 1e12:g}: "
            f"at it {plan} reaches {tflops(run, replace(cluster, share=1.0), plan):.0f}"
        )
    return replace(cluster, share=high)


# --- memory, and the search --------------------------------------------------------------------------


def cluster_memory(run: GPTRun, plan: ClusterPlan) -> float:
    """Bytes of the fullest rank, the first: states, inputs of blocks in flight, and one block at work.

    With recomputation a block keeps its input, 2 s b h, for each microbatch in flight: p of them, and with v
    chunks 1 + (p-1)/(p v) times the whole model's blocks over p (Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.3). Without it, s b h (10 + 24/t + 5 a s/(h t)) (section 4).
    """
    t, p = plan.tp, plan.pp
    tokens = plan.rows * run.sequence
    scores = 0.0 if run.fused_attention else 5 * run.heads * run.sequence / run.hidden
    block = tokens * run.hidden * (10 + (24 + scores) / t)
    blocks = max(stage_blocks(run.layers, p)) * min(p, run.batch // plan.dp // plan.rows)
    flying = blocks * (1 + (p - 1) / (p * plan.chunks) if plan.chunks > 1 else 1)
    kept = flying * 2.0 * tokens * run.hidden + block if run.recompute else flying * block
    words = run.vocabulary * run.hidden / t
    held = run.layers * 12 * run.hidden**2 / (p * t) + words
    turn = 0.0 if p > 1 else 6.0 * tokens * run.vocabulary / t  # float32 logits and their 16-bit gradient
    return model_states(held, plan.dp, plan.zero).total + kept + turn


def cluster_plans(run: GPTRun, cluster: Cluster, zero: int = 0) -> list[ClusterPlan]:
    """All layouts that can be run, with microbatches of one row and any number of chunks; memory aside."""
    found = []
    for tp in (n for n in range(1, run.heads + 1) if cluster.gpus % n == 0):
        for pp in (n for n in range(1, run.layers + 1) if cluster.gpus // tp % n == 0):
            plan = ClusterPlan(cluster.gpus // tp // pp, pp, tp, zero=zero)
            found += [replace(plan, chunks=v) for v in range(1, run.layers // pp + 1)]
    return [plan for plan in found if refused(run, cluster, plan) is None]


def fastest(run: GPTRun, cluster: Cluster, plans: Iterable[ClusterPlan]) -> ClusterPlan:
    """The one with the shortest step, of those that fit; of all where none does.

    Raises:
        ValueError: no plans, or one that cannot be run.
    """
    given = list(plans)
    able = [plan for plan in given if cluster_memory(run, plan) <= cluster.memory]
    return min(able or given, key=lambda plan: sum(cluster_parts(run, cluster, plan).values()))


def by_cut(run: GPTRun, cluster: Cluster, zero: int = 0) -> dict[tuple[int, int], ClusterPlan]:
    """{(pp, tp): the plan with its best number of chunks}, as `fastest` chooses."""
    found: dict[tuple[int, int], list[ClusterPlan]] = {}
    for plan in cluster_plans(run, cluster, zero):
        found.setdefault((plan.pp, plan.tp), []).append(plan)
    return {cut: fastest(run, cluster, plans) for cut, plans in found.items()}


def best_plan(run: GPTRun, cluster: Cluster, zero: int = 0) -> ClusterPlan:
    """The fastest that fits.

    Raises:
        ValueError: none fits.
    """
    plans = cluster_plans(run, cluster, zero)
    held = [cluster_memory(run, plan) for plan in plans]
    if not held or min(held) > cluster.memory:
        least = f"the smallest holds {min(held) / 1e9:.0f} GB" if held else "none can be run"
        raise ValueError(f"no layout of {cluster.gpus} GPUs fits {cluster.memory / 1e9:.0f} GB: {least}")
    return fastest(run, cluster, plans)
