"""How large a batch helps: the gradient noise scale, from two norms that data parallelism has anyway.

A gradient over B samples is G + noise of covariance S/B, so

    E |g_B|^2 = |G|^2 + tr(S) / B

and two batch sizes b < B, such as a rank's and all ranks', give both unknowns:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)           tr(S) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

    noise scale = tr(S) / |G|^2        a batch at which noise and signal are equally long

Numerator and denominator are noisy and the second may even be negative: average each over steps, then
divide. To reach a loss with batches of B instead of huge ones takes 1 + noise/B times as many steps:

    steps(B) = fewest (1 + noise / B)           samples(B) = steps(B) B = fewest (B + noise)

McCandlish et al. 2018, *An empirical model of large-batch training* (arXiv 1812.06162), sections 2.2 and
appendix A.1. Assumed is SGD at its best learning rate for each B, and curvature that is alike in all
directions of the noise; Adam, and real losses, are neither. So it is a scale, and no boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def signal_and_noise(
    small_squared: Sequence[float], big_squared: Sequence[float], small: float, big: float
) -> tuple[float, float]:
    """(|G|^2, tr(S)), each the mean over steps.

    Args:
        small_squared: squared norms of gradients over `small` samples, one a step (the mean over ranks).
        big_squared: of gradients over `big` samples, of the same steps.

    Raises:
        ValueError: nothing measured, or small is not below big.
    """
    if len(small_squared) != len(big_squared) or not len(big_squared):
        raise ValueError(
            f"{len(small_squared)} small and {len(big_squared)} big norms; every step gives one of each"
        )
    if not 0 < small < big:
        raise ValueError(
            f"batches of {small} and {big} samples tell nothing apart; the first must be the smaller"
        )
    b, B = sum(small_squared) / len(small_squared), sum(big_squared) / len(big_squared)
    return (big * B - small * b) / (big - small), (b - B) / (1 / small - 1 / big)


def noise_scale(
    small_squared: Sequence[float], big_squared: Sequence[float], small: float, big: float
) -> float:
    """tr(S) / |G|^2 in samples; infinite where the signal is lost in the noise of the measurement."""
    signal, noise = signal_and_noise(small_squared, big_squared, small, big)
    return max(noise, 0.0) / signal if signal > 0 else float("inf")


def steps_at(batch: float, fewest: float, noise: float) -> float:
    """Steps to a loss with batches of `batch` samples: fewest (1 + noise / batch)."""
    if batch <= 0:
        raise ValueError(f"batch={batch} holds no samples; it must be above 0")
    return fewest * (1 + noise / batch)


def fitted_wall(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """(fewest, noise) whose `steps_at` is nearest to measured steps, by least squares of their logarithms.

    Raises:
        ValueError: fewer than two different batches.
    """
    if len(batches) != len(steps) or len(set(batches)) < 2:
        raise ValueError(f"{len(set(batches))} different batches fit no wall; two or more do")

    def off(noise: float) -> tuple[float, float]:
        """(squared distance, log of the fewest) at one noise scale."""
        logs = [math.log(s / (1 + noise / b)) for b, s in zip(batches, steps, strict=True)]
        mean = sum(logs) / len(logs)
        return sum((x - mean) ** 2 for x in logs), mean

    low, high = min(batches) / 100, max(batches) * 100
    scales = [low * (high / low) ** (i / 2000) for i in range(2001)]
    best = min(scales, key=lambda noise: off(noise)[0])
    return math.exp(off(best)[1]), best
