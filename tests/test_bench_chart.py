"""The picture of the layouts says what the table says, and is of the results that stand there."""

from __future__ import annotations

import io
import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from hpnb import plot
from hpnb.bench import __main__ as command
from hpnb.bench import chart, layouts, result_files, worker
from hpnb.bench.results import BenchmarkRun, LayoutResult, ProgramResult

ROOT = Path(__file__).parents[1]


def found(layout: str, seconds: dict[str, float], failed: str = "", why: str = "it broke") -> LayoutResult:
    """Programs that took so long, but for one that `failed`; a step is 1 TFLOP a rank, of 2 a second."""
    entries = tuple(
        ProgramResult(n, n.startswith("hpnb"), failed=why if n == failed else "") for n in seconds
    )
    waves = ({name: [second] * 3 for name, second in seconds.items() if name != failed},)
    return LayoutResult(layout, 4, "tokens", 4000, 4e12, 2e12, entries, waves)


def result(
    *of: LayoutResult, what: str = "gpt2-xl", date: str = "2026-01-01", key: str = "k", ranks: int = 4
) -> BenchmarkRun:
    by_name = {one.layout: one for one in of}
    return BenchmarkRun(
        what, key, f"{what}: sizes", date, "0123abcd", "GPU", ranks, {"torch": "2.15"}, by_name
    )


def written(folder: Path, **runs: BenchmarkRun) -> Path:
    for name, run in runs.items():
        result_files.write(run, folder / f"{name}.json")
    return folder


def bars(ax: Axes) -> dict[str, float]:
    """{"layout, program": length}, from the top."""
    return {str(bar.get_label()): bar.get_width() for bar in ax.patches if isinstance(bar, Rectangle)}


def seen(fig: Figure) -> list[str]:
    return [text.get_text() for text in (*fig.texts, *(text for ax in fig.axes for text in ax.texts))]


# --- the committed picture -------------------------------------------------------------------------------


def test_the_committed_picture_is_of_the_results_that_stand_there() -> None:
    made = chart.chart()
    picture = Image.open(ROOT / "images" / "layouts.png")
    inside, now = picture.info, made.text()
    for what in ("Source", "Description"):
        assert inside[what] == now[what], "run python -m hpnb.bench chart"
    if inside["Software"] == now["Software"]:  # another release moves the edges of letters
        again = Image.open(io.BytesIO(plot.png(made.figure())))
        assert picture.size == again.size, "run python -m hpnb.bench chart"
        here, there = (np.asarray(one.convert("RGB"), dtype=int) for one in (picture, again))
        assert (abs(here - there) > 40).mean() < 1e-3, "drawn by other code: run python -m hpnb.bench chart"


def test_it_says_what_the_table_says() -> None:
    runs, table, fig = chart.chosen(result_files.read()), result_files.table(), chart.chart().figure()
    for run, ax in zip(runs, fig.axes, strict=True):
        (part,) = (part for part in re.split(r"\n\n(?=[\w-]+: )", table) if part.startswith(f"{run.title};"))
        drawn = bars(ax)
        assert {label.split(", ")[0] for label in drawn} == set(run.layouts)
        for layout, of in run.layouts.items():
            (line,) = (line for line in part.splitlines() if line.startswith(f"| {layout} |"))
            (mine, speed), *peers = ((n, v) for n, v in drawn.items() if n.startswith(f"{layout}, "))
            best = of.fastest(ours=True)
            assert best is not None
            assert mine == f"{layout}, {best.name}"
            assert speed == of.tflops(best.name)
            assert f"| {speed:.4g} | {of.share(best.name):.0%} |" in line
            assert f"{of.share(best.name):.0%} of matmul" in seen(fig)
            said = re.findall(r"(?:\| |<br>)([^|<]+?): ([\d.]+), [\d.]+ GiB, ([^|<]+?)(?=<br>| \|)", line)
            for (label, length), (name, value, ratio) in zip(peers, said[: len(peers)], strict=True):
                assert label == f"{layout}, {name}"
                assert length == of.tflops(name)
                assert f"{length:.4g}" == value
                assert ratio in seen(fig)
            assert len(peers) == min(len(said), 3)
        assert f"{run.what} on {run.ranks} x {run.device}" in seen(fig)
        (said,) = re.findall(rf"Measured (.* at {run.commit}, with torch [^,]+)", part)
        assert f"measured {said}" in seen(fig)


