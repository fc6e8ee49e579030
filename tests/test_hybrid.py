"""A Booster on any layout computes what one process computes; and all that stands around a step."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import os
import pickle
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hybrid_cases import (
    CLASSES,
    LOSSES,
    WORDS,
    Case,
    Found,
    batch,
    build,
    distance,
    mean,
    mine,
    off,
    sample,
    train,
    weights,
)
from rank_pools import RankPools, gpu_ranks
from tiny_models import build as build_tiny
from tiny_models import planned_architecture
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import hpnb
from hpnb import HybridParallelPlugin
from hpnb.hybrid import boosted_optimizer, global_loss, recompute
from hpnb.hybrid.presets import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from hpnb.hybrid.refused import REFUSED
from hpnb.pipeline_parallel import Builder, Pipeline, full_state_dict, schedules
from hpnb.pipeline_parallel.microbatches import split_batch
from hpnb.pipeline_parallel.stages import WholeModel
from hpnb.ranks import devices
from hpnb.ranks import pool as ranks_pool

D = torch.float64
EXACT = {"SGD": 1e-11, "AdamW": 1e-6}  # Adam magnifies rounding where a gradient is near its epsilon


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, hpnb.Ranks]]:
    made: dict[int, hpnb.Ranks] = {}
    yield made
    for pool in made.values():
        pool.close()


def on(pools: dict[int, hpnb.Ranks], ranks: int) -> hpnb.Ranks:
    """A pool of so many ranks; a new one if the last was lost."""
    if ranks not in pools:
        pools[ranks] = hpnb.Ranks(ranks, device="cpu", timeout=120)
    return pools[ranks]


# --- everything with everything ----------------------------------------------------------------------------

# Not left to chance: each schedule beside a data axis, each ZeRO stage beside a pipeline and tensor
# parallelism, all three axes, a grid.
CHOSEN = [
    Case("gpt2", dp=2, pp=2, style="1f1b", microbatches=3, zero=1, rows=7),
    Case("gpt2", dp=2, pp=2, style="zb-v", microbatches=3, zero=3, rows=7, loss="pair", clip=0.5),
    Case("gpt2", dp=2, pp=2, style="zb-h2", microbatches=4, zero=2, accumulate=2, loss="mean"),
    Case("vit", dp=2, pp=2, style="dualpipe-v", microbatches=4, zero=0, rows=5, again="full"),
    Case("gpt2", dp=2, tp=2, sequence=True, zero=3, direct=True, loss="mean", accumulate=2, again="full"),
    Case("gpt2", pp=2, tp=2, sequence=True, style="interleaved", chunks=2, microbatches=3, loss="pair"),
    Case("gpt2", dp=4, zero=2, direct=True, rows=2, loss="own"),  # two ranks without samples
    Case("gpt2", dp=4, zero=3, replicas=2, direct=True, loss="mean", accumulate=2, clip=0.5),
    Case("gpt2", tp=4, tp_mode="2d", microbatches=3, loss="mean", again="attention"),
    Case("vit", tp=4, tp_mode="2d", zero=1, direct=True, optimizer="AdamW"),
    Case("gpt2 classifies", pp=4, style="zb-h1", microbatch_size=2, rows=7, clip=0.5, optimizer="AdamW"),
]  # fmt: skip
SAMPLE = list(dict.fromkeys([*CHOSEN, *sample(seed=11, count=56)]))


def name(case: Case) -> str:
    plain = Case()
    return " ".join(
        f"{key}={value}" for key, value in vars(case).items() if value != getattr(plain, key)
    ).replace("kind=", "")


@pytest.mark.parametrize(
    "case",
    [*CHOSEN, *(pytest.param(case, marks=pytest.mark.sampled(1)) for case in SAMPLE if case not in CHOSEN)],
    ids=name,
)
def test_is_one_process(pools: dict[int, hpnb.Ranks], case: Case) -> None:
    try:
        found = on(pools, case.ranks).run(train, case)
    except hpnb.RankError:
        pools.pop(case.ranks).close()
        raise
    assert off(case, found) < EXACT[case.optimizer]


def test_the_sample_has_everything() -> None:
    """What the title of the matrix promises, whatever the seed."""
    assert len(SAMPLE) >= 60
    promised: dict[str, list[Any]] = {
        "style": list(schedules.NAMES), "zero": [0, 1, 2, 3], "loss": ["own", "mean", "pair"],
        "sequence": [True], "tp_mode": ["1d", "2d"], "again": ["full", "attention"],
        "kind": ["vit", "gpt2", "gpt2 classifies"], "direct": [True, False],
    }  # fmt: skip
    for key, values in promised.items():
        assert {getattr(case, key) for case in SAMPLE} >= set(values), key
    assert {case.style for case in SAMPLE if case.pp > 1} == set(schedules.NAMES)
    for axes in (("dp", "pp"), ("dp", "tp"), ("pp", "tp")):
        assert any(all(getattr(case, axis) > 1 for axis in axes) for case in SAMPLE), axes


KNOBS: list[tuple[Case, dict[str, Any]]] = [
    (Case("vit", dp=2, direct=True, accumulate=2), {"static_graph": True, "check_reduction": True}),
    (Case("vit", dp=2, direct=True), {"gradient_as_bucket_view": True, "overlap_communication": False}),
    (Case("gpt2", dp=2, microbatches=2, accumulate=2), {"gradient_as_bucket_view": True}),
    (Case("gpt2", dp=2, pp=2, microbatches=2, accumulate=2), {"gradient_as_bucket_view": True}),
    (Case("gpt2", dp=2, pp=2, microbatches=2), {"static_graph": True, "find_unused_parameters": True}),
    (Case("vit", dp=2, zero=1, direct=True), {"cpu_offload": True, "communication_dtype": D}),
    (Case("gpt2", dp=2, zero=2, microbatches=3), {"cpu_offload": True, "overlap_communication": False}),
    (Case("vit", dp=2, zero=3, microbatches=2), {"cpu_offload": True, "overlap_communication": False}),
    (Case("gpt2", dp=2, pp=2, zero=1, microbatches=2), {"find_unused_parameters": True, "cpu_offload": True}),
    (Case("gpt2", pp=2, microbatches=2), {"cut": "parameters", "enable_all_optimization": True}),
    (Case("vit", pp=2, microbatches=2), {"cut": [3, 1], "enable_flash_attention": True}),
    (Case("vit", tp=2), {"enable_jit_fused": False, "enable_fused_normalization": True,
                         "enable_sequence_overlap": True}),
    (Case("vit", dp=2), {"enable_jit_fused": True, "broadcast_buffers": False}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "knobs"), KNOBS, ids=[str(knobs) for _, knobs in KNOBS])
def test_knobs_change_nothing_but_the_way(
    pools: dict[int, hpnb.Ranks], case: Case, knobs: dict[str, Any]
) -> None:
    assert off(case, on(pools, case.ranks).run(train, case, knobs)) < EXACT[case.optimizer]


def sweep(cases: list[Case], device: str = "cpu") -> None:
    pools: dict[int, hpnb.Ranks] = {}
    for case in cases:
        if case.ranks not in pools:
            pools[case.ranks] = hpnb.Ranks(case.ranks, device=device, timeout=180)
        found = pools[case.ranks].run(train, case)
        assert off(case, found) < EXACT[case.optimizer], name(case)
    for pool in pools.values():
        pool.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_three_axes_and_every_grid() -> None:
    sweep(list(sample(seed=12, count=400, most=8, least=5))[:60])
    sweep([
        Case("gpt2", dp=2, pp=2, tp=2, sequence=True, zero=3, style="zb-v", microbatches=4, clip=0.5),
        Case("gpt2", dp=2, pp=2, tp=2, zero=1, style="interleaved", chunks=2, microbatches=3, rows=7),
        Case("vit", dp=2, tp=4, tp_mode="2d", zero=2, rows=16, microbatches=2),
        Case("gpt2", pp=2, tp=4, tp_mode="2d", style="1f1b", microbatches=2),
        Case("gpt2", tp=8, tp_mode="2.5d", tp_depth=2, zero=1, microbatches=2),
        Case("gpt2", tp=8, tp_mode="3d", zero=2, microbatches=2, again="full"),
    ])  # fmt: skip


def test_over_the_process_group_of_shared_gpus_it_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, through buffers in the host's memory."""
    choose = devices.choose_device
    backend = devices.SHARED_GPU_BACKEND
    monkeypatch.setattr(ranks_pool, "choose_device", lambda d, n: replace(choose(d, n), backend=backend))
    sweep([
        Case("gpt2", dp=2, pp=2, zero=1, style="zb-h1", microbatches=3, rows=7, clip=0.5),
        Case("vit", pp=2, tp=2, sequence=True, microbatches=2),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=60, device="cuda")
    yield pools
    pools.close()


@pytest.mark.one_gpu
@pytest.mark.parametrize(
    "case", [case for case in [*CHOSEN, *sample(seed=13, count=60)] if case.ranks <= 4][:24], ids=name
)
def test_on_gpus_it_is_one_process(gpu_pools: RankPools, case: Case) -> None:
    if case.ranks > gpu_ranks():
        pytest.skip(f"needs {case.ranks} ranks; here: {gpu_ranks()}")
    assert off(case, gpu_pools[case.ranks].run(train, case)) < EXACT[case.optimizer]


# --- a fault would be seen ---------------------------------------------------------------------------------


def with_fault(case: Case, fault: str) -> Found:
    """Train with one thing broken."""
    weigh, step, update = global_loss.Weigher.__call__, Pipeline.step, boosted_optimizer.BoostedOptimizer.step
    calls = itertools.count()

    def ones(self: Any, outputs: Any, count: torch.Tensor, share: Any) -> Any:
        return weigh(self, outputs, torch.ones_like(count), share)

    def swapped(self: Any, given: Any, **how: Any) -> Any:
        labels = given["labels"].clone()
        labels[:2] = given["labels"][:2].flip(0)
        return step(self, {**given, "labels": labels}, **how)

    def once_less(self: Any) -> None:
        if next(calls) != 1 or hpnb.rank():
            update(self)
        else:
            self.record(hpnb.precision.OptimizerStepResult(False, None, 1.0))

    broken: Any = {
        "nobody weighs": (global_loss.Weigher, "__call__", lambda self, outputs, *_: outputs),
        "counts are ignored": (global_loss.Weigher, "__call__", ones),
        "samples are swapped": (Pipeline, "step", swapped),
        "a rank does not step": (boosted_optimizer.BoostedOptimizer, "step", once_less),
    }
    kind, name, instead = broken[fault]
    whole = getattr(kind, name)
    setattr(kind, name, instead)
    try:
        return train(case)
    finally:
        setattr(kind, name, whole)


FAULTS = {
    "nobody weighs": Case("gpt2", dp=2, direct=True, rows=7, loss="mean"),
    "counts are ignored": Case("gpt2", dp=2, direct=True, rows=7),
    "samples are swapped": Case("gpt2 classifies", pp=2, microbatches=4),
    "a rank does not step": Case("vit", tp=2, direct=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    case = FAULTS[fault]
    assert off(case, hpnb.launch(with_fault, case, fault, ranks=case.ranks, device="cpu")) > 1e-3


# --- a step ------------------------------------------------------------------------------------------------


def boosted(
    kind: str = "vit", dropout: float = 0.0, lr: float = 0.1, **knobs: Any
) -> tuple[Any, Any, Any, Any]:
    torch.set_num_threads(1)
    plugin = HybridParallelPlugin(**{"precision": "fp64", **knobs})
    booster = hpnb.Booster(plugin=plugin)
    model: Any = build(kind, dropout=dropout)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return plugin, booster, model, optimizer


def what_comes_back(style: str, chunks: int) -> dict[str, Any]:
    plugin, booster, model, optimizer = boosted(
        "gpt2 classifies", pp_size=2, pp_style=style, num_model_chunks=chunks, num_microbatches=3
    )
    given, manager = batch("gpt2 classifies", 0, 7), plugin.stage_manager
    found = booster.execute_pipeline(iter([given]), model, mean, optimizer, True, True)
    silent = booster.execute_pipeline(iter([given]), model, mean, optimizer, return_loss=False)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    before = dict(booster.execute_pipeline(iter([given]), model, mean, return_outputs=True))  # forward alone
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters())
    own = booster.execute_pipeline(iter([given]), model)["loss"]  # the model's own
    return {
        "first": manager.is_first_stage(), "last": manager.is_last_stage(), "stage": manager.stage,
        "stages": manager.num_stages, "loss": found["loss"], "silent": silent,
        "shape": None if found["outputs"] is None else tuple(found["outputs"].logits.shape),
        "evaluated": before["loss"],
        "trained": found["outputs"] is None or found["outputs"].logits.requires_grad,
        "own": own, "names": [n for n, _ in model.named_parameters()],
    }  # fmt: skip


@pytest.mark.parametrize(("style", "chunks", "last"), [("1f1b", 1, 1), ("zb-v", 2, 0), ("interleaved", 2, 1)])
def test_loss_and_outputs_are_where_the_last_stage_is(
    pools: dict[int, hpnb.Ranks], style: str, chunks: int, last: int
) -> None:
    found = on(pools, 2).run(what_comes_back, style, chunks)
    alone, given = build("gpt2 classifies"), batch("gpt2 classifies", 0, 7)
    loss = mean(alone(**{n: t for n, t in given.items() if n != "labels"}), given)
    for rank, one in enumerate(found):
        assert one["last"] == (rank == last)
        assert one["first"] == (rank == 0)
        assert (one["stage"], one["stages"]) == (rank, 2)
        assert one["silent"] == {"loss": None, "outputs": None}
        if rank != last:
            assert one["loss"] is one["shape"] is one["evaluated"] is one["own"] is None
        else:
            assert one["loss"].shape == ()
            for value in (one["loss"], one["evaluated"], one["own"]):
                assert float(value) == pytest.approx(loss.item(), rel=1e-14)
            assert one["shape"] == (7, CLASSES)
            assert not one["trained"]
    assert {n for one in found for n in one["names"]} == {n for n, _ in alone.named_parameters()}


def ragged_batches() -> list[float]:
    """Other numbers of microbatches from batch to batch, down to a rank without samples; gradients add up."""
    plugin, booster, model, optimizer = boosted(
        "gpt2", pp_size=2, pp_style="zb-v", num_model_chunks=2, microbatch_size=2
    )
    losses = []
    for step, rows in enumerate((8, 3, 1, 5)):
        given = mine(batch("gpt2", step, rows), plugin.mesh.dp)
        found = booster.execute_pipeline(iter([given]), model, None, optimizer)["loss"]
        losses.append(math.nan if found is None else float(found))
    full = {n: p.grad for n, p in model.named_parameters()}
    return [*losses, full]  # type: ignore[list-item]


def test_as_many_microbatches_as_the_batch_needs(pools: dict[int, hpnb.Ranks]) -> None:
    found: list[Any] = on(pools, 4).run(ragged_batches)
    alone = build("gpt2")
    for step, rows in enumerate((8, 3, 1, 5)):
        given = batch("gpt2", step, rows)
        loss = mean(alone(**{n: t for n, t in given.items() if n != "labels"}), given)
        loss.backward()
        for rank in (0, 2):  # with the V both ends are there
            assert found[rank][step] == pytest.approx(loss.item(), rel=1e-13)
    gradients = {n: p.grad for n, p in alone.named_parameters()}
    for one in found:
        held = {n.replace("lm_head", "transformer.wte"): g for n, g in one[-1].items()}
        assert distance(held, {n: gradients[n] for n in held}) < 1e-12  # type: ignore[misc]


def with_new_criteria(kinds: list[str], stated: Any = None) -> tuple[list[float], int]:
    """Losses of steps with a criterion made anew for each, and how often ranks agreed on what it returns."""
    _, booster, model, optimizer = boosted("gpt2", pp_size=2, num_microbatches=2)
    model.loss_reduction = stated
    agreements, losses = 0, []
    broadcast = dist.broadcast_object_list

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal agreements
        agreements += 1
        broadcast(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", counting)
        for kind in kinds:
            loss = booster.execute_pipeline(
                iter([batch("gpt2", 0, 4)]), model, functools.partial(LOSSES[kind]), optimizer
            )["loss"]
            losses.append(math.nan if loss is None else float(loss))
    return losses, agreements


def test_ranks_agree_once_on_what_criteria_return(pools: dict[int, hpnb.Ranks]) -> None:
    (_, _), (losses, agreements) = on(pools, 2).run(with_new_criteria, ["mean"] * 3)
    assert agreements == 1
    assert losses == [losses[0]] * 3
    (_, _), (losses, agreements) = on(pools, 2).run(with_new_criteria, ["pair", "mean", "pair"])
    assert agreements == 1
    assert losses[0] == losses[2] != losses[1]
    (_, _), (losses, agreements) = on(pools, 2).run(with_new_criteria, ["mean", "pair"], "sum_and_count")
    assert agreements == 0
    assert losses[0] != losses[1]


def smooth_causal(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return 0.5 * F.cross_entropy(logits, labels, label_smoothing=0.1)


def smooth_classes(labels: Any, logits: Any, config: Any, **_: Any) -> Any:
    return F.cross_entropy(logits.view(-1, config.num_labels), labels.view(-1), label_smoothing=0.1)


REPLACED = {"gpt2": smooth_causal, "vit": smooth_classes}


def with_loss_function(kind: str, **knobs: Any) -> tuple[float, dict[str, Any]]:
    """A step of a model whose `loss_function` was replaced: its loss, where it is, and the gradients."""
    model: Any = build(kind)
    model.loss_function = REPLACED[kind]
    booster = hpnb.Booster(plugin=HybridParallelPlugin(precision="fp64", num_microbatches=2, **knobs))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = booster.execute_pipeline(iter([batch(kind, 0, 4)]), model, None, optimizer)["loss"]
    return math.nan if loss is None else float(loss), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_a_loss_function_that_was_replaced_is_called(pools: dict[int, hpnb.Ranks], kind: str) -> None:
    alone, given = build(kind), batch(kind, 0, 4)
    alone.loss_function = REPLACED[kind]
    loss = alone(**given).loss
    loss.backward()
    wanted = {n: p.grad for n, p in alone.named_parameters()}
    (_, first), (last, second) = on(pools, 2).run(with_loss_function, kind, pp_size=2)
    assert last == pytest.approx(loss.item(), rel=1e-13)
    for gradients in (first, second):
        named = {n.replace("lm_head", "transformer.wte"): g for n, g in gradients.items()}
        assert distance(named, {n: wanted[n] for n in named}) < 1e-12


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_loss_function_that_was_replaced_is_called_beside_tensor_parallelism(
    pools: dict[int, hpnb.Ranks], kind: str, pp_size: int
) -> None:
    alone, given = build(kind), batch(kind, 0, 4)
    alone.loss_function = REPLACED[kind]
    loss = alone(**given).loss
    loss.backward()
    norms = {n: p.grad for n, p in alone.named_parameters() if "norm" in n or "ln_" in n}
    last, gradients = on(pools, 2 * pp_size).run(with_loss_function, kind, tp_size=2, pp_size=pp_size)[-1]
    assert last == pytest.approx(loss.item(), rel=1e-13)
    replicated = {n: g for n, g in gradients.items() if n in norms}
    assert replicated
    assert distance(replicated, {n: norms[n] for n in replicated}) < 1e-12


def direct_beside_microbatches() -> float:
    """The two ways to run a step may take turns."""
    worst = 0.0
    for stage in (0, 1, 2, 3):
        ends = []
        for ways in ((True, False, True), (False, False, False)):
            plugin, booster, model, optimizer = boosted("gpt2", zero_stage=stage, microbatch_size=2)
            for step, direct in enumerate(ways):
                given = mine(batch("gpt2", step, 6), plugin.mesh.dp)
                optimizer.zero_grad()
                if direct:
                    booster.backward(model(**given).loss, optimizer)
                else:
                    booster.execute_pipeline(iter([given]), model, None, optimizer)
                optimizer.step()
            ends.append(weights(model))
        worst = max(worst, distance(*ends))
    return worst


def test_both_ways_to_run_a_step_take_turns(pools: dict[int, hpnb.Ranks]) -> None:
    assert max(on(pools, 2).run(direct_beside_microbatches)) < 1e-13


def losses_of_all_ranks(rows: int) -> tuple[float, float, float, bool]:
    plugin, _booster, model, _optimizer = boosted("gpt2", zero_stage=1)
    whole = batch("gpt2", 0, rows)
    given = mine(whole, plugin.mesh.dp)
    with torch.no_grad():
        quiet = float(model.eval()(**given).loss)
    found = model.train()(**given)
    loss = found.loss
    wanted = mean(build("gpt2")(**{n: t for n, t in whole.items() if n != "labels"}), whole)
    return float(loss), quiet, float(wanted), found[0] is found.loss or torch.equal(found[0], found.loss)


def test_without_a_pipeline_the_loss_is_that_of_all_ranks(pools: dict[int, hpnb.Ranks]) -> None:
    for rows in (5, 1):
        for loss, quiet, expected, first in on(pools, 2).run(losses_of_all_ranks, rows):
            assert loss == pytest.approx(expected, rel=1e-14)
            assert quiet == pytest.approx(expected, rel=1e-14)
            assert first  # as transformers has it


def sent_along_tp(direct: bool) -> list[tuple[float, float]]:
    """(calls, bytes) of a forward, loss and backward; then of one whose logits are read."""
    _, booster, model, optimizer = boosted("gpt2", tp_size=2)
    given, found = batch("gpt2", 0, 8), []
    for read in (False, True):

        def loss(outputs: Any, inputs: Any, read: bool = read) -> torch.Tensor:
            assert not read or outputs.logits.size(-1) == WORDS
            return outputs.loss  # type: ignore[no-any-return]

        with hpnb.record.traffic() as t:
            if direct:
                booster.backward(loss(model(**given), given), optimizer)
            else:
                booster.execute_pipeline(iter([given]), model, loss, optimizer)
        found.append((t.calls["tp"], t.bytes["tp"]))
    return found


@pytest.mark.parametrize("direct", [True, False])
def test_the_loss_gathers_no_logits(pools: dict[int, hpnb.Ranks], direct: bool) -> None:
    """Reading them costs one message, of 15 words a rank: half of the whole leaves each."""
    for (calls, sent), (calls_read, sent_read) in on(pools, 2).run(sent_along_tp, direct):
        assert calls_read == calls + 1
        assert sent_read == sent + 8 * 6 * 15 * 8


def recorded(pp: int) -> tuple[set[str], int]:
    _, booster, model, optimizer = boosted(pp_size=pp, num_microbatches=3)
    booster.execute_pipeline(iter([batch("vit", 0, 6)]), model, None, optimizer, record=True)
    events = model.last_step.timeline.events
    return {event.op for event in events}, len(events)


def test_a_recorded_step_has_a_timeline(pools: dict[int, hpnb.Ranks]) -> None:
    assert on(pools, 2).run(recorded, 2) == [({"F", "B"}, 12)] * 2
    assert hpnb.launch(recorded, 1, ranks=1, device="cpu") == [({"F", "B"}, 6)]


# --- models of the user's own ------------------------------------------------------------------------------


@dataclass
class Scores:
    logits: torch.Tensor
    extra: int = 1


class Classifier(nn.Module):
    """Returns a dataclass, takes some entries of a batch, has a frozen layer, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> Scores:
        return Scores(self.head(self.norm(self.frozen(self.body(x)))))


def numbers(rows: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=g), torch.randint(0, CLASSES, (rows,), generator=g)


def scores_loss(found: Any, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(found.logits, inputs["labels"])


def own_model(stage: int, direct: bool) -> tuple[float, list[str]]:
    plugin = HybridParallelPlugin(precision="fp64", zero_stage=stage, find_unused_parameters=True)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = Classifier().eval()  # the norm looks at one rank's rows
    alone = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(alone.parameters(), lr=0.5)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(2):
        x, y = numbers(5, step)
        ours = mine({"x": x, "labels": y, "index": torch.arange(5)}, plugin.mesh.dp)
        optimizer.zero_grad()
        if direct:
            found = model(ours["x"])
            assert found.extra == 1
            booster.backward(F.cross_entropy(found.logits, ours["labels"]), optimizer)
        else:
            booster.execute_pipeline(iter([ours]), model, scores_loss, optimizer)
        optimizer.step()
        reference.zero_grad()
        F.cross_entropy(alone(x.double()).logits, y).backward()
        reference.step()
    full = weights(model)
    return distance(full, dict(alone.state_dict())), [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_that_hpnb_does_not_know(pools: dict[int, hpnb.Ranks], stage: int, direct: bool) -> None:
    for apart, names in on(pools, 2).run(own_model, stage, direct):
        assert apart < 1e-13
        assert names == [n for n, _ in Classifier().named_parameters()]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def sequential(pp: int, again: Any) -> float:
    plugin = HybridParallelPlugin(
        precision="fp64", pp_size=pp, num_microbatches=3, activation_checkpointing=again
    )
    booster = hpnb.Booster(plugin=plugin)
    model: Any = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(model, optimizer)
    alone = layers().double()
    reference = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for step in range(2):
        x, y = numbers(5, step)
        optimizer.zero_grad()
        booster.execute_pipeline(
            iter([(x, y)]), model, lambda out, given: F.cross_entropy(out, given[1]), optimizer
        )
        optimizer.step()
        reference.zero_grad()
        F.cross_entropy(alone(x.double()), y).backward()
        reference.step()
    return distance(weights(model), dict(alone.state_dict()))


@pytest.mark.parametrize("again", [False, "full"])
def test_layers_in_a_row_and_batches_that_are_tuples(pools: dict[int, hpnb.Ranks], again: Any) -> None:
    assert max(on(pools, 2).run(sequential, 2, again)) < 1e-9
    assert max(on(pools, 1).run(sequential, 1, again)) < 1e-9


def buffers(send: bool) -> torch.Tensor:
    plugin = HybridParallelPlugin(precision="fp32", broadcast_buffers=send, find_unused_parameters=True)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = Classifier()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        x, y = numbers(6, 10 * step + hpnb.rank())
        optimizer.zero_grad()
        booster.execute_pipeline(iter([{"x": x, "labels": y}]), model, scores_loss, optimizer)
    found: torch.Tensor = model.norm.running_mean.clone()
    # What this rank's last batch has made of it is its own until the next step.
    x, _ = numbers(6, 20 + hpnb.rank())
    return found


def test_buffers_are_those_of_the_first_rank(pools: dict[int, hpnb.Ranks]) -> None:
    """The last step's statistics are each rank's own; what it started from was sent, or not."""
    sent, kept = (on(pools, 2).run(buffers, send) for send in (True, False))
    assert torch.equal(sent[0], kept[0])  # the first rank's are nobody else's business
    assert not torch.equal(sent[1], kept[1])


WIDTH = 6


def residual_layer(i: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=D), nn.Tanh(), nn.Linear(WIDTH, WIDTH, dtype=D))


def squares(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return outputs.square().mean()


def optimize_layers(model: Any) -> torch.optim.Optimizer:
    groups = [[p for n, p in model.named_parameters() if n.endswith(kind)] for kind in ("weight", "bias")]
    return torch.optim.SGD([{"params": groups[0]}, {"params": groups[1], "lr": 0.2}], lr=0.1, momentum=0.9)


def train_builder(knobs: dict[str, Any], folder: str) -> tuple[Any, list[str], list[float]]:
    """Three steps with a scheduler that was made before boost, and a checkpoint between them."""
    plugin = HybridParallelPlugin(**{"precision": "fp64", "num_microbatches": 2, "max_norm": 0.5, **knobs})
    booster = hpnb.Booster(plugin=plugin)
    for resumed in (False, True):
        builder = Builder(residual_layer, 4, seed=3)
        assert all(p.is_meta for p in builder.parameters())
        optimizer: Any = optimize_layers(builder)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        model, optimizer, _, _, scheduler = booster.boost(builder, optimizer, lr_scheduler=scheduler)
        if resumed:
            booster.load(folder, model, optimizer, scheduler)
        for step in (1, 2) if resumed else (0,):
            x = mine({"labels": numbers(8, step)[0]}, plugin.mesh.dp)["labels"].to(D)
            optimizer.zero_grad()
            booster.execute_pipeline(iter([(x, x)]), model, squares, optimizer)
            optimizer.step()
            scheduler.step()
        booster.save(folder, model, optimizer, scheduler)
        dist.barrier()
    rates = [group["lr"] for group in optimizer.param_groups]
    return weights(model), [name for name, _ in model.named_parameters()], rates


@pytest.mark.parametrize(
    "knobs",
    [
        {"pp_size": 2}, {"pp_size": 2, "pp_style": "zb-v"}, {"zero_stage": 2},
        {"pp_size": 2, "activation_checkpointing": "full", "zero_stage": 1}, {"zero_stage": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_model_that_no_rank_can_hold_trains(
    pools: dict[int, hpnb.Ranks], knobs: dict[str, Any], tmp_path: Path
) -> None:
    made = [torch.manual_seed(3 + i) and residual_layer(i) for i in range(4)]
    model = nn.ModuleDict({"layers": nn.Sequential(*made)})
    optimizer = optimize_layers(model)
    for step in range(3):
        optimizer.zero_grad()
        squares(model["layers"](numbers(8, step)[0].to(D)), None).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
    found = on(pools, 2).run(train_builder, knobs, str(tmp_path / "saved"))
    for trained, names, rates in found:
        assert distance(trained, dict(model.state_dict())) < 1e-12
        assert rates == pytest.approx([group["lr"] for group in optimizer.param_groups])
        assert len(names) == (8 if "pp_size" in knobs else 16)


def refuse_builders() -> list[str]:
    refused = []
    foreign = nn.Linear(6, 6)
    for knobs, parameters in (
        ({"tp_size": 2}, None), ({"pp_size": 2}, list(foreign.parameters())),
        ({"pp_size": 2, "activation_checkpointing": "attention"}, None),
    ):  # fmt: skip
        builder = Builder(residual_layer, 4)
        optimizer = torch.optim.SGD(parameters or builder.parameters(), lr=0.1)
        with pytest.raises(ValueError) as error:
            hpnb.Booster(HybridParallelPlugin(precision="fp64", **knobs)).boost(builder, optimizer)
        refused.append(str(error.value))
    return refused


def test_what_a_builder_cannot_do_is_refused(pools: dict[int, hpnb.Ranks]) -> None:
    tensor_parallel, foreign, attention = on(pools, 2).run(refuse_builders)[0]
    assert "tp_size=2 cannot shard the layers of a Builder" in tensor_parallel
    assert "2 of the 2 parameters" in foreign
    assert "builder.parameters()" in foreign
    assert "use 'full'" in attention


def tiny_bert_or_t5(kind: str) -> nn.Module:
    torch.manual_seed(6)
    if kind == "bert":
        config = BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        return BertForSequenceClassification(config).double()
    size = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **size)).double()


@pytest.mark.parametrize(("kind", "attentions"), [("bert", 2), ("t5", 6)])
def test_recomputed_attention_of_bert_and_t5_is_exact(
    kind: str, attentions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, a position bias, an encoder and a decoder, and dropout."""
    calls: list[int] = []
    name, attention = "scaled_dot_product_attention", F.scaled_dot_product_attention
    monkeypatch.setattr(F, name, lambda *a, **k: calls.append(1) or attention(*a, **k))
    ids, mask = torch.randint(2, 30, (3, 6)), torch.ones(3, 6, dtype=torch.long)
    mask[0, 4:] = 0
    labels = torch.tensor([0, 1, 0]) if kind == "bert" else ids
    gradients, counts = [], []
    for recomputed in (False, True):
        model = tiny_bert_or_t5(kind).train()
        if recomputed:
            recompute.enable_recomputation(model, "attention")
        torch.manual_seed(7)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        counts.append(len(calls))
        loss.backward()
        counts.append(len(calls))
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert counts == [attentions, attentions, 2 * attentions, 3 * attentions]
    assert distance(gradients[1], gradients[0]) < 1e-12


def boost_eager(kind: str, **options: Any) -> str:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}
    config: Any = {"gemma2": Gemma2Config, "llama": LlamaConfig}[kind](**sizes)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    try:
        hpnb.Booster(HybridParallelPlugin(precision="fp32", **options)).boost(model)
    except ValueError as error:
        return str(error)
    return str(model.config._attn_implementation)


def test_a_model_without_fused_attention_is_refused_or_keeps_its_own(pools: dict[int, hpnb.Ranks]) -> None:
    flash, everything = {"enable_flash_attention": True}, {"enable_all_optimization": True}
    (refused,) = on(pools, 1).run(boost_eager, "gemma2", **flash)
    assert "a Gemma2ForCausalLM cannot use" in refused
    assert "leave it out for this model" in refused
    assert on(pools, 1).run(boost_eager, "gemma2", **everything) == ["eager"]
    for options in (flash, everything):
        assert on(pools, 1).run(boost_eager, "llama", **options) == ["sdpa"]


def test_an_attention_that_cannot_be_recomputed_is_refused() -> None:
    config = BloomConfig(vocab_size=30, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"exchange the attention of a BloomForCausalLM.*use 'full'"):
        recompute.enable_recomputation(BloomForCausalLM(config), "attention")


def test_blocks_that_transformers_does_not_recompute_are_refused() -> None:
    model = build_tiny(planned_architecture("DiffusionGemmaTextConfig"), "Model")
    with pytest.raises(ValueError, match="does not allow; use 'attention'"):
        recompute.enable_recomputation(model, "full")


# --- the optimizer -----------------------------------------------------------------------------------------


def rates(zero: int, pp: int) -> dict[str, Any]:
    """A scheduler of before, one of after, and who changes what."""
    model: Any = build("vit")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.4)
    group, kind = optimizer.param_groups[0], type(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        plugin = HybridParallelPlugin(precision="fp64", zero_stage=zero, pp_size=pp, num_microbatches=2)
        booster = hpnb.Booster(plugin=plugin)
        model, same, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
        later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        moved = []
        for step in range(3):
            given = mine(batch("vit", step, 8), plugin.mesh.dp)
            booster.execute_pipeline(iter([given]), model, None, optimizer)
            if step == 2:
                group["lr"] = 0.0  # by a reference from before
                before = {n: p.detach().clone() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            if step < 2:
                scheduler.step()
                later.step()
        moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    return {
        "same": same is optimizer, "kind": type(optimizer) is kind,
        "group": optimizer.param_groups[0] is group,
        "rate": optimizer.param_groups[0]["lr"],
        "steps": [g["lr"] for g in boosted_optimizer.boosted_optimizer(optimizer).inner.param_groups],
        "moved": moved,
    }  # fmt: skip


@pytest.mark.parametrize(("zero", "pp"), [(0, 1), (1, 1), (2, 2), (3, 1)])
def test_schedulers_stay_attached(pools: dict[int, hpnb.Ranks], zero: int, pp: int) -> None:
    for found in on(pools, 2 * pp).run(rates, zero, pp):
        assert found["same"]
        assert found["kind"]
        assert found["group"]
        assert found["rate"] == 0.0
        assert found["steps"] == [0.0]
        assert found["moved"] == []  # a rate of 0 stops what steps


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "pipeline": {"pp_size": 2, "num_microbatches": 2},
    "tensor": {"tp_size": 2},
    "sequence": {"tp_size": 2, "enable_sequence_parallelism": True},
}


def overflowed(layout: str) -> dict[str, Any]:
    """A gradient that is inf on the last rank alone."""
    plugin = HybridParallelPlugin(
        precision="fp16", hysteresis=1, initial_scale=64.0, max_norm=1.0, **LAYOUTS[layout]
    )
    booster = hpnb.Booster(plugin=plugin)
    model: Any = build("vit").float()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    told: dict[str, Any] = {"stepped": [], "moved": [], "scale": []}
    for bad in (True, False):
        given = mine(batch("vit", 0, 4), plugin.mesh.dp)
        optimizer.zero_grad()
        booster.execute_pipeline(iter([given]), model, None, optimizer)
        if bad and hpnb.rank() == hpnb.world_size() - 1:
            held = [
                p for g in optimizer.param_groups for p in g["params"] if p.grad is not None and p.numel()
            ]
            held[0].grad.view(-1)[0] = math.inf
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.step()
        told["stepped"].append(optimizer.last_step.stepped)
        told["moved"].append(any(not torch.equal(p, before[n]) for n, p in model.named_parameters()))
        told["scale"].append(optimizer.last_step.scale)
    told["now"] = boosted_optimizer.boosted_optimizer(optimizer).scaler.scale
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_is_skipped_on_all(pools: dict[int, hpnb.Ranks], layout: str) -> None:
    for told in on(pools, 2).run(overflowed, layout):
        assert told["stepped"] == told["moved"] == [False, True]
        assert told["scale"] == [64.0, 32.0]
        assert told["now"] == 32.0


def its_state(knobs: dict[str, Any]) -> dict[str, Any]:
    """The state after two steps, and the weights after two more that begin from it on a new model."""
    found: dict[str, Any] = {}
    for part in ("first", "second"):
        plugin = HybridParallelPlugin(**{"precision": "fp64", **knobs})
        booster = hpnb.Booster(plugin=plugin)
        model: Any = build("gpt2")
        if part == "second":
            model.load_state_dict(found["weights"])
        groups: Any = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer: Any = torch.optim.AdamW(groups, lr=0.02)
        model, optimizer, *_ = booster.boost(model, optimizer)
        if part == "second":
            optimizer.load_state_dict(found["state"])
        for step in range(2):
            given = mine(batch("gpt2", step + 2 * (part == "second"), 8), plugin.mesh.dp)
            optimizer.zero_grad()
            booster.execute_pipeline(iter([given]), model, None, optimizer)
            optimizer.step()
        if part == "first":
            found["state"] = optimizer.state_dict()
            found["weights"] = weights(model)
    return {**found, "end": weights(model)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "knobs"),
    [
        (2, {"zero_stage": 0}), (2, {"zero_stage": 2}), (2, {"zero_stage": 3}),
        (2, {"pp_size": 2, "num_microbatches": 2}), (2, {"tp_size": 2}),
        (4, {"pp_size": 2, "zero_stage": 1, "num_microbatches": 2}), (4, {"tp_size": 2, "zero_stage": 3}),
        (4, {"tp_size": 4, "tp_mode": "2d"}),
    ],
)  # fmt: skip
def test_the_state_is_that_of_one_process(
    pools: dict[int, hpnb.Ranks], ranks: int, knobs: dict[str, Any]
) -> None:
    alone = on(pools, 1).run(its_state, {})[0]
    for found in on(pools, ranks).run(its_state, knobs):
        mine, theirs = found["state"], alone["state"]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert mine["state"][number].keys() == state.keys()
            for key, value in state.items():
                assert mine["state"][number][key].shape == value.shape
                assert torch.allclose(mine["state"][number][key], value, rtol=1e-5, atol=1e-9), (number, key)
        for ours, other in zip(mine["param_groups"], theirs["param_groups"], strict=True):
            assert ours["params"] == other["params"]
            assert ours["weight_decay"] == other["weight_decay"]
        assert distance(found["end"], alone["end"]) < 1e-6
    # What a boosted optimizer gives, a plain one of PyTorch takes.
    model = build("gpt2")
    plain = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]},
         {"params": [p for p in model.parameters() if p.dim() <= 1]}])  # fmt: skip
    plain.load_state_dict(found["state"])


