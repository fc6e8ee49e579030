"""The room that only notebooks use: what it remembers, how it judges, and what it shows."""

from __future__ import annotations

import csv
import importlib
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hpnb
from hpnb import comm, lesson, pipeline_parallel, theory
from hpnb.lesson import Exercise, Finding, check
from hpnb.lesson.exercises import vit_data_parallel as notebook_01
from hpnb.lesson.exercises import vit_pipeline_parallel as notebook_02
from hpnb.lesson.exercises import vit_tensor_parallel as notebook_03
from hpnb.lesson.home import load, read_json, save, write_json
from hpnb.lesson.programs import (
    device_timing,
    step_timing,
    vit_pipeline,
    vit_pipeline_words,
    vit_tensor,
    vit_tensor_predictions,
)
from hpnb.models import ViTSize
from hpnb.pipeline_parallel import schedules
from hpnb.record import Event, Timeline
from hpnb.tensor_parallel import parallelize

PUBLISHED = Path(__file__).parent / "published" / "zero_bubble.csv"

asked: dict[str, Any] = importlib.import_module("hpnb.lesson.predictions.predict")._asked


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "home"))
    asked.clear()
    return tmp_path / "home"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed since the last call."""
    return lambda: capsys.readouterr().out


def test_names_are_functions_or_modules() -> None:
    assert all(callable(getattr(lesson, name)) for name in ("banner", "predict", "Explorer", "show"))
    assert [type(module).__name__ for module in (lesson.ledger, lesson.field_guide)] == ["module", "module"]
    assert all(hasattr(lesson, name) for name in lesson.__all__)


# --- home ----------------------------------------------------------------------------------------


def test_home_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lesson.home() == tmp_path / "home"
    assert lesson.home().is_dir()
    monkeypatch.delenv("HPNB_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert lesson.home() == tmp_path / "cache" / "hpnb"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lesson.home() == tmp_path / ".cache" / "hpnb"


def test_a_home_that_cannot_be_made_is_replaced_for_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPNB_HOME", str(tmp_path / "file"))
    write_json("x.json", {"a": 1})
    assert read_json("x.json") == {"a": 1}
    assert said().count("note: ") == 1


@pytest.mark.parametrize("text", ['{"half', "[1, 2]", "\x00"])
def test_a_corrupt_or_foreign_file_is_set_aside_with_one_sentence(
    home: Path, said: Callable[[], str], text: str
) -> None:
    home.mkdir()
    (home / "x.json").write_text(text)
    assert read_json("x.json") == {}
    assert read_json("x.json") == {}
    assert said().count("\n") == 1
    assert (home / "x.json.aside-1").read_text() == text
    assert str(home) not in said()


@pytest.mark.parametrize("name", ["predictions.json", "ledger.jsonl", "field_guide.json"])
def test_every_store_survives_a_file_of_another_shape(home: Path, said: Callable[[], str], name: str) -> None:
    home.mkdir()
    (home / name).write_text('{"00.a": 3}\n')
    assert not lesson.outcomes()
    assert not lesson.ledger.rows()
    assert not lesson.field_guide.rows()
    assert said().count("note: ") == 1


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(home: Path) -> None:
    save("x.json", "old")
    with pytest.raises(UnicodeEncodeError):
        save("x.json", "\ud800")
    assert load("x.json", str, "") == "old"
    assert [path.name for path in home.iterdir()] == ["x.json"]


def test_writers_side_by_side_lose_nothing() -> None:
    def write(notebook: str) -> None:
        for i in range(20):
            lesson.field_guide.add(f"symptom {i}", "eyes", "haste", notebook)

    writers = [threading.Thread(target=write, args=(n,)) for n in ("01", "02", "03")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert len(lesson.field_guide.rows()) == 60


def test_digest_tells_parts_apart_and_is_the_same_elsewhere() -> None:
    digest = lesson.digest
    assert digest("a", 1, {"x": [1.5], "y": None}) == digest("a", 1, {"y": None, "x": [1.5]})
    several = (("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (1.0,), ([1],))
    assert len({digest(*parts) for parts in several}) == len(several)
    assert digest("2 CPU cores", 2, 1, "2.11.0") == "e7b5ad1925e8"
    with pytest.raises(TypeError, match="not JSON serializable"):
        digest(object())


# --- numbers and tables --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00123, "s", "1.23 ms"), (3e-10, "s", "0.300 ns"), (2.5e-6, "s", "2.50 µs"), (75.0, "s", "75.0 s"),
        (0.9996, "s", "1.00 s"), (0, "s", "0 s"), (1_048_576, "B", "1.05 MB"), (999.0, "B", "999 B"),
        (999_600, "B", "1.00 MB"), (312e12, "FLOP/s", "312 TFLOP/s"), (25e9, "B/s", "25.0 GB/s"),
        (6, "steps", "6 steps"), (15.8, "%", "15.8 %"), (2 / 3, "", "0.667"), (123_456, "", "123,456"),
        (12345.6, "", "12,300"), (-0.002, "s", "-2.00 ms"), (float("nan"), "s", "unknown s"),
        (torch.tensor(0.5), "s", "500 ms"),
    ],
)  # fmt: skip
def test_number(value: float, unit: str, text: str) -> None:
    assert lesson.number(value, unit) == text


def test_a_table_is_aligned_text_where_there_is_no_notebook(said: Callable[[], str]) -> None:
    lesson.table(("name", "ms"), [("forward", 1.5), ("b", 12)], "times", "All of them.")
    assert said() == "times\nname       ms\n-------  ----\nforward  1.50\nb          12\nAll of them.\n"
    lesson.table(("", ""), [("ranks", None)])
    assert said() == "ranks  -\n"
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        lesson.table(("a", "b"), [("x",)])


def test_a_table_in_html_escapes_and_brings_no_colours() -> None:
    html = importlib.import_module("hpnb.lesson.tables")._html(
        ("<b>", "n"), [("a & b", "1")], [False, True], "t", ""
    )
    assert "&lt;b&gt;" in html
    assert "a &amp; b" in html
    assert "color" not in html
    assert "background" not in html


# --- the banner ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "honest"), [(2, False), (4, True)])
def test_the_banner_says_whether_clocks_mean_anything(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], str], cores: int, honest: bool
) -> None:
    module = importlib.import_module("hpnb.lesson.banner")
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    here = lesson.banner(4, model="ViT", data="generated stand-in", reading="Look at ratios.")
    shown = said()
    assert (here.ranks, here.device, here.backend) == (4, "cpu", "gloo")
    assert here.timings_mean_something is honest
    unwrapped = " ".join(shown.split())
    assert ("contended: 4 ranks share 2 cores; figures replayed" in unwrapped) is not honest
    assert "the CPU is used" in shown
    assert "no GPU here" in shown
    for words in ("ViT", "generated stand-in", "Look at ratios.", hpnb.__version__, torch.__version__):
        assert words in shown
    assert repr(here) == "<4 ranks on cpu over gloo>"


def test_the_banner_on_gpus(monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    answer = subprocess.CompletedProcess([], 0, stdout="Some GPU 80GB\nSome GPU 80GB\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    here = lesson.banner()
    assert (here.ranks, here.device, here.backend, here.devices) == (2, "cuda", "NCCL", "2 x Some GPU 80GB")
    assert here.timings_mean_something
    answer.returncode = 1
    assert lesson.banner().devices == "2 GPUs"
    said()
    shared = lesson.banner(3, device="cuda")
    assert (shared.ranks, shared.backend, shared.devices) == (3, "CUDA IPC and CPU memory", "2 GPUs")
    assert not shared.timings_mean_something
    shown = " ".join(said().split())
    assert "3 ranks share the 2 GPUs" in shown
    assert "NVLink" in shown


def test_the_ledger_names_the_gpu_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    answer = subprocess.CompletedProcess([], 0, stdout="Some GPU 80GB\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    assert importlib.import_module("hpnb.lesson.programs.vit_pipeline").hardware(4) == "Some GPU 80GB"


# --- predictions ---------------------------------------------------------------------------------


def test_without_a_guess_nothing_is_stored(home: Path, said: Callable[[], str]) -> None:
    lesson.predict("00.a", "How long?", None, "ms")
    assert "write your guess and run the cell again" in said()
    assert not (home / "predictions.json").exists()
    lesson.reveal("00.a", 4.0, predicted=5.0)
    shown = said()
    assert "The prediction holds (ratio 0.80)." in shown
    assert "guess" not in shown
    (outcome,) = lesson.outcomes()
    assert (outcome.guess, outcome.predicted, outcome.truth) == (None, 5.0, 4.0)


def test_an_earlier_guess_is_shown_and_not_used(said: Callable[[], str]) -> None:
    lesson.predict("00.a", "How long?", 8, "ms")
    lesson.reveal("00.a", 4.0)
    said()
    asked.clear()  # a new kernel
    lesson.predict("00.a", "How long?", None, "ms")
    assert "(your earlier guess: 8 ms)" in said()
    lesson.reveal("00.a", 100.0)
    shown = said()
    assert "your earlier guess" in shown
    assert "8 ms" in shown
    (outcome,) = lesson.outcomes()
    assert (outcome.guess, outcome.truth) == (8, 4.0)  # what came of it stays


def test_a_rule_of_thumb_stands_in_for_the_guess(said: Callable[[], str]) -> None:
    for guess, shown, hidden in ((None, "rule of thumb", "your guess"), (8, "your guess", "rule of thumb")):
        lesson.predict("00.a", "How long?", guess, "ms", rule_of_thumb=lambda: 2 * 3)
        assert ("6 ms" in said()) is (guess is None)
        lesson.reveal("00.a", 4.0, predicted=5.0, source="counted")
        head, _, row, *_ = said().splitlines()[1:]
        assert shown in head
        assert hidden not in head
        assert head.split("  ")[-1].strip() == "counted / predicted"
        assert row.split("  ")[-1].strip() == "0.80"
    assert lesson.outcomes()[0].rule_of_thumb == 6
    lesson.predict("00.r", "Which?", kind="ranking", rule_of_thumb=["dp", "tp"])
    lesson.reveal("00.r", {"dp": 2.0, "tp": 1.0})
    assert "The rule of thumb puts dp first, which costs 100 % more than tp" in said()
    with pytest.raises(ValueError, match="the rule of thumb 'much' is not a number"):
        lesson.predict("00.b", "How long?", rule_of_thumb="much")


@pytest.mark.parametrize(
    ("guess", "truth", "reading", "met", "regret"),
    [
        (4.0, 5.0, "Your guess holds (ratio 1.25)", True, 0.25),
        (4.0, 5.1, "Your guess is off: the answer is 1.27 times that.", False, 0.275),
        (4.0, 1.0, "Your guess is off: the answer is 0.25 times that.", False, 3.0),
    ],
)
def test_a_model_holds_within_a_quarter(
    said: Callable[[], str], guess: float, truth: float, reading: str, met: bool, regret: float
) -> None:
    lesson.predict("00.a", "How long?", guess, "ms")
    lesson.reveal("00.a", truth, "ms")
    assert reading in said()
    (outcome,) = lesson.outcomes()
    assert outcome.holds(guess) is met
    assert outcome.regret_of(outcome.guess) == pytest.approx(regret)


@pytest.mark.parametrize(
    ("guess", "predicted", "readings"),
    [
        (
            3.7,
            3.5,
            ("below the range (ratio 1.08).", "below the range (ratio 1.14), so name the missing term."),
        ),
        (4.3, 4.6, ("above the range (ratio 0.93).", "above the range (ratio 0.87).")),
        (3.8, 4.2, ("within the range (ratio 1.05).", "within the range (ratio 0.95).")),
        (3.799, 4.203, ("at the end of the range (ratio 1.05).", "at the end of the range (ratio 0.95).")),
    ],
)
def test_answers_are_read_against_a_range(
    said: Callable[[], str], guess: float, predicted: float, readings: tuple[str, str]
) -> None:
    lesson.predict("00.a", "How long?", guess, "ms")
    lesson.reveal("00.a", 4.0, predicted=predicted, truth_range=(3.8, 4.2))
    shown = " ".join(said().split())
    assert f"Your guess lies {readings[0]} The prediction lies {readings[1]}" in shown
    assert "3.80 to 4.20 ms" in shown
    (outcome,) = lesson.outcomes()
    assert outcome.truth_range == (3.8, 4.2)
    assert outcome.holds(guess) is True  # the score goes by the ratio
    with pytest.raises(ValueError, match="must contain"):
        lesson.reveal("00.a", 4.0, truth_range=(4.1, 4.2))
    lesson.reveal("00.a", 4.0)  # a later run without a range
    assert "Your guess holds" in said()


def test_an_identity_must_be_exact(said: Callable[[], str]) -> None:
    lesson.predict("00.b", "Bytes?", 10**9, "B", kind="identity")
    lesson.reveal("00.b", 10**9 + 1, predicted=10**9 + 1)
    shown = said()
    assert (
        "Your guess is off by 1 B, and this question has one exact answer. The prediction is exact." in shown
    )
    lesson.reveal("00.b", 10**9, predicted=10**9 + 1)
    shown = said()
    assert "Your guess is exact. The prediction is off by 1 B" in shown
    assert "0.999999999" in shown  # not a 1.00 that is none


def test_none_predicted_and_none_measured_is_exact(said: Callable[[], str]) -> None:
    lesson.predict("00.z", "How many fit?", kind="identity", rule_of_thumb=3)
    assert "rule of thumb: 3; write your guess and run the cell again" in said()  # a guess may be worse
    lesson.reveal("00.z", 0, predicted=0)
    assert "1.00" not in said()  # 0 / 0 is no ratio


def test_a_rule_of_thumb_has_its_ratio_beside_an_earlier_guess(said: Callable[[], str]) -> None:
    lesson.predict("00.e", "How many bytes?", 7, "B", rule_of_thumb=2)
    lesson.reveal("00.e", 8)
    said()
    lesson.predict("00.e", "How many bytes?", unit="B", rule_of_thumb=2)
    lesson.reveal("00.e", 8)
    shown = " ".join(said().split())
    assert "your earlier guess rule of thumb measured measured / rule of thumb" in shown
    assert "7 B 2 B 8 B 4.00" in shown


def test_a_ratio_that_misses_is_not_rounded_to_one_that_holds(said: Callable[[], str]) -> None:
    for truth, ratio in ((1.5957, "0.798"), (2.502, "1.251"), (1.5, "0.75")):
        lesson.predict("00.m", "Factor?", rule_of_thumb=2)
        lesson.reveal("00.m", truth)
        assert f"the answer is {ratio} times that" in said()


def test_a_ranking_is_scored_by_what_its_first_choice_costs(said: Callable[[], str]) -> None:
    costs = {"dp4": 1.2, "tp4": 2.0, "pp4": 1.0}
    lesson.predict("08.r", "Fastest?", ["dp4", "pp4", "tp4"], kind="ranking")
    lesson.reveal("08.r", costs, predicted=["pp4", "dp4", "tp4"])
    shown = said()
    assert "Your guess puts dp4 first, which costs 20.0 % more than pp4, and 2 of the 3 pairs" in shown
    assert "puts the best first, and 3 of the 3 pairs" in shown
    (outcome,) = lesson.outcomes()
    assert outcome.truth == ("pp4", "dp4", "tp4")
    assert outcome.regret_of(outcome.guess) == pytest.approx(0.2)
    lesson.reveal("08.r", {**costs, "dp4": 165.0}, predicted=["pp4", "tp4", "dp4"])
    answer = " ".join(said().split())
    assert "Your guess puts dp4 first, which costs 165 times as much as pp4, and 1" in answer
    lesson.reveal("08.r", {**costs, "dp4": 11.0}, predicted=["pp4", "tp4", "dp4"])
    assert "puts dp4 first, which costs 1,000 % more than pp4" in " ".join(said().split())
    lesson.reveal("08.r", {"dp4": 1.0, "pp4": 1.0, "tp4": 2.0}, predicted=["tp4", "pp4", "dp4"])
    shown = " ".join(said().split())  # equal costs have no order
    assert "puts the best first, and 2 of the 2 pairs that it names are in order; 1 more costs the" in shown
    assert "and 0 of the 2 pairs that it names are in order; 1 more costs the same either way" in shown
    lesson.reveal("08.r", {"dp4": 1.0, "pp4": 1.0, "tp4": 1.0})
    assert "Your guess puts the best first; 3 more cost the same either way." in " ".join(said().split())
    lesson.reveal("08.r", costs, predicted=["tp4", "dp4", "pp4"])
    assert "and 0 of the 3 pairs that it names are in order" in " ".join(said().split())
    lesson.reveal("08.r", costs, predicted=["dp4", "tp4", "pp4"])
    assert "and 1 of the 3 pairs that it names is in order" in " ".join(said().split())
    assert outcome.holds(outcome.predicted) is True
    assert outcome.holds(outcome.guess) is False
    lesson.predict("08.r", "Fastest?", hpnb.Layout(dp=4).__str__(), kind="ranking")
    lesson.reveal("08.r", ["pp4", "dp4", "tp4"], costs=costs)
    assert "which is not among dp4, tp4, pp4: it has no score" in said()
    assert lesson.outcomes()[0].regret_of(lesson.outcomes()[0].guess) is None
    with pytest.raises(ValueError, match="what each choice costs"):
        lesson.reveal("08.r", ["pp4", "dp4"])


def test_a_guess_made_after_the_reveal_is_marked(said: Callable[[], str]) -> None:
    lesson.predict("00.a", "How long?", 8, "ms")
    lesson.reveal("00.a", 4.0)
    lesson.predict("00.a", "How long?", 8, "ms")  # the cell runs again
    assert "had been shown" not in said()
    lesson.predict("00.a", "How long?", 4, "ms")
    assert "your guess: 4 ms, made after the answer had been shown" in said()
    lesson.reveal("00.a", 4.0)
    (outcome,) = lesson.outcomes()
    assert (outcome.guess, outcome.seen, outcome.holds(4.0)) == (4, True, True)


@pytest.mark.parametrize(
    ("guess", "kind", "said_of_it"),
    [
        ("3 ms", "model", "'3 ms' is not a number; it is asked in ms"),
        (float("nan"), "model", "is not a number"),
        (True, "identity", "is not a number"),
        (torch.ones(2), "model", "is not a number"),
        (["a", "a"], "ranking", "distinct choices"),
        (3.5, "ranking", "is no ranking"),
        (0, "model", "cannot be compared by a ratio; it must be above 0"),
        (-3.0, "model", "cannot be compared by a ratio; it must be above 0"),
        (3, "guess", "kind='guess' is not one of identity, model, ranking"),
    ],
)
def test_a_guess_of_the_wrong_kind_is_refused(guess: Any, kind: Any, said_of_it: str) -> None:
    with pytest.raises(ValueError, match=said_of_it):
        lesson.predict("00.a", "How long?", guess, "ms", kind)
    assert not lesson.outcomes()


def test_an_answer_needs_its_question() -> None:
    with pytest.raises(ValueError, match=r"'00\.x' in this session"):
        lesson.reveal("00.x", 3)
    lesson.predict("00.x", "How long?", 3, "ms")
    with pytest.raises(ValueError, match="asked in ms and is answered in s"):
        lesson.reveal("00.x", 0.003, "s")


# --- exercises -----------------------------------------------------------------------------------


def doubles(solution: Callable[[int], Any]) -> Sequence[Finding]:
    return [Finding(solution(x) == 2 * x, f"{x} doubled: {solution(x)}") for x in (1, 2)]


def on_ranks(solution: Callable[[], Any]) -> Sequence[Finding]:
    got = hpnb.launch(solution, ranks=2)
    return [Finding(got == [0, 1], f"ranks gave {got}")]


TWICE = Exercise("00.1", "Double it", 5, doubles)
RANKS = Exercise("00.2", "Say your rank", 5, on_ranks)


def nothing(x: int) -> int: ...  # type: ignore[empty-body]


def raising(x: int = 0) -> int:
    """Hint: 2."""
    raise NotImplementedError("your code")


STUBS = [
    None,
    ...,
    nothing,
    raising,
    partial(raising),
    (nothing, raising),
]


@pytest.mark.parametrize("stub", STUBS, ids=[str(i) for i in range(len(STUBS))])
def test_a_stub_is_not_yet(said: Callable[[], str], stub: Any) -> None:
    verdict = check(TWICE, stub)
    assert (verdict.status, verdict.findings) == ("not yet", ())
    assert said() == "Exercise 00.1, Double it: yours to write, in about 5 minutes; then run this cell\n"


def test_a_stub_on_ranks_is_not_yet() -> None:
    assert check(RANKS, raising).status == "not yet"


def test_a_solution_passes(said: Callable[[], str]) -> None:
    assert check(TWICE, lambda x: 2 * x).status == "passed"
    assert said() == "✓ 1 doubled: 2\n✓ 2 doubled: 4\nExercise 00.1, Double it: passed\n"
    assert check(TWICE, lambda x: 2).status == "failed"
    assert said() == "✓ 1 doubled: 2\n✗ 2 doubled: 2\nExercise 00.1, Double it: 1 of 2 off\n"


def test_what_torch_lacks_is_no_stub() -> None:
    def lacking(x: int) -> Any:
        return 2 * torch.full((1,), x, device="meta").cpu()  # NotImplementedError, and not the reader's

    verdict = check(TWICE, lacking)
    assert verdict.status == "failed"
    assert "it raised NotImplementedError" in verdict.findings[0].text
    assert "in lacking" in verdict.findings[0].text


def test_an_exception_is_a_finding_with_its_own_last_lines(said: Callable[[], str]) -> None:
    known: dict[str, int] = {}

    def deep(x: int) -> Any:
        return deep(x - 1) if x > -20 else known["no"]

    verdict = check(TWICE, deep)
    shown = said()
    assert verdict.status == "failed"
    assert shown.startswith("✗ it raised KeyError: 'no'\n")
    assert 'return deep(x - 1) if x > -20 else known["no"]' in shown
    assert "  ..." in shown
    assert len(shown.splitlines()) < 18
    assert str(Path(__file__).parent) not in shown
    assert check(TWICE, lambda x: sys.exit(1)).status == "failed"
    short = check(Exercise("00.4", "Short", 1, lambda f: [Finding(f(), "")]), lambda: 1 // 0)
    assert "1 // 0" in short.findings[0].text
    assert "  ..." not in short.findings[0].text
    assert "checks.py" not in short.findings[0].text


def test_an_exception_on_a_rank_shows_that_ranks_traceback(said: Callable[[], str]) -> None:
    def fails() -> Any:
        return 1 // hpnb.rank()

    assert check(RANKS, fails).status == "failed"
    shown = said()
    assert shown.startswith("✗ rank 0 of 2 raised ZeroDivisionError")
    assert "return 1 // hpnb.rank()" in shown


def test_a_check_lets_the_reader_stop_it_and_must_check_something() -> None:
    def stopped(x: int) -> Any:
        raise hpnb.RankInterrupt("interrupted", rank=0)

    with pytest.raises(KeyboardInterrupt):
        check(TWICE, stopped)
    with pytest.raises(ValueError, match="verified nothing"):
        check(Exercise("00.3", "Nothing", 1, lambda _: []), 3)


# --- the exercises of notebook 01 ------------------------------------------------------------------


def ragged_loss(empty: str, losses: torch.Tensor, axis: Any) -> Any:
    """Right, but for what a rank without samples returns: before it joins the others, or after."""
    if empty == "before" and not len(losses):
        return torch.zeros(())
    count = torch.tensor(float(len(losses)))
    torch.distributed.all_reduce(count, group=axis.group)
    if empty == "after" and not len(losses):
        return torch.zeros(())
    return losses.sum() * axis.size / count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("empty", ["before", "after"])
def test_a_rank_that_returns_no_loss_is_named_and_nobody_waits_for_it(empty: str) -> None:
    found = check(notebook_01.ragged_mean, partial(ragged_loss, empty)).findings
    assert [finding.ok for finding in found] == [True] * 4 + [False]
    assert found[-1].text.startswith("4, 1, 0 samples: rank 2, with 0 samples, returned what does not depend")


@pytest.mark.parametrize(("value", "words"), [(1.0, "a float"), (torch.ones(1), r"a tensor of shape (1,)")])
def test_a_loss_is_one_number(value: Any, words: str) -> None:
    found = check(notebook_01.ragged_mean, lambda losses, axis: value).findings
    assert [words in finding.text for finding in found] == [True]


def test_the_bytes_of_the_ragged_mean_are_said_as_they_are() -> None:
    right = check(notebook_01.ragged_mean, partial(ragged_loss, ""))
    assert right.status == "passed"
    wanted = "2, 2, 2 samples: a rank sent 5.3 bytes, at most 10.7 (one number of 8 bytes over 3 ranks)"
    assert right.findings[1].text == wanted

    def twice(losses: torch.Tensor, axis: Any) -> Any:
        torch.distributed.all_reduce(torch.zeros(2), group=axis.group)
        return ragged_loss("", losses, axis)

    assert [finding.ok for finding in check(notebook_01.ragged_mean, twice).findings] == [True, False] * 3
    own = check(notebook_01.ragged_mean, lambda losses, axis: 1 // len(losses[2:])).findings
    assert "raised ZeroDivisionError" in own[0].text  # the reader's own error is shown as such


def reduce_each(
    factor: float, parameters: Any, ranks: int, limit: int, all_reduce: Callable[..., Any]
) -> Any:
    """No buckets, nothing early; the sum times `factor`."""

    def finish() -> None:
        for p in parameters:
            all_reduce(p.grad).wait()
            p.grad *= factor

    return finish


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("factor", "asks"), [(1.0, True), (1 / 3, False), (0.5, False)])
def test_a_sum_in_place_of_a_mean_is_asked_about(factor: float, asks: bool) -> None:
    found = check(notebook_01.reducer, partial(reduce_each, factor)).findings
    means = [finding for finding in found if "mean gradients" in finding.text]
    assert [finding.text.endswith("(a sum, not the mean?)") for finding in means] == [asks] * 6
    assert [finding.ok for finding in means] == [factor == 1 / 3] * 6


def _steps_in_turn() -> tuple[dict[str, float], step_timing.ReplicaStep]:
    axis, slow = device_timing.all_ranks("dp"), hpnb.rank() == 1
    steps = {"slow": lambda: time.sleep(0.05 * slow), "fast": lambda: None}
    rounds = step_timing.rounds_in_turn(steps, repeats=2)
    seconds = {name: min(times) for name, times in rounds.items()}
    weights = [torch.nn.Parameter(torch.tensor([1.0 + slow, 0.0]))]
    overflow = torch.tensor(float(slow))
    return seconds, step_timing.compare_replicas(torch.tensor(2.0 * slow), weights, overflow, axis)


def test_the_slowest_rank_sets_the_time_and_the_farthest_replica_the_distance() -> None:
    results = hpnb.launch(_steps_in_turn, ranks=2, device="cpu")
    assert results[0] == results[1]
    seconds, step = results[0]
    assert seconds["slow"] >= 0.05 > seconds["fast"] > 0
    assert step == (1.0, 1.0, 1)  # mean of 0 and 2; |2 - 1| / |1|; one rank overflowed


def test_the_knee_is_where_steps_stay_below_the_limit() -> None:
    assert step_timing.measured_knee({10: 2.0, 20: 1.05, 40: 1.2, 80: 1.09, 160: 1.0}) == 80
    assert step_timing.measured_knee({10: 1.0, 20: 1.1}) is None


class WholeAdam:
    """Adam on all weights, by an all-reduce; `scale` times the mean."""

    scale, name = 1.0, "optimizer"

    def __init__(self, weights: torch.Tensor, axis: Any, lr: float) -> None:
        self.weights, self.axis = weights, axis
        setattr(self, self.name, torch.optim.Adam([weights.requires_grad_()], lr=lr))

    def step(self, gradient: torch.Tensor) -> None:
        torch.distributed.all_reduce(gradient, group=self.axis.group)
        self.weights.grad = gradient * self.scale / self.axis.size
        getattr(self, self.name).step()


class SumAdam(WholeAdam):
    scale, name = 2.0, "adam"


def test_what_zero_lacks_is_said_in_words() -> None:
    equal, calls, moments = (finding.text for finding in check(notebook_01.zero1, WholeAdam).findings[:3])
    assert equal.endswith("Adam on one process: equal")
    assert calls.endswith("a step called all_reduce; one reduce_scatter and one all_gather are wanted")
    assert moments.endswith("192 bytes of moments on a rank, target 96 bytes")
    found = check(notebook_01.zero1, SumAdam).findings
    assert not found[0].ok
    assert found[0].text.endswith("e-09 (in float64 rounding is 1e-16)")
    assert found[2].text.endswith(
        "no torch.optim.Adam in self.optimizer, so no moments on a rank, target 96 bytes"
    )


# --- ledger and field guide ----------------------------------------------------------------------


def test_the_ledger_keeps_one_row_a_layout(home: Path, said: Callable[[], str]) -> None:
    dp = hpnb.Layout(dp=4)
    lesson.ledger.add("04", "tp4", "vit", {"step (s)": (0.01, None)}, "laptop")
    lesson.ledger.add("01", dp, "vit", {"step (s)": (0.01, 0.05), "sent (B)": (10**6, 10**6)}, "laptop")
    lesson.ledger.add("01", dp, "vit", {"step (s)": (0.01, 0.02), "peak (B)": (None, 3e9)}, "laptop")
    assert len((home / "ledger.jsonl").read_text().splitlines()) == 2
    first, second = lesson.ledger.rows()
    assert (first.notebook, first.layout, second.notebook) == ("01", str(dp), "04")
    assert first.quantities == {"step (s)": (0.01, 0.02), "peak (B)": (None, 3e9)}
    lesson.ledger.show()
    shown = said()
    assert "20.0 ms (2.00)  3.00 GB" in shown
    assert "10.0 ms predicted" in shown
    assert "machine" not in shown
    lesson.ledger.add("01", dp, "vit", {"step (s)": (0.01, 0.02)}, "server")
    assert len(lesson.ledger.rows()) == 3
    lesson.ledger.show()
    assert "server" in said()


def test_the_field_guide_grows_by_one_row_a_symptom(said: Callable[[], str]) -> None:
    lesson.field_guide.show()
    assert "No fault has been found yet." in said()
    lesson.field_guide.add("replicas drift", "distance", "overflow skip not agreed", "01")
    lesson.field_guide.add("replicas drift", "distance between replicas", "a skip that is not agreed", "01")
    assert len(lesson.field_guide.rows()) == 1
    lesson.field_guide.add("a deadlock", "stacks", "order of collectives", "00")
    assert [row.notebook for row in lesson.field_guide.rows()] == ["00", "01"]
    lesson.field_guide.show()
    shown = said()
    assert "distance between replicas" in shown
    assert "overflow" not in shown


# --- steps ---------------------------------------------------------------------------------------


def toy() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    where = hpnb.device()
    layers = (torch.nn.Linear(256, 256, bias=False, device=where) for _ in range(4))  # 256 kB each
    model, x = torch.nn.Sequential(*layers), torch.randn(64, 256, device=where)
    return model, lambda: model(x).square().mean()


def watched_and_recorded() -> tuple[Any, Any, bool, float]:
    axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
    model, loss = toy()
    alone = step_timing.time_backward(model, loss, bucket_mb=0.5, repeats=3)
    clean = all(p.grad is None for p in model.parameters())
    replica = hpnb.DataParallel(model, axis, bucket_mb=0.5)
    return alone, step_timing.record_step(replica, loss, repeats=3), clean, axis.rank


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_backward_alone_says_when_each_bucket_of_data_parallel_is_full(device: str) -> None:
    found = hpnb.launch(watched_and_recorded, ranks=2, device=device, timeout=120)
    (alone, tl, clean, _), (_, same, _, _) = found
    assert clean
    assert tl == same
    sent = [e for e in tl.by_rank[0] if e.op == "all_reduce"]
    assert [2 * e.bytes / 2 for e in sent] == list(alone.nbytes) == [524288.0, 524288.0]  # 2 (p-1)/p is 1
    assert 0 < alone.forward < alone.ready[0] < alone.ready[1] <= alone.end
    assert {e.op for e in tl.events} == {"F", "B", "compute", "all_reduce"}
    assert tl.start == 0
    assert 0 < step_timing.compute_seconds(tl) <= tl.makespan
    assert 0 <= step_timing.exposed_seconds(tl) < tl.makespan


ALONE = step_timing.Backward(1.0, 3.0, (2.0, 3.0), (10.0, 10.0))


def test_a_backward_is_replayed_on_any_wire() -> None:
    wire = hpnb.theory.Link(0.0, 5.0)  # 10 bytes over 2 ranks take 2 s
    during, after = ALONE.on(wire, 2), ALONE.on(wire, 2, during=False)
    assert [(e.op, e.start, e.end) for e in during.events] == [
        ("F", 0.0, 1.0), ("B", 1.0, 3.0), ("all_reduce", 2.0, 4.0), ("all_reduce", 4.0, 6.0),
    ]  # fmt: skip
    assert [(e.start, e.end) for e in after.events if not e.is_compute] == [(3.0, 5.0), (5.0, 7.0)]
    assert (ALONE.exposed(wire, 2), ALONE.exposed(wire, 2, during=False)) == (3.0, 4.0)
    assert ALONE.share(wire, 2) == 0.5
    assert step_timing.exposed_seconds(during) == 3.0
    assert step_timing.exposed_seconds(after) == 4.0
    assert (during.source, step_timing.compute_seconds(during)) == ("simulated", 3.0)
    assert sum(e.bytes for e in during.events) == 20.0


def test_what_is_exposed_is_a_mean_over_the_ranks() -> None:
    events = [hpnb.record.Event(0, -1, "B", -1, 0.0, 2.0), hpnb.record.Event(1, -1, "B", -1, 0.0, 4.0)]
    events += [hpnb.record.Event(rank, -1, "all_reduce", -1, 1.0, 5.0, "dp") for rank in range(2)]
    tl = hpnb.record.Timeline(tuple(events))
    assert (step_timing.exposed_seconds(tl), step_timing.compute_seconds(tl)) == (
        2.0,
        3.0,
    )  # 3 and 1; 2 and 4


def test_distance_is_a_relative_norm_over_all_tensors() -> None:
    a, b = [torch.tensor([0.3]), torch.tensor([0.0, 4.6])], [torch.tensor([0.0]), torch.tensor([3.0, 5.0])]
    apart = (0.3**2 + 3**2 + 0.4**2) ** 0.5 / (3**2 + 5**2) ** 0.5
    assert step_timing.relative_distance(a, b) == pytest.approx(apart, rel=1e-6)
    assert step_timing.relative_distance(b, b) == 0.0
    nothing = [torch.zeros(1)]
    assert step_timing.relative_distance(nothing, nothing) == 0.0
    broken = [torch.tensor([float("nan")])]
    for other in (nothing, [torch.ones(1)]):  # the largest of several distances shows it
        assert max(0.1, step_timing.relative_distance(broken, other)) == float("inf")
    with pytest.raises(ValueError, match="zip"):
        step_timing.relative_distance(a, b[:1])


def test_a_title_says_which_losses_fall() -> None:
    falling, rising = [3.0, 2.0, 2.5, 1.0], [1.0, 2.0, 2.0, 3.0]
    assert step_timing.fall_in_words({"a": falling, "b": falling}) == "Both losses fall"
    assert step_timing.fall_in_words({"a": falling, "b": rising}) == "Only the loss of a falls"
    assert step_timing.fall_in_words({"a": [1.0, 1.0], "b": rising}) == "No loss falls"
    assert step_timing.fall_in_words({"a": [1.0, 1.0 - 1e-7], "b": rising}) == "No loss falls"
    assert step_timing.fall_in_words(dict.fromkeys("abc", falling)) == "All losses fall"


# --- one device's bill -----------------------------------------------------------------------------


def billed() -> tuple[Any, ...]:
    from hpnb.lesson.programs import device_timing
    from hpnb.models import ViTSize

    size = ViTSize(hidden=32, layers=2, heads=2, mlp=128, patch=8, image=16)
    model, loss = device_timing.vit_and_loss(size, 3, torch.float64)
    value = loss(model)
    value.backward()
    counted = sum(p.numel() for p in model.parameters()) == size.parameters(classes=3)
    finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    return value.dtype, value.item(), counted, finite


def test_a_model_for_timing_has_all_parameters_and_finite_gradients() -> None:
    ((dtype, value, counted, finite),) = hpnb.launch(billed, ranks=1, device="cpu", timeout=60)
    assert dtype == torch.float64
    assert value == pytest.approx(1.1, abs=0.2)  # three classes, nothing learnt
    assert counted
    assert finite


def test_the_timed_pictures_are_the_same_on_ranks_whose_generators_differ() -> None:
    from hpnb.lesson.programs import device_timing
    from hpnb.models import ViTSize

    size = ViTSize(hidden=32, layers=1, heads=2, mlp=64, patch=8, image=16)
    pixels = []
    for seed in (1, 2):  # as GPUs' generators, which begin with different states
        torch.manual_seed(seed)
        pixels.append(device_timing.vit_and_batch(size, 3, torch.float32)[1]["pixel_values"])
    assert torch.equal(*pixels)


def test_no_more_ranks_are_timed_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpnb.lesson.programs import device_timing

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for cores, ranks in ((1, 2), (2, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(hpnb.ranks, "usable_cores", lambda cores=cores: cores)
        assert device_timing.timed_ranks() == ranks
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert device_timing.timed_ranks() == 8
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_timing.timed_ranks() == 4  # one GPU is not enough; on the CPU there are 64 cores


# --- what a reader's schedule lives on in -----------------------------------------------------------


def lists(name: str) -> Callable[[int, int], Any]:
    """A function that writes the library's schedule of that name."""
    return lambda p, m: [[str(a) for a in row] for row in schedules.make(name, p, m).actions]