@pytest.mark.parametrize("which", ["gpt2-xl", "vit-l16"])
def test_a_file_more_makes_it_stale(which: str, tmp_path: Path) -> None:
    for path in result_files.RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    before = chart.chart(tmp_path)
    assert before.text() == chart.chart().text()
    (run,) = (run for run in chart.chosen(result_files.read(tmp_path)) if run.what == which)
    name, of = next(iter(run.layouts.items()))
    result_files.write(replace(run, ranks=1, key="on one", layouts={name: of}), tmp_path / "one.json")
    assert chart.chart(tmp_path).text() == before.text(), "it is not shown"
    result_files.write(replace(run, date="2100-01-01", layouts={name: of}), tmp_path / "more.json")
    after = chart.chart(tmp_path)
    assert set(after.sources) - set(before.sources) == {"more.json"}
    assert re.search("measured (until )?2100-01-01", after.words())


# --- what is drawn ---------------------------------------------------------------------------------------


def test_the_best_of_hpnb_stands_above_the_fastest_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"hpnb 1f1b": 1.0, "hpnb zb-v": 2.0, "a": 4.0, "b": 0.5, "c": 3.0, "d": 5.0}
    made = chart.chart(written(tmp_path, one=result(found("tp4", {"hpnb": 1.0}), found("pp4", seconds))))
    fig = made.figure()
    assert bars(fig.axes[0]) == {
        "pp4, hpnb 1f1b": 1.0, "pp4, b": 2.0, "pp4, c": 1 / 3, "pp4, a": 0.25, "tp4, hpnb": 1.0,
    }  # fmt: skip
    assert {"50% of matmul", "0.500 [0.500, 0.500]", "3.000 [3.000, 3.000]"} <= set(seen(fig))
    assert "the 3 fastest of a layout" in made.caption
    assert made.words().splitlines()[1] == (
        "pp4: hpnb 1f1b 1.00 50% of matmul; b 2.00 0.500 [0.500, 0.500]; c 0.333 3.000 [3.000, 3.000]; "
        "a 0.250 4.000 [4.000, 4.000]; matmul 2.00"
    )
    monkeypatch.setattr(chart, "PEERS", 1)
    fewer = chart.chart(tmp_path)
    assert list(bars(fewer.figure().axes[0])) == ["pp4, hpnb 1f1b", "pp4, b", "tp4, hpnb"]
    assert "the fastest of a layout" in fewer.caption
    monkeypatch.setattr(chart, "PEERS", 4)
    assert "fastest" not in chart.chart(tmp_path).caption


@pytest.mark.parametrize(
    ("of", "drawn", "says"),
    [
        (found("dp4", {"hpnb": 1.0}), {"dp4, hpnb": 1.0}, "PyTorch: none ran"),
        (
            found("dp4", {"hpnb": 1.0, "a": 1.0}, "a", "it does not train the same: 2 and 3"),
            {"dp4, hpnb": 1.0},
            "PyTorch: none that trains the same",
        ),
        (found("dp4", {"hpnb": 1.0, "a": 2.0}, "hpnb"), {"dp4, a": 0.5}, "hpnb: none ran"),
        (
            found("dp4", {"hpnb": 1.0, "hpnb b": 4.0, "a": 2.0}, "hpnb"),
            {"dp4, hpnb b": 0.25, "dp4, a": 0.5},
            "0.500 [0.500, 0.500]",
        ),
        (
            replace(found("dp4", {"hpnb": 1.0, "a": 2.0}), waves=({"hpnb": [1.0]}, {"a": [2.0]})),
            {"dp4, hpnb": 1.0, "dp4, a": 0.5},
            "2.000 (of medians)",
        ),
    ],
)
def test_what_failed_has_no_bar(of: LayoutResult, drawn: dict[str, float], says: str, tmp_path: Path) -> None:
    made = chart.chart(written(tmp_path, one=result(of)))
    fig = made.figure()
    assert bars(fig.axes[0]) == drawn
    assert says in seen(fig)
    assert says in made.words()


def test_of_each_task_the_most_layouts_and_the_newest_of_each(tmp_path: Path) -> None:
    slow, quick = {"hpnb": 2.0, "a": 2.0}, {"hpnb": 1.0, "a": 1.0}
    written(
        tmp_path,
        wide=result(found("dp8", slow), found("tp8", slow), ranks=8, key="8", date="2026-01-02"),
        old=result(found("dp8", quick), found("pp8", quick), ranks=8, key="8", date="2026-01-01"),
        older=result(found("pp8", slow), ranks=8, key="8", date="2025-12-31"),
        narrow=result(found("dp4", quick), date="2026-01-03"),
        wider=result(found("dp16", quick), ranks=16, key="16"),
        as_many=result(*(found(name, slow) for name in ("dp2", "pp2", "tp2")), ranks=2, key="2"),
        images=result(found("one", quick), what="vit-l16", key="v", ranks=1),
        losses=replace(result(ranks=16, key="16"), losses={"steps": 2}),
    )
    made = chart.chart(tmp_path)
    assert [panel.title for panel in made.panels] == ["gpt2-xl on 8 x GPU", "vit-l16 on 1 x GPU"]
    assert [(group.name, group.bars[0].value) for group in made.panels[0].groups] == [
        ("dp8", 0.5), ("pp8", 1.0), ("tp8", 0.5),
    ]  # fmt: skip
    assert made.sources == ("old.json", "wide.json", "images.json")


