"""A record of memory as PyTorch's memory viewer reads it: drop the file on https://pytorch.org/memory_viz.

    with hpnb.record.memory(model, optimizer) as recorder:
        step()
    recorder.to_memory_snapshot("rank0.pickle")

The file is a pickle of the dict that torch.cuda.memory._snapshot() gives, of builtin types alone:

    device_traces   one list of events: {"action", "addr", "size", "stream", "time_us", "frames"}; actions are
                    "alloc", and "free_requested" with "free_completed" after it
    segments        one segment that covers all addresses, with what is still in use as its blocks

An event is about one storage. Its frame says category, shape and dtype of the tensor; there is no stack.
Addresses are made up, and no two storages share one. So the heights of the viewer's timeline are exact bytes
of tensors, and its map of the allocator means nothing. A kernel's workspace, which is no tensor, is missing.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnb.files import replace_file

_ALIGNMENT = 512  # bytes, as the CUDA allocator's


def write_memory_snapshot(
    changes: Sequence[tuple[float, int, int]], labels: Sequence[str], path: str | Path
) -> Path:
    """Write a snapshot of storages that grew and shrank.

    Args:
        changes: (seconds, number of a storage, bytes gained or lost), in order of time.
        labels: what each storage is, by number.
    """
    sizes, largest = [0] * len(labels), [0] * len(labels)
    for _, number, change in changes:
        sizes[number] += change
        largest[number] = max(largest[number], sizes[number])
    addresses, end = [], _ALIGNMENT
    for size in largest:
        addresses.append(end)
        end += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT

    trace: list[dict[str, Any]] = []

    def log(actions: Sequence[str], number: int, size: int, seconds: float) -> None:
        for action in actions:
            trace.append({"action": action, "addr": addresses[number], "size": size, "stream": 0,
                          "time_us": int(seconds * 1e6), "frames": _frames(labels[number])})  # fmt: skip

    in_use = [0] * len(labels)
    for seconds, number, change in changes:  # one that changes its size is freed, and allocated again
        if in_use[number]:
            log(("free_requested", "free_completed"), number, in_use[number], seconds)
        in_use[number] += change
        if in_use[number]:
            log(("alloc",), number, in_use[number], seconds)

    alive = [
        {"address": addresses[number], "size": size, "requested_size": size, "state": "active_allocated",
         "frames": _frames(labels[number])}
        for number, size in enumerate(in_use) if size
    ]  # fmt: skip
    total = sum(in_use)
    segment = {"device": 0, "address": _ALIGNMENT, "total_size": end - _ALIGNMENT, "allocated_size": total,
               "active_size": total, "requested_size": total, "stream": 0, "segment_type": "large",
               "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
               "blocks": _with_gaps(alive, _ALIGNMENT, end)}  # fmt: skip
    snapshot = {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}
    path = Path(path)
    replace_file(path, lambda draft: draft.write_bytes(pickle.dumps(snapshot)))
    return path


def _frames(label: str) -> list[dict[str, Any]]:
    return [{"filename": "hpnb.record.memory", "line": 0, "name": label}]


def _with_gaps(blocks: Sequence[dict[str, Any]], start: int, end: int) -> list[dict[str, Any]]:
    """Blocks that cover all addresses of a segment, as those of the allocator do."""
    covered: list[dict[str, Any]] = []
    for block in [*blocks, {"address": end, "size": 0}]:
        if block["address"] > start:
            gap = block["address"] - start
            covered.append({"address": start, "size": gap, "requested_size": 0, "state": "inactive",
                            "frames": []})  # fmt: skip
        if block["size"]:
            covered.append(block)
        start = block["address"] + block["size"]
    return covered
