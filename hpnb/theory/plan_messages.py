"""The messages of a step of `plan_step.py`: which link each axis sees, and how long a collective takes on it.

links              tp is innermost, so its ranks are neighbours; dp is outermost, or pp
seconds            messages x latency + bytes of a ring / bandwidth
context_seconds    what the messages of attention over cp add to a block
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from hpnb.mesh import ParallelLayout
from hpnb.theory.cluster import Cluster
from hpnb.theory.communication import collective_cost
from hpnb.theory.context import (
    Attention,
    all_gather_exposed,
    ring_exposed,
    ring_step_seconds,
    ulysses_exposed,
)
from hpnb.theory.links import Link
from hpnb.theory.plan_task import PlanTask


@lru_cache(maxsize=4096)
def links(cluster: Cluster, layout: ParallelLayout) -> dict[str, Link]:
    """{axis: what its ring sees}, with tp innermost; "dp" is the axis of dp x cp.

    dp is outermost, or pp where the layout's order says so: then the ranks of one stage are neighbours.

    Ranks of an all-to-all do not send to neighbours alone: those of other nodes get all but their own node's
    share, through one rank's share of the cards.
    """
    t, host, ep = min(layout.tp, cluster.host), cluster.host, layout.ep
    between = layout.pp if layout.order.index("dp") < layout.order.index("pp") else 1  # ranks of other stages
    stage, inner = layout.cp * layout.tp, layout.cp * between * layout.tp
    near_cp = min(layout.cp, host // t)  # ranks of a group on one node
    near_dp = near_cp * max(1, host // inner)

    def exchange(span: int, ranks: int, near: int) -> Link:
        link = cluster.link(span, 1)
        if ranks == near or link is cluster.inside:
            return cluster.inside
        bandwidth = link.bandwidth * (ranks - 1) / (ranks - near)
        return replace(link, bandwidth=min(cluster.inside.bandwidth, bandwidth))

    near_ep = min(ep, near_dp)
    return {
        "tp": cluster.link(layout.tp, t),
        "cp": exchange(stage, layout.cp, near_cp)
        if layout.context_parallel == "ulysses"
        else cluster.link(stage, near_cp),
        "ep": exchange(ep * layout.tp * (between if ep > layout.cp else 1), ep, near_ep),
        # Only the ranks of one stage cross a node's border at a time, and no message takes two cards.
        "pp": cluster.link(inner, max(1, min(host // min(stage, host), host // cluster.cards)))
        if between == layout.pp
        else cluster.link(layout.world_size, max(1, host // cluster.cards)),
        "dp": cluster.link(layout.dp * inner, near_dp),
        "edp": cluster.link(layout.dp * inner, max(1, near_dp // ep)),
    }


@lru_cache(maxsize=65536)
def seconds(op: str, nbytes: float, ranks: int, link: Link) -> float:
    """Seconds of a collective: the bytes of a ring, and the messages of a ring or a tree, whichever is fewer.

    NCCL's double binary trees (Sanders, Speck & Traff 2009) send as many bytes as a ring does, in steps that
    grow with the logarithm of the ranks.
    """
    serial = collective_cost(op, ranks).serial
    return messages(op, ranks) * link.latency + serial * nbytes / ranks / link.bandwidth


def messages(op: str, ranks: int) -> int:
    """Messages of a collective that follow one another: of a ring or of a tree, whichever has fewer."""
    ring, rounds = collective_cost(op, ranks).steps, (ranks - 1).bit_length()
    return min(ring, 2 * rounds if op == "all_reduce" else rounds) if ranks > 2 else ring


def attention_of(task: PlanTask, layout: ParallelLayout) -> Attention:
    """The attention of a block on one rank of tp, for a microbatch.

    Around a ring, and gathered, values of another size than keys are padded.
    """
    model, t = task.model, layout.tp if task.model.shards_attention else 1
    kv_heads = -(-model.kv_heads // t)
    heads = model.heads // model.kv_heads * kv_heads
    padded = max(model.head_size, model.value_size)
    size = model.score_size if layout.context_parallel == "ulysses" else padded
    length = round(layout.cp * task.rank_tokens(layout.cp))
    batch = task.microbatch_size(layout)
    return Attention(length, heads, kv_heads, size, batch, causal=model.causal)


def context_seconds(task: PlanTask, layout: ParallelLayout, link: Link, forwards: int) -> float:
    """Seconds of a block that the messages of its attention add, forward and backward."""
    c, attention = layout.cp, attention_of(task, layout)
    if task.software.gathers_context:  # gradients are reduce-scattered
        nbytes = 4.0 * attention.batch * attention.sequence * attention.kv_heads * attention.head_size
        return (forwards + 1) * seconds("all_gather", nbytes, c, link)
    if layout.context_parallel == "ulysses":
        exposed = ulysses_exposed(attention, c, link)
    elif layout.context_parallel == "all-gather":
        exposed = all_gather_exposed(attention, c, link)
    else:
        step = ring_step_seconds(attention, c, task.software.attention_share * task.rate)
        exposed = ring_exposed(attention, c, link, step)
    return forwards * exposed.forward + exposed.backward
