"""Files of results: runs that measured something else stand apart, and a part of a run replaces no more than
that part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpnb.bench import __main__ as command
from hpnb.bench import result_files, tables, tasks
from hpnb.bench.results import BenchmarkRun, LayoutResult, ProgramResult

ORDER = {"dp2": {"hpnb": 1.0, "DDP": 2.0, "FSDP2": 3.0}}


def run_of(
    day: int, programs: dict[str, dict[str, float]], title: str = "a model", asked: tuple[str, ...] = ()
) -> BenchmarkRun:
    """A run on that day, with the seconds of a step of each program; 0 for one that failed."""
    measured = {
        layout: LayoutResult(
            layout, 2, "tokens", 1000, 8e12, 4e12,
            tuple(ProgramResult(name, name.startswith("hpnb"), failed="" if seconds else "it broke")
                  for name, seconds in of_layout.items()),
            ({name: [seconds] * 3 for name, seconds in of_layout.items() if seconds},),
        )
        for layout, of_layout in programs.items()
    }  # fmt: skip
    made = BenchmarkRun(
        "gpt2-xl", f"{title}; 2 x a GPU", title, f"2026-01-0{day}T00:00:00+00:00", f"commit{day}", "a GPU", 2,
        {"torch": "2.15.0"}, measured,
    )  # fmt: skip
    made.candidates = list(asked)
    return made


def test_a_run_of_some_programs_replaces_no_result_of_more(tmp_path: Path) -> None:
    part = {"dp2": {"hpnb": 0.5, "DDP": 1.0}, "pp2": {"hpnb": 1.0}}
    for run in (run_of(1, ORDER), run_of(2, part, asked=("hpnb", "DDP"))):
        result_files.write(run, tmp_path)
    read = result_files.named(tmp_path)
    (merged,) = result_files.newest(list(read.values()))
    assert {name: [one.name for one in measured.entries] for name, measured in merged.layouts.items()} == {
        "dp2": ["hpnb", "DDP", "FSDP2"], "pp2": ["hpnb"]
    }  # fmt: skip
    assert merged.commit == "commit1 and commit2"
    assert result_files.sources(read, merged.key) == list(read)
    assert result_files.table(tmp_path).splitlines()[-1] == (
        "dp2 of 2026-01-02 at commit2 (a model) is not in these tables: it has only programs that "
        "--candidates asked for, and an earlier run has FSDP2 too."
    )


def test_a_run_of_some_programs_alone_does_not_date_the_tables() -> None:
    part = run_of(2, {"dp2": {"hpnb": 0.5, "DDP": 0.0, "FSDP2": 1.0}}, asked=("hpnb",))  # DDP failed
    (merged,) = result_files.newest([run_of(1, ORDER), part])
    assert (merged.date[:10], merged.commit) == ("2026-01-01", "commit1")
    assert len(result_files.left_out([run_of(1, ORDER), part])) == 1
    assert result_files.sources({"a": run_of(1, ORDER), "b": part}, merged.key) == ["a"]


def test_a_run_of_some_programs_that_has_all_of_the_earlier_ones_replaces_them() -> None:
    faster = {"dp2": {name: seconds / 2 for name, seconds in ORDER["dp2"].items()}}
    for later in (run_of(3, faster, asked=("hpnb", "D")), run_of(3, {"dp2": {"hpnb": 0.5}})):
        runs = [run_of(1, ORDER), run_of(2, {"dp2": {"hpnb": 9.0}}, asked=("hpnb",)), later]
        (merged,) = result_files.newest(runs)
        assert merged.layouts["dp2"].seconds("hpnb") == 0.5
        assert result_files.left_out(runs) == []


@pytest.mark.slow  # test_bench_layouts.py runs the command
def test_a_run_says_which_programs_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", [
        "hpnb.bench", "gpt2-xl", "--device", "cpu", "--ranks", "2", "--rounds", "1", "--layouts", "dp2",
        "--candidates", "hpnb", "--rows", "2", "--out", str(tmp_path),
    ])  # fmt: skip
    command.main()
    (run,) = result_files.read(tmp_path)
    assert run.candidates == ["hpnb"]
    assert "only programs that --candidates asked for were measured" in capsys.readouterr().out
    assert run.forward_samples == 2
    assert ", forwards of up to 2 samples, global batch 8 x 16 tokens; 2 x " in run.key


def test_runs_with_other_forwards_stand_in_tables_of_their_own(tmp_path: Path) -> None:
    def title(**options: Any) -> str:
        return tasks.make_task("gpt2-xl", "cuda", 4, **options).title

    assert title() == title(rows=16) == title(rows=99)  # no program differs
    assert len({title(), title(rows=4), title(rows=8)}) == 3
    many = title(rows=4, microbatches=32)
    for day, one in enumerate((title(), title(rows=4), many), 1):
        result_files.write(run_of(day, ORDER, title=one), tmp_path)
    runs = result_files.newest(result_files.read(tmp_path))
    assert [(run.microbatches, run.forward_samples) for run in runs] == [(0, 0), (0, 4), (32, 4)]
    first = [line.split(" | ")[0] for line in tables.summary(runs).splitlines()[2:]]
    assert first[1] == "| gpt2-xl, 2 x a GPU, forwards of up to 4 samples"
    usual = tables.summary(runs[:1], throughput=False)
    assert result_files.short_table(tmp_path).splitlines() == usual.splitlines()
    with pytest.raises(ValueError, match="forwards of -1 samples compute nothing; use 1 or more"):
        title(rows=-1)


def test_the_best_peer_is_the_first_of_all_peers() -> None:
    """Beside hpnb's best, "a" was slower than alone: both rankings go by all of its steps."""
    entries = (ProgramResult("hpnb", True), ProgramResult("a", False), ProgramResult("b", False))
    waves = ({"hpnb": [1.0] * 3, "a": [3.0] * 3}, {"a": [1.0] * 5}, {"b": [2.0] * 3})
    result = replace(run_of(1, ORDER).layouts["dp2"], entries=entries, waves=waves)
    best = result.fastest(ours=False)
    assert best is not None
    assert best.name == "a"
    assert [one.name for one in tables.peers(result)] == ["a", "b"]


def test_losses_of_other_layouts_stay_and_keep_the_noise_of_their_run() -> None:
    first, second = run_of(1, ORDER), run_of(2, {})
    first.losses = {"steps": 30, "serial": [1.0], "order": 1e-6, "layouts": {
        "dp2 hpnb": {"distance": 2e-6}, "tp2 hpnb": {"distance": 9e-6},
    }}  # fmt: skip
    second.losses = {"steps": 30, "serial": [1.0], "order": 2e-6, "layouts": {
        "tp2 hpnb": {"distance": 8e-6, "rounding": 1.0},
    }}  # fmt: skip
    (merged,) = result_files.newest([first, second])
    assert list(tables._losses(merged)) == ["dp2 hpnb 2.00", "tp2 hpnb 4.00 (1.00 times one GPU's rounding)"]
    second.losses["steps"] = 50  # losses after another number of steps do not stand beside them
    (merged,) = result_files.newest([first, second])
    assert list(tables._losses(merged)) == ["tp2 hpnb 4.00 (1.00 times one GPU's rounding)"]
