"""Notebook 00: what an all-reduce is made of, how it hangs, and who kept it waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb import Layout, Mesh, comm
from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.mesh import Axis
from hpnb.record import Timeline
from hpnb.theory import LINKS, Link, seconds

_TIMEOUT = 20.0
_HANG_TIMEOUT = 3.0


# --- 1: a ring by hand -----------------------------------------------------------------------


def _run_ring(ring: Callable[..., Any]) -> tuple[str, int, float, float]:
    """On a rank: (what is wrong, exchanges, bytes sent, bytes of the tensor)."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    chunks = [
        torch.arange(6, dtype=torch.float64) * (axis.rank + 1) + 100 * chunk for chunk in range(axis.size)
    ]
    sent: list[int] = []

    def exchange(chunk: torch.Tensor) -> torch.Tensor:
        sent.append(chunk.nbytes)
        return comm.exchange(chunk, axis, shift=1)

    got = ring([chunk.clone() for chunk in chunks], axis.rank, exchange)
    expected = torch.stack(chunks)
    whole = expected.nbytes
    dist.all_reduce(expected)
    wrong = ""
    if not isinstance(got, Sequence) or len(got) != axis.size:
        wrong = f"a {type(got).__name__} was returned, and a list of {axis.size} chunks is wanted"
    elif not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
        chunks_off = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)]
        wrong = f"rank {axis.rank} has a wrong sum in chunks {chunks_off}"
    return wrong, len(sent), float(sum(sent)), float(whole)


