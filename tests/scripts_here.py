"""Scripts in a process that has imported everything: another Python would import it again, for seconds."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock


def run_script_here(script: Path, arguments: tuple[str, ...] = ()) -> tuple[str, str]:
    """Run a script as `python script arguments` would, in this process: what it prints, and its errors."""
    out, errors = io.StringIO(), io.StringIO()
    argv, path = [str(script), *arguments], [str(script.parent), *sys.path]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path):
            runpy.run_path(str(script), run_name="__main__")
    return out.getvalue(), errors.getvalue()
