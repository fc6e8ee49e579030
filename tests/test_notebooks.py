"""The notebooks keep the rules that a machine can check, and each rule is one that can be broken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import notebook_rules
import pytest
from nbformat.v4 import new_code_cell, new_output
from notebook_exercises import unproven
from notebook_fake import ANSWERS, MUTATIONS, TEXT, code
from notebook_rules import RULES
from retold_rules import RETOLD, RETOLD_RULES

from hpnb.lesson.pages import committed, numbers_in_prose, paired

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EVERY_RULE = RULES | RETOLD_RULES
WRONG = Path(__file__).parent / "wrong_answers"

real = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# --- the notebooks -----------------------------------------------------------------------------------


def test_every_notebook_is_a_pair() -> None:
    texts = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.py")}
    assert texts == {path.stem for path in NOTEBOOKS}


@real
def test_a_notebook_is_in_step_with_its_text(path: Path) -> None:
    assert paired.differences(path) == []


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@real
def test_a_notebook_keeps_the_rules(path: Path, rule: Callable[[Any], list[str]]) -> None:
    assert rule(paired.read(path)) == []


@real
def test_numbers_and_claims_in_prose_are_those_of_the_run(path: Path) -> None:
    nb = paired.read(path)
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    assert numbers_in_prose.differences(prose, numbers_in_prose.values_beside(path)) == []
    assert numbers_in_prose.broken_claims(nb.metadata["hpnb"].get("claims", {})) == []


@pytest.mark.parametrize("rule", RETOLD_RULES.values(), ids=list(RETOLD_RULES))
@pytest.mark.parametrize("page", RETOLD)
def test_a_retold_page_keeps_stricter_rules(page: str, rule: Callable[[Any], list[str]]) -> None:
    assert rule(paired.read(ROOT / "notebooks" / page)) == []


# 10 to 40 s of CPU time each. That a check tells right from wrong is tested with small exercises below.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercises_tell_right_from_wrong(path: Path, tmp_path: Path) -> None:
    assert unproven(paired.read(path), path.stem, WRONG, tmp_path) == []


def test_every_wrong_answer_belongs_to_a_notebook() -> None:
    names = tuple(f"{path.stem}_" for path in NOTEBOOKS)
    assert [file.name for file in WRONG.glob("*.py") if not file.name.startswith(names)] == []


# --- the rules ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook that keeps every rule, run and committed as a real one is."""
    path = tmp_path_factory.mktemp("fake") / "00_fake"
    path.with_suffix(".py").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        assert committed.main([str(path)]) == 0
    nb = paired.read(path)
    claims = {"it holds": {"holds": True, "numbers": None}}
    nb.metadata["hpnb"] |= {"values": {"00.minutes": [5, "minutes"]}, "claims": claims}
    paired.write(nb, path)
    committed.fill(path)
    return path


