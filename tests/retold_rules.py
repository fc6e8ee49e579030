"""Stricter rules for the pages that tell their run: each is a function from a notebook to complaints.

RETOLD names the pages that they hold for; it is to become all of them. How such a page is written stands in
`hpnb.lesson.pages`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

from notebook_parts import DETAILS, alts, code_cells, outputs, tags
from notebook_rules import prose_words

from hpnb.lesson.pages.numbers_in_prose import broken_claims
from hpnb.lesson.values import NUMBER_IN_PROSE

RETOLD: tuple[str, ...] = (
    "00_ranks_and_collectives",
    "01_vit_data_parallel",
    "02_vit_pipeline_parallel",
    "03_vit_tensor_parallel",
    "04_vit_hybrid_parallel",
    "05_gpt2_data_parallel",
    "06_gpt2_pipeline_parallel",
    "07_gpt2_tensor_parallel",
    "08_gpt2_hybrid_parallel",
    "09_plan_at_scale",
    "10_long_contexts",
    "11_experts",
)

WORDS, LINES, COLUMNS, LAPTOP_SENTENCES = 2500, 25, 88, 3

# What VOICE.md's right-hand columns have and what has no other meaning here, with what to say.
PRIVATE = {
    r"wires?": "link or interconnect",
    r"dealt|deals? out|cut up|shared? out": "sharded, split or partitioned",
    r"comput(?:e|ed|es|ing) again|made? anew": "recompute",
    r"in place of": "instead of",
    r"dear": "expensive",
    r"device cards?": "GPU",
    r"not yet": "nothing: give a rule of thumb",
    r"h(?:ide|ides|idden) behind|travels? beside": "overlapped, or exposed",
}
_REPORT = re.compile(r"\blesson\.(table|number)\(|\balt=[^=]|\bplot\.show\(")
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$|\]\([^)]*\)|<[^>]+>", re.DOTALL)
_SOLUTIONS = re.compile(r"<summary>[^<]*solution.*?</details>", re.DOTALL | re.IGNORECASE)
_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL | re.IGNORECASE)


def _prose(nb: Any) -> str:
    return "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items, without code, mathematics, tables, links and tags."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", _NO_PROSE.sub(" ", text)):
        if block.strip() and not block.lstrip().startswith(("|", "#")):
            yield " ".join(block.split())


def _code(source: str) -> ast.Module | None:
    """A cell's syntax tree without lines for IPython; None where it is no Python."""
    lines = ("pass" if line.startswith(("%", "!")) else line for line in source.splitlines())
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return None


# --- the rules -------------------------------------------------------------------------------------


def narrow_cells(nb: Any) -> list[str]:
    found = []
    for number, cell in enumerate(code_cells(nb), 1):
        lines = cell.source.splitlines()
        if len(lines) > LINES:
            found.append(f"code cell {number} has {len(lines)} lines, more than {LINES}")
        if wide := max(map(len, lines), default=0) > COLUMNS and max(map(len, lines)):
            found.append(f"code cell {number} has {wide} columns, more than {COLUMNS}")
    return found


def experiments_not_reports(nb: Any) -> list[str]:
    found = []
    for number, cell in enumerate(code_cells(nb), 1):
        said = [match[0] for match in _REPORT.finditer(cell.source)]
        tree = _code(cell.source)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                said.append(f"the format {ast.unparse(node.value)}:...")
        if said:
            found.append(f"code cell {number} reports with {said[0]}; lesson.show and lesson.record do that")
    return found


def public_words(nb: Any) -> list[str]:
    found = []
    for paragraph in _paragraphs(_prose(nb)):
        for pattern, instead in PRIVATE.items():
            if match := re.search(rf"\b(?:{pattern})\b", paragraph, re.IGNORECASE):
                found.append(f"says {match[0]!r} (better: {instead}): {paragraph[:60]}")
    return found


def few_brackets(nb: Any) -> list[str]:
    paragraphs = list(_paragraphs(_prose(nb)))
    return [f"has {p.count('(')} pairs of brackets: {p[:60]}" for p in paragraphs if p.count("(") > 1]


def brief_prose(nb: Any) -> list[str]:
    words = prose_words(nb)
    return [f"has {words} words outside folds, more than {WORDS}"] if words > WORDS else []


def no_gaps(nb: Any) -> list[str]:
    found = []
    checks = {
        n for n, cell in enumerate(code_cells(nb), 1) if any(t.startswith("check-") for t in tags(cell))
    }
    for number, output in outputs(nb):
        data = output.get("data", {})
        texts = (output.get("text", ""), data.get("text/plain", ""), *alts(data.get("text/html", "")))
        if number not in checks and re.search(r"\bnot yet\b", " ".join(texts)):
            found.append(f"code cell {number} shows 'not yet': give a rule of thumb")
    return found


def tells_its_run(nb: Any) -> list[str]:
    mark = nb.metadata.get("hpnb", {})
    found = broken_claims(mark.get("claims", {}))
    if not mark.get("claims"):
        found.append("makes no claim (lesson.claim)")
    if not NUMBER_IN_PROSE.search(_prose(nb)):
        found.append("its prose tells no number of its run ({{key}})")
    return found


def tools_that_run(nb: Any) -> list[str]:
    found = []
    cells = (cell.source for cell in nb.cells if cell.cell_type == "markdown")
    for box in (text.split("In your tools", 1)[1] for text in cells if "In your tools" in text):
        box = re.split(r"^#+ ", _SOLUTIONS.sub("", box), maxsplit=1, flags=re.MULTILINE)[0]
        for body in (body for kind, body in _FENCE.findall(box) if kind in ("python", "py")):
            tree = _code(body)
            if tree is None:
                found.append(f"a line of 'In your tools' is no Python: {body.splitlines()[0]}")
            for node in ast.walk(tree) if tree else ():
                found += [f"'In your tools' imports {name}, which does not exist" for name in _missing(node)]
    return found


def _missing(node: ast.AST) -> list[str]:
    """Names that an import statement would not find, of packages that are installed here."""
    if isinstance(node, ast.Import):
        wanted = [(alias.name, "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        wanted = [(node.module, alias.name) for alias in node.names]
    else:
        return []
    missing = []
    for module, name in wanted:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue
        try:
            loaded = importlib.import_module(module)
            if name and not hasattr(loaded, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            missing.append(f"{module}.{name}".rstrip("."))
    return missing


def laptop_notes(nb: Any) -> list[str]:
    found, text = [], _prose(nb)
    unfolded = _NO_PROSE.sub(" ", DETAILS.sub(" ", text)).replace("*", "")
    if re.search(r"\bon a laptop\b", unfolded, re.IGNORECASE):
        found.append("speaks of 'on a laptop' outside a fold")
    for fold in DETAILS.findall(text):
        summary = _SUMMARY.search(fold)
        if summary and "on a laptop" in summary[1].lower():
            body = _NO_PROSE.sub(" ", fold.replace(summary[0], ""))
            sentences = len(re.findall(r"[.!?](?=\s|$)", body))
            if sentences > LAPTOP_SENTENCES:
                found.append(f"a note 'On a laptop' has {sentences} sentences, more than {LAPTOP_SENTENCES}")
    return found


RETOLD_RULES: dict[str, Callable[[Any], list[str]]] = {
    rule.__name__: rule
    for rule in (
        narrow_cells, experiments_not_reports, public_words, few_brackets, brief_prose, no_gaps,
        tells_its_run, tools_that_run, laptop_notes,
    )
}  # fmt: skip
