"""Computing over communication for each axis of a layout: which axis can afford which link.

    rho = matmul FLOP/s over bus bytes/s, both measured:   how many FLOPs a rank does while it sends a byte

Bus bytes/s is nccl-tests' busbw for large messages: `bytes_sent` of the op over its seconds; for a send the
bytes themselves. Then, for blocks of 12 h^2 weights (mlp_ratio 4) with values and gradients of 2 bytes:

                computing over sending
    data        tokens / (rho (d-1)/d)      backward alone; grows with the batch, and the two can overlap
    tensor      4.5 h / ((t-1) rho)         whatever the batch, and nothing to hide behind
    pipeline    18 h (l/p) / rho            whatever the batch, and large: the bubble matters, not the bytes

All three leave latency out (messages far above the knee), count one axis at a time, take the backward for
twice the forward, recompute nothing, and count matmuls only. Attention's s^2 term multiplies them by 1 + s/(6
h), which `tp_compute_over_communication` does where `sequence` is given. With other dtypes multiply by 2 /
bytes_per_value.
"""

from __future__ import annotations

import math


def _check(rho: float, **counts: float) -> None:
    if not 0 < rho < math.inf:
        raise ValueError(f"rho={rho} is not FLOP/s over bytes/s; it must be finite and above 0")
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} is not a count; use 1 or more")


def dp_tokens_to_hide(rho: float, ranks: int, gradient_bytes: float = 2) -> float:
    """Tokens a rank needs in one backward so that the gradients' all-reduce fits behind it: rho (d-1)/d.

    Of T tokens every weight takes 4 T FLOPs of backward (2 for the input's gradient, 2 for its own) and
    `gradient_bytes` g to reduce, 2 (d-1)/d g bytes sent. Compute covers communication where

        4 T / FLOP/s  >=  2 (d-1)/d g / (bytes/s)      so      T >= rho (d-1)/d g/2

    Tokens of the backward that reduces: with accumulation or a pipeline that is the last microbatch's alone.
    Embeddings have gradients and hardly any FLOPs, and the last bucket has no backward left to hide behind:
    both stay exposed. A reduce-scatter alone (ZeRO-1 and 2) needs half as many; its all-gather comes later.
    """
    _check(rho, ranks=ranks)
    return rho * (ranks - 1) / ranks * gradient_bytes / 2


def tp_compute_over_communication(hidden: int, ranks: int, rho: float, sequence: int = 0) -> float:
    """Time computing over time communicating of 1D tensor parallelism: 4.5 h / ((t-1) rho), inf at t = 1.

    Of a block, a rank computes 72 b s h^2 / t FLOPs, and all-reduces an activation of 2 b s h bytes four
    times (after attention and after the MLP, once forward and once backward), 2 (t-1)/t of it sent:

        (72 b s h^2 / t) / (4 * 2 (t-1)/t * 2 b s h) / rho  =  72 h / (16 (t-1)) / rho

    b s cancels. Each all-reduce waits for the matmul before it and the one after waits for it: at ratio r the
    ranks compute r / (1 + r) of the time. An all-gather and a reduce-scatter instead of every all-reduce
    (sequence parallelism) send as much, as long as no gathered input is dropped and gathered again for the
    weight gradient. Recomputing the block makes it 96 FLOPs and 6 all-reduces: 4 h / ((t-1) rho).
    """
    _check(rho, hidden=hidden, ranks=ranks)
    return math.inf if ranks == 1 else 4.5 * hidden / ((ranks - 1) * rho) * (1 + sequence / (6 * hidden))
