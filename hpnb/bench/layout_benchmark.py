"""One layout: its programs are built, take turns, and are let go; one that fails costs its own row alone.

    wave       hpnb's, and as many peers as fit in memory beside them: A B C | B C A | C A B ...
    next wave  hpnb's best, and the peers that are left
    in turn    a peer that fits beside nobody: hpnb's best, the peer, hpnb's best, the peer, each built anew
    again      hpnb's best and the best peer once more, the peer built first: who is built first has memory
               first, and of several the best so far was lucky too

Ranks that part in the middle of a collective are lost, so after a failure others are started, and what lived
is built again. Times that a program has stay, whatever becomes of it later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import hpnb
from hpnb import RankError, RankInterrupt
from hpnb.bench import worker
from hpnb.bench.layouts import Shape
from hpnb.bench.results import LayoutResult, ProgramResult
from hpnb.bench.tasks import Task
from hpnb.bench.worker import ProgramStart

_TOLERANCE = {16: 2e-3, 32: 1e-5}  # of the first losses: weights begin alike, and batches are the same
_ROOM = 0.93  # of a GPU's memory: the rest is NCCL's, and lies between tensors
_MEMORY = ("OutOfMemoryError", "out of memory", "OUT_OF_MEMORY")
Say = Callable[[str], None]


class RankPools:
    """Ranks that stay from layout to layout, and are started again where they were lost."""

    def __init__(self, device: str, timeout: float) -> None:
        self.device, self.timeout = device, timeout
        self._pool: hpnb.Ranks | None = None
        self._plain: dict[Task, tuple[float, ...]] = {}

    def of(self, ranks: int) -> hpnb.Ranks:
        if self._pool is None or not self._pool.alive or self._pool.size != ranks:
            self.close()
            self._pool = hpnb.Ranks(ranks, device=self.device, timeout=self.timeout)
        return self._pool

    def reference(self, task: Task, ranks: int, say: Say) -> tuple[float, ...]:
        """The first losses of the plain model, for all layouts of a task; none where it does not fit."""
        if task not in self._plain:
            try:
                self._plain[task] = tuple(self.of(ranks).run(worker.reference, task)[0])
            except RankError as error:
                say(f"without the losses of the plain model: {_sentence(error)}")
                self._plain[task] = ()
        return self._plain[task]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@contextmanager
def pools(device: str, timeout: float) -> Iterator[RankPools]:
    made = RankPools(device, timeout)
    try:
        yield made
    finally:
        made.close()


class LayoutBenchmark:
    """Of one layout.

    Args:
        among: the ranks on which programs live.
        task: what all of them train.
        layout, shape: its name, and the ranks along each axis.
        names: of candidates, hpnb's in front.
        rounds: steps of each program that count.
        reference: the first losses of the plain model, to which all programs are held; without them, to
            hpnb's best.
        again: whether the best of both sides meet once more.
        traces: a folder for Chrome traces of the fastest of either side of each wave.
        say: takes what is worth a line while it runs.
    """

    def __init__(
        self, among: RankPools, task: Task, layout: str, shape: Shape, names: Sequence[str], rounds: int,
        traces: str | None, say: Say, reference: Sequence[float] = (), again: bool = False,
    ) -> None:  # fmt: skip
        self.among, self.task, self.layout, self.shape = among, task, layout, shape
        self.rounds, self.traces, self.say = rounds, traces, say
        self.reference, self.again = tuple(reference), again
        self.left, self.crowded = list(names), list[str]()
        self.entries = {name: ProgramResult(name, name.startswith("hpnb")) for name in names}
        self.facts: dict[str, ProgramStart] = {}
        self.waves: list[dict[str, list[float]]] = []
        self.retries = 0
        self.live: list[str] = []
        self.gone: set[str] = set()  # they have times, and failed when others were to be held to them
        self._pool: hpnb.Ranks | None = None

    def run(self) -> LayoutResult:
        """All waves."""
        self._call(worker.drop)
        matmul = min(self._call(worker.matmul_rate, self.task.bits))
        while self.left:
            self._fill()
            while any(name not in self._measured() for name in self.live) and not self._rounds(self.rounds):
                pass  # one failed, and those that are left begin again
            if self.left and self.live and len(self.live) == 1 and not self._fits():
                self.crowded.append(self.left.pop(0))
            self._keep(self._partner() if self.left else None)
        for name in self.crowded:
            self._in_turn(name)
        if self.again:
            self._once_more()
        self._keep(None)
        units, flops = self.task.units, float(self.task.flops)
        return LayoutResult(self.layout, self.shape.ranks, self.task.unit, units, flops, matmul,
                           tuple(self._compared()), tuple(self.waves), self.retries)  # fmt: skip

    # --- who lives ---------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin programs as long as there is room, hpnb's best so far first."""
        while self.left:
            anchor = self._partner()
            if anchor is not None and anchor not in self.live:  # its ranks were lost
                self._begin(anchor)
            if self.live and not self._fits():
                return
            name, beside = self.left.pop(0), bool(self.live)
            if (
                not self._begin(name)
                and beside
                and any(word in self.entries[name].failed for word in _MEMORY)
            ):
                self.crowded.append(name)

    def _begin(self, name: str) -> bool:
        """Whether it lives now; if not, its entry says why, unless there are times in it."""
        self._note(name, failed="")
        try:
            begun = self._call(worker.begin, self.task, self.shape, name)
        except RankError as error:
            self._failed(name, _sentence(error))
            return False
        worst = max(begun, key=lambda one: one.peak)
        if wrong := worst.refused or _not_finite(worst.losses):
            self._failed(name, wrong)
            return False
        self.facts[name] = worst
        self._note(name, losses=worst.losses, held=worst.held, peak=worst.peak)
        self.live.append(name)
        return True

    def _failed(self, name: str, why: str) -> None:
        """Its entry says so. One that has times keeps them, and is not built again."""
        if name in self._measured():
            self.gone.add(name)
        else:
            self._note(name, failed=why)
        self._let_go(name, why)

    def _let_go(self, name: str, why: str) -> None:
        """It lives no more. If ranks were lost, who has lived there and was not measured is left to do."""
        self.say(f"{self.layout}, {name}: {why}")
        others = [one for one in self.live if one != name]
        if self.lost:
            known = self._measured()
            self.left[:0] = [one for one in others if one not in known]
            others = []
        self._keep(*others)

    def _fits(self) -> bool:
        """Whether one more is likely to: it is taken for as large as the largest."""
        known = [self.facts[name] for name in self.live]
        most = max(one.peak for one in known)
        return not most or sum(one.held for one in known) + 1.15 * most < _ROOM * known[0].total

    def _keep(self, *names: str | None) -> None:
        self.live = [one for one in self.live if one in names]
        self._call(worker.drop, tuple(self.live))

    def _in_turn(self, name: str) -> None:
        """A program that fits beside nobody, and hpnb's best."""
        anchor, halves = self._partner(), (self.rounds - self.rounds // 2, self.rounds // 2)
        whole: dict[str, list[float]] = {}
        for rounds in halves:
            for one in ([anchor, name] if anchor else [name]) if rounds else []:
                seconds = self._alone(one, rounds)
                if seconds is None and one == name:
                    return
                if seconds is None:  # of hpnb's best
                    if whole:  # the rounds that both have stand
                        self.waves.append(whole)
                    else:
                        self._in_turn(name)  # alone
                    return
                whole.setdefault(one, []).extend(seconds)
        self.waves.append(whole)

    def _alone(self, name: str, rounds: int) -> list[float] | None:
        """Seconds of a program that has the ranks to itself; None if it failed."""
        self._keep()
        return self.waves.pop()[name] if self._begin(name) and self._rounds(rounds) else None

    def _once_more(self) -> None:
        """The best of both sides, built in the opposite order; times that they have stay, should one fail."""
        mine, peer = self._partner(), self._fastest(ours=False)
        if mine is None or peer is None or peer in self.crowded:
            return
        self._keep()
        if self._begin(peer) and self._fits() and self._begin(mine):
            self._rounds(self.rounds)

    # --- rounds ------------------------------------------------------------------------------------------

    def _rounds(self, rounds: int) -> bool:
        """One step of each that lives a round; another one begins each time. Whether all have times."""
        new = [name for name in self.live if name not in self._measured()]
        wave: dict[str, list[float]] = {name: [] for name in self.live}
        turn, name = list(self.live), self.live[0]
        try:
            before = self._call(worker.retries)
            for _ in range(rounds):
                for name in turn:
                    wave[name].append(self._call(worker.one_step, name)[0])
                turn = [*turn[1:], turn[0]]
            after = self._call(worker.retries)
        except RankError as error:
            self._failed(name, _sentence(error))
            return False
        self.waves.append(wave)
        self.retries = max(self.retries, *(b - a for a, b in zip(before, after, strict=True)))
        for name in (one for one in new if self.entries[one].ours):
            self._note(name, bubble=self._beside(worker.bubble, name))
        self._profiles(new)
        return True

    def _profiles(self, names: Sequence[str]) -> None:
        """Of the fastest of either side."""
        for ours in (True, False) if self.traces is not None else ():
            if mine := [name for name in names if self.entries[name].ours == ours]:
                name = min(mine, key=self._median)
                path = f"{self.traces}/{self.task.what}-{self.layout}-{_file(name)}.json"
                self.say(self._beside(worker.profile, name, f"{self.layout}, {name}", path) or "")

    def _beside(self, fn: Callable[..., Any], name: str, *args: Any) -> Any:
        """What is asked besides its times. It costs no row: a failure is said, and None is the answer."""
        if name not in self.live:  # an earlier question has cost the ranks
            return None
        try:
            return self._call(fn, name, *args)[0]
        except RankError as error:
            self._let_go(name, _sentence(error))
            return None

    def _fastest(self, ours: bool) -> str | None:
        """Of a side, so far."""
        ran = [name for name in self._measured() if self.entries[name].ours == ours]
        ran = [name for name in ran if not self.entries[name].failed and name not in self.gone]
        return min(ran, key=self._median, default=None)

    def _partner(self) -> str | None:
        """Beside whom others are measured: hpnb's fastest so far."""
        return self._fastest(ours=True)

    def _measured(self) -> list[str]:
        return list(dict.fromkeys(name for wave in self.waves for name in wave))

    def _median(self, name: str) -> float:
        return statistics.median(second for wave in self.waves for second in wave.get(name, ()))

    # --- what is said ------------------------------------------------------------------------------------

    def _compared(self) -> Iterator[ProgramResult]:
        """Entries, of which those that compute another model have failed, hpnb's too."""
        known = worker.candidates(self.task.what, self.shape)
        mine = self._fastest(ours=True)
        truth = self.reference or (self.entries[mine].losses if mine else ())
        whose = "the plain model" if self.reference else mine
        for name, entry in self.entries.items():
            if not truth or entry.failed or not known[name].same:
                yield entry
                continue
            pairs = list(zip(truth, entry.losses, strict=True))
            apart = [not abs(a - b) <= _TOLERANCE[self.task.bits] * abs(a) for a, b in pairs]
            if any(apart):
                step = apart.index(True)
                right, wrong = pairs[step]
                told = f"the loss of step {step} is {wrong:.6f}, that of {whose} {right:.6f}"
                entry = replace(entry, failed=f"it does not train the same: {told}")
            yield entry

    def _note(self, name: str, **facts: Any) -> None:
        self.entries[name] = replace(self.entries[name], **facts)

    @property
    def lost(self) -> bool:
        """Whether the ranks of the last call are gone."""
        return self._pool is None or not self._pool.alive

    def _call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        self._pool = pool = self.among.of(self.shape.ranks)
        try:
            return pool.run(fn, *args)
        except RankInterrupt:  # Ctrl-C, and no failure of a program
            raise KeyboardInterrupt from None


def _sentence(error: RankError) -> str:
    """The first line of what a rank said, without its frames."""
    lines = [line.strip() for line in error.summary.splitlines() if line.strip()]
    return " ".join(lines)[:300]


def _not_finite(losses: Sequence[float]) -> str:
    """A sentence about the first that is NaN or infinite; empty if none is."""
    found = (step for step, loss in enumerate(losses) if not math.isfinite(loss))
    return next((f"the loss of step {step} is {losses[step]}" for step in found), "")


def _file(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")
