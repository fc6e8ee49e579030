"""Notebook 05: enforced budgets, memory and seconds of a step, all-gathers, noise scales, its figures."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

import hpnb
from hpnb import lesson, theory
from hpnb.data_parallel.flat_params import FlatParam
from hpnb.lesson.exercises import gpt2_data_parallel as exercises
from hpnb.lesson.exercises.checker import check
from hpnb.lesson.figures import gpt2_data_parallel as figures
from hpnb.lesson.figures.gradient_noise import batch_wall
from hpnb.lesson.programs import (
    device_timing,
    gpt2_zero,
    gpt2_zero_predictions,
    gpt2_zero_words,
    gradient_noise,
)
from hpnb.lesson.programs.gpt2_zero import ZeroConfig
from hpnb.lesson.show import describe
from hpnb.models import GPT2_SIZES, GPT2Size
from hpnb.record import Event, MemoryProfile, MemorySample, OutOfBudget, Timeline
from hpnb.theory import LINKS, Block

MB = 1_000_000.0
SIZE = GPT2Size(hidden=64, layers=4, heads=4, mlp=256, vocab_size=401, length=32)


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=120.0) as ranks:
        yield ranks


# --- a budget of bytes -----------------------------------------------------------------------


def _grow(budget: float | None, count: int = 4) -> list[torch.Tensor]:
    """A layer of 40 bytes, and `count` tensors of 400 bytes beside it."""
    with hpnb.record.memory(nn.Linear(3, 2, bias=True).double().requires_grad_(False), budget=budget):
        return [torch.ones(100) for _ in range(count)]


def test_a_budget_is_kept_to_the_byte() -> None:
    states = 8 * (6 + 2)
    assert len(_grow(states + 1600)) == 4
    with pytest.raises(OutOfBudget, match=r"1,664 bytes .* after aten\.ones, 1 more .* 1,663") as found:
        _grow(states + 1599)
    assert found.value.usage.total == states + 1600
    assert (found.value.usage.parameters, found.value.usage.temporary) == (states, 1600)


def test_survivors_are_grouped_by_shape_and_category() -> None:
    with pytest.raises(OutOfBudget) as found:
        _grow(1000)
    first, *rest = found.value.survivors
    assert str(first) == "3 x (100) float32"
    assert (first.category, first.nbytes) == ("temporary", 1200)
    assert {each.category for each in rest} == {"parameters"}
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.survivors) == (str(found.value), found.value.survivors)


class FullDevice(TorchDispatchMode):
    """A device with room for `limit` bytes of tensors that operators allocate; nothing is freed."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.left = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, torch.Tensor):
            self.left -= result.nbytes
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 400 bytes.")
        return result


def test_a_device_that_is_full_before_the_budget_is_the_same_reading() -> None:
    with FullDevice(1200), pytest.raises(OutOfBudget, match=r"no room for more, although .* 10,000") as found:
        _grow(10_000)
    stopped = found.value
    assert (stopped.device_full, stopped.operator) == (True, "before aten.ones")
    assert (stopped.usage.temporary, str(stopped.survivors[0])) == (800, "2 x (100) float32")
    assert stopped.__context__ is None  # whose frames would keep the tensors
    again = pickle.loads(pickle.dumps(stopped))
    assert (str(again), again.device_full) == (str(stopped), True)
    with FullDevice(1200), pytest.raises(torch.OutOfMemoryError):
        _grow(None)


def _full_in_training(limit: int) -> tuple[int, OutOfBudget]:
    program, log = gpt2_zero.serial_program(SIZE, 1, torch.float32), list[Any]()
    program.step()
    try:
        with FullDevice(limit), program.recording(budget=1e9):
            while True:
                log.append(program.step_with_outputs())
    except OutOfBudget as error:
        return len(log), error.with_traceback(None)


def test_a_full_device_ends_no_page(two: hpnb.Ranks) -> None:
    """The autopsy's cell: the pool gives the reading, whatever operator it was, and goes on."""
    operators = set()
    for limit in (2_000, 200_000, 1_000_000, 4_000_000, 7_000_000):
        steps, stopped = two.run(_full_in_training, limit)[0]
        logits = [one for one in stopped.survivors if one.shape[-1:] == (SIZE.vocab_size,)]
        assert stopped.device_full
        assert sum(one.count for one in logits) >= steps
        operators.add(stopped.operator)
    assert len(operators) > 2


def test_states_alone_can_be_too_much() -> None:
    with pytest.raises(OutOfBudget, match="before the first operator"):
        _grow(50)
    with pytest.raises(ValueError, match="budget=0"):
        _grow(0)


def test_a_step_over_its_budget_is_stopped_once_with_its_state_named() -> None:
    """Adam's moments come in the first step, inside a context that itself calls operators on its way out."""
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(1, 64)).sum().backward()
    with pytest.raises(OutOfBudget) as found, hpnb.record.memory(layer, optimizer, budget=3.5 * 4 * 64 * 64):
        optimizer.step()
    assert "zeros_like" in found.value.operator
    assert found.value.usage.optimizer >= 4 * 64 * 64


# --- the memory of a step --------------------------------------------------------------------


def _peaks(configs: list[ZeroConfig], rows: int) -> list[tuple[int, MemorySample]]:
    profiles = [
        gpt2_zero.measure_step(SIZE, rows, torch.float32, config, 0.25, repeats=1).profile
        for config in configs
    ]
    return [(p.peak, p.samples[-1]) for p in profiles]


