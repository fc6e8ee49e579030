"""What `hpnb plan` chooses by: schedules, blocks, heads and links as programs have them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpnb.hybrid.plan_command import measure
from hpnb.hybrid.plan_command.check import benchmarks
from hpnb.hybrid.plan_command.layout_code import parse_layout_code
from hpnb.hybrid.plan_command.main import make_task
from hpnb.hybrid.plan_command.measure import format_card, measure_gpu, measured_gpu
from hpnb.hybrid.plan_command.published_steps import MEGATRON_LM
from hpnb.hybrid.plan_command.read_model import read_model
from hpnb.hybrid.plan_command.report import format_report
from hpnb.hybrid.plan_command.search import ZERO_BUBBLE_ERROR, Search, make_plan, search
from hpnb.mesh import ParallelLayout
from hpnb.theory import fit_link, plan_memory
from hpnb.theory.datasheets import GPU, LINK_SHARE, find_gpu
from hpnb.theory.links import Link
from hpnb.theory.model_shape import ModelShape
from hpnb.theory.plan_bytes import plan_bytes
from hpnb.theory.plan_memory import rank_memory, rank_moments
from hpnb.theory.plan_messages import links, seconds
from hpnb.theory.plan_step import _exposed_dp, _hop_seconds, plan_parts, rank_parameters, stage_seconds
from hpnb.theory.plan_task import PlanTask, refusal
from hpnb.theory.step_memory import Moment, step_moments


def task_of(gpus: int, batch: int, name: str = "gpt2-xl", gpu: str = "h100") -> PlanTask:
    return make_task(read_model(name), find_gpu(gpu), gpus, batch, None)


def test_the_check_shows_zero_bubble_rows_as_all_others() -> None:
    ratios = {row.name: row.ratio for row in benchmarks() if row.layout == "pp2: hpnb zb-v"}
    assert ratios == {
        "gpt2-xl, 2 x H200": pytest.approx(0.80, abs=0.005),
        "vit-l16, 2 x H200": pytest.approx(0.56, abs=0.005),
    }


def test_a_split_backward_is_two_actions() -> None:
    task = task_of(4, 32)
    launches = {
        name: stage_seconds(task, ParallelLayout(pp=4, microbatch_size=4, schedule=name))[1]["launches"]
        for name in ("1f1b", "zb-h1", "zb-v")
    }
    action = task.software.action_seconds
    assert launches == {"1f1b": 2 * action, "zb-h1": 3 * action, "zb-v": 6 * action}


@pytest.mark.parametrize("code", ["dp8-zero3-mb1-full", "dp4-pp2-zero3-mb1-full", "dp2-pp4-zero3-mb1"])
def test_no_block_is_fuller_than_those_that_are_looked_at(code: str) -> None:
    """Under ZeRO 3 an inner block has a neighbour gathered and another one's gradients on the way."""
    task, layout = task_of(8, 16), parse_layout_code(code)
    moments = rank_moments(task, layout, 0)
    fullest = max(moment.total for moment in every_block(task, layout))
    assert moments.peak == pytest.approx(fullest)


def every_block(task: PlanTask, layout: ParallelLayout) -> list[Moment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_memory, "step_moments", lambda terms, layers, kept, passing, blocks: step_moments(
            terms, layers, kept, passing, reversed(range(layers))))  # fmt: skip
        return list(rank_moments(task, layout, 0).moments)


def test_the_states_are_those_of_the_rank_with_most_heads() -> None:
    """25 heads over 4 ranks: one has 7, and its attention's matrices are 1.12 of the mean."""
    task, layout = task_of(4, 4), ParallelLayout(tp=4, microbatch_size=1)
    model, memory = task.model, rank_memory(task, layout, 0)
    more = 1.12 - 1
    even = model.parameters / 4
    attention = model.blocks * model.attention_weights / 4
    assert memory["parameters"] / 2 == pytest.approx(even + more * attention, rel=1e-3)


# --- schedules that are predicted too fast -----------------------------------------------------------


def test_zero_bubble_schedules_are_preferred_by_no_less_than_their_error() -> None:
    rows = [row.measured / row.predicted for row in benchmarks() if "zb" in row.layout]
    assert pytest.approx(min(rows), abs=0.005) == ZERO_BUBBLE_ERROR
    result = search(make_task(read_model("vit-l16"), find_gpu("t4"), 8, None, None), progress=False)
    best = result.plans[0]
    faster = [plan for plan in result.plans if plan.step < best.step]
    assert not best.zero_bubble
    assert faster, "no schedule is predicted to be faster"
    assert all(plan.zero_bubble and best.step < ZERO_BUBBLE_ERROR * plan.step for plan in faster)


def test_the_report_says_that_zero_bubble_schedules_took_longer() -> None:
    task, gpu = task_of(4, 32), find_gpu("h100")
    plans = [make_plan(task, parse_layout_code(code)) for code in ("pp4-1f1b-mb1", "pp4-zb-h1-mb1")]
    said = "Zero-bubble schedules took 1.26 times the predicted step or more"
    assert said in format_report(task, gpu, Search(plans, seen=2), plans)
    assert said not in format_report(task, gpu, Search(plans[:1], seen=1), plans[:1])


# --- links and messages ------------------------------------------------------------------------------


