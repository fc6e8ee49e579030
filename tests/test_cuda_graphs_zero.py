"""CUDA graphs of stages whose parameters are sharded (ZeRO 3): a graph gathers them. On a CPU a capture calls
the function again (`replayed_graphs.py`). On GPUs everything is real, and each rank needs one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hybrid_cases import distance, mine, own, weights
from rank_pools import RankPools
from replayed_graphs import with_graphs
from test_cuda_graphs_tensor_parallel import EXACT, STEPS, Case, build, serial, train, train_twice

import hpnb

CASES = [
    Case(tp=1, dp=2, zero=3), Case(tp=1, dp=2, zero=3, rows=7), Case(tp=1, dp=2, pp=2, zero=3),
    Case(tp=1, dp=2, pp=2, zero=3, style="zb-h1", rows=7), Case(tp=2, dp=2, zero=3, sequence=True),
    Case(tp=1, dp=2, pp=2, zero=3, style="interleaved"), Case(tp=1, dp=2, zero=3, lengths=(0, 1)),
    Case(tp=1, pp=2, zero=3), Case(tp=1, pp=2, zero=3, style="zb-v", rows=7),
    Case(tp=2, zero=3, sequence=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=120)
    yield pools
    pools.close()


def check_sent(case: Case, graphs: dict[str, Any], eager: dict[str, Any]) -> None:
    """Eager actions may keep the block that the next one begins with, and graphs gather it again."""
    actions = 2 * (1 if case.pp == 1 else 4 * (1 + (case.style == "interleaved")))
    (calls, nbytes), (eager_calls, eager_bytes) = graphs.pop("dp", (0, 0)), eager.pop("dp", (0, 0))
    assert graphs == eager
    assert 0 <= calls - eager_calls <= actions
    assert nbytes >= eager_bytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replayed_steps_are_eager_steps_and_one_process(pools: RankPools, case: Case) -> None:
    expected = serial(case.kind, case.rows, case.lengths)
    for graphs, eager in pools[case.ranks].run(train_twice, case, "", 0.0):
        assert graphs["graphs"] > 0, graphs
        assert not graphs["reasons"]
        for a, b in zip(graphs["losses"], expected["losses"], strict=True):
            assert a is None or abs(a - b) < EXACT * abs(b)
        assert distance(graphs["weights"], expected["weights"]) < EXACT
        assert distance(graphs["weights"], eager["weights"]) < EXACT

        check_sent(case, graphs["sent"], eager["sent"])


def test_one_rank_that_cannot_capture_lets_all_run_eagerly(pools: RankPools) -> None:
    case = Case(tp=1, dp=2, zero=3)
    reasons = ["another rank that communicates within it could not capture it", "out of memory"]
    for reason, (graphs, eager) in zip(
        reasons, pools[2].run(train_twice, case, "failed capture", 0.0), strict=True
    ):
        assert graphs["graphs"] == 0
        assert reason in graphs["reasons"][0]
        assert distance(graphs["weights"], eager["weights"]) < EXACT


def test_over_gloo_a_stage_runs_eagerly_and_says_why(pools: RankPools) -> None:
    for graphs, eager in pools[2].run(train_twice, Case(tp=1, dp=2, zero=3), "gloo", 0.0):
        assert graphs["graphs"] == 0
        (warned,) = graphs["warned"]
        assert warned == (
            "stage 0 runs without CUDA graphs, because its parameters are sharded (ZeRO 3) along dp, and "
            "only a group with the backends cpu:gloo,cuda:nccl gathers them in a graph"
        )
        assert graphs["losses"] == eager["losses"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"cpu_offload": True}, "its shards are on the CPU (cpu_offload)"),
        ({"find_unused_parameters": True}, "its ranks may use different parameters (find_unused_parameters)"),
    ],
)
def test_what_cannot_be_captured_is_refused(pools: RankPools, option: dict[str, Any], reason: str) -> None:
    for refused in pools[2].run(reason_of, option):
        assert refused.startswith(reason)


def reason_of(option: dict[str, Any]) -> str:
    module = hpnb.fully_shard(torch.nn.Linear(4, 4), hpnb.Mesh(hpnb.Layout(dp=2)).dp, average=False, **option)
    return hpnb.data_parallel.sink(module).why_not_captured


def train_other_lengths(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(case, True, "lengths", steps=STEPS + 2), train(case, False, "lengths", steps=STEPS + 2)


def check_other_lengths(results: list[tuple[dict[str, Any], dict[str, Any]]], captures: int) -> None:
    """Rank 1 has fewer tokens in every other step. So they capture together in two steps that follow
    each other. In the step after, rank 0 has a graph of the second capture, and rank 1 of the first."""
    for graphs, eager in results:
        assert graphs["graphs"] > 0, graphs["reasons"]
        assert graphs["captures"] == captures
        (warned,) = graphs["warned"]
        assert warned.startswith(
            "stage 0 runs some microbatches without CUDA graphs, because ranks that it comm"
        )
        assert not graphs["reasons"]
        for a, b in zip(graphs["losses"], eager["losses"], strict=True):
            assert a is None or abs(a - b) <= EXACT * abs(b)
        assert distance(graphs["weights"], eager["weights"]) < EXACT


def test_ranks_with_other_shapes_replay_what_they_captured_together(pools: RankPools) -> None:
    forward_and_backward = 2
    check_other_lengths(pools[2].run(train_other_lengths, Case(tp=1, dp=2, zero=3)), 2 * forward_and_backward)


def train_variant(options: dict[str, Any], frozen: bool, graphs: bool) -> dict[str, Any]:
    """With options of the plugin, or with two of four blocks and the embeddings frozen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_gpu, case = hpnb.device().type == "cuda", Case(tp=1, dp=2, zero=3)
    plugin = case.plugin(enable_cuda_graphs=graphs and on_gpu, num_microbatches=2, **options)
    booster, model = hpnb.Booster(plugin=plugin), build("gpt2")
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or not any(part in name for part in (".h.0.", ".h.2.", "wte", "wpe")))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.2, momentum=0.9)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    losses, made = [], None
    for step in range(STEPS):
        optimizer.zero_grad()
        if boosted._pipe is not None and graphs and not on_gpu and made is None:
            made = with_graphs(boosted._pipe, [plugin.zero_axes[1]])
        given = iter([mine(case.batch(step), plugin.mesh.dp)])
        losses.append(float(booster.execute_pipeline(given, boosted, own, optimizer)["loss"]))
        optimizer.step()
    made = boosted._pipe._graphs
    return {
        "losses": losses,
        "weights": {name: w.cpu() for name, w in weights(boosted).items()},
        "graphs": 0 if made is None else len(made._graphs),
        "reasons": {} if made is None else dict(made.reasons),
    }


