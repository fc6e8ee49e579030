"""How long a step takes with sharded states: computing, recomputation, exposed communication, optimizer,
offload.

For P parameters of w bytes on N ranks, a backward of T_b and a forward of T_f = T_b / 2 in L equal blocks:

    stage 0      all-reduce of w P in buckets behind the backward        `overlap.exposed_seconds`
    stage 1, 2   reduce-scatter behind the backward, half as long; after the step an exposed all-gather of w P
    stage 3      all-gathers behind the forward; all-gathers and reduce-scatters behind the backward
                 exposed = root + 2 g + r + (L-1) (max(0, g - T_f/L) + max(0, g + r - T_b/L))
    optimizer    1/N of its time from stage 1 on
    recompute    the recomputed forwards
    offload      gradients down and weights up a slower link, in stage 3 up twice; the step at the CPU's pace

g and r are the all-gather and the reduce-scatter of one block. In stage 3 the root is gathered first and
reduced last, and nothing overlaps with either. The model ignores that reductions slow down the computing
beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpnb.theory.communication import seconds
from hpnb.theory.links import Link
from hpnb.theory.overlap import exposed_seconds, zero3_exposed_seconds


def zero_step_seconds(
    forward: float,
    backward: float,
    optimizer: float,
    *,
    block_bytes: float,
    root_bytes: float,
    layers: int,
    ranks: int,
    stage: int,
    link: Link,
    recompute: int = 0,
    bucket_bytes: float = 25 * 2**20,
    host_bandwidth: float | None = None,
    host_seconds: float = 0.0,
    overlap: bool = True,
) -> Mapping[str, float]:
    """{part: seconds} of a step on one of `ranks` ranks.

    Args:
        forward, backward, optimizer: seconds of one rank that holds everything and sends nothing.
        block_bytes, root_bytes: of one block's weights, and of the weights outside the blocks.
        recompute: blocks whose forward runs again in the backward.
        host_bandwidth: bytes/s between GPU and CPU in one direction, if states are offloaded.
        host_seconds: of the optimizer on the CPU, for all parameters.
        overlap: whether communication runs beside computing; False exposes all of it, as on a CPU whose
            cores do both.

    Raises:
        ValueError: no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r} is not one of 0, 1, 2, 3")
    weights = layers * block_bytes + root_bytes
    again = forward * recompute / layers
    behind = backward + again
    buckets = max(1, round(weights / bucket_bytes))
    share = 1 / ranks if stage else 1.0
    if ranks == 1:
        exposed = 0.0
    elif not overlap:
        exposed = _all_communication(stage, layers, block_bytes, root_bytes, buckets, ranks, link)
    elif stage == 0:
        exposed = exposed_seconds(behind, weights, buckets, ranks, link)
    elif stage < 3:
        exposed = exposed_seconds(behind, weights, buckets, ranks, link, "reduce_scatter")
        exposed += seconds("all_gather", weights, ranks, link)
    else:
        g, r = (seconds(op, block_bytes, ranks, link) for op in ("all_gather", "reduce_scatter"))
        ends = sum(seconds(op, root_bytes, ranks, link) for op in ("all_gather", "reduce_scatter"))
        exposed = ends + zero3_exposed_seconds(g, r, forward / layers, behind / layers, layers - 1)
    parts = {
        "computing": forward + backward,
        "recomputation": again,
        "exposed": exposed,
        "optimizer": (optimizer if host_bandwidth is None else host_seconds) * share,
    }
    if host_bandwidth is not None:
        times = 3 if stage == 3 else 2  # gradients down, weights up; in stage 3 up for both gathers
        parts["offload"] = times * weights * share / host_bandwidth
    return parts


def _all_communication(
    stage: int, layers: int, block_bytes: float, root_bytes: float, buckets: int, ranks: int, link: Link
) -> float:
    """Seconds of every message of a step, one after the other."""
    weights = layers * block_bytes + root_bytes
    if stage == 0:
        return buckets * seconds("all_reduce", weights / buckets, ranks, link)
    if stage < 3:
        return sum(
            buckets * seconds(op, weights / buckets, ranks, link) for op in ("reduce_scatter", "all_gather")
        )
    messages = ("all_gather", "all_gather", "reduce_scatter")
    blocks = layers * sum(seconds(op, block_bytes, ranks, link) for op in messages)
    return blocks + sum(seconds(op, root_bytes, ranks, link) for op in messages[1:])
