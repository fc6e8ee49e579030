"""Memory that the GPUs of one node open to each other: PyTorch's symmetric memory.

Every rank of an axis opens the same number of bytes. The others write there with their copy engines, which
take no multiprocessor from the matmuls. Signals between GPUs order the copies, so no process waits.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Protocol

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.ranks.current_rank import collectives_on_streams

MARGIN = 256 * 2**20  # bytes
# Before torch 2.15 a rendezvous counts those of the process in the keys that it exchanges, not those of the
# group (pytorch/pytorch#196082). Ranks with different counts wait for keys that nobody writes.
COUNTS_BY_PROCESS = torch.__version__ < "2.15"
_rendezvous_count = 0  # of this process, in all groups


class SymmetricMemory(Protocol):
    """What all ranks of an axis have opened, as one of them sees it; ranks are places on the axis.

    A signal is set by one rank for another on a channel, and cleared by the wait for it. Both are work on the
    current stream.
    """

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A view of a rank's memory as a tensor of `sizes`, from `storage_offset` elements on."""

    def put_signal(self, dst_rank: int, channel: int = 0) -> None:
        """Signal a rank, once it has cleared the signal before on this channel."""

    def wait_signal(self, src_rank: int, channel: int = 0) -> None:
        """Wait for a rank's signal, and clear it."""


def share_a_node(axis: Axis, device: torch.device) -> bool:
    """Whether all ranks of `axis` are on one node, each with a GPU to itself. All of them call it.

    Where ranks share GPUs, those of one axis may well be on different ones. But PyTorch's symmetric memory
    does not know their backend, and its rendezvous ends the process (torch 2.11, SIGSEGV).
    """
    if device.type == "cuda" and not collectives_on_streams(device):
        return False
    place = (socket.gethostname(), device.index)
    places: list[tuple[str, int]] = [place] * axis.size
    dist.all_gather_object(places, place, axis.group)
    return len({host for host, _ in places}) == 1 and len({index for _, index in places}) == axis.size


def open_symmetric_memory(axis: Axis, nbytes: int, device: torch.device) -> SymmetricMemory | None:
    """Open `nbytes` on every rank of `axis`; None on all of them if one rank could not. All of them call it.

    The ranks agree after the allocation and before the rendezvous, in which they wait for each other: a rank
    that could not allocate would leave the others there. A rank whose GPU is nearly full does not try: there
    PyTorch's allocation ends the process (torch 2.11, SIGSEGV). In older PyTorch none opens memory where the
    ranks have met others in different numbers before, as after a layout whose replicas had unequal batches.
    """
    from torch.distributed import _symmetric_memory as symmetric

    global _rendezvous_count
    memory: SymmetricMemory | None = None
    allocation: torch.Tensor | None = None
    with suppress(RuntimeError):  # an OutOfMemoryError is one
        if _has_room(nbytes, device):
            allocation = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    if not _all_ranks(allocation is not None, axis):
        return None
    if COUNTS_BY_PROCESS and len(set(_gather(_rendezvous_count, axis))) > 1:
        return None
    assert allocation is not None
    _rendezvous_count += 1
    with suppress(RuntimeError):
        memory = symmetric.rendezvous(allocation, axis.group)
    return memory if _all_ranks(memory is not None, axis) else None


def _has_room(nbytes: int, device: torch.device) -> bool:
    """Whether the GPU has `nbytes` free, and MARGIN for others that allocate at this moment."""
    if device.type != "cuda":
        return True
    if torch.cuda.mem_get_info(device)[0] < nbytes + MARGIN:
        torch.cuda.empty_cache()  # what the allocator keeps of tensors that are gone
    return torch.cuda.mem_get_info(device)[0] >= nbytes + MARGIN


def _all_ranks(succeeded: bool, axis: Axis) -> bool:
    """Whether every rank of `axis` succeeded."""
    return all(_gather(succeeded, axis))


def _gather(value: int, axis: Axis) -> list[int]:
    """The values of all ranks of `axis`."""
    values = [value] * axis.size
    dist.all_gather_object(values, value, axis.group)
    return values
