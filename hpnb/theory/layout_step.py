"""The step of a GPT-2 on any layout, predicted from one rank: six parts of its time, its bytes, its memory.

A layout dp x pp x cp x tp = d x p x c x t sends a batch of B samples through d pipelines, in m microbatches
of r = B/(d m) samples. A rank has s/c of the s tokens of each. On one rank alone a block takes a + k r
seconds for a microbatch, forward and backward, and so do the two ends (embedding, head and loss) together,
with other constants. a is what small kernels cost whatever their size; k r is work, which cp and tp
shard c t ways. For L blocks the mean rank then takes

    computing     m (L (a + k r/(c t)) + ends) / p
    exposed tp    (4 L + 2) m / p all-reduces of r s/c h values, one after the other
    exposed cp    L m / p attentions' messages (`context`), as if nothing overlapped: at most so much
    bubble        sum of stages + (m-1) largest stage + 2 (p-1) hops, less the three above (`pipeline_parts`)
    exposed dp    gradient buckets over dp x cp, behind the backward of the last microbatch, on the stage
                  that ends last; and the sum of the tied table's gradient over the first and last stage
    optimizer     of the parameters that the rank updates

With v chunks a rank the pipeline fills v times as fast. Full recomputation adds a forward, a third of a
block, and two all-reduces. Sequence parallelism sends as much in a reduce-scatter and an all-gather as an
all-reduce does.

Memory is that of the fullest rank, at one of two moments (`_stage_memory`): while the activations of the most
microbatches are alive (1F1B: p - r of them on rank r) and the last stage computes its loss, or at the end of
the backward, when all gradients are there. Of a recomputed block only its input is kept, and all of it while
its backward runs.

The model leaves four things out, and they show as a ratio: norms and dropout, which every tp rank computes
in full; the kernels of a ring, which computes an attention for each block of keys; what communication takes
from the computing beside it; and stages that wait for each other because of the machine. Narayanan et al.
2021 (arXiv 2104.04473), sections 2 and 3, weigh the axes against each other this way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpnb.mesh import ParallelLayout
from hpnb.theory import context
from hpnb.theory.communication import bytes_sent, seconds
from hpnb.theory.links import Link
from hpnb.theory.model_states import model_states
from hpnb.theory.overlap import exposed_seconds, zero3_exposed_seconds
from hpnb.theory.pipeline import FILL, in_flight, pipeline_parts
from hpnb.theory.tensor_memory import activation_bytes
from hpnb.theory.transformer import Block

STEP_PARTS = ("computing", "bubble", "exposed tp", "exposed cp", "exposed dp", "optimizer")
BUCKET_BYTES = 25 * 2**20
_END_REDUCES = 2  # all-reduces of tp at the ends: of embedded tokens forward, of the head's input gradient


@dataclass(frozen=True)
class LayerCost:
    """Seconds of `samples` samples on one rank: fixed + per_sample x samples."""

    fixed: float
    per_sample: float

    def __call__(self, samples: float, share: float = 1.0) -> float:
        return self.fixed + self.per_sample * samples * share


@dataclass(frozen=True)
class LayoutTask:
    """What is trained, and on which machine.

    Attributes:
        block: shape of a block for one sample; its bytes_per_value is that of weights and values alike.
        layers, vocab_size: of the model; embedding and head share one table.
        batch: samples of a step.
        block_cost, ends_cost: seconds of a block, and of embedding, head and loss, forward and backward.
        optimizer_cost: seconds of the optimizer's step for each parameter.
        inside, between: the link of a rank within its node, and to another node.
        ranks_per_node: ranks of a node; tp neighbours are closest, dp neighbours farthest apart.
        buckets: the fewest buckets of a gradient.
        call_cost: seconds of a rank's own time that a collective of tp takes, besides its travel.
    """

    block: Block
    layers: int
    vocab_size: int
    batch: int
    block_cost: LayerCost
    ends_cost: LayerCost
    optimizer_cost: float
    inside: Link
    between: Link | None = None
    ranks_per_node: int = 1 << 30
    buckets: int = 1
    call_cost: float = 0.0

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: both embeddings and the last norm."""
        return (self.vocab_size + self.block.sequence + 2) * self.block.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block.parameters + self.root_parameters

    @property
    def flops(self) -> float:
        """Matmul FLOPs of a step."""
        head = 6 * self.tokens * self.block.hidden * self.vocab_size
        return self.layers * replace(self.block, batch=self.batch).training_flops + head

    @property
    def tokens(self) -> int:
        return self.batch * self.block.sequence

    def refusal(self, layout: ParallelLayout) -> str | None:
        """Why the layout cannot be run or predicted; None if it can."""
        m, zero = self.microbatches(layout), layout.zero_stage
        v = layout.chunks_per_rank
        if layout.schedule != "interleaved" and (layout.schedule not in FILL or v > 1):
            return f"{layout.schedule} with {v} chunks has no closed form here"
        plain = replace(layout, sequence_parallel=False, recomputation=False, cp=1)
        if (why := unmodelled(plain if layout.recomputation != "attention" else layout)) is not None:
            return why
        if v > 1 and m % layout.pp:
            return f"interleaved takes a multiple of {layout.pp} microbatches, not {m}"
        if self.batch % (layout.dp * m):
            return f"a batch of {self.batch} cannot be split into {layout.dp} pipelines x {m} microbatches"
        if layout.pp * v > self.layers or layout.tp > self.block.heads:
            return f"{self.layers} blocks of {self.block.heads} heads are too few for {layout}"
        if (why := self._refused_context(layout)) is not None:
            return why
        if zero and layout.dp * layout.cp == 1:
            return f"ZeRO {zero} shards over dp, and dp=1"
        return "ZeRO 3 gathers weights for every microbatch" if zero == 3 and layout.pp > 1 else None

    def _refused_context(self, layout: ParallelLayout) -> str | None:
        """The same of context parallelism alone."""
        c, s, heads = layout.cp, self.block.sequence, self.block.heads // layout.tp
        if c > 1 and layout.context_parallel == "all-gather":
            return "context_parallel='all-gather' is not part of this prediction"
        if layout.context_parallel == "ulysses" and heads < c:
            return f"Ulysses gives each of {c} ranks a head, and a rank of tp has {heads}"
        pieces = c if layout.context_parallel == "ulysses" or c == 1 else 2 * c  # a ring's zigzag
        return f"{s} tokens cannot be split into {pieces} equal pieces" if s % pieces else None

    def microbatches(self, layout: ParallelLayout) -> int:
        """Microbatches of each pipeline."""
        return layout.count_microbatches(self.batch // layout.dp)

    def link(self, layout: ParallelLayout, axis: str) -> Link:
        """The link of the axis's slowest hop, with dp outermost and tp innermost."""
        stage = layout.cp * layout.tp
        span = {"tp": layout.tp, "cp": stage, "pp": layout.pp * stage, "dp": layout.world_size}[axis]
        return self.inside if self.between is None or span <= self.ranks_per_node else self.between


def unmodelled(layout: ParallelLayout) -> str | None:
    """A sentence if the layout uses what no prediction of a step here knows."""
    plain = ParallelLayout()
    for name in ("cp", "ep", "order", "tp_mode", "sequence_parallel", "recomputation"):
        if getattr(layout, name) != getattr(plain, name):
            return f"{name}={getattr(layout, name)!r} is not part of this prediction"
    return None


def stage_blocks(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as hpnb's uniform partition has them: the remainder goes to the middle."""
    least, more = divmod(layers, stages)
    start = (stages - more) // 2
    return tuple(least + (start <= stage < start + more) for stage in range(stages))


def _rank_blocks(task: LayoutTask, layout: ParallelLayout) -> list[int]:
    """Blocks of each rank of a pipeline, all its chunks together."""
    blocks = stage_blocks(task.layers, layout.pp * layout.chunks_per_rank)
    return [sum(blocks[rank :: layout.pp]) for rank in range(layout.pp)]


def layout_parts(task: LayoutTask, layout: ParallelLayout) -> dict[str, float]:
    """{part: seconds} of a step, mean over the ranks; their sum is the step.

    Raises:
        ValueError: the layout cannot be run.
    """
    if (why := task.refusal(layout)) is not None:
        raise ValueError(f"{layout}: {why}")
    p, t, m, v = layout.pp, layout.tp, task.microbatches(layout), layout.chunks_per_rank
    samples, value, shards = task.batch / layout.dp / m, task.block.bytes_per_value, layout.cp * t
    again = bool(layout.recomputation)  # the forward of each block, in its backward
    message = samples * task.block.sequence / layout.cp * task.block.hidden * value
    reduce = seconds("all_reduce", message, t, task.link(layout, "tp")) if t > 1 else 0.0
    hop = seconds("send", message, 2, task.link(layout, "pp")) if p > 1 else 0.0
    exchange = _exchange_seconds(task, layout)
    block = task.block_cost(samples, 1 / shards) * (4 / 3 if again else 1)
    sums, call = 6 if again else 4, task.call_cost * (t > 1) * (1 + layout.sequence_parallel)
    stages = [
        {"computing": n * (block + sums * call), "exposed tp": n * sums * reduce, "exposed cp": n * exchange}
        for n in _rank_blocks(task, layout)
    ]
    for stage in (stages[0], stages[-1]):
        stage["exposed tp"] += reduce
        stage["computing"] += call
    stages[-1]["computing"] += task.ends_cost(samples, 1 / shards)
    schedule = "1f1b" if layout.schedule == "interleaved" else layout.schedule
    parts = pipeline_parts(stages, m, schedule, v, hop)
    stage_seconds = sum(sum(stage.values()) for stage in stages) / p
    parameters = [stage_parameters for _, stage_parameters in _stages(task, layout)]
    parts["exposed dp"] = _exposed_dp(task, layout, value * parameters[0], stage_seconds)
    if p > 1:
        table = value * task.vocab_size * task.block.hidden / t
        parts["exposed dp"] += seconds("all_reduce", table, 2, task.link(layout, "pp"))
    updated = sum(parameters) / p / (layout.dp * layout.cp if layout.zero_stage else 1)
    parts["optimizer"] = task.optimizer_cost * updated
    return {part: parts[part] for part in STEP_PARTS}


def _attention(task: LayoutTask, layout: ParallelLayout) -> context.Attention:
    """That of a block for one microbatch, on the rank of tp with most heads."""
    block, heads = task.block, -(-task.block.heads // layout.tp)
    samples = task.batch // layout.dp // task.microbatches(layout)
    size = block.hidden / block.heads
    return context.Attention(block.sequence, heads, heads, size, samples, block.bytes_per_value)


def _exchange_seconds(task: LayoutTask, layout: ParallelLayout) -> float:
    """Seconds of cp's messages for one microbatch in one block, forward and backward, one after the other."""
    if layout.cp == 1:
        return 0.0
    attention, link = _attention(task, layout), task.link(layout, "cp")
    if layout.context_parallel == "ulysses":
        took = context.ulysses_exposed(attention, layout.cp, link)
    else:
        took = context.ring_exposed(attention, layout.cp, link, context.BothWays(0.0, 0.0))
    return took.total + (took.forward if layout.recomputation else 0.0)


def _exchange_bytes(task: LayoutTask, layout: ParallelLayout) -> float:
    """Bytes that leave a rank for them."""
    if layout.cp == 1:
        return 0.0
    count = context.ulysses_bytes if layout.context_parallel == "ulysses" else context.ring_bytes
    sent = count(_attention(task, layout), layout.cp)
    return sent.total + (sent.forward if layout.recomputation else 0.0)


def _stages(task: LayoutTask, layout: ParallelLayout) -> list[tuple[int, float]]:
    """(blocks, parameters) of each rank of a pipeline; the first and the last one have the tied table."""
    table, stages = task.vocab_size * task.block.hidden / layout.tp, []
    for stage, blocks in enumerate(_rank_blocks(task, layout)):
        ends = table if stage in (0, layout.pp - 1) else 0.0
        positions = task.block.sequence * task.block.hidden if stage == 0 else 0
        stages.append((blocks, blocks * task.block.parameters / layout.tp + ends + positions))
    return stages


def _exposed_dp(task: LayoutTask, layout: ParallelLayout, gradient: float, stage_seconds: float) -> float:
    """Exposed seconds of gradients, and of weights under ZeRO.

    Args:
        gradient: bytes on a rank of the first stage, whose backward ends last.
        stage_seconds: of one microbatch on one stage, forward and backward.
    """
    d = layout.dp * layout.cp  # ranks of cp have the same weights and other tokens
    if d == 1:
        return 0.0
    link, backward, n = task.link(layout, "dp"), 2 / 3 * stage_seconds, task.layers
    buckets = max(task.buckets, round(gradient / BUCKET_BYTES))
    if layout.zero_stage == 0:
        return exposed_seconds(backward, gradient, buckets, d, link)
    if layout.zero_stage < 3:
        scattered = exposed_seconds(backward, gradient, buckets, d, link, "reduce_scatter")
        return scattered + seconds("all_gather", gradient, d, link)
    gather, scatter = (seconds(op, gradient / (n + 1), d, link) for op in ("all_gather", "reduce_scatter"))
    gathers = zero3_exposed_seconds(gather, 0.0, stage_seconds / 3 / n, backward / n, n)
    return gathers + (n + 1) * scatter  # hpnb's pipeline step reduces units when the backward has ended


def layout_bytes(task: LayoutTask, layout: ParallelLayout) -> float:
    """Bytes that leave a rank in a step, mean over the ranks: activations, gradients, weights, the tied
    table.

    Small messages are left out: losses, counts, and of sharded logits all but three numbers a token.
    """
    p, t, d, value = layout.pp, layout.tp, layout.dp * layout.cp, task.block.bytes_per_value
    activation = task.tokens / d * task.block.hidden * value  # of all microbatches
    # The last token of a sample predicts nothing. Under cp labels are shifted, and its logits are there.
    predicting = (task.tokens - (task.batch if layout.cp == 1 else 0)) / d
    sums = 6 if layout.recomputation else 4
    tp = (sums * task.layers + _END_REDUCES) / p * bytes_sent("all_reduce", activation, t)
    tp += 3 / p * bytes_sent("all_reduce", 4.0 * predicting, t)
    pp = 2 * (p * layout.chunks_per_rank - 1) / p * activation
    cp = task.microbatches(layout) * task.layers / p * _exchange_bytes(task, layout)
    # In a pipeline both ends hold the tied table. They sum its gradient, and each reduces it over dp.
    table = value * task.vocab_size * task.block.hidden / t
    tied = 2 / p * bytes_sent("all_reduce", table, 2) if p > 1 else 0.0
    gradient = value * task.parameters / (p * t) + (table / p if p > 1 else 0.0)
    passes = 3 if layout.zero_stage == 3 else 2
    root = value * task.root_parameters if layout.zero_stage == 3 else 0.0  # is gathered once, not twice
    return tp + cp + pp + tied + bytes_sent("all_gather", passes * gradient - root, d)


def layout_memory(task: LayoutTask, layout: ParallelLayout) -> float:
    """Bytes at the peak of the fullest rank, with AdamW."""
    return max(_stage_memory(task, layout, stage) for stage in range(layout.pp))


def _stage_memory(task: LayoutTask, layout: ParallelLayout, stage: int) -> float:
    """Bytes at the peak of a rank of one stage: the larger of two moments.

        forward     weights, optimizer state, buckets, activations in flight, on the last stage the loss
        backward    weights, optimizer state, buckets, and all gradients, with the activations of one block

    Gradients exist from the first backward on, so a step that has not begun one holds none at its first
    moment. The loss holds the logits, as they are and in float32, and then log-softmax; without tp also a
    copy that is shifted by one token. Under ZeRO 3 hpnb reduces gradients at the end of the backward.
    """
    p, t, d, zero = layout.pp, layout.tp, layout.dp, layout.zero_stage
    m, width, v = task.microbatches(layout), task.block.bytes_per_value, layout.chunks_per_rank
    last = stage == p - 1
    microbatch = replace(
        task.block, batch=max(1, round(task.batch / d / m)), sequence=task.block.sequence // layout.cp
    )
    d *= layout.cp  # over which states are sharded
    tokens = microbatch.batch * microbatch.sequence
    one_block = activation_bytes(
        microbatch, "1d", t, sequence_parallel=layout.sequence_parallel, mlp_copies=5
    )
    inputs, logits = width * tokens * microbatch.hidden, task.vocab_size * tokens / t
    blocks, parameters = _stages(task, layout)[stage]
    kept, running = (inputs, one_block) if layout.recomputation else (one_block, 0.0)
    flying: float = in_flight(layout.schedule, p, m, stage) if p > 1 and v == 1 else 1
    if v > 1:  # warm-up of interleaved 1F1B, in chunks
        flying = min(v * m, 2 * (p - stage - 1) + (v - 1) * p + 1) / v
    loss = logits * ((12 if t == 1 else 8) + (width if width < 4 else 0)) + 2 * inputs if last else 0.0
    if last and layout.schedule == "zb-h1":  # weight gradients that wait keep the gradients of logits
        loss += (flying - 1) * width * logits

    states = model_states(
        parameters, d, zero,
        weight_bytes=width, gradient_bytes=0, optimizer_bytes=8 if width >= 4 else 12,
    ).total  # fmt: skip
    full = width * parameters
    buckets = full / (d if zero == 2 else 1) if d > 1 and zero < 3 else 0.0
    # Buckets are sent during the last backward, and the gradients that they copy are freed one by one.
    gradients = full if d == 1 or m > 1 or zero == 3 else width * task.vocab_size * microbatch.hidden / t
    gathered = width * (task.root_parameters + 2 * task.block.parameters) if zero == 3 else 0.0
    forward = flying * (blocks * kept + inputs) + running + loss + (gradients if m > flying else 0.0)
    return states + buckets + gathered + max(forward, gradients + one_block)
