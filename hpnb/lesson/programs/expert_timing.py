"""How long a layer of experts computes on unequal ranks, for notebook 11: sizes, rows, and times of them.

Every rank calls what is here, except `sorted_rows` and `wait_for_slowest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

import hpnb
from hpnb import comm
from hpnb.lesson.programs.layer_times import seconds_in_turn
from hpnb.mesh import Axis
from hpnb.record import Event, Timeline

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (r, h), (r,) expert of this rank -> (r, h)


# Rows of a rank if loads are even, numbers of a token, and inside an expert; on a GPU, large enough that
# launches take a small part of the time.
_TIMED = {"cpu": (1024, 192, 384, torch.float32), "cuda": (8192, 4096, 14336, torch.bfloat16)}


def expert_axis() -> Axis:
    """All ranks, along the expert axis."""
    ranks = hpnb.world_size()
    return hpnb.Mesh(hpnb.Layout(dp=ranks, ep=ranks)).ep


def routed_rows(tokens: int, num_experts: int, k: int, popular: float = 1.0, seed: int = 0) -> torch.Tensor:
    """(tokens, k) different experts of each token, drawn at random, on the CPU; expert 2 is `popular` times
    as likely as each of the others.
    """
    weights = torch.ones(num_experts)
    weights[min(2, num_experts - 1)] = popular
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights.expand(tokens, -1), k, generator=generator)


def experts_call(rows: int, local: int) -> Callable[[], None]:
    """What computes `local` experts of two matrices on so many rows, sorted by expert, equally many each.

    All memory is reserved before: with fresh memory, the time of the rank with most rows differed by half
    between runs.
    """
    _, hidden, width, dtype = _TIMED[hpnb.device().type]
    like = partial(torch.randn, device=hpnb.device(), dtype=dtype)
    up, down = like(local, hidden, width), like(local, width, hidden)
    of_experts = like(rows, hidden).tensor_split(local)
    inside = like(max(map(len, of_experts)), width)
    results = [torch.empty_like(x) for x in of_experts]

    def compute() -> None:
        for expert, (x, result) in enumerate(zip(of_experts, results, strict=True)):
            wide = inside[: len(x)]
            torch.mm(x, up[expert], out=wide)
            torch.mm(wide.relu_(), down[expert], out=result)

    return compute


def seconds_of_ranks(rows_of_ranks: Mapping[str, Sequence[float]], local: int) -> dict[str, list[float]]:
    """{name: seconds of each rank} to compute {name: rows of each rank}, if each has a processor to itself.

    All rows are scaled by one factor, which makes their mean the timed size's; the `local` experts of a rank
    share its rows equally. A rank's time is the least of fifteen turns: on shared cores other work only adds
    to it.
    """
    device, axis = hpnb.device(), expert_axis()
    mean = _TIMED[device.type][0]
    calls = {name: experts_call(round(rows[axis.rank] * mean * axis.size / sum(rows)), local)
             for name, rows in rows_of_ranks.items()}  # fmt: skip
    with torch.no_grad():
        took = seconds_in_turn(calls, repeats=15)
    least = torch.tensor([[min(took[name]) for name in calls]], dtype=torch.float64, device=device)
    of_ranks = comm.gather(least, axis, 0).T.tolist()  # (names, ranks)
    return dict(zip(calls, of_ranks, strict=True))


def wait_for_slowest(seconds: Sequence[float]) -> Timeline:
    """Ranks that begin together, compute for so many seconds, and then wait until the last is ready."""
    last, events = max(seconds), []
    for rank, took in enumerate(seconds):
        events.append(Event(rank, 0, "compute", 0, 0.0, took))
        events.append(Event(rank, 0, "wait", 0, took, last))
    return Timeline(tuple(events), "replayed")


def sorted_rows(steps: Sequence[Mapping[str, torch.Tensor]], ranks: int) -> list[float]:
    """Rows of the busiest rank, of the next one, and so on: means over layers and the `ExpertLoads.steps`."""
    loads = [load.view(ranks, -1).sum(1) for step in steps for load in step.values()]
    means: list[float] = torch.stack(loads).sort(descending=True).values.double().mean(0).tolist()
    return means
