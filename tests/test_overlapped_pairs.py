"""A forward and a backward that overlap: turns, schedules, exact steps, and what stays exposed."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from rank_pools import RankPools
from test_expert_parallel import batch, build, distances

import hpnb
from hpnb.overlapped_pair import Segments, run_pair, wait_for
from hpnb.pipeline_parallel import Costs, Schedule, schedules
from hpnb.pipeline_parallel.overlapped_pairs import (
    even_segments,
    exposed_time,
    overlapped_pairs,
    pair_seconds,
)


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


class Message:
    """A message that has arrived."""

    def wait(self) -> None: ...


# --- turns -----------------------------------------------------------------------------------------------


def test_sides_take_turns_at_their_messages() -> None:
    order: list[str] = []

    def side(name: str, messages: int) -> str:
        for step in range(messages):
            order.append(f"{name}{step}")
            wait_for(Message())  # type: ignore[arg-type]
        order.append(f"{name} ends")
        return name

    for _ in range(20):  # the same order, whatever the threads do
        order.clear()
        assert run_pair(lambda: side("F", 2), lambda: side("B", 4)) == ("F", "B")
        assert order == ["F0", "B0", "F1", "B1", "F ends", "B2", "B3", "B ends"]


@pytest.mark.parametrize("failing", ["F", "B"])
def test_what_fails_on_one_side_stops_the_other(failing: str) -> None:
    def side(name: str) -> None:
        wait_for(Message())  # type: ignore[arg-type]
        if name == failing:
            raise ValueError(f"{name} failed")
        for _ in range(100):
            wait_for(Message())  # type: ignore[arg-type]
        raise AssertionError("nobody has stopped it")

    with pytest.raises(ValueError, match=f"{failing} failed"):
        run_pair(lambda: side("F"), lambda: side("B"))
    assert run_pair(lambda: 1, lambda: 2) == (1, 2)


# --- which actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_pairs_of_dualpipe_v_do_not_wait_for_themselves(ranks: int) -> None:
    schedule = schedules.make("dualpipe-v", 2 * ranks, 3 * ranks, 2)
    pairs = overlapped_pairs(schedule)
    segments = {action: Segments((1.0,), ()) for row in schedule.actions for action in row}
    exposed_time(schedule, pairs, segments, float)  # which raises if all ranks wait
    for rank, steps in enumerate(pairs):
        forwards = sum(action.op == "F" for action in schedule.actions[rank])
        for step in steps:
            forward, backward = schedule.actions[rank][step : step + 2]
            assert (forward.op, backward.op in "BI") == ("F", True)
            assert forward.stage != backward.stage
        assert len(steps) >= (forwards // 4 if ranks > 1 else 0)


def test_a_backward_that_needs_its_forward_makes_no_pair() -> None:
    """0B0 needs 1B0, which rank 1 does after 3F1, and that needs 2F1: the two of step 4 cannot be a pair."""
    schedule = Schedule(["0F0 2F0 0F1 2B0 2F1 0B0 2B1 0B1", "1F0 3F0 3B0 1F1 3F1 1B0 3B1 1B1"])
    schedule.check()
    assert overlapped_pairs(schedule) == ({2}, {4})
    segments = {action: Segments((1.0,), ()) for row in schedule.actions for action in row}
    with pytest.raises(ValueError, match="all ranks wait; use overlapped_pairs"):
        exposed_time(schedule, (frozenset({2, 4}), frozenset({4})), segments, float)
    other = Schedule(["0F0 2F0 0F1 2B0 2F1 0B0 2B1 0B1", "1F0 1F1 1B0 1B1"])
    assert overlapped_pairs(other)[0] == {2, 4}


# --- how long --------------------------------------------------------------------------------------------


def test_the_time_of_a_pair() -> None:
    side = Segments((1.0, 1.0, 1.0), (1.0, 1.0))
    assert pair_seconds([side], float) == 5.0  # both messages exposed
    assert pair_seconds([side, side], float) == 6.0  # none of four
    slow = pair_seconds([side, side], lambda nbytes: 3 * nbytes)
    assert 12.0 < slow < 2 * pair_seconds([side], lambda nbytes: 3 * nbytes)  # the link sets the pace
    assert pair_seconds([side, Segments((2.0,), ())], float) == 6.0  # 5, and the last message exposed
    assert pair_seconds([Segments((2.0,), ()), side], float) == 7.0  # the one without a message came first


def test_fractions_stay_exact() -> None:
    schedule = schedules.make("dualpipe-v", 8, 8, 2)
    tenth = Fraction(1, 10)
    side = Segments((tenth, tenth), (tenth,))  # type: ignore[arg-type]
    segments = {action: side for row in schedule.actions for action in row}
    step = exposed_time(schedule, overlapped_pairs(schedule), segments, lambda nbytes: nbytes)
    for seconds in (step.makespan, *step.compute, *step.exposed, *step.sent):
        assert isinstance(seconds, Fraction)
    assert pair_seconds([side, side], lambda nbytes: nbytes) == 4 * tenth


def test_half_of_the_messages_of_dualpipe_v_are_hidden() -> None:
    """Two layers of experts a stage; a message takes as long as computing between two of them."""
    schedule = schedules.make("dualpipe-v", 8, 24, 2)
    segments = even_segments(schedule, Costs(5.0, 5.0, 2.0), layers=2, nbytes=1.0)
    none = (frozenset[int](),) * 4
    apart = exposed_time(schedule, none, segments, float)
    paired = exposed_time(schedule, overlapped_pairs(schedule), segments, float)
    assert apart.exposed == pytest.approx(apart.sent)
    assert paired.sent == pytest.approx(apart.sent)
    assert paired.compute == pytest.approx(apart.compute)
    for exposed, sent, pairs in zip(paired.exposed, paired.sent, overlapped_pairs(schedule), strict=True):
        # Of a pair's eight messages none is exposed; of other actions all are.
        assert exposed == pytest.approx(sent - 8 * len(pairs))
    assert paired.makespan < 0.85 * apart.makespan
    free = exposed_time(schedule, overlapped_pairs(schedule), segments, lambda _: 0.0)
    assert free.exposed == pytest.approx((0.0,) * 4)


# --- steps -----------------------------------------------------------------------------------------------

PLUGIN: dict[str, Any] = {"pp_size": 2, "num_microbatches": 6, "pp_style": "dualpipe-v", "precision": "fp64"}


def steps(kind: str, plugin: dict[str, Any], overlaps: bool) -> Any:
    """(losses, momenta, pairs that ran, most exposed bytes ...) of three steps."""
    from hpnb.pipeline_parallel import executor

    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(**{"precision": "fp64", **plugin}))
    model = build(kind, num_hidden_layers=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    mesh = booster.plugin.mesh
    samples = {name: value.chunk(mesh.dp.size)[mesh.dp.rank] for name, value in batch(24).items()}
    run, ran = executor.run_pair, []

    def count(first: Any, second: Any) -> Any:
        ran.append(1)
        return run(first, second)

    executor.run_pair = count  # type: ignore[assignment]
    losses = []
    try:
        for _ in range(3):
            optimizer.zero_grad()
            if boosted._pipe is not None:
                boosted._pipe.overlaps_pairs = boosted._pipe.overlaps_pairs and overlaps
            result = booster.execute_pipeline(iter([samples]), boosted, None, optimizer, return_loss=True)
            losses.append(None if result["loss"] is None else float(result["loss"]))
            optimizer.step()
    finally:
        executor.run_pair = run
    momenta = {str(k): v["momentum_buffer"] for k, v in optimizer.state_dict()["state"].items()}
    return losses, momenta, len(ran)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("Mixtral", {"ep_size": 2}, marks=pytest.mark.slow),
        ("DeepseekV3", {"ep_size": 2}),
        ("Qwen3Moe", {"ep_size": 2, "zero_stage": 2}),
        pytest.param("Qwen3Moe", {"ep_size": 2, "activation_checkpointing": "full"}, marks=pytest.mark.slow),
        ("Mixtral", {"ep_size": 2, "cp_size": 2}),
        pytest.param("Mixtral", {"ep_size": 2, "zero_stage": 3}, marks=pytest.mark.slow),
        ("Qwen3Moe", {"ep_size": 2, "zero_stage": 3, "activation_checkpointing": "full"}),
    ],
    ids=str,
)
def test_overlapped_steps_equal_one_process(pools: RankPools, kind: str, more: dict[str, Any]) -> None:
    losses, momenta, none = pools[1].run(steps, kind, {}, True)[0]
    assert none == 0
    for ours in pools[4].run(steps, kind, {**PLUGIN, **more}, True):
        assert None in ours[0] or ours[0] == pytest.approx(losses, rel=1e-12)
        assert max(distances(ours[1], momenta).values()) < 1e-12
        assert ours[2] > 3 * 2  # pairs of three steps
    assert abs(losses[-1] - losses[0]) > 1e-3


def bytes_of_steps(more: dict[str, Any], overlaps: bool) -> dict[str, float]:
    with hpnb.record.traffic() as sent:
        steps("Mixtral", {**PLUGIN, "ep_size": 2, **more}, overlaps)
    return dict(sent.bytes)


@pytest.mark.slow  # test_bench_experts.py compares bytes of pairs
@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [{}, {"zero_stage": 3}], ids=str)
def test_what_both_sides_of_a_pair_send_is_counted(pools: RankPools, more: dict[str, Any]) -> None:
    apart, paired = (pools[4].run(bytes_of_steps, more, overlaps) for overlaps in (False, True))
    for one, other in zip(apart, paired, strict=True):
        assert one["ep"] > 0
        if more:  # a pair gathers the root's weights once; apart, blocks that neighbours share stay
            assert 2 / 3 < other.pop("dp") / one.pop("dp") < 3 / 2
        # What a step says of its loss is a pickle, whose length is not always the same.
        assert other.pop("pp") == pytest.approx(one.pop("pp"), abs=16)
        assert other == one


def test_without_experts_nothing_overlaps(pools: RankPools) -> None:
    assert all(ran == 0 for *_, ran in pools[4].run(steps, "Mixtral", PLUGIN, True))
