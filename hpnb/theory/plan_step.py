"""The step of any `ModelShape` on any layout, from datasheets or a measured machine: time in parts, and MFU.

A layout dp x pp x cp x tp = d x p x c x t sends a batch through d pipelines in m microbatches of b samples,
of whose tokens a rank has a c-th. Parts of the mean rank:

    matmuls      blocks and outputs / (p c t), over share x peak; scores at `attention_share` of that rate;
                 experts' on the fullest rank of ep, which has `imbalance` times the mean
    memory       bytes of norms, residuals and activation functions, over memory bandwidth
    launches     what kernels take longer than their work, because the CPU launches no faster, and what a
                 pipeline needs between two actions
    tp           4 all-reduces a block, or pairs of reduce-scatter and all-gather; 6 with recomputation
    cp           what a ring's sends exceed the attention beside them, or all-to-alls of Ulysses (`context`)
    ep           4 all-to-alls a block, 6 with recomputation (`experts`); with dualpipe-v what of them the
                 computing of another microbatch leaves exposed
    bubble       of the schedule (`pipeline_parts`), and waits for the slowest stage
    exposed pp   hops, where nothing overlaps with them, and the all-reduce of a table that both ends have
    exposed dp   gradients behind the last backward, and weights under ZeRO, over dp x cp; those of experts
                 over the ranks that have the same. Overlapped messages of dp and ep add half of their time,
                 because they take SMs and memory bandwidth from the computing beside them
    optimizer    28 bytes a parameter, over memory bandwidth

What a program overlaps and how it keeps gradients is a `Software`, by default this library. Its constants
were fitted to this library's benchmarks on H200s until 2026-11-24, so that ratios of these rows are no
evidence for them (`hpnb plan --check` has ratios, `--published` those of other programs):

    HOPPER_SHARE 0.585         GPT-2 XL on one H200
    LINK_SHARE, LATENCY        all-reduces of four H200s, with a ring's six messages (`datasheets`)
    action_seconds 1 ms        the pipelines; of which models, nobody wrote down
    SPLIT_BACKWARD 1.3         zb-v beside 1f1b on two H200s, both rows of the check
    ATTENTION_SHARE, OVERLAP_COST, LAUNCH_SECONDS, MEMORY_SHARE     to which rows, nobody wrote down

Narayanan et al. 2021 (arXiv 2104.04473) for the parts, Dao 2023 (arXiv 2307.08691) for fused attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from hpnb.mesh import ParallelLayout
from hpnb.theory.experts import exposed_messages, paired_share
from hpnb.theory.layout_step import BUCKET_BYTES, stage_blocks
from hpnb.theory.links import Link
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.overlap import exposed_buckets, zero3_exposed_seconds
from hpnb.theory.pipeline import V_SHAPED, pipeline_parts
from hpnb.theory.plan_messages import context_seconds, links, seconds
from hpnb.theory.plan_task import PlanTask, Software, refusal

PLAN_PARTS = (
    "matmuls",
    "memory",
    "launches",
    "tp",
    "cp",
    "ep",
    "bubble",
    "exposed pp",
    "exposed dp",
    "optimizer",
)
LAUNCH_SECONDS = 0.2e-3  # a block's forward takes no less, and its backward no less than twice that
OVERLAP_COST = 0.5  # of hidden communication prolongs the computing beside it
_ROUTED = (14, 20)  # bytes of a routed value, forward and backward: gather, weight and add up, and back
_PERMUTED = 4  # where permutations are fused: it is written once and read once, and so is each copy
_NORM = (4, 6)  # bytes of a value of a norm, forward and backward: read and written
_EAGER_NORM = (32, 72)  # more bytes of a value of an RMS norm, forward and backward, counted by kernel
_EAGER_ROTATION, _EAGER_GATE = (24, 24), (4, 6)  # of a value of q or k, and of an inner value
_ADAM = 28  # bytes a parameter: float32 weight and moments in and out, 16-bit gradient in and weight out


def rank_blocks(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """Blocks of each rank of a pipeline, all its chunks together."""
    p, blocks = layout.pp, stage_blocks(layers, layout.pp * layout.chunks_per_rank)
    if layout.schedule in V_SHAPED:  # down the ranks and up again
        return tuple(blocks[rank] + blocks[-1 - rank] for rank in range(p))
    return tuple(sum(blocks[rank::p]) for rank in range(p))


def rank_dense_blocks(model: ModelShape, layout: ParallelLayout) -> tuple[int, ...]:
    """Of `rank_blocks`, those that have no experts where others do: the model's first."""
    p = layout.pp
    if not model.dense_layers:
        return (0,) * p
    ends = list(accumulate(stage_blocks(model.blocks, p * layout.chunks_per_rank), initial=0))
    dense = [model.dense_blocks(start, stop) for start, stop in pairwise(ends)]
    if layout.schedule in V_SHAPED:
        return tuple(dense[rank] + dense[-1 - rank] for rank in range(p))
    return tuple(sum(dense[rank::p]) for rank in range(p))