@pytest.mark.parametrize("rows", [1, 8])
def test_step_memory_is_what_is_recorded(two: hpnb.Ranks, rows: int) -> None:
    configs = [ZeroConfig(stage, recompute) for recompute in (0, -1) for stage in range(4)]
    configs = [*configs, ZeroConfig(2, 2)] if rows == 8 else [ZeroConfig(0), ZeroConfig(3, -1)]
    for config, (peak, end) in zip(configs, two.run(_peaks, configs, rows)[0], strict=True):
        predicted = gpt2_zero.predict_memory(SIZE, rows, torch.float32, config, 2, 0.25)
        message = f"{config}: {peak / MB:.2f} MB, predicted {predicted.peak / MB:.2f}"
        assert 0.8 <= peak / predicted.peak <= 1.25, message
        if rows == 8 and not config.recompute and config.stage < 3:
            assert peak / predicted.peak == pytest.approx(1.0, abs=0.03), str(config)
        states = theory.model_states(SIZE.parameters(), 2, config.stage, weight_bytes=4, gradient_bytes=4,
                                     optimizer_bytes=8)  # fmt: skip
        assert end.parameters == pytest.approx(states.parameters, rel=0.01)


def test_each_measure_moves_its_own_term() -> None:
    block = Block(512, 8, 128, 4)

    def peak(stage: int = 0, ranks: int = 4, **more: Any) -> theory.StepMemory:
        return theory.step_memory(block, 6, 5000, 128, ranks, stage, bucket_bytes=1e5, **more)

    plain, again = peak(), peak(recompute=6)
    assert plain.moments[0].name == "turn"
    turns = [peak(stage).moments[0] for stage in range(4)]
    assert all(a.total > b.total for a, b in pairwise(turns))
    assert again.moments[0].activations < plain.moments[0].activations / 3
    assert again.moments[0].optimizer == plain.moments[0].optimizer
    assert peak(3, offload=True).moments[0].optimizer == 0
    steps = [peak(0).moments[-1], peak(1).moments[-1]]
    assert steps[0].temporary == 4 * steps[1].temporary  # masters' gradients are sharded too
    with pytest.raises(ValueError, match="recompute=7 of 6 blocks"):
        peak(recompute=7)


def test_a_workspace_is_there_at_every_moment(two: hpnb.Ranks) -> None:
    arguments = SIZE, 2, torch.bfloat16, ZeroConfig(1), 2, 25.0
    plain, more = (gpt2_zero.predict_memory(*arguments, workspace) for workspace in (0.0, 67e6))
    assert [b.total - a.total for a, b in zip(plain.moments, more.moments, strict=True)] == [67e6] * len(
        plain.moments
    )
    assert two.run(device_timing.matmul_workspace) == [0, 0]  # on a CPU


def test_the_largest_model_is_the_last_that_fits(two: hpnb.Ranks) -> None:
    config = ZeroConfig(2)

    def predicted(size: GPT2Size) -> float:
        return gpt2_zero.predict_memory(size, 2, torch.float32, config, 2, 0.25).peak

    budget = predicted(SIZE) * 1.3
    expected, depths = gpt2_zero.deepest_models(two, SIZE, 2, torch.float32, (config,), 0.25, budget)
    for layers, fits in ((expected[config], True), (expected[config] + 1, False)):
        assert (predicted(replace(SIZE, layers=layers)) <= budget) is fits
    assert abs(depths[config] - expected[config]) <= 1


def test_recomputed_blocks_give_the_same_gradients() -> None:
    grads = []
    for count in (0, 2, 4):
        model: Any = hpnb.models.gpt2(SIZE, dtype=torch.float64)
        gpt2_zero.recompute_blocks(model, count)
        ids = torch.arange(64).view(2, 32)
        model(input_ids=ids).logits.square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in grads[1:]:
        assert (grads[0] - other).norm() / grads[0].norm() < 1e-12


# --- its seconds -----------------------------------------------------------------------------


def _seconds(stage: int, ranks: int = 8, wire: str = "InfiniBand NDR", **more: Any) -> dict[str, float]:
    sizes = {"block_bytes": 5e7, "root_bytes": 1e8, "layers": 20, "ranks": ranks}
    return dict(theory.zero_step_seconds(0.1, 0.2, 0.03, stage=stage, link=LINKS[wire], **sizes, **more))


def test_without_overlap_every_message_is_exposed() -> None:
    all_reduce = theory.seconds("all_reduce", 1.1e9, 8, LINKS["InfiniBand NDR"])
    stages = [_seconds(stage, overlap=False)["exposed"] for stage in range(4)]
    assert stages[0] == pytest.approx(all_reduce, rel=0.2)  # each bucket has its latency
    assert stages[1] == stages[2] == pytest.approx(stages[0], rel=0.05)
    assert stages[3] > 1.3 * stages[2]
    assert all(stages[stage] > _seconds(stage)["exposed"] for stage in range(4))


def test_measured_parts_are_those_of_the_step() -> None:
    group = (0, 1)
    events = [
        Event(rank, -1, op, -1, start, end)
        for rank in group
        for op, start, end in (
            ("F", 0.0, 1.0), ("B", 1.0, 2.0), ("B", 2.5, 3.0), ("update", 3.25, 3.5), ("update", 4.5, 4.75),
        )
    ]  # fmt: skip
    parts = gpt2_zero.step_parts(Timeline(tuple(events), "measured"))
    assert parts == {
        "forward": 1.0, "backward": 1.5, "update": 0.5, "exposed": 0.75, "exposed after the update": 1.0,
    }  # fmt: skip
    by_turns = gpt2_zero.step_parts(Timeline(tuple(events), "measured by turns"))
    assert by_turns == {"forward": 1.0, "backward": 1.5, "update": 0.5}


