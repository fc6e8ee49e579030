"""ZeRO 3 in a pipeline: gradients are reduced while the last backwards run, not after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rank_pools import RankPools

import hpnb
from hpnb import Layout, Mesh
from hpnb.data_parallel.flat_params import FlatParam
from hpnb.data_parallel.fsdp import fully_shard
from hpnb.data_parallel.fsdp_hooks import FSDPState
from hpnb.pipeline_parallel import schedules

BLOCKS = 6


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.linear(x).tanh()
        if self.fails:
            y.register_hook(_fail)
        return y


def _fail(_: torch.Tensor) -> None:
    raise ValueError("a failure in the backward")


def build(style: str, microbatches: int) -> tuple[hpnb.Pipeline, Any, torch.Tensor, torch.nn.Sequential]:
    """A pipeline on dp 2 x pp of blocks that ZeRO 3 shards, its data axis, a batch, and the model."""
    stages = 1 if style == "gpipe" else 2
    mesh = Mesh(Layout(dp=2, pp=stages))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(BLOCKS))).double()
    schedule = schedules.make(style, stages=stages, microbatches=microbatches)
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, lambda outputs, _: outputs.square().mean())
    fully_shard(pipe.module, mesh.dp, units=[m for m in pipe.module.modules() if isinstance(m, Block)])
    pipe.gradients = hpnb.data_parallel.sink(pipe.module)
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(mesh.dp.rank))
    return pipe, mesh.dp, x, model


def count_full_gradients(style: str, microbatches: int) -> tuple[list[int], int, int]:
    """How many blocks have full gradients whenever one is reduced in the second step; how many were reduced
    before all actions were done; blocks of this rank."""
    pipe, _, x, _ = build(style, microbatches)
    flats = pipe.gradients.flat_params  # type: ignore[union-attr]
    pipe.step(x)
    counts: list[int] = []
    before_finish: list[int] = []
    reduce_scatter, finish = FlatParam.reduce_scatter, FSDPState.finish

    def count(flat: FlatParam) -> None:
        counts.append(sum(any(p.grad is not None for p in f.unsharded_params) for f in flats))
        reduce_scatter(flat)

    def note_and_finish(state: FSDPState) -> None:
        before_finish.append(len(counts))
        finish(state)

    FlatParam.reduce_scatter = count  # type: ignore[method-assign]
    FSDPState.finish = note_and_finish  # type: ignore[method-assign]
    try:
        pipe.step(x)
    finally:
        FlatParam.reduce_scatter = reduce_scatter  # type: ignore[method-assign]
        FSDPState.finish = finish  # type: ignore[method-assign]
    return counts, before_finish[0], len(flats)


def test_one_microbatch_has_full_gradients_of_one_block_at_a_time(pools: RankPools) -> None:
    """Before, all blocks kept theirs until the step ended."""
    for counts, before, blocks in pools[2].run(count_full_gradients, "gpipe", 1):
        assert before == blocks
        assert len(counts) == blocks == BLOCKS
        assert max(counts) <= 2


@pytest.mark.parametrize("style", ["1f1b", "zb-h1"])
def test_blocks_are_reduced_as_their_last_backward_ends(pools: RankPools, style: str) -> None:
    for counts, before, blocks in pools[4].run(count_full_gradients, style, 4):
        assert before == blocks == BLOCKS // 2
        assert counts == list(range(blocks, 0, -1))  # all have those of earlier microbatches


def fail_halfway() -> tuple[int, list[bool]]:
    """How many blocks were reduced before the backward of the first block failed, and whether shards have
    gradients after it."""
    pipe, _, x, model = build("gpipe", 1)
    pipe.step(x)
    pipe.module.zero_grad()
    model[1].fails = True
    reduced = []
    finish = FlatParam.finish_reduction

    def note(flat: FlatParam, used: Any = None) -> None:
        reduced.append(flat)
        finish(flat, used)

    FlatParam.finish_reduction = note  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError, match="a failure in the backward"):
            pipe.step(x)
    finally:
        FlatParam.finish_reduction = finish  # type: ignore[method-assign]
    return len(reduced), [p.grad is not None for p in pipe.module.parameters()]


def test_a_step_that_fails_halfway_leaves_no_gradients(pools: RankPools) -> None:
    for reduced, has_gradients in pools[2].run(fail_halfway):
        assert reduced > 0
        assert not any(has_gradients)
