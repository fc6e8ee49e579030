"""Notebook 09: fit a model into a cluster, say which link is half as fast, how often to save."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from hpnb.lesson.exercises.checker import Exercise, Finding
from hpnb.lesson.programs import cluster_planning
from hpnb.lesson.tables import number
from hpnb.mesh import ParallelLayout
from hpnb.theory import Link
from hpnb.theory.cluster import (
    Cluster,
    GPTRun,
    cluster_memory,
    cluster_parts,
    refusal,
)
from hpnb.theory.failures import Failures, mean_time_between, save_interval, trained_share
from hpnb.theory.planner import best_layout
from hpnb.theory.published_runs import CHECKPOINT_BYTES, LLAMA_3_EACH, WRITERS, WRITTEN

# --- fit a model into a cluster ----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A model to be trained on all GPUs of a cluster.

    Attributes:
        run: `.layers`, `.heads`, `.batch` and so on.
        gpus, memory: how many there are, and bytes of each.
    """

    run: GPTRun
    cluster: Cluster

    @property
    def gpus(self) -> int:
        return self.cluster.gpus

    @property
    def memory(self) -> float:
        return self.cluster.memory

    def seconds(self, plan: ParallelLayout) -> float:
        """Of a step."""
        return sum(cluster_parts(self.run, self.cluster, plan).values())

    def held(self, plan: ParallelLayout) -> float:
        """Bytes of the fullest rank."""
        return cluster_memory(self.run, plan)

    def refused(self, plan: ParallelLayout) -> str | None:
        """Why the plan cannot be run, memory aside; None if it can."""
        return refusal(self.run, self.cluster, plan)


_GPT3, _SMALLER = cluster_planning.MODELS["145.6B"], cluster_planning.MODELS["39.1B"]
JOBS = {
    "145.6B on 1,536 GPUs of 80 GB": Job(_GPT3, cluster_planning.cluster(1536)),
    "145.6B on 1,024 GPUs of 40 GB": Job(_GPT3, cluster_planning.cluster(1024, memory=40e9)),
    "39.1B on 512 GPUs of 40 GB, one Ethernet card a host": Job(
        _SMALLER, cluster_planning.cluster(512, "Ethernet 100 Gb, a card a host", memory=40e9)
    ),
}


def _verify_fit(fit: Callable[[Job], Any]) -> Sequence[Finding]:
    findings = []
    for name, job in JOBS.items():
        plan = fit(job)
        if not isinstance(plan, ParallelLayout):
            findings.append(Finding(False, f"{name}: {plan!r} is no ParallelLayout"))
        elif (why := job.refused(plan)) is not None:
            findings.append(Finding(False, f"{name}: {why}"))
        elif job.held(plan) > job.memory:
            held = f"{number(job.held(plan), 'B')}, more than {number(job.memory, 'B')}"
            findings.append(Finding(False, f"{name}: {plan} holds {held}"))
        else:
            best = min(job.seconds(best_layout(job.run, job.cluster, zero)) for zero in (0, 1))
            more = job.seconds(plan) / best - 1
            words = f"{name}: {plan} takes {number(job.seconds(plan), 's')}, {100 * more:.1f} % over the best"
            findings.append(Finding(more <= 0.05, f"{words}, at most 5 %"))
    return findings


fit = Exercise("09.1", "fit 145.6B", 20, _verify_fit)


# --- a link that is half as fast ---------------------------------------------------------------------

INSIDE, BETWEEN, MATMULS = "inside", "between", "matmuls"


@dataclass(frozen=True)
class Row:
    """A layout: seconds of a step as measured last week, and today. It fits."""

    plan: ParallelLayout
    before: float
    after: float


