"""What one rank of a page may use: its share of a GPU's free memory, which 16-bit dtype, FLOPs a second.

    share = lesson.measure_share(pool)      # measured on every rank; the smallest counts
    RankShare(4, "cuda", 3.5e9, bf16=False, flop_rate=6e12)      # four ranks on one T4

Ranks that share a GPU get equal parts of what is free once all of them have started, so that their CUDA
contexts are paid for. `HPNB_GPU_MEMORY_GB` and `HPNB_NO_BF16` (hpnb.ranks.gpu_limits) make a large GPU act
like a small one.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

import hpnb
from hpnb.precision import best_16_bit
from hpnb.ranks.gpu_limits import gpu_memory_limit

_SIDE, _PRODUCTS = 4096, 5  # of the matrix products that are timed


@dataclass(frozen=True)
class RankShare:
    """What each of `ranks` ranks may use.

    Attributes:
        ranks: of the page.
        device: "cpu" or "cuda".
        memory: bytes that a rank may use on its GPU; inf on a CPU, where pages train small models.
        bf16: whether the GPU computes in bf16.
        flop_rate: FLOP/s of a rank's 16-bit matrix products while all ranks compute.
    """

    ranks: int
    device: str
    memory: float = math.inf
    bf16: bool = True
    flop_rate: float = math.inf

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations: float32 on a CPU, else bfloat16 or, where it is missing, float16."""
        if self.device == "cpu":
            return torch.float32
        return torch.bfloat16 if self.bf16 else torch.float16


def measure_share(ranks: hpnb.Ranks | int) -> RankShare:
    """Ask every rank, and take the smallest answer.

    Args:
        ranks: a pool, or how many ranks to start for the measurement.
    """
    choice = hpnb.ranks.choose_device("auto", ranks) if isinstance(ranks, int) else ranks.choice
    if choice.device == "cpu":
        return RankShare(choice.ranks, "cpu")
    answers = hpnb.launch(_measure, ranks=ranks) if isinstance(ranks, int) else ranks.run(_measure)
    on_gpu = Counter(gpu for gpu, _, _, _ in answers)
    limit = gpu_memory_limit() or math.inf
    return RankShare(
        choice.ranks,
        choice.device,
        min(min(free, limit) / on_gpu[gpu] for gpu, free, _, _ in answers),
        all(bf16 for _, _, bf16, _ in answers),
        min(rate for _, _, _, rate in answers),
    )


def _measure() -> tuple[str, float, bool, float]:
    """On a rank: (its GPU, bytes that are free there, whether it has bf16, FLOP/s beside the others)."""
    device = hpnb.device()
    name = best_16_bit(device)
    rate = _flop_rate(hpnb.precision.policy(name).compute)
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()  # every rank has given back what it timed
    properties = torch.cuda.get_device_properties(device)
    gpu = str(getattr(properties, "uuid", "") or device)
    return gpu, float(torch.cuda.mem_get_info(device)[0]), name == "bf16", rate


def _flop_rate(dtype: torch.dtype) -> float:
    a, b = (torch.randn(_SIDE, _SIDE, device=hpnb.device()).to(dtype) for _ in range(2))
    torch.matmul(a, b).sum().item()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(_PRODUCTS):
        c = torch.matmul(a, b)
    c.sum().item()  # waits for the GPU
    return _PRODUCTS * 2 * _SIDE**3 / (time.perf_counter() - began)
