"""What a run file and the checkpoint that it resumes from differ in, and what of it cannot be resumed.

    may change      [layout], [checkpoint], workers, evaluate_every; learning rate, length, precision and so
                    on, which are from here on what the file says now
    must stay       the model, the data, the seed, and the samples a step takes: with others the run would be
                    neither that of the checkpoint nor that of the file
    nothing left    all steps are done, and the file says something new: it would train nothing

What must stay is refused, unless the file or --allow-changes says otherwise. An epoch that was cut short then
begins anew if its data or the samples of its steps have changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpnb.hybrid.train_command.run_file import RunFile

_FREE = ("layout.", "data.workers", "training.evaluate_every")
_MUST_STAY = (
    *(f"model.{key}" for key in ("family", "size", "pretrained", "classes", "vocab_size", "length")),
    *(f"data.{key}" for key in ("name", "image_size", "rows", "kind", "folder")),
    "training.seed", "samples a step",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A key with the value it had and the one it has."""

    key: str
    before: Any
    now: Any

    @property
    def must_stay(self) -> bool:
        return self.key in _MUST_STAY

    @property
    def is_free(self) -> bool:
        return self.key.startswith(_FREE)

    def __str__(self) -> str:
        return f"{self.key} = {_show(self.before)}, now {_show(self.now)}"


def run_facts(file: RunFile, dp_size: int) -> dict[str, Any]:
    """{"table.key": value} of the file, and the samples a step: what a checkpoint keeps of it."""
    tables = json.loads(json.dumps(file.model_dump(), default=str))
    keys = {f"{table}.{key}": value for table, content in tables.items() for key, value in content.items()}
    return {**keys, "samples a step": file.data.batch_size * file.training.accumulation * dp_size}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The keys that have other values, those of [checkpoint] aside. Without facts there are none."""
    if not before:
        return []
    keys = [key for key in dict.fromkeys([*before, *now]) if not key.startswith("checkpoint.")]
    pairs = [Difference(key, before.get(key), now.get(key)) for key in keys]
    return [difference for difference in pairs if difference.before != difference.now]


def check_resumable(changed: list[Difference], folder: Path, step: int, total: int) -> None:
    """Raise ValueError for what cannot be resumed from `step` of `total` steps."""
    hint = "set [checkpoint] dir to another folder, or pass --allow-changes to go on there as the file says"
    if stay := [difference for difference in changed if difference.must_stay]:
        raise ValueError(f"the run in {folder} had {', '.join(map(str, stay))}; {hint}")
    if step >= total and (new := [difference for difference in changed if not difference.is_free]):
        raise ValueError(
            f"the run in {folder} has done all of {total} steps, with {', '.join(map(str, new))}: there is "
            f"nothing left to train; ask for more epochs or steps, {hint}"
        )


def _show(value: Any) -> str:
    return "the default" if value is None else json.dumps(value)