def last_rank(layout: ParallelLayout) -> int:
    """The pipeline rank with the outputs."""
    return 0 if layout.schedule in V_SHAPED else layout.pp - 1


def rank_parameters(task: PlanTask, layout: ParallelLayout) -> tuple[float, float]:
    """Parameters of the mean rank: what dp x cp replicates, and its experts."""
    model, inner = task.model, layout.pp * layout.tp
    experts = model.model_expert_parameters
    dense = (model.parameters - experts) / inner
    if layout.tp > 1:  # matrices of which each tensor-parallel rank has a copy
        copied = model.over_blocks("replicated_weights") + model.mtp_weights
        dense += copied * (1 - 1 / layout.tp) / layout.pp
    return dense, experts / inner / layout.ep


def routed_bytes(software: Software, chosen: int) -> tuple[float, float]:
    """Bytes of a routed value that sorting and adding up move, forward and backward.

    Fused, each of the copies that arrive is read once for all its experts.
    """
    if not software.fuses_permutations:
        return _ROUTED
    moved = _PERMUTED * (1 + (software.token_copies or chosen) / chosen)
    return moved, moved


def is_eager(task: PlanTask, layout: ParallelLayout) -> bool:
    """Whether each small operation of a block is a separate kernel. A layer norm is one kernel anyway.

    hpnb compiles no block that sends messages, or whose backward a schedule splits.
    """
    soft, model = task.software, task.model
    sends = layout.cp > 1 or layout.tp > 1 or model.experts > 0 or model.beside_experts
    splits = layout.pp > 1 and layout.schedule.startswith(("zb", "dualpipe"))
    return soft.fused and not soft.fuses_messages and (sends or splits) and not model.norm_bias


def score_work(task: PlanTask, b: int, t: int) -> tuple[float, tuple[float, float]]:
    """FLOPs of a block's attention scores, forward, and bytes of them that are written, forward and backward.

    Fused, FLOPs are divided by what of the matmul rate the kernel reaches, and no bytes are written.
    """
    model, s = task.model, task.sequence
    heads = model.heads * model.head_share(t)  # of the rank with most
    scores = 4.0 * b * s * s * model.score_size * heads
    if task.software.fused:
        return scores * (0.5 if model.causal else 1.0) / task.software.attention_share, (0.0, 0.0)
    values = b * heads * s * s
    return scores, (13.0 * values, 19.0 * values)  # with dropout


