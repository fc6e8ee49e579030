"""Lives of a run that saves again and again and is killed: what is left always loads, and is whole.

    python checkpoint_killed.py FOLDER SEED           whole checkpoints, 25 lives
    python checkpoint_killed.py FOLDER SEED model     save_model alone, each in place of the one before, 16

A life is two ranks. They load the newest checkpoint, say what is in it, and save one after the other until
SIGKILL strikes both, as when a machine is taken away: at some moment of a save, by a clock; or at one of the
calls of POINTS, so that every phase has its turn. Prints a line a life.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hpnb
from hpnb.hybrid import booster  # noqa: F401 (before the forks)
from hpnb.hybrid.checkpoint import checkpoint, manifest, save_weights, state_files  # noqa: F401

RANKS = 2
# Calls by which files come and go, before which a life may end: a function, and what is in its arguments; or
# the how manieth of a save it is.
POINTS: list[tuple[str, str | int]] = [
    ("mkdir", "last.part/model"),
    ("write_safetensors", "model-00001"),
    ("write_safetensors", "model-00002"),
    ("write_safetensors", "rank-00000"),
    ("write_bytes", "index.json"),
    ("replace", "manifest.json"),
    ("fsync", 4),
    ("fsync", 9),
    ("rename", "last.old"),  # what is there goes aside
    ("rename", "last.part "),  # what is new takes its place
    ("rmtree", "last.old"),
    ("rename", ".part."),  # one that is not kept goes
    ("rmtree", "step-"),
]
POINTS_OF_A_MODEL: list[tuple[str, str | int]] = [
    ("mkdir", ".hpnb-save-model"),
    ("write_safetensors", "model-00001"),
    ("write_safetensors", "model-00002"),
    ("fsync", 1),
    ("fsync", 3),
    ("replace", "manifest.json"),
    ("replace", "model-00001"),
    ("replace", "model.safetensors.index.json"),
    ("rmtree", ".hpnb-save-model"),
]
STRIKES = (3, 4)  # which saves of a life: one takes the place of the newest, one has a place of its own
_MESSAGE = struct.Struct("=cqd")
SAVED, BEGUN, FOUND, BAD = b"s", b"b", b"f", b"!"


# --- what is saved ------------------------------------------------------------------------------------------


def set_to(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """All that is saved follows from the step."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.fill_(step + i / 8)
        for i, state in enumerate(optimizer.state.values()):
            state["momentum_buffer"].fill_(step - i / 8)


def holds(model: nn.Module, step: int) -> bool:
    return all(bool((p == step + i / 8).all()) for i, p in enumerate(model.parameters()))


def is_at(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> bool:
    weights = holds(model, step)
    states = [s["momentum_buffer"] for s in optimizer.state.values()]
    return weights and bool(states) and all(bool((s == step - i / 8).all()) for i, s in enumerate(states))


# --- a rank -------------------------------------------------------------------------------------------------


def rank_of_a_life(
    life: int, rank: int, root: Path, say: int, point: tuple[str, str | int] | None, alone: bool
) -> None:
    def tell(kind: bytes, number: int = 0, value: float = 0.0) -> None:
        if rank == 0:
            os.write(say, _MESSAGE.pack(kind, number, value))

    here = f"file://{root.parent}/meet-{life}"
    dist.init_process_group("gloo", init_method=here, rank=rank, world_size=RANKS)
    plugin = hpnb.HybridParallelPlugin(precision="fp32", zero_stage=1)
    run = hpnb.Booster(plugin=plugin)
    made: Any = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))
    sgd = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, *_ = run.boost(made, sgd)
    run.execute_pipeline(
        iter([(torch.ones(2, 5), torch.zeros(2, dtype=torch.long))]), model, _loss, optimizer
    )
    optimizer.step()
    step = 0
    if alone and (root / "model").is_dir():
        run.load_model(model, root / "model")
        step = int(next(model.parameters()).flatten()[0])
        if not holds(model, step):
            tell(BAD, step)
    elif not alone and manifest.newest(root) is not None:
        step = run.load(root, model, optimizer)["step"]
        if not is_at(model, optimizer, step):
            tell(BAD, step)
    tell(FOUND, step)
    calls = Calls()
    if point is not None and rank == 0:
        calls.end_at(point)
    for calls.save in range(1, STRIKES[-1] + 2):
        step += 1
        set_to(model, optimizer, step)
        calls.count = 0
        path = root / ("last" if calls.save in (2, 3) else f"step-{step}")
        tell(BEGUN, step)
        began = time.perf_counter()
        if alone:
            run.save_model(model, root / "model", size_per_shard=2000)
        else:
            run.save(path, model, optimizer, extra={"step": step}, keep=2, size_per_shard=2000,
                     background=life % 3 == 2)  # fmt: skip
        run.wait()
        tell(SAVED, step, time.perf_counter() - began)
    if point is not None:
        print(f"life {life} never came to {point}", flush=True)


