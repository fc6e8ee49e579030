"""How much of the experts' all-to-all stays exposed in a DualPipe-V step: predicted, replayed or measured.

    python -m hpnb.bench experts --bandwidth 0.2

A Mixtral on 4 ranks (pp 2 x ep 2) trains one step. On a CPU these ranks share cores, so nothing about time is
measured on the clock. Each rank's CPU time between its messages is taken, and the step is replayed with the
bytes that were counted and with the link that you name. On four GPUs steps are timed (`experts_on_gpus.py`).
"""

from __future__ import annotations

import torch

import hpnb
from hpnb.bench import experts_on_gpus
from hpnb.bench.expert_step import RANKS, Exposed, Size, boost_mixtral, predict, table
from hpnb.pipeline_parallel import Costs
from hpnb.theory.links import Link


def run(
    bandwidth: float, latency: float, hidden: int | None, layers: int, microbatches: int, device: str,
    rounds: int,
) -> None:  # fmt: skip
    """Train, predict, and replay or measure; print the table.

    Args:
        bandwidth, latency: of the link to replay with, GB/s and microseconds; on GPUs the link is measured.
        hidden: by default 128 on a CPU and 2,048 on GPUs.

    Raises:
        ValueError: device="cuda" with fewer than four GPUs.
    """
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < RANKS:
        raise ValueError(f"{RANKS} ranks need a GPU each to be timed, and here are {gpus}; use --device cpu")
    if device != "cpu" and gpus >= RANKS:
        size = Size(hidden or 2048, layers, 8, 1024, 4 * microbatches, microbatches, "bf16")
        experts_on_gpus.compare(size, rounds)
    else:
        link = Link(latency * 1e-6, bandwidth * 1e9)
        compare(link, Size(hidden or 128, layers, samples=2 * microbatches, microbatches=microbatches))


def compare(link: Link, size: Size) -> list[Exposed]:
    results = hpnb.launch(_replay, link, size, ranks=RANKS, device="cpu", timeout=900.0)[0]
    print(table(results, link, size))
    print("replayed from measured CPU time: no message was timed")
    return results


def _replay(link: Link, size: Size) -> list[Exposed]:
    boosted, batch, schedule = boost_mixtral(size, "eager")
    for _ in range(2):  # the first step learns shapes
        step = boosted.run(batch, None, trains=True, record=True)
    replayed = Exposed(
        "replayed",
        step.exposed_time(link, overlapped=False),
        step.exposed_time(link, overlapped=True),
    )
    return [predict(schedule, Costs.measured(step.timeline), link, size), replayed]