def test_a_schedule_is_kept_as_data_and_run_later(home: Path, said: Callable[[], str]) -> None:
    assert lesson.reader_schedule("1f1b", 4, 8).name == "1f1b"
    assert said() == "running the library's 1f1b: yours is not there\n"
    assert lesson.keep_schedule("1f1b", lists("1f1b")) > 50
    assert said().startswith("kept: your 1f1b, for 2, 3, 4, 8 ranks")
    mine = lesson.reader_schedule("1f1b", 4, 8)
    assert (mine.name, mine.actions) == ("your 1f1b", schedules.make("1f1b", 4, 8).actions)
    assert said() == "running your 1f1b\n"
    assert lesson.reader_schedule("1f1b", 5, 8).name == "1f1b"
    assert "0F0 0F1 0F2 0F3 0B0" in read_json("schedules.json")["1f1b"]["4x8"][0]


@pytest.mark.parametrize(
    "write",
    [
        lists("gpipe"),  # holds more
        lambda p, m: [[f"{r}{op}{k}" for k in range(m) for op in "FB"] for r in range(p)],  # takes longer
        lambda p, m: [[*row, *row] for row in lists("1f1b")(p, m)],  # cannot be run
        lambda p, m: lists("1f1b")(p, m + 1),
        lambda p, m: lists("1f1b")(p, m) if m < 32 else None,
        lambda p, m: 1 / 0,
    ],
    ids=["gpipe", "one by one", "twice", "another size", "not always", "raises"],
)
def test_what_is_not_as_good_is_not_kept(said: Callable[[], str], write: Callable[[int, int], Any]) -> None:
    assert lesson.keep_schedule("1f1b", lists("1f1b")) > 50
    before = read_json("schedules.json")
    said()
    assert lesson.keep_schedule("1f1b", write) == 0
    assert said().startswith("not kept: your 1f1b for ")
    assert read_json("schedules.json") == before
    assert lesson.reader_schedule("1f1b", 2, 3).name == "your 1f1b"


