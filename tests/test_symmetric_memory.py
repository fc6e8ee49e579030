"""Sums by copies: the same as an all-reduce's, whatever the length, slot after slot, and nobody overtakes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb import Axis, Layout, Mesh, symmetric_all_reduce, symmetric_memory
from hpnb.background import Background
from hpnb.pipeline_parallel import schedules, symmetric_transfers
from hpnb.ranks import current_rank
from hpnb.symmetric_all_reduce import SymmetricAllReduce, bytes_needed


class Shared:
    """Memory of ranks that are threads. A signal is one flag, as on GPUs: set when clear, taken when set."""

    def __init__(self, ranks: int) -> None:
        self.bytes = [torch.full((bytes_needed(ranks),), 255, dtype=torch.uint8) for _ in range(ranks)]
        self.flags: set[tuple[int, int, int]] = set()
        self.changed = threading.Condition()

    def until(self, ready: Callable[[], bool], change: Callable[[], None]) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, 20), "a signal that never comes"
            change()
            self.changed.notify_all()


class OneRank:
    """What one of them sees; it dawdles before it signals, as a rank that lags."""

    def __init__(self, shared: Shared, rank: int, seed: int) -> None:
        self.shared, self.rank, self.random = shared, rank, random.Random(f"{rank} {seed}")

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        whole = self.shared.bytes[rank].view(dtype)
        return whole[storage_offset : storage_offset + torch.Size(sizes).numel()].view(sizes)

    def put_signal(self, dst_rank: int, channel: int = 0) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 0.003)
        flag = (self.rank, dst_rank, channel)
        self.shared.until(lambda: flag not in self.shared.flags, lambda: self.shared.flags.add(flag))

    def wait_signal(self, src_rank: int, channel: int = 0) -> None:
        flag = (src_rank, self.rank, channel)
        self.shared.until(lambda: flag in self.shared.flags, lambda: self.shared.flags.remove(flag))


def summed(ranks: int, flats: list[list[torch.Tensor]], average: bool, seed: int) -> list[list[torch.Tensor]]:
    """flats[rank][i] all-reduced one after the other, on threads."""
    shared = Shared(ranks)
    found = [[flat.clone() for flat in own] for own in flats]
    failed: list[BaseException] = []

    def work(rank: int) -> None:
        axis = Axis("dp", ranks, rank, None, tuple(range(ranks)))  # type: ignore[arg-type]
        sums = SymmetricAllReduce(axis, OneRank(shared, rank, seed))
        try:
            for flat in found[rank]:
                sums.all_reduce(flat, average)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_all_reduce, "PLACE", 64)


def drawn(ranks: int, lengths: list[int], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(len(lengths))
    return [[torch.randn(n, generator=g).to(dtype) for n in lengths] for _ in range(ranks)]


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_an_all_reduce(small: None, ranks: int, average: bool) -> None:
    flats = drawn(ranks, [8, 31, 1, 200, 64, 7], torch.float64)  # a part, a ragged one, pieces in all slots
    for own in summed(ranks, flats, average, 0):
        for i, flat in enumerate(own):
            wanted = sum(other[i] for other in flats) / (ranks if average else 1)
            assert torch.allclose(flat, wanted, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_has_the_same_bits_and_16_bits_are_rounded_once(small: None, seed: int) -> None:
    flats = drawn(4, [50] * 12, torch.bfloat16)
    found = summed(4, flats, True, seed)
    for i in range(12):
        exact = torch.stack([own[i].double() for own in flats]).mean(0)
        assert torch.equal(found[0][i], exact.bfloat16())
        assert all(torch.equal(own[i], found[0][i]) for own in found[1:])


def counted() -> tuple[float, float]:
    sums = SymmetricAllReduce(Axis("dp", 2, 0, None, (4, 6)), Alone(2))  # type: ignore[arg-type]
    with hpnb.record.traffic() as t:
        sums.all_reduce(torch.ones(10))
    return t.bytes["dp"], 2 * 1 / 2 * 40


class Alone(OneRank):
    """Of a rank whose peers are always ready."""

    def __init__(self, ranks: int) -> None:
        super().__init__(Shared(ranks), 0, 0)

    def put_signal(self, dst_rank: int, channel: int = 0) -> None:
        pass

    def wait_signal(self, src_rank: int, channel: int = 0) -> None:
        pass


def test_bytes_are_counted(small: None) -> None:
    assert counted() == (40.0, 40.0)


def test_on_cpus_there_are_none() -> None:
    axis = Axis("dp", 2, 0, None, (0, 1))  # type: ignore[arg-type]
    assert symmetric_all_reduce.make_symmetric_all_reduce(axis, torch.device("cpu")) is None


# --- opening the memory ----------------------------------------------------------------------------------


def open_with_fault(fault: str, failing: int) -> bool:
    """Whether rank gets memory where `fault` strikes rank `failing`; PyTorch's two calls are replaced."""
    from torch.distributed import _symmetric_memory as symmetric

    axis = Mesh(Layout(dp=hpnb.world_size())).dp

    def allocate(nbytes: int, **_: Any) -> torch.Tensor:
        if fault == "allocate" and axis.rank == failing:
            raise torch.OutOfMemoryError("no room for the slots")
        return torch.empty(nbytes, dtype=torch.uint8)

    def rendezvous(memory: torch.Tensor, group: Any) -> object:
        torch.distributed.barrier(group)  # all ranks have to come
        if fault == "rendezvous" and axis.rank == failing:
            raise RuntimeError("no peer access")
        return object()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "empty", allocate)
        patch.setattr(symmetric, "rendezvous", rendezvous)
        return symmetric_memory.open_symmetric_memory(axis, 64, torch.device("cpu")) is not None