def _verify_ring(ring: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for ranks in (2, 3, 4):
        found = hpnb.launch(_run_ring, ring, ranks=ranks, device="cpu", timeout=_TIMEOUT)
        wrong = next((wrong for wrong, *_ in found if wrong), "")
        findings.append(Finding(not wrong, f"{ranks} ranks: {wrong or 'every rank has the exact sum'}"))
        steps = max(steps for _, steps, _, _ in found)
        target = 2 * (ranks - 1)
        findings.append(Finding(steps == target, f"{ranks} ranks: {steps} steps, target 2(n-1) = {target}"))
        sent, whole = max(found, key=lambda f: f[2])[2:]
        ratio = sent / (2 * (ranks - 1) / ranks * whole)
        findings.append(
            Finding(ratio == 1, f"{ranks} ranks: {sent:.0f} bytes sent, {ratio:.2f} of the ring's 2(n-1)/n")
        )
    return findings


ring = Exercise("00.1", "a ring all-reduce", 20, _verify_ring)


def ring_walk(ranks: int, device: str = "auto") -> list[list[list[float]]]:
    """How many ranks' parts are in each chunk of each rank of a real ring: before, and after each step."""
    walked = hpnb.launch(_walk, ranks=ranks, device=device, timeout=120.0)
    return [list(stage) for stage in zip(*walked, strict=True)]


def _walk() -> list[list[float]]:
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    held = [torch.ones(1, device=hpnb.device()) for _ in range(axis.size)]
    stages = [[chunk.item() for chunk in held]]
    for step in range(axis.size - 1):
        got = comm.exchange(held[(axis.rank - step) % axis.size], axis)
        held[(axis.rank - step - 1) % axis.size] += got
        stages.append([chunk.item() for chunk in held])
    return stages


# --- 2: an all-reduce from its two halves ----------------------------------------------------


def _run_halves(all_reduce: Callable[..., Any], length: int) -> tuple[bool, list[str], float, float]:
    """On a rank: (right, calls made, bytes sent, bytes of a ring on the padded tensor)."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    x = torch.arange(length, dtype=torch.float64) + 10 * axis.rank
    expected = x.clone()
    dist.all_reduce(expected)
    with hpnb.record.traffic() as t:
        got = all_reduce(x.clone(), axis)
    padded = -(-length // axis.size) * axis.size * x.element_size()
    right = isinstance(got, torch.Tensor) and torch.equal(got, expected)
    return right, [m.op for m in t.messages], t.total, hpnb.record.ring_bytes("all_reduce", padded, axis.size)


def _verify_halves(all_reduce: Callable[..., Any]) -> Sequence[Finding]:
    findings = []
    for length in (12, 10, 2):
        found = hpnb.launch(_run_halves, all_reduce, length, ranks=3, device="cpu", timeout=_TIMEOUT)
        text = f"{length} values on 3 ranks"
        findings.append(Finding(all(right for right, *_ in found), f"{text}: every rank has the exact sum"))
        ops = found[0][1]
        findings.append(
            Finding(ops == ["reduce_scatter", "all_gather"], f"{text}: called {', '.join(ops) or 'nothing'}")
        )
        sent, target = found[0][2:]
        findings.append(Finding(sent == target, f"{text}: {sent:.0f} bytes sent, a ring sends {target:.0f}"))
    return findings


halves = Exercise("00.2", "an all-reduce from its two halves", 15, _verify_halves)


# --- 5: three hangs --------------------------------------------------------------------------


def _expected_ring(axis: Axis) -> float:
    return float((axis.rank - 1) % axis.size)


def _expected_mean(axis: Axis) -> float:
    return sum(range(axis.size)) / axis.size


def _expected_total(axis: Axis) -> float:
    return float(sum(batch + 1 for rank in range(axis.size) for batch in range(3 - (rank > 0))))


def _run_mended(mended: Callable[..., Any], expected: Callable[[Axis], float]) -> tuple[bool, object, float]:
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    got = mended(axis)
    value = got.item() if isinstance(got, torch.Tensor) else got
    return value is not None and abs(value - expected(axis)) < 1e-9, value, expected(axis)


def _verify_hangs(mended: Sequence[Callable[..., Any]]) -> Sequence[Finding]:
    findings, untouched = [], []
    cases = (("pass_on", _expected_ring), ("log_mean", _expected_mean), ("uneven_sum", _expected_total))
    for (name, expected), function in zip(cases, mended, strict=True):
        try:
            found = hpnb.launch(_run_mended, function, expected, ranks=3, device="cpu", timeout=_HANG_TIMEOUT)
        except hpnb.RankError as error:
            if error.error == "NotImplementedError":
                untouched.append(error)
                findings.append(Finding(False, f"{name}: not yet"))
            else:
                places = "; ".join(_places(error))
                findings.append(Finding(False, f"{name}: {error.summary}{places and ': '}{places}"))
            continue
        wrong = [f"rank {r} has {got}, not {want}" for r, (ok, got, want) in enumerate(found) if not ok]
        findings.append(Finding(not wrong, f"{name}: {'; '.join(wrong) or 'right on every rank'}"))
    if len(untouched) == len(cases):
        raise untouched[0]
    return findings


def _places(error: hpnb.RankError) -> list[str]:
    """The reader's own line in which each rank stood."""
    found = []
    for rank, stack in error.stacks.items():
        lines = stack.splitlines()
        own = [i for i, line in enumerate(lines) if line.startswith("  Cell In[") and i + 1 < len(lines)]
        if own:
            found.append(f"rank {rank} in `{lines[own[-1] + 1].strip()}`")
    return found


hangs = Exercise("00.5", "three hangs", 20, _verify_hangs)


# --- 4: the straggler ------------------------------------------------------------------------


def _record_with_one_slow(slow: int) -> Timeline:
    import time

    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    x = torch.ones(1024)
    comm.all_reduce(x, axis)
    with hpnb.record.timeline() as recorder:
        for _ in range(4):
            time.sleep(0.06 if axis.rank == slow else 0.01)
            comm.all_reduce(x, axis)
    return recorder.gather()


def _verify_straggler(straggler: Callable[[Timeline], Any]) -> Sequence[Finding]:
    findings = []
    with hpnb.Ranks(4, device="cpu", timeout=_TIMEOUT) as ranks:
        for slow in (2, 0, 3):
            recorded = ranks.run(_record_with_one_slow, slow)[0]
            named = straggler(recorded)
            right = str(named) == str(slow)
            findings.append(Finding(right, f"rank {slow} was slow, and {named!r} was named"))
    return findings


straggler = Exercise("00.4", "name the straggler", 10, _verify_straggler)


# --- 3: how large a bucket -------------------------------------------------------------------


def _latency_share(nbytes: float, ranks: int, link: Link) -> float:
    return seconds("all_reduce", 0.0, ranks, link) / seconds("all_reduce", nbytes, ranks, link)


def _verify_bucket(bucket: Callable[[Link, int, float], Any]) -> Sequence[Finding]:
    findings = []
    cases = zip(LINKS.items(), ((8, 0.1), (4, 0.5), (64, 0.05), (16, 0.2), (3, 0.1)), strict=False)
    for (name, link), (ranks, share) in cases:
        answer = bucket(link, ranks, share)
        text = f"{name}, {ranks} ranks, latency at most {share:.0%}"
        try:
            nbytes = float(answer)
        except (TypeError, ValueError):
            nbytes = -1.0
        if not 0 < nbytes < math.inf:
            findings.append(Finding(False, f"{text}: {answer!r} is not a size in bytes"))
            continue
        got = _latency_share(nbytes, ranks, link)
        smaller = _latency_share(0.98 * nbytes, ranks, link)
        reading = f"{text}: a bucket of {nbytes:.3g} bytes has {got:.1%}"
        if got <= share * (1 + 1e-6) and smaller <= share:
            reading += ", but a smaller one would do"
        findings.append(Finding(got <= share * (1 + 1e-6) and smaller > share, reading))
    return findings


bucket = Exercise("00.3", "how large a bucket", 10, _verify_bucket)

__all__ = ["bucket", "halves", "hangs", "ring", "straggler"]
