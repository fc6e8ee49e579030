"""The planner for clusters, failures and experts: held to published runs, the simulator, bytes counted."""

from __future__ import annotations

import csv
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hpnb
from hpnb import ParallelLayout, comm, theory
from hpnb.pipeline_parallel import Costs, schedules
from hpnb.theory import Link, bytes_sent, cluster, experts, failures, planner
from hpnb.theory.cluster import (
    CLUSTER_PARTS,
    Cluster,
    GPTRun,
    cluster_memory,
    cluster_parts,
)
from hpnb.theory.failures import Failures
from hpnb.theory.published_runs import (
    DGX_A100,
    DGX_H100,
    LLAMA_3_EACH,
    MEGATRON,
    MEGATRON_CORE,
    PublishedRun,
)

FREE = Link(0.0, 1e40)
IDEAL = Cluster(8, 8, 1e12, 1e12, 1e40, FREE, FREE, 8)  # where matmuls alone cost anything
SMALL = GPTRun(64, 8, 8, 16, 32, 128)
RUNS = {one.name: one.run for one in MEGATRON}


def on(gpus: int, given: Cluster = DGX_A100, **other: float | Link) -> Cluster:
    return replace(given, gpus=gpus, **other)  # type: ignore[arg-type]


def step(run: GPTRun, given: Cluster, plan: ParallelLayout) -> float:
    return sum(cluster_parts(run, given, plan).values())


# --- published runs ----------------------------------------------------------------------------------


def published_rows(name: str) -> list[dict[str, str]]:
    lines = (Path(__file__).parent / "published" / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize(
    ("name", "runs"), [("megatron_sc21.csv", MEGATRON), ("megatron_core_h100.csv", MEGATRON_CORE)]
)
def test_the_published_rows_are_the_file(name: str, runs: tuple[PublishedRun, ...]) -> None:
    for row, one in zip(published_rows(name), runs, strict=True):
        assert one.name == f"{row['params_B']}B"
        found = (one.run.heads, one.run.hidden, one.run.layers, one.tp, one.pp, one.gpus, one.run.batch)
        columns = ("heads", "hidden", "layers", "tp", "pp", "gpus", "batch")
        assert found == tuple(int(row[key]) for key in columns)
        assert one.tflops == float(row["tflops_per_gpu"])
        assert round(100 * one.tflops / one.cluster.peak * 1e12) in range(
            int(row["percent_of_peak"]) - 1, int(row["percent_of_peak"]) + 2
        )
        assert one.plan.world_size == one.gpus
        if runs is MEGATRON:
            assert round(one.run.parameters / 1e9, 1) == float(row["params_B"])
            assert (one.plan.microbatch_size, one.plan.chunks) == (int(row["microbatch"]), int(row["chunks"]))
            assert cluster_memory(one.run, one.plan) < DGX_A100.memory  # it did run there
        else:
            head = one.run.vocab_size * one.run.hidden  # not tied
            assert (one.run.parameters + head) / 1e9 == pytest.approx(float(row["params_B"]), rel=0.035)
            assert one.plan.dp == 48


def test_the_smallest_published_row_predicts_the_others_within_a_tenth() -> None:
    known = MEGATRON[0]
    fitted = cluster.calibrated(on(known.gpus), known.run, known.plan, known.tflops)
    for other in MEGATRON:
        predicted = cluster.tflops(other.run, on(other.gpus, fitted), other.plan)
        assert predicted == pytest.approx(other.tflops, rel=0.1), other.name


@pytest.mark.parametrize("known", MEGATRON, ids=lambda one: one.name)
def test_any_published_row_predicts_the_others_within_an_eighth(known: PublishedRun) -> None:
    fitted = cluster.calibrated(on(known.gpus), known.run, known.plan, known.tflops)
    assert cluster.tflops(known.run, fitted, known.plan) == pytest.approx(known.tflops, rel=1e-9)
    for other in MEGATRON:
        predicted = cluster.tflops(other.run, on(other.gpus, fitted), other.plan)
        assert predicted == pytest.approx(other.tflops, rel=0.125), other.name


def test_calibration_finds_the_share_that_was_planted() -> None:
    for one in MEGATRON:
        planted = on(one.gpus, DGX_H100, share=0.4321)
        measured = cluster.tflops(one.run, planted, one.plan)
        found = cluster.calibrated(on(one.gpus, DGX_H100), one.run, one.plan, measured)
        assert found.share == pytest.approx(0.4321, rel=1e-9)
        assert replace(found, share=1.0) == on(one.gpus, DGX_H100)
    with pytest.raises(ValueError, match="more than the peak of 312"):
        cluster.calibrated(on(32), MEGATRON[0].run, MEGATRON[0].plan, 400.0)


# --- the seven parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "plan",
    [ParallelLayout(8), ParallelLayout(tp=8), ParallelLayout(2, 2, 2), ParallelLayout(pp=8)],
    ids=str,
)
def test_matmuls_are_the_model_s_flops_dealt_out(plan: ParallelLayout, recompute: bool) -> None:
    run = replace(SMALL, recompute=recompute)
    parts = cluster_parts(run, IDEAL, plan)
    assert tuple(parts) == CLUSTER_PARTS
    assert parts["matmuls"] == pytest.approx(run.flops / 8 / 1e12)
    rest = {part: took for part, took in parts.items() if part not in ("matmuls", "bubble")}
    assert max(rest.values()) < 1e-20
    assert cluster.tflops(run, IDEAL, ParallelLayout(8)) == pytest.approx(1.0)  # the peak, and no more


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (2, 2), (4, 2), (2, 4)])
def test_the_bubble_is_the_simulator_s(stages: int, chunks: int) -> None:
    run = replace(SMALL, vocab_size=0, batch=8)
    plan = ParallelLayout(pp=stages, chunks=chunks)
    parts = cluster_parts(run, on(stages, IDEAL), plan)
    name = "1f1b" if chunks == 1 else "interleaved"
    tl = schedules.make(name, stages * chunks, 8, chunks).simulate(Costs(1.0, 1.0, 1.0))
    assert parts["bubble"] / sum(parts.values()) == pytest.approx(tl.bubble_fraction)


