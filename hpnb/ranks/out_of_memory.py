"""What a rank says when its GPU is full: who holds what, and what would fit, in place of a traceback.

    1.20 GB more do not fit: 6.90 GB were in use by this rank, of 7.50 GB, its part of 2 ranks on this GPU
        2.62 GB   (2048, 8192) bfloat16, parameters
        1.31 GB   (2048, 8192) bfloat16, gradients
        2.97 GB   smaller tensors, activations that autograd held, and what was freed as the call ended

Tensors are found among Python's objects while the failed call's frames are alive.
"""

from __future__ import annotations

import gc
import re
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hpnb.ranks.current_rank import current
from hpnb.ranks.gpu_limits import gpu_memory_limit

_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_HELD = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is allocated by PyTorch")  # before the call unwound
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST = 8  # groups that are listed
Group = tuple[str, tuple[int, ...], str]  # category, shape, dtype


def reading(error: BaseException) -> str | None:
    """The lines above for a torch.OutOfMemoryError; None for another exception."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    device = torch.cuda.current_device()
    in_use = torch.cuda.memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    limited = gpu_memory_limit() or current.shares_gpu
    fraction = torch.cuda.get_per_process_memory_fraction(device) if limited else 1.0
    free, _ = torch.cuda.mem_get_info(device)
    return describe(str(error), in_use, fraction * total, live_tensors("cuda"), current.ranks_on_gpu, free)


def describe(
    message: str,
    in_use: float,
    capacity: float,
    groups: Counter[Group],
    ranks_on_gpu: int = 1,
    free: float | None = None,
) -> str:
    """The reading in lines.

    Args:
        message: torch's, which says how many bytes were asked for and, as a rule, how many were in use.
        in_use: bytes that this rank's tensors take now.
        capacity: bytes of the GPU, or of the part that this process may use.
        groups: bytes of the tensors that are alive.
        ranks_on_gpu: how many ranks share the GPU.
        free: bytes of the GPU that no process holds; named if they are why this rank did not get its part.
    """
    asked = _ASKED.search(message)
    more = f"{float(asked[1]) * _UNITS[asked[2]] / 1e9:.2f} GB more do" if asked else "the next tensor does"
    if held := _HELD.search(message):
        in_use = max(in_use, float(held[1]) * _UNITS[held[2]])
    shared = f", its part of {ranks_on_gpu} ranks on this GPU" if ranks_on_gpu > 1 else ""
    used = f"{in_use / 1e9:.2f} GB were in use by this rank, of {capacity / 1e9:.2f} GB{shared}"
    if asked and free is not None:
        wanted = float(asked[1]) * _UNITS[asked[2]]
        if in_use + wanted < capacity and free < wanted:
            used += f"; other processes hold the rest, and {free / 1e9:.2f} GB of the GPU are free"
    lines = [f"{more} not fit: {used}"]
    for (category, shape, dtype), nbytes in groups.most_common(_MOST):
        lines.append(f"    {nbytes / 1e9:6.2f} GB   {_shape(shape)} {dtype}, {category}")
    if (rest := in_use - sum(nbytes for _, nbytes in groups.most_common(_MOST))) > 0:
        what = "smaller tensors, activations that autograd held, and what was freed as the call ended"
        lines.append(f"    {rest / 1e9:6.2f} GB   {what}")
    lines.append(
        "A smaller batch or model would fit. For a page of this series set HPNB_GPU_MEMORY_GB below what is "
        "free, and restart the kernel: it then chooses smaller sizes."
    )
    return "\n".join(lines)


def live_tensors(device: str) -> Counter[Group]:
    """Bytes of the tensors that Python objects hold on `device`, by category, shape and dtype."""
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type == device]
    parameters = [t for t in tensors if isinstance(t, torch.nn.Parameter)]
    category = {id(p): "parameters" for p in parameters}
    category |= {id(p.grad): "gradients" for p in parameters if p.grad is not None}
    tensors += [p.grad for p in parameters if p.grad is not None]
    seen: set[int] = set()
    groups: Counter[Group] = Counter()
    for tensor in sorted(tensors, key=lambda t: id(t) not in category):  # a view counts with its parameter
        # Tracing leaves fake tensors behind: they have no memory, and asking one for its address warns.
        if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
            continue
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # nor has a subclass that wraps others
            continue
        if address and address not in seen:
            seen.add(address)
            kind = category.get(id(tensor), "other tensors")
            dtype = str(tensor.dtype).removeprefix("torch.")
            groups[kind, tuple(tensor.shape), dtype] += storage.nbytes()
    return groups


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
