"""How many steps a batch takes to a loss, and the two norms of each step: what notebook 05 runs on its ranks.

    pool.run(noise.train, SIZE, rows, 4, 5.0)[0]      a small GPT-2, 4 rows a rank, to a test loss of 5.0

AdamW with a learning rate that goes with the square root of the batch: Malladi et al. 2022 (2205.10287).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

import hpnb
from hpnb.mesh import Axis, Layout, Mesh
from hpnb.models import GPT2Size

SIZE = GPT2Size(hidden=64, layers=2, heads=4, mlp=256, vocab_size=509, length=32)
RATE, ROWS = 1.4e-3, 8  # the learning rate at so many rows
EVERY = 5  # steps between two looks at the test loss


@dataclass(frozen=True)
class Run:
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


def rows_of(split: str, size: int | None = None) -> torch.Tensor:
    """(n, 32) tokens of English, for `SIZE`."""
    text = hpnb.data.text(split, size, vocabulary=SIZE.vocab_size, block=SIZE.length)
    return torch.stack([text[i]["input_ids"] for i in range(len(text))])


def two_norms(model: torch.nn.Module, axis: Axis, batch: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Backward of this rank's rows: (squared norm before the all-reduce, mean over ranks; and after it).

    Gradients are left reduced: the mean over the ranks.
    """
    model.zero_grad()
    model(**batch).loss.backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
    both = torch.cat([flat, flat.square().sum()[None]])
    dist.all_reduce(both, group=axis.group)
    both /= axis.size
    flat, small = both[:-1], both[-1].item()
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    return small, flat.square().sum().item()


def train(rows: torch.Tensor, test: torch.Tensor, each: int, target: float, most: int = 400) -> Run:
    """Train SIZE from scratch on batches of `each` rows a rank. Every rank calls it, with equal arguments."""
    axis, where = Mesh(Layout(dp=hpnb.world_size())).dp, hpnb.device()
    model = hpnb.models.gpt2(SIZE, device=where)
    model.loss_type = "ForCausalLM"  # else transformers says on stderr that it guesses this
    batch = each * axis.size
    rate = RATE * (batch / ROWS) ** 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    draw, known = torch.Generator().manual_seed(1), test.to(where)
    small, big = [], []
    for step in range(1, most + 1):
        chosen = torch.randint(len(rows), (batch,), generator=draw)  # the same on all ranks
        ids = rows[chosen[axis.rank :: axis.size]].to(where)
        norms = two_norms(model, axis, {"input_ids": ids, "labels": ids})
        small.append(norms[0])
        big.append(norms[1])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                loss = model(input_ids=known, labels=known).loss.item()
            if loss < target:
                return Run(batch, step, True, tuple(small), tuple(big))
    return Run(batch, most, False, tuple(small), tuple(big))
