"""Notebook 00: what an all-reduce is made of, how it hangs, and who kept it waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb import comm
from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import TIMEOUT, run_on_ranks
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.record import Timeline
from hpnb.theory import LINKS, Link, seconds

_HANG_TIMEOUT = 3.0


# --- 1: an all-reduce from its two halves ----------------------------------------------------


def _run_halves(all_reduce: Callable[..., Any], length: int) -> tuple[bool, list[str], float, float]:
    """On a rank: (right, calls, bytes sent, bytes of a ring on the padded tensor)."""
    axis = all_ranks("dp")
    x = torch.arange(length, dtype=torch.float64) + 10 * axis.rank
    expected = x.clone()
    dist.all_reduce(expected)
    with hpnb.record.traffic() as t:
        answer = all_reduce(x.clone())
    padded = -(-length // axis.size) * axis.size * x.element_size()
    right = isinstance(answer, torch.Tensor) and torch.equal(answer, expected)
    return right, [m.op for m in t.messages], t.total, hpnb.record.ring_bytes("all_reduce", padded, axis.size)


@exercise("00.1", "an all-reduce from its two halves", 15)
def halves(answer: Callable[..., Any]) -> Iterator[Finding]:
    for length in (12, 10, 2):
        runs = run_on_ranks(_run_halves, answer, length, ranks=3)
        text, (_, ops, sent, target) = f"{length} values on 3 ranks", runs[0]
        yield Finding(all(right for right, *_ in runs), f"{text}: every rank has the exact sum")
        both_halves = ops == ["reduce_scatter", "all_gather"]
        yield Finding(both_halves, f"{text}: called {', '.join(ops) or 'nothing'}")
        yield Finding(sent == target, f"{text}: {sent:.0f} bytes as a ring sends them, target {target:.0f}")


# --- 2: an all-reduce in log2 n steps --------------------------------------------------------


def _run_doubling(all_reduce: Callable[..., Any]) -> tuple[str, int, int]:
    """On a rank: (what is wrong, exchanges, bytes sent)."""
    axis = all_ranks("dp")
    x = torch.arange(6, dtype=torch.float64) * (axis.rank + 1) + 100 * axis.rank
    sizes: list[int] = []

    def exchange(tensor: torch.Tensor, peer: int) -> torch.Tensor:
        if peer == axis.rank or not 0 <= peer < axis.size:
            raise ValueError(f"rank {axis.rank} of {axis.size} cannot exchange with rank {peer}")
        received = torch.empty_like(tensor)
        transfers = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        sizes.append(tensor.nbytes)
        return received

    answer = all_reduce(x.clone(), axis.rank, axis.size, exchange)
    expected = x.clone()
    dist.all_reduce(expected)
    right = isinstance(answer, torch.Tensor) and torch.equal(answer, expected)
    return "" if right else f"rank {axis.rank} does not have the sum", len(sizes), sum(sizes)


@exercise("00.2", "an all-reduce in log2 n steps", 15)
def doubling(answer: Callable[..., Any]) -> Iterator[Finding]:
    for ranks in (2, 4, 8):
        runs = run_on_ranks(_run_doubling, answer, ranks=ranks)
        wrong = next((wrong for wrong, *_ in runs if wrong), "")
        yield Finding(not wrong, f"{ranks} ranks: {wrong or 'every rank has the exact sum'}")
        steps, target = max(steps for _, steps, _ in runs), ranks.bit_length() - 1
        yield Finding(steps == target, f"{ranks} ranks: {steps} exchanges, target log2 n = {target}")
        sent, nbytes = max(sent for *_, sent in runs), 6 * 8
        yield Finding(sent == target * nbytes, f"{ranks} ranks: {sent} bytes leave a rank, target {target} S")


# --- 3: how large a bucket -------------------------------------------------------------------

_BUCKET_CASES = ((8, 0.1), (4, 0.5), (64, 0.05), (16, 0.2), (3, 0.1))  # (ranks, share of latency) a link


def _latency_share(nbytes: float, ranks: int, link: Link) -> float:
    return seconds("all_reduce", 0.0, ranks, link) / seconds("all_reduce", nbytes, ranks, link)


@exercise("00.3", "how large a bucket", 10)
def bucket(answer: Callable[[Link, int, float], Any]) -> Iterator[Finding]:
    for (name, link), (ranks, share) in zip(LINKS.items(), _BUCKET_CASES, strict=False):
        size = answer(link, ranks, share)
        text = f"{name}, {ranks} ranks, latency at most {share:.0%}"
        try:
            nbytes = float(size)
        except (TypeError, ValueError):
            nbytes = -1.0
        if not 0 < nbytes < math.inf:
            raise WrongAnswer(f"{text}: {size!r} is not a size in bytes")
        latency, smaller = (_latency_share(n, ranks, link) for n in (nbytes, 0.98 * nbytes))
        fits = latency <= share * (1 + 1e-6)
        text = f"{text}: a bucket of {nbytes:.3g} bytes has {latency:.1%}"
        if fits and smaller <= share:
            text += ", but a smaller one would do"
        yield Finding(fits and smaller > share, text)


# --- 4: the straggler ------------------------------------------------------------------------


def _record_with_one_slow(slow: int) -> Timeline:
    axis, x = all_ranks("dp"), torch.ones(1024)
    comm.all_reduce(x, axis)
    with hpnb.record.timeline() as recorder:
        for _ in range(4):
            time.sleep(0.06 if axis.rank == slow else 0.01)
            comm.all_reduce(x, axis)
    return recorder.gather()


@exercise("00.4", "name the straggler", 10)
def straggler(answer: Callable[[Timeline], Any]) -> Iterator[Finding]:
    with hpnb.Ranks(4, device="cpu", timeout=TIMEOUT) as ranks:
        for slow in (2, 0, 3):
            named = answer(ranks.run(_record_with_one_slow, slow)[0])
            yield Finding(str(named) == str(slow), f"rank {slow} was slow, and {named!r} was named")


# --- 5: three hangs --------------------------------------------------------------------------


Expected = Callable[[int, int], float]  # (rank, ranks) -> what this rank must return
_HANGS: dict[str, Expected] = {
    "pass_on": lambda rank, ranks: (rank - 1) % ranks,
    "log_mean": lambda rank, ranks: sum(range(ranks)) / ranks,
    "uneven_sum": lambda rank, ranks: sum(batch + 1 for r in range(ranks) for batch in range(3 - (r > 0))),
}


def _run_fixed(repaired: Callable[..., Any], expected: Expected) -> tuple[bool, object, float]:
    rank, ranks = hpnb.rank(), hpnb.world_size()
    answer, target = repaired(rank, ranks), expected(rank, ranks)
    value = answer.item() if isinstance(answer, torch.Tensor) else answer
    return value is not None and abs(value - target) < 1e-9, value, target


@exercise("00.5", "three hangs", 20)
def hangs(repaired: Sequence[Callable[..., Any]]) -> Iterator[Finding]:
    stubs = []
    for (name, expected), function in zip(_HANGS.items(), repaired, strict=True):
        try:
            runs = hpnb.launch(_run_fixed, function, expected, ranks=3, device="cpu", timeout=_HANG_TIMEOUT)
        except hpnb.RankError as error:
            if error.error == "NotImplementedError":
                stubs.append(error)
                yield Finding(False, f"{name}: yours to write")
            else:
                places = "; ".join(_reader_lines(error))
                yield Finding(False, f"{name}: {error.summary}{places and ': '}{places}")
            continue
        wrong = [f"rank {r} has {value}, not {want}" for r, (ok, value, want) in enumerate(runs) if not ok]
        yield Finding(not wrong, f"{name}: {'; '.join(wrong) or 'right on every rank'}")
    if len(stubs) == len(_HANGS):
        raise stubs[0]


def _reader_lines(error: hpnb.RankError) -> list[str]:
    """The line of the reader's cell in which each rank stood."""
    places = []
    for rank, stack in error.stacks.items():
        lines = stack.splitlines()
        in_cell = [i for i, line in enumerate(lines[:-1]) if line.startswith("  Cell In[")]
        if in_cell:
            places.append(f"rank {rank} in `{lines[in_cell[-1] + 1].strip()}`")
    return places
