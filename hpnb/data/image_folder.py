"""Images of your own: a folder a class.

    pets/train/cat/01.jpg  pets/train/dog/04.png ...          trained on
    pets/validation/cat/77.jpg ...                            evaluated on meanwhile; also val or valid
    pets/test/dog/81.jpg ...                                  evaluated on at the end

    pets/cat/01.jpg  pets/dog/04.png ...                      every tenth image of a class is held out

Names and numbers of classes are those of torchvision's ImageFolder: sorted, and images may lie deeper below a
class. Files and folders whose names begin with a dot are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnb.data.dataset import Dataset, Source, note_of_skipped
from hpnb.data.dataset_formats import ImageFiles

SPLITS = ("train", "validation", "test")
_SPLIT_FOLDERS = {"train": ("train",), "validation": ("validation", "val", "valid"), "test": ("test",)}
_LIKE_SPLITS = {"train", "training", "validation", "valid", "val", "dev", "eval", "test", "testing"}
_MOST_NAMED = 10  # damaged images that a message names
_ONE_IN = 10  # images of a class, of which one is held out where nobody has split them


def image_folder(
    folder: str | os.PathLike[str],
    split: str = "train",
    size: int | None = None,
    image_size: int | None = None,
) -> Dataset:
    """Images in one folder a class. Samples {image_file_path, image, labels}, as those of `beans`.

    A folder without folders of splits has every tenth image of each class held out, and a folder without
    "validation" or "test" has the other one for both.

    Args:
        folder: with train/CLASS/IMAGE below it, or CLASS/IMAGE.
        split: "train", "validation" or "test".
        size: how many samples; None returns all.
        image_size: side of the images in pixels; None leaves them as they are.

    Raises:
        ValueError: no such split, no images in folders of classes, splits of which none is called "train", or
            a split with classes that "train" does not have.
        FileNotFoundError: there is no such folder.

    >>> import pathlib, tempfile
    >>> from PIL import Image
    >>> pets = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (pets / "train" / name).mkdir(parents=True)
    ...     Image.new("RGB", (8, 8)).save(pets / "train" / name / "1.png")
    >>> hpnb.data.image_folder(pets).classes
    ('cat', 'dog')
    """
    if split not in SPLITS:
        raise ValueError(f"an image folder has no split {split!r}; it has {', '.join(SPLITS)}")
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    at = {name: _find(path, name) for name in SPLITS}
    classes, rows, skipped = _read(at["train"] or path, folder)
    if at["train"] is None:
        if all(name.lower() in _LIKE_SPLITS for name in classes):
            raise ValueError(
                f"{folder} has the folders {' and '.join(classes)}, which look like splits and not like "
                f"classes, and no folder train; rename the one to train on to {path / 'train'}, and the "
                "others to validation and test"
            )
        held_out = _held_out(rows)
        rows = [row for row in rows if (row in held_out) == (split != "train")]
    elif split != "train":
        other = at[split] or at["test" if split == "validation" else "validation"]
        if other is None:
            raise ValueError(
                f"{folder} has train and neither validation nor test; add {path / 'test'} with the same "
                f"classes, or put the classes into {folder} itself, where one image in ten is held out"
            )
        names, rows, skipped = _read(other, folder)
        if unknown := [name for name in names if name not in classes]:
            raise ValueError(
                f"{other} has the class {unknown[0]}, which {at['train']} does not have; its classes are "
                f"{', '.join(classes)}"
            )
        rows = [(file, classes.index(names[label])) for file, label in rows]
    source = Source("Images", "real", str(folder), skipped)
    return Dataset(ImageFiles(rows), source, classes, "images", size, image_size)


def check_headers(datasets: Sequence[Dataset], seconds: float = 5.0) -> None:
    """Read the headers of the images, those that `seconds` suffice for.

    Raises:
        ValueError: images that cannot be read, with their names.
    """
    from PIL import Image

    files = dict.fromkeys(file for dataset in datasets for file, _ in dataset.rows.samples)  # type: ignore[attr-defined]
    until, damaged = time.monotonic() + seconds, []
    for file in files:
        if time.monotonic() > until:
            break
        try:
            Image.open(file).close()
        except OSError:
            damaged.append(file)
    if damaged:
        more = f" and {len(damaged) - _MOST_NAMED:,} more" if len(damaged) > _MOST_NAMED else ""
        are = "is no image" if len(damaged) == 1 else "are no images"
        raise ValueError(
            f"{', '.join(damaged[:_MOST_NAMED])}{more} {are} that can be read; replace or remove "
            f"{'it' if len(damaged) == 1 else 'them'}"
        )


def _find(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in _SPLIT_FOLDERS[split] if (folder / name).is_dir()), None)


def _read(place: Path, folder: Any) -> tuple[tuple[str, ...], list[tuple[str, int]], str]:
    """Classes, (file, label) of every image, and a note of the files that are left out."""
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    skipped: list[Path] = []

    class Visible(ImageFolder):  # type: ignore[misc]
        def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
            with os.scandir(directory) as entries:
                names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
            if not names:
                raise FileNotFoundError(f"no folder of a class in {directory}.")
            return names, {name: label for label, name in enumerate(names)}

    def is_image(file: str) -> bool:
        path = Path(file)
        if any(part.startswith(".") for part in path.relative_to(place).parts):
            return False
        if path.suffix.lower() in IMG_EXTENSIONS:
            return True
        skipped.append(path)
        return False

    try:
        images = Visible(str(place), is_valid_file=is_image)
    except FileNotFoundError as error:  # no class, or one without an image
        reason = str(error).splitlines()[0].rstrip(". ")
        raise ValueError(
            f"{folder} is no folder of images: {reason}. It needs a folder a class: {Path(folder) / 'train'}"
            f"/CLASS/IMAGE.jpg, and test/CLASS/IMAGE.jpg to evaluate on, or {Path(folder)}/CLASS/IMAGE.jpg"
        ) from error
    rows = [(str(file), int(label)) for file, label in images.samples]
    return tuple(images.classes), rows, note_of_skipped(skipped, "images")


def _held_out(rows: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """One image in ten of each class, and one at least of two or more."""
    by_class: dict[int, list[tuple[str, int]]] = {}
    for row in rows:
        by_class.setdefault(row[1], []).append(row)
    return {
        row for of_class in by_class.values() for row in of_class[_ONE_IN - 1 :: _ONE_IN] or of_class[1:][-1:]
    }
