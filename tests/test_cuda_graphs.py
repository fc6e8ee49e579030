"""CUDA graphs of pipeline stages. On a CPU a capture calls the captured function again (`replayed_graphs.py`):
slots, static tensors, gradients, losses and fall-backs are those of a GPU. On a GPU everything is real."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import test_pipeline
import torch
from rank_pools import RankPools
from replayed_graphs import with_graphs
from test_pipeline import LOSSES, Case, distance, every_case, model

import hpnb
from hpnb import Layout, Mesh
from hpnb.pipeline_parallel import schedules
from hpnb.pipeline_parallel.graph_slots import assign_slots, count_slots

STEPS = 5  # two that warm up, three that replay
EXACT = 1e-12


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


# --- slots -----------------------------------------------------------------------------------------------


def all_schedules() -> list[Any]:
    made = []
    for name, chunks in test_pipeline.CHUNKS.items():
        for ranks, m in itertools.product((1, 2, 4), (1, 3, 4, 8)):
            try:
                made.append(schedules.make(name, ranks * chunks, m, chunks))
            except ValueError:
                continue
    return made


def test_a_slot_has_one_microbatch_at_a_time_and_there_are_no_more_than_in_flight() -> None:
    for schedule in all_schedules():
        timeline = schedule.simulate(hpnb.pipeline_parallel.Costs(1.0, 1.0, 1.0, 0.0))
        for rank, actions in enumerate(schedule.actions):
            slots = assign_slots(actions)
            occupied: dict[int, tuple[int, int]] = {}
            last = {(a.stage, a.microbatch): a for a in actions if a.op != "F"}
            for action in actions:
                work = action.stage, action.microbatch
                if action.op == "F":
                    assert slots[work] not in occupied, (schedule.name, rank, str(action))
                    occupied[slots[work]] = work
                assert occupied[slots[work]] == work
                if last[work] is action:
                    del occupied[slots[work]]
            assert not occupied
            assert count_slots(slots) == timeline.peak_in_flight(rank), (schedule.name, rank)


def test_a_stage_returns_to_its_slots() -> None:
    """Each pair of a stage and a slot is captured: in 1F1B one on the last rank, whatever the microbatches."""
    actions = schedules.make("1f1b", 4, 32).actions
    assert set(assign_slots(actions[3]).values()) == {0}
    assert set(assign_slots(actions[0]).values()) == {0, 1, 2, 3}


# --- every schedule, beside one process ------------------------------------------------------------------


def serial(case: Case) -> dict[str, Any]:
    alone = model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        parts = case.batches(step)
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        optimizer.zero_grad()
        returned = LOSSES[case.loss](alone(whole["x"]), whole)
        value = returned[0] / returned[1] if isinstance(returned, tuple) else returned
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return {"losses": losses, "weights": dict(alone.state_dict())}


def train(case: Case, graphs: bool, accumulates: bool = False) -> dict[str, Any]:
    """STEPS steps of a rank. Without graphs gradients start at zero as well, so that the same kernels run."""
    mesh = Mesh(Layout(dp=case.dp, pp=case.pp))
    on_gpu = hpnb.device().type == "cuda"
    pipe = hpnb.Pipeline(model(), mesh.pp, case.schedule(), LOSSES[case.loss], cuda_graphs=graphs and on_gpu)
    stage_graphs = with_graphs(pipe) if graphs and not on_gpu else pipe._graphs
    optimizer: torch.optim.Optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9)
    if case.dp > 1 and case.sink == "replicas":
        pipe.gradients = hpnb.DataParallel(pipe.module, mesh.dp, bucket_mb=1e-3)
    elif case.dp > 1:
        optimizer = hpnb.ZeroOptimizer(
            pipe.parameters(), torch.optim.SGD, mesh.dp, stage=int(case.sink[-1]), lr=0.3, momentum=0.9
        )
        pipe.gradients = optimizer
    losses, replayed = [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for p in pipe.parameters() if not graphs else ():
            p.grad = torch.zeros_like(p)
        mine = case.batches(step)[mesh.dp.rank]
        if accumulates:
            pipe.step(mine, reduce=False, scale=0.25)
        result = pipe.step(mine, scale=0.75 if accumulates else 1.0)
        losses.append(result.loss.item())
        optimizer.step()
    if stage_graphs is not None:
        assert not stage_graphs.reasons, stage_graphs.reasons
        replayed = len(stage_graphs._graphs)
    full = hpnb.pipeline_parallel.full_state_dict(pipe.module, mesh.pp, [mesh.dp])
    outputs = None if result.outputs is None else result.outputs.cpu()
    return {
        "losses": losses,
        "weights": {n: full[n].clone() for n, _ in pipe.named_parameters()},
        "graphs": replayed,
        "outputs": outputs,
    }


def both(cases: list[Case], accumulates: bool = False) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(train(case, True, accumulates), train(case, False, accumulates)) for case in cases]


def compare(case: Case, by_rank: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    wanted = serial(case)
    for graphs, eager in by_rank:
        assert graphs["graphs"] > 0, case
        assert graphs["losses"] == eager["losses"], case
        for name, weight in eager["weights"].items():
            assert torch.equal(graphs["weights"][name], weight), (case, name)
        if eager["outputs"] is not None:
            assert torch.equal(graphs["outputs"], eager["outputs"]), case
        for a, b in zip(graphs["losses"], wanted["losses"], strict=True):
            assert abs(a - b) <= EXACT * abs(b), (case, a, b)
    together = {name: w for graphs, _ in by_rank for name, w in graphs["weights"].items()}
    assert distance(together, wanted["weights"]) < EXACT, case


def some_cases(seed: int, count: int, worlds: tuple[int, ...]) -> list[Case]:
    """Every schedule at least once."""
    cases = [c for c in every_case() if c.sink != "zero 3" and c.pp * c.dp in worlds and c.microbatches > 1]
    random.Random(seed).shuffle(cases)
    first = {case.name: case for case in cases}
    return list(dict.fromkeys([*first.values(), *cases]))[:count]


def check(cases: list[Case], pools: Any, accumulates: bool = False) -> None:
    for world in sorted({case.pp * case.dp for case in cases}):
        of_world = [case for case in cases if case.pp * case.dp == world]
        by_rank = pools[world].run(both, of_world, accumulates)
        for i, case in enumerate(of_world):
            compare(case, [results[i] for results in by_rank])


def test_replayed_steps_are_eager_steps_bit_for_bit_and_one_process(pools: RankPools) -> None:
    check(some_cases(1, 14, (1, 2, 4)), pools)


def test_replayed_steps_accumulate(pools: RankPools) -> None:
    check([Case("1f1b", 2, 3, True, 1), Case("zb-h1", 1, 3, True, 2, loss="pair")], pools, accumulates=True)
