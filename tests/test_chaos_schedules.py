"""Chaos in schedules: a list with a fault is refused, and what is accepted computes what one process does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

import chaos_schedules as program
import pytest
from chaos_tally import Tally, tally

import hpnb


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with tally("schedules", request) as made:
        yield made


def try_mutants(counts: Tally, number: int, seed: int, most_runs: int | None = None) -> None:
    draw = Random(seed)
    accepted: dict[int, list[tuple[str, list[str]]]] = {}
    for _ in range(number):
        kind, mutant = program.mutate(program.original(draw), draw)
        began = time.perf_counter()
        try:
            reason = program.verdict(mutant)
        except Exception as error:
            counts.add(kind, "wrong", 0.0, f"{type(error).__name__}: {error}; {program.write(mutant)}")
            continue
        if reason is None:
            accepted.setdefault(mutant.ranks, []).append((kind, program.write(mutant)))
        else:
            counts.add(kind, "named", time.perf_counter() - began, reason)
    for ranks, of_ranks in sorted(accepted.items()):
        chosen = of_ranks if most_runs is None else of_ranks[:most_runs]
        with hpnb.Ranks(ranks, device="cpu", timeout=400) as pool:
            found = pool.run(program.run_all, [lists for _, lists in chosen])
        for number_of, (kind, lists) in enumerate(chosen):
            off = program.distance(lists, [one[number_of] for one in found])
            outcome = "unharmed" if off <= program.EXACT else "wrong"
            counts.add(kind, outcome, 0.0, f"off by {off:.1e}: {lists}")
    counts.check()


def test_mutated_schedules(counts: Tally) -> None:
    try_mutants(counts, 300, seed=0, most_runs=5)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_two_thousand_mutated_schedules(counts: Tally) -> None:
    try_mutants(counts, 2000, seed=1)


def test_a_wrong_schedule_would_be_noticed() -> None:
    lists = program.write(program.original(Random(3)))
    ranks = [program.gradients_of_one_process(4, 5)]
    assert program.distance(lists, ranks) > program.EXACT