def test_a_stub_keeps_nothing_and_says_nothing(said: Callable[[], str]) -> None:
    def one_f_one_b(p: int, m: int) -> None: ...

    assert lesson.keep_schedule("1f1b", one_f_one_b) == 0
    assert said() == ""
    assert read_json("schedules.json") == {}


@pytest.mark.parametrize(
    "kept", [{"2x1": ["0F0 0B0", "1B0 1F0"]}, {"2x1": ["what"]}, {"2x1": 3}, ["0F0 0B0", "1F0 1B0"]]
)
def test_a_kept_schedule_that_cannot_be_run_is_replaced(said: Callable[[], str], kept: Any) -> None:
    write_json("schedules.json", {"1f1b": kept})
    assert lesson.reader_schedule("1f1b", 2, 1).name == "1f1b"
    assert "the library's" in said()


# --- notebook 02 -----------------------------------------------------------------------------------


def findings(exercise: Exercise, solution: Any) -> list[str]:
    """What was off, in words."""
    return [finding.text for finding in check(exercise, solution).findings if not finding.ok]


def test_a_list_that_hangs_is_told_by_its_circle() -> None:
    def swapped(p: int, m: int) -> Any:
        rows = lists("1f1b")(p, m)
        if m == 8:
            rows[1][1], rows[1][3] = rows[1][3], rows[1][1]
        return rows

    (off,) = findings(notebook_02.one_f_one_b, swapped)
    assert "p=4, m=8: rank 1, step 1: a circle: rank 1 waits at step 1 with 1B0" in off
    assert "[1B0]" in off