def begun_before() -> float:
    """An optimizer that has stepped before boost goes on from there."""
    ends = []
    for boosts in (True, False):
        model: Any = build("vit")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        for step in range(3):
            given = batch("vit", step, 8)
            if step == 1 and boosts:
                plugin = HybridParallelPlugin(precision="fp64", zero_stage=2, tp_size=2)
                booster = hpnb.Booster(plugin=plugin)
                model, optimizer, *_ = booster.boost(model, optimizer)
            optimizer.zero_grad()
            if step and boosts:
                booster.backward(model(**mine(given, plugin.mesh.dp)).loss, optimizer)
            else:
                mean(model(pixel_values=given["pixel_values"]), given).backward()
            optimizer.step()
        ends.append(weights(model) if boosts else dict(model.state_dict()))
    return distance(*ends)


def test_an_optimizer_that_has_stepped_goes_on(pools: dict[int, hpnb.Ranks]) -> None:
    assert max(on(pools, 4).run(begun_before)) < 1e-6


# --- 16 bits -----------------------------------------------------------------------------------------------


def in_16_bits(case: Case, precision: str) -> tuple[list[float | None], dict[Any, torch.Tensor]]:
    """Losses, and float32 masters, or the weights where there are none."""
    torch.set_num_threads(1)
    plugin = case.plugin(precision=precision)
    booster = hpnb.Booster(plugin=plugin)
    model: Any = build(case.kind).float()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses: list[float | None] = []
    for _ in range(4):
        given = mine(batch(case.kind, 0, case.rows), plugin.mesh.dp)
        optimizer.zero_grad()
        found = booster.execute_pipeline(iter([given]), model, None, optimizer)["loss"]
        optimizer.step()
        assert optimizer.last_step.stepped
        losses.append(None if found is None else float(found))
    assert model.plugin.policy.weights in {p.dtype for p in model.parameters()}
    masters: dict[Any, torch.Tensor] = optimizer.state_dict().get("masters", {})
    return losses, masters or dict(weights(model))


