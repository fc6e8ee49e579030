"""Files of results: JSON, one file per run, with its date and commit. Tables and chart are made of them.

hpnb/bench/results/2026-01-31T0915-gpt2-xl-0123abcd.json
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpnb.bench.results import BenchmarkRun, LayoutResult
from hpnb.bench.tables import markdown, summary
from hpnb.files import write_text

RESULTS = Path(__file__).parent / "results"
PAGE = "README.md"  # of the folder: the tables stand there, between these lines
_BEGIN, _END = "<!-- tables: python -m hpnb.bench table --write -->", "<!-- end of tables -->"


def current_commit() -> str:
    """Of the code that runs: 8 digits, with a + behind them where files differ from it; or "unknown"."""
    try:
        head = _git("rev-parse", "--short=8", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*what: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def write(run: BenchmarkRun, where: str | Path) -> Path:
    """Into a file, or into a folder under a name that says when and what. Replaced in one step.

    Returns:
        The file.
    """
    path = Path(where)
    if path.suffix != ".json":
        path = path / f"{run.date[:16].replace(':', '')}-{run.what}-{run.commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(run.as_json(), indent=1) + "\n")
    return path


def read(folder: Path = RESULTS) -> list[BenchmarkRun]:
    """All runs of a folder, the oldest first.

    Raises:
        ValueError: a file that is no result; it says which.
    """
    return list(named(folder).values())


def named(folder: Path = RESULTS) -> dict[str, BenchmarkRun]:
    """`read`, by the names of the files."""
    runs = {}
    for path in sorted(folder.glob("*.json")):
        try:
            runs[path.name] = BenchmarkRun.of_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} is no file of results ({type(error).__name__}: {error})") from None
    return dict(sorted(runs.items(), key=lambda item: item[1].date))


def sources(runs: Mapping[str, BenchmarkRun], key: str) -> list[str]:
    """The files of `named` that `newest` takes the layouts of a key from, the oldest first."""
    of_key = {name: run for name, run in runs.items() if run.key == key}
    taken, _ = _choose_layouts(list(of_key.values()))
    last = {layout: name for name, layouts in zip(of_key, taken, strict=True) for layout in layouts}
    return [name for name in runs if name in last.values()]


def newest(runs: Sequence[BenchmarkRun]) -> list[BenchmarkRun]:
    """One run per key, with each layout as it was measured last, and so losses and scaling. Runs of another
    day or commit are not mixed in unless they alone have a layout; then the table says so in its last lines.
    A run of some programs alone replaces no layout of which an earlier run has more (`left_out`).
    """
    merged: dict[str, BenchmarkRun] = {}
    stamps: dict[str, dict[str, str]] = {}
    taken, _ = _choose_layouts(runs)
    for run, names in zip(runs, taken, strict=True):  # the oldest first
        before = merged.get(run.key)
        layouts = {**(before.layouts if before else {}), **{name: run.layouts[name] for name in names}}
        stamps.setdefault(run.key, {}).update(dict.fromkeys(names, run.commit))
        known = list(dict.fromkeys(stamps[run.key][name] for name in layouts))
        merged[run.key] = replace(
            before if before and not names else run,
            layouts=layouts,
            commit=" and ".join(known) or run.commit,
            losses=_merge_losses(before.losses if before else {}, run.losses),
            scaling=run.scaling or (before.scaling if before else {}),
        )
    return sorted(merged.values(), key=lambda run: (run.what, run.microbatches, run.forward_samples, run.key))


def _merge_losses(before: dict[str, Any], latest: dict[str, Any]) -> dict[str, Any]:
    """The losses of `latest`, and those of other layouts in `before`, if they took as many steps.

    Each entry keeps the "order" of its run, which its distance is compared with.
    """
    if not before or not latest:
        return latest or before
    runs = [before, latest] if before["steps"] == latest["steps"] else [latest]
    layouts = {
        name: {"order": run["order"], **entry} for run in runs for name, entry in run["layouts"].items()
    }
    return {**latest, "layouts": layouts}


def left_out(runs: Sequence[BenchmarkRun]) -> list[str]:
    """A sentence for each layout that `newest` does not take from the run that measured it last."""
    return list(_choose_layouts(runs)[1].values())


def _choose_layouts(runs: Sequence[BenchmarkRun]) -> tuple[list[list[str]], dict[tuple[str, str], str]]:
    """(for each run, the oldest first, the layouts that replace earlier ones; a sentence for each layout that
    does not). With `--candidates`, a run has to have times of all programs that the earlier one has."""
    chosen: list[list[str]] = []
    last: dict[tuple[str, str], LayoutResult] = {}
    sentences: dict[tuple[str, str], str] = {}
    for run in runs:
        names = []
        for name, result in run.layouts.items():
            place, before = (run.key, name), last.get((run.key, name))
            lacking = [one for one in _ran(before) if one not in _ran(result)] if before else []
            if run.candidates and lacking:
                sentences[place] = (
                    f"{name} of {run.date[:10]} at {run.commit} ({run.title}) is not in these tables: it has "
                    f"only programs that --candidates asked for, and an earlier run has {lacking[0]} too."
                )
                continue
            last[place] = result
            sentences.pop(place, None)
            names.append(name)
        chosen.append(names)
    return chosen, sentences


def _ran(result: LayoutResult) -> list[str]:
    return [one.name for ours in (True, False) for one in result.ranked(ours)]


def table(folder: Path = RESULTS) -> str:
    """All tables of the newest results: first a row per layout, then all programs of each task.

    Raises:
        ValueError: there are none, or a file that is none.
    """
    every = read(folder)
    runs = _with_layouts(folder, every)
    return "\n\n".join([summary(runs), *(markdown(run) for run in runs), *left_out(every)])


def show_table(results: Path, write: bool) -> None:
    """Print all tables; or put them into the README of the folder, and print where that is."""
    print(write_page(results) if write else table(results))


def short_table(folder: Path = RESULTS) -> str:
    """The first of the tables, without throughputs and without runs of a set number of microbatches or of
    samples in a forward: for the repository's README."""
    every = _with_layouts(folder, read(folder))
    runs = [run for run in every if not run.microbatches and not run.forward_samples]
    return summary(runs, throughput=False)


def write_page(folder: Path = RESULTS) -> Path:
    """Replace the tables in the README of the folder.

    Raises:
        ValueError: it does not mark where they stand.
    """
    path = folder / PAGE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{path} does not say where tables stand; put {_BEGIN} and {_END} on lines of it")
    write_text(path, f"{before}{begin}\n\n{table(folder)}\n\n{end}{after}")
    return path


def _with_layouts(folder: Path, every: Sequence[BenchmarkRun]) -> list[BenchmarkRun]:
    runs = [run for run in newest(every) if run.layouts]
    if not runs:
        raise ValueError(describe_empty(folder))
    return runs


def describe_empty(folder: Path) -> str:
    """The error for a folder without results."""
    return f"{folder} has no results; `python -m hpnb.bench gpt2-xl --out FOLDER` writes some"
