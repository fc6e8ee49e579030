"""The exposed all-to-all of a DualPipe-V step on four GPUs, by the clock.

    step, one action after the other     F ~~~ F ~~~ B ~~~ ...     exposed = this step - the last one
    step, in pairs                       F B F B ...               exposed = this step - the last one
    step, messages left out              F F B ...

In the last one the experts' rows are copied on their own GPU instead, so it computes as much as the others
and nothing of it is exposed. Its gradients are wrong, and nobody uses them. Steps take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb.bench.expert_step import EXPERT_RANKS, RANKS, Exposed, Size, boost_mixtral, predict, table
from hpnb.bench.results import quartiles, take_turns
from hpnb.bench.worker import time_step
from hpnb.pipeline_parallel import Costs
from hpnb.pipeline_parallel.overlapped_pairs import ExposedTime
from hpnb.theory.fit_link import fit_link
from hpnb.theory.links import Link

APART, PAIRED, LEFT_OUT = "one after the other", "in pairs", "messages left out"


def compare(size: Size, rounds: int) -> list[Exposed]:
    """Time the three steps, and print them beside the prediction."""
    results_of_ranks = hpnb.launch(_measure, size, rounds, ranks=RANKS, device="cuda", timeout=900.0)
    link, seconds, predicted = results_of_ranks[0]
    computing = statistics.median(seconds[LEFT_OUT])
    # As many messages as predicted, at the measured link's speed: their own time is not on a clock.
    sent = max(predicted.apart.sent)
    ways = []
    for name in (APART, PAIRED):
        step = statistics.median(seconds[name])
        ways.append(ExposedTime(step, (computing,), (step - computing,), (sent,)))
    results = [predicted, Exposed("measured", *ways)]
    print(table(results, link, size))
    for name, values in seconds.items():
        median, low, high = (1e3 * value for value in quartiles(values))
        print(f"measured step, {name}: {median:.1f} ms [{low:.1f}, {high:.1f}], {rounds} rounds")
    exposed = [way.exposed[0] * 1e3 for way in (results[1].apart, results[1].paired)]
    print(f"longer than without messages: by {exposed[0]:.1f} ms, and in pairs by {exposed[1]:.1f} ms")
    return results


def _measure(size: Size, rounds: int) -> tuple[Link, dict[str, list[float]], Exposed]:
    boosted, batch, schedule = boost_mixtral(size, "grouped_mm")
    batch = {name: value.to(hpnb.device()) for name, value in batch.items()}
    link = _measure_link(boosted.plugin.mesh.ep.group, size)

    step = partial(_train_step, boosted, batch)
    names = (APART, PAIRED, LEFT_OUT)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in (*names, *names):
        step(name)
    predicted = predict(schedule, Costs.measured(step(LEFT_OUT, record=True).timeline), link, size)
    for name in take_turns(names, rounds):
        seconds[name].append(time_step(partial(step, name)))
    return link, seconds, predicted


def _train_step(boosted: Any, batch: dict[str, torch.Tensor], name: str, record: bool = False) -> Any:
    """One of the three steps, by its name."""
    boosted._pipe.overlaps_pairs = name == PAIRED
    with _messages_left_out() if name == LEFT_OUT else nullcontext():
        return boosted.run(batch, None, trains=True, record=record)


def _measure_link(group: dist.ProcessGroup, size: Size) -> Link:
    """The link that explains all-to-alls of a message's size, and of an eighth of it."""
    sizes, seconds = [], []
    for share in (8, 1):
        rows = torch.zeros(
            int(size.message_bytes * EXPERT_RANKS) // share, dtype=torch.uint8, device=hpnb.device()
        )
        rows = rows[: len(rows) // EXPERT_RANKS * EXPERT_RANKS]
        arrived = torch.empty_like(rows)
        send = partial(dist.all_to_all_single, arrived, rows, group=group)
        times = [time_step(send) for _ in range(12)]
        sizes.append(rows.nbytes)
        seconds.append(statistics.median(times[2:]))
    return fit_link(sizes, seconds, EXPERT_RANKS, "all_to_all")


@contextmanager
def _messages_left_out() -> Iterator[None]:
    """Rows of experts are copied on this GPU instead of sent. Their numbers, which are integers, are sent."""
    send = dist.all_to_all_single

    def copy(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not input.is_floating_point():
            return send(output, input, *args, **options)
        shorter = min(len(output), len(input))
        output[:shorter].copy_(input[:shorter])
        output[shorter:].zero_()
        return _Arrived()

    dist.all_to_all_single = copy
    try:
        yield
    finally:
        dist.all_to_all_single = send


class _Arrived:
    """In the place of a message that is under way."""

    def wait(self) -> bool:
        return True
