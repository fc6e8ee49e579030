"""What a %%ranks cell may say beyond Python: `!command`, and `await` outside of a function.

IPython translates `!ls {folder}` into get_ipython().system("ls {folder}"). A rank has no IPython, so that
becomes a call of `run_command` here, which runs the command on every rank that runs the cell.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import subprocess
import types
from collections.abc import Callable
from inspect import CO_COROUTINE
from typing import Any

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SHELL = re.compile(r"get_ipython\(\)\.(system|getoutput)\((.*)\)")
_MAGIC = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(\w+)'")
_NAME = re.compile(r"[${]\s*([A-Za-z_]\w*)")


def python_of_cell(text: str, transform: Callable[[str], str]) -> str:
    """The cell as Python, line by line where it was; `transform` is IPython's.

    Raises:
        SyntaxError: it is neither Python nor IPython.
        ValueError: it has a magic, which a rank cannot run.
    """
    if _is_python(text):
        return text
    body = text.lstrip("\n")
    python = "\n" * (len(text) - len(body)) + transform(body)
    if magic := _MAGIC.search(python):
        kind, name = magic.groups()
        if name in ("pinfo", "pinfo2"):
            raise ValueError(
                "ranks have no IPython, which would answer a question mark; ask in a cell of its own"
            )
        if kind == "cell":
            raise ValueError(
                f"%%{name} cannot stand below %%ranks; make it the first line, %%ranks the second"
            )
        raise ValueError(
            f"%{name} cannot run on ranks, which have no IPython; give it a cell without %%ranks (what %cd, "
            "%env and %pip change there, ranks see in their next cell)"
        )
    python = _SHELL.sub(_command, python)
    return python if _is_python(python) else text  # whose SyntaxError shows what was typed


def _is_python(text: str) -> bool:
    try:
        compile(text, "<cell>", "exec", FLAGS, dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _command(match: re.Match[str]) -> str:
    # The lambda is not called: it shows that the cell reads these names, so that ranks get them.
    names = "".join(f"{name}, " for name in dict.fromkeys(_NAME.findall(match[2])))
    call = f"__import__({__name__!r}, fromlist=['run_command']).run_command"
    return f"{call}({match[2]}, globals(), lambda: ({names}), gives={match[1] == 'getoutput'})"


def run_command(
    command: str, namespace: dict[str, Any], names: object = None, *, gives: bool = False
) -> list[str] | None:
    """Run a shell command on this rank, with `{expression}` and `$name` filled in as IPython does.

    Returns:
        The lines that it printed, if it `gives` them; otherwise they appear under the rank's number.
    """
    from IPython.utils.text import DollarFormatter

    with contextlib.suppress(Exception):  # IPython, too, leaves a command as it is that it cannot fill in
        command = DollarFormatter().vformat(command, args=[], kwargs=namespace)
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE if gives else None, text=True)
    namespace["_exit_code"] = done.returncode
    return done.stdout.splitlines() if gives else None


def run_code(code: types.CodeType, namespace: dict[str, Any]) -> object:
    """Execute or evaluate the code of a cell, which may await something."""
    value = eval(code, namespace)
    return _event_loop().run_until_complete(value) if code.co_flags & CO_COROUTINE else value


_loop: asyncio.AbstractEventLoop | None = None


def _event_loop() -> asyncio.AbstractEventLoop:
    """One for all cells of this rank, so that a task that one has started goes on in the next."""
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    return _loop
