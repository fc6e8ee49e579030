"""What is committed of a notebook: which run it came from, and both files in step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hpnb.lesson.pages import committed, paired
from hpnb.lesson.pages.committed import digest, hardware_here, is_stale, stamp

TEXT = """\
# %% [markdown]
# # A title

# %% tags=["setup"]
import os
print(os.getcwd())

# %% tags=["raises-exception"]
{}["key"]

# %%
assert not os.listdir(os.environ["HPNB_HOME"])
"""


def book(*sources: str) -> Any:
    return new_notebook(cells=[new_markdown_cell("# A title"), *map(new_code_cell, sources)])


# --- digest and stamp --------------------------------------------------------------------------------


def test_the_digest_is_of_the_code_alone() -> None:
    nb, other = book("x = 1\ny = 2", "z"), book("x = (  # one\n    1\n)\n\ny = 2\n", "z")
    other.cells[0].source = "# Another title"
    other.cells[1].outputs = [new_output("stream", name="stdout", text="1")]
    other.cells[1].execution_count = 3
    assert digest(nb) == digest(other)


def test_the_digest_of_magics_is_of_their_lines() -> None:
    assert digest(book("%%ranks 2\nx = 1  ")) == digest(book("%%ranks 2\nx = 1\n"))
    assert digest(book("%%ranks 2\nx = 1")) != digest(book("%%ranks 4\nx = 1"))


@pytest.mark.parametrize(
    "sources",
    [
        ("x = 1\ny = 3", "z"),
        ("x = '1'\ny = 2", "z"),
        ("if 1:\n    x = 1\ny = 2", "z"),
        ("z", "x = 1\ny = 2"),
        ("x = 1\ny = 2\nz",),
        (),
    ],
)
def test_the_digest_sees_changed_code(sources: tuple[str, ...]) -> None:
    assert digest(book(*sources)) != digest(book("x = 1\ny = 2", "z"))


def test_a_stamp_says_where_and_with_what_and_never_who() -> None:
    nb = book("1")
    stamp(nb, "4 x NVIDIA H200")
    mark = nb.metadata["hpnb"]
    assert set(mark) == {"digest", "hardware", "device", "versions", "date"}
    assert (mark["hardware"], mark["device"]) == ("4 x NVIDIA H200", "cuda")
    assert set(mark["versions"]) == {"python", "torch", "transformers", "hpnb"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", mark["date"])
    stamp(nb, "2 CPU cores")
    assert nb.metadata["hpnb"]["device"] == "cpu"
    assert set(nb.metadata) == {"hpnb", "kernelspec", "language_info"}


def test_hardware_is_the_gpus_where_ranks_would_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, expected in ((0, r"\d+ CPU cores?"), (1, "1 x NVIDIA H200"), (2, "2 x NVIDIA H200")):
        done = subprocess.CompletedProcess([], 0, "NVIDIA H200\n" * gpus)
        monkeypatch.setattr(committed.subprocess, "run", lambda *_, done=done, **__: done)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert re.fullmatch(expected, hardware_here())


# --- pairs and the command ---------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """notebooks/00_x with a text only, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("notebooks").mkdir()
    Path("notebooks/00_x.py").write_text(TEXT)
    return tmp_path / "notebooks" / "00_x"


def test_a_committed_notebook_is_run_clean_stamped_and_paired(path: Path, capsys: Any) -> None:
    monkey_home = os.environ["HPNB_HOME"]
    assert committed.main(["--all"]) == 0
    assert re.fullmatch(r"00_x +\d+\.\d s +\d+ kB  \d+ (CPU cores?|x .+)\n", capsys.readouterr().out)
    assert os.environ["HPNB_HOME"] == monkey_home
    nb = paired.read(path)
    assert nb.cells[1].outputs[0].text == "notebooks\n"
    assert nb.cells[2].outputs[0].ename == "KeyError"
    assert (is_stale(nb), paired.differences(path)) == (None, [])
    text = path.with_suffix(".py").read_text()
    assert text == paired.HEADER + "\n" + TEXT
    assert "jupytext_version" not in text
    before = path.with_suffix(".ipynb").read_text()
    assert committed.main([str(path.with_suffix(".ipynb"))]) == 0
    assert path.with_suffix(".ipynb").read_text() == before  # a second run of the same is no diff
    assert committed.main(["--all", "--check"]) == 0
    tool = [sys.executable, "-m", "jupytext", "--paired-paths", str(path.with_suffix(".ipynb"))]
    assert subprocess.run(tool, capture_output=True, text=True).stdout.strip() == str(path.with_suffix(".py"))