@pytest.mark.parametrize(
    ("exercise", "write", "words"),
    [
        (notebook_02.one_f_one_b, lists("gpipe"), "in flight 8, 8, 8, 8, at most 4, 3, 2, 1"),
        (
            notebook_02.one_f_one_b,
            lambda p, m: lists("1f1b")(p, m - (m > 1)),
            "7 microbatches; write 4 ranks, 4 stages",
        ),
        (notebook_02.one_f_one_b, lambda p, m: ["0F"], "no lists of actions such as .*'0F' is no action"),
        (notebook_02.one_f_one_b, lambda p, m: 3, "no lists of actions such as.* is of type int, not a list"),
        (
            notebook_02.one_f_one_b,
            lambda p, m: [[(0, "F", 0)] for _ in range(p)],
            r"no lists of actions such as.* rank 0 has \(0, 'F', 0\), which is not written as '0F0' is",
        ),
        (
            notebook_02.one_f_one_b,
            lambda p, m: [(str(a) for a in row) for row in schedules.make("1f1b", p, m).actions],
            "no lists of actions such as.* rank 0 has one of type generator, not a list",
        ),
        (
            notebook_02.one_f_one_b,
            lambda p, m: lists("1f1b")(p, m + (m == 1)),
            "2 microbatches; write 3 ranks, 3 stages and 1 microbatch",
        ),
        (notebook_02.place_w, lists("1f1b"), "0B0 is not split into I and W"),
        (notebook_02.place_w, lists("zb-h2"), "in flight 7, 7, 7, 7, at most 4, 4, 4, 4"),
        (
            notebook_02.interleave,
            lambda p, m: [[str(a) for a in row] for row in schedules.make("zb-v", 2 * p, m, 2).actions],
            "stage 4 is on rank 3, not on 0",
        ),
    ],
)
def test_what_a_list_lacks_is_said_in_numbers(exercise: Exercise, write: Any, words: str) -> None:
    assert any(re.search(words, off) for off in findings(exercise, write)), findings(exercise, write)