def _loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, inputs[1])


class Calls:
    """Ends both ranks before a call."""

    save = count = 0

    def end_at(self, point: tuple[str, str | int]) -> None:
        name, which = point
        writers = state_files if which in ("rank-00000", "index.json") else save_weights
        place: Any = shutil if name == "rmtree" else writers if name.startswith("write_") else os
        call = getattr(place, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            there = self.count == which if isinstance(which, int) else which in " ".join(map(str, args)) + "."
            if self.save in STRIKES and there:
                os.killpg(0, signal.SIGKILL)
            return call(*args, **kwargs)

        setattr(place, name, watched)


# --- who kills ----------------------------------------------------------------------------------------------


def main(folder: Path, seed: int, alone: bool) -> None:
    lives, points = (16, POINTS_OF_A_MODEL) if alone else (25, POINTS)
    torch.set_num_threads(1)
    draw, root = random.Random(seed), folder / "run"
    root.mkdir(parents=True)
    takes, least = 0.05, 0
    for life in range(lives + 1):
        point = points[life // 2] if life % 2 and life // 2 < len(points) else None
        hears, says = os.pipe()
        pids = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0 if rank == 0 else pids[0])
                os.close(hears)
                try:
                    rank_of_a_life(life, rank, root, says, point, alone)
                except BaseException as error:
                    print(f"life {life}, rank {rank}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os.setpgid(pid, pid if rank == 0 else pids[0])
            pids.append(pid)
        os.close(says)
        found = saved = begun = -1
        saves, wanted, moment = 0, draw.choice([2, 3]), draw.random()
        while len(message := os.read(hears, _MESSAGE.size)) == _MESSAGE.size:
            kind, number, value = _MESSAGE.unpack(message)
            if kind == BAD:
                print(f"life {life}: step {number} is not whole", flush=True)
            elif kind == FOUND:
                found = saved = begun = number
                if life == lives:
                    break
            elif kind == BEGUN:
                begun = number
                if point is None and saves == wanted:
                    time.sleep(moment * takes)
                    break
            elif kind == SAVED:
                saved, saves, takes = number, saves + 1, value
        os.killpg(pids[0], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        while len(message := os.read(hears, _MESSAGE.size)) == _MESSAGE.size:  # what it did until it died
            kind, number, _ = _MESSAGE.unpack(message)
            saved = number if kind == SAVED else saved
            begun = number if kind == BEGUN else begun
        os.close(hears)
        good = found in (least, least + 1) if life else found == 0
        how = f"{point}" if point else f"{moment:.2f} of {takes:.3f} s"
        left = sorted(os.listdir(root / "model" if alone else root))
        print(f"life {life}: found {found}, {'as' if good else 'NOT AS'} it should; saved {saved}, began "
              f"{begun}; killed at {how}; left {left}", flush=True)  # fmt: skip
        least = saved


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), alone="model" in sys.argv[3:])