def _timed(stage: int) -> gpt2_zero.StepMeasurement:
    return gpt2_zero.measure_step(SIZE, 2, torch.float32, ZeroConfig(stage), 0.25, repeats=2)


def test_zero_2_communicates_after_its_update(two: hpnb.Ranks) -> None:
    """The page's answer to why ZeRO-3 can be quicker."""
    after = {stage: two.run(_timed, stage)[0].parts["exposed after the update"] for stage in (0, 2, 3)}
    assert after[2] > 0
    assert after[0] == after[3] == 0


def test_zero_3_exposes_less_on_fast_links_only() -> None:
    def exposed(stage: int, bandwidth: float) -> float:
        return gpt2_zero_predictions.exposed_seconds(
            SIZE, torch.float32, stage, (0.01, 0.02, 0.001), 4, bandwidth, 0.25
        )

    assert exposed(3, 1e12) < exposed(2, 1e12)
    assert exposed(3, 1e6) > exposed(2, 1e6)


def test_shard_seconds() -> None:
    assert _seconds(0, ranks=1) == {"computing": pytest.approx(0.3), "recomputation": 0.0, "exposed": 0.0,
                                    "optimizer": 0.03}  # fmt: skip
    assert _seconds(2)["optimizer"] == pytest.approx(0.03 / 8)
    assert _seconds(2)["exposed"] > theory.seconds("all_gather", 1.1e9, 8, LINKS["InfiniBand NDR"])
    assert _seconds(3)["exposed"] < _seconds(2)["exposed"]  # behind blocks, while they last
    assert _seconds(3, wire="Ethernet 10 Gb")["exposed"] > _seconds(2, wire="Ethernet 10 Gb")["exposed"]
    assert _seconds(0, recompute=10)["recomputation"] == pytest.approx(0.05)
    offload = _seconds(2, host_bandwidth=25e9, host_seconds=0.8)["offload"]
    assert offload == pytest.approx(2 * 1.1e9 / 8 / 25e9)
    assert _seconds(3, host_bandwidth=25e9)["offload"] == pytest.approx(3 * 1.1e9 / 8 / 25e9)
    with pytest.raises(ValueError, match="stage=4"):
        _seconds(4)


def _count_transfers() -> tuple[list[int], list[int]]:
    """How often each FlatParam of an offloaded, recomputed model goes up and its gradients come down."""
    up, down = Counter[FlatParam](), Counter[FlatParam]()
    unshard, finish = FlatParam.unshard, FlatParam.finish_reduction

    def count_up(flat: FlatParam) -> None:
        up[flat] += not flat.is_unsharded
        unshard(flat)

    def count_down(flat: FlatParam, used: Sequence[bool] | None = None) -> None:
        down[flat] += 1
        finish(flat, used)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatParam, "unshard", count_up)
        patch.setattr(FlatParam, "finish_reduction", count_down)
        program = gpt2_zero.build_program(SIZE, 2, torch.float32, ZeroConfig(3, -1, offload=True), 0.25)
        program.step()
    return sorted(up.values()), sorted(down.values())


