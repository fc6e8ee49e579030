"""Traces and memory snapshots are what viewers read: Perfetto, chrome://tracing, PyTorch's memory viewer.

The rules of the Chrome trace format are those of its document, "Trace Event Format": an array of events, with
"ph", "pid" and "name" each; complete events ("X") have "ts" and "dur" in microseconds; metadata events ("M")
name processes and threads in args["name"].
"""

from __future__ import annotations

import json
import numbers
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from torch.cuda import _memory_viz

import hpnb
from hpnb.pipeline_parallel import schedules


def broken_rules(trace: dict[str, Any]) -> list[str]:
    """What the Chrome trace format forbids, in words; [] if the trace follows it."""
    problems = []
    names: dict[tuple[str, int, int], str] = {}
    for number, event in enumerate(trace["traceEvents"]):
        required = {"X": {"name", "cat", "ts", "dur", "pid", "tid"}, "M": {"name", "pid", "args"}}
        missing = required.get(event.get("ph"), {"a known phase"}) - event.keys()
        if missing:
            problems.append(f"event {number} lacks {sorted(missing)}")
            continue
        if not all(isinstance(event[key], int) for key in ("pid", "tid") if key in event):
            problems.append(f"event {number}: pid and tid are integers")
        if event["ph"] == "M":
            if event["name"] in ("process_name", "thread_name"):
                tid = event["tid"] if event["name"] == "thread_name" else -1
                names[event["name"], event["pid"], tid] = event["args"]["name"]
        elif not all(isinstance(event[key], numbers.Real) and event[key] >= 0 for key in ("ts", "dur")):
            problems.append(f"event {number}: ts and dur are numbers from 0")
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and "pid" in event:
            if ("process_name", event["pid"], -1) not in names:
                problems.append(f"process {event['pid']} has no name")
            if ("thread_name", event["pid"], event["tid"]) not in names:
                problems.append(f"thread {event['tid']} of process {event['pid']} has no name")
    return problems


def recorded_on_two_ranks() -> hpnb.record.Timeline:
    def work() -> hpnb.record.Timeline:
        axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
        with hpnb.record.timeline() as recorder:
            with recorder.span("F", 0, 0):
                x = torch.ones(64, 64) @ torch.ones(64, 64)
            hpnb.comm.all_reduce(x, axis)
        return recorder.gather()

    pools = RankPools()
    try:
        return pools[2].run(work)[0]
    finally:
        pools.close()


def test_a_trace_of_several_ranks_follows_the_rules(tmp_path: Path) -> None:
    tl = recorded_on_two_ranks()
    trace = json.loads(tl.to_chrome_trace(tmp_path / "trace.json").read_text())
    assert broken_rules(trace) == []
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}, "both ranks are in one file"
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    durations = sorted(event["dur"] for event in spans)  # microseconds
    assert durations == pytest.approx(sorted(1e6 * event.duration for event in tl.events))
    assert {event["cat"] for event in spans} == {"compute", "communication"}


def test_a_simulated_trace_follows_the_rules_and_starts_at_zero(tmp_path: Path) -> None:
    tl = schedules.make("zb-h1", stages=4, microbatches=8).simulate()
    trace = json.loads(tl.to_chrome_trace(tmp_path / "trace.json").read_text())
    assert broken_rules(trace) == []
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * tl.makespan)


def test_the_rules_notice_what_a_viewer_would_not_show() -> None:
    good = {"ph": "X", "name": "a", "cat": "c", "ts": 0.0, "dur": 1.0, "pid": 0, "tid": 0}
    wrong = [
        {"ph": "X", "name": "a"},
        {**good, "ts": "0"},
        {**good, "dur": -1.0},
        {**good, "pid": "0"},
        {"name": "a"},
    ]
    for event in wrong:
        assert broken_rules({"traceEvents": [event]})
    assert broken_rules({"traceEvents": [good]}) == [
        "process 0 has no name",
        "thread 0 of process 0 has no name",
    ]


# --- memory ------------------------------------------------------------------------------------------------


def recorded_step() -> hpnb.record.MemoryRecorder:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with hpnb.record.memory(model, optimizer) as recorder:
        for _ in range(2):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder


def test_a_snapshot_replays_to_the_profile_s_peak(tmp_path: Path) -> None:
    recorder = recorded_step()
    snapshot = pickle.loads(recorder.to_memory_snapshot(tmp_path / "rank0.pickle").read_bytes())
    (trace,), (segment,) = snapshot["device_traces"], snapshot["segments"]
    live: dict[int, int] = {}
    totals, previous = [], 0
    for event in trace:
        assert {"action", "addr", "size", "stream", "time_us", "frames"} <= event.keys()
        assert event["time_us"] >= previous
        previous = event["time_us"]
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
        totals.append(sum(live.values()))
    profile = recorder.profile()
    assert max(totals) == profile.peak
    assert totals[-1] == profile.samples[-1].total == segment["allocated_size"]
    active = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert {block["address"]: block["size"] for block in active} == live
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    named = {event["frames"][0]["name"].split()[0] for event in trace}
    assert named == {"parameters", "gradients", "optimizer", "activations", "temporary"}


def test_pytorch_s_own_readers_take_the_snapshot(tmp_path: Path) -> None:
    path = recorded_step().to_memory_snapshot(tmp_path / "rank0.pickle")
    snapshot = pickle.loads(path.read_bytes())
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)
    assert "parameters (128, 64) float32" in _memory_viz.memory(
        snapshot, format_flamegraph=lambda lines: lines
    )
    text = _memory_viz.trace(snapshot)
    assert text.count("free completed") == sum(
        event["action"] == "free_completed" for event in snapshot["device_traces"][0]
    )


def test_a_storage_that_is_resized_is_freed_and_allocated_again(tmp_path: Path) -> None:
    from hpnb.record.memory_snapshot import write_memory_snapshot

    changes = [(0.0, 0, 1000), (0.1, 1, 24), (0.2, 0, -1000), (0.3, 0, 500), (0.4, 0, 500)]
    snapshot = pickle.loads(write_memory_snapshot(changes, ["weight", "bias"], tmp_path / "x").read_bytes())
    actions = [
        (e["action"], e["size"]) for e in snapshot["device_traces"][0] if e["action"] != "free_requested"
    ]
    assert actions == [("alloc", 1000), ("alloc", 24), ("free_completed", 1000), ("alloc", 500),
                       ("free_completed", 500), ("alloc", 1000)]  # fmt: skip


def test_a_full_disk_leaves_the_trace_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer that has the file open, and a run that ends half-way, see the old trace or the new one."""

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    simulated = schedules.make("1f1b", stages=2, microbatches=4).simulate()
    path = simulated.to_chrome_trace(tmp_path / "trace.json")
    before = path.read_text()
    monkeypatch.setattr("hpnb.files.sync", full)
    with pytest.raises(OSError, match="No space left"):
        schedules.make("gpipe", stages=2, microbatches=4).simulate().to_chrome_trace(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
