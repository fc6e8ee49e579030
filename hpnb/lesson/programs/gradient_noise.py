"""A small GPT-2 trained to a test loss with some batch size: what notebook 05 runs to see what a batch buys.

AdamW with a learning rate that grows with the square root of the batch: Malladi et al. 2022 (2205.10287).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import hpnb
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.lesson.programs.gpt2_zero import seeded_gpt2
from hpnb.lesson.values import record
from hpnb.models import GPT2Size
from hpnb.theory import steps_at

RATE, ROWS = 1.4e-3, 8  # the learning rate at so many rows
TEST_EVERY = 5  # steps


class TrainedModel(NamedTuple):
    """A model on this rank, how many steps it took, and whether its test loss is below the target."""

    model: Any
    steps: int
    reached: bool


def token_rows(size: GPT2Size, split: str) -> torch.Tensor:
    """(n, size.length) tokens of English, in random order; 32 rows of the test split."""
    text = hpnb.data.text(
        split, 32 if split == "test" else None, vocab_size=size.vocab_size, block=size.length
    )
    rows = torch.stack([text[i]["input_ids"] for i in range(len(text))])
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def train_to_loss(
    size: GPT2Size,
    rows: torch.Tensor,
    test: torch.Tensor,
    batch: int,
    target: float,
    seed: int = 1,
    max_steps: int = 400,
) -> TrainedModel:
    """Train until the loss of `test` (n, s) is below `target`. Every rank calls it, with equal arguments.

    A batch has rows over all ranks; each rank takes its share. `seed` is of the order of rows.
    """
    axis, device = all_ranks("dp"), hpnb.device()
    model = seeded_gpt2(size)
    replica = hpnb.DataParallel(model, axis, average=False)  # shares of a batch may be unequal
    rate = RATE * (batch / ROWS) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    generator, test_ids = torch.Generator().manual_seed(seed), test.to(device)
    for step in range(1, max_steps + 1):
        chosen = torch.randint(len(rows), (batch,), generator=generator)  # the same on all ranks
        ids = rows[chosen[axis.rank :: axis.size]].to(device)
        optimizer.zero_grad()
        (replica(input_ids=ids, labels=ids).loss * len(ids) / batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % TEST_EVERY == 0:
            with torch.no_grad():
                if model(input_ids=test_ids, labels=test_ids).loss.item() < target:
                    return TrainedModel(_copy(model, size), step, True)
    return TrainedModel(_copy(model, size), max_steps, False)


def _copy(model: Any, size: GPT2Size) -> Any:
    """The weights in a model without a reducer, so that its gradients stay on the rank."""
    copy = seeded_gpt2(size)
    copy.load_state_dict(model.state_dict())
    return copy


def steps_to_loss(
    size: GPT2Size, rows: torch.Tensor, test: torch.Tensor, batch: int, target: float, repeats: int = 2
) -> float:
    """The mean steps of runs that draw their rows in different orders. Every rank calls it."""
    runs = [train_to_loss(size, rows, test, batch, target, seed) for seed in range(1, repeats + 1)]
    return sum(run.steps for run in runs) / repeats


def mean_steps(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: torch.Tensor,
    test: torch.Tensor,
    repeats: Mapping[int, int],
    target: float,
) -> dict[int, float]:
    """{batch: mean steps of its runs to the loss `target`}, for {batch: runs}."""
    return {
        batch: pool.run(steps_to_loss, size, rows, test, batch, target, runs)[0]
        for batch, runs in repeats.items()
    }


def record_doublings(
    steps: Mapping[int, float], repeats: Mapping[int, int], fewest: float, noise: float
) -> None:
    """Record under 05.doublings by what doubled batches divide the steps, the last also by `theory.steps_at`;
    and in words whether the last one saves less than all others. 05.repeats says how many runs a batch had,
    and 05.fitted the noise scale. There must be at least two doublings.
    """
    saved = [steps[a] / steps[b] for a, b in pairwise(steps)]
    *_, before, last = steps
    law = steps_at(before, fewest, noise) / steps_at(last, fewest, noise)
    wall = "The last doubling saved least, as the law says."
    none = f"Up to {max(steps)} samples, this run shows no wall."
    measured = {
        "least": min(saved),
        "most": max(saved),
        "wall": wall if saved[-1] < min(saved[:-1]) else none,
    }
    fewest_runs, most_runs = min(repeats.values()), max(repeats.values())
    runs = f"{most_runs} runs" if fewest_runs == most_runs else f"up to {most_runs} runs"
    record("05.repeats", {"words": f"average {runs}" if most_runs > 1 else "take one run"})
    record("05.fitted", noise, "samples")
    record("05.doublings", {**measured, "law-last": law})