def test_an_offloaded_step_moves_three_shards(two: hpnb.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go up for both gathers, gradients down once. Only the root is gathered once."""
    up, down = two.run(_count_transfers)[0]
    assert up == [1] + [2] * SIZE.layers
    assert set(down) == {1}
    card = SimpleNamespace(ranks=2, link=LINKS["InfiniBand NDR"], device="cuda")
    monkeypatch.setattr(gpt2_zero_predictions, "CPU_MEMORY_RATE", float("inf"))  # transfers alone
    exposed = [
        gpt2_zero_predictions.predict_parts(
            SIZE, torch.bfloat16, ZeroConfig(3, -1, offload=offload), cast(Any, card), (0.1, 0.2, 0.0), 25.0
        )["exposed"]
        for offload in (False, True)
    ]
    moved = 3 * 2 * SIZE.parameters() / 2  # bytes of a rank
    assert exposed[1] - exposed[0] == pytest.approx(moved / gpt2_zero_predictions.CPU_LINK)


# --- gathers ---------------------------------------------------------------------------------

USES = [0, 1, 2, 2, 1, 0]


def test_gathers_by_hand() -> None:
    """Blocks of 1 s forward and 2 s backward, gathers of 0.5 s."""
    computing, rest = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], ([0.5] * 3, [1.0] * 3)
    late = theory.simulate_gathers(USES, computing, *rest, theory.prefetch_plan(USES, 0))
    assert late.ends[-1] == pytest.approx(9 + 5 * 0.5)  # the middle one is not gathered twice
    assert (late.stall, late.most) == (pytest.approx(4 * 0.5), 1.0)
    early = theory.simulate_gathers(USES, computing, *rest, theory.prefetch_plan(USES, 1))
    assert early.ends[-1] == pytest.approx(9.5)
    assert (early.stall, early.most, len(early.gathers)) == (0.0, 2.0, 5)


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([[0], [], [], [], [], []], "use 1 computes with block 1, which is not gathered"),
        ([[0, 0], [1], [2], [], [1], [0]], "use 0 gathers block 0, which is gathered already"),
        ([[0], [1]], "2 lists of gathers for 6 uses"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(starts: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        theory.simulate_gathers(USES, [1.0] * 6, [0.5] * 3, [1.0] * 3, starts)


# --- the noise scale -------------------------------------------------------------------------


def test_two_norms_give_signal_and_noise() -> None:
    signal, noisy, small, ranks = 2.0, 50.0, 4, 8
    per_rank, reduced = exercises.planted(signal, noisy, small, ranks, 3000)
    means = [sum(norms) / ranks for norms in per_rank]
    found = theory.signal_and_noise(means, reduced, small, small * ranks)
    assert found == (pytest.approx(signal, rel=0.1), pytest.approx(noisy, rel=0.1))
    assert theory.noise_scale(means, reduced, small, small * ranks) == pytest.approx(25.0, rel=0.1)
    assert theory.noise_scale([10.0], [1.0], 1, 2) == math.inf  # all of it noise
    with pytest.raises(ValueError, match="the first must be the smaller"):
        theory.noise_scale([1.0], [1.0], 4, 4)


def test_a_wall_that_is_there_is_found() -> None:
    batches = [2, 4, 8, 16, 64]
    steps = [theory.steps_at(b, 50.0, 12.0) for b in batches]
    assert steps[0] == pytest.approx(350.0)
    assert theory.fitted_wall(batches, steps) == (pytest.approx(50, rel=0.01), pytest.approx(12, rel=0.02))
    with pytest.raises(ValueError, match="two or more"):
        theory.fitted_wall([4, 4], [10, 10])


def _train(batch: int, target: float, max_steps: int) -> tuple[int, bool, bool]:
    rows = torch.arange(32)[None].repeat(8, 1)  # one sentence: soon known by heart
    run = gradient_noise.train_to_loss(SIZE, rows, rows[:2], batch, target, max_steps=max_steps)
    return run.steps, run.reached, all(p.grad is None for p in run.model.parameters())


def test_training_stops_at_its_target(two: hpnb.Ranks) -> None:
    steps, reached, fresh = two.run(_train, 4, 3.0, 60)[0]
    assert reached
    assert steps < 60
    assert fresh
    assert two.run(_train, 3, 0.0, 5)[0][:2] == (5, False)  # 2 rows on one rank, 1 on the other


def _train_on(first: float, second: float) -> tuple[list[int], list[float], list[torch.Tensor]]:
    """(steps taken by calls, what the calls say, weights of a training that went on and of one at once)."""
    rows, taken = torch.arange(32)[None].repeat(8, 1), []
    hook = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    calls, said, models = [], [], []
    for target in (first, second, second):
        before = len(taken)
        run = gradient_noise.train_to_loss(SIZE, rows, rows[:2], 4, target)
        said.append(float(run.steps))
        calls.append(len(taken) - before)
        models.append(run.model)
    before = len(taken)
    mean, reached = gradient_noise.steps_to_loss(SIZE, rows, rows[:2], 4, second, 1)
    assert reached == 1
    said.append(mean)
    calls.append(len(taken) - before)
    other = gradient_noise.train_to_loss(SIZE, rows.flip(0) + 1, rows[:2] + 1, 4, first)  # other rows: afresh
    at_once = gradient_noise.train_to_loss(SIZE, rows, rows[:2], 4, second)
    hook.remove()
    said += [float(other.steps), float(at_once.steps)]
    return calls, said, [m.transformer.wte.weight.detach() for m in (models[-1], at_once.model)]


def test_a_training_goes_on_where_one_to_a_higher_loss_stopped(two: hpnb.Ranks) -> None:
    for calls, said, weights in two.run(_train_on, 4.0, 3.0):
        early, late, again, counted, other, at_once = said
        assert early < late == again == counted == at_once
        assert calls == [early, late - early, 0, 0]
        assert other > 0
        assert torch.equal(*weights)


# --- figures ---------------------------------------------------------------------------------


def _profile(peak: int) -> MemoryProfile:
    middle = MemorySample(0.1, 10, 5, 20, peak - 35)
    return MemoryProfile((MemorySample(0.0, 10, 0, 20), middle, MemorySample(0.2, 10)))


def test_rivers() -> None:
    profiles = {ZeroConfig(0): _profile(100), ZeroConfig(1): _profile(60), ZeroConfig(2): _profile(50)}
    fig = figures.rivers(profiles, 80.0)
    words = [t.get_text() for ax in fig.axes for t in ax.texts]
    assert "100 B" in words
    assert [ax.get_visible() for ax in fig.axes] == [True, True, True, False]
    assert fig.axes[0].get_ylim() == fig.axes[2].get_ylim()


def test_the_title_of_the_rivers_follows_their_bytes() -> None:
    def profile(states: int, activations: int) -> MemoryProfile:
        early = MemorySample(0.0, states, activations=activations // 2)
        return MemoryProfile((early, MemorySample(1.0, states, activations=activations)))

    def title(*profiles: MemoryProfile) -> str:
        configs = ZeroConfig(0), ZeroConfig(3), ZeroConfig(3, -1)
        return _title(figures.rivers(dict(zip(configs, profiles, strict=True))))

    large, sharded, recomputed = profile(9, 8), profile(3, 8), profile(3, 4)
    assert title(large, sharded, recomputed) == "ZeRO shrinks states, recomputation activations · measured"
    assert title(large, sharded, sharded) == "ZeRO shrinks states · measured"
    assert title(large, large, recomputed) == "Recomputation shrinks activations · measured"
    assert title(large, large, large) == "Memory · measured"


def test_frontier() -> None:
    peaks = {ZeroConfig(0): 100.0, ZeroConfig(1): 60.0, ZeroConfig(3, -1): 30.0}
    took = dict(zip(peaks, ((0.9, 1.0, 1.2), (1.0, 1.1, 1.5), (1.3, 1.4, 1.9)), strict=True))
    fig = figures.zero_frontier(peaks, took, 80.0)
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in fig.axes[0].lines}
    assert {"activations stored", "activations recomputed", "budget"} <= set(drawn)
    assert drawn["activations stored"] == [[100.0, 1.0], [60.0, 1.1]]
    assert [text.get_text() for text in fig.axes[0].texts][:3] == ["0", "1", "3"]
    for slowest in (1.9, 19.0):  # linear and logarithmic
        took[ZeroConfig(3, -1)] = 1.3, 1.4, slowest
        words = describe(figures.zero_frontier(peaks, took, 80.0))
        assert words.endswith("activations recomputed at 30, 1.4."), "numbers of stages are at no row"


def test_rounds_are_joined_and_the_median_counts() -> None:
    first, second = ({"forward": 0.1, "backward": b} for b in (0.4, 0.2))
    rounds = [gpt2_zero.StepMeasurement((parts,), _profile(100)) for parts in (first, second)]
    third = gpt2_zero.StepMeasurement(({"forward": 0.1, "backward": 0.9},), MemoryProfile(()))
    run = rounds[0].joined(rounds[1]).joined(third)
    assert run.parts == first
    assert run.seconds == pytest.approx((0.3, 0.5, 1.0))
    assert run.profile.peak == 100


def test_configurations_are_timed_in_an_odd_number_of_steps() -> None:
    class Pool:
        """A pool that notes how many steps it is asked for."""

        def __init__(self, device: str, shares_gpus: bool = False) -> None:
            self.choice, self.asked = SimpleNamespace(device=device, shares_gpus=shares_gpus), Counter[str]()

        def run(self, program: Any, *args: Any) -> list[Any]:
            if program is gpt2_zero.time_serial_step:
                return [(1.0, 2.0, 3.0)]
            config, steps = args[3], args[5]
            self.asked[str(config)] += steps
            return [gpt2_zero.StepMeasurement(({"forward": 1.0},) * steps, MemoryProfile(()))]

    configs, counts = [ZeroConfig(1), ZeroConfig(3, offload=True)], []
    for pool in (Pool("cpu"), Pool("cuda", True), Pool("cuda")):
        runs, _ = gpt2_zero.measure_in_turn(pool, SIZE, 2, torch.float32, configs, 1.0)  # type: ignore[arg-type]
        counts.append([*pool.asked.values()])
        assert [len(run.steps) for run in runs.values()] == counts[-1]
    assert counts == [[3, 3], [3, 3], [5, 3]]


def test_runs_that_do_not_reach_the_loss_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    runs = iter([(400.0, 1), (30.0, 2)])
    pool: Any = SimpleNamespace(run=lambda *args: [next(runs)])
    rows = torch.zeros(1, 1)
    assert gradient_noise.mean_steps(pool, SIZE, rows, rows, {4: 2, 8: 2}, 5) == {4: 400.0, 8: 30.0}
    said = capsys.readouterr().out
    assert said.startswith("✗ Not in this run: All runs reach a loss of 5 within 400 steps.")
    assert "Not reached with batches of 4; such a run counts as 400 steps." in said


def test_step_parts() -> None:
    parts = {"forward": 0.2, "backward": 0.4, "update": 0.0, "exposed after the update": 0.1}
    fig = figures.step_parts({ZeroConfig(2): parts}, {ZeroConfig(2): parts}, "replayed")
    assert [tick.get_text() for tick in fig.axes[0].get_yticklabels()] == ["ZeRO-2"]
    assert len(fig.axes[0].collections) == 4  # before and after the update, filled and hollow


def _title(fig: Figure) -> str:
    return fig.texts[0].get_text()


def test_the_title_names_stages_that_always_communicate_after_the_update() -> None:
    early, late = ({"forward": 0.9, "exposed after the update": took} for took in (0.001, 0.1))
    both = {ZeroConfig(1): late, ZeroConfig(2): late, ZeroConfig(3): early}
    assert _title(figures.step_parts(both, both)) == "ZeRO-1 and ZeRO-2 communicate after the update"
    one = {ZeroConfig(1): early, ZeroConfig(1, -1): late, ZeroConfig(2): late}
    assert _title(figures.step_parts(one, one)) == "ZeRO-2 communicates after the update"
    none = {ZeroConfig(1): early}
    assert _title(figures.step_parts(none, none)) == "Steps before, in and after the update"


def test_what_the_page_says_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(gpt2_zero_words, "record", lambda key, value, unit="": recorded.update({key: value}))

    def run(*seconds: float) -> gpt2_zero.StepMeasurement:
        steps = [{"backward": s - 0.2, "update": 0.1, "exposed after the update": 0.1} for s in seconds]
        return gpt2_zero.StepMeasurement(tuple(steps), MemoryProfile(()))

    runs = {ZeroConfig(stage): run(1.0, 1.1, 1.2) for stage in range(4)}
    runs |= {ZeroConfig(stage, -1): run(1.2, 1.3 + stage, 9.0) for stage in range(4)}
    parts = {c: {"forward": 0.9, "update": 0.1, "exposed after the update": 0.0} for c in runs}
    gpt2_zero_words.record_steps(runs, parts)
    assert recorded["05.late"] == pytest.approx({"least": 2.0, "most": 2.0})
    assert recorded["05.excess"] == "In the bars, most of the excess lies before the update."
    exact = {c: {**parts[c], "forward": run.parts["backward"]} for c, run in runs.items()}
    gpt2_zero_words.record_steps(runs, exact)
    assert recorded["05.excess"] == "In the bars, most of the excess lies in the update and after it."
    gpt2_zero_words.record_steps(runs, parts)
    assert recorded["05.recompute"] == pytest.approx({"least": 0.2, "most": 3.2})
    assert recorded["05.ranges"].startswith("overlap")
    assert (recorded["05.off"]["hold"], recorded["05.off"]["highest"]) == (4, "ZeRO-3 + recompute")
    assert recorded["05.changed"]["zero-1"] == "no longer"
    assert recorded["05.offload"] == "This run does not offload."
    offloaded = ZeroConfig(3, -1, offload=True)
    runs |= {offloaded: run(5.0, 6.3, 7.0), ZeroConfig(3): run(1.3, 1.4, 1.5)}
    gpt2_zero_words.record_steps(runs, {**parts, offloaded: {"forward": 1.5}})
    assert recorded["05.ranges"] == "do not overlap"
    assert recorded["05.changed"]["zero-3"] == "300 ms longer"
    slow = {**runs, ZeroConfig(0): run(1.0, 1.5, 1.6)}
    gpt2_zero_words.record_steps(slow, {**parts, offloaded: {"forward": 1.5}})
    assert recorded["05.changed"]["zero-1"] == "400 ms shorter"
    assert "added 2.00 s to" in recorded["05.offload"]
    assert recorded["05.offload"].endswith("predicted as 500 ms.")  # the page does not test why
    long = {c: {**of_step, "forward": 99.0} for c, of_step in parts.items()}
    gpt2_zero_words.record_steps(slow, {**long, offloaded: {"forward": 1.5}})
    assert recorded["05.excess"] == "All bars together are no longer than predicted."


def test_doublings_show_a_wall_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(gradient_noise, "record", lambda key, value, unit="": recorded.update({key: value}))
    gradient_noise.record_doublings({4: 120.0, 8: 60.0, 16: 40.0, 32: 20.0}, {4: 2, 8: 1}, 10.0, 1e9)
    assert recorded["05.doublings"]["wall"] == "Up to 32 samples, this run shows no wall."
    assert recorded["05.doublings"]["law-last"] == pytest.approx(2.0)
    assert recorded["05.repeats"] == {"words": "average up to 2 runs"}
    gradient_noise.record_doublings({4: 120.0, 8: 60.0, 16: 50.0}, {4: 2}, 40.0, 4.0)
    assert recorded["05.repeats"] == {"words": "average 2 runs"}
    assert recorded["05.doublings"]["wall"] == "The last doubling saved least, as the law says."
    assert recorded["05.fitted"] == 4.0
    assert (recorded["05.doublings"]["least"], recorded["05.doublings"]["most"]) == (1.2, 2.0)


def test_the_deepest_models_say_how_large_and_when_they_are_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    store = lambda key, value: recorded.setdefault(key, {}).update(value)  # noqa: E731
    monkeypatch.setattr(gpt2_zero_words, "record", store)
    config = ZeroConfig(3, -1)
    gpt2_zero_words.record_depths(SIZE, 1, torch.bfloat16, {config: 9}, {config: 8}, 2, 25.0, 0.0)
    assert recorded["05.millions"]["zero-3"] == replace(SIZE, layers=8).parameters() / 1e6
    assert recorded["05.fullest"]["zero-3"] == "step"


def test_a_budget_in_which_no_block_fits_has_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(gpt2_zero_words, "record", lambda key, value, unit="": recorded.update({key: value}))
    config = ZeroConfig(0)
    gpt2_zero_words.record_depths(SIZE, 1, torch.float16, {config: 0}, {config: 1}, 2, 25.0, 0.0)
    blocks = SIZE.parameters() - (SIZE.layers - 1) * SIZE.block().parameters
    assert recorded["05.millions"] == {"zero-0": blocks / 1e6}


def test_launch_floor() -> None:
    for adds in (True, False):
        fig = figures.launch_floor({1: [0.9, 1.0, 4.0], 10: [2.0], 100: [11.0]}, 1.0, 0.1, 100, adds)
        lines = {line.get_label(): line for line in fig.axes[0].lines}
        assert np.interp(10, *lines["computing"].get_data()) == pytest.approx(1.0, rel=0.05)
        assert ("launching + computing" in lines) is adds
        if adds:
            assert np.interp(10, *lines["launching + computing"].get_data()) == pytest.approx(2.0, rel=0.05)


def test_launch_floor_of_steps_that_launching_sets_knows_only_how_long_computing_takes_at_most() -> None:
    fig = figures.launch_floor({1: [1.0], 10: [1.1], 100: [1.5]}, 1.0, 0.015, 100, False)
    assert "computing, at most" in [line.get_label() for line in fig.axes[0].lines]
    legend = [text.get_text() for text in fig.texts] + [
        text.get_text() for box in fig.legends for text in box.get_texts()
    ]
    assert any("the longer of both, or more" in text for text in legend)
    assert gpt2_zero_words.limit_in_words(1.0, 1.5) == {"word": "launching", "equal": "more than"}
    assert gpt2_zero_words.limit_in_words(1.0, 2.5) == {"word": "computing", "equal": "about"}


@pytest.mark.parametrize(
    ("took", "title"),
    [
        ({1: 1.0, 4: 1.2, 100: 11.0}, "Launching sets the time of small steps, computing that of large ones"),
        ({1: 1.0, 4: 1.2, 100: 1.9}, "Launching sets the time of small steps"),
        ({1: 1.0, 4: 4.0, 100: 99.0}, "Computing sets the time of large steps"),
        ({1: 1.0, 4: 1.4, 100: 1.9}, "Forward and backward over the tokens of a rank"),
    ],
)
def test_the_title_of_the_launch_floor_follows_the_times(took: dict[int, float], title: str) -> None:
    rounds = {tokens: [seconds] for tokens, seconds in took.items()}
    assert _title(figures.launch_floor(rounds, 1.0, 0.1, 100, False)) == title


@pytest.mark.parametrize(
    ("three", "where", "crossing"),
    [
        ([6.0, 3.0, 1.0], "fast links", 100.0),
        ([3.0, 2.0, 1.0], "every link", 1.0),
        ([6.0, 5.0, 4.0], "no link", None),
        ([3.0, 5.0, 1.0], "some links", 1.0),
    ],
)
def test_the_title_says_on_which_links_zero_3_exposes_less(
    three: list[float], where: str, crossing: float | None
) -> None:
    lines = {"ZeRO-0": [4.0, 2.0, 0.5], "ZeRO-2": [4.0, 3.0, 2.0], "ZeRO-3": three}
    fig = figures.exposed_by_link([1e9, 1e10, 1e11], lines, 38e9)
    assert _title(fig) == f"XL, 8 GPUs: ZeRO-3 exposes less than ZeRO-2 on {where} · simulated"
    at = {line.get_label(): line.get_xdata()[0] for line in fig.axes[0].lines}
    assert at.get("crossing") == crossing


def test_exposed_by_link() -> None:
    lines = {"ZeRO-0": [4.0, 0.5], "ZeRO-2": [4.0, 2.0], "ZeRO-3": [6.0, 1.0]}
    fig = figures.exposed_by_link([1e9, 1e10], lines, 38e9)
    at = {line.get_label(): line.get_xdata()[0] for line in fig.axes[0].lines}
    assert (at["crossing"], at["InfiniBand NDR"], at["gather = forward"]) == (10.0, 50.0, 38.0)


def test_links_of_the_page() -> None:
    """Its prose on XL: ZeRO-0 exposes least, ZeRO-1 as much as ZeRO-2, and ZeRO-3 falls until gathers fit."""
    xl = GPT2_SIZES["1.5b"]
    zero, one, two, three = (gpt2_zero.exposed_by_bandwidth(xl, 8, stage, 8) for stage in range(4))
    assert all(a <= 1.001 * min(b, c) for a, b, c in zip(zero, two, three, strict=True))
    assert one == two
    fast = gpt2_zero.gather_bandwidth(xl, 8, 8)
    slope = {
        b: math.log(y / z) / math.log(c / b)
        for (b, y), (c, z) in pairwise(zip(gpt2_zero.BANDWIDTHS, three, strict=True))
    }
    assert all(steep == pytest.approx(1.0) for b, steep in slope.items() if b > 1.2 * fast)
    assert max(slope, key=slope.__getitem__) == pytest.approx(fast, rel=0.1)


def test_links_at_which_curves_cross_and_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(gpt2_zero_predictions, "record", lambda key, value, unit="": recorded.update(value))
    exposed = {"ZeRO-0": [9.0, 4.0, 1.0], "ZeRO-2": [9.0, 5.0, 4.0], "ZeRO-3": [12.0, 6.0, 2.0]}
    gpt2_zero.record_links([1e9, 1e10, 1e11], exposed, 4e10)
    assert recorded == {"crossing": 1e11, "apart": 1e10, "fast": 4e10}


def test_peaks_of_the_page_line_by_line() -> None:
    """Its fold has these formulas."""

    xl, small = GPT2_SIZES["1.5b"], GPT2Size(192, 8, 6, 768, 1511, 64)
    for size, rows, dtype, stage, name, more, temporary in (
        (xl, 1, torch.bfloat16, 1, "turn", 4, 8), (small, 2, torch.float32, 0, "block 7", 0, 0),
    ):  # fmt: skip
        moment = gpt2_zero.predict_memory(size, rows, dtype, ZeroConfig(stage), 2, 2.0).fullest
        w, tokens = dtype.itemsize, rows * size.length
        h, logits, adam = size.hidden, size.vocab_size * tokens, 12 if w == 2 else 8
        assert (moment.name, moment.parameters) == (name, w * size.parameters())
        assert moment.gradients == moment.parameters
        assert moment.optimizer == adam * size.parameters() / (2 if stage else 1)
        blocks = 28 * tokens * h * w * size.layers
        assert moment.activations == pytest.approx(blocks + more * logits, rel=0.01)
        around = 0 if temporary else 14 * tokens * h * w + size.vocab_size * h * w
        assert moment.temporary == pytest.approx(around + temporary * logits, rel=0.01)


def test_offloading_with_zero_3_is_recorded_with_three_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(
        gpt2_zero_predictions, "record", lambda key, value, unit="": recorded.update({key: value})
    )
    xl = GPT2_SIZES["1.5b"]
    gpt2_zero.record_prices(xl, 8, 8, LINKS["InfiniBand NDR"])
    expected = {"transfers": 3 * 2 * xl.parameters() / 4 / 25e9, "update": 28 * xl.parameters() / 4 / 100e9}
    assert recorded["05.xl-offload"] == pytest.approx(expected)
    one_stage_less = gpt2_zero_predictions.offload_seconds(xl, torch.bfloat16, 2, 4)
    assert one_stage_less["transfers"] == pytest.approx(expected["transfers"] * 2 / 3)


def test_price_of_bytes() -> None:
    peaks = {ZeroConfig(0): 5e9, ZeroConfig(3): 3e9, ZeroConfig(3, -1): 2e9, ZeroConfig(1): 4e9}
    times = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (5.0, 7.0, 8.0), (3.0, 3.5, 4.0))
    columns = gpt2_zero.price_of_bytes(peaks, dict(zip(peaks, times, strict=True)))
    rows = ["ZeRO-0 to ZeRO-1", "ZeRO-0 to ZeRO-3", "ZeRO-3 to ZeRO-3 + recompute"]
    assert {head: [*column] for head, column in columns.items()} == dict.fromkeys(columns, rows)
    saved, added, price, overlap = ([*column.values()] for column in columns.values())
    assert (saved, added) == ([1e9, 2e9, 1e9], [1.5, 3.0, 2.0])
    assert price == [1.5, 1.5, 2.0]
    assert overlap == [True, False, True]
    peaks = {ZeroConfig(0): 5e9, ZeroConfig(1): 4e9}
    columns = gpt2_zero.price_of_bytes(peaks, dict(zip(peaks, (times[1], times[0]), strict=True)))
    assert [*columns["ranges overlap"].values()] == [False]  # every step of the one that saves is faster


def test_prefetch_steps() -> None:
    plans = {words: theory.prefetch_plan(USES, ahead) for words, ahead in (("late", 0), ("early", 1))}
    steps = {
        words: theory.simulate_gathers(USES, [1.0] * 6, [0.5] * 3, [1.0] * 3, plan)
        for words, plan in plans.items()
    }
    fig = figures.prefetch_steps(steps, USES)
    assert len(fig.axes) == 2
    assert _title(fig) == "Early, only the first gather is exposed"
    assert _title(figures.prefetch_steps({"late": steps["late"]}, USES)) == "Later gathers are exposed, too"


def test_batch_wall() -> None:
    fig = batch_wall({2: 100, 4: 70}, {"fit": (40.0, 3.0)}, 5.0)
    measured, law, *_ = fig.axes[1].lines
    assert list(measured.get_ydata()) == [200, 280]
    x, y = law.get_data()
    np.testing.assert_allclose(y, 40.0 * (np.asarray(x) + 3.0))
    noise = [line for line in fig.axes[0].lines if line.get_label() == "fitted noise scale"]
    assert [line.get_xdata()[0] for line in noise] == [3.0]
    fig = batch_wall({2: 100, 4: 70}, {"fit": (40.0, 3.0)}, 5.0, {"gradients": 4.0})
    assert [line.get_xdata()[0] for line in fig.axes[1].lines if line.get_label() == "gradients"] == [4.0]


@pytest.mark.parametrize(
    ("steps", "title"),
    [
        ({4: 70, 2: 100, 8: 60}, "To a test loss of 5, larger batches take fewer steps and more samples"),
        ({2: 100, 4: 40}, "To a test loss of 5, larger batches take fewer steps"),
        ({2: 100, 4: 100}, "To a test loss of 5, larger batches take more samples"),
        ({2: 100, 4: 40, 8: 40}, "Steps and samples to a test loss of 5, over the batch size"),
    ],
)
def test_the_title_of_the_batch_wall_follows_steps_and_samples(steps: dict[int, float], title: str) -> None:
    assert _title(batch_wall(steps, {"fit": (40.0, 3.0)}, 5.0)) == title


def test_step_bill() -> None:
    fig = figures.step_bill({"parameters": 60.0, "optimizer": 30.0}, {"computing": 1.0, "exposed": 0.5}, 80.0)
    corners = [c.get_paths()[0].vertices for c in fig.axes[0].collections]
    assert [np.ptp(c[:, 0]) for c in corners] == [60.0, 30.0]
    assert [line.get_xdata()[0] for line in fig.axes[0].lines if line.get_label() == "capacity"] == [80.0]
    with pytest.raises(ValueError, match="lunch"):
        figures.step_bill({"parameters": 1.0}, {"lunch": 1.0})


# --- the explorer, and checks that must not fall over ------------------------------------------


def test_answers_of_the_wrong_kind_fail() -> None:
    answers = {
        exercises.state_bytes: 3,
        exercises.recompute_choice: 3,
        exercises.gather_order: 3,
        exercises.noise_scale: "much",
    }
    for exercise, answer in answers.items():
        assert check(exercise, lambda *_, answer=answer: answer).status == "failed"
    assert check(exercises.recompute_choice, lambda *_: [9]).status == "failed"
    assert check(exercises.gather_order, lambda step: [[*range(6)], *[[]] * 11]).status == "failed"


def test_a_readers_plan_is_drawn_above_a_right_one() -> None:
    assert check(exercises.gather_order, exercises.plan_within_limit).status == "passed"
    drawn = exercises.compared_plans(lambda step: theory.prefetch_plan(step.uses, 1))
    assert drawn is not None
    steps, uses, title = drawn
    assert title == "A wide block behind narrow ones, memory for four"
    yours, right = steps.values()
    assert yours.stall > right.stall == 0.0
    assert len(figures.prefetch_steps(steps, uses, title).axes) == 2
    drawn = exercises.compared_plans(exercises.plan_within_limit)
    assert drawn is not None
    assert drawn[2] == title
    yours, right = drawn[0].values()
    assert yours == right
    stubs: tuple[Any, ...] = (lambda step: ..., lambda step: [], lambda step: 1 / 0)
    for stub in stubs:
        assert exercises.compared_plans(stub) is None


def test_a_table_of_survivors_says_by_which_side_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutOfBudget) as stopped:
        _grow(1000)
    lesson.survivors_table(stopped.value, side=100)
    said = capsys.readouterr().out
    assert "largest tensors alive with a side of 100" in said
    assert "(100)" in said
    assert "(2x3)" not in said


@pytest.mark.parametrize("most", [0, 1, 2, 5, 19])
@pytest.mark.parametrize("start", [1, 2, 7, 30])
def test_the_last_that_fits_is_found_from_any_start(most: int, start: int) -> None:
    tried = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= most

    assert gpt2_zero._last_that_fits(fits, start) == most
    assert len(tried) == len(set(tried))
    assert min(tried) >= 1
