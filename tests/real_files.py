"""Small files in the formats in which CIFAR-10, Beans and MRPC are published, of generated samples."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np

from hpnb.data import beans, cifar10, mrpc


def write_cifar10(folder: Path, per_batch: int = 8) -> str:
    """Six batches, pickled as the published ones are. Returns lines for a program that let torchvision accept
    their checksums."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    train = cifar10("train", 5 * per_batch, kind="generated")
    test = cifar10("test", per_batch, kind="generated")
    contents: dict[str, object] = {"batches.meta": {"label_names": list(train.classes), "num_vis": 3072}}
    for number in range(6):
        rows = [test[i] for i in range(per_batch)]
        if number < 5:
            rows = [train[i] for i in range(number * per_batch, (number + 1) * per_batch)]
        images = np.stack([np.asarray(row["img"]) for row in rows])  # (rows, 32, 32, 3)
        contents[f"data_batch_{number + 1}" if number < 5 else "test_batch"] = {
            "batch_label": f"batch {number + 1} of 6",
            "labels": [row["label"] for row in rows],
            "data": images.transpose(0, 3, 1, 2).reshape(len(rows), 3072),
            "filenames": [f"{number}_{i}.png" for i in range(len(rows))],
        }
    sums = {}
    for name, content in contents.items():
        (batches / name).write_bytes(pickle.dumps(content, protocol=2))
        sums[name] = hashlib.md5((batches / name).read_bytes()).hexdigest()
    train_list = [[name, sums[name]] for name in (f"data_batch_{i}" for i in range(1, 6))]
    return (
        "from torchvision.datasets import CIFAR10\n"
        f"CIFAR10.train_list = {train_list}\n"
        f"CIFAR10.test_list = {[['test_batch', sums['test_batch']]]}\n"
        f"CIFAR10.meta = CIFAR10.meta | {{'md5': {sums['batches.meta']!r}}}\n"
    )


def write_beans(folder: Path, image_size: int = 32, **sizes: int) -> None:
    """Photographs in a folder for each split and class; `sizes` such as train=16."""
    for split, size in sizes.items():
        rows = beans(split, size, image_size, kind="generated")
        for i in range(size):
            place = folder / "beans" / split / rows.classes[rows[i]["labels"]]
            place.mkdir(parents=True, exist_ok=True)
            rows[i]["image"].save(place / f"{i}.jpg", quality=95)


def write_mrpc(folder: Path, train: int) -> None:
    """The original table of so many pairs for training, and one that its list takes out for validation."""
    rows = mrpc("train", train + 1, kind="generated")
    lines = ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for i in range(train + 1):
        row = rows[i]
        lines.append(f"{row['label']}\t{i}\t{1000 + i}\t{row['sentence1']}\t{row['sentence2']}")
    (folder / "mrpc").mkdir(parents=True)
    text = "\r\n".join([*lines, ""])
    (folder / "mrpc" / "msr_paraphrase_train.txt").write_text(text, encoding="utf-8", newline="")
    (folder / "mrpc" / "mrpc_dev_ids.tsv").write_text(f"{train}\t{1000 + train}\n")
