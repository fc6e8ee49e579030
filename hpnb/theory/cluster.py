"""The step of a GPT on a thousand GPUs, predicted from datasheets: seven parts of its time, and its memory.

A cluster is six numbers from datasheets, two latencies, and one number that no datasheet has: the share of
its peak that matmuls reach, fitted to one measured run (`calibrated`). A layout dp x pp x tp = d x p x t
sends a batch through d pipelines in m microbatches of b samples, with v model chunks on each GPU. Of the mean
rank a step has seven parts:

    matmuls     blocks and logits / (p t), over share x peak
    memory      bytes of norms, dropouts, GELU and softmax, which are no matmuls, over memory bandwidth
    tp          all-reduces of b s h values, one after the other: 4 a block, 6 if its forward is recomputed
    bubble      the (p-1)/v stages of filling and draining, and waits for the last stage, which has the logits
    pp          2 v hops of each microbatch: a t-th of the activation, all-gathered where it arrives
    dp          the all-reduce of the gradient, with nothing to hide behind
    optimizer   28 bytes a parameter, over memory bandwidth

Bytes of 16-bit values and 1-byte masks that no matmul moves, forward + backward:

    per token and hidden value    two norms 8 + 12, two dropouts onto the residual 14 + 22     22 + 34, full
                                  GELU of 4 h values                                           16 + 24, / t
    per score, a s^2 b            product 2 + 2, softmax 4 + 6, dropout 5 + 5, products 2 + 6  13 + 19, / t

A recomputed forward moves its bytes again; a fused attention moves no scores. The model leaves out what
kernels cost whatever their size (so microbatches of one sample look best), the reductions of embedded tokens,
of logits and of a tied table, hops while the pipeline fills and drains, stragglers, and the network's other
users.

After Narayanan et al. 2021 (arXiv 2104.04473): section 2 for the bubble, 3 for the trade, 4.1 for the hops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpnb.mesh import ParallelLayout
from hpnb.theory.communication import seconds
from hpnb.theory.layout_step import stage_blocks, unmodelled
from hpnb.theory.links import Link
from hpnb.theory.model_states import model_states
from hpnb.theory.pipeline import pipeline_parts
from hpnb.theory.transformer import Block, model_flops, model_parameters

CLUSTER_PARTS = ("matmuls", "memory", "tp", "bubble", "pp", "dp", "optimizer")
_REPLICATED, _SHARDED, _SCORES = (22, 34), (16, 24), (13, 19)  # bytes, forward and backward
_ADAM = 28  # bytes a parameter: float32 weight and moments in and out, 16-bit gradient in and weight out


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Attributes:
        gpus, host: GPUs of the cluster, and of one node.
        peak: matmul FLOP/s of a GPU, by its datasheet.
        memory, memory_bandwidth: bytes of a GPU, and bytes/s.
        inside: the link of a GPU within its node.
        between: one NIC, of which a node has `cards`.
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
        """What a ring sees whose ranks lie within `span` consecutive ones, `near` of them on each node.

        A ring enters and leaves a node once. All rings of a node share its NICs, so a ring gets as many of
        them as its members there: near/host of all. It is never faster than within a node. Sends are no
        rings: for them `near` is the number of ranks of a node for each one that sends across its border.
        """
        if self.host % span == 0:
            return self.inside
        shared = self.between.bandwidth * self.cards * near / self.host
        return replace(self.between, bandwidth=min(self.inside.bandwidth, shared))


@dataclass(frozen=True)
class GPTRun:
    """A GPT and its batch.

    Attributes:
        batch: samples of a step, of `sequence` tokens each.
        recompute: whether the backward recomputes every block's forward.
        fused_attention: whether the scores stay on the chip.
    """

    hidden: int
    layers: int
    heads: int
    batch: int
    sequence: int = 2048
    vocab_size: int = 51200
    recompute: bool = True
    fused_attention: bool = False

    @property
    def parameters(self) -> int:
        return model_parameters(self.layers, self.hidden, self.vocab_size, self.sequence)

    @property
    def flops(self) -> int:
        """Matmul FLOPs of a step, recomputed ones included."""
        return model_flops(
            self.layers, self.hidden, self.vocab_size, self.sequence, self.batch, self.recompute
        )


def microbatch_size(run: GPTRun, layout: ParallelLayout) -> int:
    """Samples of a microbatch; one if the layout does not say."""
    if layout.num_microbatches is not None:
        return max(1, run.batch // layout.dp // layout.num_microbatches)
    return layout.microbatch_size or 1


def refusal(run: GPTRun, cluster: Cluster, layout: ParallelLayout) -> str | None:
    """Why the layout cannot be run or predicted, memory aside; None if it can."""
    d, p, t, v, b = layout.dp, layout.pp, layout.tp, layout.chunks, microbatch_size(run, layout)
    if layout.zero_stage > 1:
        return f"{layout}: this prediction knows ZeRO 0 and 1"
    if layout.schedule not in ("1f1b", "interleaved"):
        return f"{layout}: this prediction knows 1f1b and interleaved"
    if (why := unmodelled(layout)) is not None:
        return why
    if layout.world_size != cluster.gpus:
        return f"{layout} is for {layout.world_size} GPUs, and the cluster has {cluster.gpus}"
    if run.batch % (d * b):
        return f"a batch of {run.batch} cannot be split over {d} pipelines into microbatches of {b}"
    if run.heads % t or p > run.layers:
        return f"{run.heads} heads cannot be sharded {t} ways, or {run.layers} blocks fill {p} stages"
    if cluster.host % t and t % cluster.host:
        return f"tp={t} neither divides a node of {cluster.host} GPUs nor fills several"
    if v > 1 and (p == 1 or run.layers % (p * v) or run.batch // d // b % p):
        return f"chunks={v} needs blocks that divide by {p * v}, and microbatches that divide by {p}"
    return None


# --- time --------------------------------------------------------------------------------------------


def cluster_parts(run: GPTRun, cluster: Cluster, layout: ParallelLayout) -> dict[str, float]:
    """{part: seconds} of a step, mean over the ranks; their sum is the step.

    Raises:
        ValueError: the layout cannot be run.
    """
    if (why := refusal(run, cluster, layout)) is not None:
        raise ValueError(why)
    d, p, t, v, b = layout.dp, layout.pp, layout.tp, layout.chunks, microbatch_size(run, layout)
    m, rate, forwards = run.batch // d // b, cluster.share * cluster.peak, 1 + run.recompute
    links = {axis: cluster.link(*_group_span(layout, axis, cluster)) for axis in ("tp", "pp", "dp")}

    # One block and microbatch.
    block = Block(run.hidden, run.heads, run.sequence, b)
    activation = 2.0 * b * run.sequence * run.hidden  # bytes
    matmuls = (forwards + 2) * block.forward_flops / t / rate
    memory = _moved_bytes(run, block, t) / cluster.memory_bandwidth
    reduces = 2 * (forwards + 1) * seconds("all_reduce", activation, t, links["tp"])

    # One microbatch on each stage, and all of them through the pipeline.
    stages = [{"matmuls": n * matmuls, "memory": n * memory, "tp": n * reduces}
              for n in stage_blocks(run.layers, p)]  # fmt: skip
    stages[-1]["matmuls"] += 6 * b * run.sequence * run.hidden * run.vocab_size / t / rate  # logits
    parts = pipeline_parts(stages, m, chunks=v)
    hop = seconds("send", activation / t, 2, links["pp"]) + seconds("all_gather", activation, t, links["tp"])

    parameters = run.parameters / (p * t)
    return {
        **parts,
        "pp": 2 * m * v * hop if p > 1 else 0.0,
        "dp": seconds("all_reduce", 2 * parameters, d, links["dp"]),
        "optimizer": _ADAM * parameters / (d if layout.zero_stage else 1) / cluster.memory_bandwidth,
    }


def _moved_bytes(run: GPTRun, block: Block, t: int) -> float:
    """Bytes of one block and microbatch that no matmul moves, on a rank, forward and backward."""

    def both(forward: int, backward: int) -> int:
        return forward * (1 + run.recompute) + backward

    values = block.batch * block.sequence * block.hidden
    scores = 0 if run.fused_attention else block.batch * block.heads * block.sequence**2
    return values * (both(*_REPLICATED) + both(*_SHARDED) / t) + scores * both(*_SCORES) / t


def _group_span(layout: ParallelLayout, axis: str, cluster: Cluster) -> tuple[int, int]:
    """(consecutive ranks that a group of the axis spans, its members on a node), as `Cluster.link` wants."""
    inner, host = layout.pp * layout.tp, cluster.host
    return {
        "tp": (layout.tp, min(layout.tp, host)),
        # Only the t ranks of one stage cross a border at a time, and no message takes more than one NIC.
        "pp": (inner, max(1, min(host // min(layout.tp, host), host // cluster.cards))),
        "dp": (layout.world_size, max(1, host // inner)),
    }[axis]


def tflops(run: GPTRun, cluster: Cluster, layout: ParallelLayout) -> float:
    """TFLOP/s of a GPU, recomputed FLOPs included, as Narayanan et al. 2021 count them."""
    return run.flops / sum(cluster_parts(run, cluster, layout).values()) / layout.world_size / 1e12


def calibrated(cluster: Cluster, run: GPTRun, layout: ParallelLayout, measured: float) -> Cluster:
    """The cluster whose matmuls reach the share of the peak that explains one measured run.

    Args:
        measured: TFLOP/s of a GPU, recomputed FLOPs included.

    Raises:
        ValueError: no share up to 1 explains it.
    """
    step, low, high = run.flops / measured / layout.world_size / 1e12, 0.0, 1.0
    for _ in range(60):  # matmuls are part of the bubble as well, so halve the interval
        share = (low + high) / 2
        too_slow = sum(cluster_parts(run, replace(cluster, share=share), layout).values()) > step
        low, high = (share, high) if too_slow else (low, share)
    if not high < 1 - 1e-9:
        raise ValueError(
            f"{measured:g} TFLOP/s would take matmuls at more than the peak of {cluster.peak / 1e12:g}: "
            f"at it {layout} reaches {tflops(run, replace(cluster, share=1.0), layout):.0f}"
        )
    return replace(cluster, share=high)


# --- memory ------------------------------------------------------------------------------------------


def cluster_memory(run: GPTRun, layout: ParallelLayout) -> float:
    """Bytes of the fullest rank, the first: its states, the inputs of blocks in flight, and one block at
    work.

    With recomputation a block keeps its input, 2 s b h, for each microbatch in flight: p of them, and with v
    chunks 1 + (p-1)/(p v) times the model's blocks over p (Korthikanti et al. 2022, arXiv 2205.05198, section
    4.2.3). Without it a block keeps s b h (10 + 24/t + 5 a s/(h t)) (section 4).
    """
    t, p, v, b = layout.tp, layout.pp, layout.chunks, microbatch_size(run, layout)
    tokens = b * run.sequence
    scores = 0.0 if run.fused_attention else 5 * run.heads * run.sequence / run.hidden
    block = tokens * run.hidden * (10 + (24 + scores) / t)
    blocks = max(stage_blocks(run.layers, p)) * min(p, run.batch // layout.dp // b)
    in_flight = blocks * (1 + (p - 1) / (p * v) if v > 1 else 1)
    activations = in_flight * 2.0 * tokens * run.hidden + block if run.recompute else in_flight * block
    table = run.vocab_size * run.hidden / t
    parameters = run.layers * 12 * run.hidden**2 / (p * t) + table
    logits = 0.0 if p > 1 else 6.0 * tokens * run.vocab_size / t  # float32, and their 16-bit gradient
    return model_states(parameters, layout.dp, layout.zero_stage).total + activations + logits
