"""Readers of the formats that the real datasets come in: each returns samples, or None for another format.

    Beans      <folder>/train/bean_rust/*.jpg                the original archives, unpacked
    CIFAR-10   <folder>/cifar-10-batches-py/data_batch_1     torchvision's layout and checksums
    MRPC       <folder>/msr_paraphrase_train.txt             the original tables; train.tsv, dev.tsv of GLUE
    any        <folder>/train-00000-of-00001.parquet         as on the Hugging Face hub, also below data/
    any        <folder>/dataset_dict.json, state.json        `save_to_disk` of `datasets`

A file that is there and cannot be read is an error, never a reason to continue with generated samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpnb.data.dataset import Item, MapDataset
from hpnb.files import locked

TABLES = {
    "train": ("train.tsv", "msr_paraphrase_train.txt"),
    "validation": ("dev.tsv", "msr_paraphrase_train.txt"),
    "test": ("msr_paraphrase_test.txt",),
}


class ImageFiles:
    """Samples {image_file_path, image, labels} of (path, label)."""

    def __init__(self, samples: Sequence[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Item:
        from PIL import Image

        path, label = self.samples[index]
        return {"image_file_path": path, "image": Image.open(path), "labels": label}


class CifarFields:
    """torchvision's (image, label) under the names that the hub gives them."""

    def __init__(self, rows: MapDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        image, label = self.rows[index]
        return {"img": image, "label": label}


def read_image_folder(folder: Path, split: str, classes: Sequence[str]) -> MapDataset | None:
    """Samples {image_file_path, image, labels} of <folder>/<split>/<class>/<image>."""
    if not any((folder / name / classes[0]).is_dir() for name in ("train", "validation", "test")):
        return None
    from torchvision.datasets import ImageFolder

    paths = [path for path, _ in ImageFolder(str(folder / split)).samples]
    return ImageFiles([(path, classes.index(Path(path).parent.name)) for path in paths])


def read_cifar(folder: Path, split: str) -> MapDataset | None:
    """Samples {img, label} of <folder>/cifar-10-batches-py, or of the archive beside it."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    batches, archive = folder / CIFAR10.base_folder, folder / CIFAR10.filename
    if not batches.is_dir():
        if not archive.is_file():
            return None
        if not check_integrity(str(archive), CIFAR10.tgz_md5):
            raise ValueError(f"{archive.name} does not have the published checksum")
        download_cifar(folder)
    for name, checksum in [*CIFAR10.train_list, *CIFAR10.test_list, ("batches.meta", CIFAR10.meta["md5"])]:
        if not check_integrity(str(batches / name), checksum):
            raise ValueError(f"{name} is missing or does not have the published checksum")
    return CifarFields(CIFAR10(str(folder), train=split == "train"))


def download_cifar(folder: Path) -> None:
    """Unpack the archive in `folder`, or download it. One rank does it, and the others wait."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import extract_archive

    archive, batches = folder / CIFAR10.filename, folder / CIFAR10.base_folder
    with locked(folder / ".cifar-10.lock"):
        if batches.is_dir():
            return
        # In a folder beside it, then renamed: the next process never sees a half-unpacked folder.
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            if archive.is_file():
                extract_archive(str(archive), aside)
            else:
                CIFAR10(aside, download=True)
            (Path(aside) / CIFAR10.base_folder).rename(batches)


def read_parquet(folder: Path, split: str, cache: Path) -> MapDataset | None:
    """Samples of <split>-*.parquet, read through `datasets`, which keeps an Arrow copy in `cache`."""
    for place in (folder, folder / "data"):
        if any(place.glob("*.parquet")):
            paths = sorted(str(path) for path in place.glob(f"{split}*.parquet"))
            if not paths:
                raise ValueError(f"it holds parquet files, and none for {split!r}")
            import datasets

            rows: MapDataset = datasets.Dataset.from_parquet(paths, cache_dir=str(cache), split=split)
            return rows
    return None


def read_saved(folder: Path, split: str) -> MapDataset | None:
    """Samples of a folder that `save_to_disk` wrote: of all splits, or of this one."""
    for place in (folder, folder / split):
        has_all_splits = (place / "dataset_dict.json").is_file()
        if not has_all_splits and not (place / "state.json").is_file():
            continue
        import datasets

        saved: Any = datasets.load_from_disk(str(place))
        if not has_all_splits:
            return saved  # type: ignore[no-any-return]
        if split not in saved:
            raise ValueError(f"it holds {', '.join(saved)}, and no {split!r}")
        return saved[split]  # type: ignore[no-any-return]
    return None


def read_mrpc_table(folder: Path, split: str, by_header: bool = False) -> MapDataset | None:
    """Samples {sentence1, sentence2, label, idx} of MRPC's tables, with five columns parted by tabs.

    The original files have no validation split: GLUE took 408 samples out of the training file, listed in
    mrpc_dev_ids.tsv. Without that list the last tenth of the file is the validation split.

    Args:
        by_header: take a train.tsv or dev.tsv for a table of MRPC only if its first line says so: other
            datasets have files of these names.
    """
    names = {name for names in TABLES.values() for name in names if (folder / name).is_file()}
    if by_header:
        names = {name for name in names if name.startswith("msr_") or _has_header_of_mrpc(folder / name)}
    if not names:
        return None
    path = next((folder / name for name in TABLES[split] if name in names), None)
    if path is None:
        raise ValueError(f"it holds tables of MRPC, and none for {split!r}")
    rows: list[Item] = []
    ids: list[tuple[str, str]] = []
    # Quotes are part of the text, and other separators than \n are too: no csv reader, no splitlines.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n")):
        if number == 0 or not line:
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != 5 or cells[0] not in ("0", "1"):
            raise ValueError(f"line {number + 1} of {path.name} is not label, two ids and two sentences")
        ids.append((cells[1], cells[2]))
        rows.append({"sentence1": cells[3], "sentence2": cells[4], "label": int(cells[0]), "idx": number - 1})
    if path.name != "msr_paraphrase_train.txt":
        return rows
    validation = _validation_rows(folder, ids)
    return [row for row in rows if (row["idx"] in validation) == (split == "validation")]


def _has_header_of_mrpc(table: Path) -> bool:
    with table.open(encoding="utf-8-sig", errors="replace") as lines:
        return lines.readline().startswith("Quality\t")


def _validation_rows(folder: Path, ids: list[tuple[str, str]]) -> set[int]:
    for name in ("mrpc_dev_ids.tsv", "dev_ids.tsv"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").split("\n")
            listed = {tuple(line.rstrip("\r").split("\t")[:2]) for line in lines}
            return {index for index, pair in enumerate(ids) if pair in listed}
    return set(range(len(ids) - len(ids) // 10, len(ids)))
