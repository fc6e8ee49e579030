"""Programs that train one model on the same ranks take turns, so that a busy moment falls on all of them.

One layout: its programs are built, take turns, and are dropped; one that fails costs its own row only.

    wave       hpnb's, and as many peers as fit in memory beside them: A B C | B C A | C A B ...
    next wave  hpnb's best, and the peers that are left
    alone      a peer that fits beside no other: hpnb's best, the peer, hpnb's best, the peer, each built anew
    repeat     hpnb's best and the best peer once more, the peer built first: who is built first has memory
               first, and of several programs the best so far was lucky too

Ranks that diverge in the middle of a collective are lost. So after a failure new ranks are started, and what
lived on the old ones is built again. Times that a program has stay, whatever becomes of it later.
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
from hpnb.bench import tables, worker
from hpnb.bench.program import Candidate
from hpnb.bench.results import LayoutResult, ProgramResult, take_turns
from hpnb.bench.tasks import TrainingTask
from hpnb.bench.worker import ProgramStart
from hpnb.mesh import ParallelLayout

_TOLERANCE = {
    16: 2e-3,
    32: 1e-5,
    64: 1e-10,
}  # of the first losses, by bits: weights begin alike, and batches are the same
_USABLE_MEMORY = 0.93  # of a GPU's: the rest is NCCL's, and lies between tensors
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "OUT_OF_MEMORY")
Say = Callable[[str], None]


class RankPools:
    """Ranks that stay from layout to layout, and are started again if they were lost."""

    def __init__(self, device: str, timeout: float) -> None:
        self.device, self.timeout = device, timeout
        self._pool: hpnb.Ranks | None = None
        self._references: dict[TrainingTask, tuple[float, ...]] = {}

    def get(self, ranks: int) -> hpnb.Ranks:
        if self._pool is None or not self._pool.alive or self._pool.size != ranks:
            self.close()
            self._pool = hpnb.Ranks(ranks, device=self.device, timeout=self.timeout)
        return self._pool

    def reference_losses(self, task: TrainingTask, ranks: int, say: Say) -> tuple[float, ...]:
        """The first losses of the plain model, for all layouts of a task; none where it does not fit."""
        if task not in self._references:
            try:
                self._references[task] = tuple(self.get(ranks).run(worker.reference_losses, task)[0])
            except RankInterrupt:
                raise
            except RankError as error:
                say("the plain model did not run, so losses are compared with those of hpnb's first program: "
                    f"{_summary(error)}")  # fmt: skip
                self._references[task] = ()
        return self._references[task]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@contextmanager
def rank_pools(device: str, timeout: float) -> Iterator[RankPools]:
    pools = RankPools(device, timeout)
    try:
        yield pools
    finally:
        pools.close()


class LayoutBenchmark:
    """The programs of one layout.

    Args:
        pools: the ranks on which programs live.
        task: what all of them train.
        name, layout: of the ranks.
        candidates: the programs, hpnb's in front.
        rounds: steps of each program that count.
        traces: a folder for Chrome traces of the fastest program of either side of each wave.
        say: gets what is worth a line while it runs.
        reference: the first losses of the plain model, to which all programs are compared before they are
            timed; without them, to hpnb's first program that starts.
        repeat_best: whether the best of both sides are measured once more.
        count_bytes: whether the bytes that leave a rank in a step are counted, by a step of its own.
    """

    def __init__(
        self,
        pools: RankPools,
        task: TrainingTask,
        name: str,
        layout: ParallelLayout,
        candidates: Sequence[Candidate],
        rounds: int,
        *,
        traces: str | None,
        say: Say,
        reference: Sequence[float] = (),
        repeat_best: bool = False,
        count_bytes: bool = False,
    ) -> None:
        self.pools, self.task, self.name, self.layout = pools, task, name, layout
        self.rounds, self.traces, self.say = rounds, traces, say
        self.repeat_best, self.count_bytes = repeat_best, count_bytes
        self.expected_losses, self.source = tuple(reference), "the plain model"
        self.candidates = {candidate.name: candidate for candidate in candidates}
        self.waiting = list(self.candidates)
        self.too_large: list[str] = []  # fits beside no other program
        self.live: list[str] = []
        self.failed_later: set[str] = set()  # has times, and failed when others were to be compared with it
        self.entries = {name: ProgramResult(name, one.ours) for name, one in self.candidates.items()}
        self.starts: dict[str, ProgramStart] = {}
        self.waves: list[dict[str, list[float]]] = []
        self.retries = 0
        self._pool: hpnb.Ranks | None = None

    def run(self) -> LayoutResult:
        """All waves."""
        self._call(worker.drop)
        matmul = min(self._call(worker.matmul_rate, self.task.bits))
        while self.waiting:
            self._start_those_that_fit()
            while any(one not in self._measured() for one in self.live) and not self._take_rounds(
                self.rounds
            ):
                pass  # one failed, and those that are left begin again
            if self.waiting and len(self.live) == 1 and not self._one_more_fits():
                self.too_large.append(self.waiting.pop(0))
            self._keep(self._fastest(ours=True) if self.waiting else None)
        for one in self.too_large:
            self._measure_alternately(one)
        if self.repeat_best:
            self._measure_best_again()
        self._keep(None)
        return LayoutResult(
            self.name, self.layout.world_size, self.task.unit, self.task.units, float(self.task.flops),
            matmul, tuple(self._check_losses()), tuple(self.waves), self.retries,
        )  # fmt: skip

    # --- which programs live -----------------------------------------------------------------------------

    def _start_those_that_fit(self) -> None:
        """Start programs as long as memory lasts, hpnb's best so far first."""
        while self.waiting:
            best = self._fastest(ours=True)
            if best is not None and best not in self.live:  # its ranks were lost
                self._start(best)
            if self.live and not self._one_more_fits():
                return
            name, beside = self.waiting.pop(0), bool(self.live)
            if self._start(name) or not beside:
                continue
            if any(word in self.entries[name].failed for word in _OUT_OF_MEMORY):
                self.too_large.append(name)

    def _start(self, name: str) -> bool:
        """Whether it lives now; if not, its entry says why, unless there are times in it."""
        self._note(name, failed="")
        try:
            starts = self._call(worker.start, self.task, self.layout, self.candidates[name])
        except RankError as error:
            self._fail(name, _summary(error))
            return False
        largest = max(starts, key=lambda start: start.peak)
        wrong = largest.refused or _find_not_finite(largest.losses) or self._find_other(name, largest.losses)
        if wrong:
            self._fail(name, wrong)
            return False
        if not self.expected_losses and self.entries[name].ours and self.candidates[name].same:
            self.expected_losses, self.source = largest.losses, name
        self.starts[name] = largest
        self._note(name, losses=largest.losses, held=largest.held, peak=largest.peak)
        self.live.append(name)
        return True

    def _fail(self, name: str, why: str) -> None:
        """Note it. A program that has times keeps them, and is not built again."""
        if name in self._measured():
            self.failed_later.add(name)
            self._note(name, lost=why)
        else:
            self._note(name, failed=why)
        self._remove(name, why)

    def _remove(self, name: str, why: str) -> None:
        """Drop it. If ranks were lost, programs that lived there and were not measured wait again."""
        self.say(f"{self.name}, {name}: {why}")
        others = [one for one in self.live if one != name]
        if self._pool is None or not self._pool.alive:
            measured = self._measured()
            self.waiting[:0] = [one for one in others if one not in measured]
            others = []
        self._keep(*others)

    def _one_more_fits(self) -> bool:
        """Whether one more is likely to fit: it is assumed to be as large as the largest."""
        starts = [self.starts[name] for name in self.live]
        peak = max(start.peak for start in starts)
        limit = _USABLE_MEMORY * starts[0].total
        return not peak or sum(start.held for start in starts) + 1.15 * peak < limit

    def _keep(self, *names: str | None) -> None:
        self.live = [one for one in self.live if one in names]
        self._call(worker.drop, tuple(self.live))

    def _measure_alternately(self, name: str) -> None:
        """A program that fits beside no other, and hpnb's best: half of the rounds each, and again. If either
        fails in the second half, the rounds of the first stand."""
        best, halves = self._fastest(ours=True), (self.rounds - self.rounds // 2, self.rounds // 2)
        programs = [best, name] if best else [name]
        wave: dict[str, list[float]] = {}
        for rounds in (rounds for rounds in halves if rounds):
            half: dict[str, list[float]] = {}
            for one in programs:
                seconds = self._measure_alone(one, rounds)
                if seconds is None:
                    if wave:
                        self.say(f"{self.name}, {name}: {len(wave[name])} rounds of {self.rounds} count")
                    elif one != name:  # hpnb's best failed
                        self._measure_alternately(name)
                    return
                half[one] = seconds
            if not wave:
                self.waves.append(wave)
            for one, seconds in half.items():
                wave.setdefault(one, []).extend(seconds)

    def _measure_alone(self, name: str, rounds: int) -> list[float] | None:
        """Seconds of a program that has the ranks to itself; None if it failed."""
        self._keep()
        return self.waves.pop()[name] if self._start(name) and self._take_rounds(rounds) else None

    def _measure_best_again(self) -> None:
        """The best of both sides, built in the opposite order; times that they have stay, should one fail."""
        best, peer = self._fastest(ours=True), self._fastest(ours=False)
        if best is None or peer is None or peer in self.too_large:
            return
        self._keep()
        if self._start(peer) and self._one_more_fits() and self._start(best):
            self._take_rounds(self.rounds)

    # --- rounds ------------------------------------------------------------------------------------------

    def _take_rounds(self, rounds: int) -> bool:
        """One step of each live program a round; another one begins each time. Whether all have times."""
        new = [name for name in self.live if name not in self._measured()]
        wave: dict[str, list[float]] = {name: [] for name in self.live}
        name = self.live[0]
        try:
            before = self._call(worker.count_retries)
            for name in take_turns(list(self.live), rounds):
                wave[name].append(self._call(worker.time_one_step, name)[0])
            after = self._call(worker.count_retries)
        except RankError as error:
            self._fail(name, _summary(error))
            return False
        self.waves.append(wave)
        self.retries = max(self.retries, *(b - a for a, b in zip(before, after, strict=True)))
        for name in (one for one in new if self.entries[one].ours):
            self._note(name, bubble=self._ask(worker.measure_bubble, name))
        for name in new if self.count_bytes else ():
            self._note(name, sent=self._ask(worker.count_bytes, name) or 0.0)
        for ours in (True, False) if self.traces is not None else ():
            if of_side := [one for one in new if self.entries[one].ours == ours]:
                name = min(of_side, key=self._median)
                file = "".join(c if c.isalnum() else "-" for c in name).strip("-")
                path = f"{self.traces}/{self.task.what}-{self.name}-{file}.json"
                self.say(self._ask(worker.profile, name, f"{self.name}, {name}", path) or "")
        return True

    def _ask(self, fn: Callable[..., Any], name: str, *args: Any) -> Any:
        """Something besides its times. It costs no row: a failure is said, and the answer is None."""
        if name not in self.live:  # an earlier question has cost the ranks
            return None
        try:
            return self._call(fn, name, *args)[0]
        except RankError as error:
            self._remove(name, _summary(error))
            return None

    def _fastest(self, ours: bool) -> str | None:
        """hpnb's fastest program so far, beside which others are measured; or the fastest peer."""
        ran = [name for name in self._measured() if self.entries[name].ours == ours]
        ran = [name for name in ran if not self.entries[name].failed and name not in self.failed_later]
        return min(ran, key=self._median, default=None)

    def _measured(self) -> list[str]:
        return list(dict.fromkeys(name for wave in self.waves for name in wave))

    def _median(self, name: str) -> float:
        return statistics.median(second for wave in self.waves for second in wave.get(name, ()))

    # --- results -----------------------------------------------------------------------------------------

    def _find_other(self, name: str, losses: Sequence[float]) -> str:
        """A sentence about the first loss that another model would have; empty if there is none."""
        if not self.candidates[name].same or not self.expected_losses:
            return ""
        tolerance = _TOLERANCE[self.task.bits]
        for step, (a, b) in enumerate(zip(self.expected_losses, losses, strict=True)):
            if not abs(a - b) <= tolerance * abs(a):
                return (
                    f"it does not train the same: the loss of step {step} is {b:.6f}, that of {self.source} "
                    f"{a:.6f}"
                )
        return ""

    def _check_losses(self) -> Iterator[ProgramResult]:
        """The entries. A program that started before there was anything to compare with fails here."""
        for name, entry in self.entries.items():
            failed = entry.failed or (self._find_other(name, entry.losses) if entry.losses else "")
            yield replace(entry, failed=failed)

    def _note(self, name: str, **facts: Any) -> None:
        self.entries[name] = replace(self.entries[name], **facts)

    def _call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        self._pool = pool = self.pools.get(self.layout.world_size)
        try:
            return pool.run(fn, *args)
        except RankInterrupt:  # Ctrl-C, and no failure of a program
            raise KeyboardInterrupt from None


def print_contest(
    pools: RankPools,
    task: TrainingTask,
    name: str,
    layout: ParallelLayout,
    candidates: Sequence[Candidate],
    rounds: int,
    *,
    traces: str | None = None,
    count_bytes: bool = False,
) -> LayoutResult:
    """Measure these programs of a layout, and print their rows."""
    print(f"{task.title}: {layout.world_size} ranks on {pools.device}, {rounds} rounds", flush=True)
    result = LayoutBenchmark(
        pools, task, name, layout, candidates, rounds, traces=traces, say=say_indented, repeat_best=True,
        count_bytes=count_bytes,
    ).run()  # fmt: skip
    print(tables.head(task.unit), *tables.layout_rows(result), sep="\n", end="\n\n", flush=True)
    return result


def say_indented(text: Any) -> None:
    """Print what happens between rows, if it is anything."""
    if text:
        print(f"    {text}", flush=True)


def _summary(error: RankError) -> str:
    """What a rank said, in one line and without its frames."""
    lines = [line.strip() for line in error.summary.splitlines() if line.strip()]
    return " ".join(lines)[:300]


def _find_not_finite(losses: Sequence[float]) -> str:
    """A sentence about the first loss that is NaN or infinite; empty if none is."""
    steps = (step for step, loss in enumerate(losses) if not math.isfinite(loss))
    return next((f"the loss of step {step} is {losses[step]}" for step in steps), "")
