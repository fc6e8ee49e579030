"""How many steps a batch needs to a loss, and the two gradient norms of each step: what notebook 05 trains.

    pool.run(gradient_noise.train, rows, test, 4, 5.0)[0]      a small GPT-2, 4 rows a rank, to a test loss of
    5.0

AdamW with a learning rate that grows with the square root of the batch: Malladi et al. 2022 (2205.10287).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

import hpnb
from hpnb.lesson.programs.device_timing import all_ranks
from hpnb.mesh import Axis
from hpnb.models import GPT2Size

SIZE = GPT2Size(hidden=64, layers=2, heads=4, mlp=256, vocab_size=509, length=32)
RATE, ROWS = 1.4e-3, 8  # the learning rate at so many rows
TEST_EVERY = 5  # steps


@dataclass(frozen=True)
class NoiseRun:
    """One training run.

    Attributes:
        batch: rows of all ranks together.
        steps: until the test loss was below the target, or all of them.
        reached: whether it was.
        small, big: squared norms of the gradients of one rank's rows (mean over ranks), and of all rows.
    """

    batch: int
    steps: int
    reached: bool
    small: tuple[float, ...]
    big: tuple[float, ...]


def token_rows(split: str, size: int | None = None) -> torch.Tensor:
    """(n, 32) tokens of English, for `SIZE`."""
    text = hpnb.data.text(split, size, vocabulary=SIZE.vocab_size, block=SIZE.length)
    return torch.stack([text[i]["input_ids"] for i in range(len(text))])


def gradient_norms(
    model: torch.nn.Module, axis: Axis, batch: Mapping[str, torch.Tensor]
) -> tuple[float, float]:
    """Backward of this rank's rows: (squared norm before the all-reduce, mean over ranks; and after it).

    The gradients are then the mean over the ranks.
    """
    model.zero_grad()
    model(**batch).loss.backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
    message = torch.cat([flat, flat.square().sum()[None]])
    dist.all_reduce(message, group=axis.group)
    message /= axis.size
    flat, small = message[:-1], message[-1].item()
    for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = gradient.view_as(p)
    return small, flat.square().sum().item()


def train(
    rows: torch.Tensor, test: torch.Tensor, rows_per_rank: int, target: float, max_steps: int = 400
) -> NoiseRun:
    """Train SIZE from scratch on batches of `rows_per_rank`. Every rank calls it, with equal arguments."""
    axis, device = all_ranks("dp"), hpnb.device()
    model = hpnb.models.gpt2(SIZE, device=device)
    model.loss_type = "ForCausalLM"  # else transformers says on stderr that it guesses this
    batch = rows_per_rank * axis.size
    rate = RATE * (batch / ROWS) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    generator, test_ids = torch.Generator().manual_seed(1), test.to(device)
    small, big = [], []
    reached = False
    for step in range(1, max_steps + 1):
        chosen = torch.randint(len(rows), (batch,), generator=generator)  # the same on all ranks
        ids = rows[chosen[axis.rank :: axis.size]].to(device)
        norms = gradient_norms(model, axis, {"input_ids": ids, "labels": ids})
        small.append(norms[0])
        big.append(norms[1])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % TEST_EVERY == 0:
            with torch.no_grad():
                reached = model(input_ids=test_ids, labels=test_ids).loss.item() < target
            if reached:
                break
    return NoiseRun(batch, step, reached, tuple(small), tuple(big))
