"""Take out of a notebook's outputs what belongs to one machine or to one moment.

    clean(nb)      # in place; cleaning twice is cleaning once

A reader needs none of it, and all of it would change with every run: absolute paths (shortened), names of
hosts and users, memory addresses, random identifiers of widgets and cells, timings, the pieces in which a
stream arrived. What is left differs between two runs only where the results do.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import socket
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDGET_BYTES = 75_000  # of saved widget state; a static figure stands beside each explorer anyway
STATE = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"

# Names that many machines share identify none, and "root" is a word of the lesson.
_ANYONE = frozenset({"root", "user", "users", "localhost", "ubuntu", "admin", "runner", "jovyan", "host"})
_BINARY = ("image/png", "image/jpeg", "image/gif", "application/pdf")
_MOMENT = ("execution", "ExecuteTime", "scrolled", "collapsed", "lines_to_next_cell")  # of a cell's metadata
_KEPT = ("hpnb", "jupytext", "kernelspec", "language_info", "widgets")  # of the notebook's

_URI = re.compile(r"""(data:[\w.+-]+/[\w.+-]+;base64,[A-Za-z0-9+/=]+)""")  # left alone: any word may occur
_ADDRESS = re.compile(r"(?<=\bat )0x[0-9a-fA-F]{6,}|\b0x[0-9a-fA-F]{11,}")
_REWOUND = re.compile(r"(?<![^\n\r])[^\n\r]*\r(?=[^\n\r])")  # what a progress bar overwrote
_EDGE = r"(?:(?<![\w.~/-])|(?<=\dm)|(?<=\[m)|(?<=file://))"  # a path starts here, after a colour code too
_PART = r"/[\w.+@-]+"

# Paths of any machine, for outputs that were not made here; what this machine knows of itself goes first.
_ANYWHERE = [
    (re.compile(rf"{_EDGE}(?:{_PART})+/(?:site|dist)-packages/"), ""),
    (re.compile(rf"{_EDGE}(?:/(?:home|Users){_PART}|/root)(?![\w-])"), "~"),
    (re.compile(rf"{_EDGE}(?:/private)?/(?:var/folders(?:{_PART}){{2}}/T|(?:var/)?tmp)(?![\w-])"), "tmp"),
    (
        re.compile(
            rf"{_EDGE}/(?:content|data|etc|kaggle|media|mnt|nfs|nix|opt|private|run|scratch|srv|usr|var|work|"
            rf"workspace)(?:{_PART})*(/[\w.+@-]+)"
        ),
        r"…\1",
    ),
    (re.compile(r"(?<!\w)tmp/tmp[a-z0-9_]{8}(?![\w-])"), "tmp"),
    (re.compile(r"(?<!\w)tmp/ipykernel_\d+/\d+\.py"), "cell"),
]


def clean(nb: Any) -> None:
    """Clean the outputs and the metadata of `nb`; the code and the prose are the author's and stay."""
    scrub = _scrubber(nb)
    for cell in nb.cells:
        for key in _MOMENT:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs = [_cleaned(output, scrub) for output in _joined(cell.outputs)]
    for key in set(nb.metadata) - set(_KEPT):
        del nb.metadata[key]
    _settle_widgets(nb, scrub)
    name_cells(nb)


def name_cells(nb: Any) -> None:
    """Give each cell an id that follows from its content, so that the same notebook has the same ids."""
    seen: Counter[str] = Counter()
    for cell in nb.cells:
        name = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[name] += 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    nb.nbformat, nb.nbformat_minor = 4, 5  # the first version with ids


# --- outputs ---------------------------------------------------------------------------------


def _joined(outputs: list[Any]) -> list[Any]:
    """Streams arrive in pieces that depend on timing: neighbours of one name become one."""
    kept: list[Any] = []
    for output in outputs:
        last = kept[-1] if kept else None
        if output.output_type == "stream" and last is not None and last.get("name") == output.name:
            last.text += output.text
        else:
            kept.append(output)
    return kept