@lru_cache(maxsize=4096)
def block_seconds(
    task: PlanTask, b: int, t: int, sequence_parallel: bool, cp: int = 1, ep: int = 1, eager: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """{part: seconds} of one block's forward and backward for a microbatch of b samples, messages aside.

    Args:
        eager: see `is_eager`.
    """
    model, cluster = task.model, task.cluster
    tokens, rate = b * task.rank_tokens(cp), task.rate
    scores, dropped = score_work(task, b, t)

    def matmul_seconds(rows: float, weights: float, read: float) -> float:
        return max(2 * rows * weights / rate, 2 * read / cluster.memory_bandwidth)  # no less than its weights

    routed = model.chosen * tokens * (task.imbalance if ep > 1 else 1.0) if model.experts else 0.0
    dense = model.rank_weights(t)
    matmul = matmul_seconds(tokens, dense, dense)
    matmul += matmul_seconds(routed, model.mlp_weights / t, model.expert_parameters / ep / t)
    matmul /= 2 if task.software.fp8_matmuls else 1
    again = 2.5 if task.software.fused else 2.0  # a fused backward computes the scores once more
    between = tokens * model.hidden / (t if sequence_parallel else 1)
    inner = (routed * model.mlp + tokens * model.shared_mlp if model.experts else tokens * model.mlp) / t
    residual, mlp = ((16, 20) if task.software.fused else (22, 34)), ((6, 10) if model.gated else (4, 6))
    sorting = routed_bytes(task.software, model.chosen)
    moved = [between * residual[i] + inner * mlp[i] + routed * model.hidden * sorting[i] + dropped[i] / cp
             for i in (0, 1)]  # fmt: skip
    if eager:
        rotated = tokens * model.rotated_values * model.head_share(t)
        latent = tokens * (model.q_lora_rank + model.kv_lora_rank)
        for i in (0, 1):
            moved[i] += (model.norms * between + latent) * _EAGER_NORM[i] + rotated * _EAGER_ROTATION[i]
            moved[i] += model.qk_norm * rotated * _EAGER_NORM[i]
            moved[i] += inner * _EAGER_GATE[i]
    forward, backward = (
        {"matmuls": n * matmul + k * scores / cp / rate, "memory": nbytes / cluster.memory_bandwidth}
        for n, k, nbytes in ((1, 1.0, moved[0]), (2, again, moved[1]))
    )
    for times, least in ((forward, LAUNCH_SECONDS), (backward, 2 * LAUNCH_SECONDS)):
        times["launches"] = max(0.0, least - sum(times.values()))
    return forward, backward


def _step_of_block(task: PlanTask, layout: ParallelLayout) -> dict[str, float]:
    """{part: seconds} of one microbatch in one block, forward and backward, messages included."""
    model, b, t, c = task.model, task.microbatch_size(layout), layout.tp, layout.cp
    link, forwards = links(task.cluster, layout), 2 if layout.recomputation == "full" else 1
    forward, backward = block_seconds(
        task, b, t, layout.sequence_parallel, c, layout.ep, is_eager(task, layout)
    )
    split = task.software.split_backward if layout.schedule.startswith("zb") else 1.0
    block = {part: forwards * forward[part] + split * backward[part] for part in forward}
    if layout.recomputation == "attention":  # the scores alone
        scores, written = score_work(task, b, t)
        block["matmuls"] += scores / c / task.rate
        block["memory"] += written[0] / c / task.cluster.memory_bandwidth
    if layout.recomputation == "full" and task.software.stops_early and not model.experts:
        last = model.mlp_weights / (2 + model.gated) / t
        block["matmuls"] -= 2 * b * task.rank_tokens(c) * last / task.rate
    if task.software.recomputes_latent:
        again = _recomputed_latent(task, b, t, c)
        block = {part: seconds + again.get(part, 0.0) for part, seconds in block.items()}
    activation = 2.0 * b * task.rank_tokens(c) * model.hidden
    block |= {"cp": context_seconds(task, layout, link["cp"], forwards) if c > 1 else 0.0, "ep": 0.0}
    if model.experts:
        soft = task.software
        routed = (soft.token_copies or model.chosen) * task.imbalance * activation
        routed *= (soft.dispatch_bytes + 2) / 4  # of 2 bytes, as the results are
        message = seconds("all_to_all", routed, layout.ep, link["ep"])
        block["ep"] = 2 * (forwards + 1) * message
        if layout.schedule == "dualpipe-v":
            computing = sum(forward.values()), sum(block.values()) - sum(forward.values())
            paired = paired_share(layout.pp, task.microbatches(layout))
            exposed = exposed_messages(*computing, message, model.blocks / layout.pp / 2, paired)
            beside = 0.0 if soft.message_sms else _overlap_cost(task, link["ep"], block["ep"] - exposed)
            block["ep"] = exposed + beside
    forward_values, backward_values = model.reduced_values
    activations = (forwards * forward_values + backward_values) / model.hidden
    block["tp"] = activations * _reduce_seconds(task, layout) / (t if task.software.tp_overlap else 1)
    if task.software.gradient_bytes == 4:  # a matmul adds to a float32 gradient
        parameters = model.block_parameters - model.expert_parameters * (1 - 1 / layout.ep)
        block["memory"] += 8 * parameters / t / task.cluster.memory_bandwidth
    return block


def _recomputed_latent(task: PlanTask, b: int, t: int, cp: int) -> dict[str, float]:
    """{part: seconds} of a block's norms and up projections of latent attention, forward."""
    model, tokens = task.model, b * task.rank_tokens(cp)
    latent = model.q_lora_rank + model.kv_lora_rank
    flops = 2 * tokens * model.up_weights * model.head_share(t) / (2 if task.software.fp8_matmuls else 1)
    normed = 4 * tokens * (model.norms * model.hidden + latent)  # read and written
    return {"matmuls": flops / task.rate, "memory": normed / task.cluster.memory_bandwidth}


def _reduce_seconds(task: PlanTask, layout: ParallelLayout) -> float:
    """Seconds of one all-reduce of a microbatch's activation over tp."""
    if layout.tp == 1:
        return 0.0
    activation = 2.0 * task.microbatch_size(layout) * task.rank_tokens(layout.cp) * task.model.hidden
    return seconds("all_reduce", activation, layout.tp, links(task.cluster, layout)["tp"])


def stage_seconds(task: PlanTask, layout: ParallelLayout) -> list[dict[str, float]]:
    """{part: seconds} of one microbatch on every stage, forward and backward."""
    model, b, t, p, c = task.model, task.microbatch_size(layout), layout.tp, layout.pp, layout.cp
    both_ways = task.software.bidirectional and layout.schedule == "dualpipe-v"
    placed = replace(layout, schedule="1f1b") if both_ways else layout
    block, blocks = _step_of_block(task, layout), rank_blocks(model.blocks, placed)
    stages = [{part: n * value for part, value in block.items()} for n in blocks]
    if model.dense_layers:  # the first blocks have one MLP instead of experts
        dense = _step_of_block(replace(task, model=model.dense_block), layout)
        for times, n in zip(stages, rank_dense_blocks(model, placed), strict=True):
            for part in times:
                times[part] += n * (dense[part] - block[part])
    if p > 1:
        for times in stages:
            actions = 3 if layout.schedule.startswith("zb") else 2  # a split backward is two
            times["launches"] += actions * layout.chunks_per_rank * task.software.action_seconds
    outputs, last = b * task.rank_outputs(c) * model.outputs / t, last_rank(placed)
    outputs *= 1 + model.mtp_modules
    stages[last]["matmuls"] += 6 * outputs * model.hidden / task.rate
    stages[last]["memory"] += task.software.loss_bytes * outputs / task.cluster.memory_bandwidth
    for rank in (0, last):
        stages[rank]["tp"] += _reduce_seconds(task, layout)
    if model.mtp_modules:
        for part, more in _mtp_seconds(task, layout).items():
            stages[last][part] += more
    if both_ways:
        ends = zip(stages, reversed(stages), strict=True)
        return [{part: (a[part] + b[part]) / 2 for part in a} for a, b in ends]
    return stages


def _mtp_seconds(task: PlanTask, layout: ParallelLayout) -> dict[str, float]:
    """{part: seconds} of one microbatch in all MTP modules, forward and backward, without blocks and outputs:
    projections in 16 bits, norms, and over tp the embedding and the gradient of what outputs read."""
    model, tokens = task.model, task.microbatch_size(layout) * task.rank_tokens(layout.cp)
    norm = sum(_NORM) + is_eager(task, layout) * sum(_EAGER_NORM)
    return {
        "matmuls": 6 * tokens * model.mtp_weights / task.rate,
        "memory": 3 * model.mtp_modules * tokens * model.hidden * norm / task.cluster.memory_bandwidth,
        "tp": 2 * model.mtp_modules * _reduce_seconds(task, layout),
    }


def plan_parts(task: PlanTask, layout: ParallelLayout) -> dict[str, float]:
    """{part: seconds} of a step, mean over the ranks; their sum is the step."""
    if (why := refusal(task, layout)) is not None:
        raise ValueError(f"{layout}: {why[1]}")
    model, p, t, v, m = task.model, layout.pp, layout.tp, layout.chunks_per_rank, task.microbatches(layout)
    link, stages = links(task.cluster, layout), stage_seconds(task, layout)
    hop = _hop_seconds(task, layout) if p > 1 else 0.0
    schedule = "1f1b" if layout.schedule == "interleaved" else layout.schedule
    parts = pipeline_parts(stages, m, schedule, layout.chunks, hop if task.software.overlap else 0.0)
    parts["exposed pp"] = 0.0 if task.software.overlap else 2 * m * v * hop
    if last_rank(layout) and model.shares_table:  # both ends hold the table, and sum its gradient
        table = 2.0 * model.outputs * model.hidden / t
        parts["exposed pp"] += seconds("all_reduce", table, 2, link["pp"])
    stage = sum(sum(times.values()) for times in stages) / p
    parts["exposed dp"] = _exposed_dp(task, layout, stage)
    dense, experts = rank_parameters(task, layout)
    replicas = layout.dp * layout.cp if layout.zero_stage else 1
    updated = dense / replicas + experts / max(1, replicas // layout.ep)
    parts["optimizer"] = _ADAM * updated / task.cluster.memory_bandwidth
    return {part: parts[part] for part in PLAN_PARTS}


def _hop_seconds(task: PlanTask, layout: ParallelLayout) -> float:
    """Seconds in which a microbatch's activation passes from one stage to the next."""
    t, link = layout.tp, links(task.cluster, layout)
    activation = 2.0 * task.microbatch_size(layout) * task.rank_tokens(layout.cp) * task.model.hidden
    if not task.software.scatters_hops:
        return seconds("send", activation / (t if layout.sequence_parallel else 1), 2, link["pp"])
    return seconds("send", activation / t, 2, link["pp"]) + seconds("all_gather", activation, t, link["tp"])


def _exposed_dp(task: PlanTask, layout: ParallelLayout, stage: float) -> float:
    """Seconds that gradients, and weights under ZeRO, add to a step.

    Args:
        stage: seconds of one microbatch on one stage, forward and backward.
    """
    m, soft, replicas = task.microbatches(layout), task.software, layout.dp * layout.cp
    (dense, experts), link = rank_parameters(task, layout), links(task.cluster, layout)
    if replicas == 1:
        return 0.0

    def over(op: str, nbytes: float, pieces: int = 1) -> float:
        """Seconds of a collective on so many bytes of each parameter, or on one of equal pieces of them."""
        shared = seconds(op, nbytes * dense / pieces, replicas, link["dp"])
        if not experts:
            return shared
        return shared + seconds(op, nbytes * experts / pieces, replicas // layout.ep, link["edp"])

    if not soft.overlap:
        return over("all_reduce", soft.gradient_bytes)
    # Interleaved, a chunk's gradients are complete when the last pp microbatches have left it.
    last = min(layout.pp, m) * (1 - 1 / layout.chunks) if layout.chunks > 1 else 1.0
    backward = 2 / 3 * stage * last
    buckets = max(1, round(soft.gradient_bytes * (dense + experts) / BUCKET_BYTES))
    blocks = max(1, task.model.blocks // layout.pp)
    if layout.zero_stage == 3:  # every microbatch gathers the weights twice, and the last sends gradients
        gather = over("all_gather", 2, blocks)
        scatter = over("reduce_scatter", soft.gradient_bytes, blocks)
        times = stage / 3 / blocks, 2 / 3 * stage / blocks, blocks - 1
        exposed = zero3_exposed_seconds(gather, scatter, *times)
        earlier = scatter if soft.reduces_every_microbatch else 0.0
        exposed += (m - 1) * zero3_exposed_seconds(gather, earlier, *times)
        total = blocks * (2 * m * gather + scatter + (m - 1) * earlier)
    elif layout.zero_stage:
        scatter, gather = over("reduce_scatter", soft.gradient_bytes), over("all_gather", 2)
        exposed = exposed_buckets(backward, over("reduce_scatter", soft.gradient_bytes, buckets), buckets)
        if soft.overlap_weights:
            exposed += exposed_buckets(backward / 2, over("all_gather", 2, buckets), buckets)
        else:
            exposed += gather
        total = scatter + gather
    else:
        exposed = exposed_buckets(backward, over("all_reduce", soft.gradient_bytes, buckets), buckets)
        total = over("all_reduce", soft.gradient_bytes)
    # Hidden bytes take SMs and memory bandwidth from computing: half of what they would take inside a node.
    return exposed + _overlap_cost(task, link["dp"], max(0.0, total - exposed))


def _overlap_cost(task: PlanTask, link: Link, hidden: float) -> float:
    """Seconds by which so many of hidden communication prolong the computing beside them."""
    return OVERLAP_COST * hidden * link.bandwidth / task.cluster.inside.bandwidth


def mfu(task: PlanTask, step: float) -> float:
    """Model FLOPs of a step, nothing recomputed, over what the GPUs could do at their peak meanwhile."""
    return task.flops / step / task.cluster.gpus / task.cluster.peak
