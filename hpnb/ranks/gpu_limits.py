"""Two environment variables that make a large GPU act like a small one, for tests and for a shared machine.

    HPNB_GPU_MEMORY_GB=15   ranks use at most 15 GB of each GPU; ranks that share a GPU split them
    HPNB_NO_BF16=1          16-bit training uses fp16, as on GPUs before compute capability 8.0

Both are read here and nowhere else. The memory limit is the allocator's: more raises torch.OutOfMemoryError.
What lies outside the allocator (CUDA contexts, NCCL's buffers) is not limited.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import torch

from hpnb.ranks.current_rank import current

OUTSIDE_THE_ALLOCATOR = 0.75e9  # bytes of a rank's CUDA context and communication buffers, about


def gpu_memory_limit(environment: Mapping[str, str] = os.environ) -> float | None:
    """Bytes of each GPU that all its ranks may use together; None without a limit.

    Raises:
        ValueError: HPNB_GPU_MEMORY_GB is not a number above 0.
    """
    text = environment.get("HPNB_GPU_MEMORY_GB", "").strip()
    if not text:
        return None
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < math.inf:
        raise ValueError(f"HPNB_GPU_MEMORY_GB={text!r} is not a number of gigabytes above 0, such as 15")
    return gigabytes * 1e9


def bf16_denied() -> bool:
    return os.environ.get("HPNB_NO_BF16", "").strip() not in ("", "0")


def limit_gpu_memory(device: torch.device, ranks: int) -> None:
    """Hold this process's allocator to its share of the GPU. A rank that needs more then runs out of memory
    itself, and not the rank beside it.

    Args:
        device: of this rank; on a CPU nothing is limited.
        ranks: how many lie on this GPU. One that has it alone is held to HPNB_GPU_MEMORY_GB, if that is set.
    """
    current.ranks_on_gpu = ranks
    limit = gpu_memory_limit()
    if device.type != "cuda" or (limit is None and ranks == 1):
        return
    total = torch.cuda.get_device_properties(device).total_memory
    usable = max(total - ranks * OUTSIDE_THE_ALLOCATOR, total / 2) if ranks > 1 else total
    share = min(usable, limit or usable) / ranks
    torch.cuda.set_per_process_memory_fraction(min(1.0, share / total), device)