def test_pairing_keeps_the_outputs_of_what_did_not_change(path: Path, capsys: Any) -> None:
    assert committed.main(["--all"]) == 0
    first, second = "# %%\n1 + 1\n\n", '# %% tags=["raises-exception"]\n{}["other"]'
    text = TEXT.replace('# %% tags=["setup"]', first + '# %% tags=["setup"]')
    path.with_suffix(".py").write_text(text.replace('# %% tags=["raises-exception"]\n{}["key"]', second))
    assert committed.main(["--all", "--check"]) == 1
    assert "cell 2 differs in tags and source: 1 + 1" in capsys.readouterr().out
    assert committed.main(["--all", "--pair"]) == 0
    assert "its code has changed since it ran on" in capsys.readouterr().out
    nb = paired.read(path)
    assert [bool(cell.outputs) for cell in nb.cells if cell.cell_type == "code"] == [
        False,
        True,
        False,
        False,
    ]
    assert nb.cells[2].execution_count == 1
    assert paired.differences(path) == []
    assert committed.main(["--all", "--check"]) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [("# # A title", "# # A better title"), ('\n{}["key"]', '\n\n{}[  # none\n    "key"\n]')],
)
def test_prose_and_line_breaks_may_change_without_a_run(path: Path, before: str, after: str) -> None:
    assert committed.main(["--all"]) == 0
    assert before in TEXT
    path.with_suffix(".py").write_text(TEXT.replace(before, after))
    assert committed.main(["--all", "--pair"]) == 0
    assert committed.main(["--all", "--check"]) == 0


def test_a_notebook_that_fails_keeps_its_outputs_and_the_failure_can_be_read(path: Path, capsys: Any) -> None:
    assert committed.main(["--all"]) == 0
    path.with_suffix(".py").write_text(
        TEXT.replace('{}["key"]', "1 / 0").replace('tags=["raises-exception"]', "")
    )
    assert committed.main(["--all"]) == 1
    assert "FAILED: ZeroDivisionError: division by zero (see executed/00_x.ipynb)" in capsys.readouterr().out
    assert paired.read(path).cells[1].outputs[0].text == "notebooks\n"
    assert paired.read(Path("executed/00_x")).cells[2].outputs[0].ename == "ZeroDivisionError"


def test_without_jupytext_the_notebook_itself_is_run(
    path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert committed.main(["--all", "--pair"]) == 0
    monkeypatch.setattr(paired, "_jupytext", None)
    assert committed.main(["--all"]) == 0
    assert "jupytext is not installed" in capsys.readouterr().err
    assert is_stale(paired.read(path)) is None
    with pytest.raises(SystemExit):
        committed.main(["--all", "--pair"])


@pytest.mark.parametrize("missing", [".py", ".ipynb"])
def test_half_a_pair_is_found(path: Path, missing: str, capsys: Any) -> None:
    paired.pair(path)
    path.with_suffix(missing).unlink()
    assert committed.main(["--all", "--check"]) == 1
    assert f"there is no 00_x{missing}" in capsys.readouterr().out
    assert paired.differences(path) == [f"there is no 00_x{missing}"]


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("# %%\n1\n", "# %%\n1\n"),
        ("# ---\n# jupyter:\n#   x: 1\n# ---\n\n\n# %%\n1\n", "# %%\n1\n"),
        ("# ---\n# %%\n1\n", "# ---\n# %%\n1\n"),
    ],
)
def test_the_header_is_replaced_and_nothing_else(text: str, body: str) -> None:
    assert paired.with_header(text) == paired.HEADER + "\n" + body
    assert paired.with_header(paired.with_header(text)) == paired.with_header(text)


def test_names_that_are_none_are_refused(path: Path) -> None:
    for arguments in ([], ["notebooks/01_y.py"]):
        with pytest.raises(SystemExit):
            committed.main(arguments)
