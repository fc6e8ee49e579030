"""Which device the ranks run on, and how many threads each may use.

`device="auto"`: one rank a GPU over NCCL when there are at least 2 GPUs and enough for the ranks asked;
otherwise the CPU over gloo. One GPU is not enough to teach communication, and two ranks on one GPU are
refused by NCCL.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class DeviceChoice:
    """Where `ranks` ranks run. `threads` is what each may use; `reason` is one sentence for the reader."""

    ranks: int
    device: str  # "cpu" or "cuda"
    backend: str  # for init_process_group
    threads: int
    reason: str

    @property
    def name(self) -> str:
        return "NCCL" if self.device == "cuda" else "gloo"

    def __str__(self) -> str:
        plural = "s" if self.threads > 1 else ""
        return (
            f"{self.ranks} ranks on {self.device} over {self.name}, "
            f"{self.threads} thread{plural} each: {self.reason}"
        )


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the container's CPU quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def threads_per_rank(cores: int, ranks: int) -> int:
    """Threads that each rank computes with: half of its equal part of the cores; all of them if it is alone.

    The other half is for what runs beside them, gloo's threads and the notebook above all. OpenMP's threads
    spin while they wait for the next operator, so with as many as there are cores they take the cores from
    whoever has work: notebook 05 took 99 s on 16 cores with 4 threads a rank, 58 s with 2 and 60 s with 1.
    """
    return cores if ranks == 1 else max(1, cores // (2 * ranks))


def default_ranks() -> int:
    """All GPUs where there are at least 2, else 4 on the CPU: fewer show little, whatever the cores."""
    gpus = torch.cuda.device_count()
    return gpus if gpus >= 2 else 4


def choose_device(
    device: str, ranks: int, *, gpus: int | None = None, cores: int | None = None
) -> DeviceChoice:
    """Decide for `ranks` ranks; `device` is "auto", "cpu" or "cuda".

    Args:
        gpus, cores: of another machine; this one's if None.

    Raises:
        ValueError: fewer than 1 rank, an unknown device, or more GPU ranks than GPUs.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: at least 1 rank is needed, as a whole number")
    if gpus is None:
        gpus = torch.cuda.device_count()  # asks the driver; does not initialise CUDA
    threads = threads_per_rank(usable_cores() if cores is None else cores, ranks)
    if device == "cuda":
        if ranks > gpus:
            fits = f"ask for at most {gpus}, or" if gpus else "use"
            raise ValueError(
                f"ranks={ranks} with device='cuda' needs {ranks} GPUs and this machine has {gpus}; "
                f"{fits} device='cpu'"
            )
        return DeviceChoice(ranks, "cuda", "cpu:gloo,cuda:nccl", threads, "one GPU a rank, as asked")
    if device == "cpu":
        return DeviceChoice(ranks, "cpu", "gloo", threads, "the CPU, as asked")
    if device != "auto":
        raise ValueError(f"device={device!r} is not known; use 'auto', 'cpu' or 'cuda'")
    if gpus >= 2 and ranks <= gpus:
        return DeviceChoice(ranks, "cuda", "cpu:gloo,cuda:nccl", threads, f"one rank a GPU, {gpus} GPUs here")
    if gpus == 0:
        reason = "no GPU here"
    elif gpus == 1:
        reason = "one GPU here, and ranks on NCCL need one each"
    else:
        reason = f"{gpus} GPUs here are fewer than the {ranks} ranks"
    return DeviceChoice(ranks, "cpu", "gloo", threads, reason)
