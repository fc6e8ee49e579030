"""Memory that ranks sharing GPUs open to each other: one buffer a rank, which the others read.

On one GPU a buffer is the GPU's memory, opened by CUDA IPC (CUDA driver API, "IPC memory"): what one rank
copies in, another copies out, at the speed of the GPU's memory. Where the ranks are on several GPUs, or the
driver does not support IPC (WSL 2), a buffer is the host's memory, and data takes two copies over PCIe.

The buffers are allocated beside PyTorch's allocator, as NCCL's are, so that `torch.cuda.memory_allocated`
and `hpnb.record.memory` see the program's own tensors alone.
"""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
Exchange = Callable[[bytes], Sequence[bytes]]  # what this rank says -> what each of them says


class BufferOffer(NamedTuple):
    """Where a rank's buffer is: on which GPU by which IPC handle, or in which of its files."""

    gpu: str
    handle: bytes  # empty: this rank could not allocate memory that others may open
    file: tuple[int, int]  # process and descriptor


class SharedBuffers:
    """One buffer a rank of a group, as uint8 tensors of `nbytes`. Every rank of the group makes it at once.

    Args:
        rank: this rank's place in the group.
        exchange: sends this rank's bytes to all and returns everybody's, in order.
        nbytes: of each buffer.
        device: this rank's GPU, or the CPU, for which the host's memory is used.

    Attributes:
        tensors: the ranks' buffers, in order, all on the GPU or none.
    """

    def __init__(self, rank: int, exchange: Exchange, nbytes: int, device: torch.device) -> None:
        self._nbytes, self._device = nbytes, device
        self._file = os.memfd_create("hpnb-buffer")
        os.ftruncate(self._file, nbytes)
        self._allocation = _allocate(nbytes) if device.type == "cuda" else None
        handle = b"" if self._allocation is None else _ipc_handle(self._allocation)
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        texts = exchange(repr((gpu, handle, (os.getpid(), self._file))).encode())
        offers = [BufferOffer(*ast.literal_eval(text.decode())) for text in texts]
        tensors: list[torch.Tensor] | None = None
        if all(offer.handle and offer.gpu == gpu for offer in offers):
            tensors = self._open_on_gpu(rank, offers)
        # All of them use the GPU's memory or none does, so they agree after opening it.
        on_gpu = all(answer == b"opened" for answer in exchange(b"opened" if tensors else b"failed"))
        if not on_gpu or tensors is None:
            tensors = [_map_file(offer.file, nbytes) for offer in offers]
            exchange(b"mapped")  # nobody closes a file that another is about to open
            _free(self._allocation)
            self._allocation = None
        os.close(self._file)
        self.tensors = tensors

    def _open_on_gpu(self, rank: int, offers: Sequence[BufferOffer]) -> list[torch.Tensor] | None:
        pointers: list[int | None] = [
            self._allocation if place == rank else _open_ipc_handle(offer.handle)
            for place, offer in enumerate(offers)
        ]
        if any(pointer is None for pointer in pointers):
            return None
        return [_as_tensor(pointer, self._nbytes, self._device) for pointer in pointers if pointer]


def unlisted_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """(nbytes,) uint8 on `device`, outside of PyTorch's allocator, for as long as the process lives."""
    pointer = _allocate(nbytes) if device.type == "cuda" else None
    if pointer is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return _as_tensor(pointer, nbytes, device)


# --- the CUDA driver -------------------------------------------------------------------------------------


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _driver() -> Any:
    """The CUDA driver's library; None where there is none. The calling thread has to have used the GPU."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _allocate(nbytes: int) -> int | None:
    pointer = ctypes.c_uint64()
    driver = _driver()
    if driver is None or driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)):
        return None
    return pointer.value


def _free(pointer: int | None) -> None:
    if pointer is not None:
        _driver().cuMemFree_v2(ctypes.c_uint64(pointer))


def _ipc_handle(pointer: int) -> bytes:
    handle = _IpcHandle()
    failed = _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer))
    return b"" if failed else ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)


def _open_ipc_handle(text: bytes) -> int | None:
    handle, pointer = _IpcHandle.from_buffer_copy(text), ctypes.c_uint64()
    failed = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS)
    return None if failed else pointer.value


def _as_tensor(pointer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    memory = types.SimpleNamespace(
        __cuda_array_interface__={
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }
    )
    return torch.as_tensor(memory, device=device)


def _map_file(file: tuple[int, int], nbytes: int) -> torch.Tensor:
    """The file of another process's descriptor, which has no name and goes with the last who maps it."""
    process, descriptor = file
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(opened, nbytes), dtype=torch.uint8)
    finally:
        os.close(opened)