def apart(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    square = sum(float((a[n].double() - b[n].double()).norm()) ** 2 for n in b)
    return math.sqrt(square / sum(float(b[n].double().norm()) ** 2 for n in b))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp-bf16"])
@pytest.mark.parametrize("kind", ["vit", "gpt2"])
def test_16_bits_stay_within_three_times_the_serial_spread(
    pools: dict[int, hpnb.Ranks], kind: str, precision: str
) -> None:
    plain = Case(kind)
    serial = [
        on(pools, 1).run(in_16_bits, replace(plain, microbatches=m), precision)[0][1] for m in (1, 4, 8)
    ]
    spread = max(apart(a, b) for a, b in itertools.combinations(serial, 2))
    assert spread > 1e-5  # 16 bits indeed
    for case in (
        replace(plain, dp=2, zero=0),
        replace(plain, dp=2, zero=2, microbatches=2),
        replace(plain, dp=2, zero=3),
        replace(plain, tp=2, sequence=True),
        replace(plain, dp=2, pp=2, zero=1, style="zb-h1", microbatches=2),
    ):
        found = on(pools, case.ranks).run(in_16_bits, case, precision)
        for losses, held in found:
            assert apart(held, serial[0]) < 3 * spread, name(case)
            known = [loss for loss in losses if loss is not None]
            assert all(b < a for a, b in itertools.pairwise(known)), (name(case), known)
        assert any(losses[0] is not None for losses, _ in found)


# --- dropout -----------------------------------------------------------------------------------------------


def drawn(seed: int | None, knobs: dict[str, Any]) -> float:
    torch.manual_seed(40 if seed is None else 41 + hpnb.rank())
    boosted("gpt2", dropout=0.1, seed=seed, **knobs)
    return float(torch.rand(()))


@pytest.mark.parametrize("seed", [None, 7])
def test_dropout_differs_over_dp_and_pp_and_agrees_over_tp(
    pools: dict[int, hpnb.Ranks], seed: int | None
) -> None:
    over_dp = on(pools, 4).run(drawn, seed, {"tp_size": 2})
    over_pp = on(pools, 4).run(drawn, seed, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2})
    for a, b, c, d in (over_dp, over_pp):
        assert a == b != c == d
    everyone = on(pools, 4).run(drawn, seed, {"pp_size": 2, "num_microbatches": 2})
    assert len(set(everyone)) == 4
    assert everyone == on(pools, 4).run(drawn, seed, {"pp_size": 2, "num_microbatches": 2})


