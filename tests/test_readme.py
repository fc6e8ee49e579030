"""README and docs say what is so: code runs, pictures come from runs, links lead somewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from PIL import Image

from hpnb.bench import result_files
from hpnb.lesson.pages.readme_images import IMAGES, figure

ROOT = Path(__file__).parents[1]
RESULTS = "hpnb/bench/results/README.md"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/library.md", "docs/train.md", "docs/symptoms.md", RESULTS)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README, LIBRARY, TRAIN = TEXTS["README.md"], TEXTS["docs/library.md"], TEXTS["docs/train.md"]


def run_example(text: str, number: int, folder: Path) -> list[str]:
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    script = folder / "example.py"
    script.write_text(code)
    command = [sys.executable, script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


# --- code ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2, of="examples")
def test_the_data_example_counts_its_bytes(tmp_path: Path) -> None:
    # 8 x 3 weights and 3 biases of 4 bytes over 4 ranks: 2 (4-1)/4 x 108
    assert run_example(README, 0, tmp_path) == [str([162.0] * 4)]
    assert "= 162" in README


@pytest.mark.sampled(2, of="examples")
def test_the_pipeline_example_runs_and_is_right(tmp_path: Path) -> None:
    bubble, losses = run_example(README, 1, tmp_path)
    assert bubble == f"{3 / 11:.3f}"
    values = {float(value) for value in losses.strip("[]").split(",")}
    assert len(losses.split(",")) == 4
    assert len(values) == 1, "every rank reads the same loss"
    assert 0.5 < values.pop() < 2.5  # of three classes, before anything is learned: about ln 3


def test_the_pipeline_example_writes_a_trace_of_all_ranks(tmp_path: Path) -> None:
    """With the call of the sentence below the example, on every rank: `timeline` gathers."""
    call, last = 'timeline.to_chrome_trace("step.json")', "    return round(pipe.step(batch).loss.item(), 3)"
    assert f"On every rank, call `pipe.step(batch).{call}`" in README
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert last in code
    traced = f"    result = pipe.step(batch)\n    result.{call}\n    return round(result.loss.item(), 3)"
    run_example(f"```python\n{code.replace(last, traced)}```", 0, tmp_path)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}


@pytest.mark.sampled(2, of="examples")
def test_the_tensor_example_runs_and_is_right(tmp_path: Path) -> None:
    (line,) = run_example(README, 2, tmp_path)
    ranks = re.findall(r"\(([\d.]+), torch.Size\(\[(\d+), (\d+)\]\)\)", line)
    assert len(ranks) == 2
    assert len(set(ranks)) == 1, "every rank reads the same loss and puts together the same weight"
    loss, up, hidden = ranks[0]
    assert 0.5 < float(loss) < 2.5
    assert int(up) == 4 * int(hidden)


@pytest.mark.sampled(2, of="examples")
def test_the_hybrid_example_runs_and_is_right(tmp_path: Path) -> None:
    *_, line = run_example(README, 3, tmp_path)  # after the bars of epochs
    ranks = re.findall(r"\(([\d.]+), ([\d.]+)\)", line)
    assert len(ranks) == 8
    assert len(set(ranks)) == 1, "every rank reads the same losses"
    first, last = map(float, ranks[0])
    assert last < first
    assert (tmp_path / "vit" / "model.safetensors").exists()


@pytest.mark.sampled(2, of="examples")
def test_the_example_of_a_model_of_your_own_checks_it(tmp_path: Path) -> None:
    """tests/test_train.py trains it in all layouts."""
    shutil.copy(ROOT / "examples" / "own_model.py", tmp_path)
    (line,) = run_example(README, 4, tmp_path)
    assert "Net" in line
    assert "tensor parallelism" in line


def test_the_planner_says_what_the_page_says(tmp_path: Path) -> None:
    (line,) = run_example(TRAIN, 0, tmp_path)
    assert line == "dp 24 x pp 16 x tp 4, interleaved, 5 chunks: 153 TFLOP/s per GPU"
    assert f"# {line}" in TRAIN


def test_the_run_file_is_one(tmp_path: Path) -> None:
    from hpnb.hybrid.train_command.run_file import load

    (text,) = re.findall(r"```toml\n(.*?)```", TRAIN, re.DOTALL)
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load(path).plugin().pp_size == 2


def test_the_table_of_what_cannot_be_combined_is_that_of_the_library() -> None:
    from hpnb.hybrid import REFUSED

    for refusal in REFUSED:
        assert f"| {refusal.what} | {refusal.why} |" in LIBRARY


def test_schedules_and_tensor_modes_are_all_named() -> None:
    from hpnb.pipeline_parallel import schedules
    from hpnb.tensor_parallel import mode

    for name in schedules.NAMES:
        assert f"`{name}`" in LIBRARY
    for name in mode.NAMES:
        assert f'`"{name}"`' in LIBRARY


# --- tables, pictures, links -----------------------------------------------------------------------------


def test_readme_is_short() -> None:
    assert len(README.encode()) <= 10 * 1024
    assert len(README.splitlines()) <= 250


def test_tables_of_whole_programs_are_those_of_the_results() -> None:
    assert result_files.short_table() in README, "run python -m hpnb.bench table, and copy its first table"
    assert result_files.table() in TEXTS[RESULTS], "run python -m hpnb.bench table --write"


def test_the_number_of_architectures_is_that_of_their_table() -> None:
    models = (ROOT / "hpnb/bench/results/MODELS.md").read_text(encoding="utf-8")
    match = re.search(r"^(\d+) architectures: (\d+) exact, (\d+) refused", models, re.MULTILINE)
    assert match is not None
    every, exact, refused = match.groups()
    assert f"[{exact} architectures of transformers]" in README
    assert f"Of {every} such configurations {exact} train exactly and {refused} are refused" in LIBRARY


def test_every_notebook_is_in_the_table() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.name}" in README


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_figures_of_the_committed_notebooks(name: str) -> None:
    notebook, alt = IMAGES[name]
    committed = figure(ROOT / "notebooks" / f"{notebook}.ipynb", alt)
    assert (ROOT / "images" / name).read_bytes() == committed, "run python -m hpnb.lesson.pages.readme_images"


def test_the_recording_moves_and_is_small() -> None:
    path = ROOT / "images" / "notebook_in_jupyterlab.gif"
    assert path.stat().st_size < 2e6
    picture = Image.open(path)
    assert getattr(picture, "n_frames", 1) >= 10
    assert 700 <= picture.width <= 1000


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_exist(page: str) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", TEXTS[page])
    folder = (ROOT / page).parent
    for target in targets:
        if target.startswith("http"):
            assert urllib.parse.urlsplit(target).netloc
            continue
        name, _, anchor = target.partition("#")
        file = (folder / name).resolve() if name else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES)
def test_pictures_have_an_alt_text_and_are_all_used(page: str) -> None:
    for alt, _ in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", TEXTS[page]):
        assert len(alt) >= 10
    for path in (ROOT / "images").iterdir():
        assert any(f"images/{path.name}" in text for text in TEXTS.values()), path.name


def anchors(file: Path) -> set[str]:
    """As GitHub makes them of the headings."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
