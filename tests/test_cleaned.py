"""Cleaning takes the machine and the moment out of outputs, and nothing else."""

from __future__ import annotations

import copy
import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hpnb.lesson.pages import clean_outputs
from hpnb.lesson.pages.clean_outputs import clean

HOME = "/" + "home"  # in pieces, or this file would name a machine


def book(*sources: str) -> Any:
    return new_notebook(cells=[new_markdown_cell("# A title"), *map(new_code_cell, sources)])


def said(text: str, lesson: str = "pass") -> str:
    """What is left of an output after cleaning."""
    nb = book(lesson)
    nb.cells[1].outputs = [new_output("stream", name="stdout", text=text)]
    clean(nb)
    return str(nb.cells[1].outputs[0].text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"File {torch.__file__}", "File torch/__init__.py"),
        (f"File \x1b[32m{Path(__file__).parents[1]}/hpnb/mesh.py\x1b[0m", "File \x1b[32mhpnb/mesh.py\x1b[0m"),
        (f"in {os.getcwd()}", "in ."),
        (os.__file__, "os.py"),
        (f"[{Path.home()}/x]", "[~/x]"),
        (f"{HOME}/ada/data and {HOME}/ada", "~/data and ~"),
        (f"{HOME}/ada/env/lib/python3.12/site-packages/torch/x.py:3", "torch/x.py:3"),
        ("/" + "tmp/tmpab12cd_x/model", "tmp/model"),
        ("/" + "tmp/ipykernel_12/345.py:1: no", "cell:1: no"),
        ("/var/folders/x1/abc/T/tmpab12cd_x", "tmp"),
        ("/mnt/disk/run-7/a.bin", "…/a.bin"),
        ("<object at 0x7f00deadbeef>", "<object at 0x…>"),
        ("bits 0x3f800000", "bits 0x3f800000"),
        ("https://example.org/home/x 3/4 a/b", "https://example.org/home/x 3/4 a/b"),
        (" 10%\r 50%\r100%\nend\r\n", "100%\nend\r\n"),
    ],
)
def test_what_belongs_to_a_machine_is_taken_out(text: str, left: str) -> None:
    assert said(text) == left
    assert said(left) == left


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "piece", [".", "x", "/x", "/", "a/tmp", " 0x", "x@y", "data:", "\x1b[3m", "/" + "tmp/"]
)
def test_a_long_line_is_cleaned_in_linear_time(piece: str) -> None:
    start = time.process_time()
    said(piece * (100_000 // len(piece)))  # squared that would be hours
    assert time.process_time() - start < 10


def test_names_are_taken_out_unless_the_lesson_speaks_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ring")
    assert said("ring@node7: node7.example.org, string") == "user@host: host, string"
    assert said("ring on node7", lesson="def ring(): ...") == "ring on host"
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert said("the root of 2") == "the root of 2"


def test_pictures_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "abcd")
    image = f"data:image/png;base64,abcd+{HOME}/ada/0x7f00deadbeef"
    nb = book("1")
    data = {"image/png": "abcd", "text/html": f'<img src="{image}" alt="by abcd">'}
    nb.cells[1].outputs = [new_output("display_data", data)]
    clean(nb)
    assert nb.cells[1].outputs[0].data == {
        "image/png": "abcd",
        "text/html": f'<img src="{image}" alt="by user">',
    }


def test_streams_are_joined_and_moments_dropped() -> None:
    nb = book("1")
    pieces = [("stdout", "a\n"), ("stdout", "b\n"), ("stderr", "c\n"), ("stdout", "d\n")]
    nb.cells[1].outputs = [new_output("stream", name=name, text=text) for name, text in pieces]
    nb.cells[1].metadata.update(execution={"iopub.status.busy": "now"}, tags=["setup"])
    nb.metadata.update(vscode={}, kernelspec={})
    clean(nb)
    assert [(out.name, out.text) for out in nb.cells[1].outputs] == [
        ("stdout", "a\nb\n"),
        ("stderr", "c\n"),
        ("stdout", "d\n"),
    ]
    assert nb.cells[1].metadata == {"tags": ["setup"]}
    assert set(nb.metadata) == {"kernelspec"}


def test_ids_follow_from_content() -> None:
    nb, longer = book("1", "2", "1"), book("0", "1", "2", "1")
    clean(nb)
    clean(longer)
    ids = [cell.id for cell in nb.cells]
    assert len(set(ids)) == 4
    assert ids[1:] == [cell.id for cell in longer.cells[2:]]
    nbformat.validate(nb)


def widget_book(size: int) -> Any:
    """A slider in a box that an output shows, and a bar that none does."""
    ids = {name: f"{i:x}".rjust(32, "f") for i, name in enumerate(("bar", "slider", "box"))}
    state = {
        ids["bar"]: {"state": {"value": 1}},
        ids["slider"]: {"state": {"text": f"{HOME}/ada/x" + "." * size}},
        ids["box"]: {"state": {"children": [f"IPY_MODEL_{ids['slider']}"]}},
    }
    nb = nbformat.from_dict(book("1"))
    view = {clean_outputs.VIEW: {"model_id": ids["box"]}, "text/plain": "VBox()"}
    nb.cells[1].outputs = [nbformat.from_dict(new_output("display_data", view))]
    nb.metadata["widgets"] = nbformat.from_dict({clean_outputs.STATE: {"state": state}})
    return nb


def test_small_widgets_are_kept_with_numbers_for_names() -> None:
    nb = widget_book(10)
    clean(nb)
    slider, box = "0" * 32, "0" * 31 + "1"
    assert nb.metadata["widgets"][clean_outputs.STATE]["state"] == {
        slider: {"state": {"text": "~/x.........."}},
        box: {"state": {"children": [f"IPY_MODEL_{slider}"]}},
    }
    assert nb.cells[1].outputs[0].data[clean_outputs.VIEW]["model_id"] == box
    once = copy.deepcopy(nb)
    clean(nb)
    assert nb == once


def test_large_widgets_leave_their_text() -> None:
    nb = widget_book(200_000)
    clean(nb)
    assert "widgets" not in nb.metadata
    assert nb.cells[1].outputs[0].data == {"text/plain": "VBox()"}