def boost_verbosely(kind: str, knobs: dict[str, Any]) -> None:
    model = residual_layers() if kind == "builder" else build(kind)
    hpnb.Booster(plugin=HybridParallelPlugin(precision="fp64", **knobs)).boost(model, verbose=True)


def residual_layers() -> Any:
    return Builder(residual_layer, 4)


@pytest.mark.parametrize(
    ("kind", "knobs", "last"),
    [
        ("vit", {"pp_size": 2, "tp_size": 2}, "stage 1 of 2 on pipeline rank 1: .* to classifier.bias, "),
        ("gpt2", {"pp_size": 2, "pp_style": "zb-v"}, "stage 3 of 4 on pipeline rank 0: .* to .*wte.weight, "),
        ("builder", {"pp_size": 2, "zero_stage": 3}, "stage 1 .* 1: layers.2.0.weight to layers.3.2.bias, "),
        ("vit", {"zero_stage": 3}, "stage 0 of 1 on pipeline rank 0: .* to classifier.bias, "),
    ],
    ids=str,
)
def test_boost_says_which_stage_has_what(
    pools: dict[int, hpnb.Ranks], kind: str, knobs: dict[str, Any], last: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    on(pools, 4).run(boost_verbosely, kind, knobs)
    lines = [line[line.index("stage ") :] for line in capfd.readouterr().out.splitlines() if "stage " in line]
    stages = int(lines[0].split()[3])
    assert len(lines) == stages  # once, and not once a rank
    assert re.match(last, lines[-1]), lines
    counted = sum(int(line.split()[-2].replace(",", "")) for line in lines)
    whole = nn.ModuleList(residual_layer(i) for i in range(4)) if kind == "builder" else build(kind)
    tied = 0 if kind != "gpt2" else whole.lm_head.weight.numel()  # type: ignore[operator, union-attr]
    assert counted == sum(p.numel() for p in whole.parameters()) + tied


# --- files -------------------------------------------------------------------------------------------------


def saved(folder: str, kind: str, knobs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train, save, load into a model on the meta device of another layout, and say what it has."""
    plugin, booster, model, optimizer = boosted(kind, **knobs)
    given = mine(batch(kind, 0, 8), plugin.mesh.dp)
    booster.execute_pipeline(iter([given]), model, None, optimizer)
    optimizer.step()
    booster.save_model(model, Path(folder) / "model")
    booster.save_optimizer(optimizer, Path(folder) / "optimizer.pt")
    full = weights(model)
    with torch.device("meta"):
        empty = type(build(kind))(model.full_config).double()
    empty.tie_weights()  # type: ignore[operator]
    other = hpnb.Booster(HybridParallelPlugin(precision="fp64", zero_stage=3, tp_size=2))
    filled, refilled, *_ = other.boost(empty, torch.optim.SGD(empty.parameters(), lr=0.1, momentum=0.9))
    assert all(not p.any() for p in filled.parameters())
    other.load_model(filled, Path(folder) / "model")
    other.load_optimizer(refilled, Path(folder) / "optimizer.pt")
    again = weights(filled)
    assert again.keys() >= full.keys() - {"lm_head.weight"}
    assert all(torch.equal(again[n].float(), full[n].float()) for n in again if n in full)
    momentum = [state["momentum_buffer"] for state in refilled.state_dict()["state"].values()]
    assert any(t.any() for t in momentum)
    return full


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["vit", "gpt2"])
def test_files(pools: dict[int, hpnb.Ranks], kind: str, tmp_path: Path) -> None:
    knobs = {"pp_size": 2, "zero_stage": 1, "num_microbatches": 2}
    full = on(pools, 4).run(saved, str(tmp_path), kind, knobs)[0]
    loaded, told = type(build(kind)).from_pretrained(tmp_path / "model", output_loading_info=True)  # type: ignore[attr-defined]
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for key, value in loaded.state_dict().items():
        assert torch.equal(value.float(), full[key].float()), key


def resident() -> int:
    """Bytes of memory that this process uses, also of files that it has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def load_lazily(folder: str, knobs: dict[str, Any]) -> tuple[int, int, dict[str, float]]:
    """(bytes of this rank's parameters, the most that its memory grew, the sum of each parameter)."""
    before, grown, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            grown[0] = max(grown[0], resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    with torch.device("meta"):
        empty = GPT2LMHeadModel(GPT2Config.from_pretrained(folder))
    empty.tie_weights()
    booster = hpnb.Booster(plugin=HybridParallelPlugin(precision="fp32", **knobs))
    model, *_ = booster.boost(empty)
    booster.load_model(model, folder)
    done.set()
    thread.join()
    sizes = sum(p.numel() * p.element_size() for p in model.parameters())
    return sizes, grown[0], {name: p.double().sum().item() for name, p in model.named_parameters()}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("knobs", [{"pp_size": 4}, {"pp_size": 2, "tp_size": 2}], ids=str)
def test_a_gpt2_is_never_whole_on_a_rank(
    pools: dict[int, hpnb.Ranks], knobs: dict[str, Any], tmp_path: Path
) -> None:
    """Built on the meta device, loaded in shards: a rank has its part in memory, and twice while it reads."""
    config = GPT2Config(n_embd=512, n_layer=16, n_head=8, n_positions=64, vocab_size=512)
    config.bos_token_id = config.eos_token_id = 511
    whole = GPT2LMHeadModel(config)
    whole.save_pretrained(tmp_path, max_shard_size="20MB")
    size = sum(p.numel() * 4 for p in whole.parameters())  # 203 MB
    results = on(pools, 4).run(load_lazily, str(tmp_path), knobs)
    for sizes, grown, sums in results:
        assert sizes < 0.3 * size
        assert grown < 0.9 * size, (grown / size, sizes / size)
        if "tp_size" not in knobs:
            for name, total in sums.items():
                place = name.replace("lm_head", "transformer.wte")
                assert total == pytest.approx(whole.get_parameter(place).double().sum().item(), abs=1e-6)


# --- plugins -----------------------------------------------------------------------------------------------


def test_a_plugin_may_be_made_before_there_are_ranks() -> None:
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, microbatch_size=1, zero_stage=1, initial_scale=1)

    def inside() -> tuple[dict[str, int], int, float, list[int]]:
        sizes = [dist.get_world_size(g) for g in (plugin.dp_group, plugin.pp_group, plugin.tp_group)]
        return plugin.mesh.coordinates, plugin.dp_size, plugin.scaled_lr(0.5), sizes

    found = hpnb.launch(inside, ranks=4, device="cpu")
    assert [where for where, *_ in found] == [{"dp": dp, "pp": pp, "tp": 0} for dp in (0, 1) for pp in (0, 1)]
    assert all((size, lr, sizes) == (2, 1.0, [2, 2, 1]) for _, size, lr, sizes in found)
    assert repr(plugin) == "HybridParallelPlugin(pp_size=2, zero_stage=1, microbatch_size=1, initial_scale=1)"
    assert pickle.loads(pickle.dumps(plugin)).pp_size == 2


def test_ranks_that_do_not_fit() -> None:
    def ask() -> str:
        with pytest.raises(ValueError) as error:
            _ = HybridParallelPlugin(tp_size=2).mesh
        return str(error.value)

    assert (
        "needs a multiple of 2 ranks, and there are 3; use 2 or 4"
        in hpnb.launch(ask, ranks=3, device="cpu")[0]
    )


def mesh_on_one_rank(plugin: HybridParallelPlugin) -> list[str]:
    """Rank 0 alone looks at everything that a plugin shows; the others come later."""
    seen: list[str] = []
    for candidate in (plugin, HybridParallelPlugin(tp_size=2, zero_stage=1)):
        if hpnb.rank() == 0:
            seen += [repr(candidate), repr(candidate.mesh), str(candidate.layout)]
            seen.append(str(candidate.stage_manager.is_last_stage()))
            assert dist.get_world_size(candidate.tp_group) == candidate.tp_size
    dist.barrier()
    return seen


def test_one_rank_may_look_at_a_plugin() -> None:
    """No property is a collective: the groups are there since the plugin was made, or has arrived."""
    sent = HybridParallelPlugin(pp_size=2, num_microbatches=2)
    seen, nothing = hpnb.launch(mesh_on_one_rank, sent, ranks=2, device="cpu", timeout=30)
    assert seen[1] == "Mesh(dp=0 of 1, pp=0 of 2, tp=0 of 1)"
    assert seen[4:7] == [
        "HybridParallelPlugin(tp_size=2, zero_stage=1)",
        "Mesh(dp=0 of 1, pp=0 of 1, tp=0 of 2)",
        "tp 2, ZeRO 1",
    ]
    assert nothing == []


def test_without_ranks_a_plugin_says_how_to_get_groups() -> None:
    with pytest.raises(RuntimeError, match=r"plugin.connect\(\) on every rank"):
        _ = HybridParallelPlugin().mesh


def deals(shuffle: bool) -> tuple[list[list[int]], int, int]:
    plugin = HybridParallelPlugin(tp_size=2)
    loader = plugin.prepare_dataloader(
        [{"i": i} for i in range(10)],
        2,
        shuffle=shuffle,
        seed=3,
        collate_fn=lambda items: [x["i"] for x in items],
    )
    loader.set_epoch(1)
    return list(loader), len(loader), plugin.mesh.dp.rank


def test_batch_k_is_the_same_samples_in_every_layout(pools: dict[int, hpnb.Ranks]) -> None:
    """2 ranks of dp with 2 samples each, tensor-parallel pairs with the same ones."""
    for shuffle in (False, True):
        found = on(pools, 4).run(deals, shuffle)
        assert found[0][0] == found[1][0]
        assert found[2][0] == found[3][0]
        together = [a + b for a, b in zip(found[0][0], found[2][0], strict=True)]
        assert sorted(itertools.chain(*together)) == list(range(10))
        assert all(length == 3 for _, length, _ in found)
        assert (together[0] == [0, 1, 2, 3]) is not shuffle
        alone = hpnb.data.Loader(list(range(10)), 4, shuffle=shuffle, seed=3, collate_fn=list)
        alone.set_epoch(1)
        assert together == list(alone)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"pp_size": 2, "num_model_chunks": 2}, "1f1b has one chunk a rank: use chunks=1, not 2"),
        ({"num_model_chunks": 2}, "1f1b has one chunk a rank"),
        ({"pp_size": 2, "pp_style": "zb-v", "num_model_chunks": 3}, "two chunks a rank"),
        ({"pp_size": 4, "pp_style": "dualpipe-v", "num_microbatches": 4}, "use 8 or more, not 4"),
        ({"pp_style": "2f2b"}, "there is no schedule '2f2b'; choose one of gpipe"),
        ({"tp_size": 3, "tp_mode": "2d"}, "3 is not of that form; 1 would do, or 4"),
        ({"tp_size": 4, "tp_mode": "4d"}, "tp_mode='4d'; use one of 1d, 2d, 2.5d, 3d"),
        ({"tp_size": 8, "tp_mode": "1d", "tp_depth": 2}, "goes with tp_mode='2.5d'"),
        ({"tp_size": 4, "tp_mode": "2d", "enable_sequence_parallelism": True}, "or use tp_mode='1d'"),
        ({"tp_size": 4, "tp_mode": "2d", "loss_chunk": 64}, "leave loss_chunk out with tp_mode='2d'"),
        ({"cp_size": 2, "loss_chunk": 64}, "leave loss_chunk out with cp_size=2"),
        ({"cp_size": 2, "enable_jit_fused": True}, "leave enable_jit_fused out with cp_size=2"),
        ({"ep_size": 2, "enable_jit_fused": True}, "leave enable_jit_fused out with ep_size=2"),
        ({"pp_size": 2, "tp_size": 2, "cut": "time"}, "use cut='parameters' with tp_size=2"),
        ({"zero_replicas": 2}, "use zero_stage=3 with zero_replicas=2, not 0"),
        ({"zero_replicas": 0, "zero_stage": 3}, "zero_replicas=0 is not a count"),
        ({"cpu_offload": True}, "cpu_offload go with zero_stage=1, 2 or 3"),
        ({"communication_dtype": torch.bfloat16}, "communication_dtype go with zero_stage"),
        ({"zero_stage": 4}, "zero_stage=4 is no stage of ZeRO; use 0, 1, 2 or 3"),
        ({"precision": "fp8"}, "'fp8' is not one of fp32"),
        ({"tp_size": 0}, "tp_size=0 is not a count; use 1 or more"),
        ({"num_microbatches": 0}, "num_microbatches=0 is not a count"),
        ({"max_norm": -1.0}, "max_norm=-1.0 must be above 0"),
        ({"initial_scale": 0.5}, "initial_scale=0.5 must lie between min_scale=1"),
        ({"activation_checkpointing": "some"}, "use False, 'full' or 'attention'"),
        ({"zero_bucket_size_in_m": 0}, "zero_bucket_size_in_m=0 must be above 0"),
    ],
)  # fmt: skip
def test_what_cannot_compose_is_refused_at_once(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        HybridParallelPlugin(**knobs)
    assert words in str(error.value)


def test_every_row_of_the_table_refuses_something() -> None:
    """And nothing that composes: the matrix above has made its plugins of the same class."""
    marks: Any = test_what_cannot_compose_is_refused_at_once.pytestmark
    refused = {}
    for knobs, _ in marks[0].args[1]:
        with pytest.raises(ValueError) as error:
            HybridParallelPlugin(**knobs)
        refused[str(knobs)] = str(error.value)
    for row in REFUSED:
        assert any(said.startswith(row.what) for said in refused.values()), row.what


def test_plugins_with_fewer_knobs() -> None:
    plain, dealt, sharded = TorchDDPPlugin(), LowLevelZeroPlugin(2), GeminiPlugin(precision="bf16")
    assert [p.zero_stage for p in (plain, dealt, sharded)] == [0, 2, 3]
    assert [p.precision for p in (plain, dealt, sharded)] == ["fp32", "auto", "bf16"]
    assert all(isinstance(p, HybridParallelPlugin) for p in (plain, dealt, sharded))
    assert hpnb.Booster().plugin.precision == "fp32"
    with pytest.raises(ValueError, match="3 is GeminiPlugin"):
        LowLevelZeroPlugin(3)
    for kind in (TorchDDPPlugin, LowLevelZeroPlugin, GeminiPlugin):
        with pytest.raises(TypeError, match=f"{kind.__name__} takes no tp_size; it takes .*max_norm"):
            kind(tp_size=2)


def test_how_many_microbatches() -> None:
    assert HybridParallelPlugin(pp_size=2, num_microbatches=3, microbatch_size=1).microbatches(8) == 3
    sized = HybridParallelPlugin(pp_size=2, microbatch_size=3)
    assert [sized.microbatches(n) for n in (0, 1, 3, 4, 9)] == [1, 1, 1, 2, 3]
    folded = HybridParallelPlugin(pp_size=2, microbatch_size=3, pp_style="dualpipe-v")
    assert [folded.microbatches(n) for n in (0, 3, 15)] == [4, 4, 5]
    free = HybridParallelPlugin(pp_size=2)
    assert [free.microbatches(n) for n in (0, 5, 100)] == [1, 5, 8]
    assert HybridParallelPlugin().microbatches(100) == 1


def step_with_loss_of_torch(loss: Any) -> str:
    net, booster = nn.Sequential(nn.Linear(4, 4)), hpnb.Booster(HybridParallelPlugin(precision="fp32"))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    given = torch.ones(4, 4), torch.arange(4)
    right = booster.execute_pipeline(iter([given]), model, lambda y, one: loss(y, one[1]), optimizer)
    assert right["loss"].isfinite()
    return said(TypeError, lambda: booster.execute_pipeline(iter([given]), model, loss, optimizer))


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_a_loss_of_torch_takes_targets_and_no_batch(pools: dict[int, hpnb.Ranks], loss: Any) -> None:
    refused = on(pools, 2).run(step_with_loss_of_torch, loss)[0]
    assert "takes a tensor of targets, and a criterion gets the whole microbatch, a tuple of 2" in refused
    assert "loss(outputs, batch[1])" in refused


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def step_half_used(zero_stage: int) -> str:
    net, booster = HalfUsed(), hpnb.Booster(HybridParallelPlugin(precision="fp32", zero_stage=zero_stage))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return said(RuntimeError, lambda: booster.backward(model(torch.ones(2, 4)).sum(), optimizer))


def test_parameters_without_a_gradient_have_their_names(pools: dict[int, hpnb.Ranks]) -> None:
    for stage in (0, 1, 2, 3):
        assert (
            "no gradient in this backward: unused.weight, unused.bias"
            in on(pools, 2).run(step_half_used, stage)[0]
        )


def boost_twice(options: dict[str, Any]) -> str:
    net, booster = build("vit"), hpnb.Booster(HybridParallelPlugin(precision="fp64", **options))
    booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return said(ValueError, lambda: booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1)))


