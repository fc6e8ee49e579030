"""What `hpnb plan` is asked: a model, a batch, a cluster and a program; and why a layout cannot run it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from hpnb.mesh import ParallelLayout
from hpnb.theory.cluster import Cluster
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.pipeline import FILL, V_SHAPED

ATTENTION_SHARE = 0.6  # of the matmul rate, by fused attention
SPLIT_BACKWARD = 1.3  # a backward in two halves takes so much longer: 1F1B and ZB-V of the benchmarks


@dataclass(frozen=True)
class Software:
    """What a training program does with a layout, besides the layout. By default hpnb's.

    Attributes:
        fused: attention keeps its scores on the chip and skips what a causal mask hides, and dropout is off.
        overlap: gradients are reduced during the backward, and hops during computing.
        overlap_weights: ZeRO 1 and 2 gather updated weights during the next forward.
        tp_overlap: tp's messages travel in tp pieces beside the matmuls of others, so that one is exposed.
        gradient_bytes: of a gradient that is reduced; of 4, each microbatch reads and writes it.
        loss_bytes: of an output in memory, forward and backward. 20: float32 logits, log-probabilities and
            gradients.
        action_seconds: that a pipeline rank takes between two actions, a forward or backward of one chunk.
        shards_norms: with sequence parallelism, what a norm gives is kept as a shard and gathered again.
        fuses_messages: blocks with experts, or whose attention sends messages, have fused kernels, too. hpnb
            does not compile them, so RMS norms, rotations and gated products are many kernels.
        scatters_hops: a pipeline's hop sends a t-th of the activation from each rank of tp, and tp gathers it
            where it arrives. Otherwise each rank sends what it has: all, or its tokens with sequence
            parallelism.
        gathers_context: over cp, keys and values are all-gathered before the attention instead of sent around
            a ring beside it.
        attention_share: of the matmul rate, what its fused attention reaches.
        stops_early: recomputation of a block ends with the last tensor that a backward reads, so that the
            MLP's last matmul is not repeated: `torch.utils.checkpoint` without reentrance, since PyTorch
            2.1, of blocks that are not compiled.
        reduces_every_microbatch: gradients of ZeRO 3 are reduce-scattered for each microbatch, and no rank
            keeps all of them.
        token_copies: of a token, how many are sent to the ranks of its experts. 0 is one for each expert;
            a dispatcher that sends to ranks, as DeepEP does, sends one for each rank that has some.
        fuses_permutations: sorting tokens by expert, and adding up what experts give, are one kernel each,
            and routing weights multiply inner values.
        dispatch_bytes: of a value that is sent to experts. Their results have 2.
        fp8_matmuls: those of a block's weights have 8-bit operands and twice the rate. What converts them is
            not counted.
        split_backward: what a backward takes, split into input and weight gradients, over one that is not.
        message_sms: share of a GPU's SMs that do nothing but send messages beside the computing of others.
        recomputes_latent: a backward recomputes norms and latent attention's up projections.
        bidirectional: dualpipe-v stands for DualPipe, where half of the microbatches enter at the last rank.
            So ranks i and p-1-i have the stages of both, and work in each for half of the microbatches.
            Memory is still that of DualPipe-V.
    """

    fused: bool = True
    overlap: bool = True
    overlap_weights: bool = False
    tp_overlap: bool = False
    gradient_bytes: int = 2
    loss_bytes: int = 20
    action_seconds: float = 1e-3
    shards_norms: bool = False
    fuses_messages: bool = False
    scatters_hops: bool = False
    gathers_context: bool = False
    attention_share: float = ATTENTION_SHARE
    stops_early: bool = False
    reduces_every_microbatch: bool = False
    token_copies: float = 0.0
    fuses_permutations: bool = False
    dispatch_bytes: float = 2.0
    fp8_matmuls: bool = False
    split_backward: float = SPLIT_BACKWARD
    message_sms: float = 0.0
    recomputes_latent: bool = False
    bidirectional: bool = False


HPNB = Software()


@dataclass(frozen=True)
class PlanTask:
    """What is trained, and on what.

    Attributes:
        batch: samples of a step, over all ranks.
        sequence: tokens of a sample.
        loss_chunk: tokens at a time of the loss; 0 is all.
        software: what it is trained with.
        imbalance: tokens of the fullest rank of ep, over the mean.
        value_bytes: of a weight, for its memory: 2 are 16-bit weights with float32 master weights, 4 float32
            weights without. Times are those of 2.
    """

    model: ModelShape
    cluster: Cluster
    batch: int
    sequence: int
    loss_chunk: int = 0
    software: Software = HPNB
    imbalance: float = 1.0
    value_bytes: int = 2

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def rate(self) -> float:
        """FLOP/s that 16-bit matmuls reach."""
        return self.cluster.share * self.cluster.peak * (1 - self.software.message_sms)

    @property
    def flops(self) -> float:
        """Matmul FLOPs of a step, nothing recomputed."""
        return self.model.training_flops(self.batch, self.sequence)

    def rank_tokens(self, cp: int) -> float:
        """Tokens of a sample on a rank of cp. Those of an image are padded until cp divides them."""
        return self.sequence / cp if self.model.causal else float(-(-self.sequence // cp))

    def rank_outputs(self, cp: int) -> float:
        """Tokens of a sample with outputs on a rank. All ranks of cp have the logits of an image."""
        return self.model.output_tokens(self.sequence) / (cp if self.model.causal else 1)

    def microbatch_size(self, layout: ParallelLayout) -> int:
        """Samples of a microbatch. Without a pipeline, microbatches are accumulated."""
        return layout.microbatch_size or max(1, self.batch // layout.dp // (layout.num_microbatches or 1))

    def microbatches(self, layout: ParallelLayout) -> int:
        return self.batch // layout.dp // self.microbatch_size(layout)


def refusal(task: PlanTask, layout: ParallelLayout) -> tuple[str, str] | None:
    """(reason to count, sentence with numbers) why the layout cannot be run; None if it can, memory aside."""
    model, d, p, t, v = task.model, layout.dp, layout.pp, layout.tp, layout.chunks
    b, stages = task.microbatch_size(layout), p * layout.chunks_per_rank
    if layout.world_size != task.cluster.gpus:
        return "other number of GPUs", f"{layout} is for {layout.world_size} GPUs, not {task.cluster.gpus}"
    if task.batch % (d * b):
        return (
            "batch does not divide",
            f"a batch of {task.batch} cannot be split over {d} pipelines into microbatches of {b}; "
            + _sizes_that_divide(task.batch, d, b),
        )
    if t > model.kv_heads and model.shards_attention:
        return (
            "more tp ranks than key-value heads",
            f"tp={t} is more than {model.kv_heads} key-value heads; use tp={model.kv_heads} or less",
        )
    if stages > model.blocks:
        return (
            "more pipeline stages than blocks",
            f"{stages} pipeline stages are more than {model.blocks} blocks; use {model.blocks} or fewer",
        )
    if model.blocks // stages < model.mtp_modules:
        return (
            "MTP modules beyond the last stage",
            f"{model.mtp_modules} modules of multi-token prediction need one stage, and the last of {stages} "
            f"pipeline stages has {model.blocks // stages} blocks; use {model.blocks // model.mtp_modules} "
            "stages or fewer",
        )
    if v > 1 and (p == 1 or model.blocks % (p * v) or task.microbatches(layout) % p):
        return (
            "chunks do not divide",
            f"{v} chunks need blocks ({model.blocks}) that divide by {p * v} and microbatches "
            f"({task.microbatches(layout)}) that divide by {p}",
        )
    if layout.zero_stage and d * layout.cp == 1:
        return "ZeRO without replicas", f"ZeRO {layout.zero_stage} shards over dp, and dp=1"
    if layout.schedule not in (*FILL, "interleaved"):
        return "schedule without a closed form", f"{layout.schedule} has no closed form here; use 1f1b"
    if layout.schedule.startswith("zb") or layout.schedule in V_SHAPED:
        if task.microbatches(layout) < stages:
            return (
                "too few microbatches for a split backward",
                f"{layout.schedule} fills {p} ranks from {stages} microbatches on, and there are "
                f"{task.microbatches(layout)}",
            )
        if layout.recomputation:
            return (
                "split backward with recomputation",
                f"no closed form of {layout.schedule} with recomputation; use 1f1b",
            )
    if layout.cp > 1 and (why := _context_refusal(task, layout)) is not None:
        return "cp that does not divide", why
    if layout.ep > 1 and (model.experts % layout.ep or not model.experts):
        return (
            "ep that does not divide",
            f"ep={layout.ep} does not divide {model.experts} experts"
            + (f"; use ep={gcd(layout.ep, model.experts)}" if model.experts else ""),
        )
    if layout.sequence_parallel and not model.allows_sequence_parallel:
        what = "a router" if model.experts else "latent attention"
        return f"sequence parallelism with {what}", f"{what} is not sharded along tokens; leave sp out"
    if layout.tp_mode != "1d" or (layout.recomputation == "attention" and task.software.fused):
        return "not predicted", f"{layout}: only tp_mode='1d' and full or no recomputation are predicted"
    return None


def _sizes_that_divide(batch: int, pipelines: int, microbatch_size: int) -> str:
    """What to use where a batch cannot be split."""
    samples, rest = divmod(batch, pipelines)
    if rest:
        count, multiple = batch // (pipelines * microbatch_size), pipelines * microbatch_size
        near = [n for n in (count * multiple, (count + 1) * multiple) if n]
        return f"use a batch of {' or '.join(map(str, near))}"
    sizes = [f"mb{n}" for n in range(1, samples + 1) if samples % n == 0]
    return f"use {', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else "use mb1"


def _context_refusal(task: PlanTask, layout: ParallelLayout) -> str | None:
    """Why the tokens of a sample cannot be sharded over cp."""
    model, c, ulysses = task.model, layout.cp, layout.context_parallel == "ulysses"
    shards = c if ulysses else 2 * c  # a rank has two chunks, one from each end
    if model.causal and task.sequence % shards:
        return f"{task.sequence} tokens do not divide into {shards} for cp={c}; use a multiple of {shards}"
    if task.sequence < c:
        return f"an image of {model.name} has {task.sequence} tokens, fewer than cp={c}"
    if ulysses and model.heads // layout.tp < c:
        return f"Ulysses gives each of {c} ranks a head of {model.heads // layout.tp}; use a ring"
    return None
