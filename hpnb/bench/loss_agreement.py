"""Do all layouts train as one GPU does? The losses of 50 steps, each with a batch of its own.

    distance of two runs     ||a - b|| / ||a||, over the losses of all steps
    what is allowed          3 x that of one GPU's from itself with sums in another order:
                             of rows; and for tp, of heads and units of MLPs (`other_order`)

In 16 bits no two orders of summation give the same losses, so a layout may be as far off as an order is.
Where two orders happen to agree, the last digit of a float32 stands in for their distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ALLOWED = 3.0
LAST_DIGIT = 2.0**-23  # of a float32


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """||a - b|| / ||a||.

    Raises:
        ValueError: of unequally many steps.
    """
    if len(a) != len(b):
        raise ValueError(f"losses of {len(a)} and of {len(b)} steps cannot be compared")
    return math.dist(a, b) / math.hypot(*a)


def times(far: float, noise: float) -> float:
    """How many times as far as another order is."""
    return far / max(noise, LAST_DIGIT)


def line(layout: str, name: str, far: float, noise: float, units: float = 0.0) -> str:
    """What is printed of a layout, given its distance and that of the opposite order of rows.

    Args:
        units: with tp, that of the opposite order of heads and units. The larger of the two counts.
    """
    said = "coincide" if times(far, max(noise, units)) <= ALLOWED * (1 + 1e-9) else "TOO FAR APART"
    beside = f", {times(far, units):.2f} x that of units" if units else ""
    return f"{layout:10} {name:34} {far:.2e}   {times(far, noise):6.2f} x the order's{beside}: {said}"