def test_stages_wait_for_the_one_with_the_logits() -> None:
    heavy = replace(SMALL, vocab_size=10**5)
    parts = cluster_parts(heavy, on(2, IDEAL), ParallelLayout(1, 2))
    logits = 6 * 32 * 64 * 10**5 / 1e12  # of one row
    block = (parts["matmuls"] * 2 / 16 - logits) / 8
    assert parts["bubble"] + parts["matmuls"] == pytest.approx(16 * (4 * block + logits) + 4 * block)


@pytest.mark.parametrize(("recompute", "calls"), [(False, 4), (True, 6)])
def test_bytes_of_each_axis(recompute: bool, calls: int) -> None:
    run, link = replace(SMALL, recompute=recompute), Link(0.0, 1.0)  # seconds are bytes
    given = replace(IDEAL, inside=link, between=link)
    parts = cluster_parts(run, given, ParallelLayout(2, 2, 2))
    activation = 2.0 * 32 * 64 * 8  # of the 8 rows that a pipeline sees
    assert parts["tp"] == pytest.approx(calls * 8 / 2 * bytes_sent("all_reduce", activation, 2))
    assert parts["pp"] == pytest.approx(2 * (activation / 2 + bytes_sent("all_gather", activation, 2)))
    assert parts["dp"] == pytest.approx(bytes_sent("all_reduce", 2 * run.parameters / 4, 2))


def test_bytes_that_no_matmul_moves() -> None:
    given, one = replace(IDEAL, gpus=1, memory_bandwidth=1.0), ParallelLayout()
    values, scores = 16 * 32 * 64 * 8, 16 * 32**2 * 8 * 8
    for recompute, fused, wanted in (
        (False, False, 96 * values + 32 * scores),
        (True, False, 134 * values + 45 * scores),
        (True, True, 134 * values),
    ):
        run = replace(SMALL, recompute=recompute, fused_attention=fused)
        assert cluster_parts(run, given, one)["memory"] == pytest.approx(wanted)
    cut = cluster_parts(replace(SMALL, recompute=False), on(4, given), ParallelLayout(1, 1, 4))["memory"]
    assert cut == pytest.approx((56 + 40 / 4) * values + 32 * scores / 4)  # norms and dropouts are whole
    plans = [ParallelLayout(4, zero_stage=zero) for zero in (0, 1)]
    optimizer = [cluster_parts(SMALL, on(4, given), plan)["optimizer"] for plan in plans]
    assert optimizer == pytest.approx([28 * SMALL.parameters, 7 * SMALL.parameters])


