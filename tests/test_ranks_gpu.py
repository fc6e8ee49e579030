"""Ranks on GPUs: NCCL, a caller that has CUDA up itself, and failures while others wait in a kernel."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from test_ranks import wait_until

import hpnb
from hpnb import Layout, Mesh, comm

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()


def total() -> torch.Tensor:
    x = torch.full((3,), float(hpnb.rank()), device=hpnb.device())
    dist.all_reduce(x)
    return x


def test_cuda_in_the_caller_does_no_harm_and_results_come_on_the_cpu() -> None:
    torch.ones(1, device="cuda")
    for result in hpnb.launch(total, ranks=GPUS, timeout=120):
        assert result.device.type == "cpu"
        assert result.tolist() == [sum(range(GPUS))] * 3


def test_each_rank_has_a_gpu_and_both_backends() -> None:
    def look() -> tuple[str, float, float]:
        cpu = torch.ones(1)
        dist.all_reduce(cpu)
        axis = Mesh(Layout(tp=hpnb.world_size())).tp
        gpu = comm.reduce_scatter(torch.ones(hpnb.world_size(), device=hpnb.device()), axis, 0)
        return str(hpnb.device()), cpu.item(), gpu.item()

    found = hpnb.launch(look, ranks=GPUS, timeout=120)
    assert found == [(f"cuda:{r}", GPUS, GPUS) for r in range(GPUS)]


def test_a_module_on_a_gpu_comes_back_on_the_cpu() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Linear(2, 2).to(hpnb.device())

    for model in hpnb.launch(build, ranks=2, timeout=120):
        assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("how", ["raises", "exits", "killed", "hangs", "out of memory"])
def test_a_failure_while_others_wait_in_nccl_ends_the_call_and_frees_the_gpus(how: str) -> None:
    free = torch.cuda.mem_get_info()[0]

    def act() -> None:
        if how == "raises":
            raise KeyError("gone")
        if how == "exits":
            os._exit(3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
        torch.empty(1 << 50, dtype=torch.uint8, device=hpnb.device())

    def run() -> None:
        x = torch.ones(1 << 20, device=hpnb.device())
        dist.all_reduce(x)
        if hpnb.rank() == 1:
            act()
        dist.all_reduce(x)
        torch.cuda.synchronize()  # waits in here

    begin = time.monotonic()
    with pytest.raises(hpnb.RankError) as caught:
        hpnb.launch(run, ranks=GPUS, timeout=15 if how == "hangs" else 120)
    assert time.monotonic() - begin < (32 if how == "hangs" else 17)  # 15 s, and the start of NCCL
    assert caught.value.rank == 1
    assert "torch.cuda.synchronize()  # waits in here" in caught.value.stacks[0]
    assert wait_until(lambda: torch.cuda.mem_get_info()[0] > free - (64 << 20))
    assert len(hpnb.launch(total, ranks=GPUS, timeout=120)) == GPUS


def test_state_on_gpus_stays_between_runs() -> None:
    def put() -> None:
        global kept
        kept = torch.full((2,), float(hpnb.rank()), device=hpnb.device())

    def get() -> tuple[str, float]:
        return kept.device.type, kept.sum().item()  # type: ignore[name-defined]

    with hpnb.Ranks(GPUS, timeout=120) as ranks:
        ranks.run(put)
        assert ranks.run(get) == [("cuda", 2.0 * r) for r in range(GPUS)]
