"""The memory of any `ModelShape` on any layout: bytes of the fullest rank, by category.

The peak is the largest of the moments of `step_memory`, since gradients are not there yet when activations
are most. This module has what hpnb's programs take at them. Of the blocks, the first two and the last two
are looked at, since the bytes between them change evenly. At the turn there are the activations of all
microbatches in flight, and the gradients of earlier ones; in the step there is what Adam copies for one pass
over memory.

States are 2 + 2 + 12 bytes a parameter by ZeRO stage (`model_states`), sharded over dp x cp, and experts'
over the ranks that have the same. Gradients, with w bytes in each of P parameters of a rank:

    from step to step      w P in DataParallel's buckets, and in ZeRO 1's flat gradients
    of microbatches        w P that all of them add to, whatever the stage, until the last backward reduces it
    of a last backward     w P in replicas; a share of it, and two buckets or one block, where it is sharded

Of values of w bytes, 2 or 4, one block keeps for each of T tokens: 2 h (norms' inputs) and 2 h (their
outputs), (H + 2K) d and H d of attention, and 2 n of the MLP (3 n gated), a t-th of the latter two. With
sequence parallelism a t-th of the norms' inputs, too. Where a token goes to k experts, the MLP's are k times
as many, with k h of its copies for the experts and k h of their results. Where a block is not compiled
(`is_eager`), an RMS norm keeps its input in float32 and also its output before the weight, a gated MLP n
more, and GPT-2's gelu, which transformers writes out, 3 n. On GPUs no fused attention takes grouped queries
in float32: PyTorch then keeps H s probabilities, and repeats keys and values for all H heads. Without fused
attention in general, see Korthikanti et al. 2022 (arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from dataclasses import replace

from hpnb.mesh import ParallelLayout
from hpnb.theory.layout_step import BUCKET_BYTES
from hpnb.theory.model_states import model_states
from hpnb.theory.plan_step import is_eager, last_rank, rank_blocks, rank_dense_blocks
from hpnb.theory.plan_task import PlanTask
from hpnb.theory.step_memory import StepMemory, StepTerms, step_moments

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
USABLE = 0.92  # of a GPU's memory: the rest is CUDA's context, NCCL's buffers and fragments
# cuBLAS has a workspace for each handle and stream, 32 MiB on Hopper, and each thread has a handle: that of
# the forward and autograd's (PyTorch, "CUDA semantics", cuBLAS workspaces).
MATMUL_WORKSPACES = 2 * 32 * 2**20
ADAM_PASS = 2**25  # elements that `hpnb.precision.flat_adam` steps at once, whose gradients it copies
_PADDED = 64  # rows to which a loss in chunks pads the table on a GPU


def block_bytes(task: PlanTask, layout: ParallelLayout, compiled: bool = True) -> float:
    """Bytes that one block keeps of a microbatch for its backward, on a rank.

    Args:
        compiled: as on a GPU; False is what a CPU runs.
    """
    model, t, b = task.model, layout.tp, task.microbatch_size(layout)
    tokens = b * task.rank_tokens(layout.cp)
    heads = model.head_share(t)
    inputs = 1 / t if layout.sequence_parallel else 1.0
    norms = model.norms * model.hidden * (inputs + (inputs if task.software.shards_norms else 1))
    attention = model.attention_values(t)
    if compiled and task.software.fused and task.value_bytes == 4 and model.kv_heads < model.heads:
        repeated = (model.heads - model.kv_heads) * (model.head_size + model.value_size)
        attention += (model.heads * task.sequence + repeated) * heads
    eager = is_eager(task, layout) or not (compiled or model.norm_bias)
    if eager:
        more = 2 if task.value_bytes == 2 else 1  # float32 for 16 bits, and the output before the weight
        norms += more * model.norms * model.hidden * inputs
        norms += more * model.qk_norm * (model.heads + model.kv_heads) * model.head_size * heads
        norms += (2 if task.value_bytes == 2 else 1) * (model.q_lora_rank + model.kv_lora_rank)
    written_out = model.causal and model.norm_bias and not (model.gated or compiled)
    inner = (2 + model.gated * (2 if eager else 1) + 3 * written_out) / t  # of each inner value
    mlp = inner * model.mlp
    if model.experts:
        mlp = model.chosen * (task.imbalance if layout.ep > 1 else 1.0) * (mlp + 2 * model.hidden)
        mlp += inner * model.shared_mlp
        mlp += 4 / task.value_bytes * model.hidden * (model.wide_router and task.value_bytes < 4)
    bytes_kept = task.value_bytes * tokens * (norms + attention + mlp)
    if not task.software.fused:  # scores, softmax and its mask; two masks of dropout
        scores = 0 if layout.recomputation == "attention" else 5 * model.heads * heads * task.sequence
        bytes_kept += tokens * (scores + 2 * model.hidden * (inputs if task.software.shards_norms else 1))
    return bytes_kept


def module_bytes(task: PlanTask, layout: ParallelLayout, compiled: bool = True) -> float:
    """Bytes that all MTP modules keep of a microbatch, without blocks and outputs.

    They are embeddings and the 2 h values that a projection reads. Three eager norms keep 3 h more in
    float32; in 16 bits they keep float32 copies, and not the embeddings. The outputs count the inputs of
    last norms.
    """
    model, tokens = task.model, task.microbatch_size(layout) * task.rank_tokens(layout.cp)
    eager = is_eager(task, layout) or not compiled
    values = 3 if not eager else 11 if task.value_bytes == 2 else 6
    return float(task.value_bytes * tokens * model.mtp_modules * values * model.hidden)


def in_flight(layout: ParallelLayout, microbatches: int, rank: int) -> float:
    """Microbatches whose activations a pipeline rank holds at once; with chunks, in parts."""
    p, v = layout.pp, layout.chunks
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(microbatches)
    if layout.schedule.startswith("zb"):
        return float(min(p, microbatches))
    if layout.schedule == "dualpipe-v":
        return min(p + 0.5, float(microbatches))
    if v > 1:  # chunks that are warmed up, and the one at work
        return min((v - 1) * p + 2 * (p - rank - 1) + 1, v * microbatches) / v
    return float(min(p - rank, microbatches))


def rank_moments(task: PlanTask, layout: ParallelLayout, rank: int, compiled: bool = True) -> StepMemory:
    """The moments of a step at which one rank of a pipeline may reach its peak.

    Args:
        compiled: on a GPU, with `enable_all_optimization`. False is what a CPU runs: no kernel is compiled,
            and no matmul has a workspace.
    """
    model, t, m, w = task.model, layout.tp, task.microbatches(layout), task.value_bytes
    b, blocks = task.microbatch_size(layout), rank_blocks(task.model.blocks, layout)[rank]
    plain = rank_dense_blocks(model, layout)[rank]  # blocks without experts, the first of them
    last, replicas, stage = rank == last_rank(layout), layout.dp * layout.cp, layout.zero_stage
    dense, experts, root = _rank_parameters(task, layout, rank, blocks, plain)
    states = [
        model_states(
            n, max(1, ranks), stage, weight_bytes=w, gradient_bytes=w, optimizer_bytes=12 if w == 2 else 8
        )
        for n, ranks in ((dense, replicas), (experts, replicas // layout.ep))
    ]
    weights, reduced, optimizer = (
        sum(getattr(s, name) for s in states) for name in ("parameters", "gradients", "optimizer")
    )
    full, local_experts = w * (dense + experts), model.expert_parameters / t / layout.ep
    sharded = _block_parameters(task, layout) - local_experts * (replicas == layout.ep)
    block_weights = w * sharded
    kept_between = full if stage == 1 or (stage == 0 and replicas > 1) else 0.0
    added_up = full if m > 1 and not (stage == 3 and task.software.reduces_every_microbatch) else 0.0
    complete = full if stage == 0 else reduced if stage > 1 else 0.0
    if task.software.gradient_bytes > w and stage < 2:  # matmuls add to one float32 gradient, and to no other
        kept_between, added_up, complete = task.software.gradient_bytes * (dense + experts), 0.0, 0.0

    tokens = b * task.rank_tokens(layout.cp)
    block_kept, entry = block_bytes(task, layout, compiled), w * tokens * model.hidden
    plain_kept = block_bytes(replace(task, model=model.dense_block), layout, compiled) if plain else 0.0
    passed = entry / (t if layout.sequence_parallel else 1)  # what one block gives the next
    recomputed = layout.recomputation == "full"
    stored, inside = (passed, max(block_kept, plain_kept)) if recomputed else (block_kept, 0.0)
    fullest = task.imbalance if layout.ep > 1 else 1.0
    inner = model.chosen * fullest * model.mlp + model.shared_mlp if model.experts else model.mlp
    flow = inside + w * tokens * (3 * max(inner, plain and model.dense_mlp) / t + 2 * model.hidden)
    head_kept, head_passing = _head_bytes(task, layout, compiled) if last else (0.0, 0.0)
    head_kept = (1 + model.mtp_modules) * head_kept + module_bytes(task, layout, compiled)
    # With chunks, the last stage's backward follows its forward at once: others have microbatches in flight.
    at_head = 1.0 if layout.schedule == "interleaved" else in_flight(layout, m, rank)
    head_kept *= at_head if last else 0.0
    bucket = min(BUCKET_BYTES, full)
    sending = 2 * bucket if stage == 2 else block_weights if stage == 3 and replicas > 1 else 0.0

    def stored_of(first: int) -> float:
        """Bytes of the first so many blocks."""
        more = plain_kept - block_kept if plain and not recomputed else 0.0
        return first * stored + min(first, plain) * more

    def passing(i: int) -> float:
        gathering = (1 + min(1, i)) * block_weights if stage == 3 else 0.0
        return flow + gathering + (sending if i < blocks - 1 else 0.0)

    masters = optimizer / 12 if w == 2 else 0.0  # float32 weights that this rank updates
    # Two passes of Adam may hold copies of gradients, and of weights where these stay as they are; eager, all
    # masters have gradients in float32.
    passes = 2 * min(ADAM_PASS, masters) * w * (1 if stage == 0 else 2)
    terms = StepTerms(
        weights,
        optimizer,
        kept_gradients=kept_between,
        added_gradients=added_up,
        complete_gradients=complete,
        other_microbatches=(in_flight(layout, m, rank) - 1) * stored_of(blocks),
        head_kept=head_kept,
        head_passing=head_passing,
        table_gradient=w * model.outputs * model.hidden / t if last and m == 1 else 0.0,
        gathered=w * root if stage == 3 else 0.0,
        gathered_ahead=block_weights if stage == 3 else 0.0,
        sending=sending,
        copies=passes if compiled else 4 * masters,
        workspaces=float(MATMUL_WORKSPACES) if compiled else 0.0,
    )
    # A block between the ends has a neighbour gathered ahead and another's gradients on the way, which the
    # last and the first lack.
    looked_at = sorted({blocks - 1, max(0, blocks - 2), min(1, blocks - 1), 0}, reverse=True)
    return step_moments(terms, blocks, stored_of, passing, looked_at)


def _block_parameters(task: PlanTask, layout: ParallelLayout) -> float:
    """Of one block on the tensor-parallel rank with most heads."""
    model, t = task.model, layout.tp
    norms_and_biases = model.block_parameters - model.dense_weights - model.expert_parameters
    return model.rank_weights(t) + norms_and_biases / t + model.expert_parameters / t / layout.ep


def _rank_parameters(
    task: PlanTask, layout: ParallelLayout, rank: int, blocks: int, plain: int
) -> tuple[float, float, float]:
    """Parameters of a rank: all but experts, experts, and those of the first that are in no block.

    Args:
        blocks, plain: of the rank, and those of them without experts where others have some.
    """
    model, t = task.model, layout.tp
    first, last = rank == 0, rank == last_rank(layout)
    root = model.embedding_parameters / t if first else 0.0
    if last:
        table = model.head_parameters or (0 if first else model.outputs * model.hidden)
        root += table / t + model.hidden + model.mtp_parameters
        if model.mtp_modules and not (first or model.tied):
            root += model.embedding_parameters / t
    experts = model.expert_parameters / t / layout.ep
    dense = (blocks - plain) * (_block_parameters(task, layout) - experts)
    if plain:
        dense += plain * _block_parameters(replace(task, model=model.dense_block), layout)
    return dense + root, (blocks - plain) * experts, root


def _head_bytes(task: PlanTask, layout: ParallelLayout, compiled: bool) -> tuple[float, float]:
    """Bytes of a microbatch's outputs and loss: kept for the backward, and while it is computed."""
    model, t, w = task.model, layout.tp, task.value_bytes
    tokens = task.microbatch_size(layout) * task.rank_outputs(layout.cp)
    vocabulary, h = model.outputs / t, model.hidden
    ends = 3.0 * w * tokens * h  # the last norm's input, its output, and its gradient
    wide = 4.0 if w < 4 else 0.0  # a copy in float32
    if not task.loss_chunk or layout.cp > 1:  # a shifted label may lie on another rank of cp
        # Logits, their copies in float32 and shifted by a token, and log-probabilities. Where the vocabulary
        # is sharded, labels are shifted instead.
        copies = wide + 4 * (model.causal and t == 1) + 4
        return ends + w * vocabulary * tokens, copies * vocabulary * tokens
    rows = min(tokens, task.loss_chunk)
    padded = w * vocabulary * h if compiled and model.outputs % (_PADDED * t) else 0.0
    logits = (w if compiled else w + wide + 4) * vocabulary * rows  # one kernel; or copy, and logarithms
    gradient = 4.0 * vocabulary * h  # of the table, in float32, computed in the forward
    recomputes = layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved")
    if recomputes:  # in the backward
        return ends, padded + logits + gradient
    return ends + gradient, padded + logits


def rank_memory(task: PlanTask, layout: ParallelLayout, rank: int, compiled: bool = True) -> dict[str, float]:
    """{category: bytes} at the peak of a step on one rank of a pipeline; see `rank_moments`."""
    fullest = rank_moments(task, layout, rank, compiled).fullest
    return {part: float(getattr(fullest, part)) for part in MEMORY_PARTS}


def plan_memory(task: PlanTask, layout: ParallelLayout) -> dict[str, float]:
    """{category: bytes} of the fullest rank.

    Earlier ranks hold more microbatches, so of ranks with the same blocks the first is the fullest.
    """
    p, model = layout.pp, task.model
    blocks = list(zip(rank_blocks(model.blocks, layout), rank_dense_blocks(model, layout), strict=True))
    likely = {0, min(1, p - 1), p - 1} | {rank for rank in range(1, p) if blocks[rank] != blocks[rank - 1]}
    return max((rank_memory(task, layout, rank) for rank in sorted(likely)), key=lambda m: sum(m.values()))