@pytest.mark.slow  # the committed picture is drawn
def test_a_long_picture_has_fewer_peers_and_every_name_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every program that there is, each as long and as short as it may come."""
    for what in ("gpt2-xl", "vit-l16"):
        every = []
        for layout in layouts.usual_layouts(4):
            known = worker.candidates(what, layouts.parse_layout(layout, 4))
            every.append(found(layout, {name: 0.52 + 0.24 * i for i, name in enumerate(known)}))
        written(tmp_path, **{what: result(*every, what=what, key=what)})
    shown = chart.chart(tmp_path)
    assert sum(len(group.bars) for panel in shown.panels for group in panel.groups) <= chart.ROWS
    heights = []
    for peers, rows in ((chart.PEERS, chart.ROWS), (1, chart.ROWS), (20, 1000)):
        monkeypatch.setattr(chart, "PEERS", peers)
        monkeypatch.setattr(chart, "ROWS", rows)
        fig = chart.chart(tmp_path).figure()
        heights.append(fig.get_figheight())
        fig.canvas.draw()
        for ax in fig.axes:
            boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
            for a, b in itertools.combinations(boxes, 2):
                assert not (min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2)
            assert max(box.x1 for box in boxes) < fig.bbox.x1
    assert heights[0] == heights[1] < heights[2] / 1.5


# --- the command -----------------------------------------------------------------------------------------


def ask(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["hpnb.bench", "chart", *arguments])
    command.main()


def test_the_command_draws_a_png_that_names_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = written(tmp_path / "results", one=result(found("dp4", {"hpnb": 1.0, "a": 2.0})))
    monkeypatch.chdir(tmp_path)
    ask(monkeypatch, "--results", str(folder))
    assert capsys.readouterr().out == "images/layouts.png  from one.json\n"
    picture = Image.open(tmp_path / "images" / "layouts.png")
    assert picture.info == chart.chart(folder).text()
    assert picture.info["Source"] == "one.json"
    assert picture.width == 1120
    ask(monkeypatch, "--results", str(folder), "--out", "other.png")
    assert (tmp_path / "other.png").exists()
    with pytest.raises(SystemExit, match="has no results"):
        ask(monkeypatch, "--results", str(tmp_path))


def test_the_command_writes_the_tables_into_the_page_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = written(tmp_path, one=result(found("dp4", {"hpnb": 1.0, "a": 2.0, "b": 3.0})))
    monkeypatch.setattr("sys.argv", ["hpnb.bench", "table", "--write", "--results", str(folder)])
    page = folder / result_files.PAGE
    with pytest.raises(SystemExit, match=r"README\.md does not say where tables stand"):
        command.main()
    begin, end = result_files._BEGIN, result_files._END
    page.write_text(f"before\n{begin}\nan old table\n{end}\nafter\n")
    for _ in range(2):
        command.main()
        text = page.read_text()
        assert text == f"before\n{begin}\n\n{result_files.table(folder)}\n\n{end}\nafter\n"
    assert capsys.readouterr().out == f"{page}\n" * 2


def test_the_short_table_has_the_best_of_both_sides(tmp_path: Path) -> None:
    ran = found("dp4", {"hpnb": 1.0, "hpnb x": 0.5, "a": 2.0, "b": 4.0})
    alone = found("tp4", {"hpnb": 1.0, "a": 1.0}, "a")
    failed = found("pp4", {"hpnb": 1.0, "a": 1.0}, "hpnb")
    lines = result_files.short_table(written(tmp_path, one=result(ran, alone, failed))).splitlines()
    assert len(lines) == 2 + 3
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    first = ["gpt2-xl, 4 x GPU", "", ""]  # once for the rows of a model
    assert [row[:2] for row in cells] == [list(row) for row in zip(first, ("dp4", "tp4", "pp4"), strict=True)]
    assert cells[0][2:] == ["a", "4.000 [4.000, 4.000]"]
    assert cells[1][2:] == ["none ran", "-"]
    assert cells[2][2:] == ["a", "-"]