def test_the_library_s_schedules_meet_the_targets_of_notebook_02() -> None:
    def make(name: str, chunks: int = 1) -> Any:
        return lambda p, m: schedules.make(name, chunks * p, m, chunks).actions

    assert check(notebook_02.one_f_one_b, make("1f1b")).status == "passed"
    assert check(notebook_02.interleave, make("interleaved", 2)).status == "passed"
    assert check(notebook_02.place_w, make("zb-h1")).status == "passed"


def test_records_to_diagnose_differ_in_what_they_say() -> None:
    waits = {}
    for case in (notebook_02.HEAVY, notebook_02.LINK, notebook_02.FEW):
        for seed in range(5):
            tl, truth = notebook_02.record(case, seed)
            assert truth[0] == case
            work = {rank: tl.work(rank) for rank in tl.ranks}
            most = max(work.values()) / statistics.median(work.values())
            assert (most > 1.2) == (case == notebook_02.HEAVY)
            assert (truth[1] is None) != (case == notebook_02.HEAVY)
            assert truth[1] in (None, max(work, key=work.__getitem__))
            assert tl.bubble_fraction > 0.25
            waits[case, seed] = tl
    assert waits[notebook_02.FEW, 1] == notebook_02.record(notebook_02.FEW, 1)[0]


