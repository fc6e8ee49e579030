"""Chaos in options and run files: each is refused in a sentence, or runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import chaos_options as program
import pytest
import torch
from chaos_tally import Tally, tally

import hpnb

SEVERITY = ("wrong", "named", "unharmed")


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Tally]:
    with tally("options and run files", request) as made:
        yield made


def ranks_for(options: dict[str, Any]) -> int:
    """As many as one replica takes, or two."""
    plugin = program.make(options)
    return max(2, plugin.pp_size * plugin.tp_size)


def run_on(counts: Tally, ranks: int, kind: str, work: list[tuple[Any, ...]]) -> None:
    """Call the first of each on ranks with the rest; a pool that ends is replaced."""
    pool = None
    try:
        for fn, *args in work:
            if pool is None or not pool.alive:
                pool = hpnb.Ranks(ranks, device="cpu", timeout=30)
            began = time.perf_counter()
            try:
                found = pool.run(fn, *args)
                outcome, text = min(found, key=lambda one: SEVERITY.index(one[0]))
            except hpnb.RankError as error:
                outcome, text = "wrong", error.summary
            shown = str(args[0])[:300]
            counts.add(kind, outcome, time.perf_counter() - began, f"{text} for {shown}")
    finally:
        if pool is not None:
            pool.close()


def try_options(counts: Tally, number: int, seed: int, most_runs: int | None = None) -> None:
    draw = Random(seed)
    to_run: dict[int, list[dict[str, Any]]] = {}
    for _ in range(number):
        options = program.draw_options(draw)
        try:
            ranks = ranks_for(options)
        except Exception as error:
            outcome = "named" if program.is_sentence(error, program.NAMES) else "wrong"
            counts.add("options of a plugin", outcome, 0.0, f"{type(error).__name__}: {error} for {options}")
            continue
        if ranks <= 4:
            to_run.setdefault(ranks, []).append(options)
        else:
            counts.add("options for more ranks than are here, made only", "unharmed")
    for ranks, of_ranks in sorted(to_run.items()):
        work = [(program.train, options, draw.choice(["vit", "gpt2"])) for options in of_ranks[:most_runs]]
        run_on(counts, ranks, "options of a plugin, a step trained", work)
    counts.check()


def try_files(counts: Tally, number: int, seed: int, folder: Path, most_runs: int | None = None) -> None:
    draw, to_run = Random(seed), list[Any]()
    for i in range(number):
        content = program.mutate_text(draw) if i % 3 == 0 else program.mutate_tables(draw)
        outcome, text, file = program.read(copy.deepcopy(content), folder)
        if file is None:
            counts.add("run files", outcome, 0.0, f"{text} for {content!r}"[:600])
        else:
            to_run.append(file)
    work = [(program.run_file, file, folder / f"run-{i}") for i, file in enumerate(to_run[:most_runs])]
    run_on(counts, 2, "run files, trained", work)
    counts.check()


def test_drawn_options(counts: Tally) -> None:
    try_options(counts, 300, seed=0, most_runs=5)


def test_mutated_run_files(counts: Tally, tmp_path: Path) -> None:
    try_files(counts, 100, 0, tmp_path, most_runs=3)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_five_hundred_drawn_options(counts: Tally) -> None:
    try_options(counts, 500, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_two_hundred_mutated_run_files(counts: Tally, tmp_path: Path) -> None:
    try_files(counts, 200, 1, tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_norm", "1"), ("ddp_bucket_cap_mb", torch.zeros(2)), ("hysteresis", None), ("precision", []),
        ("communication_dtype", torch.int32), ("cut", {1: 2}), ("seed", -1), ("cpu_offload", 1.5),
        ("num_microbatches", 10**9), ("max_scale", float("nan")), ("loss_chunk", True), ("cut", [0, 4]),
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_type_is_named(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        hpnb.HybridParallelPlugin(**{option: value})
