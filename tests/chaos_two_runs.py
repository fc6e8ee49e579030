"""Two or three runs that save into one folder at the same time, again and again.

    python chaos_two_runs.py FOLDER SEED TRIALS

A run's weights and optimizer state all have its number. A line of JSON a trial: what each run said of each
save, and what is in the newest checkpoint afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb.hybrid import booster  # noqa: F401 (before the forks)
from hpnb.hybrid.checkpoint import checkpoint  # noqa: F401


def make(folder: Path, name: str) -> tuple[hpnb.Booster, Any, Any]:
    store = f"file://{folder}/meet-{name}-{os.getpid()}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    run = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", zero_stage=1))
    net = nn.Sequential(nn.Linear(5, 200), nn.Linear(200, 200), nn.Linear(200, 3))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, *_ = run.boost(net, sgd)
    inputs = torch.ones(2, 5), torch.zeros(2, dtype=torch.long)
    run.execute_pipeline(
        iter([inputs]), model, lambda out, i: nn.functional.cross_entropy(out, i[1]), optimizer
    )
    optimizer.step()
    return run, model, optimizer


def save_again(folder: Path, number: int, draw: Random, at: float) -> list[str]:
    """What a run says of each of its saves."""
    run, model, optimizer = make(folder, f"run-{number}")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
        for state in optimizer.state.values():
            state["momentum_buffer"].fill_(number)
    said = []
    time.sleep(max(0.0, at - time.time()))
    for k in range(draw.randint(1, 4)):
        time.sleep(draw.random() * 0.03)
        try:
            path, extra = folder / "run" / f"step-{k}", {"number": number}
            run.save(path, model, optimizer, extra=extra, keep=1, size_per_shard=50_000)
            said.append("ok")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    time.sleep(0.2)  # the others still see it alive
    return said


def look(folder: Path) -> str:
    """The number in the newest checkpoint; or what is wrong with it."""
    run, model, optimizer = make(folder, "look")
    try:
        number = run.load(folder / "run", model, optimizer)["number"]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    there = {float(v) for p in model.parameters() for v in p.detach().flatten()}
    there |= {float(v) for s in optimizer.state.values() for v in s["momentum_buffer"].flatten()}
    return str(number) if there == {float(number)} else f"mixed: {sorted(there)[:4]}, and {number}"


def in_child(work: Any, *args: Any) -> tuple[int, int]:
    """Start it in a process: (its id, where it writes what it returns)."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, json.dumps(work(*args)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writes)
    return pid, reads


def result_of(child: tuple[int, int]) -> Any:
    with os.fdopen(child[1], "rb") as stream:
        text = stream.read()
    os.waitpid(child[0], 0)
    return json.loads(text) if text else "died"


def main(folder: Path, seed: int, trials: int) -> None:
    torch.set_num_threads(1)
    draw = Random(seed)
    for trial in range(trials):
        runs, inside = 2 + trial % 2, folder / str(trial)
        (inside / "run").mkdir(parents=True)
        at = time.time() + 0.6
        seeds = [draw.random() for _ in range(runs)]
        children = [in_child(save_again, inside, n + 1, Random(seeds[n]), at) for n in range(runs)]
        said = [result_of(child) for child in children]
        print(json.dumps([runs, said, result_of(in_child(look, inside))]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
