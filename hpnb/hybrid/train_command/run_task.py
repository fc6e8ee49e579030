"""What a run file names, made: the model, its data by split, and what is measured of them.

    [data] name    model                             during training    at the end    beside the loss
    beans          ViTForImageClassification         validation         test          accuracy
    cifar10        ViTForImageClassification         test               test          accuracy
    mrpc           GPT2ForSequenceClassification     validation         test          accuracy, F1
    text           GPT2LMHeadModel                   test               test

The model is drawn alike on every rank; `Booster.boost` then leaves each its part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hpnb import data, models
from hpnb.data.dataset import Dataset
from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.train_command.run_file import DataTable, RunFile
from hpnb.hybrid.training.events import Metric
from hpnb.hybrid.training.metrics import AccuracyHook, F1Hook
from hpnb.ranks.current_rank import device

Splits = tuple[Dataset, Dataset, Dataset]

_WITH_VALIDATION = ("train", "validation", "test")
_SPLITS = {"beans": _WITH_VALIDATION, "cifar10": ("train", "test", "test"), "mrpc": _WITH_VALIDATION,
           "text": ("train", "test", "test")}  # fmt: skip
_CLASSES = {"beans": 3, "cifar10": 10, "mrpc": 2}


class UpTo(data.Loader):
    """A loader whose epoch `last` has no more than `batches` batches: a run of so many steps ends there."""

    last: int = -1
    batches: int = 0

    def __len__(self) -> int:
        """Of the epoch that is set."""
        whole = super().__len__()
        return min(whole, self.batches) if self.epoch == self.last else whole


@dataclass(frozen=True)
class Task:
    """A model and what it is to learn.

    Attributes:
        splits: for training, to evaluate on meanwhile, and at the end.
        collate, transform: how rows become a batch, for training; `plain` is the transform without chance.
        metrics: beside the loss.
        tokenizer: of texts, which is saved with the model.
    """

    model: nn.Module
    splits: Splits
    metrics: tuple[Metric, ...] = ()
    collate: Any = None
    transform: Any = None
    plain: Any = None
    tokenizer: Any = None

    def loader(self, plugin: HybridParallelPlugin, table: DataTable, split: int, seed: int = 0) -> UpTo:
        """Of one of the splits; the first is shuffled."""
        return UpTo(
            self.splits[split],
            table.batch_size,
            plugin.mesh.dp,
            shuffle=split == 0,
            seed=seed,
            collate=self.collate,
            transform=self.plain if split else self.transform,
            num_workers=table.workers,
            pin_memory=device().type == "cuda",
        )


def task(file: RunFile) -> Task:
    """What `file` names. Every rank calls it.

    Raises:
        ValueError: sizes that do not fit, or ranks that find different data.
        OSError: pretrained weights or real data that are not to be had.
    """
    if file.data.folder is not None and file.data.name != "text":
        os.environ["DATA"] = str(Path(file.data.folder).expanduser())
    make = {"mrpc": _pairs, "text": _text}.get(file.data.name, _pictures)
    return make(file)


def _pictures(file: RunFile) -> Task:
    own, table = file.model, file.data
    model = models.vit(
        own.shape,
        classes=own.classes or _CLASSES[table.name],
        image_size=table.image_size,
        pretrained=own.pretrained,
        dropout=own.dropout,
        seed=file.training.seed,
    )
    side = int(model.config.image_size)
    load: Callable[..., Dataset] = data.beans if table.name == "beans" else data.cifar10
    splits = _splits(table, lambda split, size: load(split, size, image_size=side, kind=table.kind))
    _check_classes(own.classes, splits[0])
    plain = data.ImageTransform(side)
    transform = data.ImageTransform(side, augment=True) if table.augment else plain
    return Task(model, splits, (AccuracyHook(),), transform=transform, plain=plain)


def _pairs(file: RunFile) -> Task:
    model, tokenizer = _gpt2(file, file.model.classes or _CLASSES["mrpc"])
    splits = _splits(file.data, lambda split, size: data.mrpc(split, size, kind=file.data.kind))
    _check_classes(file.model.classes, splits[0])
    if tokenizer is None:  # one that these sentences teach
        sentences = (row[name] for row in splits[0] for name in ("sentence1", "sentence2"))
        words = int(model.config.vocab_size)
        tokenizer = data.bpe_tokenizer(data.train_merges(sentences, words), words)
    model.config.pad_token_id = tokenizer.pad_token_id
    collate = data.collate_pairs(tokenizer, max_length=int(model.config.n_positions))
    return Task(model, splits, (AccuracyHook(), F1Hook()), collate, tokenizer=tokenizer)


def _text(file: RunFile) -> Task:
    table = file.data
    model, tokenizer = _gpt2(file, None)

    def load(split: str, size: int | None) -> data.TextDataset:
        return data.text(
            split,
            size,
            kind=table.kind,
            vocabulary=int(model.config.vocab_size),
            block=int(model.config.n_positions),
            source=table.folder and Path(table.folder).expanduser(),
            tokenizer=tokenizer,
        )

    splits = _splits(table, load)
    return Task(model, splits, tokenizer=getattr(splits[0], "tokenizer", None))


def _gpt2(file: RunFile, classes: int | None) -> tuple[Any, Any]:
    """The model, and the tokenizer that came with it, or None."""
    own = file.model
    model = models.gpt2(
        own.shape,
        classes=classes,
        vocab_size=own.vocab_size,
        length=own.length,
        pretrained=own.pretrained,
        dropout=own.dropout,
        seed=file.training.seed,
    )
    tokenizer = None if own.pretrained is None else _tokenizer(own.pretrained)
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {own.pretrained} has {len(tokenizer)} tokens, and its model "
            f"{model.config.vocab_size}; they must be of one model"
        )
    return model, tokenizer


def _tokenizer(source: str) -> Any:
    """That of a pretrained model; None if its folder has none."""
    from transformers import AutoTokenizer

    own = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    if os.path.isdir(source) and not any(os.path.isfile(os.path.join(source, name)) for name in own):
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
    """All three, of no more than `table.rows` rows; all ranks must have found the same."""
    loaded = {split: load(split, None) for split in dict.fromkeys(_SPLITS[table.name])}
    if table.rows is not None:
        loaded = {
            split: load(split, table.rows) if table.rows < len(found) else found
            for split, found in loaded.items()
        }
    first, second, third = (loaded[split] for split in _SPLITS[table.name])
    mine = first.describe()
    everyone: list[str] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if other := next((one for one in everyone if one != everyone[0]), None):
        raise ValueError(
            f"ranks have found different data: rank 0 {everyone[0]!r}, rank {everyone.index(other)} "
            f"{other!r}; set [data] kind to 'real' or 'generated'"
        )
    return first, second, third


def _check_classes(asked: int | None, found: Dataset) -> None:
    if asked is not None and asked < len(found.classes):
        raise ValueError(
            f"[model] classes = {asked} are too few for {found.source.name}, which has "
            f"{len(found.classes)}; leave it out"
        )
