"""Which device the ranks run on, and how many threads each may use.

`device="auto"` uses the GPUs wherever there is one. With a GPU for every rank, they communicate over NCCL.
With fewer, ranks share the GPUs round-robin: 4 ranks on one GPU, or ranks 0 and 2 on the first of two and 1
and 3 on the second. NCCL refuses two ranks on one GPU, so they communicate as `shared_gpu_group.py` does.
Without any GPU, ranks compute on the CPU and communicate over gloo.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

SHARED_GPU_BACKEND = "hpnb_shared_gpu"  # the name of `shared_gpu_group.py` in torch.distributed


@dataclass(frozen=True)
class DeviceChoice:
    """Where `ranks` ranks run. `threads` is what each may use; `reason` is one sentence for the reader.

    Attributes:
        device: "cpu" or "cuda".
        backend: for init_process_group.
        gpus: how many GPUs the ranks lie on; 0 on the CPU.
    """

    ranks: int
    device: str
    backend: str
    threads: int
    reason: str
    gpus: int = 0

    @property
    def shares_gpus(self) -> bool:
        """Whether there are fewer GPUs than ranks."""
        return 0 < self.gpus < self.ranks

    @property
    def name(self) -> str:
        """How ranks communicate. On several GPUs that they share, only ranks on one GPU use CUDA IPC."""
        if self.shares_gpus:
            return "CUDA IPC" if self.gpus == 1 else "CUDA IPC and CPU memory"
        return "NCCL" if self.device == "cuda" else "gloo"

    def __str__(self) -> str:
        ranks, threads = (
            f"{count} {noun}{'s' if count > 1 else ''}"
            for count, noun in ((self.ranks, "rank"), (self.threads, "thread"))
        )
        return f"{ranks} on {self.device} over {self.name}, {threads} each: {self.reason}"


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
    """One a GPU where there are at least 2, else 4, which share a single GPU: fewer show little."""
    gpus = torch.cuda.device_count()
    return gpus if gpus >= 2 else 4


def choose_device(
    device: str, ranks: int, *, gpus: int | None = None, cores: int | None = None
) -> DeviceChoice:
    """Decide for `ranks` ranks; `device` is "auto", "cpu" or "cuda".

    A rank gets no more threads than this process has itself.

    Args:
        gpus, cores: of another machine; this one's if None.

    Raises:
        ValueError: fewer than 1 rank, an unknown device, or "cuda" without a GPU.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: at least 1 rank is needed, as a whole number")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} is not known; use 'auto', 'cpu' or 'cuda'")
    if gpus is None:
        gpus = torch.cuda.device_count()  # asks the driver; does not initialise CUDA
    threads = threads_per_rank(usable_cores() if cores is None else cores, ranks)
    if cores is None:
        threads = min(threads, torch.get_num_threads())  # of a caller that keeps to few: OMP_NUM_THREADS
    if device == "cpu" or gpus == 0:
        if device == "cuda":
            raise ValueError(f"ranks={ranks} with device='cuda': this machine has no GPU; use device='cpu'")
        reason = "the CPU, as asked" if device == "cpu" else "no GPU here"
        return DeviceChoice(ranks, "cpu", "gloo", threads, reason)
    if ranks <= gpus:
        reason = "one GPU a rank, as asked" if device == "cuda" else f"one rank a GPU, {gpus} GPUs here"
        return DeviceChoice(ranks, "cuda", "cpu:gloo,cuda:nccl", threads, reason, ranks)
    if gpus == 1:
        reason = f"{ranks} ranks share the one GPU here"
    else:
        reason = f"{ranks} ranks share the {gpus} GPUs here, up to {-(-ranks // gpus)} on each"
    return DeviceChoice(ranks, "cuda", SHARED_GPU_BACKEND, threads, reason, gpus)
