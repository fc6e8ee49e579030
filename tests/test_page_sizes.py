"""Sizes of the pages: what is chosen from measured memory fits by the predictor, with no GPU at hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hpnb
from hpnb import lesson, theory
from hpnb.lesson import rank_share
from hpnb.lesson.page_needs import NEEDS, Trial
from hpnb.lesson.page_sizes import FILL, PageSizes, choose_sizes, predict_trial
from hpnb.lesson.programs import gpt2_zero
from hpnb.lesson.rank_share import RankShare
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize
from hpnb.ranks import gpu_limits, out_of_memory

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CONTEXT = 0.3e9  # bytes of a CUDA context
MACHINES = {  # GPUs, bytes of one that are free, bf16, FLOP/s of one in 16-bit matrix products
    "1 x 80 GB": (1, 80e9, True, 600e12),
    "1 x 22 GB": (1, 22e9, True, 70e12),
    "1 x 15 GB, fp16": (1, 15e9, False, 25e12),
    "2 x 15 GB, fp16": (2, 15e9, False, 25e12),
}


def share_of(machine: str, ranks: int) -> RankShare:
    gpus, free, bf16, rate = MACHINES[machine]
    on_gpu = -(-ranks // max(1, gpus))
    return RankShare(ranks, "cuda", free / on_gpu - CONTEXT, bf16, rate / on_gpu)


every_machine = pytest.mark.parametrize("machine", MACHINES)
every_count = pytest.mark.parametrize("ranks", [2, 4, 8])


# --- what is chosen ---------------------------------------------------------------------------------


@every_count
@every_machine
def test_every_page_fits(machine: str, ranks: int) -> None:
    share = share_of(machine, ranks)
    for need, listed in NEEDS.items():
        sizes = choose_sizes(need, share)
        assert sizes.peak == listed.peak(sizes.trial, ranks, 2), need
        assert 0 < sizes.peak <= FILL * share.memory, need
        assert sizes.seconds <= listed.seconds, need
        assert sizes.dtype == (torch.bfloat16 if share.bf16 else torch.float16)
        assert (sizes.scaler() is None) == share.bf16
        assert not listed.splits_heads or ranks <= sizes.size.heads, need


@every_machine
def test_no_larger_trial_would_fit(machine: str) -> None:
    share = share_of(machine, 4)
    for need, listed in NEEDS.items():
        sizes, before = choose_sizes(need, share), []
        for trial in listed.candidates(4):
            if trial == sizes.trial:
                break
            before.append(predict_trial(need, trial, share))
        assert not [one for one in before if one.fits and one.seconds <= listed.seconds], need


@every_count
def test_pages_train_real_models_on_one_t4(ranks: int) -> None:
    """Not the laptop's: down to 1.6 GB a rank there is something that keeps a GPU busy."""
    share = share_of("1 x 15 GB, fp16", ranks)
    small = {need for need in NEEDS if choose_sizes(need, share).trial == NEEDS[need].laptop}
    assert small == set()


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_large_gpu_a_rank_trains_what_the_pages_tell(ranks: int) -> None:
    share = RankShare(ranks, "cuda", 138e9, True, 700e12)
    xl, l16 = GPT2_SIZES["1.5b"], SIZES["l16"]
    chosen = {need: choose_sizes(need, share).trial for need in NEEDS}
    wide = ViTSize(hidden=4096, layers=6, heads=32, mlp=16384, patch=16, image=224)
    expected = {
        "01": Trial(l16, 64), "01.wide": Trial(wide, 64), "02": Trial(l16, 256 * ranks),
        "03": Trial(l16, 1024), "04": Trial(l16, 512), "05": Trial(xl, 4), "06": Trial(xl, 4),
        "07": Trial(xl, 4), "08": Trial(GPT2Size(1024, 16, 16, 4096, 50257, 1024), 1),
    }  # fmt: skip
    assert {need: chosen[need] for need in expected} == expected
    assert (chosen["03.modes"].size.hidden, chosen["03.modes"].batch) == (4096, 256)  # type: ignore[union-attr]
    assert choose_sizes("01", share).bucket_mb == choose_sizes("05", share).bucket_mb == 25.0