def test_memory_that_one_rank_cannot_open_is_opened_by_none() -> None:
    with hpnb.Ranks(2, device="cpu", timeout=20) as pool:
        assert pool.run(open_with_fault, "none", 0) == [True, True]
        for fault, failing in (("allocate", 0), ("allocate", 1), ("rendezvous", 1)):
            assert pool.run(open_with_fault, fault, failing) == [False, False], (fault, failing)


def open_in_old_torch(unequal: bool) -> dict[str, bool]:
    """Whether this rank got memory on each axis, where a rendezvous counts by process as in torch 2.11."""
    from torch.distributed import _symmetric_memory as symmetric

    mesh, count, opened = Mesh(Layout(dp=2, pp=2)), 0, dict[str, bool]()

    def rendezvous(memory: torch.Tensor, group: Any) -> object:
        nonlocal count
        counts = [0, 0]
        torch.distributed.all_gather_object(counts, count, group)
        assert len(set(counts)) == 1, f"ranks wait for ever: {counts}"
        count += 1
        return object()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "empty", lambda nbytes, **_: torch.empty(nbytes, dtype=torch.uint8))
        patch.setattr(symmetric, "rendezvous", rendezvous)
        patch.setattr(symmetric_memory, "COUNTS_BY_PROCESS", True)
        patch.setattr(symmetric_memory, "_rendezvous_count", 0)
        growths = 2 if unequal and mesh.dp.rank == 0 else 1  # slots of one replica grow once more
        for axis in (*[mesh.pp] * growths, mesh.dp):
            memory = symmetric_memory.open_symmetric_memory(axis, 64, torch.device("cpu"))
            opened[axis.name] = memory is not None
    return opened


def test_memory_is_not_opened_where_older_torch_would_wait_for_ever() -> None:
    with hpnb.Ranks(4, device="cpu", timeout=20) as pool:
        assert pool.run(open_in_old_torch, False) == [{"pp": True, "dp": True}] * 4
        assert pool.run(open_in_old_torch, True) == [{"pp": True, "dp": False}] * 4


def opens_between_gpus(shares_gpu: bool) -> bool:
    """Of ranks that say they are on different GPUs, as two of one axis may be where eight share four."""
    axis = Mesh(Layout(pp=hpnb.world_size())).pp
    current_rank.current.shares_gpu = shares_gpu
    return symmetric_memory.share_a_node(axis, torch.device("cuda", axis.rank))


