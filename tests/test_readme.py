"""README and docs say what is so: code runs, pictures come from runs, links lead somewhere."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import statistics
import urllib.parse
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from readme_images import IMAGES, figure
from scripts_here import run_script_here
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from hpnb.bench import result_files
from hpnb.bench.tables import ONE_PIECE

ROOT = Path(__file__).parents[1]
RESULTS = "hpnb/bench/results/README.md"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/library.md", "docs/train.md", "docs/symptoms.md", RESULTS)
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
README, LIBRARY, TRAIN = TEXTS["README.md"], TEXTS["docs/library.md"], TEXTS["docs/train.md"]


def example(text: str, number: int) -> str:
    code: str = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    return code


def run(code: str, folder: Path) -> list[str]:
    script = folder / "example.py"
    script.write_text(code)
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # which pytest would keep from stderr
        printed, errors = run_script_here(script)
    assert errors == ""
    return printed.splitlines()


# --- code ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[int, list[str]]:
    """What the examples of README print that take few ranks; one script runs them, as one kernel would.

    The second writes a trace too, with the call of the sentence below it, on every rank: `timeline` gathers.
    """
    examples = {number: example(README, number) for number in (0, 1, 2, 4)}
    call, last = 'timeline.to_chrome_trace("step.json")', "    return round(pipe.step(batch).loss.item(), 3)"
    assert f"On every rank, call `pipe.step(batch).{call}`" in README
    assert last in examples[1]
    traced = f"    result = pipe.step(batch)\n    result.{call}\n    return round(result.loss.item(), 3)"
    examples[1] = examples[1].replace(last, traced)
    shutil.copy(ROOT / "examples" / "own_model.py", folder)
    lines = run("".join(f"print('## {n}')\n{code}\n" for n, code in examples.items()), folder)
    starts = [lines.index(f"## {n}") for n in examples]
    ends = [*starts[1:], len(lines)]
    return {n: lines[a + 1 : b] for n, a, b in zip(examples, starts, ends, strict=True)}


def test_the_data_example_counts_its_bytes(printed: dict[int, list[str]]) -> None:
    # 8 x 3 weights and 3 biases of 4 bytes over 4 ranks: 2 (4-1)/4 x 108
    assert printed[0] == [str([162.0] * 4)]
    assert "= 162" in README


def test_the_pipeline_example_runs_and_is_right(printed: dict[int, list[str]]) -> None:
    bubble, losses = printed[1]
    assert bubble == f"{3 / 11:.3f}"
    values = {float(value) for value in losses.strip("[]").split(",")}
    assert len(losses.split(",")) == 4
    assert len(values) == 1, "every rank reads the same loss"
    assert 0.5 < values.pop() < 2.5  # of three classes, before anything is learned: about ln 3


def test_the_pipeline_example_writes_a_trace_of_all_ranks(
    printed: dict[int, list[str]], folder: Path
) -> None:
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}


def test_the_tensor_example_runs_and_is_right(printed: dict[int, list[str]]) -> None:
    (line,) = printed[2]
    ranks = re.findall(r"\(([\d.]+), torch.Size\(\[(\d+), (\d+)\]\)\)", line)
    assert len(ranks) == 2
    assert len(set(ranks)) == 1, "every rank reads the same loss and puts together the same weight"
    loss, up, hidden = ranks[0]
    assert 0.5 < float(loss) < 2.5
    assert int(up) == 4 * int(hidden)


@pytest.mark.slow
def test_the_hybrid_example_runs_and_is_right(tmp_path: Path) -> None:
    *_, line = run(example(README, 3), tmp_path)  # after the bars of epochs
    ranks = re.findall(r"\(([\d.]+), ([\d.]+)\)", line)
    assert len(ranks) == 8
    assert len(set(ranks)) == 1, "every rank reads the same losses"
    first, last = map(float, ranks[0])
    assert last < first
    assert (tmp_path / "vit" / "model.safetensors").exists()


def test_the_example_of_a_model_of_your_own_checks_it(printed: dict[int, list[str]]) -> None:
    """tests/test_train.py trains it in all layouts."""
    line, cannot = printed[4]
    assert "Net" in line
    assert "tensor parallelism" in line
    assert cannot.startswith("It cannot use sequence parallelism: ")
    assert len(cannot) < 120


def test_the_planner_says_what_the_page_says(tmp_path: Path) -> None:
    (line,) = run(example(TRAIN, 0), tmp_path)
    assert line == "dp 24 x pp 16 x tp 4, interleaved, 5 chunks: 153 TFLOP/s per GPU"
    assert f"# {line}" in TRAIN


def test_the_run_file_is_one(tmp_path: Path) -> None:
    from hpnb.hybrid.train_command.run_file import load

    (text,) = re.findall(r"```toml\n(.*?)```", TRAIN, re.DOTALL)
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert load(path).plugin().pp_size == 2


def test_the_table_of_what_cannot_be_combined_is_that_of_the_library() -> None:
    from hpnb.hybrid.refused import REFUSED

    for refusal in REFUSED:
        assert f"| {refusal.what} | {refusal.why} |" in LIBRARY


def test_schedules_and_tensor_modes_are_all_named() -> None:
    from hpnb.pipeline_parallel import schedules
    from hpnb.tensor_parallel import mode

    for name in schedules.NAMES:
        assert f"`{name}`" in LIBRARY
    for name in mode.NAMES:
        assert f'`"{name}"`' in LIBRARY


def test_a_causal_loss_in_float64_differs_from_transformers_as_the_page_says() -> None:
    """And so a reader's comparison does, which is not a fault of the layout."""
    import hpnb

    def losses() -> tuple[float, float, float]:
        torch.manual_seed(0)
        model: Any = GPT2LMHeadModel(hpnb.models.gpt2("laptop").config).double().eval()
        tokens = torch.randint(model.config.vocab_size, (2, 16))
        outputs = model(tokens, labels=tokens)
        exact = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp64"))
        boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return outputs.loss.item(), exact.item(), boosted(tokens, labels=tokens).loss.item()

    ((plain, exact, boosted),) = hpnb.launch(losses, ranks=1, device="cpu")
    assert boosted == pytest.approx(exact, rel=1e-12)
    assert 1e-9 < abs(boosted - plain) < 1e-6
    assert "`logits.float()`" in LIBRARY
    assert "compare with the cross entropy of its `logits`" in LIBRARY