def test_on_a_cpu_pages_train_what_they_always_have() -> None:
    share = RankShare(2, "cpu")
    small = ViTSize(hidden=256, layers=8, heads=8, mlp=1024, patch=8, image=32)
    half = replace(small, layers=4)
    trials = {
        "01": Trial(half, 16), "01.wide": Trial(replace(small, layers=1), 64),
        "02": Trial(small, 16), "03": Trial(small, 64),
    }  # fmt: skip
    chosen = {need: choose_sizes(need, share) for need in NEEDS}
    assert chosen["04"].trial == Trial(ViTSize(128, 4, 4, 512, 8, 32), 64)
    assert {need: chosen[need].trial for need in trials} == trials
    rows = {
        "05": (GPT2Size(192, 8, 6, 768, 1511, 64), 2), "06": (GPT2Size(128, 9, 4, 512, 8009, 48), 2),
        "07": (GPT2Size(400, 2, 25, 1600, 12_601, 256), 1), "08": (GPT2Size(128, 8, 8, 512, 1009, 64), 2),
    }  # fmt: skip
    assert {need: (chosen[need].size, chosen[need].batch) for need in rows} == rows
    assert {sizes.dtype for sizes in chosen.values()} == {torch.float32}
    assert (chosen["01"].few, chosen["01"].bucket_mb, chosen["05"].bucket_mb) == (2, 2.0, 2.0)
    assert choose_sizes("05", 2).share.device == hpnb.ranks.choose_device("auto", 2).device


def test_memory_time_and_ranks_decide() -> None:
    roomy = RankShare(4, "cuda", 138e9, True, 700e12)
    for smaller in (RankShare(4, "cuda", 4e9, True, 700e12), RankShare(4, "cuda", 138e9, True, 8e12)):
        for need in ("02", "05", "06", "08"):
            assert choose_sizes(need, smaller).trial != choose_sizes(need, roomy).trial
    assert choose_sizes("02", RankShare(2, "cuda", 60e9, True, 700e12)).batch < 1024
    lost = choose_sizes("05", RankShare(2, "cuda", 1e6))
    assert lost.trial == NEEDS["05"].laptop
    assert not lost.fits
    assert not lost.fits
    assert "not fit" in str(lost)


def test_05_prefers_wide_blocks_because_narrow_ones_are_launched_for_longer_than_they_compute() -> None:
    """FLOPs of an operator decide: an H100 launched 24 blocks of 1024 for 29 ms and computed for 51."""

    def flops_of_a_block(ranks: int, memory: float, bf16: bool) -> float:
        sizes = choose_sizes("05", RankShare(ranks, "cuda", memory, bf16, 150e12))
        return float(sizes.size.block(sizes.batch).forward_flops)

    def of(size: GPT2Size, rows: int) -> float:
        return size.block(rows).forward_flops

    assert flops_of_a_block(4, 20.5e9, True) > 2 * of(GPT2_SIZES["355m"], 4)
    assert flops_of_a_block(4, 3.75e9, False) > 2 * of(replace(GPT2_SIZES["124m"], length=512), 1)


def test_06_cuts_wide_blocks_on_one_shared_gpu() -> None:
    """Pipelines that take turns share their weights, so there is room for blocks that compute for long."""
    sizes = choose_sizes("06", RankShare(4, "cuda", 18.5e9, True, 150e12))
    large = GPT2_SIZES["774m"]
    assert sizes.size.block(sizes.batch).forward_flops > 5 * large.block(1).forward_flops
    least = choose_sizes("06", RankShare(4, "cuda", 3.8e9, False, 150e12))
    assert least.size.block(least.batch).forward_flops > 1.5 * GPT2_SIZES["124m"].block(1).forward_flops


def test_an_unknown_need_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'10'.*one of 01, 01.wide"):
        choose_sizes("10", RankShare(2, "cpu"))


def test_the_line_for_the_banner_has_the_numbers() -> None:
    sizes = choose_sizes("05", share_of("1 x 80 GB", 4))
    line = str(sizes)
    assert "GPT-2 of 12 blocks of 1600 (451 M" in line
    assert f"{sizes.batch} x 1,024 tokens" in line
    assert "bfloat16" in line
    assert f"predicted peak {sizes.peak / 1e9:.1f} of {sizes.share.memory / 1e9:.1f} GB free" in line
    assert "\n" not in line


