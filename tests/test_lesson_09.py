"""Notebook 09: what it plans with, its figures, what its checks and its explorer say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hpnb import ParallelLayout, lesson
from hpnb.bench import result_files
from hpnb.lesson.exercises import plan_at_scale as exercises
from hpnb.lesson.figures import plan_at_scale as figures
from hpnb.lesson.programs import cluster_planning
from hpnb.lesson.programs.cluster_planning import MODELS
from hpnb.theory.cluster import Cluster, GPTRun, cluster_parts
from hpnb.theory.planner import best_layout
from hpnb.theory.published_runs import CHECKPOINT_BYTES, LLAMA_3_EACH, WRITTEN


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))


def step(run: GPTRun, given: Cluster, plan: ParallelLayout) -> float:
    return sum(cluster_parts(run, given, plan).values())


# --- what it plans with ------------------------------------------------------------------------------


def test_clusters_have_the_nics_of_their_network() -> None:
    one, each = (
        cluster_planning.cluster(512, f"Ethernet 100 Gb, one NIC per {of}", 16) for of in ("node", "GPU")
    )
    assert (one.cards, each.cards, one.host) == (1, 16, 16)
    assert one.link(512, 16).bandwidth == 12.5e9
    assert each.link(512, 16).bandwidth == 200e9
    assert one.share == cluster_planning.fitted_cluster().share
    with pytest.raises(ValueError, match="no network 'Token Ring'; there are HDR"):
        cluster_planning.cluster(8, "Token Ring")


def longer(run: GPTRun, nodes: Cluster, plan: ParallelLayout, what: str) -> float:
    halved = cluster_planning.halve_field(nodes, cluster_planning.FIELDS[what])
    return step(run, halved, plan) / step(run, nodes, plan) - 1


def test_halving_tells_what_a_step_rests_on() -> None:
    run, given = MODELS["39.1B"], cluster_planning.cluster(512)
    plan = best_layout(run, given)
    parts = cluster_parts(run, given, plan)
    more = (parts["memory"] + parts["optimizer"]) / sum(parts.values())
    found = {what: longer(run, given, plan, what) for what in cluster_planning.FIELDS}
    assert found["memory"] == pytest.approx(more, rel=0.1)  # the bubble has some as well
    assert found["memory"] >= more
    assert found["matmuls"] > found["inside"] > 0
    slow = cluster_planning.double_latency(given, "inside")
    assert slow.inside == replace(given.inside, latency=2 * given.inside.latency)
    assert replace(slow, inside=given.inside) == given
    one_node = replace(given, gpus=8, host=8)
    assert longer(MODELS["1.7B"], one_node, ParallelLayout(8), "between") == 0.0


def test_own_runs_are_those_that_the_package_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cluster_planning.benchmarked_runs()
    assert {"dp2", "tp2", "pp2"} <= set(found)
    kept = next(
        run for run in result_files.newest(result_files.read()) if (run.what, run.ranks) == ("gpt2-xl", 2)
    )
    for name, one in found.items():
        best = kept.layouts[name].fastest(True)
        assert best is not None
        assert one.measured == kept.layouts[name].tflops(best.name)
        assert one.plan_command == pytest.approx(one.measured, rel=0.1)
        assert one.measured < one.forty_lines
    monkeypatch.setattr(result_files, "read", list)
    with pytest.raises(ValueError, match="keeps no results of GPT-2 XL"):
        cluster_planning.benchmarked_runs()


def test_best_layouts_fit_and_name_their_mfu() -> None:
    table = cluster_planning.best_layouts(("1.7B", "529.6B"), sizes=(32, 2048))
    assert table["32 GPUs"]["529.6B"] == "too large"
    cut, share = table["2,048 GPUs"]["529.6B"].split(": ")
    run, nodes = MODELS["529.6B"], cluster_planning.cluster(2048)
    plan = best_layout(run, nodes)
    assert cut == f"{plan.dp} x {plan.pp} x {plan.tp}"
    hardware = run.flops / step(run, nodes, plan) / 2048 / nodes.peak  # with recomputed FLOPs
    assert float(share.split()[0]) == pytest.approx(75 * hardware, rel=0.03)


# --- figures -----------------------------------------------------------------------------------------


def words(figure: Figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_points_are_where_they_are_and_the_fitted_one_is_named() -> None:
    points = {"a": (100.0, 100.0), "b": (120.0, 115.0), "c": (150.0, 120.0)}
    figure = figures.calibration(points, "a")
    (ax,) = figure.axes
    drawn: dict[Any, Any] = {line.get_label(): line for line in ax.lines}
    assert list(drawn["published"].get_ydata()) == [100, 120, 150]
    assert list(drawn["predicted"].get_ydata()) == [100, 115, 120]
    assert drawn["predicted"].get_markerfacecolor() == "none"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["a", "b", "c"]
    assert "a is the one that was fitted" in ax.get_xlabel()


CELLS = {(1, 1): (4.0, False), (2, 1): (8.0, True), (1, 8): (6.0, True), (2, 16): (60.0, True)}


def test_a_map_rings_the_fastest_that_fits_and_ends_the_node() -> None:
    figure = figures.layout_map(CELLS, 8)
    (ax,) = figure.axes
    rings = {str(p.get_label()): p.get_xy() for p in ax.patches if isinstance(p, Rectangle)}
    assert rings == {"fastest that fits": (1, 0)}
    assert figure.get_label() == "the fastest that fits is pp 1 x tp 8, 6.00 s, and beyond the node 60.0 s"
    (border,) = [line for line in ax.lines if line.get_label() == "a node ends"]
    assert border.get_xdata()[0] == 2  # type: ignore[index]
    assert words(figure) == ["4.00", "8.00", "6.00", "60.0"]
    full = next(c for c in ax.collections if c.get_label() == "out of memory")
    assert len(full.get_paths()) == 1
    colors = next(c for c in ax.collections if c.get_label() == "layouts").get_facecolors()  # type: ignore[attr-defined]
    assert tuple(colors[2]) > tuple(colors[1]) > tuple(colors[3])  # the fastest is the lightest
    assert words(figures.layout_map(CELLS, 8, text=False)) == []
    nothing = figures.layout_map({(1, 1): (4.0, False)}, 8)
    assert not [p for p in nothing.axes[0].patches if "fastest" in str(p.get_label())]


def test_a_map_where_most_are_slow_spreads_its_colours() -> None:
    slow = {(pp, tp): (2.5 + pp + tp if pp + tp > 2 else 1.0, True) for pp in (1, 2) for tp in (1, 2)}
    ax = figures.layout_map(slow, 8).axes[0]
    colors = next(c for c in ax.collections if c.get_label() == "layouts").get_facecolors()  # type: ignore[attr-defined]
    assert len({tuple(color) for color in colors}) == 2  # all but the fastest take 4 times as long
    middle = {cut: (3.0 if cut == (1, 2) else seconds, fits) for cut, (seconds, fits) in slow.items()}
    ax = figures.layout_map(middle, 8).axes[0]
    colors = next(c for c in ax.collections if c.get_label() == "layouts").get_facecolors()  # type: ignore[attr-defined]
    assert len({tuple(color) for color in colors}) == 3


def test_a_page_that_times_nothing_says_nothing_about_timings(capsys: pytest.CaptureFixture[str]) -> None:
    lesson.banner(2, "cpu")
    assert "timings" in capsys.readouterr().out
    lesson.banner(2, "cpu", timed=False)
    assert "timings" not in capsys.readouterr().out


def test_curves_of_what_failures_leave() -> None:
    above, below = {"a": ([1, 10], [1.0, 0.5])}, {"b": ([5, 50], [0.2, 0.4])}
    figure = figures.goodput(above, below, {"b": ([7], [0.3])}, {"b": 20})
    drawn = [[np.asarray(line.get_xydata()).tolist() for line in ax.lines] for ax in figure.axes]
    assert drawn[0] == [[[1, 100], [10, 50]], [[0, 50], [1, 50]]]  # and where half of the time is lost
    assert drawn[1][:2] == [[[5, 20], [50, 40]], [[7, 30]]]
    assert [x for x, _ in drawn[1][2]] == [20, 20]
    with pytest.raises(ValueError, match="a has 2 x and 1 y"):
        figures.goodput({"a": ([1, 2], [1.0])}, {}, {}, {})


# --- what its checks say -----------------------------------------------------------------------------


def said(exercise: lesson.Exercise, answer: Callable[..., Any]) -> list[str]:
    return [finding.text for finding in lesson.check(exercise, answer).findings if not finding.ok]


def test_the_check_of_a_fit_says_what_is_off() -> None:
    job = exercises.TASKS["145.6B on 1,024 GPUs of 40 GB"]
    assert job.refusal(ParallelLayout(1)) is not None
    published = said(exercises.fit_model, lambda job: ParallelLayout(job.gpus // 64, 8, 8))
    assert any("over the best, at most 5 %" in text for text in published)
    assert any("GB, more than 40.0 GB" in text for text in published)
    assert all("is no ParallelLayout" in text for text in said(exercises.fit_model, lambda job: 8))
    assert "is for 1 GPUs" in said(exercises.fit_model, lambda job: ParallelLayout())[0]


def test_the_check_of_a_halved_link_wants_cause_and_winner() -> None:
    tables = exercises.weeks()
    assert {what for *_, what in tables} == {"inside", "between", "matmuls"}
    moved = [min(rows, key=lambda r: r.before) != min(rows, key=lambda r: r.after) for _, rows, _ in tables]
    assert sum(moved) == 4
    old = said(exercises.slow_link, lambda rows: ("between", min(rows, key=lambda row: row.before).plan))
    assert len(old) == 3 + 4
    assert "inside, and it is something else" not in " ".join(old)
    assert "is not a pair (what, plan)" in said(exercises.slow_link, lambda rows: "inside")[0]
    assert "is not among the rows" in " ".join(said(exercises.slow_link, lambda rows: ("inside", None)))


def test_half_of_the_largest_slowdown_tells_what_is_half_as_fast_and_no_fixed_percentage() -> None:
    weeks = exercises.weeks()
    slow = [(what, {row.plan: row.after / row.before - 1 for row in rows}) for _, rows, what in weeks]
    without_tp = [max(more for plan, more in slower.items() if plan.tp == 1) for _, slower in slow]
    for (what, slower), dp_alone in zip(slow, without_tp, strict=True):
        most = max(slower.values())
        assert (min(slower.values()) > most / 2) == (what == "matmuls")
        assert (dp_alone > most / 2) == (what != "inside")
    assert (slow[1][0], slow[3][0]) == ("between", "inside")
    assert without_tp[1] == pytest.approx(without_tp[3], abs=0.005)
    assert (slow[4][0], slow[5][0]) == ("matmuls", "between")
    assert max(slow[4][1].values()) < max(slow[5][1].values())
    first = [min(slower, key=lambda plan: plan.tp) == next(iter(slower)) for _, slower in slow]
    assert sum(first) < 3


def test_the_check_of_saves_takes_any_good_formula() -> None:
    assert "is no number of seconds above 0" in said(exercises.checkpoint_interval, lambda run: 0.0)[0]
    assert len(said(exercises.checkpoint_interval, lambda run: 3600.0)) == 3
    found = said(exercises.checkpoint_interval, lambda run: (run.failures.save * run.failures.between) ** 0.5)
    assert len(found) == 3
    assert "of the time, at best 9.25 %" in found[2]

    def daly(run: exercises.CheckpointTask) -> float:
        """Daly 2006: sqrt(2 D M) (1 + sqrt(D / 2 M) / 3 + D / (18 M)) - D."""
        d, m = run.failures.save, run.failures.between
        return float((2 * d * m) ** 0.5 * (1 + (d / 2 / m) ** 0.5 / 3 + d / 18 / m) - d)

    assert said(exercises.checkpoint_interval, daly) == []
    assert (
        said(exercises.checkpoint_interval, lambda run: (2 * run.failures.save * run.failures.between) ** 0.5)
        == []
    )


def test_few_hosts_write_less_than_a_file_system_takes() -> None:
    assert exercises.CheckpointTask(16384, 1.0, 1e9).written == 273e9
    assert exercises.CheckpointTask(1536, 1.0, 1e9).written == 273e9 / 2


def test_numbers_of_the_prose() -> None:
    """What 09 says in words, where no cell computes it."""
    given = cluster_planning.cluster(1024)
    rate = given.share * given.peak
    assert 4 * 8192 / (7 * rate / given.inside.bandwidth) == pytest.approx(7, abs=0.3)
    one_nic = cluster_planning.cluster(1024, cluster_planning.SLOW).link(16, 8)
    assert one_nic.bandwidth == 12.5e9
    assert 4 * 8192 / (15 * rate / one_nic.bandwidth) == pytest.approx(0.14, abs=0.005)
    assert given.link(16, 8).bandwidth == 200e9
    assert cluster_planning.cluster(1024, cluster_planning.SLOW).link(1024, 1).bandwidth == 12.5e9 / 8
    years, hours, checkpoint = LLAMA_3_EACH / 365.25 / 86400, LLAMA_3_EACH / 16384 / 3600, 13.8e12
    assert years == pytest.approx(5.8, abs=0.05)
    assert hours == pytest.approx(3.1, abs=0.05)
    assert checkpoint == pytest.approx(1e12 * CHECKPOINT_BYTES)
    assert checkpoint / WRITTEN == pytest.approx(51, abs=0.5)