def test_a_fitted_latency_is_used_as_it_is_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduces over a link of 20 us a message are planned to take what was measured."""
    ranks, link, sizes = 4, Link(20e-6, 300e9), measure._BYTES["cpu"]
    times = [seconds("all_reduce", float(size), ranks, link) for size in sizes]
    monkeypatch.setattr(measure, "launch", lambda *_, **__: ranks * [(1e12, 1e11, times, 1e9, "fp32", 1.0)])
    gpu = measure_gpu(ranks, "cpu", tmp_path)
    for size, took in zip(sizes, times, strict=True):
        assert seconds("all_reduce", float(size), ranks, Link(gpu.latency, gpu.link)) == pytest.approx(took)
    assert fit_link(sizes, times, ranks).latency < gpu.latency


def test_a_network_that_nobody_measured_is_that_of_datasheets() -> None:
    gpu = GPU("measured", 6e14, 80e9, 3e12, 2e11, "measured", matmul_share=0.85, link_share=1.0, latency=1e-6)
    between, sheet = gpu.cluster(16).between, find_gpu("h100").cluster(16).between
    assert between == sheet
    assert between.bandwidth == LINK_SHARE * gpu.network
    task = make_task(read_model("gpt2"), gpu, 16, 16, None)
    plan = make_plan(task, parse_layout_code("dp16-mb1"))
    assert "network between nodes was not measured: 66% of 50 GB/s" in format_report(
        task, gpu, Search([plan], seen=1), [plan]
    )
    assert "Not measured" in format_card(gpu)
    assert "85% of that rate" in format_card(gpu)


def test_a_card_of_an_earlier_version_has_the_network_of_datasheets(tmp_path: Path) -> None:
    old = asdict(GPU("measured", 6e14, 80e9, 3e12, 2e11, "measured", link_share=1.0))
    del old["network_share"], old["network_latency"]
    (tmp_path / "measured-gpu.json").write_text(json.dumps(old))
    assert measured_gpu(tmp_path).cluster(16).between == find_gpu("h100").cluster(16).between


def test_a_hop_sends_what_a_rank_has() -> None:
    """Megatron sends a t-th and gathers it; our ranks send all, or their tokens with sequence parallelism."""
    task, layout = task_of(8, 8), parse_layout_code("pp2-tp4-1f1b-mb1")
    link, activation = links(task.cluster, layout), 2.0 * 1024 * 1600
    tokens = replace(layout, sequence_parallel=True)
    assert _hop_seconds(task, layout) == seconds("send", activation, 2, link["pp"])
    assert _hop_seconds(task, tokens) == seconds("send", activation / 4, 2, link["pp"])
    megatron = replace(task, software=MEGATRON_LM)
    gathered = seconds("all_gather", activation, 4, link["tp"])
    assert _hop_seconds(megatron, layout) == seconds("send", activation / 4, 2, link["pp"]) + gathered
    table = 2.0 * 50257 * 1600 / 4 / 2 * 2  # of both ends, over the two ranks
    hops = [plan_bytes(task, one)["pp"] - table for one in (layout, tokens)]
    assert hops[0] == pytest.approx(4 * hops[1])


@pytest.mark.parametrize("pp", [48, 24, 12, 1])
def test_zero_3_exposes_no_more_than_its_messages_take(pp: int) -> None:
    task, layout = task_of(96, 96), ParallelLayout(96 // pp, pp, zero_stage=3, microbatch_size=1)
    parameters, link = rank_parameters(task, layout)[0], links(task.cluster, layout)["dp"]
    blocks, m = task.model.blocks // pp, task.microbatches(layout)
    gather, scatter = (
        blocks * seconds(op, 2 * parameters / blocks, layout.dp, link)
        for op in ("all_gather", "reduce_scatter")
    )
    assert _exposed_dp(task, layout, 1e-9) <= (1 + 1e-9) * (2 * m * gather + scatter)


# --- what is refused, and with which advice ----------------------------------------------------------


def test_imbalance_of_experts_that_are_not_sharded_changes_nothing() -> None:
    mixtral = ModelShape("mixtral", 4096, 32, 32, 8, 128, 14336, 32000, 32000 * 4096, 32000 * 4096, 32768,
                         gated=True, experts=8, chosen=2)  # fmt: skip
    task = make_task(mixtral, find_gpu("h200"), 64, 64, 4096)
    layout = ParallelLayout(64, zero_stage=3, microbatch_size=1)
    fuller = replace(task, imbalance=4.0)
    assert rank_memory(fuller, layout, 0) == rank_memory(task, layout, 0)
    assert plan_parts(fuller, layout) == plan_parts(task, layout)


@pytest.mark.parametrize(("batch", "advised"), [(10, [12]), (26, [24, 36]), (8, [])])
def test_a_batch_that_is_advised_can_be_split(batch: int, advised: list[int]) -> None:
    layout = ParallelLayout(4, microbatch_size=3)
    task = task_of(4, batch)
    why = refusal(task, layout)
    assert why is not None
    for size in advised:
        assert str(size) in why[1].split("; use ")[1]
        assert refusal(replace(task, batch=size), layout) is None
    if not advised:
        assert why[1].endswith("use mb1 or mb2")


@pytest.mark.parametrize(
    "code", ["dp8-dp4", "dp4-pp2-interleaved2-zb-v-mb1", "dp8-mb1-mb4", "dp8-full-selective"]
)
def test_a_layout_that_says_something_twice_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="twice; leave one out"):
        parse_layout_code(code)
