"""A small GPT-2 trained to a test loss with some batch size: what notebook 05 runs to see what a batch buys.

AdamW with a learning rate that grows with the square root of the batch: Malladi et al. 2022 (2205.10287).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import hpnb
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.lesson.programs.gpt2_zero import seeded_gpt2
from hpnb.lesson.values import claim, record
from hpnb.models import GPT2Size
from hpnb.theory import steps_at

RATE, ROWS = 1.4e-3, 8  # the learning rate at so many rows
TEST_EVERY, MAX_STEPS = 5, 400  # steps


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


class _Training:
    """A training on this rank that can go on later, to a lower loss."""

    def __init__(self, size: GPT2Size, rows: torch.Tensor, test: torch.Tensor, batch: int, seed: int) -> None:
        self.size, self.rows, self.test, self.batch = size, rows, test, batch
        self.axis, self.device = all_ranks("dp"), hpnb.device()
        self.model = seeded_gpt2(size)
        self.replica = hpnb.DataParallel(self.model, self.axis, average=False)  # shares may be unequal
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=RATE * (batch / ROWS) ** 0.5,
            betas=(0.9, 0.95),
            fused=True if self.device.type == "cpu" else None,  # a CPU would launch for each weight
        )
        self.generator, self.test_ids = torch.Generator().manual_seed(seed), test.to(self.device)
        self.steps = 0
        self.test_losses: dict[int, float] = {}  # {steps: loss}

    def reached(self, target: float) -> bool:
        """Whether the test loss is below `target` after the last step."""
        return self.test_losses.get(self.steps, float("inf")) < target

    def can_go_on(self, rows: torch.Tensor, test: torch.Tensor, target: float, max_steps: int) -> bool:
        """Whether a training on `rows` to `target` passes through this model."""
        passed = any(loss < target for step, loss in self.test_losses.items() if step < self.steps)
        same = torch.equal(self.rows, rows) and torch.equal(self.test, test)
        return same and not passed and self.steps <= max_steps

    def train(self, target: float, max_steps: int) -> None:
        while self.steps < max_steps and not self.reached(target):
            chosen = torch.randint(len(self.rows), (self.batch,), generator=self.generator)  # on all ranks
            ids = self.rows[chosen[self.axis.rank :: self.axis.size]].to(self.device)
            self.optimizer.zero_grad()
            (self.replica(input_ids=ids, labels=ids).loss * len(ids) / self.batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.steps += 1
            if self.steps % TEST_EVERY == 0:
                with torch.no_grad():
                    loss = self.model(input_ids=self.test_ids, labels=self.test_ids).loss
                self.test_losses[self.steps] = loss.item()


# The page trains to a loss of 6, to 5 with the same rows in the same order, and counts the steps of that run.
_trainings: dict[tuple[GPT2Size, int, int], _Training] = {}


def _train(
    size: GPT2Size, rows: torch.Tensor, test: torch.Tensor, batch: int, target: float, seed: int, limit: int
) -> _Training:
    """A training to `target`, or of `limit` steps: it goes on from an earlier one if that was on its way."""
    earlier = _trainings.pop((size, batch, seed), None)  # gone, should this one be interrupted
    steps = earlier.steps if earlier and earlier.can_go_on(rows, test, target, limit) else 0
    ends = torch.tensor([steps, -steps], device=hpnb.device())
    dist.all_reduce(ends, dist.ReduceOp.MIN)  # an interrupt may have stopped ranks at different steps
    if earlier is None or steps == 0 or ends[0] != -ends[1]:
        earlier = _Training(size, rows, test, batch, seed)
    earlier.train(target, limit)
    _trainings[size, batch, seed] = earlier
    return earlier


def train_to_loss(
    size: GPT2Size,
    rows: torch.Tensor,
    test: torch.Tensor,
    batch: int,
    target: float,
    seed: int = 1,
    max_steps: int = MAX_STEPS,
) -> TrainedModel:
    """Train until the loss of `test` (n, s) is below `target`. Every rank calls it, with equal arguments.

    A batch has rows over all ranks; each rank takes its share. `seed` is of the order of rows.
    """
    run = _train(size, rows, test, batch, target, seed, max_steps)
    copy = seeded_gpt2(size)  # without a reducer, so that its gradients stay on the rank
    copy.load_state_dict(run.model.state_dict())
    return TrainedModel(copy, run.steps, run.reached(target))


def steps_to_loss(
    size: GPT2Size, rows: torch.Tensor, test: torch.Tensor, batch: int, target: float, repeats: int = 2
) -> tuple[float, int]:
    """(the mean steps of runs that draw their rows in different orders, how many of them reached the loss).

    A run that does not reach it counts as MAX_STEPS. Every rank calls it.
    """
    runs = [_train(size, rows, test, batch, target, seed, MAX_STEPS) for seed in range(1, repeats + 1)]
    return sum(run.steps for run in runs) / repeats, sum(run.reached(target) for run in runs)


def mean_steps(
    pool: hpnb.Ranks,
    size: GPT2Size,
    rows: torch.Tensor,
    test: torch.Tensor,
    repeats: Mapping[int, int],
    target: float,
) -> dict[int, float]:
    """{batch: mean steps of its runs to the loss `target`}, for {batch: runs}.

    It claims that all runs reach the loss within MAX_STEPS, because those that do not count as MAX_STEPS.
    """
    runs = {
        batch: pool.run(steps_to_loss, size, rows, test, batch, target, count)[0]
        for batch, count in repeats.items()
    }
    short = [str(batch) for batch, (_, reached) in runs.items() if reached < repeats[batch]]
    claim(
        f"All runs reach a loss of {target:g} within {MAX_STEPS} steps",
        not short,
        f"Not reached with batches of {' and '.join(short)}; such a run counts as {MAX_STEPS} steps.",
    )
    return {batch: steps for batch, (steps, _) in runs.items()}


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