def train_variant_twice(options: dict[str, Any], frozen: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return train_variant(options, frozen, True), train_variant(options, frozen, False)


VARIANTS: list[tuple[dict[str, Any], bool, int]] = [
    ({"activation_checkpointing": "full"}, False, 2), ({}, True, 2),
    ({"overlap_communication": False}, False, 2), ({"zero_replicas": 2}, False, 4),
]  # fmt: skip


def check_variant(pools: RankPools, options: dict[str, Any], frozen: bool, ranks: int) -> None:
    for graphs, eager in pools[ranks].run(train_variant_twice, options, frozen):
        assert graphs["graphs"] == 1, graphs["reasons"]
        assert graphs["losses"] == pytest.approx(eager["losses"], rel=EXACT)
        assert distance(graphs["weights"], eager["weights"]) < EXACT


@pytest.mark.parametrize(("options", "frozen", "ranks"), VARIANTS)
def test_recomputed_frozen_and_replicated_shards(
    pools: RankPools, options: dict[str, Any], frozen: bool, ranks: int
) -> None:
    check_variant(pools, options, frozen, ranks)


# --- on GPUs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=60, device="cuda")
    yield pools
    pools.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_gpus_replayed_steps_are_eager_steps(gpu_pools: RankPools, case: Case, dropout: float) -> None:
    if torch.cuda.device_count() < case.ranks:
        pytest.skip(f"needs {case.ranks} GPUs")
    for graphs, eager in gpu_pools[case.ranks].run(train_twice, case, "", dropout):
        assert graphs["graphs"] > 0, graphs["reasons"]
        assert not graphs["reasons"]
        for a, b in zip(graphs["losses"], eager["losses"], strict=True):
            assert a is None or abs(a - b) <= EXACT * abs(b)
        assert distance(graphs["weights"], eager["weights"]) < EXACT
        check_sent(case, graphs["sent"], eager["sent"])


def train_with_same_kernels(style: str, microbatches: int, graphs: bool) -> tuple[list[float], Any, int]:
    """In float32 with dropout. Eager gradients start at zero too, and matmuls add to them, as in graphs."""
    torch.manual_seed(0)
    mesh = hpnb.Mesh(hpnb.Layout(dp=2))
    model: Any = build("gpt2", dropout=0.2).float()
    schedule = hpnb.pipeline_parallel.schedules.make(style, stages=1, microbatches=microbatches)
    pipe = hpnb.Pipeline(model, mesh.pp, schedule, by_logits, cuda_graphs=graphs)
    hpnb.fully_shard(pipe.module, mesh.dp, units=[*pipe.module.units])
    pipe.gradients = hpnb.data_parallel.sink(pipe.module)
    pipe._split_backward.min_flops = 0.0
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for holder in pipe._grad_ready._holders.values() if not graphs else ():
            holder.grad = torch.zeros_like(holder)
        given = mine(Case(rows=16).batch(step), mesh.dp)
        losses.append(pipe.step(given).loss.item())
        optimizer.step()
    made = pipe._graphs
    assert made is None or not made.reasons, made.reasons
    return (
        losses,
        {n: p.detach().cpu() for n, p in pipe.named_parameters()},
        0 if made is None else len(made._graphs),
    )


def by_logits(outputs: Any, inputs: Any) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def train_with_same_kernels_twice(style: str, microbatches: int) -> tuple[Any, Any]:
    return (
        train_with_same_kernels(style, microbatches, True),
        train_with_same_kernels(style, microbatches, False),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("style", "microbatches", "graphs"), [("1f1b", 1, 1), ("1f1b", 4, 1), ("gpipe", 4, 4), ("zb-h1", 4, 1)]
)
def test_on_gpus_replayed_steps_are_eager_steps_bit_for_bit(
    gpu_pools: RankPools, style: str, microbatches: int, graphs: int
) -> None:
    """Also with several microbatches in flight, and with backwards in two parts."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    ranks = gpu_pools[2].run(train_with_same_kernels_twice, style, microbatches)
    for (losses, replayed, count), (eager_losses, eager, _) in ranks:
        assert count == graphs
        assert losses == eager_losses
        assert all(torch.equal(replayed[name], weight) for name, weight in eager.items())


@pytest.mark.gpu
def test_on_gpus_ranks_with_other_shapes_replay_what_they_captured_together(gpu_pools: RankPools) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check_other_lengths(gpu_pools[2].run(train_other_lengths, Case(tp=1, dp=2, zero=3)), 0)


def train_waiting(ranks: list[int], graphs: bool) -> tuple[list[float], int, list[str]]:
    """Losses of a criterion that waits for the GPU on `ranks`, how many graphs there are, and warnings."""
    case = Case(tp=1, dp=2, zero=3)
    torch.manual_seed(0)
    plugin = case.plugin(enable_cuda_graphs=graphs, precision="fp32")
    booster, model = hpnb.Booster(plugin=plugin), build("gpt2").float()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    waits = plugin.mesh.dp.rank in ranks

    def criterion(outputs: Any, _: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs.loss
        return loss if not waits or loss.item() < 1e9 else 2 * loss

    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            given = iter([mine(case.batch(step), plugin.mesh.dp)])
            losses.append(float(booster.execute_pipeline(given, boosted, criterion, optimizer)["loss"]))
            optimizer.step()
    made = boosted._pipe._graphs
    warned = [str(w.message) for w in caught if "without CUDA graphs" in str(w.message)]
    return losses, 0 if made is None else len(made._graphs), warned


def train_waiting_twice(ranks: list[int]) -> tuple[Any, Any]:
    return train_waiting(ranks, True), train_waiting(ranks, False)


@pytest.mark.gpu
def test_on_gpus_a_capture_that_fails_leaves_the_shards_as_they_are(gpu_pools: RankPools) -> None:
    """A loss that waits on both ranks runs eagerly behind the graph. If it waits on one of them, the other
    has a graph with a loss, and they replay nothing."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for (losses, graphs, warned), (eager, _, _) in gpu_pools[2].run(train_waiting_twice, [0, 1]):
        assert graphs == 1
        assert [w[:44] for w in warned] == ["the loss runs without CUDA graphs, because P"]
        assert losses == pytest.approx(eager, rel=1e-5)
    for (losses, graphs, warned), (eager, _, _) in gpu_pools[2].run(train_waiting_twice, [1]):
        assert graphs == 0
        assert any("another rank that communicates within it could not capture it" in w for w in warned)
        assert losses == pytest.approx(eager, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "frozen", "ranks"), VARIANTS)
