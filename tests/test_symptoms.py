"""Each program of docs/symptoms.md fails as it says and its instrument finds it; repaired, it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_pools import RankPools
from symptom_programs import Symptom, read_symptoms, run_program

SYMPTOMS = read_symptoms()
MILLISECONDS = re.compile(r"([\d.]+) ms")


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    shared = RankPools()
    yield shared
    shared.close()


def rows(printed: str) -> list[object]:
    """The literals that a program prints, one a line."""
    return [ast.literal_eval(line) for line in printed.splitlines()]


def milliseconds(printed: str) -> list[float]:
    return [float(number) for number in MILLISECONDS.findall(printed)]


# By number: does the failure occur, does the instrument find it? For a repaired program both say no.
Check = Callable[[str], bool]
CHECKS: dict[int, tuple[Check, Check]] = {
    1: (lambda said: "NoneType" in said, lambda said: "{}" in said),
    2: (lambda said: rows(said) != [1.0, 1.0], lambda said: "read different batches" in said),
    3: (
        lambda said: len(set(re.findall(r"\d\.\d+", said))) == 1,
        lambda said: "8 of the 8 parameters" in said,
    ),
    4: (lambda said: "4.166" in said, lambda said: len(set(re.findall(r"\d\.\d+", said))) > 1),
    5: (lambda said: "weight" in said, lambda said: rows(said) != [[{}, {}]]),
    6: (lambda said: "loaded" not in said, lambda said: "lacks" in said),
    7: (lambda said: "0.02" not in said, lambda said: "no state of the lr_scheduler" in said),
    8: (lambda said: "started" not in said, lambda said: "rank 0: File" in said and "rank 1: File" in said),
    9: (lambda said: "weight.grad" in said, lambda said: rows(said) != [[{}, {}]]),
    10: (lambda said: "weight.grad" in said, lambda said: rows(said) != [[{}, {}]]),
    11: (lambda said: "e+" in said, lambda said: len(set(re.findall(r"'([^']+)'", said))) > 1),
    12: (
        lambda said: len({line.partition("]")[0] for line in said.splitlines()}) == 1,
        lambda said: "gives each of the 2 data-parallel ranks all samples" in said,
    ),
    13: (lambda said: "timed out" in said, lambda said: "3 batches on rank 0 and 2 on rank 1" in said),
    14: (lambda said: said.count("\n") == 2, lambda said: "optimizer 262,148" in said),
    15: (
        lambda said: milliseconds(said)[1] > 1.0 > milliseconds(said)[0],
        lambda said: "200 calls" in said,
    ),
}


def same_output(printed: str, page: str) -> bool:
    """Texts are equal, numbers to 2 % (libraries differ in the last digits), and times are left out."""
    number = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:e[+-]\d+)?")
    texts = [MILLISECONDS.sub("some ms", text) for text in (printed, page)]
    values = [[float(n.replace(",", "").rstrip(".") or 0) for n in number.findall(text)] for text in texts]
    return (
        number.sub("#", texts[0]) == number.sub("#", texts[1])
        and len(values[0]) == len(values[1])
        and all(a == pytest.approx(b, rel=0.02) for a, b in zip(*values, strict=True))
    )


def test_the_page_has_all_symptoms_and_each_program_is_short() -> None:
    assert [symptom.number for symptom in SYMPTOMS] == list(CHECKS) == list(range(1, 16))
    for symptom in SYMPTOMS:
        assert f"## {symptom.number}. " in symptom.text
        assert symptom.program.count("# finds it") == 1
        assert all(f"**{part}**" in symptom.text for part in ("You see", "Why.", "Found by"))
        assert len([line for line in symptom.program.splitlines() if line.strip()]) <= 24


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: f"{symptom.number}")
def test_the_failure_occurs_and_the_instrument_finds_it(
    symptom: Symptom, pools: RankPools, tmp_path: Path
) -> None:
    occurs, finds = CHECKS[symptom.number]
    printed = run_program(symptom.preamble + symptom.program, pools, tmp_path)
    assert occurs(printed), printed
    assert finds(printed), printed
    assert same_output(printed, symptom.printed), "run python tests/symptom_programs.py\n" + printed


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: f"{symptom.number}")
def test_the_repaired_program_does_not_fail_and_nothing_is_found(
    symptom: Symptom, pools: RankPools, tmp_path: Path
) -> None:
    occurs, finds = CHECKS[symptom.number]
    printed = run_program(symptom.preamble + symptom.repaired, pools, tmp_path)
    assert not finds(printed), printed
    if symptom.number == 15:  # one message still takes longer than none, but there is only one
        assert " 1 calls" in printed, printed
    else:
        assert not occurs(printed), printed