def test_a_model_is_boosted_once(pools: dict[int, hpnb.Ranks]) -> None:
    for options in ({}, {"pp_size": 2}, {"tp_size": 2}, {"zero_stage": 2}, {"zero_stage": 3}):
        refused = on(pools, 2).run(boost_twice, options)[0]
        assert "this ViTForImageClassification has been boosted before" in refused


def boost_unknown(options: dict[str, int], t5: bool) -> str:
    tiny = {"num_layers": 1, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 16}
    bert = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    net: Any = T5ForConditionalGeneration(T5Config(**tiny)) if t5 else BertModel(BertConfig(**bert))
    return said(TypeError, lambda: hpnb.Booster(HybridParallelPlugin(precision="fp32", **options)).boost(net))


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_a_model_that_is_not_known_says_what_to_register(
    pools: dict[int, hpnb.Ranks], options: dict[str, int]
) -> None:
    assert (
        "hpnb.models.register(BertModel, parts, roles) adds it"
        in on(pools, 2).run(boost_unknown, options, False)[0]
    )
    t5 = on(pools, 2).run(boost_unknown, options, True)[0]
    assert "is an encoder and a decoder" in t5
    assert "data parallelism and ZeRO" in t5


@pytest.mark.parametrize("t5", [False, True])
def test_context_parallelism_of_an_encoder_names_no_registration(
    pools: dict[int, hpnb.Ranks], t5: bool
) -> None:
    sentence = on(pools, 2).run(boost_unknown, {"cp_size": 2}, t5)[0]
    assert "use cp_size=1" in sentence
    assert "register(" not in sentence


