"""A small notebook that keeps every rule, and for every rule ways to break it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"

_OPEN = f'''\
# %% [markdown]
# # A small notebook
#
# **The question.** Does the test see it? You will be able to break a rule. You should know what a rule is.
# Reading takes {{{{00.minutes}}}}. To recall: what is a list?

# %% tags=["setup"]
from types import SimpleNamespace

def check(want, got):
    answer = got(1, 2)
    status = "not yet" if answer is None else "passed" if answer == want else "failed"
    return SimpleNamespace(status=status)

# %% [markdown]
# ## A section

# %%
from IPython.display import display
pixel = "{PIXEL[:60]}"
pixel += "{PIXEL[60:]}"
image = f'<img src="data:image/png;base64,{{pixel}}" alt = "one dot">'
display({{"image/png": pixel, "text/html": image}}, raw=True)

# %% tags=["raises-exception"]
[][1]

# %%
import sys
assert sys.last_type is IndexError
'''

_EXERCISE = """
# %% [markdown]
# ### Exercise {n}: number {n}
#
# Write it in 5 minutes. Hint: the answer is {want}.

# %% tags=["stub-{n}"]
def mine_{n}(a, b):
    ...

# %% tags=["check-{n}"]
check({want}, mine_{n})

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def mine_{n}(a, b):
#     return {solution}
# ```
# </details>
"""

_CLOSE = """
# %% [markdown]
# ## What to remember
# Little.
#
# **When not to use this.** Always.
#
# **Papers.** None.
"""

ANSWERS = {1: ("3", "a + b"), 2: ("-1", "a - b"), 3: ("2", "a * b")}  # N: (want, solution)
TEXT = (
    _OPEN
    + "".join(_EXERCISE.format(n=n, want=want, solution=right) for n, (want, right) in ANSWERS.items())
    + _CLOSE
)


def code(nb: Any, number: int) -> Any:
    return [cell for cell in nb.cells if cell.cell_type == "code"][number - 1]


def _append(source: str) -> Callable[[Any], None]:
    return lambda nb: nb.cells.append(new_code_cell(source))


def _say(text: str, start: bool = False) -> Callable[[Any], None]:
    return lambda nb: nb.cells.insert(0 if start else len(nb.cells), new_markdown_cell(text))


def _output(output: Any) -> Callable[[Any], None]:
    return lambda nb: code(nb, 1).outputs.append(output)


def _print(text: str) -> Callable[[Any], None]:
    return _output(new_output("stream", name="stdout", text=text))


def _replace(old: str, new: str) -> Callable[[Any], None]:
    def change(nb: Any) -> None:
        cells = [cell for cell in nb.cells if old in cell.source]
        assert cells, f"the notebook does not say {old!r}"
        for cell in cells:
            cell.source = cell.source.replace(old, new)

    return change


def _untag(tag: str) -> Callable[[Any], None]:
    def change(nb: Any) -> None:
        for cell in nb.cells:
            cell.metadata["tags"] = [t for t in cell.metadata.get("tags", []) if t != tag]

    return change


def _figures(number: int) -> Callable[[Any], None]:
    return lambda nb: code(nb, 2).outputs.extend(copy.deepcopy(code(nb, 2).outputs[0]) for _ in range(number))


def _stamp(**changes: Any) -> Callable[[Any], None]:
    return lambda nb: nb.metadata["hpnb"].update(changes)


def _no_alt(nb: Any) -> None:
    code(nb, 2).outputs[0].data["text/html"] = '<img src="x">'


def _not_run(nb: Any) -> None:
    code(nb, 3).execution_count = None


def _no_outputs(nb: Any) -> None:
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = []


def _out_of_order(nb: Any) -> None:
    code(nb, 1).execution_count = 9


def _old_format(nb: Any) -> None:
    nb.nbformat_minor = 4
    for cell in nb.cells:
        del cell["id"]


def _no_type(nb: Any) -> None:
    nb.cells[0]["cell_type"] = "prose"


def _no_stamp(nb: Any) -> None:
    del nb.metadata["hpnb"]


def _only_png(nb: Any) -> None:
    del code(nb, 2).outputs[0].data["text/html"]


_EXTRA = "".join(f"### Exercise {n}: more\n\n" for n in (4, 5, 6))

# (rule, what is done to the notebook, how)
MUTATIONS: list[tuple[str, str, Callable[[Any], None]]] = [
    ("valid", "a cell type that is none", _no_type),
    ("valid", "format 4.4", _old_format),
    ("stamped", "no stamp", _no_stamp),
    ("stamped", "hardware in other words", _stamp(hardware="my laptop")),
    ("stamped", "no version of torch", _stamp(versions={"python": "3", "transformers": "5", "hpnb": "0"})),
    ("fresh", "no stamp", _no_stamp),
    ("fresh", "a changed cell", _replace("[][1]", "[][2]")),
    ("fresh", "a new cell", _append("1")),
    ("fresh", "a cell that did not run", _not_run),
    ("fresh", "outputs taken out", _no_outputs),
    ("fresh", "cells run out of order", _out_of_order),
    ("small", "a long output", _print("x" * 1_000_000)),
    ("one_title", "a second title", _say("# Another")),
    ("one_title", "no title", _replace("# A small notebook", "A small notebook")),
    ("one_title", "text before the title", _say("Welcome", start=True)),
    ("short_prose", "3000 more words", _say("word " * 3000)),
    ("few_cells", "25 more cells", lambda nb: nb.cells.extend(new_code_cell("1") for _ in range(25))),
    ("short_cells", "a cell of 41 lines", _append("x = 1\n" * 41)),
    ("short_cells", "a median of 12", lambda nb: nb.cells.extend([new_code_cell("1\n" * 12)] * 11)),
    ("few_sections", "7 more sections", _say("## More\n\n" * 7)),
    ("few_sections", "no section", _replace("## ", "#### ")),
    ("numbered_exercises", "a number left out", _replace("Exercise 2: number", "Exercise 4: number")),
    ("numbered_exercises", "no colon", _replace("Exercise 2: number", "Exercise 2 number")),
    ("numbered_exercises", "the wrong level", _replace("### Exercise 2:", "## Exercise 2:")),
    ("numbered_exercises", "two exercises", _replace("### Exercise 3: number", "### Task 3: number")),
    ("numbered_exercises", "six exercises", _say(_EXTRA)),
    ("complete_exercises", "no stub", _untag("stub-1")),
    ("complete_exercises", "no check", _untag("check-2")),
    ("complete_exercises", "no time", _replace("in 5 minutes", "soon")),
    ("complete_exercises", "no hint", _replace("Hint: the", "The")),
    ("complete_exercises", "a solution that is not folded", _replace("<details>", "")),
    ("complete_exercises", "no code in the solution", _replace("```python", "```")),
    ("complete_exercises", "a fold that is no solution", _replace("<summary>Solution", "<summary>More")),
    ("few_figures", "8 more figures", _figures(8)),
    ("figures_in_words", "a figure with no <img>", _only_png),
    ("figures_in_words", "an <img> with no alt", _no_alt),
    ("figures_in_words", "a picture in the prose", _say("![](x.png)")),
    ("figures_in_words", "an <img> in the prose", _say('<img src="x.png" alt="">')),
    ("quiet", "a warning", _output(new_output("stream", name="stderr", text="a warning"))),
    ("deliberate_errors", "an error by accident", _untag("raises-exception")),
    ("deliberate_errors", "nothing asserted", _replace("assert ", "bool")),
    ("anonymous", "a home folder", _print("in /" + "home/ada/x.py, line 1")),
    ("anonymous", "a folder after a colour", _print("File \x1b[32m/" + "root/x.py\x1b[0m")),
    ("anonymous", "a temporary folder", _print("['/" + "tmp/x']")),
    ("anonymous", "a folder in the metadata", _stamp(path="/" + "Users/ada")),
    ("anonymous", "a prompt", _print("ada@node7:~/x")),
    ("anonymous", "this host or user", _print("by ada-of-this-host")),
    *(
        ("opening", f"no {word}", _replace(word, "..."))
        for word in ("question", "be able to", "should know", "minutes", "recall")
    ),
    ("narrow_cells", "26 lines", _append("\n".join(["x = 1"] * 26))),
    ("narrow_cells", "89 columns", _append("x" * 89)),
    ("experiments_not_reports", "a table", _append("lesson.table(rows)")),
    ("experiments_not_reports", "an alt text", _append("show(figure, alt='a dot')")),
    ("experiments_not_reports", "a format", _append("print(f'{x:.2f}')")),
    ("public_words", "a wire", _say("The wire is slow.")),
    ("public_words", "computing again, over two lines", _say("It is computed\nagain.")),
    ("few_brackets", "two pairs", _say("One (first) and\nanother (second).")),
    ("brief_prose", "2500 more words", _say("word " * 2500)),
    ("no_gaps", "a gap", _print("not yet: write your guess")),
    ("tells_its_run", "no stamp", _no_stamp),
    ("tells_its_run", "a broken claim", _stamp(claims={"it holds": {"holds": False}})),
    ("tells_its_run", "no number", _replace("<data", "<span")),
    ("tools_that_run", "no Python", _say("**In your tools.**\n```python\nddp = = 1\n```")),
    ("tools_that_run", "no such name", _say("**In your tools.**\n```python\nfrom torch import DDDP\n```")),
    ("laptop_notes", "not folded", _say("**On a laptop** it is slow.")),
    (
        "laptop_notes",
        "four sentences",
        _say("<details><summary>On a laptop</summary>\nA. B. C. D.\n</details>"),
    ),
    ("closing", "no papers", _replace("**Papers.**", "Papers:")),
    ("closing", "another order", _replace("What to remember", "When not to use this")),
    ("closing", "an exercise after it", _say("### Exercise 4: late")),
]