@pytest.fixture
def nb(fake: Path) -> Any:
    return copy.deepcopy(paired.read(fake))


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A folder of wrong answers for the fake notebook."""
    folder = tmp_path / "wrong_answers"
    folder.mkdir()
    for n in ANSWERS:
        (folder / f"00_fake_{n}.py").write_text(f"def mine_{n}(a, b):\n    return 99\n")
    return folder


def test_a_good_notebook_keeps_every_rule(fake: Path, nb: Any) -> None:
    assert {name: rule(nb) for name, rule in EVERY_RULE.items() if rule(nb)} == {}
    assert paired.differences(fake) == []


@pytest.mark.parametrize(
    ("rule", "what", "mutate"), MUTATIONS, ids=[f"{rule}: {w}" for rule, w, _ in MUTATIONS]
)
def test_each_rule_sees_what_breaks_it(
    nb: Any, rule: str, what: str, mutate: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook_rules, "names_here", lambda: {"ada-of-this-host"})
    assert EVERY_RULE[rule](nb) == []
    mutate(nb)
    assert EVERY_RULE[rule](nb) != [], f"{what} went unseen"


def test_each_rule_is_broken_by_something() -> None:
    assert {rule for rule, _, _ in MUTATIONS} == set(EVERY_RULE)


def test_words_of_the_lesson_are_no_names(nb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code(nb, 1).outputs.append(new_output("stream", name="stdout", text="by the rule of thumb"))
    for name, leaks in (("rule", 0), ("thumb", 1)):  # the lesson speaks of rules
        monkeypatch.setattr(notebook_rules, "names_here", lambda name=name: {name})
        assert len(RULES["anonymous"](nb)) == leaks


# --- exercises ---------------------------------------------------------------------------------------


def test_good_exercises_are_proven(nb: Any, wrong: Path, tmp_path: Path) -> None:
    assert unproven(nb, "00_fake", wrong, tmp_path) == []


def test_bad_exercises_are_found(nb: Any, wrong: Path, tmp_path: Path) -> None:
    """One defect in each exercise, so that one kernel shows three."""
    for cell in nb.cells:
        cell.source = cell.source.replace(
            "def mine_1(a, b):\n    ...", "raise NotImplementedError('write me')"
        )
        cell.source = cell.source.replace("return a - b", "return a + b")
    (wrong / "00_fake_3.py").write_text("def mine_3(a, b):\n    return a * b\n")
    assert unproven(nb, "00_fake", wrong, tmp_path) == [
        "exercise 1: the stub should be 'not yet'; it is 'raised NotImplementedError: write me'",
        "exercise 2: the solution should be 'passed'; it is 'failed'",
        "exercise 3: the wrong should be 'failed'; it is 'passed'",
    ]


def test_an_answer_does_not_see_the_one_before(nb: Any, wrong: Path, tmp_path: Path) -> None:
    """Exercise 2's stub defines nothing: only a left-over of exercise 1 could make its check run."""
    for cell in nb.cells:
        cell.source = cell.source.replace("def mine_2(a, b):\n    ...", "pass")
        cell.source = cell.source.replace("check(-1, mine_2)", "check(-1, globals().get('mine_1', mine_2))")
    (wrong / "00_fake_2.py").write_text("pass")
    found = unproven(nb, "00_fake", wrong, tmp_path)
    assert [line for line in found if "NameError: name 'mine_2'" not in line] == []
    assert len(found) == 2


def test_a_check_must_end_in_a_verdict(nb: Any, wrong: Path, tmp_path: Path) -> None:
    for cell in nb.cells:
        cell.source = cell.source.replace("check(3, mine_1)", "verdict = check(3, mine_1)")
    found = unproven(nb, "00_fake", wrong, tmp_path)
    assert len(found) == 3
    assert all("exercise 1" in line and "no verdict" in line for line in found)


@pytest.mark.parametrize(
    ("says", "spoil"),
    [
        ("exercise 2 has no wrong", lambda nb, wrong: (wrong / "00_fake_2.py").unlink()),
        ("00_fake_4.py answers no exercise", lambda nb, wrong: (wrong / "00_fake_4.py").write_text("")),
        ("exercise 1 has no stub", lambda nb, wrong: [cell.metadata.pop("tags", 0) for cell in nb.cells]),
        ("exercise 3 has no solution", lambda nb, wrong: nb.cells.__delitem__(-2)),
    ],
)
def test_what_is_missing_is_named(
    nb: Any, wrong: Path, tmp_path: Path, says: str, spoil: Callable[[Any, Path], object]
) -> None:
    spoil(nb, wrong)
    assert says in unproven(nb, "00_fake", wrong, tmp_path)


def test_a_broken_setup_is_said(nb: Any, wrong: Path, tmp_path: Path) -> None:
    nb.cells.insert(0, new_code_cell("import no_such_module", metadata={"tags": ["setup"]}))
    assert unproven(nb, "00_fake", wrong, tmp_path) == [
        "the exercises did not run: ModuleNotFoundError: No module named 'no_such_module'"
    ]
