"""The benchmarks run, and compare like with like. What they measure is never asserted."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hpnb
from hpnb.bench import __main__ as command
from hpnb.bench import data_parallel, launch, pipeline, tables, tensor, worker
from hpnb.bench.harness import print_contest, rank_pools
from hpnb.bench.results import LayoutResult, ProgramResult
from hpnb.bench.tasks import TrainingTask
from hpnb.mesh import ParallelLayout
from hpnb.models import GPT2Size, ViTSize
from hpnb.pipeline_parallel import Costs, schedules

# On two ranks: torch pads 17 tokens, and 53 tokens of a vocabulary are uneven.
TINY = (ViTSize(48, 4, 4, 96, 8, 32), GPT2Size(48, 4, 4, 96, 53, 12))


ROW = r" +[\d.]+ ms +[\d.,]+ +[\d.e+-]+ +[\d.]+%"


def count_rows(text: str, name: str) -> int:
    """Rows of a program that has times."""
    return len(re.findall(rf"^  {re.escape(name)}{ROW}", text, re.MULTILINE))


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands train is small here."""
    for module in (data_parallel, pipeline):
        tasks = module.tasks
        monkeypatch.setattr(
            module, "tasks", lambda *a, tasks=tasks: [replace(one, size=TINY[0]) for one in tasks(*a)]
        )
    make_task = tensor.make_task
    monkeypatch.setattr(tensor, "make_task", lambda *a: replace(make_task(*a), size=TINY[a[1] == "gpt2"]))


