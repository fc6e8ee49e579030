"""Ranks that share the GPU of this machine: time, memory, turns and what is left behind. Needs one GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb import Layout, Mesh
from hpnb.pipeline_parallel import schedules
from hpnb.ranks import shared_gpu_group
from hpnb.ranks.gpu_turns import gpu_turns

pytestmark = pytest.mark.one_gpu
GB = 1e9


def look() -> tuple[str, bool, float, float]:
    assert gpu_turns() is not None
    x = torch.full((3_000_000,), float(hpnb.rank()), device=hpnb.device())
    dist.all_reduce(x)
    group = dist.group.WORLD
    assert isinstance(group, shared_gpu_group.SharedGpuGroup)
    assert group._shared.buffers is not None
    listed = torch.cuda.memory_allocated() / x.nbytes  # the buffers are not PyTorch's
    return str(hpnb.device()), group._shared.buffers.tensors[0].is_cuda, x.mean().item(), listed


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_the_gpu(ranks: int) -> None:
    gpus = torch.cuda.device_count()
    for rank, (device, on_gpu, mean, listed) in enumerate(hpnb.launch(look, ranks=ranks, timeout=100)):
        assert device == f"cuda:{rank % gpus}"
        assert on_gpu or gpus > 1
        assert mean == sum(range(ranks))
        assert listed < 1.1


def take_too_much() -> int:
    if hpnb.rank() == 1:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.empty(int(total * 0.6), dtype=torch.uint8, device="cuda")
    return 1


def survive() -> float:
    """Out of memory on one rank is caught, and all go on."""
    free = 0.0
    if hpnb.rank() == 1:
        try:
            take_too_much()
        except torch.OutOfMemoryError:
            free = 1.0
    x = torch.tensor(free, device=hpnb.device())
    dist.all_reduce(x)
    return x.item()


def test_a_rank_that_needs_more_than_its_part_says_so() -> None:
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(take_too_much, ranks=2, timeout=100)
    assert caught.value.rank == 1
    assert "OutOfMemoryError" in str(caught.value)
    assert "2 ranks on this GPU" in str(caught.value)
    with hpnb.Ranks(2, timeout=100) as ranks:
        assert ranks.run(survive) == [1.0, 1.0]
        assert ranks.run(survive) == [1.0, 1.0]


def memory_in_use() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) / 1e3


KILLED = """
import hpnb, os, torch, time
def fill():
    x = torch.empty(2_000_000_000, dtype=torch.uint8, device=hpnb.device())
    torch.distributed.all_reduce(x[:100].float())
    return x.numel()
globals()["x"] = None
ranks = hpnb.Ranks(3, timeout=100)
def keep():
    global kept
    kept = torch.empty(2_000_000_000, dtype=torch.uint8, device=hpnb.device())
ranks.run(keep)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_killed_caller_leaves_no_memory_on_the_gpu(tmp_path: Path) -> None:
    before = memory_in_use()
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    with subprocess.Popen(["python3", str(program)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert memory_in_use() > before + 6
        os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 20
    while memory_in_use() > before + 0.1 and time.monotonic() < until:
        time.sleep(0.2)
    assert memory_in_use() <= before + 0.1


def step_by_turns() -> tuple[str, float, float, float]:
    """A recorded step beside ranks that compute all the time: its action's time, alone and in turns."""
    torch.manual_seed(0)
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8 * axis.size)))
    schedule = schedules.make("1f1b", stages=axis.size, microbatches=4)
    pipe = hpnb.Pipeline(model, axis, schedule, lambda y, _: y.square().mean())
    batch = torch.randn(4 * 8192, 4096)
    for _ in range(2):
        result = pipe.step(batch)
    tl = result.timeline
    times = [e.duration for e in tl.events if e.rank == 0 and e.op == "F"]
    # The same forward with nobody else on the GPU.
    x = torch.randn(8192, 4096, device=hpnb.device())
    alone = 0.0
    dist.barrier()
    if hpnb.rank() == 0:
        layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).to(hpnb.device())
        durations = []
        for _ in range(8):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            layers(x)
            end.record()
            end.synchronize()
            durations.append(start.elapsed_time(end) / 1e3)
        alone = sorted(durations)[4]
    dist.barrier()
    return tl.source, sorted(times)[len(times) // 2], alone, tl.bubble_fraction


def test_a_recorded_action_takes_what_it_takes_on_an_idle_gpu() -> None:
    source, in_turns, alone, bubble = hpnb.launch(step_by_turns, ranks=4, timeout=200)[0]
    print(f"\n{source}: F {in_turns * 1e3:.3f} ms in turns, {alone * 1e3:.3f} ms alone, bubble {bubble:.3f}")
    assert "replayed from measured GPU time" in source
    assert "NVLink" in source
    assert 0.9 < in_turns / alone < 1.1
    assert 0.3 < bubble < 0.55  # (p - 1) / (m + p - 1) = 3 / 7