def test_a_ring_between_hosts_has_its_share_of_the_cards() -> None:
    given = on(64, cards=4)  # 4 cards of 25 GB/s for 8 GPUs of 300
    assert given.link(8, 8) is given.inside
    assert given.link(4, 4) is given.inside
    assert given.link(64, 8).bandwidth == 100e9
    assert given.link(64, 1).bandwidth == 12.5e9
    assert given.link(6, 6).bandwidth == 75e9  # six of eight: some of its groups lie in two hosts
    assert given.link(64, 8).latency == given.between.latency
    assert on(64, between=Link(1e-5, 1e12)).link(64, 8).bandwidth == 300e9  # never faster than within
    lies = [cluster._group_span(ParallelLayout(4, 2, 4), axis, given) for axis in ("tp", "pp", "dp")]
    assert lies == [(4, 4), (8, 2), (32, 1)]
    assert cluster._group_span(ParallelLayout(16, 1, 2), "dp", given) == (32, 4)
    assert cluster._group_span(ParallelLayout(2, 1, 16), "tp", given) == (16, 8)


@pytest.mark.parametrize(
    ("cards", "tp", "each"),
    [(8, 1, 1), (8, 8, 1), (4, 2, 1), (4, 8, 1 / 2), (1, 1, 1), (1, 4, 1 / 4), (1, 8, 1 / 8), (1, 16, 1 / 8)],
)
def test_ranks_that_send_across_a_border_divide_its_cards(cards: int, tp: int, each: float) -> None:
    given, plan = on(16 * tp, cards=cards), ParallelLayout(1, 16, tp)
    assert given.link(*cluster._group_span(plan, "pp", given)).bandwidth == each * 25e9