def test_a_schedule_in_capitals_is_the_same() -> None:
    plugin = HybridParallelPlugin(pp_size=2, pp_style="1F1B", num_microbatches=4)
    assert plugin.pp_style == "1f1b"
    assert schedules.make("ZB-H1", 2, 4) == schedules.make("zb-h1", 2, 4)


# --- clipping as on one GPU ------------------------------------------------------------------------------


def clip_with_torch(options: dict[str, Any], how: str) -> tuple[str, list[str], Any, float]:
    """A loop ported from one GPU, with PyTorch's own clipping between the backward and the step."""
    clip = nn.utils.clip_grad_value_ if how == "value" else nn.utils.clip_grad_norm_
    plugin, booster, model, optimizer = boosted("gpt2", **options)
    refused, warned, before = "", [], 0.0
    for step in range(2):
        optimizer.zero_grad()
        given = mine(batch("gpt2", step, 8), plugin.mesh.dp)
        booster.execute_pipeline(iter([given]), model, mean, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if how == "list":
                    clip([*model.parameters()], 0.1)
                elif how == "groups":
                    clip(optimizer.param_groups[0]["params"], 0.1)
                elif how == "filter":
                    clip(filter(lambda p: p.requires_grad, model.parameters()), 0.1)
                elif how != "nothing":
                    before = float(clip(model.parameters(), 0.1) or 0.0)
            except RuntimeError as error:
                refused = str(error)
            optimizer.step()
        warned += [str(w.message) for w in caught if "clip" in str(w.message)]
        assert len([*model.parameters()]) == len([*model.named_parameters()])
    return refused, warned, weights(model), before


IN_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 1}, "zero_stage=1 keeps gradients with the optimizer"),
    ({"zero_stage": 2}, "zero_stage=2 keeps gradients with the optimizer"),
    ({"zero_stage": 3}, "with zero_stage=3 a rank has only its part"),
    ({"tp_size": 2}, "with tp_size=2 a rank has only its part"),
    ({"pp_size": 2}, "with pp_size=2 a rank has only its part"),
    ({"precision": "amp-fp16"}, "precision='amp-fp16' has gradients that carry the scale"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("options", "why"), IN_PARTS, ids=str)
