"""A dataset is samples with named fields, and a note of where they came from.

leaves = hpnb.data.beans("train")
len(leaves), leaves[0]["labels"], leaves.classes
print(leaves.describe())      # real, or generated and why: say it before you train on it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Item = dict[str, Any]  # one sample
Batch = dict[str, Any]  # several samples, stacked


class MapDataset(Protocol):
    """A map-style dataset, as torch calls it: a length, and an item for every index below it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Source:
    """Where the samples of a dataset come from.

    Attributes:
        name: "Beans", "CIFAR-10", "MRPC", "Python documentation", or one that names the reader's folder.
        kind: "real", or "generated" by this library in place of the real samples.
        where: the place of real samples, or the reason why samples are generated.
        note: what else there is to say of real samples, such as files that are left out.
    """

    name: str
    kind: Literal["real", "generated"]
    where: str
    note: str = ""


def note_of_skipped(files: Iterable[Path], read_as: str) -> str:
    """How many files of each suffix are not read as "images" or "texts", in words; "" if there are none."""
    counts = Counter(file.suffix.lower() or "no suffix" for file in files)
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()))
    return f"left out because they are not read as {read_as}: {kinds}" if kinds else ""


class Dataset:
    """Samples with named fields: `dataset[i]` is a new dict each time.

    Args:
        rows: every sample of a split, in order.
        source: where they come from.
        classes: the class names, by label.
        noun: what a sample shows, for `describe`: "leaves".
        size: how many of the samples to keep; None keeps all. Real ones are often sorted by class, so the
            kept ones are drawn at random, the same on every rank.
        image_size: side to which images are resized, in pixels; None leaves them as they are.

    Raises:
        ValueError: `size` is below 1 or above the number of samples.
    """

    def __init__(
        self,
        rows: MapDataset,
        source: Source,
        classes: tuple[str, ...],
        noun: str,
        size: int | None = None,
        image_size: int | None = None,
    ) -> None:
        if size is not None and not 1 <= size <= len(rows):
            there = len(rows)
            raise ValueError(f"{source.name} has {there} samples, not {size}; use size=1 to {there}, or None")
        self.rows, self.source, self.classes, self.noun = rows, source, classes, noun
        self.image_size = image_size
        self._kept: list[int] | None = None
        if size is not None and size < len(rows):
            self._kept = sorted(np.random.default_rng(0).permutation(len(rows))[:size].tolist())

    def __len__(self) -> int:
        return len(self.rows) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Item:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index = range(len(self))[index]
        row = index if self._kept is None else self._kept[index]
        item: Item = {}
        try:
            item = self.rows[row]
            return {name: self._load_image(value) for name, value in item.items()}
        except (OSError, _UnknownScale) as error:  # OSError is what Pillow raises for a broken image
            sample = f"sample {row} of {self.source.name} from {self.source.where}"
            path = str(item.get("image_file_path", ""))
            named = "" if path in str(error) else f" {path}:"  # a file that ends early is not named
            raise ValueError(f"{sample} cannot be read:{named} {error}") from error

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    def describe(self) -> str:
        """One sentence that says what these samples are and whether they are real."""
        count = f"{len(self):,} {self.noun}" + (f" of {len(self.rows):,}" if self._kept is not None else "")
        if self.source.kind == "real":
            note = f" ({self.source.note})" if self.source.note else ""
            return f"{self.source.name}: real, {count}, from {self.source.where}{note}."
        return f"{self.source.name}: generated stand-in, {count}; {self.source.where}."

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def _load_image(self, value: Any) -> Any:
        if not hasattr(value, "convert"):
            return value  # no image
        image = _as_rgb(value)  # decodes, if the file has not been read yet
        side = self.image_size
        return image if side is None or image.size == (side, side) else image.resize((side, side))


class _UnknownScale(ValueError):
    """Grey values of which nobody says what white is."""


def _as_rgb(image: Any) -> Any:
    """An image of Pillow with 8 bits a channel. Pillow itself clips grey values of 16 bits at 255, so that
    almost all of them become white.

    Raises:
        _UnknownScale: grey values of 32 bits, or floats.
    """
    from PIL import Image

    # Pillow has called the 16 bits of a PNG "I;16" since 11.0, and "I" before.
    if image.mode.startswith("I;16") or (image.mode == "I" and getattr(image, "format", None) == "PNG"):
        grey = np.asarray(image).astype(np.float32) * (255 / 65535)
        image = Image.fromarray(np.rint(grey).clip(0, 255).astype(np.uint8))
    elif image.mode in ("I", "F"):
        values = "whole numbers of 32 bits" if image.mode == "I" else "floats"
        file = getattr(image, "filename", "")
        raise _UnknownScale(
            f"{file or 'it'} has {values} for grey values, of which the largest may mean anything; "
            "save it with 8 or 16 bits"
        )
    return image.convert("RGB")
