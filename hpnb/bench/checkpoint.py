"""What training is held up by saving: windows of steps without a save, and with one in the background.

    python -m hpnb.bench checkpoint --ranks 2 --every 20

    alone        step  step  step ... step
    background   [copy] step  step ... step        while the files are written, in a thread of each rank
    waiting      [copy, write] step  step ... step

The three take turns on the same ranks, model and optimizer (a ViT and AdamW, its states replicated or, with
--zero, sharded). A window ends when the last rank has done its steps; a save that is not on the disk by then
is waited for after it, and the table says how long. CPU seconds are of all threads of all ranks, so they say
what writing costs where cores are short: with as many ranks as cores, the writer takes its time from the
steps.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import hpnb
from hpnb.bench.results import take_turns
from hpnb.bench.worker import synchronize
from hpnb.models import ViTSize

WAYS = ("alone", "background", "waiting")


@dataclass(frozen=True)
class Window:
    """Seconds of some steps, and of a save.

    Attributes:
        wall: from a barrier to the last rank's end.
        cpu: of all ranks' threads, until the save is on the disk.
        call: the call of save.
        after: from the end of the steps until the save is on the disk.
    """

    wall: float
    cpu: float
    call: float
    after: float


def measure(
    folder: str, every: int, rounds: int, hidden: int, batch: int, zero: int
) -> tuple[dict[str, list[Window]], int]:
    """On a rank: windows by way, and bytes of a checkpoint."""
    plugin = hpnb.HybridParallelPlugin(precision="fp32", zero_stage=zero)
    booster = hpnb.Booster(plugin=plugin)
    size = ViTSize(hidden=hidden, layers=6, heads=4, mlp=4 * hidden, patch=8, image=32)
    vit: Any = hpnb.models.vit(size, classes=10)
    adam = torch.optim.AdamW(vit.parameters(), lr=1e-4)
    model, optimizer, *_ = booster.boost(vit, adam)
    inputs = {
        "pixel_values": torch.randn(batch, 3, 32, 32, device=hpnb.device()),
        "labels": torch.zeros(batch, dtype=torch.long, device=hpnb.device()),
    }
    path = Path(folder, "saved")

    def step() -> None:
        optimizer.zero_grad()
        booster.backward(model(**inputs).loss, optimizer)
        optimizer.step()

    def window(way: str) -> Window:
        if hpnb.rank() == 0:
            os.sync()  # or the disk still writes what the window before has saved
        dist.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        if way != "alone":
            booster.save(path, model, optimizer, background=way == "background")
        call = time.perf_counter() - began
        for _ in range(every):
            step()
        synchronize()
        ended = time.perf_counter()
        booster.wait()
        after = time.perf_counter() - ended
        times = torch.tensor([ended - began, call, after], dtype=torch.float64, device=hpnb.device())
        dist.all_reduce(times, dist.ReduceOp.MAX)
        spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64, device=hpnb.device())
        dist.all_reduce(spent)
        return Window(times[0].item(), spent.item(), times[1].item(), times[2].item())

    for way in WAYS:
        window(way)  # warms up
    windows: dict[str, list[Window]] = {way: [] for way in WAYS}
    for way in take_turns(WAYS, rounds):
        windows[way].append(window(way))
    saved = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return windows, saved


def run(ranks: int, every: int, rounds: int, device: str, zero: int, hidden: int, batch: int) -> None:
    """Measure, and print the table."""
    choice = hpnb.ranks.choose_device(device, ranks)
    folder = tempfile.mkdtemp(prefix="hpnb-bench-")
    try:
        with hpnb.Ranks(choice.ranks, device=choice.device, timeout=600.0) as pool:
            windows, saved = pool.run(measure, folder, every, rounds, hidden, batch, zero)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    def over(way: str, what: Callable[[Window], float]) -> float:
        """The ratio to the window alone of the same round: the median."""
        pairs = zip(windows[way], windows["alone"], strict=True)
        return median(what(one) / what(alone) for one, alone in pairs)

    head = (
        f"a save every {every} steps, {choice.ranks} ranks on {choice.device}, {saved / 2**20:.0f} MiB, "
        f"{rounds} rounds"
    )
    lines = [
        head,
        f"{'':10}  {'a step':>10}  {'of alone':>8}  {'in save()':>10}  {'then waits':>10}  "
        f"{'CPU of alone':>12}",
    ]
    for way in WAYS:
        wall = median(one.wall for one in windows[way]) / every
        call, after = (median(getattr(one, name) for one in windows[way]) for name in ("call", "after"))
        lines.append(
            f"{way:10}  {wall * 1e3:7.2f} ms  {over(way, lambda w: w.wall):8.3f}  {call * 1e3:7.2f} ms  "
            f"{after * 1e3:7.2f} ms  {over(way, lambda w: w.cpu):12.3f}"
        )
    share = median(b.call / a.wall for b, a in zip(windows["background"], windows["alone"], strict=True))
    lines.append("then waits: from the last step until the files are written")
    lines.append(f"the call of a save in the background takes {share:.1%} of the {every} steps")
    print("\n".join(lines))
