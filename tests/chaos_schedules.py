"""Mutates schedules, and runs those that `check` accepts on ranks, against one process."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn

import hpnb
from hpnb.pipeline_parallel import Action, Schedule, ScheduleError, schedules

EXACT = 1e-12


def original(draw: Random) -> Schedule:
    """Of the literature, on 2 to 4 ranks."""
    while True:
        name, ranks = draw.choice(schedules.NAMES), draw.choice([2, 2, 3, 4])
        chunks = draw.choice([1, 2])
        try:
            return schedules.make(name, ranks * chunks, draw.choice([2, 3, 4, 6, 8]), chunks)
        except ValueError:
            continue


def mutate(schedule: Schedule, draw: Random) -> tuple[str, Schedule]:
    """One to three changes of the lists; the name is that of the last."""
    rows = [list(row) for row in schedule.actions]
    kind = ""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        rank = draw.randrange(len(rows))
        row = rows[rank]
        if not row:
            continue
        i, j = draw.randrange(len(row)), draw.randrange(len(row))
        a = row[i]
        kind = draw.choice(_KINDS)
        if kind == "swap":
            row[i], row[j] = row[j], row[i]
        elif kind == "swap neighbours":
            j = min(i + 1, len(row) - 1)
            row[i], row[j] = row[j], row[i]
        elif kind == "drop":
            row.pop(i)
        elif kind == "duplicate":
            row.insert(j, a)
        elif kind == "move later or earlier":
            row.insert(j, row.pop(i))
        elif kind == "move to another rank":
            target = rows[draw.randrange(len(rows))]
            target.insert(draw.randrange(len(target) + 1), row.pop(i))
        elif kind == "another microbatch":
            row[i] = Action(a.stage, a.op, max(0, a.microbatch + draw.choice([-1, 1, 100])))
        elif kind == "another stage":
            row[i] = Action(max(0, a.stage + draw.choice([-1, 1, 7])), a.op, a.microbatch)
        elif kind == "another op":
            row[i] = Action(a.stage, draw.choice(["F", "B", "I", "W"]), a.microbatch)
        elif kind == "split a backward" and a.op == "B":
            row[i] = Action(a.stage, "I", a.microbatch)
            row.insert(draw.randint(i + 1, len(row)), Action(a.stage, "W", a.microbatch))
        elif kind == "exchange ranks":
            other = draw.randrange(len(rows))
            rows[rank], rows[other] = rows[other], rows[rank]
        elif kind == "exchange microbatches":
            m, n = a.microbatch, row[j].microbatch
            renamed = {m: n, n: m}
            rows = [[Action(b.stage, b.op, renamed.get(b.microbatch, b.microbatch)) for b in r] for r in rows]
    return kind, Schedule(rows, "mutated")


_KINDS = (
    "swap", "swap neighbours", "drop", "duplicate", "move later or earlier", "move to another rank",
    "another microbatch", "another stage", "another op", "split a backward", "exchange ranks",
    "exchange microbatches",
)  # fmt: skip


def verdict(schedule: Schedule) -> str | None:
    """What `check` says, or None if it accepts.

    Raises:
        AssertionError: it says nothing about where the fault is, or something else is raised.
    """
    try:
        schedule.check()
    except ScheduleError as error:
        if not 0 <= error.rank <= schedule.ranks or len(error.reason.split()) < 3:
            raise AssertionError("a refusal without a place or a reason") from error
        return error.reason
    return None


def model(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5)) for _ in range(stages)]
    made = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float64) / 10)
    return made


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    made = torch.randn(samples, 5, generator=g, dtype=torch.float64)
    return made, torch.randint(0, 5, (samples,), generator=g)


def loss_of(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, inputs[1])


def gradients_of_one_process(stages: int, samples: int) -> dict[str, torch.Tensor]:
    whole = model(stages)
    inputs = batch(samples)
    loss_of(whole(inputs[0]), inputs).backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def run_all(written: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    """This rank's gradients of one step of each schedule, one after the other. All ranks call it."""
    torch.set_num_threads(1)
    mesh = hpnb.Mesh(hpnb.Layout(pp=hpnb.world_size()))
    found = []
    for lists in written:
        schedule = Schedule(lists, "mutated")
        pipe = hpnb.Pipeline(model(schedule.stages), mesh.pp, schedule, loss_of)
        pipe.step(batch(2 * schedule.microbatches + 1))
        found.append({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None})
    return found


def distance(lists: list[str], of_ranks: list[dict[str, torch.Tensor]]) -> float:
    """How far the gradients of all ranks are from those of one process."""
    schedule = Schedule(lists, "mutated")
    expected = gradients_of_one_process(schedule.stages, 2 * schedule.microbatches + 1)
    together = {name: grad for grads in of_ranks for name, grad in grads.items()}
    if together.keys() != expected.keys():
        return float("inf")
    typical = sum(float(e.norm()) for e in expected.values()) / len(expected)
    sizes = {name: max(float(e.norm()), typical / 100) for name, e in expected.items()}
    return max(float((together[name] - e).norm()) / sizes[name] for name, e in expected.items())


def write(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]