def test_a_list_will_do_for_a_diagnosis() -> None:
    heavy, link, few = notebook_02.HEAVY, notebook_02.LINK, notebook_02.FEW
    asked = enumerate((heavy, link, few, few, link, heavy), 1)
    truth = dict(notebook_02.record(case, seed) for seed, case in asked)
    assert check(notebook_02.diagnosis, lambda tl: list(truth[tl])).status == "passed"


def test_a_choice_over_the_cap_is_compared_with_nothing() -> None:
    off = findings(notebook_02.choose_microbatches, lambda job: 2)
    (little,) = (text for text in off if text.startswith("little memory"))
    assert "rank 0 holds 3.20 GB, at most 700 MB" in little


def test_every_job_tells_a_choice_by_cost_from_one_by_bubble_or_by_ranks() -> None:
    answers = {"bubble": lambda job: job.batch, "one": lambda job: 1, "half": lambda job: 2.0}
    for choose in answers.values():
        assert check(notebook_02.choose_microbatches, choose).status == "failed"

    def by_ranks(job: Any) -> int:  # takes p microbatches to be held, however few there are
        able = [m for m in range(1, job.batch + 1) if job.batch % m == 0]
        fits = [m for m in able if job.ranks * (job.batch // m) * job.activation_bytes <= job.memory_cap]
        return min(fits, key=lambda m: job.step_seconds(m))

    (off,) = findings(notebook_02.choose_microbatches, by_ranks)
    assert off.startswith("fewer than ranks: m=8: a step of 496 ms, 1.07 times the shortest")


def test_what_was_published_is_simulated_to_the_digit() -> None:
    paper = vit_pipeline.PUBLISHED
    rows = csv.DictReader(line for line in PUBLISHED.read_text().splitlines() if line[0] != "#")
    (row,) = [r for r in rows if (r["model"], r["microbatches"]) == (paper.model, str(paper.microbatches))]
    wanted = [float(row[k]) for k in ("F", "I", "W", "transfer")]
    assert list(vars(paper.costs).values()) == wanted
    assert paper.stages == int(row["stages"])
    for name, rate in paper.rates.items():
        assert rate == float(row["rate_" + name.replace("-", "_")])
        tl = schedules.make(name, paper.stages, paper.microbatches).simulate(paper.costs)
        assert round(tl.bubble_rate, 4) == rate
    assert round(100 * tl.bubble_fraction, 1) == 10.0  # zb-h2, the other bubble


def test_the_typical_step_is_the_middle_one_or_the_replay_of_middles() -> None:
    made = schedules.make("gpipe", 2, 2)
    costs = [pipeline_parallel.Costs(f, 2.0, 0.0) for f in (1.0, 5.0, 2.0)]
    measured = [replace(made.simulate(each), source="measured") for each in costs]
    assert vit_pipeline.median_step(measured, made) == measured[2]
    label: Any = "replayed from measured CPU time"
    uneven = [replace(made.simulate(pipeline_parallel.Costs(each, 2.0, 0.0)), source=label)
              for each in ([1.0, 9.0], [9.0, 1.0], [1.0, 1.0])]  # fmt: skip
    found = vit_pipeline.median_step(uneven, made)
    assert found == replace(made.simulate(pipeline_parallel.Costs(1.0, 2.0, 0.0)), source=label)
    for name, chunks in {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-v": 2}.items():  # with messages
        made = schedules.make(name, 2, 4, chunks)
        costs = pipeline_parallel.Costs(1.0, 2.0, 1.0, transfer=0.5)
        with_messages = replace(made.simulate(costs), source=label).select("FIWB")
        assert vit_pipeline.median_step([with_messages] * 3, made).makespan == with_messages.makespan


def test_costs_of_half_stages_and_half_backwards_are_of_the_record() -> None:
    tl = schedules.make("1f1b", 2, 4).simulate(pipeline_parallel.Costs([1.0, 3.0], [2.0, 6.0], 0.0))
    whole = vit_pipeline.stage_costs(tl)
    assert (whole.forward, whole.input_grad, whole.weight_grad) == ((1.0, 3.0), (1.0, 3.0), (1.0, 3.0))
    half = vit_pipeline.stage_costs(tl, 2)
    assert (half.forward, half.weight_grad) == ((1.0,) * 4, (1.0,) * 4)
    assert vit_pipeline.stage_seconds(tl) == [3.0, 9.0]
    assert vit_pipeline.compute_seconds(tl) == 4 * 6.0
    assert vit_pipeline.peak_in_flight(tl) == 2
    assert vit_pipeline.peak_in_flight(tl, 2) == 1
    split = schedules.make("zb-h1", 2, 4).simulate(pipeline_parallel.Costs(1.0, [1.0, 2.0], [0.5, 0.25]))
    assert vit_pipeline.input_over_weight(split) == 4.0


def test_a_schedule_is_faster_only_beyond_the_larger_spread() -> None:
    steps, spreads = {"a": 10.0, "b": 7.0, "c": 5.5}, {"a": 4.0, "b": 1.0, "c": 1.4}
    assert vit_pipeline_words.faster_pairs(steps, spreads) == ["c is faster than a and b"]


def test_a_step_without_waits_starts_each_action_when_it_can() -> None:
    made = schedules.make("1f1b", 2, 4)
    costs = pipeline_parallel.Costs([1.0, 2.0], [3.0, 1.5], 0.0)
    late = made.simulate(replace(costs, transfer=0.5))
    assert vit_pipeline.seconds_without_waits(late, made) == made.simulate(costs).makespan < late.makespan


@pytest.mark.parametrize(
    ("p", "m", "forward", "ratio"), [(2, 8, 1.0, 1.0), (4, 8, 1.3, 1.6), (8, 24, 1.9, 2.0)]
)
def test_page_02_counts_the_idle_time_of_zero_bubble_schedules(
    p: int, m: int, forward: float, ratio: float
) -> None:
    costs = pipeline_parallel.Costs(forward, ratio, 1.0)  # F, I, W

    def idle(name: str) -> float:
        return schedules.make(name, p, m).simulate(costs).makespan - m * (forward + ratio + 1.0)

    assert idle("1f1b") == pytest.approx((p - 1) * (forward + ratio + 1.0))
    assert idle("zb-h1") == pytest.approx((p - 1) * (forward + ratio - 1.0))
    assert idle("zb-h2") == pytest.approx((p - 1) * forward)


def test_a_step_is_simulated_from_seconds_of_its_layers() -> None:
    made = schedules.make("1f1b", 2, 4)
    tl = vit_pipeline.simulate_layers(made, [3.0, 6.0, 9.0], [1, 2])
    assert tl == made.simulate(pipeline_parallel.Costs([1.0, 5.0], [2.0, 10.0], 0.0))
    assert tl.source == "simulated"


def test_a_recorded_step_is_replayed_on_any_link() -> None:
    made = schedules.make("gpipe", 2, 3)
    tl = made.simulate(pipeline_parallel.Costs(1.0, 2.0, 0.0))
    sent = hpnb.record.Event(0, -1, "send", -1, 0.0, 9.0, "pp", 10.0)
    tl = replace(tl, events=(*tl.events, sent))
    slower = vit_pipeline.replay_on_link(tl, made, hpnb.theory.Link(0.5, 10.0), 5.0)
    assert slower.source == "simulated"
    assert slower.makespan == made.simulate(pipeline_parallel.Costs(1.0, 2.0, 0.0, 1.0)).makespan
    assert {e.op for e in slower.events} == {"F", "B"}


TINY = ViTSize(hidden=16, layers=4, heads=2, mlp=32, patch=8, image=16)


def ran_and_held() -> Any:
    made = {"gpipe": schedules.make("gpipe", 2, 4), "zb-v": schedules.make("zb-v", 4, 4, 2)}
    cuts: Any = {"gpipe": [1, 3]}
    with pytest.MonkeyPatch.context() as patch:  # processor time, which a busy machine does not make longer
        patch.setattr("hpnb.pipeline_parallel.executor.usable_cores", lambda: 1)
        found = vit_pipeline.time_schedules(TINY, 8, torch.float32, made, cuts, repeats=2)
    return found, vit_pipeline.measure_activations(TINY, 8, torch.float32, made["gpipe"])


def cut_three_ways() -> Any:
    cuts: Any = {"uniform": "uniform", "heavy": [1, 3]}
    return vit_pipeline.time_cuts(TINY, 8, torch.float32, schedules.make("1f1b", 2, 4), cuts)


@pytest.mark.parametrize("cores", [1, 2])
def test_no_noise_decides_between_cuts_where_ranks_share_cores(cores: int) -> None:
    (rounds, counts), (same, _) = hpnb.launch(cut_on, cores, ranks=2, device="cpu", timeout=120)
    assert rounds == same
    assert {len(steps) for steps in rounds.values()} == {1 if cores == 1 else 3}
    ran = {name: steps[0] for name, steps in rounds.items()}
    assert list(ran) == list(counts) == ["uniform", "heavy", "by time"]
    assert counts["uniform"] == [3, 3]  # embedding, four blocks, head
    assert counts["heavy"] == [2, 4]
    assert sum(counts["by time"]) == 6
    assert {tl.source for tl in ran.values()} == {"simulated" if cores == 1 else "measured"}
    if cores == 1:
        assert max(map(ran["by time"].work, (0, 1))) <= max(map(ran["uniform"].work, (0, 1)))
        one, two = (sorted(e.duration for e in ran[cut].by_rank[0]) for cut in ("uniform", "heavy"))
        three, four = (sorted(e.duration for e in ran[cut].by_rank[1]) for cut in ("uniform", "heavy"))
        assert one[0] - two[0] == pytest.approx(four[0] - three[0])  # a block is a block, wherever it is


def cut_on(cores: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpnb.pipeline_parallel.executor.usable_cores", lambda: cores)
        return cut_three_ways()


def test_schedules_take_turns_on_ranks_and_what_they_hold_is_counted() -> None:
    ranks = hpnb.launch(ran_and_held, ranks=2, device="cpu", timeout=120)
    (found, held), (same, other) = ranks
    assert list(found) == ["gpipe", "zb-v"]
    assert {name: len(tl.select("FIWB").events) for name, tl in found.items()} == {"gpipe": 16, "zb-v": 48}
    assert found == same
    assert found["gpipe"].work(0) < found["gpipe"].work(1)  # one block and three
    assert held[1:] == other[1:] == (4 * 2 * TINY.tokens * 16 * 4, 4)
    assert held[0] > 4 * 2 * TINY.tokens * 16 * 4


# --- notebook 03 -----------------------------------------------------------------------------------


def whole_mlp(x: Any, A: Any, a: Any, B: Any, b: Any, axis: Any) -> Any:
    """No part of anything: every rank does all of it."""
    return torch.nn.functional.gelu(x @ A + a) @ B + b


def gathered_mlp(x: Any, A: Any, a: Any, B: Any, b: Any, axis: Any) -> Any:
    """Columns twice, put together between: exact, and more is sent."""
    A, a, B = (w.chunk(axis.size, dim)[axis.rank] for w, dim in ((A, 1), (a, 0), (B, 1)))
    y = comm.gather(torch.nn.functional.gelu(comm.replicate(x, axis) @ A + a), axis, 1)
    return comm.gather(comm.replicate(y, axis) @ B, axis, 1) + b


def whole_norm(x: Any, g: Any, norm: Any, A: Any, B: Any, axis: Any) -> Any:
    """Gathers the tokens before the norm."""
    A, B = A.chunk(axis.size, 1)[axis.rank], B.chunk(axis.size, 0)[axis.rank]
    y = norm(comm.all_gather(x, axis, 0)) * comm.replicate(g, axis)
    return x + comm.reduce_scatter(torch.nn.functional.gelu(y @ A) @ B, axis, 0)


def all_at_once(c: Any, a: Any, b: Any, t: int, across: Any, down: Any) -> Any:
    """The whole product in the first step."""
    panels = [comm.broadcast(a, across, i) @ comm.broadcast(b, down, i) for i in range(2)]
    return c + sum(panels) if t == 0 else c


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        (notebook_03.column_row, whole_mlp, "2 ranks: a rank does 1.00 of one process's FLOPs, target 0.50"),
        (notebook_03.column_row, gathered_mlp, "3 ranks, forward: 2 all_gather, .* target 1 all_reduce"),
        (
            notebook_03.column_row,
            lambda *_: 3,
            "rank [01] of 2 returned a int, and a tensor of shape",
        ),
        (notebook_03.column_row, lambda x, *_: x[1:], r"of shape \(5, 12\), and shape \(6, 12\) is wanted"),
        (notebook_03.column_row, lambda x, *_: x.detach(), "does not depend on the weights"),
        (
            notebook_03.sequence_parallel,
            whole_norm,
            "3 ranks: the norm saw 12 tokens on a rank, target 4 of 12",
        ),
        (notebook_03.summa, all_at_once, "after step 0: the sum of 1 of 2 panels: off by"),
        (notebook_03.summa, all_at_once, "step 1, down: 2 broadcast, 80 B a rank, target 40 B"),
    ],
)
@pytest.mark.sampled(4)
def test_what_a_cut_lacks_is_said_in_numbers(exercise: Exercise, answer: Any, words: str) -> None:
    assert any(re.search(words, off) for off in findings(exercise, answer)), findings(exercise, answer)


def test_a_rank_that_fails_in_an_exercise_shows_its_own_lines() -> None:
    def broken(c: Any, a: Any, b: Any, t: int, across: Any, down: Any) -> Any:
        return c + nonsense  # type: ignore[name-defined]  # noqa: F821

    (off,) = findings(notebook_03.summa, broken)
    assert "NameError: name 'nonsense' is not defined" in off


def test_cliffs_to_read_are_of_real_runs_and_differ_in_what_they_say() -> None:
    found = hpnb.launch(notebook_03.records, ranks=2, device="cpu", timeout=120)[0]
    kinds = [truth[0] for _, truth, _ in found]
    assert sorted(kinds) == ["backward", "backward", "forward", "own"]
    for errors, (kind, where), off in found:
        modules, wrong = list(errors), [m for m, error in errors.items() if error > 1e-9]
        assert modules[0] == "classifier"
        assert modules[-1].startswith("vit.embeddings")
        assert all(error < 1e-12 for m, error in errors.items() if m not in wrong)
        assert (off > 1e-6) == (kind == "forward")
        if kind == "forward":
            assert wrong == modules
        elif kind == "own":
            assert wrong == [where]
        else:
            first = modules.index(wrong[0])
            assert wrong == modules[first:]
            assert where is not None
            assert modules[first - 1].startswith(where)
            assert not modules[first].startswith(where)


def test_a_wrong_diagnosis_is_shown_the_record_and_not_the_answer() -> None:
    said = [re.sub("vit.layers.", "", off) for off in findings(notebook_03.gradient_cliff, lambda errors: 3)]
    assert [re.sub(r"loss off by \S+: ", "", off).removesuffix("; you say 3") for off in said] == [
        "record 1, first wrong is 1.layernorm_after, right down to 1.mlp.fc1, 16 of 28 wrong",
        "record 2, first wrong is 2.mlp.fc2, right down to vit.layernorm, 1 of 28 wrong",
        "record 3, first wrong is 1.layernorm_before, right down to 1.attention.q_proj, 11 of 28 wrong",
        "record 4, first wrong is classifier, none is right before it, 28 of 28 wrong",
    ]


def test_a_drift_says_whose_copies_part() -> None:
    from matplotlib.text import Text

    for more, whose in (({}, "replicas"), ({"between": "ranks' copies"}, "ranks' copies")):
        figure = hpnb.plot.drift({"a run": [1.0, 0.9]}, {"a run": [0.0, 1e-3]}, **more)
        told = [text.get_text() for text in figure.findobj(Text)]
        assert f"relative distance between {whose}" in told
        assert f"the loss, and how far apart {whose} are" in told


def test_every_job_tells_a_choice_by_time_from_one_by_memory_or_by_habit() -> None:
    def able(job: Any) -> list[int]:
        sizes = [t for t in range(1, job.devices + 1) if job.devices % t == 0]
        return [t for t in sizes if job.state_bytes(t) <= job.cap]

    def shortest(job: Any) -> int:
        return min(able(job), key=lambda t: job.step_seconds(t))

    assert check(notebook_03.choose_ranks, shortest).status == "passed"
    jobs = notebook_03.TASKS
    assert [shortest(job) for job in jobs.values()] == [1, 4, 16, 4, 4]
    for kind in (torch.tensor, float):  # of a whole number, and so are NumPy's, which have an index, too
        assert check(notebook_03.choose_ranks, lambda job, kind=kind: kind(shortest(job))).status == "passed"
    for choose in (lambda job: min(able(job)), lambda job: 8, lambda job: job.devices, lambda job: 1.0):
        assert check(notebook_03.choose_ranks, choose).status == "failed"

    def behind_computing_alone(job: Any) -> int:  # the sums of activations are time to hide behind, too
        def step(t: int) -> float:
            d = job.devices // t
            computing = 6 * job.parameters * job.tokens / job.devices / job.rate
            sums = 4 * job.layers * theory.seconds("all_reduce", 2 * job.tokens / d * job.hidden, t, job.link)
            gradient = 2 * job.parameters / t
            return computing + sums + theory.exposed_seconds(2 / 3 * computing, gradient, 24, d, job.link)

        return min(able(job), key=step)

    (off,) = findings(notebook_03.choose_ranks, behind_computing_alone)
    assert re.match(r"fits, a slow link: t=2: a step of .*, 1.13 times the shortest of those that fit", off)
    for odd in (3, 0, -4, 4.5, float("nan"), True, "4", None, (4, 16)):
        said = findings(notebook_03.choose_ranks, lambda job, odd=odd: odd)
        wanted = f"t is {odd!r}, and it must be an int that divides 64 devices: 1, 2, 4, 8, 16, 32, 64"
        assert said[0] == f"fits, and many tokens: {wanted}"
    too_few = jobs["does not fit"]
    (off,) = findings(notebook_03.choose_ranks, lambda job: 1 if job is too_few else shortest(job))
    assert off == "does not fit: t=1: a device holds 201 GB, at most 80.0 GB"


def one_block() -> Any:
    size = ViTSize(hidden=16, layers=3, heads=2, mlp=64, patch=8, image=32)
    tl = vit_tensor.record_block(size, 3, torch.float32, repeats=3)
    sequence = vit_tensor.record_block(size, 3, torch.float32, "1d+sp", repeats=1)
    sent = [vit_tensor.measure_block(size, 3, torch.float32, "1d", cut) for cut in (False, True)]
    batch = {"pixel_values": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    batch["labels"] = torch.arange(3)
    loss, right = vit_tensor.serial_gradients(size, batch)
    model = parallelize(vit_tensor.float64_vit(size), vit_tensor.tensor_axis())
    value = model(**batch).loss
    value.backward()
    errors = vit_tensor.gradient_errors(model, right)
    return tl, sequence, sent, abs(value.item() - loss), errors, size


def test_a_block_is_recorded_with_its_weight_gradients_beside_the_sums() -> None:
    (tl, sequence, sent, off, errors, size), (_, _, other, *_) = hpnb.launch(
        one_block, ranks=2, device="cpu", timeout=120
    )
    assert off < 1e-12
    assert max(errors.values()) < 1e-12
    assert list(errors)[:2] == ["classifier", "vit.layernorm"]
    assert list(errors)[2].startswith("vit.layers.2.mlp")
    for own in tl.by_rank.values():
        sums = [e for e in own if e.op == "all_reduce"]
        assert len(sums) == 4
        assert {e.bytes for e in sums} == {3 * 17 * 16 * 4}
        assert next(e.op for e in own if e.op in "FIW") == "F"
        weights = [e for e in own if e.op == "W"]
        assert len(weights) == 6  # two of the MLP, four of the attention
        assert all(e.start > sums[1].end for e in weights)
        forward = [e for e in own if e.op == "F"]
        assert not any(f.start < s.end and s.start < f.end for f in forward for s in sums[:2])
        compute = sorted((e for e in own if e.is_compute), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in pairwise(compute))
    assert {e.op for e in sequence.events if not e.is_compute} >= {"all_gather", "reduce_scatter"}
    sums = [e.duration for e in tl.events if e.op == "all_reduce"]
    assert vit_tensor.mean_seconds(tl) == pytest.approx(sum(sums) / 2)
    assert vit_tensor.mean_seconds(tl.split_waits(), ["wait", "move"]) == pytest.approx(sum(sums) / 2)
    assert vit_tensor.mean_seconds(tl, "FIW") == pytest.approx(sum(tl.work(rank) for rank in tl.ranks) / 2)
    block = size.block(3, 4)
    for cut, (bytes_sent, kept) in zip((False, True), sent, strict=True):
        assert bytes_sent == theory.block_sent(block, "1d", 2, 1, cut).bytes()
        assert kept == theory.activation_bytes(block, "1d", 2, 1, cut)
    assert other[0] == sent[0]
    assert other[1][1] < sent[1][1]  # 51 tokens: 26 and 25


def test_small_gaps_between_spans_of_compute_are_closed_and_waits_stay() -> None:
    def event(op: str, start: float, end: float) -> Event:
        return Event(0, -1, op, -1, start, end, "" if op in "FIW" else "tp")

    tl = Timeline(
        (event("I", 0.0, 1.0), event("W", 1.001, 2.0), event("I", 2.5, 3.0), event("all_reduce", 1.0, 2.5))
    )
    found = vit_tensor.close_gaps(tl)
    assert [(e.op, e.start, e.end) for e in found.events if e.is_compute] == [
        ("I", 0.0, 1.001), ("W", 1.001, 2.0), ("I", 2.5, 3.0),
    ]  # fmt: skip
    assert [e for e in found.events if not e.is_compute] == [e for e in tl.events if not e.is_compute]


@pytest.mark.slow  # notebook 03 races them, too
def test_modes_race_on_four_ranks_and_are_written_down() -> None:
    with hpnb.Ranks(4, device="cpu", timeout=120) as ranks:
        square, sizes = vit_tensor.four_ranks(ranks)
        assert square is ranks
        assert sizes.dtype == torch.float32
        modes = ("1d", "1d+sp", "2d")
        raced = {
            (sizes.size, images): ranks.run(
                vit_tensor.time_blocks, sizes.size, images, sizes.dtype, modes, repeats=2
            )[0]
            for images in (8, 64)
        }
        card = lesson.MachineCard("a machine", "cpu", 4, 1e-4, 1e9, 1e11, "float32", (1,), (1.0,))
        predicted_seconds = vit_tensor_predictions.predict_modes(raced, card, torch.float32)
        vit_tensor.add_to_ledger(ranks, raced, predicted_seconds, card, torch.float32)
    assert all(set(times) == {"1d", "1d+sp", "2d"} and min(times.values()) > 0 for times in raced.values())
    assert predicted_seconds.keys() == raced.keys()
    (size, images), first = next(iter(predicted_seconds.items()))
    block, rate = size.block(images, 4), vit_tensor_predictions.core_share(card) * card.matmul
    assert first["2d"] == theory.block_seconds(block, "2d", 4, card.link, rate).total
    assert first["1d+sp"] == theory.block_seconds(block, "1d", 4, card.link, rate, 1, True).total
    rows = lesson.ledger.rows()
    assert [row.model.rpartition(", ")[2] for row in rows] == ["1d", "1d+sp", "2d"]
    for row in rows:
        assert (row.layout, row.machine) == (str(hpnb.Layout(tp=4)), "a machine")
        for name in ("sent (B)", "kept (B)"):
            predicted, measured = row.quantities[name]
            assert predicted == measured
        assert (row.quantities["forward and backward (s)"][1] or 0.0) > 0
