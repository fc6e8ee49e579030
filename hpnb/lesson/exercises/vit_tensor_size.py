"""The last exercise of notebook 03: how many ranks to split a transformer over, by arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpnb.lesson.exercises.checker import Finding, WrongAnswer, exercise
from hpnb.lesson.exercises.findings import divisors, keeps_to_cap
from hpnb.lesson.tables import number
from hpnb.theory import LINKS, Link, exposed_seconds, seconds

_BUCKETS = 24
_SLACK = 1.01


@dataclass(frozen=True)
class TensorTask:
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

    def state_bytes(self, t: int) -> float:
        """On a device."""
        return 16 * self.parameters / t

    def step_seconds(self, t: int) -> float:
        """Compute, four exposed all-reduces a layer, and what 24 gradient buckets leave exposed."""
        d = self.devices // t
        compute = 6 * self.parameters * self.tokens / self.devices / self.rate
        activation = 2 * self.tokens / d * self.hidden
        tp = 4 * self.layers * seconds("all_reduce", activation, t, self.link) if t > 1 else 0.0
        gradient, backward = 2 * self.parameters / t, 2 / 3 * (compute + tp)
        dp = exposed_seconds(backward, gradient, _BUCKETS, d, self.link) if d > 1 else 0.0
        return compute + tp + dp


TASKS = {
    "fits, and many tokens": TensorTask(64, 24, 2048, 2e6, 400e12, LINKS["NVLink 4"], 80e9),
    "does not fit": TensorTask(64, 40, 5120, 2e6, 400e12, LINKS["NVLink 4"], 80e9),
    "few tokens, a slow link": TensorTask(64, 24, 8192, 8192, 400e12, LINKS["InfiniBand NDR"], 400e9),
    "fits, a slow link": TensorTask(64, 24, 2048, 65536, 400e12, LINKS["Ethernet 100 Gb"], 80e9),
    "does not fit, a slow link": TensorTask(32, 32, 4096, 32768, 400e12, LINKS["Ethernet 100 Gb"], 60e9),
}


@exercise("03.5", "how many ranks should share a matrix?", 20)
def choose_ranks(choose: Callable[[TensorTask], Any]) -> Iterator[Finding]:
    for name, task in TASKS.items():
        t, sizes = choose(task), divisors(task.devices)
        if isinstance(t, bool) or t not in sizes:  # 4.0 and NumPy's 4 are equal to 4
            wanted = f"an int that divides {task.devices} devices: {', '.join(map(str, sizes))}"
            raise WrongAnswer(f"{name}: t is {t!r}, and it must be {wanted}")
        t = int(t)
        memory = keeps_to_cap(f"{name}: t={t}: a device", task.state_bytes(t), task.cap)
        yield memory
        if not memory.ok:
            continue  # it is compared with those that fit
        took = task.step_seconds(t)
        over = took / min(task.step_seconds(n) for n in sizes if task.state_bytes(n) <= task.cap)
        text = f"{name}: t={t}: a step of {number(took, 's')}, {over:.2f} times the shortest"
        yield Finding(over <= _SLACK, f"{text} of those that fit")
