"""Memory of the GPUs of one machine that they open to each other: PyTorch's symmetric memory.

Every rank of an axis opens as many bytes. The others write there by their copy engines, which take no
multiprocessor from the matmuls, and signals between GPUs say when: no host waits.
"""

from __future__ import annotations

import socket
from typing import Protocol

import torch
import torch.distributed as dist

from hpnb.mesh import Axis


class SymmetricMemory(Protocol):
    """What all ranks of an axis have opened, as one of them sees it; ranks are places on the axis.

    A signal is set by one rank for another, on a channel, and taken once; all of it is work on the current
    stream.
    """

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A rank's memory, from so many elements on, as a tensor."""

    def put_signal(self, dst_rank: int, channel: int = 0) -> None:
        """Tell a rank, once it has taken what it was told before on this channel."""

    def wait_signal(self, src_rank: int, channel: int = 0) -> None:
        """Wait until a rank has told, and take it."""


def have_one_gpu_each(axis: Axis, device: torch.device) -> bool:
    """Whether all ranks are on one host, each with a GPU of its own. All of them ask together."""
    mine = (socket.gethostname(), device.index)
    everyone: list[tuple[str, int]] = [mine] * axis.size
    dist.all_gather_object(everyone, mine, axis.group)
    return len({host for host, _ in everyone}) == 1 and len({index for _, index in everyone}) == axis.size


def open_symmetric_memory(axis: Axis, nbytes: int, device: torch.device) -> SymmetricMemory | None:
    """So many bytes on every rank; None, on all of them, where one could not. All of them ask together."""
    from torch.distributed import _symmetric_memory as symmetric

    memory: SymmetricMemory | None = None
    error = ""
    try:
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        memory = symmetric.rendezvous(own, axis.group)
    except RuntimeError as raised:
        error = str(raised)
    errors: list[str] = [""] * axis.size
    dist.all_gather_object(errors, error, axis.group)
    return None if any(errors) else memory


__all__ = ["SymmetricMemory", "have_one_gpu_each", "open_symmetric_memory"]
