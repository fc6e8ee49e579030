"""README says what is so: its code runs, its images come from committed runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpnb.bench import result_files
from hpnb.lesson.pages.readme_images import IMAGES, figure

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_example(number: int, folder: Path) -> list[str]:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    script = folder / "example.py"
    script.write_text(code)
    command = [sys.executable, script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


@pytest.mark.sampled(2, of="examples")
def test_the_library_example_runs_and_is_right(tmp_path: Path) -> None:
    # 3 values of 4 bytes over 2 ranks: 2 (2-1)/2 x 12
    assert run_example(0, tmp_path) == [str([(3.0, 12.0)] * 4)]


@pytest.mark.sampled(2, of="examples")
def test_the_pipeline_example_runs_and_is_right(tmp_path: Path) -> None:
    bubble, losses = run_example(1, tmp_path)
    assert bubble == f"{3 / 11:.3f}"
    values = {float(value) for value in losses.strip("[]").split(",")}
    assert len(losses.split(",")) == 4
    assert len(values) == 1, "every rank reads the same loss"
    assert 0.5 < values.pop() < 2.5  # of three classes, before anything is learned: about ln 3


@pytest.mark.sampled(2, of="examples")
def test_the_tensor_example_runs_and_is_right(tmp_path: Path) -> None:
    (line,) = run_example(2, tmp_path)
    ranks = re.findall(r"\(([\d.]+), (\d+), torch.Size\(\[(\d+), (\d+)\]\)\)", line)
    assert len(ranks) == 2
    assert len(set(ranks)) == 1, (
        "every rank reads the same loss, sends as much, and puts together the same weight"
    )
    loss, sent, up, hidden = ranks[0]
    assert 0.5 < float(loss) < 2.5
    assert int(sent) > 0
    assert int(up) == 4 * int(hidden)


@pytest.mark.sampled(2, of="examples")
def test_the_hybrid_example_runs_and_is_right(tmp_path: Path) -> None:
    *_, line = run_example(3, tmp_path)  # after the bars of epochs
    ranks = re.findall(r"\(([\d.]+), ([\d.]+)\)", line)
    assert len(ranks) == 8
    assert len(set(ranks)) == 1, "every rank reads the same losses"
    first, last = map(float, ranks[0])
    assert last < first
    assert (tmp_path / "vit" / "model.safetensors").exists()


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_figures_of_the_committed_notebooks(name: str) -> None:
    notebook, alt = IMAGES[name]
    committed = figure(ROOT / "notebooks" / f"{notebook}.ipynb", alt)
    assert (ROOT / "images" / name).read_bytes() == committed, "run python -m hpnb.lesson.pages.readme_images"


def test_tables_of_whole_programs_are_those_of_the_results() -> None:
    tables = re.split(r"\n\n(?=gpt2-xl: |vit-l16: )", result_files.table(result_files.RESULTS).strip())
    assert tables
    for table in tables:
        assert table in README, table.splitlines()[0]


def test_links_and_images_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_every_notebook_is_in_the_table() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.name}" in README


def test_the_planner_of_readme_says_what_readme_says(tmp_path: Path) -> None:
    (line,) = run_example(4, tmp_path)
    assert line == "dp 24 x pp 16 x tp 4, interleaved, 5 chunks: 153 TFLOP/s a GPU"
    assert f"# {line}" in README


def test_the_own_model_is_the_example_that_is_run() -> None:
    """tests/test_train.py runs it."""
    assert (ROOT / "examples" / "own_model.py").read_text().rstrip() in README


def test_the_run_file_is_one(tmp_path: Path) -> None:
    from hpnb.hybrid.train_command.run_file import load

    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load(path).plugin().pp_size == 2


def test_the_table_of_what_cannot_compose_is_that_of_the_library() -> None:
    from hpnb.hybrid import REFUSED

    for refusal in REFUSED:
        assert f"| {refusal.what} | {refusal.why} |" in README
