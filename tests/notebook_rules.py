"""What a machine can check of a notebook's rules: each is a function from a notebook to complaints.

RULES has them by name. The rule about a notebook's two files is `hpnb.lesson.pages.paired.differences`.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
import statistics
from collections.abc import Callable
from typing import Any

import nbformat
from notebook_parts import (
    DETAILS,
    EXERCISE,
    alts,
    code_cells,
    code_lines,
    exercises,
    headings,
    is_figure,
    outputs,
    tags,
)

from hpnb.lesson.pages.committed import is_stale

WORDS, CELLS, FIGURES, SECTIONS = 3000, 25, 8, 7
MEDIAN_LINES, LINES = 11, 40
BYTES = 1_000_000
CLOSING = ("What to remember", "When not to use this", "Papers")
OPENING = {
    "the question": r"\bquestion\b",
    "what you will be able to do": r"\bable to\b",
    "what you should know": r"\bshould (?:already )?know\b",
    "time, in minutes": r"\bminutes\b",
    "what to recall": r"\brecall\b",
}

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PIXELS = re.compile(r'data:[\w.+/-]+;base64,[A-Za-z0-9+/=]+|"image/(?:png|jpeg)": "[^"]*"')
_PLACES = r"(?:home|root|tmp|Users|var|opt|usr|mnt|private|scratch|work|workspace)(?![\w-])"
_PATH = re.compile(rf"(?<![\w.~/-])(?:file://)?/{_PLACES}[^\s\"']*|[A-Z]:\\+Users\b\S*")
_PROMPT = re.compile(r"(?<!\w)\w+@[\w.-]+:[~/]")
_ANYONE = {"root", "user", "localhost", "ubuntu", "runner", "jovyan"}


# --- the rules -------------------------------------------------------------------------------


def valid(nb: Any) -> list[str]:
    try:
        nbformat.validate(nb)
    except nbformat.ValidationError as error:
        return [f"is no valid notebook: {str(error).splitlines()[0]}"]
    version = (nb.nbformat, nb.nbformat_minor)
    return [] if version == (4, 5) else [f"is in format {version[0]}.{version[1]}, not 4.5"]


def stamped(nb: Any) -> list[str]:
    mark = nb.metadata.get("hpnb", {})
    wanted = {
        "digest": r"[0-9a-f]{64}",
        "hardware": r"\d+ CPU cores?|\d+ x [\w ()./-]+( \+ \d+ x [\w ()./-]+)*",
        "device": r"cpu|cuda",
        "date": r"\d{4}-\d\d-\d\d",
    }
    found = [key for key, form in wanted.items() if not re.fullmatch(form, mark.get(key, ""))]
    packages = ("python", "torch", "transformers", "hpnb")
    found += [f"version of {name}" for name in packages if not mark.get("versions", {}).get(name)]
    return [f"its stamp lacks a proper {what}" for what in found]


def fresh(nb: Any) -> list[str]:
    stale = is_stale(nb)
    return [stale] if stale else []


def small(nb: Any) -> list[str]:
    size = len(nbformat.writes(nb).encode())
    return [f"has {size / 1e6:.2f} MB, more than {BYTES / 1e6:.0f}"] if size > BYTES else []


def one_title(nb: Any) -> list[str]:
    titles = [(i, text) for i, level, text in headings(nb) if level == 1]
    if len(titles) != 1:
        return [f"has {len(titles)} titles (# ...)"]
    first = titles[0][0] == 0 and nb.cells[0].source.startswith("# ")
    return [] if first else ["does not open with its title"]


def prose_words(nb: Any) -> int:
    """Words of prose outside folds and badges."""
    text = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    text = re.sub(r"\[!\[[^]]*\]\([^)]*\)\]", " ", text)
    text = re.sub(r"<[^>]+>|\]\([^)]*\)", " ", DETAILS.sub(" ", text))
    return sum(any(letter.isalpha() for letter in word) for word in text.split())


def short_prose(nb: Any) -> list[str]:
    words = prose_words(nb)
    return [f"has {words} words of prose, more than {WORDS}"] if words > WORDS else []


def few_cells(nb: Any) -> list[str]:
    cells = len(code_cells(nb))
    return [f"has {cells} code cells, more than {CELLS}"] if cells > CELLS else []


def short_cells(nb: Any) -> list[str]:
    lines = [code_lines(cell.source) for cell in code_cells(nb)]
    found = [f"code cell {i} has {n} lines, more than {LINES}" for i, n in enumerate(lines, 1) if n > LINES]
    if lines and (median := statistics.median(lines)) > MEDIAN_LINES:
        found.append(f"its code cells have {median:g} lines in the median, more than {MEDIAN_LINES}")
    return found


def few_sections(nb: Any) -> list[str]:
    sections = sum(1 for _, level, _ in headings(nb) if level == 2)
    return [] if 1 <= sections <= SECTIONS else [f"has {sections} sections (## ...), not 1 to {SECTIONS}"]


def numbered_exercises(nb: Any) -> list[str]:
    found = [
        f"heading {text!r} should be '### Exercise N: ...'"
        for _, level, text in headings(nb)
        if text.lower().startswith("exercise ") and (level != 3 or not EXERCISE.match(text))
    ]
    numbers = [exercise.number for exercise in exercises(nb)]
    if not 3 <= len(numbers) <= 5:
        found.append(f"has {len(numbers)} exercises, not 3 to 5")
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(f"its exercises are numbered {numbers}")
    return found


def complete_exercises(nb: Any) -> list[str]:
    found = []
    for exercise in exercises(nb):
        kinds = [kind for kind in ("stub", "check") if len(exercise.tagged(kind)) != 1]
        lacks = [f"one code cell tagged {kind}-{exercise.number}" for kind in kinds]
        if not re.search(r"\d\s*minutes\b", exercise.text):
            lacks.append("a time budget (N minutes)")
        if not re.search(r"\bhint\b", exercise.text, re.IGNORECASE):
            lacks.append("a hint")
        if exercise.solution is None:
            lacks.append("a <details> with a <summary> that says Solution and a ```python fence")
        found += [f"exercise {exercise.number} lacks {what}" for what in lacks]
    return found


def few_figures(nb: Any) -> list[str]:
    figures = sum(is_figure(output) for _, output in outputs(nb))
    return [f"has {figures} figures, more than {FIGURES}"] if figures > FIGURES else []


def figures_in_words(nb: Any) -> list[str]:
    found = []
    for number, output in outputs(nb):
        words = alts(output.get("data", {}).get("text/html", ""))
        if is_figure(output) and not (words and all(words)):
            found.append(f"a figure of code cell {number} has no <img> with alt text")
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    if re.search(r"!\[\s*\]\(", prose) or not all(alts(prose)):
        found.append("a picture in the prose has no alt text")
    return found


def quiet(nb: Any) -> list[str]:
    return [
        f"code cell {number} wrote to stderr: {output.text.strip()[:60]}"
        for number, output in outputs(nb)
        if output.output_type == "stream" and output.name == "stderr"
    ]


def deliberate_errors(nb: Any) -> list[str]:
    cells, found = code_cells(nb), []
    for number, cell in enumerate(cells, 1):
        if "raises-exception" in tags(cell):
            if number == len(cells) or not re.search(r"^\s*assert\b", cells[number].source, re.MULTILINE):
                found.append(f"nothing asserts what code cell {number} was meant to raise")
        elif errors := [output.ename for output in cell.outputs if output.output_type == "error"]:
            found.append(f"code cell {number} raised {errors[0]} and is not tagged raises-exception")
    return found


def anonymous(nb: Any) -> list[str]:
    lesson = "\n".join(cell.source for cell in nb.cells)  # a name that is a word there is no leak
    names = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in names_here()]
    leaks = [_PATH, _PROMPT, *(name for name in names if not name.search(lesson))]
    found = []
    for where, content in [
        *((f"code cell {n}", out) for n, out in outputs(nb)),
        ("the metadata", nb.metadata),
    ]:
        text = json.dumps(content, ensure_ascii=False).replace("\\u001b", "\x1b").replace("\\n", "\n")
        text = _COLOUR.sub("", _PIXELS.sub("", text))
        found += [f"{where} shows {leak}" for pattern in leaks for leak in pattern.findall(text)]
    return found


def names_here() -> set[str]:
    """Names of this host and this user that would give away where a notebook ran."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    return {name for name in (user, socket.gethostname()) if len(name) > 2} - _ANYONE