def test_tp_falls_off_a_cliff_where_a_host_ends() -> None:
    run, slow = RUNS["39.1B"], on(512, cards=1)
    ticks = [step(run, slow, ParallelLayout(512 // t // 8, 8, t)) for t in (4, 8, 16)]
    assert ticks[2] > 2 * max(ticks[:2])
    wide = on(512, host=16, cards=1)
    assert step(run, wide, ParallelLayout(4, 8, 16)) < 1.5 * ticks[1]


# --- memory, refusals and the search -----------------------------------------------------------------


def test_memory_is_states_and_blocks_in_flight() -> None:
    block = theory.Block(64, 8, 32)
    whole = replace(SMALL, recompute=False)
    plan = ParallelLayout(1, 2, 2)
    kept = 2 * 4 * theory.published_activation_bytes(block, 2)
    states = 16 * (8 * 12 * 64**2 / 4 + 128 * 64 / 2)
    assert cluster_memory(whole, plan) == pytest.approx(states + kept)
    inputs = 2 * 4 * 2 * 32 * 64 + theory.published_activation_bytes(block, 2)
    assert cluster_memory(SMALL, plan) == pytest.approx(states + inputs)
    chunks = inputs + 0.25 * 2 * 4 * 2 * 32 * 64  # 1 + (p-1)/(p v)
    assert cluster_memory(SMALL, replace(plan, chunks=2)) == pytest.approx(states + chunks)
    dealt = cluster_memory(SMALL, ParallelLayout(4, 2, 2, zero_stage=1))
    assert dealt == pytest.approx(states * (4 + 12 / 4) / 16 + inputs)
    alone = [cluster_memory(replace(SMALL, vocab_size=words), ParallelLayout()) for words in (0, 128)]
    assert alone[1] - alone[0] == 16 * 128 * 64 + 6 * 32 * 128  # the table; float32 logits, 16-bit gradient
    fused = replace(whole, fused_attention=True)
    assert cluster_memory(whole, plan) - cluster_memory(fused, plan) == 2 * 4 * 5 * 8 * 32**2 / 2


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (ParallelLayout(4), "4 GPUs, and the cluster has 8"),
        (ParallelLayout(8, microbatch_size=3), "batch of 16 cannot be split over 8"),
        (ParallelLayout(1, 8, 1, chunks=2), "blocks that divide by 16"),
        (ParallelLayout(8, chunks=2), "chunks=2"),
        (ParallelLayout(2, 4, 1, microbatch_size=4, chunks=2), "microbatches that divide by 4"),
        (ParallelLayout(8, zero_stage=2), "ZeRO 0 and 1"),
        (ParallelLayout(8, schedule="zb-h1"), "1f1b and interleaved"),
        (ParallelLayout(8, recomputation="full"), "recomputation='full'"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_sentence(plan: ParallelLayout, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        cluster_parts(SMALL, IDEAL, plan)
    with pytest.raises(ValueError, match="tp=6 neither"):
        cluster_parts(replace(SMALL, heads=6), on(6, IDEAL), ParallelLayout(1, 1, 6))
    with pytest.raises(ValueError, match="8 heads cannot be sharded 16 ways"):
        cluster_parts(SMALL, on(16, IDEAL), ParallelLayout(1, 1, 16))


def layout(dp: int, pp: int, tp: int, chunks: int) -> ParallelLayout:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    return ParallelLayout(dp, pp, tp, microbatch_size=1, schedule=schedule, chunks=chunks)


def test_the_best_plan_is_the_best_of_all() -> None:
    run, given = RUNS["145.6B"], on(512, share=0.6)
    brute = [
        plan
        for pp in range(1, 81)
        for tp in range(1, 97)
        for v in range(1, 41)
        if 512 % (pp * tp) == 0
        and cluster.refusal(run, given, plan := layout(512 // pp // tp, pp, tp, v)) is None
        and cluster_memory(run, plan) <= given.memory
    ]
    found = planner.best_layout(run, given)
    assert found in brute
    assert step(run, given, found) == min(step(run, given, plan) for plan in brute)
    with pytest.raises(ValueError, match=r"no layout of 64 GPUs fits 20 GB: the smallest takes \d+ GB"):
        planner.best_layout(run, on(64, memory=20e9))


# --- failures ----------------------------------------------------------------------------------------


def simulated_share(given: Failures, interval: float, count: int, seed: int = 0) -> float:
    """The trained share of a simulated run that `count` failures hit; a save or a restart may be hit too."""
    draw = random.Random(seed)
    clock = trained = ready = 0.0  # ready: when training goes on
    for _ in range(count):
        fails = clock + draw.expovariate(1 / given.between)
        trained += max(0, math.floor((fails - ready) / (interval + given.save))) * interval
        clock, ready = fails, fails + given.restart
    return trained / clock


@pytest.mark.parametrize("times", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("given", [Failures(11000.0, 60.0, 600.0), Failures(2000.0, 300.0, 300.0)])
def test_the_formula_is_what_is_played_through(given: Failures, times: float) -> None:
    interval = times * failures.save_interval(given)
    played = simulated_share(given, interval, 20_000, seed=1)
    assert played == pytest.approx(failures.trained_share(given, interval), rel=0.02)


def test_the_square_root_is_best_where_saves_are_short() -> None:
    given = Failures(10_000.0, 5.0, 100.0)
    interval = failures.save_interval(given)
    assert interval == pytest.approx(math.sqrt(2 * 5.0 * 10_000.0))
    best = max(failures.trained_share(given, interval * 1.01**k) for k in range(-100, 101))
    assert failures.trained_share(given, interval) > 0.9999 * best
    off = [failures.trained_share(given, interval * times) for times in (0.5, 2.0)]
    assert max(off) < 0.995 * best


def test_a_failure_in_a_restart_begins_it_anew() -> None:
    given = Failures(10.0, 0.0, 50.0)  # most restarts do not end
    played = simulated_share(given, 1.0, 200_000)
    assert played == pytest.approx(failures.trained_share(given, 1.0), rel=0.05)
    assert failures.trained_share(Failures(1.0, 0.0, 1e6), 1.0) == 0.0


def test_failures_that_cannot_be_are_refused() -> None:
    for wrong in (lambda: Failures(0.0, 1.0), lambda: Failures(1.0, -1.0),
                  lambda: failures.mean_time_between(0, 1.0),
                  lambda: failures.trained_share(Failures(1.0, 1.0), 0.0)):  # fmt: skip
        with pytest.raises(ValueError, match="above 0"):
            wrong()
    assert failures.mean_time_between(16384, LLAMA_3_EACH) == pytest.approx(54 * 86400 / 419)


# --- experts -----------------------------------------------------------------------------------------


def routed(chosen: int) -> float:
    """Bytes that leave this rank for 12 tokens of 8 float64 values, to experts and back, both ways."""
    axis = hpnb.Mesh(hpnb.Layout(tp=hpnb.world_size())).tp
    x = torch.ones(chosen * 12, 8, dtype=torch.float64, requires_grad=True)
    with hpnb.record.traffic() as seen:
        there = comm.all_to_all(x, axis, 0, 1)
        comm.all_to_all(2 * there, axis, 1, 0).sum().backward()
    return seen.bytes["tp"]


def test_bytes_of_experts_are_those_of_four_exchanges() -> None:
    found = hpnb.launch(routed, 2, ranks=2, device="cpu")
    assert found == [experts.experts_sent(12, 8, 2, 2, 8)] * 2
    by_tp = 2 * bytes_sent("all_reduce", 2 * 4 * 12 * 8, 4)  # the tokens of all four ranks, twice
    assert by_tp / experts.experts_sent(12, 8, 4, 2) == pytest.approx(4 / 2)
    with pytest.raises(ValueError, match="1 expert or more"):
        experts.experts_sent(1, 1, 2, 0)
