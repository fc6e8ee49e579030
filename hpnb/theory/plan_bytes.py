"""Bytes that leave the mean rank of any `ModelShape` in a step, by axis, as `hpnb.record.traffic` counts.

    tp         4 all-reduces of a block's activation, 6 with recomputation; 2 at the ends, 3 numbers a token
               (`ModelShape.reduced_values` for experts and latent attention)
    cp         keys, values and their gradients around a ring or gathered, or Ulysses' all-to-alls
               (`context`); the class token of an image, and its gradient
    ep         4 all-to-alls of a block's routed tokens, 6 with recomputation, evenly routed (`experts`)
    pp         activations and their gradients at every stage's border, a t-th of them with sequence
               parallelism; the gradient of a table at both ends
    dp, edp    gradients, and weights under ZeRO, over dp x cp; of experts over the ranks that have the same

Losses, counts and norms of gradients are left out. With ZeRO 3 and without stages, a backward begins with the
block that its forward has ended with, which is not gathered again. What that saves in a pipeline is left out.
"""

from __future__ import annotations

from hpnb.mesh import ParallelLayout
from hpnb.theory.communication import bytes_sent
from hpnb.theory.context import ring_bytes, ulysses_bytes
from hpnb.theory.experts import experts_sent
from hpnb.theory.pipeline import V_SHAPED
from hpnb.theory.plan_messages import attention_of
from hpnb.theory.plan_step import last_rank, rank_parameters
from hpnb.theory.plan_task import PlanTask


def plan_bytes(task: PlanTask, layout: ParallelLayout) -> dict[str, float]:
    """{axis: bytes} of a step with 2-byte values."""
    model, p, t, c, m = task.model, layout.pp, layout.tp, layout.cp, task.microbatches(layout)
    again = 2 if layout.recomputation == "full" else 1  # forwards of a block
    tokens, blocks = task.batch / layout.dp * task.rank_tokens(c), model.blocks / p
    activation = 2 * tokens * model.hidden  # of all microbatches
    attention = m * blocks if c > 1 else 0.0
    of_attention = ulysses_bytes if layout.context_parallel == "ulysses" else ring_bytes  # or all-gather
    sent = of_attention(attention_of(task, layout), c)
    predicting = task.batch / layout.dp * task.rank_outputs(c) * (1 + model.mtp_modules)
    # The class token of an image goes to all ranks of cp, and its gradient back.
    class_tokens = 0.0 if model.causal else 2.0 * task.batch / layout.dp * model.hidden
    v = layout.chunks_per_rank
    borders = p * v - (2 if layout.schedule in V_SHAPED else 1)  # two chunks of a V meet on one rank
    table = 2 * model.outputs * model.hidden / t
    both_ends = model.shares_table and last_rank(layout) > 0  # each has the table, and reduces it over dp
    passes = 2 * m + 1 if layout.zero_stage == 3 else 2  # every microbatch gathers weights twice
    dense, experts = rank_parameters(task, layout)
    dense += both_ends * table / 2 / p
    ends = (model.end_parameters + (t - 1) * model.mtp_weights) / p / t  # gathered once a microbatch
    dense_bytes = 2 * passes * dense - (2 * m * ends if layout.zero_stage == 3 else 0)
    reduced = (1 + model.mtp_modules) * 2.0 * model.hidden  # of a token: embedding and outputs
    kinds = [(model.blocks - model.dense_layers, model), (model.dense_layers, model.dense_block)]
    for count, kind in kinds:
        forward, backward = kind.reduced_values
        reduced += count * (again * forward + backward)
    weights = {"dp": dense_bytes, "edp": 2.0 * passes * experts}
    if layout.zero_stage == 3 and p == 1:
        of_experts = model.expert_parameters if model.experts else 0
        weights["dp"] -= 2 * m * (model.block_parameters - of_experts) / t
        weights["edp"] -= 2 * m * of_experts / t / layout.ep
    if layout.ep == 1:  # experts are replicated as all others
        weights = {"dp": sum(weights.values()), "edp": 0.0}
    routed = 0.0
    if model.experts:
        once = experts_sent(tokens, model.hidden, layout.ep, model.chosen)
        routed = (1 + again) / 2 * model.expert_layers / p * once
    return {
        "tp": bytes_sent("all_reduce", 2 * tokens * reduced, t) / p
        + 3 / p * bytes_sent("all_reduce", 4.0 * predicting, t),
        "cp": attention * (again * sent.forward + sent.backward)
        + 2 / p * bytes_sent("broadcast", class_tokens, c),
        "ep": routed,
        "pp": 2 * borders / p * activation / (t if layout.sequence_parallel else 1)
        + both_ends * 2 / p * bytes_sent("all_reduce", table, 2),
        "dp": bytes_sent("all_gather", weights["dp"], layout.dp * c),
        "edp": bytes_sent("all_gather", weights["edp"], max(1, layout.dp * c // layout.ep)),
    }