def test_on_gpus_recomputed_frozen_and_replicated_shards(
    gpu_pools: RankPools, options: dict[str, Any], frozen: bool, ranks: int
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    check_variant(gpu_pools, options, frozen, ranks)


def train_compiled(graphs: bool) -> tuple[list[float], int, dict[int, str]]:
    case = Case(tp=1, dp=2, zero=3)
    torch.manual_seed(0)
    plugin = case.plugin(enable_cuda_graphs=graphs, precision="fp32", enable_jit_fused=True)
    booster, model = hpnb.Booster(plugin=plugin), build("gpt2").float()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    boosted: Any
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        given = iter([mine(case.batch(step), plugin.mesh.dp)])
        losses.append(float(booster.execute_pipeline(given, boosted, own, optimizer)["loss"]))
        optimizer.step()
    made = boosted._pipe._graphs
    return losses, 0 if made is None else len(made._graphs), {} if made is None else dict(made.reasons)


def train_compiled_twice() -> tuple[Any, Any]:
    return train_compiled(True), train_compiled(False)


@pytest.mark.gpu
def test_on_gpus_compiled_blocks_gather_in_graphs(gpu_pools: RankPools) -> None:
    """enable_jit_fused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for (losses, graphs, reasons), (eager, _, _) in gpu_pools[2].run(train_compiled_twice):
        assert not reasons
        assert graphs == 1
        assert losses == pytest.approx(eager, rel=1e-5)
