"""The benchmarks run, and compare like with like. What they measure is never asserted."""

from __future__ import annotations

import re

import pytest
import torch

import hpnb
from hpnb import Layout, Mesh
from hpnb.bench import data_parallel, pipeline
from hpnb.bench.report import Row, table
from hpnb.pipeline_parallel import Costs, schedules


def test_every_contest_prints_a_table() -> None:
    found = data_parallel.run(2, pairs=2, device="cpu").split("\n\n")
    assert len(found) == len(data_parallel.CONTESTS)
    for text, contest in zip(found, data_parallel.CONTESTS, strict=True):
        for name in data_parallel.NAMES[contest]:
            assert re.search(rf"^{re.escape(name)} +[\d.]+ ms", text, re.MULTILINE)
        assert re.search(r"pair by pair: median \d\.\d{3}, quartiles", text)


def same_training() -> dict[str, float]:
    """The largest relative distance of the weights of both candidates of a contest after four steps."""
    axis = Mesh(Layout(dp=hpnb.world_size())).dp
    task = data_parallel.tasks(torch.device("cpu"))[0]
    found = {}
    for contest, candidates in data_parallel.CONTESTS.items():
        built: list[torch.nn.Module] = []

        def build(kept: list[torch.nn.Module] = built) -> torch.nn.Module:
            torch.manual_seed(0)
            kept.append(task.build())
            return kept[-1]

        same = data_parallel.Task(task.name, build, lambda: _batch(axis.rank), task.units, task.dtype)
        for step in [candidate(same, axis) for candidate in candidates]:
            for _ in range(4):
                step()
        states = [hpnb.placement.full_state_dict(built[0], [axis]), _whole(built[1])]
        found[contest] = max(
            float((states[0][n] - t).norm() / t.norm().clamp(min=1e-3)) for n, t in states[1].items()
        )
    return found


def _batch(rank: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=g), "labels": torch.arange(4) + rank}


def _whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.state_dict().items()}


def test_both_of_a_contest_train_the_same() -> None:
    for distances in hpnb.launch(same_training, ranks=2, device="cpu", timeout=120):
        assert set(distances) == set(data_parallel.CONTESTS)
        for contest, distance in distances.items():
            assert distance < 1e-4, contest


def test_a_table_has_ratios_to_its_first_row() -> None:
    text = table("title", [Row("a", (0.001, 0.003, 0.002)), Row("b", (0.004,) * 3)])
    assert text.splitlines()[2].split() == ["a", "2.00", "ms", "1.50", "to", "2.50", "ms", "1.00"]
    assert text.splitlines()[3].split()[-1] == "2.00"


@pytest.mark.gpu
def test_a_contest_on_gpus_tells_memory() -> None:
    assert "memory rises" in data_parallel.run(2, pairs=1, device="cuda", contests=["replicas"])


def same_pipelines() -> dict[str, tuple[float, float]]:
    """By contest: how far the weights of this rank's stages are apart after three steps of both candidates,
    and how far they have come."""
    axis, task = Mesh(Layout(pp=hpnb.world_size())).pp, pipeline.tasks(torch.device("cpu"))[0]
    found = {}
    for contest in pipeline.CONTESTS:
        built: list[torch.nn.Module] = []

        def build(kept: list[torch.nn.Module] = built) -> torch.nn.Module:
            torch.manual_seed(0)
            kept.append(task.build())
            return kept[-1]

        def batch(m: int) -> tuple[torch.Tensor, torch.Tensor]:
            torch.manual_seed(1)
            return task.batch(m)

        same = pipeline.Task(task.name, build, batch, task.enter, task.dtype)
        for make in (pipeline._hpnb, pipeline._torch):
            step = make(same, axis, contest, 4)
            for _ in range(3):
                step()
        start = {name: p.detach() for name, p in build().named_parameters()}
        ours, theirs = (dict(model.named_parameters()) for model in built[:2])
        moved = [name for name, p in start.items() if not torch.equal(p, ours[name])]
        apart = sum(float((ours[name] - theirs[name]).square().sum()) for name in start)
        came = sum(float((ours[name] - start[name]).square().sum()) for name in moved)
        found[contest] = apart**0.5, came**0.5
    return found


def test_both_pipelines_train_the_same() -> None:
    for found in hpnb.launch(same_pipelines, ranks=2, device="cpu", timeout=120):
        for contest, (apart, came) in found.items():
            assert came > 0, contest
            assert apart < 0.02 * came, (contest, apart, came)  # AdamW magnifies rounding


def test_the_pipelines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.run(2, 2, "cpu", ("1f1b", "zb-h1"), (4,), 0.25)
    pipeline.bubbles(2, "cpu", (2,), 0.25)
    text = capsys.readouterr().out
    assert len(re.findall(r"pair by pair: median \d\.\d{3}, quartiles", text)) == 2
    rows = {"hpnb 1f1b": 1, "hpnb zb-h1 (peak in flight as 1f1b)": 1, "torch Schedule1F1B": 2}
    for row, times in rows.items():
        assert len(re.findall(rf"^{re.escape(row)} +[\d.]+ ms", text, re.MULTILINE)) == times, row
    for name in pipeline.BUBBLES:
        assert re.search(rf"^{name} +2 +[\d.]+ % +[\d.]+ %", text, re.MULTILINE)
    assert "gpipe:" not in text  # its microbatches are whole on a CPU


def test_zb_h1_contends_with_the_peak_of_1f1b() -> None:
    for ranks, m in ((2, 8), (4, 16)):
        made = (schedules.make(name, ranks, m).simulate(Costs()) for name in ("zb-h1", "1f1b"))
        peaks = [max(map(tl.peak_in_flight, tl.ranks)) for tl in made]
        assert peaks == [ranks, ranks]


def test_gpipe_has_smaller_microbatches_where_all_of_them_would_not_fit() -> None:
    device = torch.device("cuda")  # nothing is built
    for place, whole in enumerate(pipeline.tasks(device)):
        for name in pipeline.BUBBLES:
            same = pipeline.task_for(name, device, place, 1.0).name == whole.name
            assert same == (name != "gpipe" or whole.held_all == 1), (name, whole.name)
        assert ("gpipe" in pipeline.bubble_title(whole)) == (whole.held_all != 1)
    images = pipeline.task_for("gpipe", device, 0, 1.0)
    assert images.name == pipeline.tasks(device, 0.5)[0].name
    assert pipeline.bubble_title(pipeline.tasks(device)[0]).endswith(" (gpipe: 0.5 of that)")