def test_a_banner_says_why_on_a_gpu_alone(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = choose_sizes("05", share_of("1 x 80 GB", 4))
    assert str(sizes).startswith("GPT-2")
    lesson.banner(2, device="cpu", sizes=sizes)
    assert "GPT-2" not in capsys.readouterr().out


def test_predictions_are_those_of_the_theory() -> None:
    """05's fullest step is the one that `theory.step_memory` predicts for stage 0, and more."""
    size = GPT2_SIZES["124m"]
    block = size.block(1, bytes_per_value=2)
    step = theory.step_memory(block, size.layers, size.vocab_size, size.length).peak
    assert NEEDS["05"].peak(Trial(size, 1), 4, 2) == step + 5 * 2 * size.vocab_size * size.length
    two, eight = (NEEDS["02"].peak(Trial(SIZES["l16"], 256), ranks, 2) for ranks in (2, 8))
    assert two > 2 * eight


# --- pages ------------------------------------------------------------------------------------------


def test_every_page_reads_its_sizes_from_the_list() -> None:
    """No page decides by "GPU or not", and every need is asked for."""
    code = {
        path.stem[:2]: "\n".join(line.partition("#")[0] for line in path.read_text().splitlines())
        for path in NOTEBOOKS.glob("0*.py")
    }
    asked = {need for text in code.values() for need in re.findall(r'choose_sizes\("([\w.]+)"', text)}
    assert asked | {"03.modes"} == set(NEEDS)  # by vit_tensor.four_ranks
    for number, text in code.items():
        assert not re.search(
            r"is_available|device_count|if GPU\b|\bGPU =|torch\.bfloat16 if|else torch\.float32", text
        ), number


# --- measured values --------------------------------------------------------------------------------


class FakePool:
    """Answers `run(_measure)` as ranks on GPUs would."""

    def __init__(self, *answers: tuple[str, float, bool, float]) -> None:
        self.answers = list(answers)
        self.choice = hpnb.ranks.DeviceChoice(len(answers), "cuda", "nccl", 1, "")

    def run(self, _: object) -> list[tuple[str, float, bool, float]]:
        return self.answers


def test_ranks_share_what_is_free_on_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPNB_GPU_MEMORY_GB", raising=False)
    pool = FakePool(("a", 12e9, True, 9e12), ("a", 12.1e9, True, 8e12), ("b", 7e9, False, 9e12))
    share = rank_share.measure_share(pool)  # type: ignore[arg-type]
    assert share == RankShare(3, "cuda", 6e9, False, 8e12)
    assert share.dtype == torch.float16
    monkeypatch.setenv("HPNB_GPU_MEMORY_GB", "5")
    assert rank_share.measure_share(pool).memory == 2.5e9  # type: ignore[arg-type]


def test_a_simulated_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HPNB_GPU_MEMORY_GB", "HPNB_NO_BF16"):
        monkeypatch.delenv(name, raising=False)
    assert gpu_limits.gpu_memory_limit() is None
    assert not gpu_limits.bf16_denied()
    monkeypatch.setenv("HPNB_GPU_MEMORY_GB", "15")
    monkeypatch.setenv("HPNB_NO_BF16", "1")
    assert gpu_limits.gpu_memory_limit() == 15e9
    assert gpu_limits.bf16_denied()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert hpnb.precision.best_16_bit("cuda") == "fp16"
    assert hpnb.precision.best_16_bit("cpu") == "bf16"
    limited = Counter[float]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 60 * 10**9})
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, _: limited.update([f]))
    gpu_limits.limit_gpu_memory(torch.device("cpu"), 4)
    assert not limited
    gpu_limits.limit_gpu_memory(torch.device("cuda", 0), 2)  # two ranks on each GPU
    assert limited == {7.5 / 60: 1}
    monkeypatch.delenv("HPNB_GPU_MEMORY_GB")
    gpu_limits.limit_gpu_memory(torch.device("cuda", 0), 1)
    assert limited.total() == 1


