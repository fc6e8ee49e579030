"""What failures cost a run: how often to save, and what share of the time is left for training.

If one of N GPUs fails once in Y on average, the run stops every M = Y/N. It loses what it computed since the
last save, and a restart takes R. A save takes D, after every T of training. To first order a share of

    D/T        of the time goes into saves
    T/(2 M)    is computed and lost, because a failure hits an interval halfway on average
    R/M        goes into restarts

The sum is least at T = sqrt(2 D M), where saves and losses cost the same, together sqrt(2 D / M) (Young 1974,
Communications of the ACM 17(9)). If failures come at random with a constant rate, the time of an interval is
known exactly (Daly 2006, Future Generation Computer Systems 22(3)):

    training / time  =  T / (M e^(R/M) (e^((T + D)/M) - 1))
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """What fails and what saving costs, all in seconds.

    Attributes:
        between: mean time between failures of the run, M.
        save: one checkpoint, during which nothing is trained, D.
        restart: from a failure until training resumes, R.
    """

    between: float
    save: float
    restart: float = 0.0

    def __post_init__(self) -> None:
        if not (self.between > 0 and self.save >= 0 and self.restart >= 0):
            raise ValueError(
                f"a failure every {self.between} s, saves of {self.save} s, restarts of {self.restart} s: "
                "the first must be above 0, the others not below"
            )


def mean_time_between(gpus: int, gpu_seconds: float) -> float:
    """Seconds between failures of a run on so many GPUs, if one GPU fails once in `gpu_seconds`."""
    if gpus < 1 or not gpu_seconds > 0:
        raise ValueError(f"{gpus} GPUs that fail every {gpu_seconds} s: both must be above 0")
    return gpu_seconds / gpus


def save_interval(failures: Failures) -> float:
    """sqrt(2 D M): seconds of training between saves."""
    return math.sqrt(2 * failures.save * failures.between)


def trained_share(failures: Failures, interval: float) -> float:
    """Training over time, exactly, saving every `interval` seconds of training.

    Raises:
        ValueError: the interval is not above 0.
    """
    if not interval > 0:
        raise ValueError(f"interval={interval} s between saves must be above 0")
    m = failures.between
    try:
        return interval / (m * math.exp(failures.restart / m) * math.expm1((interval + failures.save) / m))
    except OverflowError:  # the run never finishes an interval
        return 0.0