def opening(nb: Any) -> list[str]:
    start = next((i for i, cell in enumerate(nb.cells) if cell.cell_type == "code"), len(nb.cells))
    text = "\n".join(cell.source for cell in nb.cells[:start])
    return [
        f"does not name {what} before its first code cell"
        for what, words in OPENING.items()
        if not re.search(words, text, re.IGNORECASE)
    ]


def closing(nb: Any) -> list[str]:
    marks = "|".join(CLOSING)
    last = max((i for i, _, text in headings(nb) if EXERCISE.match(text)), default=-1)
    text = "\n".join(cell.source for cell in nb.cells[last + 1 :] if cell.cell_type == "markdown")
    said = re.findall(rf"^(?:#+\s+|\*\*)({marks})\b", text, re.MULTILINE)
    if said == list(CLOSING):
        return []
    return [f"does not end with {', '.join(CLOSING)}, each once, as headings or in bold; found: {said}"]


RULES: dict[str, Callable[[Any], list[str]]] = {
    rule.__name__: rule
    for rule in (
        valid, stamped, fresh, small, one_title, short_prose, few_cells, short_cells, few_sections,
        numbered_exercises, complete_exercises, few_figures, figures_in_words, quiet, deliberate_errors,
        anonymous, opening, closing,
    )
}  # fmt: skip