def test_ranks_that_share_gpus_do_not_open_symmetric_memory() -> None:
    assert hpnb.launch(opens_between_gpus, False, ranks=2, device="cpu") == [True, True]
    assert hpnb.launch(opens_between_gpus, True, ranks=2, device="cpu") == [False, False]


def send_between_shared_gpus() -> float:
    """Two steps of a pipeline whose two stages are on different GPUs, and how far its losses are apart."""
    mesh = Mesh(Layout(dp=hpnb.world_size() // 2, pp=2))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(hpnb.device())
    schedule = schedules.make("1f1b", 2, 4)
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, lambda outputs, _: outputs.square().mean())
    batch = torch.ones(8, 8)
    losses = [float(pipe.step(batch).loss) for _ in range(2)]  # the second may use slots
    return abs(losses[0] - losses[1])


@pytest.mark.gpu
def test_stages_on_different_gpus_that_others_share() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    apart = hpnb.launch(send_between_shared_gpus, ranks=2 * torch.cuda.device_count(), timeout=120)
    assert max(apart) < 1e-6


def test_a_gpu_that_is_nearly_full_is_not_asked_for_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch 2.11 ends the process, with nothing to catch."""
    gpu, free = torch.device("cuda", 0), [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free[0], room in ((2**30, True), (300 * 2**20, False), (2**20, False)):
        assert symmetric_memory._has_room(100 * 2**20, gpu) is room, free
    # What the allocator only keeps is given back first.
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, 2**30))
    assert symmetric_memory._has_room(100 * 2**20, gpu)


def test_queues_whose_slots_cannot_grow_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots are too small for the messages to come, so one would overwrite the next."""
    memories = [OneRank(Shared(2), 0, 0), None]
    monkeypatch.setattr(symmetric_transfers, "share_a_node", lambda axis, device: True)
    monkeypatch.setattr(symmetric_transfers, "open_symmetric_memory", lambda *_: memories.pop(0))
    monkeypatch.setattr(dist, "all_gather_object", lambda into, value, group: into.__setitem__(0, value))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: None)
    axis = Axis("pp", 2, 0, None, (0, 1))  # type: ignore[arg-type]
    transfers = symmetric_transfers.SymmetricTransfers(axis, [(0, 1), (1, 0)], torch.device("cuda"))
    transfers.reserve([[(torch.Size([8]), torch.float32)]])
    assert transfers.queues.keys() == {(0, 1), (1, 0)}
    transfers.reserve([[(torch.Size([8]), torch.float32)]])  # fits: nothing is opened anew
    assert transfers.queues
    transfers.reserve([[(torch.Size([8000]), torch.float32)]])
    assert not transfers.queues
    transfers.reserve([[(torch.Size([9000]), torch.float32)]])  # nobody tries again
    assert not transfers.queues
    assert not memories


def beside_nccl() -> float:
    """How far both are apart, over many messages with matmuls beside them."""
    axis, device = Mesh(Layout(dp=hpnb.world_size())).dp, hpnb.device()
    copies, nccl = Background(axis, device, copy_engines=True), Background(axis, device)
    assert copies.copies, "no peer access here"
    g = torch.Generator(device).manual_seed(axis.rank)
    busy, apart = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16), 0.0
    for step in range(30):
        flat = torch.randn(2**18 + 4_000_003 * (step % 4), generator=g, device=device)
        other = flat.clone()
        first, second = copies.all_reduce(flat, True), nccl.all_reduce(other, True)
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        first.wait(), second.wait()
        apart = max(apart, float((flat - other).abs().max()))
    return apart


@pytest.mark.gpu
def test_beside_nccl() -> None:
    ranks = min(4, torch.cuda.device_count())
    assert max(hpnb.launch(beside_nccl, ranks=ranks, device="cuda", timeout=120)) < 1e-5
