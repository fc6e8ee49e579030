"""The last exercise of notebook 03: how many ranks to cut a transformer over, by arithmetic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.tables import number
from hpnb.theory import LINKS, Link, exposed_seconds, seconds


@dataclass(frozen=True)
class Job:
    """A transformer that is to be trained on `devices`, t by t of them sharing each matrix.

    Attributes:
        devices: t times the replicas d.
        layers, hidden: 12 layers hidden^2 parameters.
        tokens: of a whole batch; each replica gets its d-th.
        rate: matmul FLOP/s of a device.
        link: between any two of them.
        cap: bytes that a device may hold of states, 16 a parameter.
    """

    devices: int
    layers: int
    hidden: int
    tokens: float
    rate: float
    link: Link
    cap: float

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2


_BUCKETS = 24
_SLACK = 1.01
_JOBS = {
    "fits, and many tokens": Job(64, 24, 2048, 2e6, 400e12, LINKS["NVLink 4"], 80e9),
    "does not fit": Job(64, 40, 5120, 2e6, 400e12, LINKS["NVLink 4"], 80e9),
    "few tokens, a slow wire": Job(64, 24, 8192, 8192, 400e12, LINKS["InfiniBand NDR"], 400e9),
    "fits, a slow wire": Job(64, 24, 2048, 65536, 400e12, LINKS["Ethernet 100 Gb"], 80e9),
    "does not fit, a slow wire": Job(32, 32, 4096, 32768, 400e12, LINKS["Ethernet 100 Gb"], 60e9),
}


def holds(job: Job, t: int) -> float:
    """Bytes of states on a device."""
    return 16 * job.parameters / t


def step_seconds(job: Job, t: int) -> float:
    """Compute, four all-reduces a layer in line, and of the gradient's what 24 buckets leave exposed."""
    d = job.devices // t
    compute = 6 * job.parameters * job.tokens / job.devices / job.rate
    activation = 2 * job.tokens / d * job.hidden
    inside = 4 * job.layers * seconds("all_reduce", activation, t, job.link) if t > 1 else 0.0
    gradient = 2 * job.parameters / t
    outside = exposed_seconds(2 / 3 * (compute + inside), gradient, _BUCKETS, d, job.link) if d > 1 else 0.0
    return compute + inside + outside


def _count(answer: Any) -> int | None:
    """The whole number that this is, NumPy's and 4.0 too; None if it is none."""
    if isinstance(answer, bool):
        return None
    if isinstance(answer, float):
        return int(answer) if answer.is_integer() else None
    try:
        return operator.index(answer)
    except TypeError:
        return None


def _verify_choose(choose: Callable[[Job], Any]) -> Sequence[Finding]:
    findings = []
    for name, job in _JOBS.items():
        answer = choose(job)
        t, divisors = _count(answer), [n for n in range(1, job.devices + 1) if job.devices % n == 0]
        if t not in divisors:
            wanted = f"an int that divides {job.devices} devices: {', '.join(map(str, divisors))}"
            findings.append(Finding(False, f"{name}: t is {answer!r}, and it must be {wanted}"))
            continue
        said = f"{name}: t={t}: a device holds {number(holds(job, t), 'B')}, at most {number(job.cap, 'B')}"
        findings.append(Finding(holds(job, t) <= job.cap, said))
        if holds(job, t) > job.cap:
            continue  # it is compared with those that fit
        able = [n for n in divisors if holds(job, n) <= job.cap]
        over = step_seconds(job, t) / min(step_seconds(job, n) for n in able)
        said = f"{name}: t={t}: a step of {number(step_seconds(job, t), 's')}, {over:.2f} times the shortest"
        findings.append(Finding(over <= _SLACK, f"{said} of those that fit"))
    return findings


choose = Exercise("03.5", "how many ranks to cut over", 20, _verify_choose)
