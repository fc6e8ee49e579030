"""What is remembered between notebooks lies in one folder: guesses, schedules, ledger, field guide.

    $HPNB_HOME, else $XDG_CACHE_HOME/hpnb, else ~/.cache/hpnb

Every file is replaced in one step (hpnb/files.py). A file that cannot be read is renamed, never overwritten,
and the notebook continues as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from hpnb import files

T = TypeVar("T")


def home() -> Path:
    """The folder, made if need be; a temporary one, with a note, where it cannot be written."""
    return files.writable_home() or Path(_until_exit().name)


def load(name: str, parse: Callable[[str], T], empty: T) -> T:
    """`parse` of the text of home()/name; `empty` if there is none, or if it is not what `parse` reads."""
    path = home() / name
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return empty
    except (OSError, ValueError):
        aside = next(p for k in count(1) if not (p := path.with_name(f"{name}.aside-{k}")).exists())
        with suppress(OSError):
            path.replace(aside)
        print(f"note: {name} could not be read; it was set aside as {aside.name}, and an empty one begins")
        return empty


def save(name: str, text: str) -> None:
    """Replace home()/name by `text` in one step: whoever reads sees the old text or the new."""
    files.write_text(home() / name, text)


def read_json(name: str) -> dict[str, Any]:
    """The JSON object in home()/name; {} if there is none or it is something else."""
    return load(name, TypeAdapter(dict[str, Any]).validate_json, {})


def write_json(name: str, value: object) -> None:
    """Write `value` as JSON to home()/name."""
    save(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def locked() -> AbstractContextManager[None]:
    """Read, change and write within it: notebooks that run side by side lose nothing. It does not nest."""
    return files.locked(home() / ".lock")


def digest(*parts: object) -> str:
    """12 hex digits that are the same for the same parts in every process, and differ for others.

    Args:
        parts: whatever JSON holds; TypeError for anything else.
    """
    sha = hashlib.sha256()
    for part in parts:
        raw = json.dumps(part, sort_keys=True, separators=(",", ":")).encode()
        sha.update(f"{type(part).__name__} {len(raw)} ".encode())  # ("ab", "c") is not ("a", "bc")
        sha.update(raw)
    return sha.hexdigest()[:12]


@lru_cache(maxsize=1)
def _until_exit() -> tempfile.TemporaryDirectory[str]:
    print("note: the folder for what notebooks remember cannot be written; it is kept until this one ends")
    return tempfile.TemporaryDirectory(prefix="hpnb-")
