"""Beans, CIFAR-10 and MRPC: the real ones where they can be had, else generated ones with the same schema.

    data set   a row                                       splits                                 drawn by
    Beans      image_file_path, image (500 x 500), labels  train 1034, validation 133, test 128   leaves.py
    CIFAR-10   img (32 x 32), label                        train 50000, test 10000                shapes.py
    MRPC       sentence1, sentence2, label, idx            train 3668, validation 408, test 1725  pairs.py

A generated row depends on the data set, the split and its index alone: it is made when it is asked for, and
is the same on every rank. Fields, class names, sizes and shares of the classes are those of the real one.

A process decides on its own what it finds. Where ranks might disagree (a network that one of them reaches),
load once and hand the data set to the ranks, or pass kind="real" or "generated".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import numpy as np

from hpnb.data import files, leaves, pairs, shapes
from hpnb.data.dataset import Dataset, Item, Rows, Source
from hpnb.data.find import NotFoundError, Wanted, find

Kind = Literal["auto", "real", "generated"]
Make = Callable[[str, int, int, np.random.Generator], Item]  # of split, index, label

BEANS = Wanted(
    name="Beans",
    folders=("beans", "AI-Lab-Makerere/beans"),
    fields=("image_file_path", "image", "labels"),
    picture="image",
    repo="AI-Lab-Makerere/beans",
    config=None,
    own_form=partial(files.image_folder, classes=leaves.CLASSES),
)
CIFAR10 = Wanted(
    name="CIFAR-10",
    folders=("cifar10", "uoft-cs/cifar10"),
    fields=("img", "label"),
    picture="img",
    repo="uoft-cs/cifar10",
    config=None,
    own_form=files.cifar_batches,
    fetch=("https://www.cs.toronto.edu", files.fetch_cifar),
)
MRPC = Wanted(
    name="MRPC",
    folders=("mrpc", "MRPC", "glue/mrpc", "glue/MRPC", "nyu-mll/glue/mrpc"),
    fields=("sentence1", "sentence2", "label", "idx"),
    picture=None,
    repo="nyu-mll/glue",
    config="mrpc",
    own_form=files.table,
)
# Rows of each class, in order of label.
BEANS_COUNTS = {"train": (345, 348, 341), "validation": (44, 45, 44), "test": (43, 43, 42)}
CIFAR10_COUNTS = {"train": (5000,) * 10, "test": (1000,) * 10}
MRPC_COUNTS = {"train": (1194, 2474), "validation": (129, 279), "test": (578, 1147)}


def beans(
    split: str = "train", size: int | None = None, image_size: int | None = None, kind: Kind = "auto"
) -> Dataset:
    """Leaves of beans: healthy, with rust, with angular leaf spot. Rows {image_file_path, image, labels}.

    Args:
        split: "train", "validation" or "test".
        size: how many rows; None gives all.
        image_size: side of the pictures in pixels; None gives 500. Generated ones are drawn at this size, and
            drawing takes a millisecond at 64, 9 at 500.
        kind: "auto" looks for the real rows and generates where there are none; "real" must find them;
            "generated" does not look.

    Raises:
        ValueError: no such split, a size that is not to be had, or real files that cannot be read.
        FileNotFoundError: kind="real" and there are none.
    """
    make = partial(_leaf, size=_side(image_size, 500))
    nouns = ("photographs of leaves", "drawn leaves")
    return _load(BEANS, leaves.CLASSES, BEANS_COUNTS, nouns, make, split, size, image_size, kind)


def cifar10(
    split: str = "train", size: int | None = None, image_size: int | None = None, kind: Kind = "auto"
) -> Dataset:
    """Small photographs in ten classes; generated: ten shapes under their names. Rows {img, label}.

    Splits "train" and "test"; pictures are 32 x 32 unless `image_size` says otherwise. Else as `beans`.
    """
    make = partial(_shape, size=_side(image_size, 32))
    nouns = ("photographs", "drawn shapes under its class names")
    return _load(CIFAR10, shapes.CLASSES, CIFAR10_COUNTS, nouns, make, split, size, image_size, kind)


def mrpc(split: str = "train", size: int | None = None, kind: Kind = "auto") -> Dataset:
    """Pairs of sentences that paraphrase each other or do not. Rows {sentence1, sentence2, label, idx}.

    Splits "train", "validation" and "test"; label 1 is "equivalent", two pairs in three. Else as `beans`.
    """
    nouns = ("sentence pairs", "composed sentence pairs")
    return _load(MRPC, pairs.CLASSES, MRPC_COUNTS, nouns, _pair, split, size, None, kind)


class Generated:
    """Rows made from a seed of (name, split, index)."""

    def __init__(self, name: str, split: str, counts: tuple[int, ...], make: Make) -> None:
        self.split, self.make = split, make
        self.seed = zlib.crc32(f"{name} {split}".encode())
        in_order = np.repeat(np.arange(len(counts), dtype=np.int8), counts)
        self.labels = np.random.default_rng(self.seed).permutation(in_order)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        rng = np.random.default_rng([self.seed, index])
        return self.make(self.split, index, int(self.labels[index]), rng)


def _load(
    wanted: Wanted,
    classes: tuple[str, ...],
    counts: Mapping[str, tuple[int, ...]],
    nouns: tuple[str, str],
    make: Make,
    split: str,
    size: int | None,
    image_size: int | None,
    kind: Kind,
) -> Dataset:
    if split not in counts:
        raise ValueError(f"{wanted.name} has no split {split!r}; it has {', '.join(counts)}")
    if kind not in ("auto", "real", "generated"):
        raise ValueError(f"kind={kind!r} is none of 'auto', 'real' and 'generated'")
    rows: Rows
    why = "the real one was not looked for"
    if kind != "generated":
        try:
            rows, where = find(wanted, split)
            source = Source(wanted.name, "real", where)
            return Dataset(rows, source, classes, nouns[0], size, image_size)
        except NotFoundError as error:
            if kind == "real":
                hint = "kind='generated' gives a stand-in"
                raise FileNotFoundError(f"{wanted.name} was not found: {error}; {hint}") from error
            why = f"the real one was not found: {error}"
    rows = Generated(wanted.name, split, counts[split], make)
    return Dataset(rows, Source(wanted.name, "generated", why), classes, nouns[1], size, image_size)


def _side(image_size: int | None, usual: int) -> int:
    if image_size is not None and image_size < 8:
        raise ValueError(f"image_size={image_size} is too small to show anything; use 8 pixels or more")
    return usual if image_size is None else image_size


def _leaf(split: str, index: int, label: int, rng: np.random.Generator, size: int) -> Item:
    name = leaves.CLASSES[label]  # a path of the form that the real rows have; no such file exists
    path = f"generated/{split}/{name}/{name}_{split}.{index}.jpg"
    return {"image_file_path": path, "image": leaves.leaf(label, rng, size), "labels": label}


def _shape(split: str, index: int, label: int, rng: np.random.Generator, size: int) -> Item:
    return {"img": shapes.shape(label, rng, size), "label": label}


def _pair(split: str, index: int, label: int, rng: np.random.Generator) -> Item:
    first, second = pairs.pair(label, rng)
    return {"sentence1": first, "sentence2": second, "label": label, "idx": index}
