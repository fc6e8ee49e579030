"""What was measured, as data: printed at once, written to a file, and read again for the tables.

A ratio compares speeds, hpnb's over the peer's, so above 1 hpnb is ahead. It is taken round by round on the
same ranks: both programs took that step shortly one after the other. Two programs that do not fit in memory
together are further apart in time, because each was built anew for half of its rounds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
LAST_DIGIT = 2.0**-23  # of a float32


def take_turns(names: Sequence[T], rounds: int) -> Iterator[T]:
    """Each name once a round, and another one first in the next: A B C, B C A, C A B, ..."""
    for first in range(rounds):
        for i in range(len(names)):
            yield names[(first + i) % len(names)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower and upper quartile)."""
    if len(values) < 2:
        return (values[0],) * 3
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), low, high


def distance_over_noise(distance: float, noise: float) -> float:
    """Of losses: how many times as far as another order of sums is."""
    return distance / max(noise, LAST_DIGIT)


@dataclass(frozen=True)
class ProgramResult:
    """One program in one layout.

    Attributes:
        losses: of the first steps.
        held, peak: bytes of the rank with most, between steps and at most; 0 without a GPU.
        bubble: measured and simulated idle share of a pipeline.
        sent: bytes that leave a rank in a step, of the rank with most; 0 where they were not counted.
        sent_rank: that rank, where it is known.
        distance: of what it computed from what one process computes, the largest relative norm; where that
            was compared.
        failed: why there are no times, in a sentence.
        lost: why it has fewer rounds than others, where it failed after it had times.
    """

    name: str
    ours: bool
    losses: tuple[float, ...] = ()
    held: int = 0
    peak: int = 0
    bubble: tuple[float, float] | None = None
    sent: float = 0.0
    sent_rank: int | None = None
    distance: float = 0.0
    failed: str = ""
    lost: str = ""


@dataclass(frozen=True)
class LayoutResult:
    """One layout.

    Attributes:
        ranks: that share a step.
        unit, units: what a step has: tokens or images, over all ranks.
        flops: of a step, over all ranks.
        matmul: FLOP/s of products alone, the least of all ranks, in the same run.
        waves: seconds of steps, {name: one a round}, of programs that took turns.
        retries: of the allocator during the rounds, the most of a rank; above 0 memory was too tight.
    """

    layout: str
    ranks: int
    unit: str
    units: int
    flops: float
    matmul: float
    entries: tuple[ProgramResult, ...]
    waves: tuple[dict[str, list[float]], ...] = ()
    retries: int = 0

    def seconds(self, name: str, beside: str | None = None) -> float | None:
        """The median of a program's steps.

        Args:
            beside: of those alone that it took in turns with this one, if there are any. A GPU is faster at
                one time than at another, and only so do speeds of two say what their ratio says.
        """
        every = [second for wave in self.waves for second in wave.get(name, ())]
        both = [second for wave in self.waves if beside in wave for second in wave.get(name, ())]
        return statistics.median(both or every) if every else None

    def shown(self, name: str) -> float | None:
        """Seconds of a step as tables show them: hpnb's best beside the best peer, and that beside it."""
        best = [one.name for one in map(self.fastest, (True, False)) if one is not None]
        other = next((one for one in best if one != name), None) if name in best else None
        return self.seconds(name, other)

    def ranked(self, ours: bool) -> list[ProgramResult]:
        """hpnb's programs, or the peers, the fastest first: by the median of all their steps. Those that
        failed do not count."""
        ran = [
            e for e in self.entries if e.ours == ours and not e.failed and self.seconds(e.name) is not None
        ]
        return sorted(ran, key=lambda e: self.seconds(e.name) or 0.0)

    def fastest(self, ours: bool) -> ProgramResult | None:
        """hpnb's best program, or the best peer: the first of `ranked`."""
        return next(iter(self.ranked(ours)), None)

    def ratio(self, ours: str, peer: str) -> tuple[float, float, float] | None:
        """(median, lower and upper quartile) of how many times as fast as the peer, over the rounds of waves
        that have both; None if there are none."""
        pairs = [
            peer_seconds / our_seconds
            for wave in self.waves
            if ours in wave and peer in wave
            for our_seconds, peer_seconds in zip(wave[ours], wave[peer], strict=True)
        ]
        return quartiles(pairs) if pairs else None

    def per_gpu(self, name: str) -> float:
        """Tokens or images a second, of one rank."""
        return self.units / (self.shown(name) or float("nan")) / self.ranks

    def tflops(self, name: str) -> float:
        """TFLOP/s of one rank; recomputation does not count."""
        return self.flops / (self.shown(name) or float("nan")) / self.ranks / 1e12

    def share(self, name: str) -> float:
        """Of the rate of products alone."""
        return self.tflops(name) * 1e12 / self.matmul


@dataclass
class BenchmarkRun:
    """One call of `python -m hpnb.bench gpt2-xl`, and where and when.

    Attributes:
        key: runs of equal keys measure the same thing, and belong in one table.
        scaling: {candidate: {ranks: units a second and rank}}.
        losses: {"steps": how many, "serial": one GPU's, "order": how far from it they are with rows in
            the opposite order, "units": the same with heads and units, where there was tp,
            "layouts": {"dp4 hpnb": {"distance": from serial, "losses": ...}}}; or empty.
        candidates: what `--candidates` asked for; empty if the usual programs were measured.
    """

    what: str
    key: str
    title: str
    date: str
    commit: str
    device: str
    ranks: int
    versions: dict[str, str]
    layouts: dict[str, LayoutResult] = field(default_factory=dict)
    scaling: dict[str, dict[str, float]] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)

    @property
    def microbatches(self) -> int:
        """Of a pipeline, where `--microbatches` set them; else 0, and it has the usual number."""
        *_, number, last = self.title.split()
        return int(number) if last == "microbatches" else 0

    @property
    def forward_samples(self) -> int:
        """Of a forward without a pipeline, where `--rows` set fewer than a rank's share of the batch; else
        0."""
        match = re.search(r"forwards of up to (\d+) samples", self.title)
        return int(match[1]) if match else 0

    def as_json(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> BenchmarkRun:
        """The run of a file.

        Raises:
            ValueError: not such a file.
        """
        if content.get("format") != 1:
            raise ValueError(f"format {content.get('format')!r} of results is not known; 1 is")
        rest = {name: value for name, value in content.items() if name not in ("format", "layouts")}
        return cls(**rest, layouts={name: _layout(one) for name, one in content["layouts"].items()})


def _layout(content: dict[str, Any]) -> LayoutResult:
    entries = tuple(
        ProgramResult(
            **{**e, "losses": tuple(e["losses"]), "bubble": tuple(e["bubble"]) if e["bubble"] else None}
        )
        for e in content["entries"]
    )
    return LayoutResult(**{**content, "entries": entries, "waves": tuple(content["waves"])})
