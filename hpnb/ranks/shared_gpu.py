"""Ranks that share a GPU tell torch what they communicate over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpnb.ranks.current_rank import current
from hpnb.ranks.devices import SHARED_GPU_BACKEND as BACKEND
from hpnb.ranks.shared_gpu_group import SharedGpuGroup


def share_gpu() -> None:
    """Share this rank's GPU, `current.device`, with others: before the process group of all ranks is made.

    On the CPU, where tests do so, the same group copies through the host's memory.
    """
    assert current.device is not None, "ranks know their device before they share it"
    current.shares_gpu = current.device.type == "cuda"
    register_backend()


def register_backend() -> None:
    """Make "hpnb_shared_gpu" known to torch.distributed in this process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> SharedGpuGroup:
    device = current.device
    assert device is not None, "ranks know their device before they meet"
    return SharedGpuGroup(store, rank, size, timeout, device)
