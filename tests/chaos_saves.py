"""Lives of a run that trains and saves until ranks are killed in the middle of a save.

A life loads the newest checkpoint and trains on, saving after each step. Training is the same bit for bit in
every life, so what belongs to a step is known from the life that came there first: a sum of all bytes that a
rank holds of weights, masters and the optimizer's state. Each rank writes it down before it saves, and after
it has loaded.

A kernel timer ends a rank (SIGALRM, for which no handler is set: nothing runs in the process any more), at a
moment between the beginning of a save and a little after its end.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from hybrid_cases import batch as batch_of
from hybrid_cases import build

import hpnb
from hpnb.hybrid.boosted_optimizer import boosted_optimizer
from hpnb.hybrid.checkpoint import manifest
from hpnb.hybrid.checkpoint.optimizer_shards import _local_states
from hpnb.precision import Masters

RANKS = 2
SAVES = 4  # of a life, of which the last but one is the one that is struck


@dataclass(frozen=True)
class Setting:
    """How a run is laid out."""

    name: str
    zero_stage: int = 0
    pp_size: int = 1
    precision: str = "fp32"
    background: bool = False


SETTINGS = [
    Setting("ZeRO 0"),
    Setting("ZeRO 1", zero_stage=1),
    Setting("ZeRO 3", zero_stage=3),
    Setting("pp 2", pp_size=2),
    Setting("bf16, ZeRO 1", zero_stage=1, precision="bf16"),
    Setting("bf16, pp 2, in the background", pp_size=2, precision="bf16", background=True),
    Setting("ZeRO 1, in the background", zero_stage=1, background=True),
    Setting("ZeRO 3, in the background", zero_stage=3, background=True),
]


def sum_of(model: Any, optimizer: Any) -> int:
    """Of all bytes that this rank holds."""
    inner, by_name = _local_states(boosted_optimizer(optimizer))
    masters = Masters.attached_to(inner)
    tensors = [*model.module.parameters(), *model.module.buffers()]
    for t, _ in by_name.values():
        state = inner.state.get(t, {})
        tensors += [torch.as_tensor(state[key]) for key in sorted(state)]
        tensors += [] if masters is None else [masters.of(t)]
    crc = 0
    for tensor in tensors:
        content: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(content, crc)
    return crc


def live(setting: Setting, root: Path, log: Path, struck: list[int], moment: float) -> None:
    """One life. All ranks call it.

    Args:
        log: this rank appends "loaded STEP SUM", "begun STEP SUM" and "saved STEP".
        struck: the ranks that end at `moment`, as a share of the time that the save before took.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    descriptor = os.open(log / str(hpnb.rank()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(*words: object) -> None:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())

    plugin = hpnb.HybridParallelPlugin(
        zero_stage=setting.zero_stage, pp_size=setting.pp_size, precision=setting.precision,
        zero_bucket_size_in_m=1e-3,
    )  # fmt: skip
    booster = hpnb.Booster(plugin=plugin)
    net = build("vit", layers=2, hidden=8).float()
    adam = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, *_ = booster.boost(net, adam)
    step = 0
    if manifest.newest(root) is not None:
        step = int(booster.load(root, model, optimizer)["step"])
        write("loaded", step, sum_of(model, optimizer))
    takes = 0.1
    for save in range(SAVES):
        train(booster, model, optimizer, step)
        step += 1
        write("begun", step, sum_of(model, optimizer))
        if save == SAVES - 2 and hpnb.rank() in struck:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, moment * takes))
        began = time.perf_counter()
        path = root / ("last" if step % 3 == 0 else f"step-{step}")
        booster.save(
            path, model, optimizer, extra={"step": step}, keep=2, size_per_shard=2000,
            background=setting.background,
        )  # fmt: skip
        if setting.background:
            train(booster, model, optimizer, step)  # thrown away below: the next life does it again
            booster.wait()
            write("saved", step)
            step = int(booster.load(path, model, optimizer)["step"])
        else:
            write("saved", step)
        takes = time.perf_counter() - began


def train(booster: Any, model: Any, optimizer: Any, step: int) -> None:
    inputs = batch_of("vit", step, 4)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    optimizer.zero_grad()
    booster.execute_pipeline(iter([inputs]), model, lambda outputs, _: outputs.loss, optimizer)
    optimizer.step()


# --- who looks at what is left -----------------------------------------------------------------------------


class Book:
    """What ranks wrote down in all lives of a run: the sums of each step, and what has to be there."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], int] = {}  # {(rank, step): sum}
        self.saved = 0  # the newest step of which all ranks said that it is saved
        self.begun = 0

    def read(self, log: Path) -> list[str]:
        """Take what a life has written, and say what is wrong with it."""
        problems = []
        saved_by: list[int] = []
        for rank in range(RANKS):
            file = log / str(rank)
            lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
            saved = self.saved
            for word, step, *rest in lines:
                if word == "loaded":
                    if not self.saved <= int(step) <= self.begun:
                        known = f"{self.saved} was saved, {self.begun} begun"
                        problems.append(f"lost: rank {rank} loaded step {step}, and {known}")
                    if self.sums.get((rank, int(step))) != int(rest[0]):
                        problems.append(f"wrong: rank {rank} loaded step {step} with other bytes")
                elif word == "begun":
                    if self.sums.setdefault((rank, int(step)), int(rest[0])) != int(rest[0]):
                        problems.append(f"wrong: rank {rank} came to other bytes at step {step}")
                else:
                    saved = int(step)
            saved_by.append(saved)
        begun = [step for _, step in self.sums]
        self.saved, self.begun = max(saved_by), max(begun, default=0)
        return problems


def kill_in(setting: Setting, folder: Path, lives: int, seed: int) -> list[tuple[str, float, str]]:
    """Lives of one run: [(outcome, seconds until the caller knew, what happened)], one for each that was
    killed."""
    draw, book = Random(f"{setting.name} {seed}"), Book()
    root = folder / "run"
    root.mkdir(parents=True)
    found = []
    for life in range(lives + 1):
        log = folder / f"log-{life}"
        log.mkdir()
        struck = [] if life == lives else draw.choice([[0], [1], [0, 1]])
        moment, text, seconds = draw.uniform(0, 1.3), "", 0.0
        with hpnb.Ranks(RANKS, device="cpu", timeout=60) as pool:
            try:
                pool.run(live, setting, root, log, struck, moment)
            except hpnb.RankError as error:
                written = [file.stat().st_mtime for file in log.iterdir()]
                seconds = time.time() - max(written, default=time.time())  # from when the save began
                named = "SIGALRM" in error.summary and error.rank in struck
                text = "" if named else f"wrong: {error.summary}"
        problems = [*book.read(log), *([text] if text else [])]
        if problems and found:
            found[-1] = (problems[0].partition(":")[0], found[-1][1], f"life {life}: {problems}")
        if life < lives:
            found.append(("named" if seconds else "unharmed", seconds, ""))
    return found
