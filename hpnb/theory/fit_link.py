"""From measured times to a Link: least squares for its two numbers.

    minimise  sum over i of (predicted_i / measured_i - 1)^2      over latency >= 0 and 1 / bandwidth >= 0
    predicted_i = steps * latency + serial_i / bandwidth          linear in both

Residuals are relative, since times span orders of magnitude and absolute ones would let the largest message
alone decide. Where the free optimum has one term below zero, the constrained one has it at 0 and the other
fitted alone (the sum is convex, and both columns are positive); a bandwidth whose term is 0 is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hpnb.theory.communication import collective_cost
from hpnb.theory.links import Link


def fit_link(
    sizes: Sequence[float],
    seconds: Sequence[float],
    ranks: int,
    op: str = "all_reduce",
    algorithm: str = "ring",
    name: str = "",
) -> Link:
    """The Link that explains measured times best.

    Args:
        sizes: bytes, as `nbytes` in `bytes_sent`; at least two different ones.
        seconds: what each took; take the fastest or the median of several runs.

    Raises:
        ValueError: nothing to tell latency from bandwidth by, or a time that is not positive.
    """
    way = collective_cost(op, ranks, algorithm)
    if way.serial == 0:
        raise ValueError(f"{op} on {ranks} rank moves nothing, so no link can be fitted; use 2 ranks or more")
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"{len(sizes)} sizes ({len(set(sizes))} different) and {len(seconds)} times do not make a line; "
            "give one time for each size, and at least 2 different sizes"
        )
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if not (n.min() >= 0 and t.min() > 0 and np.isfinite(n).all() and np.isfinite(t).all()):
        raise ValueError(
            f"sizes from {n.min()} bytes and times from {t.min()} s cannot be fitted; "
            "sizes must be at least 0, times above 0, all of them finite"
        )
    # predicted / measured = terms @ (latency, 1 / bandwidth), to be 1 everywhere
    terms = np.stack([way.steps / t, way.serial * n / ranks / t], axis=1)  # (measurements, 2)
    scale = np.linalg.norm(terms, axis=0)  # seconds and bytes differ by 1e15: level them, or lstsq drops one
    latency, per_byte = np.linalg.lstsq(terms / scale, np.ones(len(t)))[0] / scale
    if latency < 0:
        latency, per_byte = 0.0, terms[:, 1].sum() / scale[1] ** 2
    elif per_byte < 0:
        latency, per_byte = terms[:, 0].sum() / scale[0] ** 2, 0.0
    return Link(float(latency), float(1 / per_byte) if per_byte > 0 else math.inf, name)
