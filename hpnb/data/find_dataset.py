"""Where the real datasets are looked for, and what is said when they are not there.

    1. $DATA                a folder that the reader chose (dataset_formats.py has the formats)
    2. the network          CIFAR-10 goes into $DATA through torchvision if DATA is set. Otherwise the hub
                            fills its cache, as with all other datasets
    3. the hub's cache      $HF_DATASETS_CACHE, else $HF_HOME/datasets

Step 2 is skipped if HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, or if the host does not answer within
seconds, because `datasets` and `transformers` would try for minutes. A lost packet does not make a host
silent: it is asked again every second, and a silent one once more after a minute.
"""

from __future__ import annotations

import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpnb.data import dataset_formats
from hpnb.data.dataset import MapDataset

PATIENCE = 5.0  # seconds that a host has to answer
ASK_EVERY = 1.0  # seconds; a lost packet delays one request by more than that
ASK_AGAIN_AFTER = 60.0  # seconds for which a host that did not answer counts as silent

_answered: set[str] = set()  # hosts that have answered
_silent_since: dict[str, float] = {}  # host -> time.monotonic()


class NotFoundError(Exception):
    """There are no real samples; the message says why, in a few words."""


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset, and how the real one is recognised.

    Attributes:
        classes: their names, by label.
        counts: {split: samples of every class, in order of label}.
        nouns: what real and generated samples show.
        folders: its names below $DATA.
        fields: its columns; `image_field` is the one that holds images, if any.
        repo, config: its name on the hub.
        read_original: reads the format in which it was first published, from a folder below $DATA or $DATA.
        read_in_data: the same for $DATA itself, if files of other datasets there may have the same names.
        download: (address, function of a folder) if it can be had without the hub.
    """

    name: str
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    nouns: tuple[str, str]
    folders: tuple[str, ...]
    fields: tuple[str, ...]
    image_field: str | None
    repo: str
    config: str | None
    read_original: Callable[[Path, str], MapDataset | None]
    download: tuple[str, Callable[[Path], None]] | None = None
    read_in_data: Callable[[Path, str], MapDataset | None] | None = None


def load_real_dataset(spec: DatasetSpec, split: str) -> tuple[MapDataset, str]:
    """The real samples and where they lie, in words without a path of this machine.

    Raises:
        NotFoundError: there are none.
        ValueError: they are there and cannot be read.
    """
    data, offline = os.environ.get("DATA"), _offline_reason()
    reasons = ["DATA is not set"]
    if data:
        folder = Path(data).expanduser()
        if in_data := _read_folder(folder, spec, split):
            return in_data
        reasons = [f"$DATA has no {spec.name}" if folder.is_dir() else "$DATA is not a folder"]
        if spec.download and not offline and folder.is_dir() and host_answers(spec.download[0]):
            try:
                spec.download[1](folder)
            except Exception as error:  # whatever torchvision raises is a reason
                reasons.append(f"fetching it failed ({_first_line(error)})")
            if in_data := _read_folder(folder, spec, split):
                return in_data
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    why = offline or ("" if host_answers(endpoint) else f"{urlsplit(endpoint).hostname} does not answer")
    cached = datasets_cache() / spec.repo.replace("/", "___")
    if why and not cached.is_dir():
        raise NotFoundError(_join_reasons([*reasons, "the Hugging Face cache has none", why]))
    try:
        return _load_from_hub(spec, split, bool(why)), f"{spec.repo} on the Hugging Face hub"
    except ValueError:
        raise
    except Exception as error:
        reasons.append(f"loading {spec.repo} failed ({_first_line(error)})")
        raise NotFoundError(_join_reasons(reasons)) from error


def datasets_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")).expanduser()


def host_answers(address: str) -> bool:
    """Whether the host answers at all, and soon. Any answer counts, a refusal too; proxies are honoured.

    That it answers is remembered; that it does not, for a minute.
    """
    if address in _answered:
        return True
    began = time.monotonic()
    if began - _silent_since.get(address, -math.inf) < ASK_AGAIN_AFTER:
        return False
    answered = threading.Event()

    def send_request() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.set()

    while (left := began + PATIENCE - time.monotonic()) > 0:
        # Threads, because looking up a name has no timeout, and an answer to an earlier request counts too.
        threading.Thread(target=send_request, daemon=True).start()
        if answered.wait(min(ASK_EVERY, left)):
            _answered.add(address)
            return True
    _silent_since[address] = time.monotonic()
    return False


def _offline_reason() -> str:
    """The variable that forbids the network, or an empty text."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{name} is set"
    return ""


def _read_folder(data: Path, spec: DatasetSpec, split: str) -> tuple[MapDataset, str] | None:
    """Samples in a folder of $DATA. The original format is recognised in $DATA itself too."""
    for name in (*spec.folders, ""):
        folder = data / name
        if not folder.is_dir():
            continue
        where = "$DATA" + (f"/{name}" if name else "")
        try:
            read = spec.read_original if name else spec.read_in_data or spec.read_original
            rows = read(folder, split)
            if rows is None and name:
                with quiet_datasets():
                    rows = dataset_formats.read_saved(folder, split)
                    rows = rows or dataset_formats.read_parquet(folder, split, datasets_cache())
                    rows = rows and _check_columns(rows, spec)
        except Exception as error:  # every library raises its own; the reader needs the folder and the reason
            why = f"cannot be read: {_first_line(error)}; mend or remove it"
            raise ValueError(f"{spec.name} in {where} {why}") from error
        if rows is not None:
            return rows, where
    return None


def _load_from_hub(spec: DatasetSpec, split: str, only_cached: bool) -> MapDataset:
    import datasets
    import pyarrow  # type: ignore[import-untyped]

    with quiet_datasets():
        before = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = before or only_cached
        try:
            folder = str(datasets_cache())
            rows = datasets.load_dataset(spec.repo, spec.config, split=split, cache_dir=folder)
        except (pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(
                f"{spec.name} in the Hugging Face cache cannot be read: {_first_line(error)}; remove it there"
            ) from error
        except ValueError as error:  # no such configuration in the cache
            raise NotFoundError(_first_line(error)) from error
        finally:
            datasets.config.HF_HUB_OFFLINE = before
        return _check_columns(rows, spec)


def _check_columns(rows: Any, spec: DatasetSpec) -> MapDataset:
    """The columns of the dataset and no others, images as images."""
    if missing := [name for name in spec.fields if name not in rows.column_names]:
        present = ", ".join(rows.column_names)
        raise ValueError(f"{spec.name} should have a column {', '.join(missing)} and has only {present}")
    if spec.image_field:
        from datasets import Image

        rows = rows.cast_column(spec.image_field, Image())
    return rows.select_columns(list(spec.fields))  # type: ignore[no-any-return]


@contextmanager
def quiet_datasets() -> Iterator[None]:
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


def _first_line(error: BaseException) -> str:
    """The first line of an error, or of what caused it: libraries wrap it in more sentences."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160].rstrip(".")


def _join_reasons(reasons: list[str]) -> str:
    return ", ".join(reasons[:-1]) + f" and {reasons[-1]}"