def weeks() -> list[tuple[str, list[Row], str]]:
    """Clusters on which one thing is half as fast since last week: (words, rows in no order, what).

    No threshold of seconds or of slowness tells the causes apart: rows of tp 1 slow by as much in the second
    as in the fourth, and the most in the sixth is the most in the fifth.
    """
    found, shuffle = [], random.Random(9).shuffle
    for model, gpus, batch, network, what in (
        ("39.1B", 256, 256, "HDR, a card a GPU", BETWEEN),
        ("39.1B", 256, 1536, "HDR, a card a GPU", BETWEEN),
        ("39.1B", 1024, 256, "HDR, a card a GPU", INSIDE),
        ("7.5B", 128, 256, "HDR, a card a GPU", INSIDE),
        ("39.1B", 512, 512, "Ethernet 100 Gb, a card a GPU", MATMULS),
        ("7.5B", 512, 256, "Ethernet 100 Gb, a card a host", BETWEEN),
        ("7.5B", 256, 1536, "Ethernet 100 Gb, a card a host", BETWEEN),
    ):
        run, given = (
            replace(cluster_planning.MODELS[model], batch=batch),
            cluster_planning.cluster(gpus, network),
        )
        today = {
            INSIDE: replace(given, inside=_half(given.inside)),
            BETWEEN: replace(given, between=_half(given.between)),
            MATMULS: replace(given, share=given.share / 2),
        }[what]
        rows = []
        for pp, tp in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
            plan = ParallelLayout(gpus // pp // tp, pp, tp, zero_stage=1)
            if refusal(run, given, plan) is None and cluster_memory(run, plan) <= given.memory:
                seconds = [sum(cluster_parts(run, one, plan).values()) for one in (given, today)]
                rows.append(Row(plan, *seconds))
        shuffle(rows)
        found.append((f"{model}, {batch:,} rows on {gpus:,} GPUs, {network}", rows, what))
    return found


def _half(link: Link) -> Link:
    return replace(link, bandwidth=link.bandwidth / 2)


def _verify_halved(diagnose: Callable[[list[Row]], Any]) -> Sequence[Finding]:
    findings = []
    for words, rows, what in weeks():
        answer = diagnose(list(rows))
        best = min(rows, key=lambda row: row.after).plan
        if not (isinstance(answer, tuple | list) and len(answer) == 2):
            findings.append(Finding(False, f"{words}: {answer!r} is not a pair (what, plan)"))
            continue
        said, plan = answer
        findings.append(
            Finding(said == what, f"{words}: {said}" + ("" if said == what else ", and it is something else"))
        )
        known = {row.plan: row.after for row in rows}
        if plan not in known:
            findings.append(Finding(False, f"{words}: {plan} is not among the rows"))
            continue
        more = known[plan] / known[best] - 1
        findings.append(
            Finding(more <= 0.01, f"{words}: {plan} is now {100 * more:.1f} % over the fastest of the rows")
        )
    return findings


halved = Exercise("09.2", "half a link", 20, _verify_halved)


# --- how often to save -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A run that is to be saved.

    Attributes:
        gpus: of the run.
        each: seconds in which one GPU stops the run once, on average.
        parameters: of the model.
        bytes_each: of a checkpoint, a parameter.
        restart: seconds from a failure until training goes on.
    """

    gpus: int
    each: float
    parameters: float
    bytes_each: float = CHECKPOINT_BYTES
    restart: float = 300.0

    @property
    def written(self) -> float:
        """Bytes/s that the file system takes from all hosts together: of few hosts less than it could."""
        return WRITTEN * min(1.0, self.gpus / WRITERS)

    @property
    def failures(self) -> Failures:
        save = self.parameters * self.bytes_each / self.written
        return Failures(mean_time_between(self.gpus, self.each), save, self.restart)


_SAVED = {
    "1.7B on 32 GPUs": Saved(32, LLAMA_3_EACH, 1.7e9),
    "145.6B on 1,536 GPUs": Saved(1536, LLAMA_3_EACH, 145.6e9),
    "529.6B on 16,384 GPUs": Saved(16384, LLAMA_3_EACH, 529.6e9),
}
_NEAR = 1.01  # of the time that must be lost: first order passes, and more exact formulas do


def _verify_saves(interval: Callable[[Saved], Any]) -> Sequence[Finding]:
    findings = []
    for name, run in _SAVED.items():
        found, given = interval(run), run.failures
        young = save_interval(given)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            findings.append(Finding(False, f"{name}: {found!r} is no number of seconds above 0"))
            continue
        least = min(1 - trained_share(given, young * (0.5 + n / 200)) for n in range(201))
        lost = 1 - trained_share(given, float(found))
        words = f"{name}: saving every {number(found, 's')} loses {100 * lost:.2f} % of the time"
        findings.append(Finding(lost <= _NEAR * least, f"{words}, at best {100 * least:.2f} %"))
    return findings


saves = Exercise("09.3", "how often to save", 15, _verify_saves)
