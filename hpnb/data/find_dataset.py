"""Where the real data sets are looked for, and what is said when they are not there.

    1. $DATA                the folder that the reader named (its forms: dataset_formats.py)
    2. the network          CIFAR-10 goes into $DATA through torchvision; everything else to the hub's cache
    3. the hub's cache      $HF_DATASETS_CACHE, else $HF_HOME/datasets

Step 2 is left out where HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, and where the host does not answer
within seconds: a library left to itself would try for minutes.
"""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpnb.data import dataset_formats
from hpnb.data.dataset import Rows

PATIENCE = 3.0  # seconds that a host has to answer


class NotFoundError(Exception):
    """There are no real rows; the message says why, in a few words."""


@dataclass(frozen=True)
class Wanted:
    """One real data set: how it is recognised.

    Attributes:
        folders: its names below $DATA.
        fields: its columns; `picture` is the one that holds pictures, if any.
        repo, config: its name on the hub.
        own_form: reads the form in which it was first published, from a folder below $DATA or $DATA itself.
        fetch: (address, function of a folder) where it can be had without the hub.
    """

    name: str
    folders: tuple[str, ...]
    fields: tuple[str, ...]
    picture: str | None
    repo: str
    config: str | None
    own_form: Callable[[Path, str], Rows | None]
    fetch: tuple[str, Callable[[Path], None]] | None = None


def find(wanted: Wanted, split: str) -> tuple[Rows, str]:
    """The real rows and where they lie, in words without a path of this machine.

    Raises:
        NotFoundError: there are none.
        ValueError: they are there and cannot be read.
    """
    data, offline = os.environ.get("DATA"), _offline()
    reasons = ["DATA is not set"]
    if data:
        folder = Path(data).expanduser()
        if found := _below(folder, wanted, split):
            return found
        reasons = [f"$DATA has no {wanted.name}" if folder.is_dir() else "$DATA is not a folder"]
        if wanted.fetch and not offline and folder.is_dir() and answers(wanted.fetch[0]):
            try:
                wanted.fetch[1](folder)
            except Exception as error:  # whatever torchvision meets on its way is a reason
                reasons.append(f"fetching it failed ({_short(error)})")
            if found := _below(folder, wanted, split):
                return found
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    why = offline or ("" if answers(endpoint) else f"{urlsplit(endpoint).hostname} does not answer")
    kept = cache() / wanted.repo.replace("/", "___")
    if why and not kept.is_dir():
        raise NotFoundError(_listed([*reasons, "the Hugging Face cache has none", why]))
    try:
        return _from_hub(wanted, split, bool(why)), f"{wanted.repo} on the Hugging Face hub"
    except ValueError:
        raise
    except Exception as error:
        raise NotFoundError(_listed([*reasons, f"loading {wanted.repo} failed ({_short(error)})"])) from error


def cache() -> Path:
    """Where `datasets` keeps what it has prepared."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")).expanduser()


@lru_cache
def answers(address: str) -> bool:
    """Whether the host answers at all, and soon. Any answer counts, a refusal too; proxies are honoured."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because looking up a name has no timeout of its own.
    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(PATIENCE)


def _offline() -> str:
    """Why nothing is to be fetched, if so."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    return ""


def _below(data: Path, wanted: Wanted, split: str) -> tuple[Rows, str] | None:
    """Rows in a folder of $DATA. Its own form is so distinct that it may also lie in $DATA itself."""
    for name in (*wanted.folders, ""):
        folder = data / name
        if not folder.is_dir():
            continue
        where = "$DATA" + (f"/{name}" if name else "")
        try:
            rows = wanted.own_form(folder, split)
            if rows is None and name:
                with _quietly():
                    rows = dataset_formats.saved(folder, split)
                    rows = rows or dataset_formats.parquet(folder, split, cache())
                    rows = rows and _checked(rows, wanted)
        except Exception as error:  # each library has its own; the reader needs the place and the reason
            why = f"cannot be read: {_short(error)}; mend or remove it"
            raise ValueError(f"{wanted.name} in {where} {why}") from error
        if rows is not None:
            return rows, where
    return None


def _from_hub(wanted: Wanted, split: str, only_cached: bool) -> Rows:
    import datasets
    import pyarrow  # type: ignore[import-untyped]

    with _quietly():
        before = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = before or only_cached
        try:
            rows = datasets.load_dataset(wanted.repo, wanted.config, split=split, cache_dir=str(cache()))
        except (pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(
                f"{wanted.name} in the Hugging Face cache cannot be read: {_short(error)}; remove it there"
            ) from error
        except ValueError as error:  # no such configuration in the cache
            raise NotFoundError(_short(error)) from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before
        return _checked(rows, wanted)


def _checked(rows: Any, wanted: Wanted) -> Rows:
    """The columns of the data set and no others, pictures as pictures."""
    if missing := [name for name in wanted.fields if name not in rows.column_names]:
        there = ", ".join(rows.column_names)
        raise ValueError(f"{wanted.name} should have a column {', '.join(missing)} and has only {there}")
    if wanted.picture:
        from datasets import Image

        rows = rows.cast_column(wanted.picture, Image())
    return rows.select_columns(list(wanted.fields))  # type: ignore[no-any-return]


@contextmanager
def _quietly() -> Iterator[None]:
    """`datasets` without its progress bars and warnings: every rank would show them."""
    import datasets

    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _short(error: BaseException) -> str:
    """The first line of an error, or of what caused it: libraries wrap theirs in sentences of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160].rstrip(".")


def _listed(reasons: list[str]) -> str:
    return ", ".join(reasons[:-1]) + f" and {reasons[-1]}"
