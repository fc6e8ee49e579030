"""What failures cost a run: how often to save, and how much of the time is left for training.

N GPUs that each fail once in Y on average stop a run every M = Y/N. What was computed since the last save is
lost, and a restart takes R. Saves take D, one after every T of training. To first order a fraction

    D/T        goes into saves
    T/(2 M)    is computed and lost: a failure finds an interval half done
    R/M        goes into restarts

which is least at T = sqrt(2 D M), where saves and losses cost the same: sqrt(2 D / M) together (Young 1974,
Communications of the ACM 17(9)). For failures that come by chance, at the same rate at every moment, the time
that an interval takes is known exactly (Daly 2006, Future Generation Computer Systems 22(3)):

    training / time  =  T / (M e^(R/M) (e^((T + D)/M) - 1))
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """All in seconds.

    Attributes:
        between: mean time between failures of the whole run, M.
        save: of one checkpoint, during which nothing is trained, D.
        restart: from a failure until training goes on, R.
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


def mean_between(gpus: int, each: float) -> float:
    """Seconds between failures of a run on so many GPUs, of which each fails once in `each` seconds."""
    if gpus < 1 or not each > 0:
        raise ValueError(f"{gpus} GPUs that fail every {each} s: both must be above 0")
    return each / gpus


def save_interval(failures: Failures) -> float:
    """sqrt(2 D M): seconds of training between saves."""
    return math.sqrt(2 * failures.save * failures.between)


def trained_share(failures: Failures, interval: float) -> float:
    """Training over time, exactly, saving every `interval` seconds of training.

    Raises:
        ValueError: the interval is not above 0.
    """
    if not interval > 0:
        raise ValueError(f"an interval of {interval} s between saves is none; it must be above 0")
    m = failures.between
    try:
        return interval / (m * math.exp(failures.restart / m) * math.expm1((interval + failures.save) / m))
    except OverflowError:  # nobody lives that long
        return 0.0


def simulated_share(failures: Failures, interval: float, count: int, seed: int = 0) -> float:
    """The same from a run that is played through until `count` failures have hit it; no formula is used.

    A failure may also hit a save, whose interval is then lost, or a restart, which begins anew.
    """
    if not interval > 0 or count < 1:
        raise ValueError(f"{count} failures, saves every {interval} s: both must be above 0")
    draw = random.Random(seed)
    clock = trained = 0.0
    ready = 0.0  # when training goes on
    for _ in range(count):
        fails = clock + draw.expovariate(1 / failures.between)
        saved = max(0, math.floor((fails - ready) / (interval + failures.save)))
        trained += saved * interval
        clock = fails
        ready = fails + failures.restart
    return trained / clock
