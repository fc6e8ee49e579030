"""What the command that runs pages refuses, and what it leaves in their files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpnb import files, lesson
from hpnb.lesson import values
from hpnb.lesson.pages import committed, numbers_in_prose, paired
from hpnb.lesson.show import show
from hpnb.lesson.values import WRITING, Value


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: str(capsys.readouterr().out)


def recording(key: str, value: int) -> str:
    """A program that records as `lesson.record` does, without the time that importing it takes."""
    return (
        "import os\nfrom IPython.display import display\n"
        f"assert os.environ[{WRITING!r}] == {key[:2]!r}\n"
        f"payload = {{'values': {{{key!r}: [{value}, '']}}}}\n"
        "display({'text/plain': ''}, metadata={'hpnb': payload}, raw=True)\n"
    )


def page_of(*payloads: Any) -> Any:
    """A notebook whose one cell has these payloads in its outputs."""
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    outputs = [new_output("display_data", {"text/plain": ""}, metadata={"hpnb": p}) for p in payloads]
    return new_notebook(cells=[new_code_cell("1", outputs=outputs)])


def test_a_key_has_one_value_and_a_claim_made_twice_must_hold_twice() -> None:
    one, other = {"values": {"04.a": [1.0, "s"]}}, {"values": {"04.a": [2.0, "s"]}}
    assert numbers_in_prose.take_out(page_of(one, one))[0] == one["values"]
    with pytest.raises(ValueError, match=r"04\.a is recorded twice, as 1\.00 s and as 2\.00 s"):
        numbers_in_prose.take_out(page_of(one, other))
    holds, fails = ({"claims": {"a is less": {"holds": truth, "numbers": None}}} for truth in (True, False))
    for payloads in ((holds, fails), (fails, holds)):
        claims = numbers_in_prose.take_out(page_of(*payloads))[1]
        assert numbers_in_prose.broken_claims(claims) == ["the run does not support: a is less"]


def test_a_page_that_records_two_values_keeps_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path("00_a.py")
    text.write_text(f"# %%\n{recording('00.a', 1)}{recording('00.a', 2)}")
    assert committed.main(["00_a.py"]) == 1
    assert "FAILED: 00.a is recorded twice, as 1 and as 2" in said()
    assert not paired.read(Path("00_a")).cells[0].outputs
    assert Path("executed/00_a.ipynb").exists()


def test_a_text_with_a_less_than_sign_is_filled_again_and_again() -> None:
    first, later = {"00.a": Value("x < y")}, {"00.a": Value("y < x & z")}
    filled = numbers_in_prose.fill("{{00.a}}.", first)
    assert filled == '<data value="00.a">x &lt; y</data>.'
    assert numbers_in_prose.differences(filled, first) == []
    assert numbers_in_prose.differences(filled, later)
    refilled = numbers_in_prose.fill(filled, later)
    assert numbers_in_prose.differences(refilled, later) == []


def test_a_table_and_its_records_have_the_same_units(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    recorded: dict[str, Value] = {}
    monkeypatch.setattr(
        sys.modules["hpnb.lesson.show"], "record", lambda *a: recorded.update(values.flatten(*a))
    )
    show(
        measured={"step (s)": 0.002, "sent": 3.0}, unit="B", key="00.t",
        columns={"idle (%)": {"step (s)": 12.0}, "overlap": {"step (s)": True, "sent": False}},
    )  # fmt: skip
    table = said()
    for key, text in {
        "00.t.step.measured": "2.00 ms",
        "00.t.sent.measured": "3 B",
        "00.t.step.idle": "12.0 %",
        "00.t.step.overlap": "yes",
        "00.t.sent.overlap": "no",
    }.items():
        assert recorded[key].text() == text
        assert text in table


def test_a_page_records_its_keys_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRITING, "04")
    lesson.record("04.a", 1)
    with pytest.raises(ValueError, match=r"05\.a is a key of another page than 04; use 04\.a"):
        lesson.record("05.a", 1)


def test_the_text_of_a_pair_is_written_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write_text = files.write_text
    monkeypatch.setattr(
        files, "write_text", lambda path, text: (written.append(path), write_text(path, text))
    )
    (tmp_path / "00_a.py").write_text("# %%\n1\n")
    paired.pair(tmp_path / "00_a")
    assert tmp_path / "00_a.py" in written


def test_pages_that_ran_are_filled_from_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    for number, other in (("00", "01"), ("01", "00")):
        program = f"{recording(f'{number}.a', 5)}print('done')\n"
        text = f"# %% [markdown]\n# The other page: {{{{{other}.a}}}}\n\n# %%\n{program}"
        Path(f"notebooks/{number}_a.py").write_text(text)
    assert committed.main(["--all"]) == 0
    assert WRITING not in os.environ
    assert committed.main(["--all", "--check"]) == 0
    assert '<data value="01.a">5</data>' in Path("notebooks/00_a.py").read_text()