@pytest.mark.parametrize("text", ["lots", "0", "-3", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HPNB_GPU_MEMORY_GB", text)
    with pytest.raises(ValueError, match=f"HPNB_GPU_MEMORY_GB='{text}'.* 15"):
        gpu_limits.gpu_memory_limit()


# --- a GPU that is full -----------------------------------------------------------------------------


def test_a_full_gpu_is_described_by_who_holds_what() -> None:
    layer = torch.nn.Linear(300, 200, bias=False)
    layer(torch.ones(1, 300)).sum().backward()
    kept = torch.ones(7, 11, 13)
    with FakeTensorMode():
        fake = torch.ones(17, 19)
    groups = out_of_memory.live_tensors("cpu")
    assert groups["parameters", (200, 300), "float32"] >= 240_000
    assert groups["gradients", (200, 300), "float32"] >= 240_000
    assert groups["other tensors", (7, 11, 13), "float32"] == kept.nbytes
    assert ("other tensors", tuple(fake.shape), "float32") not in groups  # it has no memory
    mine = Counter({key: n for key, n in groups.items() if key[1] in ((200, 300), (7, 11, 13))})
    text = out_of_memory.describe("Tried to allocate 2.00 GiB. GPU 0 ...", 1e9, 3e9, mine)
    assert "2.15 GB" in text
    assert "1.00 GB" in text
    assert "3.00 GB" in text
    assert "ranks on this GPU" not in text
    assert "3.00 GB, its part of 2 ranks on this GPU" in out_of_memory.describe("", 1e9, 3e9, mine, 2)
    assert "(200, 300) float32, parameters" in text
    words = "Tried to allocate 1.00 GiB. Of the allocated memory 2.00 GiB is allocated by PyTorch, and 1 MiB"
    assert "2.15 GB were in use" in out_of_memory.describe(words, 1e9, 3e9, mine)
    others = [
        out_of_memory.describe("Tried to allocate 1.00 GiB", 1e9, 4e9, mine, 2, free) for free in (4e8, 2e9)
    ]
    assert ["0.40 GB of the GPU are free" in text for text in others] == [True, False]
    assert out_of_memory.reading(ValueError("no")) is None


def run_out(*, alone: bool) -> str:
    if not alone or hpnb.rank() == 0:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")
    torch.distributed.barrier()
    return "done"


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_that_runs_out_of_memory_says_who_holds_it(alone: bool) -> None:
    with hpnb.Ranks(2, device="cpu") as pool:
        pool.run(pretend_to_have_a_gpu)
        with pytest.raises(hpnb.RankError, match=r"1\.61 GB more do not fit") as caught:
            pool.run(run_out, alone=alone)
        assert pool.alive is not alone
    assert "File " not in str(caught.value)
    assert "Traceback" not in str(caught.value)


def pretend_to_have_a_gpu() -> None:
    def memory(_: object) -> int:
        return 10**9

    torch.cuda.mem_get_info = lambda *_: (10**10, 10**10)
    torch.cuda.current_device = lambda: 0
    torch.cuda.memory_allocated = memory
    torch.cuda.get_device_properties = lambda _: type("P", (), {"total_memory": 2 * 10**9})


def over_budget() -> hpnb.record.OutOfBudget | None:
    model = torch.nn.Linear(64, 64)
    try:
        with hpnb.record.memory(model, budget=20_000):
            model(torch.ones(512, 64)).sum().backward()
    except hpnb.record.OutOfBudget as error:
        return error.with_traceback(None)
    return None


def test_an_exceeded_budget_is_a_reading(capsys: pytest.CaptureFixture[str]) -> None:
    for stopped in hpnb.launch(over_budget, ranks=2, device="cpu"):
        lesson.survivors_table(stopped)
    said = capsys.readouterr().out
    assert "64x64" in said
    assert "parameters" in said


def test_nothing_here_is_infinite() -> None:
    assert math.isinf(RankShare(2, "cpu").memory)
    sizes = PageSizes("05", NEEDS["05"].laptop, RankShare(2, "cpu"))
    assert sizes.fits


# --- fp16 -------------------------------------------------------------------------------------------


def train_in_fp16(stage: int) -> tuple[float, float, float]:
    """(the first loss, the last one, the scale) of a few steps."""
    size = GPT2Size(hidden=32, layers=2, heads=2, mlp=128, vocab_size=61, length=16)
    program = gpt2_zero.build_program(size, 2, torch.float16, gpt2_zero.ZeroConfig(stage), 0.01)
    assert program.scaler is not None
    losses = []
    for _ in range(6):
        program.step()
        losses.append(float(program.wrapped(**program.batch).loss.detach()))
    return losses[0], losses[-1], program.scaler.scale


def test_every_zero_stage_of_notebook_05_trains_in_fp16() -> None:
    with hpnb.Ranks(2, device="cpu") as pool:
        for stage in range(4):
            first, last, scale = pool.run(train_in_fp16, stage)[0]
            assert last < first < 10
            assert scale > 1