def _cleaned(output: Any, scrub: Callable[[str], str]) -> Any:
    if output.output_type == "stream":
        output.text = scrub(_REWOUND.sub("", output.text))
    elif output.output_type == "error":
        output.evalue = scrub(output.evalue)
        output.traceback = [scrub(line) for line in output.traceback]
    else:
        for kind, content in output.data.items():
            if kind not in _BINARY:
                output.data[kind] = _map_strings(content, scrub)
    return output


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value`, which came from JSON, with every string changed; keys and binary buffers stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return type(value)((k, v if k == "buffers" else _map_strings(v, change)) for k, v in value.items())
    return value


# --- what identifies a machine ---------------------------------------------------------------


def _scrubber(nb: Any) -> Callable[[str], str]:
    """A function that takes this machine out of a text.

    A name that the lesson's own text uses is a word there and no leak: a user called "rank" must not turn
    every rank into a user.
    """
    lesson = "\n".join(cell.source for cell in nb.cells)
    names = [
        (re.compile(rf"(?<!\w){re.escape(name)}(?!\w)"), stand_in)
        for name, stand_in in _names()
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", lesson)
    ]
    folders = _folders()

    def plain(text: str) -> str:
        for pattern, stand_in in [*folders, *_ANYWHERE, *names]:
            text = pattern.sub(stand_in, text)
        return _ADDRESS.sub("0x…", text)

    def scrub(text: str) -> str:
        pieces = _URI.split(text)  # plain, URI, plain, ...
        return "".join(piece if i % 2 else plain(piece) for i, piece in enumerate(pieces))

    return scrub


def _names() -> list[tuple[str, str]]:
    """This machine's and this user's names, each with what stands in for it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    host = socket.gethostname()
    names = [(host, "host"), (host.split(".")[0], "host"), (user, "user")]
    return [(name, stand_in) for name, stand_in in names if len(name) > 1 and name.lower() not in _ANYONE]


def _folders() -> list[tuple[re.Pattern[str], str]]:
    """Folders of this machine, longest first, each with its short form; what is inside a "." is relative."""
    short = dict.fromkeys((*sys.path, sysconfig.get_path("stdlib"), os.getcwd()), ".")
    short[str(Path(__file__).parents[3])] = "."  # the repository, or site-packages
    short[sys.prefix] = short[sys.base_prefix] = "…"
    short[tempfile.gettempdir()] = "tmp"
    short[str(Path.home())] = "~"
    every = {form: name for path, name in short.items() for form in (path, os.path.realpath(path))}
    folders = []
    for path in sorted(every, key=len, reverse=True):
        if len(path) > 1 and Path(path).is_absolute():
            pattern = rf"{_EDGE}{re.escape(path)}"
            if every[path] == ".":
                folders.append((re.compile(pattern + r"/(?=[\w.])"), ""))
            folders.append((re.compile(pattern + r"(?![\w-])"), every[path]))
    return folders


# --- widgets ---------------------------------------------------------------------------------


def _settle_widgets(nb: Any, scrub: Callable[[str], str]) -> None:
    """Keep the saved state of widgets that an output shows if it is small, with numbers for random ids."""
    shown = [out for cell in nb.cells for out in cell.get("outputs", []) if VIEW in out.get("data", {})]
    state = nb.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})
    wanted = [out.data[VIEW]["model_id"] for out in shown]
    needed: set[str] = set()
    while wanted:
        model = wanted.pop()
        if model in state and model not in needed:
            needed.add(model)
            wanted += re.findall(r"IPY_MODEL_(\w+)", json.dumps(state[model]))
    # in the order of creation, which is also the order of the numbers
    number = {old: f"{i:032x}" for i, old in enumerate(old for old in state if old in needed)}
    rename = re.compile("|".join(map(re.escape, number)) or "(?!)")
    kept = _map_strings(
        {number[old]: model for old, model in state.items() if old in needed},
        lambda text: rename.sub(lambda match: number[match[0]], scrub(text)),
    )
    if kept and len(json.dumps(kept)) <= WIDGET_BYTES:
        nb.metadata["widgets"] = {STATE: {"state": kept, "version_major": 2, "version_minor": 0}}
    else:
        number = {}
    for out in shown:
        if (model := out.data[VIEW]["model_id"]) in number:
            out.data[VIEW]["model_id"] = number[model]
        else:  # without its state a view is only an error message
            del out.data[VIEW]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("data") != {}]
