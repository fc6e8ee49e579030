"""What a run file names, made: the model, its data by split, and what is measured of them.

    [data] name    model                             during training    at the end    beside the loss
    beans          ViTForImageClassification         validation         test          accuracy
    cifar10        ViTForImageClassification         test               test          accuracy
    images         ViTForImageClassification         validation         test          accuracy
    mrpc           GPT2ForSequenceClassification     validation         test          accuracy, F1
    text           GPT2LMHeadModel                   test               test

Every rank draws the same full model, and `Booster.boost` then leaves it its shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpnb import data, models
from hpnb.data.dataset import Dataset
from hpnb.hybrid.checkpoint.agreement import files_group, gather_objects
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.train_command.run_file import DataTable, RunFile
from hpnb.hybrid.training.events import Metric
from hpnb.hybrid.training.metrics import AccuracyHook, F1Hook
from hpnb.ranks.current_rank import device

Splits = tuple[Dataset, Dataset, Dataset]

_WITH_VALIDATION = ("train", "validation", "test")
_SPLITS = {"beans": _WITH_VALIDATION, "cifar10": ("train", "test", "test"), "mrpc": _WITH_VALIDATION,
           "images": _WITH_VALIDATION, "text": ("train", "test", "test")}  # fmt: skip
_CLASSES = {"beans": 3, "cifar10": 10, "mrpc": 2}


class LimitedLoader(data.Loader):
    """A loader whose epoch `last` has no more than `batches` batches: a run of so many steps ends there."""

    last: int = -1
    batches: int = 0

    def __len__(self) -> int:
        """Of the epoch that is set."""
        batches = super().__len__()
        return min(batches, self.batches) if self.epoch == self.last else batches


@dataclass(frozen=True)
class RunTask:
    """A model and what it is to learn: splits for training, to evaluate on meanwhile, and at the end; how
    rows become a batch, where `plain` is the transform without chance; and what is saved with the model."""

    model: nn.Module
    splits: Splits
    metrics: tuple[Metric, ...] = ()
    collate: Any = None
    transform: Any = None
    plain: Any = None
    tokenizer: Any = None
    image_processor: Any = None

    def loader(
        self, plugin: HybridParallelPlugin, table: DataTable, split: int, seed: int = 0
    ) -> LimitedLoader:
        """A loader of one of the splits; the first is shuffled."""
        return LimitedLoader(
            self.splits[split],
            table.batch_size,
            plugin.mesh.dp,
            shuffle=split == 0,
            seed=seed,
            collate_fn=self.collate,
            transform=self.plain if split else self.transform,
            num_workers=table.workers,
            pin_memory=device().type == "cuda",
        )


def make_task(file: RunFile) -> RunTask:
    """What `file` names. Every rank calls it."""
    file.check_folder()
    if file.data.folder is not None and file.data.name not in ("text", "images"):
        os.environ["DATA"] = str(Path(file.data.folder).expanduser())
    make = {"mrpc": _pairs, "text": _text}.get(file.data.name, _pictures)
    try:
        task = make(file)
        if file.data.folder is not None and file.data.kind != "generated":
            _check_is_in_folder(file.data, task.splits[0])
        return task
    except (ValueError, FileNotFoundError) as error:
        if file.data.folder is None or "$DATA" not in str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(str(error).replace("$DATA", f"[data] folder = {file.data.folder!r}")) from error


def _pictures(file: RunFile) -> RunTask:
    wanted, table = file.model, file.data
    if table.name == "images":
        classes = len(data.image_folder(_folder(table)).classes)
    else:
        classes = _CLASSES[table.name]
    model = models.vit(
        wanted.shape,
        classes=wanted.classes or classes,
        image_size=table.image_size,
        pretrained=wanted.pretrained,
        dropout=wanted.dropout,
        seed=file.training.seed,
    )
    side = int(model.config.image_size)

    def load(split: str, size: int | None) -> Dataset:
        if table.name == "images":
            return data.image_folder(_folder(table), split, size, side)
        make: Callable[..., Dataset] = data.beans if table.name == "beans" else data.cifar10
        return make(split, size, image_size=side, kind=table.kind)

    splits = _splits(table, load)
    _check_classes(wanted.classes, splits[0])
    if table.name == "images" and model.config.num_labels == classes:
        model.config.id2label = dict(enumerate(splits[0].classes))
        model.config.label2id = {name: label for label, name in enumerate(splits[0].classes)}
    plain = data.ImageTransform(side, **_statistics(wanted.pretrained))
    transform = replace(plain, augment=_augmentation(table.augment, side), mixup=table.mixup,
                        classes=int(model.config.num_labels))  # fmt: skip
    if table.mixup:
        model.loss_function = _cross_entropy
    return RunTask(model, splits, (AccuracyHook(),), transform=transform, plain=plain,
                   image_processor=_image_processor(plain))  # fmt: skip


def _augmentation(name: bool | str, side: int) -> Any:
    """What [data] augment names, as `ImageTransform` takes it."""
    if isinstance(name, bool):
        return name
    from torchvision.transforms import v2

    crop = [v2.RandomCrop(side, padding=side // 8), v2.RandomHorizontalFlip()]
    return v2.Compose(crop if name == "crop" else [*crop, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)])


def _image_processor(plain: data.ImageTransform) -> Any:
    """What does to an image, in transformers, what `plain` does to a batch of them."""
    from transformers import ViTImageProcessor

    size = {"height": plain.size, "width": plain.size}
    return ViTImageProcessor(size=size, image_mean=list(plain.mean), image_std=list(plain.std))


def _statistics(source: str | None) -> dict[str, Any]:
    """Mean and std of the images that a pretrained model has seen, if it has a preprocessor_config.json."""
    if source is None:
        return {}
    from transformers import ViTImageProcessor

    try:
        processor: Any = ViTImageProcessor.from_pretrained(source)
    except OSError:  # it has none
        return {}
    return {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}


def _cross_entropy(labels: torch.Tensor, logits: torch.Tensor, config: Any, **_: Any) -> torch.Tensor:
    """The loss of a ViT with mixup, of classes (B,) or their probabilities (B, classes): transformers would
    take probabilities for a multi-label problem."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits.dtype) if labels.is_floating_point() else labels
    total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / max(1, len(labels))  # a microbatch may be empty