def test_streams_that_do_not_resume_elsewhere_are_named() -> None:
    exception = TRAIN[TRAIN.index("There is one exception") : TRAIN.index("Other programs read")]
    for words in ("`datasets`", "`get_worker_info()`", "`num_workers`", "`booster.load`", "restore_data="):
        assert words in exception


# --- tables, pictures, links -----------------------------------------------------------------------------


def test_readme_is_short() -> None:
    assert len(README.encode()) <= 10 * 1024
    assert len(README.splitlines()) <= 250


def test_tables_of_whole_programs_are_those_of_the_results() -> None:
    short = "run python -m hpnb.bench table, and copy its first table without rows of microbatches"
    assert result_files.short_table() in README, short
    assert result_files.table() in TEXTS[RESULTS], "run python -m hpnb.bench table --write"


def test_all_programs_of_the_table_pad_the_vocabulary() -> None:
    """hpnb's do. PyTorch's compiler does where it gets output layer and loss together."""
    assert "All pad GPT-2's vocabulary of 50,257" in README
    for run in result_files.newest(result_files.read()):
        for layout in run.layouts.values() if run.what == "gpt2-xl" else ():
            peer = layout.fastest(ours=False)
            assert peer is None or ONE_PIECE in peer.name, layout.layout


def test_the_mean_error_of_the_planner_is_that_of_its_table() -> None:
    published = (ROOT / "hpnb/bench/results/PUBLISHED.md").read_text(encoding="utf-8")
    errors = [abs(float(e)) for e in re.findall(r"([+-][\d.]+)% \| held out", published)]
    mean = f"{statistics.mean(errors):.1f} %"
    table = f"[{len(errors)} published runs](hpnb/bench/results/PUBLISHED.md)"
    assert f"(mean error on {table}: {mean})" in README


def test_steps_of_small_microbatches_are_those_of_the_results() -> None:
    steps, ratios = {}, {}
    for run in result_files.newest(result_files.read()):
        for name, layout in run.layouts.items() if run.microbatches else ():
            best, peer = layout.fastest(ours=True), layout.fastest(ours=False)
            assert best is not None
            assert peer is not None
            assert (best.name, peer.name.split(",")[0]) == ("hpnb 1f1b, CUDA graphs", "Schedule1F1B")
            seconds = [layout.shown(one.name) or 0.0 for one in (best, peer)]
            steps[name, run.microbatches] = [f"{1e3 * second:,.0f} ms" for second in seconds]
            ratios[name, run.microbatches] = f"{(layout.ratio(best.name, peer.name) or (0.0,))[0]:.2f}"
    said_of_pp2 = "{}, Schedule1F1B in {}".format(*steps["pp2", 32])
    said = f"{said_of_pp2} ({ratios['pp2', 32]} times; pp4 with 64: {ratios['pp4', 64]})"
    assert said in " ".join(README.split())


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
    assert (ROOT / "images" / name).read_bytes() == committed, "run python tests/readme_images.py"


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
