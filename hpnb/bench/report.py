"""One table for every benchmark: what ran, its median and quartiles, and the ratio to the first row.

Candidates take turns within one run (A B C A B C ...), so a machine that slows down slows all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Seconds of one candidate over all rounds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def interleave(candidates: Mapping[str, Callable[[], object]], rounds: int) -> list[Row]:
    """Run every candidate `rounds` times, in turn; wall seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return [Row(name, tuple(times)) for name, times in seconds.items()]


def table(title: str, rows: list[Row]) -> str:
    """Rows as text; the ratio says how many times as long as the first row each one took."""
    width = max(len(row.name) for row in rows)
    lines = [title, f"{'':{width}}  {'median':>10}  {'quartiles':>21}  {'ratio':>7}"]
    for row in rows:
        low, high = row.quartiles
        span = f"{low * 1e3:.2f} to {high * 1e3:.2f}"
        ratio = row.median / rows[0].median
        lines.append(f"{row.name:{width}}  {row.median * 1e3:7.2f} ms  {span:>18} ms  {ratio:7.2f}")
    return "\n".join(lines)