def test_clipping_by_torch_is_refused_where_it_would_clip_wrongly(
    pools: dict[int, hpnb.Ranks], options: dict[str, Any], why: str
) -> None:
    for how in ("norm", "filter"):
        for refused, warned, *_ in on(pools, 2).run(clip_with_torch, options, how):
            assert f"torch.nn.utils.clip_grad_norm_ clips wrongly here, because {why}" in refused
            assert "HybridParallelPlugin(.., max_norm=1.0)" in refused
            assert not warned
    refused = on(pools, 2).run(clip_with_torch, options, "value")[0][0]
    elementwise = "a rank has only its part" in why  # where each element is clipped alone, a part suffices
    assert refused == "" if elementwise else "clip_grad_value_ clips wrongly here" in refused
    refused = on(pools, 2).run(clip_with_torch, options | {"max_norm": 0.5}, "norm")[0][0]
    assert "the plugin's max_norm=0.5 clips in optimizer.step()" in refused


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("options", "why"), IN_PARTS, ids=str)
def test_clipping_of_a_list_of_parameters_is_noticed_in_the_step(
    pools: dict[int, hpnb.Ranks], options: dict[str, Any], why: str
) -> None:
    """Once, where there are gradients to be changed; a step without clipping is silent."""
    for how in ("nothing", "list", "groups"):
        for refused, warned, *_ in on(pools, 2).run(clip_with_torch, options, how):
            assert not refused
            seen = how == "groups" or (how == "list" and options.get("zero_stage") not in (1, 2))
            assert len(warned) == seen, (how, warned)
            for text in warned:
                assert "gradients were changed in place between the backward and optimizer.step()" in text
                assert why in text


@pytest.mark.parametrize("how", ["norm", "list"])
def test_clipping_by_torch_is_exact_where_gradients_are_whole(pools: dict[int, hpnb.Ranks], how: str) -> None:
    alone = build("gpt2")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        given = batch("gpt2", step, 8)
        mean(alone(**{n: t for n, t in given.items() if n != "labels"}), given).backward()
        norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
        optimizer.step()
    for refused, warned, trained, before in on(pools, 2).run(clip_with_torch, {}, how):
        assert not refused
        assert not warned
        assert distance(trained, dict(alone.state_dict())) < 1e-12
        assert how == "list" or before == pytest.approx(norm, rel=1e-12)


# --- what is refused by boost ------------------------------------------------------------------------------


class Whole2D(torch.optim.SGD):
    """One that looks at whole matrices."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def said(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def refusals() -> dict[str, str]:
    booster = hpnb.Booster(HybridParallelPlugin(precision="fp64", zero_stage=3))
    piped = hpnb.Booster(HybridParallelPlugin(precision="fp64", pp_size=2, num_microbatches=2))
    measured = hpnb.Booster(HybridParallelPlugin(pp_size=2, cut="flops"))
    model, other = build("vit"), build("vit")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stages, _stepped, *_ = piped.boost(build("vit"))
    given = {name: t[:4] for name, t in batch("vit", 0, 4).items()}
    found = {
        "model": said(TypeError, lambda: booster.boost(3)),  # type: ignore[arg-type]
        "optimizer": said(TypeError, lambda: booster.boost(other, 3)),  # type: ignore[arg-type]
        "foreign": said(ValueError, lambda: booster.boost(other, optimizer)),
        "whole": said(ValueError, lambda: booster.boost(other, Whole2D(other.parameters(), lr=0.1))),
        "unknown": said(TypeError, lambda: piped.boost(Classifier())),
        "plain": said(ValueError, lambda: booster.execute_pipeline(iter([given]), other)),
        "plain optimizer": said(ValueError, lambda: booster.backward(torch.zeros(()), optimizer)),
        "stages": said(RuntimeError, lambda: stages(**given)),
        "twice": said(ValueError, lambda: piped.boost(stages)),
        "cut": said(ValueError, lambda: measured.boost(other)),
    }  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    mine = torch.optim.SGD(other.parameters(), lr=0.1)
    found["scheduler"] = said(ValueError, lambda: booster.boost(other, mine, lr_scheduler=scheduler))
    _again, taken, *_ = booster.boost(model, optimizer)
    found["boosted"] = said(ValueError, lambda: booster.boost(build("vit"), taken))
    found["group"] = said(ValueError, lambda: taken.add_param_group({"params": []}))
    found["closure"] = said(ValueError, lambda: taken.step(lambda: 0.0))
    return found


def test_what_boost_refuses(pools: dict[int, hpnb.Ranks]) -> None:
    found = on(pools, 2).run(refusals)[0]
    for key, words in {
        "model": "takes a model, not a int", "optimizer": "takes an optimizer of torch.optim, not a int",
        "foreign": "of this SGD are not the model's", "whole": "a Whole2D may look at full tensors",
        "unknown": "cannot cut a Classifier", "plain": "is not boosted", "plain optimizer": "is not boosted",
        "stages": "call booster.execute_pipeline", "twice": "boost the model inside",
        "cut": "pass dataloader to boost", "scheduler": "of another optimizer",
        "boosted": "has been boosted", "group": "add the group before boost",
        "closure": "step() without a closure",
    }.items():  # fmt: skip
        assert words in found[key], (key, found[key])


def methods_of_a_full_model() -> dict[str, str]:
    """What save_pretrained, generate and a loader without batches say in layouts that shard weights."""
    found = {}
    for key, options in {"tp": {"tp_size": 2}, "pp": {"pp_size": 2}, "zero": {"zero_stage": 3}}.items():
        booster = hpnb.Booster(HybridParallelPlugin(precision="fp64", **options))
        net: Any = build("gpt2")
        model, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        found[f"save {key}"] = said(AttributeError, lambda model=model: model.save_pretrained("unused"))
        if key == "pp":
            found["generate"] = said(AttributeError, lambda model=model: model.generate())
        given = batch("gpt2", 0, 2)
        for kind, wrong in {"batch": given, "loader": DataLoader([given])}.items():  # type: ignore[arg-type]
            run = functools.partial(booster.execute_pipeline, wrong, model)  # type: ignore[arg-type]
            found[kind] = said(TypeError, run)
        found["empty"] = said(StopIteration, lambda b=booster, m=model: b.execute_pipeline(iter([]), m))
    whole, *_ = hpnb.Booster(HybridParallelPlugin(zero_stage=1)).boost(build("gpt2"))
    assert callable(whole.save_pretrained)
    assert callable(whole.generate)
    return found


def test_methods_that_need_the_full_model_name_what_works(pools: dict[int, hpnb.Ranks]) -> None:
    found = on(pools, 2).run(methods_of_a_full_model)[1]
    for key, words in {
        "save tp": ["tp_size=2", "booster.save_model"], "save pp": ["pp_size=2", "booster.save_model"],
        "save zero": ["(zero_stage=3)", "GPT2LMHeadModel"], "generate": ["pp_size=2", "(1,)"],
        "batch": ["dict", "iter([batch])"], "loader": ["DataLoader", "iter(loader)"],
        "empty": ["set_epoch(epoch + 1)", "iter(loader)"],
    }.items():  # fmt: skip
        assert all(word in found[key] for word in words), (key, found[key])


@pytest.mark.parametrize("cut", ["flops", "time"])
def test_one_stage_needs_no_batch_to_measure_layers(pools: dict[int, hpnb.Ranks], cut: str) -> None:
    def boost() -> int:
        booster = hpnb.Booster(HybridParallelPlugin(precision="fp64", cut=cut))
        booster.boost(build("vit"))
        model, *_ = booster.boost(Builder(residual_layer, 4))
        return len(list(model.parameters()))

    assert on(pools, 1).run(boost) == [16]


def plain_loader() -> tuple[list[str], float]:
    plugin = HybridParallelPlugin(precision="fp64", pp_size=2, num_microbatches=2, cut="flops")
    dataset = [{name: t[i] for name, t in batch("vit", 0, 8).items()} for i in range(8)]
    loader = plugin.prepare_dataloader(dataset, 4)
    model: Any = build("vit")
    model, optimizer, _, same, _ = hpnb.Booster(plugin).boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataloader=loader
    )
    assert same is loader
    value = hpnb.Booster(plugin).execute_pipeline(iter(loader), model, None, optimizer)["loss"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torchs = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
        hpnb.Booster(HybridParallelPlugin()).boost(build("vit"), dataloader=torchs)
    return [str(w.message) for w in told], 0.0 if value is None else float(value)


def test_a_loader_of_torch_is_not_dealt_out(pools: dict[int, hpnb.Ranks]) -> None:
    found = on(pools, 2).run(plain_loader)
    for told, _ in found:
        assert any("gives each of the 2 data-parallel ranks all samples" in words for words in told)
    given = batch("vit", 0, 8)
    expected = mean(build("vit")(pixel_values=given["pixel_values"][:4]), {"labels": given["labels"][:4]})
    assert found[1][1] == pytest.approx(expected.item(), rel=1e-13)


# --- what was added to the pipeline ------------------------------------------------------------------------


def test_a_batch_is_dealt_out_whatever_its_size() -> None:
    given = {"x": torch.arange(10), "name": "all"}

    def sizes(samples: int, microbatches: int, **how: Any) -> list[int]:
        return [len(part["x"]) for part in split_batch({"x": torch.arange(samples)}, microbatches, **how)]

    assert sizes(10, 4) == [3, 3, 2, 2]
    assert sizes(10, 4, multiple=2, allow_empty=True) == [4, 2, 2, 2]
    assert sizes(5, 4, multiple=2, allow_empty=True) == [2, 3, 0, 0]
    assert sizes(0, 2, allow_empty=True) == [0, 0]
    assert torch.equal(torch.cat([part["x"] for part in split_batch(given, 4, multiple=2)]), torch.arange(10))


def other_schedules() -> str:
    mesh = hpnb.Mesh(hpnb.Layout(pp=2))
    pipe = hpnb.Pipeline(
        layers().double(), mesh.pp, schedules.make("1f1b", 2, 4), lambda out, given: out.sum()
    )
    pipe.schedule = schedules.make("1f1b", 2, 2)
    assert pipe.schedule.microbatches == 2
    with pytest.raises(ValueError) as error:
        pipe.schedule = schedules.make("interleaved", 4, 2, 2)
    assert pipe.schedule.microbatches == 2
    return str(error.value)


def test_a_pipeline_takes_another_schedule_of_the_same_stages(pools: dict[int, hpnb.Ranks]) -> None:
    assert "make another Pipeline for it" in on(pools, 2).run(other_schedules)[0]


def test_a_batch_whose_names_are_no_arguments_is_refused() -> None:
    stage = WholeModel(Classifier(), lambda names: [name for name in names if name == "x"])
    wrong = {"wanted": torch.ones(2, 4), "features": torch.zeros(2, 4)}
    arguments = ", ".join(inspect.signature(Classifier().forward).parameters)
    with pytest.raises(TypeError, match=rf"wanted, features.* takes {arguments}"):
        stage(0, None, wrong)


def test_a_whole_model_as_a_stage_keeps_its_names() -> None:
    model = Classifier()
    stage = WholeModel(model)
    assert list(stage.state_dict()) == list(model.state_dict())
    assert stage.eval() is stage
    assert not model.training
    assert all(a is b for a, b in zip(stage.parameters(), model.parameters(), strict=True))
    outer = torch.nn.Module()
    outer.model = model  # the name that most language models have for their body
    stage = WholeModel(outer)
    assert stage.get_submodule("model") is model
    full = full_state_dict(stage, None)
    assert list(full) == list(outer.state_dict())
    assert all(torch.equal(full[name], value) for name, value in outer.state_dict().items())


class SquareLoss(torch.nn.Module):
    """A criterion with something to save, which is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        return (self.factor * outputs).square().mean()


