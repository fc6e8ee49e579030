"""This machine as a datasheet: matmul rate, memory bandwidth and all-reduces, measured and kept.

The file lies in `hpnb.files.writable_home()` and is read by `--gpu measured`. A peak is what large matmuls
alone reached, and MFU is of that. On Hopper and Blackwell, which power limits, those of a step reach 0.585 /
0.69 of it, as in `datasheets`. No network between nodes is measured, so plans of several nodes take that of
`datasheets`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hpnb.files import writable_home, write_text
from hpnb.hybrid.plan_command.report import network_words
from hpnb.precision import best_16_bit, policy
from hpnb.ranks import choose_device, default_ranks, device, launch
from hpnb.theory.communication import steps
from hpnb.theory.datasheets import GPU, HOPPER_SHARE, MATMUL_SHARE
from hpnb.theory.fit_link import fit_link
from hpnb.theory.plan_messages import messages

FILE = "measured-gpu.json"
_SIDE = {"cpu": 512, "cuda": 8192}
_BYTES = {"cpu": tuple(1 << k for k in range(12, 23, 2)), "cuda": tuple(1 << k for k in range(16, 30, 2))}
_COPIED = {"cpu": 1 << 25, "cuda": 1 << 30}  # bytes, beyond caches
_CPU_MEMORY = 4e9  # bytes a rank on a CPU is given, for want of memory of its own
_REPEATS = 6


def measure_gpu(ranks: int | None = None, device_name: str = "auto", folder: Path | None = None) -> GPU:
    """Measure with `ranks` ranks, by default one a GPU, and keep it."""
    choice = choose_device(device_name, default_ranks() if ranks is None else ranks)
    if choice.shares_gpus:
        raise ValueError(
            f"{choice.ranks} ranks share {choice.gpus} GPUs; --measure needs one rank a GPU, or one on a CPU"
        )
    results = launch(_measure, ranks=choice.ranks, device=choice.device, timeout=120.0)
    matmul = min(result[0] for result in results)
    copy = min(result[1] for result in results)
    sizes = _BYTES[choice.device]
    if choice.ranks > 1:
        slowest = [max(result[2][i] for result in results) for i in range(len(sizes))]
        link = fit_link(sizes, slowest, choice.ranks)
        # `fit_link` counts a ring's messages, and the plan those of a tree where they are fewer.
        per_message = steps("all_reduce", choice.ranks) / messages("all_reduce", choice.ranks)
        bandwidth, latency = min(link.bandwidth, 1e12), per_message * link.latency
    else:
        bandwidth, latency = copy, 1e-6
    memory = results[0][3]
    gpu = GPU(
        "measured", matmul, memory, copy, bandwidth, "measured", per_node=choice.ranks, cards=choice.ranks,
        dtype=results[0][4], matmul_share=results[0][5], memory_share=1.0, link_share=1.0, latency=latency,
    )  # fmt: skip
    write_text(_path(folder), json.dumps(asdict(gpu), indent=1) + "\n")
    return gpu


def measured_gpu(folder: Path | None = None) -> GPU:
    """What was measured before."""
    try:
        return GPU(**json.loads(_path(folder).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError("this machine is not measured yet; run `python -m hpnb plan --measure`") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{_path(folder)} is no measurement: {error}; run --measure again") from error


def format_card(gpu: GPU) -> str:
    """The numbers in a sentence."""
    link = f"{gpu.link / 1e9:.3g} GB/s and {gpu.latency * 1e6:.3g} us between ranks"
    if gpu.per_node == 1:
        link = "and no link, since there was one rank"
    return (
        f"measured with {gpu.per_node} rank{'s' * (gpu.per_node > 1)}: "
        f"{gpu.peak / 1e12:.3g} TFLOP/s of matmuls in {gpu.dtype}, "
        f"{gpu.memory_bandwidth / 1e9:.4g} GB/s of memory ({gpu.memory / 1e9:.0f} GB), "
        f"{link}; use it with --gpu measured. Not measured, and taken from datasheets: "
        f"{gpu.matmul_share:.0%} of that rate for matmuls in a step; {network_words(gpu)} between nodes"
    )


def _path(folder: Path | None) -> Path:
    home = folder or writable_home()
    if home is None:
        raise ValueError("no folder to keep a measurement in; set HPNB_HOME to one that can be written")
    return home / FILE


def _measure() -> tuple[float, float, list[float], float, str, float]:
    """On a rank: FLOP/s of a matmul, bytes/s of a copy, seconds of all-reduces, bytes of memory, dtype, and
    what share of the rate a step's matmuls reach."""
    where = device()
    name = best_16_bit(where) if where.type == "cuda" else "fp32"
    side, dtype = _SIDE[where.type], policy(name).compute
    a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
    matmul = 2 * side**3 / _median_seconds(partial(torch.matmul, a, b))
    source = torch.zeros(_COPIED[where.type] // 4, device=where)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _median_seconds(partial(target.copy_, source))
    times = []
    for size in _BYTES[where.type]:
        times.append(_median_seconds(partial(dist.all_reduce, torch.zeros(size // 4, device=where))))
    memory = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else _CPU_MEMORY
    limited = where.type == "cuda" and torch.cuda.get_device_capability(where) >= (9, 0)
    return matmul, copy, times, float(memory), name, HOPPER_SHARE / MATMUL_SHARE if limited else 1.0


def _median_seconds(work: Callable[[], object]) -> float:
    def one() -> float:
        dist.barrier()
        if device().type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device().type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return statistics.median([one() for _ in range(_REPEATS)][2:])
