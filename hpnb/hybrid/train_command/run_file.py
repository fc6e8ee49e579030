"""A training run as a small TOML file, which `python -m hpnb train` runs on any number of ranks.

    [model]         which model: family, size or numbers, pretrained or from scratch
    [data]          which samples, and how many of them a data-parallel rank takes at a time
    [layout]        the options of HybridParallelPlugin under their names, such as tp_size; dp is the rest
    [training]      precision, how long, learning rate
    [checkpoint]    where to and how often

What can be wrong in the file alone is said before a rank starts. pydantic checks keys and types,
and `toml_errors.py` makes a sentence of what it finds.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator

from hpnb.data.beans_cifar10_mrpc import BEANS, CIFAR10, MRPC
from hpnb.data.image_folder import SPLITS, check_headers, image_folder
from hpnb.data.text_sources import text_files
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.train_command.layout_checks import check_layout
from hpnb.hybrid.train_command.toml_errors import STRICT, describe, read_fields
from hpnb.models import GPT2_SIZES, SIZES, GPT2Size, ViTSize

# data set -> family of models
TASKS = {"beans": "vit", "cifar10": "vit", "images": "vit", "mrpc": "gpt2", "text": "gpt2"}
_SPECS = {"beans": BEANS, "cifar10": CIFAR10, "mrpc": MRPC}
TRAIN_SAMPLES = {name: sum(spec.counts["train"]) for name, spec in _SPECS.items()}
_METRICS = {"text": (), "mrpc": ("accuracy", "f1")}  # beside the loss; of images the accuracy
_IN_TRAINING = ("precision", "max_norm", "seed")  # options of the plugin that are keys of [training]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


class Table(BaseModel):
    """A table of the file: unknown keys and values of another type are refused. examples/vit.toml and
    examples/gpt2.toml describe each key; here is what they leave out."""

    model_config = STRICT


class ModelTable(Table):
    """[model]; `size` is a name, or a table of numbers as `ViTSize` or `GPT2Size` takes."""

    family: Literal["vit", "gpt2"]
    size: str | dict[str, int] | None = None
    pretrained: str | None = None
    classes: int | None = None
    vocab_size: int | None = None
    length: int | None = None
    dropout: float = 0.0

    @model_validator(mode="after")
    def _check(self) -> ModelTable:
        sizes: Mapping[str, Any] = SIZES if self.family == "vit" else GPT2_SIZES
        if isinstance(self.size, str) and self.size not in sizes:
            raise ValueError(
                f"[model] size = {self.size!r} is no size of {self.family}; use {', '.join(sizes)}"
            )
        if self.family == "vit" and (self.length is not None or self.vocab_size is not None):
            raise ValueError(
                "[model] vocab_size and length are those of a gpt2; a vit takes [data] image_size"
            )
        _ = self.shape
        return self

    @property
    def shape(self) -> Any:
        """The size as `hpnb.models.vit` or `gpt2` takes it: a name, a ViTSize or GPT2Size, or None."""
        if not isinstance(self.size, dict):
            return self.size
        kind: type[Any] = ViTSize if self.family == "vit" else GPT2Size
        return kind(**read_fields(kind, self.size, "[model] size"))

    @property
    def size_from_scratch(self) -> ViTSize | GPT2Size:
        """The numbers of a model that starts from scratch."""
        sizes: Mapping[str, Any] = SIZES if self.family == "vit" else GPT2_SIZES
        shape = self.shape or "laptop"
        size: ViTSize | GPT2Size = sizes[shape] if isinstance(shape, str) else shape
        return size


class DataTable(Table):
    """[data]

    "images" are your own, in `folder`, with a folder a class: pets/train/cat/1.jpg, and pets/validation and
    pets/test to evaluate on. Without these three, pets/cat/1.jpg, one image in ten is held out
    (`hpnb.data.image_folder`). `augment` = "crop" keeps the scale: it pads by an eighth of the side, crops at
    random and mirrors. "autoaugment" does that, and then what AutoAugment has for CIFAR-10 (Cubuk et al.
    2019, arXiv 1805.09501)."""

    name: Literal["beans", "cifar10", "images", "mrpc", "text"]
    batch_size: Count
    image_size: Count | None = None
    augment: Literal[False, True, "crop", "autoaugment"] = False
    mixup: Annotated[float, Field(ge=0)] = 0.0
    rows: Count | None = None
    kind: Literal["auto", "real", "generated"] = "auto"
    folder: str | None = None
    workers: CountOrZero = 0


class TrainingTable(Table):
    """[training]; scaling the learning rate follows Goyal et al. 2017 (arXiv 1706.02677), section 2.1."""

    learning_rate: Annotated[float, Field(gt=0)]
    epochs: Count | None = None
    steps: Count | None = None
    precision: str = "fp32"
    learning_rate_scaling: Literal["none", "data-parallel"] = "none"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: CountOrZero = 0
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_norm: float = 0.0
    accumulation: Count = 1
    seed: CountOrZero = 0
    evaluate_every: Count = 1

    @model_validator(mode="after")
    def _check(self) -> TrainingTable:
        if (self.epochs is None) == (self.steps is None):
            problem = "neither epochs nor steps" if self.epochs is None else "both epochs and steps"
            raise ValueError(f"[training] has {problem}; give one of the two")
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError("[training] has both warmup_steps and warmup_epochs; give one of the two")
        if self.steps is not None:
            self.check_warmup(self.warmup_steps, self.steps)
        elif self.epochs is not None and self.warmup_epochs > self.epochs:
            raise ValueError(
                f"[training] warmup_epochs = {self.warmup_epochs:g} of {self.epochs} epochs in all; use fewer"
            )
        return self

    def check_warmup(self, steps: int, total: int) -> None:
        """Raise ValueError unless a warm-up of so many steps fits the run."""
        if steps > total:
            key = (
                f"warmup_epochs = {self.warmup_epochs:g}, which are"
                if self.warmup_epochs
                else "warmup_steps ="
            )
            raise ValueError(f"[training] {key} {steps} of {total} steps in all; use fewer")


class CheckpointTable(Table):
    """[checkpoint]"""

    dir: str | None = None
    every: Count | None = None
    keep: Count = 2
    best: str | None = None
    resume: bool = True
    background: bool = False
    allow_changes: bool = False
    on_error: Literal["stop", "warn"] = "stop"


class RunFile(Table):
    """All of a file. It travels to the ranks as it is."""

    model: ModelTable
    data: DataTable
    training: TrainingTable
    layout: dict[str, Any] = {}
    checkpoint: CheckpointTable = CheckpointTable()

    @model_validator(mode="after")
    def _check(self) -> RunFile:
        if TASKS[self.data.name] != self.model.family:
            fits = [name for name, family in TASKS.items() if family == self.model.family]
            raise ValueError(
                f"[data] name = {self.data.name!r} is for a {TASKS[self.data.name]}, and [model] family is "
                f"{self.model.family!r}, which reads {' or '.join(fits)}"
            )
        if self.data.name == "images" and (self.data.folder is None or self.data.kind == "generated"):
            what = "no folder" if self.data.folder is None else "kind = 'generated'"
            raise ValueError(
                f"[data] name = 'images' with {what}: images of your own lie in [data] folder, as "
                "folder/train/CLASS/IMAGE.jpg; 'beans' and 'cifar10' can be generated"
            )
        if self.data.name == "text" and self.model.classes is not None:
            raise ValueError(
                "[model] classes is of a classifier, and [data] name = 'text' trains a language model"
            )
        of_images = self.data.augment or self.data.mixup or self.data.image_size is not None
        if self.model.family == "gpt2" and of_images:
            raise ValueError("[data] image_size, augment and mixup are of images, and a gpt2 reads texts")
        self._check_best()
        # The plugin refuses what cannot compose, and then the model what it does not have.
        size = None if self.model.pretrained else self.model.size_from_scratch
        blocks, heads = (None, None) if size is None else (size.layers, size.heads)
        check_layout(self.plugin(), self.data.name, blocks, heads)
        return self

    def _check_best(self) -> None:
        """Raise ValueError unless an epoch will have the figure that [checkpoint] best names."""
        best, names = self.checkpoint.best, ["loss", *_METRICS.get(self.data.name, ("accuracy",))]
        speed = "tokens_per_second" if self.data.name == "text" else "samples_per_second"
        names += [*(f"eval_{name}" for name in names), "lr", "seconds", speed]
        if best is not None and best not in names:
            near = difflib.get_close_matches(best, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"an epoch has {', '.join(names)}"
            raise ValueError(f"[checkpoint] best = {best!r} is no figure of this run; {hint}")

    @property
    def folder(self) -> Path:
        """Of the checkpoints."""
        return Path(self.checkpoint.dir or "run").expanduser()

    def plugin(self) -> HybridParallelPlugin:
        """A new one."""
        from_training = {name: getattr(self.training, name) for name in _IN_TRAINING}
        return HybridParallelPlugin(**self.layout, **from_training)

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError unless the layout fits on so many ranks."""
        try:
            self.plugin().layout_on(ranks)
        except ValueError as error:
            raise ValueError(f"[layout] {error}") from None

    def check_length(self, ranks: int) -> None:
        """Raise ValueError if the warm-up is longer than the run, where the samples are known before a rank
        starts: those of the data sets as they were published. A run that goes on may be longer."""
        how, published = self.training, TRAIN_SAMPLES.get(self.data.name)
        if how.epochs is None or not how.warmup_steps or published is None or self.data.folder is not None:
            return
        samples = min(published, self.data.rows or published)
        a_step = self.data.batch_size * (ranks // self.plugin().replica_size)
        an_epoch = math.ceil(math.ceil(samples / a_step) / how.accumulation)
        how.check_warmup(how.warmup_steps, how.epochs * an_epoch)

    def check_folder(self, inside: bool = False) -> None:
        """Raise FileNotFoundError unless [data] folder, if the file has one, is there, and ValueError unless
        it has the images of name = 'images'. With `inside` also, naming the files, for texts that are not
        UTF-8, and for images whose headers cannot be read, as far as that takes seconds."""
        if self.data.folder is None or self.data.kind == "generated":
            return
        folder = Path(self.data.folder).expanduser()
        if not (folder.is_dir() or (self.data.name == "text" and folder.is_file())):
            default = "the documentation of Python" if self.data.name == "text" else "$DATA"
            instead = "" if self.data.name == "images" else f", or leave it out to read {default}"
            raise FileNotFoundError(
                f"[data] folder = {self.data.folder!r}: there is no folder {folder.absolute()}; correct "
                f"it{instead}"
            )
        if self.data.name == "text" and inside:
            try:
                text_files(folder).check()
            except (ValueError, FileNotFoundError) as error:
                raise ValueError(f"[data] folder: {error}") from error
        if self.data.name == "images":
            try:
                splits = [image_folder(folder, split) for split in SPLITS]
                if inside:
                    check_headers(splits)
            except ValueError as error:
                raise ValueError(f"[data] folder: {error}") from error


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a file, with `overrides` such as "layout.tp_size=2" in place of what it says. An error's sentence
    begins with the file's name."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: this is no TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text, but TOML is: {error}") from error
    except OSError as error:
        raise OSError(
            f"{path} cannot be read: {error.strerror}; give a file such as examples/vit.toml"
        ) from error
    for override in overrides:
        _put(tables, override)
    try:
        return parse(tables, path.stem)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def parse(tables: Mapping[str, Any], name: str = "run") -> RunFile:
    """What the tables of a file say. `name` is that of the folder of checkpoints, unless they say it."""
    layout = tables.get("layout", {})
    if isinstance(layout, Mapping):
        layout = _read_layout(layout)
    checkpoint = tables.get("checkpoint", {})
    if isinstance(checkpoint, Mapping):
        checkpoint = {"dir": name, **checkpoint}
    try:
        return RunFile.model_validate({**tables, "layout": layout, "checkpoint": checkpoint})
    except ValidationError as error:
        known = {table: _keys_of(field.annotation) for table, field in RunFile.model_fields.items()}
        raise ValueError(describe(error, known)) from error


def _keys_of(table: Any) -> list[str]:
    return list(table.model_fields) if isinstance(table, type) and issubclass(table, BaseModel) else []


def _read_layout(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The plugin's options in [layout]."""
    for name in _IN_TRAINING:
        if name in layout:
            raise ValueError(f"[layout] {name} belongs into [training], as {name}")
    if isinstance(dtype := layout.get("communication_dtype"), str):  # TOML has no dtypes
        layout = {**layout, "communication_dtype": getattr(torch, dtype, dtype)}
    return read_fields(HybridParallelPlugin, layout, "[layout]", leave_out=_IN_TRAINING)


def _put(tables: dict[str, Any], override: str) -> None:
    """Write "table.key=value" into the tables; a value that is no TOML is text."""
    place, equals, text = override.partition("=")
    *path, key = place.strip().split(".")
    if not equals or len(path) < 1 or not all((*path, key)):
        raise ValueError(f"--set {override} says nothing; write --set table.key=value, as layout.tp_size=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for name in path:
        inner = tables.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--set {override}: {name} is not a table in the file")
        tables = inner
    tables[key] = value
