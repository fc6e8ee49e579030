"""Where one step's time goes: a trace that opens in Perfetto, and the most expensive kernels as a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_NUM_ROWS = 12
_NAME_WIDTH = 96


def profile_step(title: str, step: Callable[[], object], path: Path | None) -> str:
    """Run `step` under torch's profiler and say what took longest. All ranks call it.

    Args:
        path: of the Chrome trace; None on ranks that only take part.

    Returns:
        The 12 kernels of the GPU (operators of the CPU, without one) with the most milliseconds, or "".
    """
    step()  # so that all ranks are here
    if path is None:
        step()
        return ""
    gpu = torch.cuda.is_initialized()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        step()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    rows = []
    for event in profiler.key_averages():
        if (event.device_type.name == "CUDA") == gpu and not event.is_user_annotation:
            took = event.self_device_time_total if gpu else event.self_cpu_time_total
            rows.append((took / 1e3, event.count, event.key))
    total = sum(took for took, _, _ in rows)
    rows.sort(reverse=True)
    lines = [f"{title}: {total:.1f} ms in {'kernels' if gpu else 'operators'} of rank 0, trace in {path}"]
    lines += [
        f"{took:9.2f} ms  {took / total:5.1%}  {count:5d} x  {name[:_NAME_WIDTH]}"
        for took, count, name in rows[:_NUM_ROWS]
    ]
    return "\n".join(lines)
