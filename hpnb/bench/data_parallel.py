"""One training step with replicas: hpnb.DataParallel beside torch's DistributedDataParallel, in one run.

    python -m hpnb.bench data-parallel --ranks 2 --pairs 15

Both wrap the same model, take the same batch and the same fused AdamW, and take turns on the same ranks, so
a busy moment falls on both. A step is timed from a barrier to the last rank's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb import Layout, Mesh
from hpnb.bench.report import Row, table

_SHAPES = {  # hidden, layers, tokens a rank, dtype
    "cpu": (256, 6, 256, torch.float32),
    "cuda": (1024, 24, 16384, torch.bfloat16),
}


def _model(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Transformer-like: many small parameters beside few large ones."""
    hidden, layers, tokens, dtype = _SHAPES[device.type]
    torch.manual_seed(0)
    modules = []
    for _ in range(layers):
        up, down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        modules += [nn.LayerNorm(hidden), up, nn.GELU(), down]
    model = nn.Sequential(*modules).to(device, dtype)
    return model, torch.randn(tokens, hidden, device=device, dtype=dtype)


def _step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def measure(pairs: int) -> dict[str, list[float]]:
    """On a rank: seconds of every step, by candidate. The order within a pair alternates."""
    device = hpnb.device()
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    steps: dict[str, Callable[[], None]] = {}
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "hpnb.DataParallel": lambda m: hpnb.DataParallel(m, axis),
        "torch DistributedDataParallel": lambda m: nn.parallel.DistributedDataParallel(
            m, gradient_as_bucket_view=True, process_group=axis.group
        ),
    }
    for name, wrap in wraps.items():
        module, x = _model(device)
        model = wrap(module)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        steps[name] = lambda model=model, x=x, optimizer=optimizer: _step(model, x, optimizer)  # type: ignore[misc]
        for _ in range(5):
            steps[name]()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(pairs):
        for name in list(steps) if pair % 2 else list(steps)[::-1]:
            seconds[name].append(_timed(steps[name], device))
    return seconds


def _timed(step: Callable[[], None], device: torch.device) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def run(ranks: int, pairs: int, device: str = "auto") -> str:
    """The table, as text."""
    choice = hpnb.ranks.choose_device(device, ranks)
    seconds = hpnb.launch(measure, pairs, ranks=ranks, device=device, timeout=600.0)[0]
    rows = [Row(name, tuple(times)) for name, times in seconds.items()]
    ours, theirs = rows[0].seconds, rows[1].seconds
    each = Row("ratio of each pair, hpnb / torch", tuple(a / b for a, b in zip(ours, theirs, strict=True)))
    low, high = each.quartiles
    return (
        table(f"{choice.ranks} ranks on {choice.device}, {pairs} pairs of steps", rows)
        + f"\n{each.name}: median {each.median:.3f}, quartiles {low:.3f} to {high:.3f}"
    )