def replicas_are_printed(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    data_parallel.run(2, 2, "cpu", ("zero1", "zero3"), 1)
    text = capsys.readouterr().out
    for contest in ("zero1", "zero3"):
        ours, theirs = data_parallel.CONTESTS[contest]
        assert count_rows(text, ours.name) == count_rows(text, theirs.name) == 1, text
        assert re.search(rf"^{contest}: matmuls alone", text, re.MULTILINE)
        assert f"  {ours.name} over {theirs.name}: " in text
        assert f"{contest}, both programs: float32 throughout\n" in text


class Kept(TrainingTask):
    """Remembers the models that are built."""

    models: list[torch.nn.Module]

    def build(self) -> torch.nn.Module:
        vars(self).setdefault("models", []).append(super().build())
        return self.models[-1]


def same_training() -> dict[str, float]:
    """The largest relative distance of the weights of both programs of a contest after four steps."""
    layout, distances = ParallelLayout(dp=hpnb.world_size()), {}
    axis = hpnb.Mesh(hpnb.Layout(dp=layout.dp)).dp
    for contest, programs in data_parallel.CONTESTS.items():
        task = Kept("tiny", TINY[0], 8, 4, 32)
        for candidate in programs:
            worker.take_steps(candidate.build(task, layout), 4)
        states = [hpnb.placement.full_state_dict(task.models[0], [axis]), _full(task.models[1])]
        distances[contest] = max(
            float((states[0][n] - t).norm() / t.norm().clamp(min=1e-3)) for n, t in states[1].items()
        )
    return distances


def _full(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.state_dict().items()}


def test_both_of_a_contest_train_the_same() -> None:
    for distances in hpnb.launch(same_training, ranks=2, device="cpu", timeout=120):
        assert set(distances) == set(data_parallel.CONTESTS)
        for contest, distance in distances.items():
            assert distance < 1e-4, contest


def share_moved() -> list[float]:
    """Of hpnb's and PyTorch's ZeRO stage 1 in bf16: which share of weights has moved after 12 steps, of those
    of which one step's update is less than half of a bf16's last digit."""
    layout = ParallelLayout(dp=hpnb.world_size())
    task = Kept("tiny", TINY[0], 8, 4, 16, lr=1e-5)
    start = {name: p.detach().clone() for name, p in task.build().named_parameters()}
    for candidate in data_parallel.CONTESTS["zero1"]:
        worker.take_steps(candidate.build(task, layout), 12)
    return [moved_share(start, _full(model)) for model in task.models[1:]]


def moved_share(start: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> float:
    large = {name: p.abs() > 0.01 for name, p in start.items() if p.dim() == 2}
    moved = 0
    for name, at in large.items():
        moved += int((state[name].bfloat16() != start[name].bfloat16())[at].sum())
    return moved / sum(int(at.sum()) for at in large.values())


def test_both_of_zero_1_keep_master_weights() -> None:
    for ours, theirs in hpnb.launch(share_moved, ranks=2, device="cpu", timeout=120):
        assert ours > 0.3
        assert theirs == pytest.approx(ours, rel=0.05)
    assert set(data_parallel.PRECISIONS) == set(data_parallel.CONTESTS)


def test_a_table_has_ratios_to_its_first_row() -> None:
    text = launch.table("title", {"a": [0.001, 0.003, 0.002], "b": [0.004] * 3})
    assert text.splitlines()[2].split() == ["a", "2.00", "ms", "1.50", "to", "2.50", "ms", "1.00"]
    assert text.splitlines()[3].split()[-1] == "2.00"


@pytest.mark.gpu
def test_a_contest_on_gpus_tells_memory(capsys: pytest.CaptureFixture[str]) -> None:
    data_parallel.run(2, 1, "cuda", ["replicas"], 1)
    assert len(re.findall(r" ms .* [\d.]+ GiB", capsys.readouterr().out)) == 4


def same_pipelines(size: ViTSize | GPT2Size) -> dict[str, tuple[float, float]]:
    """By contest, after three steps: how far the weights that hpnb and torch train on this rank are from
    each other, and from where they began."""
    layout, distances = ParallelLayout(pp=hpnb.world_size()), {}
    for contest in pipeline.CONTESTS:
        if contest == "zb-v" and torch.__version__ < "2.15":
            continue  # ScheduleZBVZeroBubble of older releases sends itself a message, which gloo cannot
        task = Kept("tiny", size, 8, 2, 32, microbatches=4)
        start = {name: p.detach().clone() for name, p in task.build().named_parameters()}
        for candidate in pipeline.candidates(contest):
            worker.take_steps(candidate.build(task, layout), 3)
        ours, theirs = ({n: p.detach() for n, p in m.named_parameters()} for m in task.models[1:])
        # torch's last stage has a copy of the embedding under another name
        moved = [n for n, p in start.items() if not (torch.equal(p, ours[n]) or torch.equal(p, theirs[n]))]
        assert len(moved) > len(start) / 3
        apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in moved)
        came = sum(float((ours[name] - start[name]).square().sum()) for name in moved)
        distances[contest] = apart**0.5, came**0.5
    return distances


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", TINY, ids=["vit", "gpt2"])
def test_both_pipelines_train_the_same(size: ViTSize | GPT2Size) -> None:
    for distances in hpnb.launch(same_pipelines, size, ranks=2, device="cpu", timeout=120):
        for contest, (apart, came) in distances.items():
            assert came > 0, contest
            assert apart < 0.02 * came, (contest, apart, came)  # AdamW magnifies rounding


def pipelines_are_printed(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pipeline.run(2, 2, "cpu", ("zb-h1",), (4,), 0.25, bubbles=False)
    pipeline.run(2, 2, "cpu", None, (2,), 0.25, bubbles=True)
    text = capsys.readouterr().out
    for row, times in {"hpnb zb-h1": 1, "torch Schedule1F1B": 1}.items():
        assert count_rows(text, row) == times, text
    for name in pipeline.BUBBLES:
        assert re.search(rf"^{name} +2 +[\d.]+ % +[\d.]+ %", text, re.MULTILINE)
    assert "gpipe:" not in text  # its microbatches are as large as the others' on a CPU


def test_zb_h1_contends_with_the_peak_of_1f1b() -> None:
    for ranks, m in ((2, 8), (4, 16)):
        simulated = (schedules.make(name, ranks, m).simulate(Costs()) for name in ("zb-h1", "1f1b"))
        peaks = [max(map(tl.peak_in_flight, tl.ranks)) for tl in simulated]
        assert peaks == [ranks, ranks]


def test_gpipe_has_smaller_microbatches_where_all_of_them_would_not_fit() -> None:
    images, sequences = pipeline.tasks("cuda", 8)
    assert [pipeline.gpipe_share("gpipe", task) for task in (images, sequences)] == [0.5, 1.0]
    h100s, two_h100s = 4 * 85e9, 2 * 85e9
    assert [pipeline.gpipe_share("gpipe", images, memory) for memory in (h100s, two_h100s)] == [0.25, 0.125]
    assert pipeline.gpipe_share("gpipe", images, 8 * 140e9) == 0.5
    assert pipeline.gpipe_share("1f1b", images, h100s) == 1.0
    assert pipeline.bubble_title(images).endswith("128 images (gpipe: 0.5 of that)")
    assert "gpipe" not in pipeline.bubble_title(sequences)
    assert pipeline.tasks("cuda", 8, 0.5)[0].batch == images.batch / 2 == 512


def losses_of(size: ViTSize | GPT2Size) -> dict[str, list[float]]:
    task, ranks = TrainingTask("tiny", size, 6, 6, 64, lr=1e-3), hpnb.world_size()
    programs = tensor.candidates(task, ranks)
    del programs["2d"]  # is not for two ranks
    layout = ParallelLayout(tp=ranks)
    losses: dict[str, list[float]] = {name: [] for name in programs}
    for name, candidate in programs.items():
        program = candidate.build(task, layout)
        for _ in range(3):  # of the same batch, so that learning shows
            program.step()
            losses[name].append(program.loss())
    return losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", TINY, ids=["vit", "gpt2"])
def test_tensor_parallel_candidates_train_the_same_model(size: ViTSize | GPT2Size) -> None:
    for losses in hpnb.launch(losses_of, size, ranks=2, device="cpu", timeout=120):
        one = torch.tensor(losses["1d"])
        assert one[0] - one[-1] > 1e-4 * one[0]  # it learns, so gradients and updates show
        for name, others in losses.items():
            assert (torch.tensor(others) - one).abs().max() < 1e-10 * one[0], name


def matrices_are_printed(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    tensor.run(2, 2, "cpu", ("vit",), 2, profile=str(folder))
    text = capsys.readouterr().out
    for name in ("hpnb 1d", "hpnb 1d, sequence parallel", "torch", "torch, SequenceParallel (18 tokens)"):
        assert re.search(rf"^  {re.escape(name)}{ROW}.* [\d.]+ MiB leave", text, re.MULTILINE), (name, text)
    assert re.search(r"^  hpnb 2d .*\b2\b", text, re.MULTILINE)
    traces = sorted(path.name for path in folder.iterdir())
    assert len(traces) == 2
    assert all(re.fullmatch(r"vit-tp2-(hpnb-1d|torch).*\.json", name) for name in traces)
    assert len(re.findall(r"^ +[\d.]+ ms +[\d.]+% +\d+ x  \S", text, re.MULTILINE)) == 24


@pytest.mark.slow  # a command of test_bench_layouts.py prints one too
@pytest.mark.sampled(1)
@pytest.mark.parametrize("printed", [replicas_are_printed, pipelines_are_printed, matrices_are_printed])
def test_a_benchmark_prints_its_table(
    printed: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_models: None
) -> None:
    printed(capsys, tmp_path)


def test_torch_is_left_out_where_heads_do_not_divide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = GPT2Size(40, 2, 5, 40, 53, 12)
    monkeypatch.setattr(tensor, "make_task", lambda *_: TrainingTask("tiny", size, 2, 2, 32))
    tensor.run(2, 1, "cpu", ("gpt2",), candidate=("1d", "torch"))
    text = capsys.readouterr().out
    assert count_rows(text, "hpnb 1d") == 1
    assert re.search(r"^  torch +torch's plan cannot give 2 ranks as many of 5 heads", text, re.MULTILINE)


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="batch=0"):
        tensor.run(2, 1, device="cpu", batch=0)
    for arguments in (["tensor", "--rounds", "0"], ["pipeline", "--pairs", "0"]):
        monkeypatch.setattr("sys.argv", ["hpnb.bench", *arguments])
        with pytest.raises(SystemExit, match=f"{arguments[1]} 0 measures nothing"):
            command.main()


@pytest.mark.parametrize("name", list(command._COMMANDS))
def test_help_explains_every_option(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer reads what an option is and what it is by default, and "in turns" is one thing alone."""
    _, _, options = command._COMMANDS[name]
    for flag, settings in options.items():
        words = settings.get("help")
        assert words, f"{name} {flag}"
        assert (
            "default" in words or settings.get("action") == "store_true" or flag in ("--profile", "--losses")
        )
    monkeypatch.setattr("sys.argv", ["hpnb.bench", name, "--help"])
    with pytest.raises(SystemExit):
        command.main()
    text = " ".join(capsys.readouterr().out.split())
    assert "turns" not in text or name == "launch"
    assert "%(" not in text


def test_bytes_that_leave_a_rank_are_in_its_row() -> None:
    entries = (ProgramResult("hpnb", True, sent=3 * 2.0**20), ProgramResult("torch", False))
    result = LayoutResult("tp2", 2, "images", 8, 8e12, 4e12, entries, ({"hpnb": [1.0], "torch": [2.0]},))
    _, ours, theirs, _ = tables.layout_rows(result)
    assert ours.endswith(" 3.0 MiB leave a rank")
    assert theirs.endswith(" 2.000 [2.000, 2.000]")


def test_bytes_that_leave_a_rank_are_those_of_the_rank_with_most() -> None:
    task = TrainingTask("tiny", TINY[0], 4, 4, 32)
    candidate = tensor.candidates(task, 2)["1d"]
    with rank_pools("cpu", 60.0) as pools:
        result = print_contest(pools, task, "tp2", ParallelLayout(tp=2), [candidate], 1, count_bytes=True)
    # 4 blocks: 2 all-reduces each way of (4, 17, 48) float32, of which half leaves each of 2 ranks twice
    assert result.entries[0].sent >= 16 * 4 * 17 * 48 * 4


def test_no_garbage_is_collected_inside_a_timed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    seen: list[bool] = []
    assert worker.time_step(lambda: seen.append(gc.isenabled())) >= 0

    def fails() -> None:
        seen.append(gc.isenabled())
        raise ValueError

    with pytest.raises(ValueError):
        worker.time_step(fails)
    assert seen == [False, False]
    assert gc.isenabled()


def test_names_of_programs_with_commas_are_separated_by_semicolons() -> None:
    from hpnb.bench.__main__ import _split_names

    assert _split_names("hpnb, DDP,") == ["hpnb", "DDP"]
    assert _split_names("hpnb 1f1b; hpnb, sequence parallel") == ["hpnb 1f1b", "hpnb, sequence parallel"]
