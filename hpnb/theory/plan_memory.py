"""The memory of any `ModelShape` on any layout: bytes of the fullest rank, by category.

    weights, gradients, optimizer    2 + 2 + 12 bytes a parameter by ZeRO stage (`model_states`), sharded over
                                     dp x cp, and experts' over the ranks that have the same; but several
                                     microbatches add to full gradients, in ZeRO 2 and 3 as well
    activations                      of the microbatches in flight; a recomputed block keeps its input alone
    temporary                        logits three times in float32, gradient buckets, one recomputed block,
                                     the blocks that ZeRO 3 has gathered

Of values of w bytes, 2 or 4, one block keeps for each of T tokens: 2 h (norms' inputs) and 2 h (their
outputs), (H + 2K) d and H d of attention, and 2 n of the MLP (3 n gated), a t-th of the latter two. With
sequence parallelism a t-th of the norms' inputs, too. Where a token goes to k experts, the MLP's are k times
as many, with k h of its copies for the experts and k h of their results. Where a block is not compiled
(`is_eager`), an RMS norm also keeps its input in float32 and its output before the weight, and a gated MLP n
more. Without fused attention, see Korthikanti et al. 2022 (arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from hpnb.mesh import ParallelLayout
from hpnb.theory.layout_step import BUCKET_BYTES
from hpnb.theory.model_states import model_states
from hpnb.theory.plan_step import is_eager, last_rank, rank_blocks
from hpnb.theory.plan_task import PlanTask

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
USABLE = 0.92  # of a GPU's memory: the rest is CUDA's context, NCCL's buffers and fragments


def block_bytes(task: PlanTask, layout: ParallelLayout) -> float:
    """Bytes that one block keeps of a microbatch for its backward, on a rank."""
    model, t, b = task.model, layout.tp, task.microbatch_size(layout)
    tokens = float(b * task.sequence) / layout.cp
    heads = -(-model.kv_heads // t) / model.kv_heads
    inputs = 1 / t if layout.sequence_parallel else 1.0
    norms = model.norms * model.hidden * (inputs + (inputs if task.software.shards_norms else 1))
    attention = 2 * (model.heads + model.kv_heads) * model.head_size * heads
    if eager := is_eager(task, layout.cp):
        norms += 3 * model.norms * model.hidden * inputs
        norms += 3 * model.qk_norm * (model.heads + model.kv_heads) * model.head_size * heads
    mlp = (2 + model.gated * (2 if eager else 1)) * model.mlp / t
    if model.experts:
        mlp = model.chosen * (task.imbalance if layout.ep > 1 else 1.0) * (mlp + 2 * model.hidden)
    bytes_kept = task.value_bytes * tokens * (norms + attention + mlp)
    if not task.software.fused:  # scores, softmax and its mask; two masks of dropout
        scores = 0 if layout.recomputation == "attention" else 5 * model.heads * heads * task.sequence
        bytes_kept += tokens * (scores + 2 * model.hidden * (inputs if task.software.shards_norms else 1))
    return bytes_kept


def in_flight(layout: ParallelLayout, microbatches: int, rank: int) -> float:
    """Microbatches whose activations a pipeline rank holds at once; with chunks, in parts."""
    p, v = layout.pp, layout.chunks
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(microbatches)
    if layout.schedule.startswith("zb"):
        return float(min(p, microbatches))
    if v > 1:  # chunks that are warmed up, and the one at work
        return min((v - 1) * p + 2 * (p - rank - 1) + 1, v * microbatches) / v
    return float(min(p - rank, microbatches))


def rank_memory(task: PlanTask, layout: ParallelLayout, rank: int) -> dict[str, float]:
    """{category: bytes} at the peak of a step on one rank of a pipeline."""
    model, t, m, w = task.model, layout.tp, task.microbatches(layout), task.value_bytes
    b, blocks = task.microbatch_size(layout), rank_blocks(task.model.layers, layout)[rank]
    first, last, replicas = rank == 0, rank == last_rank(layout), layout.dp * layout.cp
    experts = blocks * model.expert_parameters / t / layout.ep
    parameters = blocks * (model.block_parameters - model.expert_parameters) / t
    if first:
        parameters += model.embedding_parameters / t
    if last:
        table = model.head_parameters or (0 if first else model.outputs * model.hidden)
        parameters += table / t + model.hidden
    states = [
        model_states(
            n, max(1, ranks), layout.zero_stage,
            weight_bytes=w, gradient_bytes=w, optimizer_bytes=12 if w == 2 else 8,
        )
        for n, ranks in ((parameters, replicas), (experts, replicas // layout.ep))
    ]  # fmt: skip
    # Microbatches add to full gradients, which the last backward reduces.
    gradients = sum(s.gradients for s in states) if m == 1 else float(w) * (parameters + experts)
    tokens, kept = b * task.sequence / layout.cp, block_bytes(task, layout)
    entry = float(w) * tokens * model.hidden / (t if layout.sequence_parallel else 1)
    flying = in_flight(layout, m, rank)
    activations = flying * blocks * (entry if layout.recomputation == "full" else kept)
    temporary = kept if layout.recomputation == "full" else 0.0
    if last:
        outputs = b * model.output_tokens(task.sequence) / layout.cp
        if task.loss_chunk and layout.cp == 1:  # a shifted label may lie on another rank of cp
            outputs = min(outputs, task.loss_chunk)
        logits = 4.0 * model.outputs / t * outputs
        temporary = max(temporary, 3 * logits) + 2 * entry
    one = float(w) * model.block_parameters / t
    if replicas > 1:
        temporary += min(2 * BUCKET_BYTES, w * parameters) if layout.zero_stage < 3 else 3 * one
        if layout.zero_stage == 3 and (first or last):
            temporary += w * max(model.embedding_parameters * first, model.head_parameters * last) / t
    return {
        "parameters": sum(s.parameters for s in states),
        "gradients": gradients,
        "optimizer": sum(s.optimizer for s in states),
        "activations": activations,
        "temporary": temporary,
    }


def plan_memory(task: PlanTask, layout: ParallelLayout) -> dict[str, float]:
    """{category: bytes} of the fullest rank."""
    p, spare = layout.pp, task.model.layers % layout.pp
    likely = {0, p - 1} | ({(p - spare) // 2} if spare else {min(1, p - 1)})
    return max((rank_memory(task, layout, rank) for rank in sorted(likely)), key=lambda m: sum(m.values()))