def _pairs(file: RunFile) -> RunTask:
    model, tokenizer = _gpt2(file, file.model.classes or _CLASSES["mrpc"])
    splits = _splits(file.data, lambda split, size: data.mrpc(split, size, kind=file.data.kind))
    _check_classes(file.model.classes, splits[0])
    if tokenizer is None:  # one that these sentences teach
        sentences = (row[name] for row in splits[0] for name in ("sentence1", "sentence2"))
        words = int(model.config.vocab_size)
        tokenizer = data.bpe_tokenizer(data.train_merges(sentences, words), words)
    model.config.pad_token_id = tokenizer.pad_token_id
    collate = data.collate_pairs(tokenizer, max_length=int(model.config.n_positions))
    return RunTask(model, splits, (AccuracyHook(), F1Hook()), collate, tokenizer=tokenizer)


def _text(file: RunFile) -> RunTask:
    table = file.data
    model, tokenizer = _gpt2(file, None)

    def load(split: str, size: int | None) -> data.TextDataset:
        return data.text(
            split,
            size,
            kind=table.kind,
            vocab_size=int(model.config.vocab_size),
            block=int(model.config.n_positions),
            source=table.folder and Path(table.folder).expanduser(),
            tokenizer=tokenizer,
        )

    splits = _splits(table, load)
    return RunTask(model, splits, tokenizer=getattr(splits[0], "tokenizer", None))


def _gpt2(file: RunFile, classes: int | None) -> tuple[Any, Any]:
    """The model, and the tokenizer that came with it, or None."""
    wanted = file.model
    model = models.gpt2(
        wanted.shape,
        classes=classes,
        vocab_size=wanted.vocab_size,
        length=wanted.length,
        pretrained=wanted.pretrained,
        dropout=wanted.dropout,
        seed=file.training.seed,
    )
    tokenizer = None if wanted.pretrained is None else _tokenizer(wanted.pretrained)
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {wanted.pretrained} has {len(tokenizer)} tokens, and its model "
            f"{model.config.vocab_size}; they must be of one model"
        )
    return model, tokenizer


def _tokenizer(source: str) -> Any:
    """That of a pretrained model; None if its folder has none."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    if os.path.isdir(source) and not any(os.path.isfile(os.path.join(source, name)) for name in names):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except OSError:  # it is not in the cache
        tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# --- data ---------------------------------------------------------------------------------------------------


def _splits(table: DataTable, load: Callable[[str, int | None], Dataset]) -> Splits:
    """All three, of no more than `table.rows` rows; all ranks must have the same data."""
    loaded = {split: load(split, None) for split in dict.fromkeys(_SPLITS[table.name])}
    if table.rows is not None:
        loaded = {
            split: load(split, table.rows) if table.rows < len(rows) else rows
            for split, rows in loaded.items()
        }
    first, second, third = (loaded[split] for split in _SPLITS[table.name])
    description = first.describe()
    everyone = gather_objects(description, files_group())
    if other := next((one for one in everyone if one != everyone[0]), None):
        raise ValueError(
            f"ranks have different data: rank 0 {everyone[0]!r}, rank {everyone.index(other)} "
            f"{other!r}; set [data] kind to 'real' or 'generated'"
        )
    return first, second, third


def _folder(table: DataTable) -> Path:
    assert table.folder is not None  # the run file has been checked
    return Path(table.folder).expanduser()


def _check_is_in_folder(table: DataTable, rows: Dataset) -> None:
    """Raise FileNotFoundError unless the rows come from [data] folder: others would train another model."""
    of_folder = table.name in ("text", "images") or "$DATA" in rows.source.where
    if rows.source.kind == "real" and of_folder:
        return
    raise FileNotFoundError(
        f"[data] folder = {table.folder!r} has no {rows.source.name} in a format that is known, and would be "
        f"replaced by {rows.source.kind} {rows.noun}. For images of your own set [data] name = 'images', and "
        f"put them into {table.folder}/train/CLASS/IMAGE.jpg and {table.folder}/test/CLASS/IMAGE.jpg; or "
        "leave folder out, or set kind = 'generated'"
    )


def _check_classes(asked: int | None, rows: Dataset) -> None:
    if asked is not None and asked < len(rows.classes):
        raise ValueError(
            f"[model] classes = {asked} are too few for {rows.source.name}, which has "
            f"{len(rows.classes)}; leave it out"
        )