def train_with_a_criterion(criterion: Any, options: dict[str, Any]) -> tuple[float, list[str], int]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)).double()
    plugin = HybridParallelPlugin(precision="fp64", **options)
    booster = hpnb.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    rows = (torch.ones(4, 4, dtype=torch.float64),)
    loss = booster.execute_pipeline(iter([rows]), model, criterion, optimizer)["loss"]
    return float(loss), sorted(model.state_dict()), len(net)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 2}, {"zero_stage": 3}])
def test_a_criterion_that_is_a_module_is_no_layer_of_the_model(
    pools: dict[int, hpnb.Ranks], options: dict[str, Any]
) -> None:
    function, module = (
        on(pools, 2).run(train_with_a_criterion, criterion, options)
        for criterion in (lambda outputs, inputs: outputs.square().mean(), SquareLoss())
    )
    assert module == function
    assert module[0][2] == 2


def test_a_model_without_a_loss_needs_a_criterion(pools: dict[int, hpnb.Ranks]) -> None:
    with pytest.raises(hpnb.RankError, match="returns a Tensor, which has no loss; pass a criterion"):
        on(pools, 2).run(train_with_a_criterion, None, {})


class DictOfOutputs(dict):  # type: ignore[type-arg]
    pass


class ListOfOutputs(list):  # type: ignore[type-arg]
    pass


class PairOfOutputs(tuple):  # type: ignore[type-arg]
    pass


def gradient_with_outputs(make: Any) -> float:
    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return make(torch.nn.functional.cross_entropy(super().forward(x), labels))

    torch.manual_seed(0)
    net = Net(4, 3).double()
    booster = hpnb.Booster(plugin=hpnb.TorchDDPPlugin("fp64"))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=1.0))
    rank, ranks = hpnb.rank(), hpnb.world_size()
    x, labels = torch.arange(24.0).view(6, 4).double() / 24, torch.arange(6) % 3
    outputs = model(x=x[rank::ranks], labels=labels[rank::ranks])
    booster.backward(outputs["loss"] if isinstance(outputs, dict) else outputs[0], optimizer)
    return float(net.weight.grad.norm())


@pytest.mark.parametrize("make", [lambda loss: DictOfOutputs(loss=loss), lambda loss: ListOfOutputs([loss])])
def test_outputs_of_a_class_of_ones_own_have_the_gradient_of_all_ranks(
    pools: dict[int, hpnb.Ranks], make: Any
) -> None:
    alone, (first, second) = (on(pools, ranks).run(gradient_with_outputs, make) for ranks in (1, 2))
    assert first == second
    assert abs(first - alone[0]) < 1e-12 * alone[0]


def test_a_tuple_of_ones_own_is_refused(pools: dict[int, hpnb.Ranks]) -> None:
    with pytest.raises(hpnb.RankError, match="returns a PairOfOutputs, which hpnb cannot make anew"):
        on(pools, 2).run(gradient_with_outputs, lambda loss: PairOfOutputs((loss,)))


# --- a wrapper of torch, a batch without labels, a loader that accelerate has split ------------------------


class Around(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def wrapped_by_torch() -> list[str]:
    booster, found = hpnb.Booster(HybridParallelPlugin(precision="fp64")), []
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1).double())
    for model in (ddp, Around(ddp)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append(said(ValueError, lambda m=model, o=optimizer: booster.boost(m, o)))
    net = torch.nn.Linear(4, 1).double()
    model, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found.append(said(ValueError, lambda: DistributedDataParallel(model)))
    around = DistributedDataParallel(Around(model))
    found.append(said(RuntimeError, lambda: around(torch.ones(2, 4).double())))
    assert model(torch.ones(2, 4).double()).shape == (2, 1)  # without the wrapper all is as before
    return found


def test_gradients_are_not_reduced_by_torch_too(pools: dict[int, hpnb.Ranks]) -> None:
    for whole, part, around, outside in on(pools, 2).run(wrapped_by_torch):
        assert "this model is wrapped in torch's DistributedDataParallel" in whole
        assert "its module inner is wrapped in torch's DistributedDataParallel" in part
        assert "reduced by a Booster already" in around
        assert around == outside


def step_without_labels(criterion: Any) -> str:
    booster, model = hpnb.Booster(HybridParallelPlugin(precision="fp64")), build("vit")
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = {"pixel_values": batch("vit", 0, 4)["pixel_values"]}
    return said(ValueError, lambda: booster.execute_pipeline(iter([given]), boosted, criterion, optimizer))


def test_a_batch_without_labels_has_no_loss(pools: dict[int, hpnb.Ranks]) -> None:
    text = on(pools, 1).run(step_without_labels, None)[0]
    assert "outputs is None" in text
    assert "is 'labels' in the batch? it has pixel_values" in text
    a_float = "a value of class float"
    for value, words in {2.5: a_float, (1.0, 2): f"({a_float}, a value of class int)"}.items():
        text = on(pools, 1).run(step_without_labels, lambda outputs, inputs, value=value: value)[0]
        assert f"the loss function returned {words}" in text


class ShardOfBatches(BatchSampler):
    """Every second batch, as accelerate's BatchSamplerShard gives them."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(b) for b in super().__iter__()][hpnb.rank() :: 2])


def boost_with_loaders() -> list[int]:
    data, warned = TensorDataset(torch.zeros(8, 2)), []
    samplers = (
        ShardOfBatches(SequentialSampler(data), 2, False),
        BatchSampler(DistributedSampler(data), 2, False),
        BatchSampler(SequentialSampler(data), 2, False),
    )
    for sampler in samplers:
        loader: Any = DataLoader(data, batch_sampler=sampler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hpnb.Booster(HybridParallelPlugin()).boost(torch.nn.Linear(2, 2), dataloader=loader)
        warned.append(sum("gives each of the 2 data-parallel ranks" in str(w.message) for w in caught))
    return warned


def test_a_batch_sampler_of_ones_own_is_a_split(pools: dict[int, hpnb.Ranks]) -> None:
    assert on(pools, 2).run(boost_with_loaders) == [[0, 0, 1]] * 2


def boost_what_replicas_would_repeat() -> list[str]:
    """What is said of samplers that repeat samples or none, and of an embedding that scales its rows."""
    said = []
    for samples, drop_last in ((7, False), (7, True), (8, False)):
        data = TensorDataset(torch.zeros(samples, 2))
        loader: Any = DataLoader(data, 2, sampler=DistributedSampler(data, drop_last=drop_last))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hpnb.Booster(HybridParallelPlugin()).boost(torch.nn.Linear(2, 2), dataloader=loader)
        said.append(" ".join(re.findall(r"\d+ of \d+", " ".join(str(w.message) for w in caught))))
    for pp_size in (2, 1):  # a pipeline's ranks look up the same rows
        model = torch.nn.Sequential(torch.nn.Embedding(4, 2, max_norm=1.0), torch.nn.Linear(2, 2))
        plugin = HybridParallelPlugin(precision="fp32", pp_size=pp_size, num_microbatches=2)
        try:
            hpnb.Booster(plugin).boost(model)
            said.append("")
        except ValueError as error:
            said.append("max_norm=1.0" if "0 has max_norm=1.0" in str(error) else str(error))
    return said


def test_a_boost_says_what_replicas_would_repeat_or_let_diverge(pools: dict[int, hpnb.Ranks]) -> None:
    assert on(pools, 2).run(boost_what_replicas_would_repeat) == [["1 of 7", "", "", "", "max_norm=1.0"]] * 2


def boost_batch_norms() -> list[str]:
    """What is warned of: two norms with dp 2, and one in microbatches; not SyncBatchNorm, nor evaluation."""
    layers = torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    model, said = torch.nn.Sequential(*layers), []
    synced = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    plugin = HybridParallelPlugin(precision="fp32")
    pipeline = HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=2)
    for boosted_by, net, trains in (
        (plugin, model, True), (plugin, synced, True), (plugin, model, False), (pipeline, synced, True),
    ):  # fmt: skip
        net = copy.deepcopy(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if trains else None
            hpnb.Booster(boosted_by).boost(net, optimizer)
        said.append(" ".join(str(w.message).split(" mean and")[0] for w in caught))
    return said


def test_a_norm_over_the_batch_is_warned_about(pools: dict[int, hpnb.Ranks]) -> None:
    assert on(pools, 2).run(boost_batch_norms) == [["1 and 1 more take", "", "", "1 and 1 more take"]] * 2


# --- ranks of one replica that read different batches -------------------------------------------------------


def image_loss(outputs: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, batch["labels"])


def step_on_halves_of_a_batch(layout: dict[str, int], way: str) -> list[str]:
    """What each of two steps says where each rank reads its half of a batch, and then of one batch."""
    torch.manual_seed(0)
    model = hpnb.models.vit("laptop", classes=3)
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8) % 3}
    parts = [{name: value[hpnb.rank() :: 2] for name, value in batch.items()}, batch]
    if way == "pipeline":
        step = Pipeline(model, hpnb.Mesh(hpnb.Layout(pp=2)).pp, "1f1b", image_loss).step
    else:
        booster = hpnb.Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=2, **layout))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step(batch: Any) -> Any:
            if way == "direct":
                return model(**batch)
            return booster.execute_pipeline(iter([batch]), model, None, optimizer)

    said = []
    for one in parts:
        try:
            step(one)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("layout", "way"),
    [({"pp_size": 2}, "step"), ({"tp_size": 2}, "step"), ({"tp_size": 2}, "direct"), ({}, "pipeline")],
    ids=str,
)
def test_ranks_of_one_replica_with_different_batches_are_refused_in_the_first_step(
    pools: dict[int, hpnb.Ranks], layout: dict[str, int], way: str
) -> None:
    """A sampler over all ranks: the first stage trained on the inputs of one batch and the last one on the
    labels of another, without a word."""
    for first, second in on(pools, 2).run(step_on_halves_of_a_batch, layout, way):
        assert "ranks 0 and 1 hold one replica of the model and read different batches" in first
        assert "of 4 and 4 samples" in first
        assert second == ""
