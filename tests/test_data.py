"""Data: real files read as they are published, stand-ins that can be learned, a loader that loses nothing."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hpnb
from hpnb.data import (
    Dataset,
    DistributedBatchSampler,
    ImageTransform,
    Loader,
    beans,
    byte_tokenizer,
    cifar10,
    collate_images,
    collate_pairs,
    find_dataset,
    image_batch,
    mrpc,
)
from hpnb.data.synthetic_sentences import DAYS, FIRMS, PEOPLE, PLACES, TEAMS

LOAD = {"beans": beans, "cifar10": cifar10, "mrpc": mrpc}
LEAVES = ("angular_leaf_spot", "bean_rust", "healthy")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data, no cache, no network."""
    for name in ("DATA", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    find_dataset._answered.clear()
    find_dataset._silent_since.clear()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that share their cores with other work wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty $DATA."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("DATA", str(folder))
    return folder


def digest(rows: list[dict[str, Any]]) -> str:
    seen = hashlib.sha256()
    for row in rows:
        for name, value in row.items():
            content = value.tobytes() if isinstance(value, Image.Image) else repr(value).encode()
            seen.update(name.encode() + content)
    return seen.hexdigest()


# --- stand-ins -------------------------------------------------------------------------------------

SCHEMAS = {
    "beans": (
        {"train": 1034, "validation": 133, "test": 128},
        ["image_file_path", "image", "labels"],
        LEAVES,
    ),
    "cifar10": (
        {"train": 50000, "test": 10000},
        ["img", "label"],
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "mrpc": (
        {"train": 3668, "validation": 408, "test": 1725},
        ["sentence1", "sentence2", "label", "idx"],
        ("not_equivalent", "equivalent"),
    ),
}


@pytest.mark.parametrize("name", LOAD)
def test_a_stand_in_has_the_schema_the_classes_and_the_size_of_the_real_one(name: str) -> None:
    splits, fields, classes = SCHEMAS[name]
    for split, size in splits.items():
        rows = LOAD[name](split)
        assert len(rows) == size
        assert rows.classes == classes
        assert rows.source.kind == "generated"
        assert list(rows[size - 1]) == fields
        assert list(rows[-1].values())[1:] == list(rows[size - 1].values())[1:]
    with pytest.raises(IndexError):
        rows[size]
    assert beans()[0]["image"].size == (500, 500)
    assert beans()[0]["image"].mode == "RGB"
    assert cifar10()[0]["img"].size == (32, 32)


def test_the_classes_have_the_shares_of_the_real_ones_in_no_order() -> None:
    assert Counter(beans().rows.labels.tolist()) == {0: 345, 1: 348, 2: 341}
    assert set(Counter(cifar10().rows.labels.tolist()).values()) == {5000}
    assert Counter(mrpc("validation").rows.labels.tolist()) == {0: 129, 1: 279}
    for rows in (beans(image_size=16), cifar10(), mrpc()):
        start = Counter(row["label" if "label" in row else "labels"] for row in (rows[i] for i in range(60)))
        assert len(start) == len(rows.classes)


def sample_of(name: str, order: Callable[[Any], Any] = list) -> str:
    found = {i: LOAD[name](split)[i] for split in ("train", "test") for i in order([3, 77, 5])}
    return digest([found[i] for i in sorted(found)])


def test_stand_ins_are_the_same_in_every_process_and_whatever_was_drawn_before() -> None:
    code = "import sys; sys.path.insert(0, 'tests'); import test_data as t; print(*map(t.sample_of, t.LOAD))"
    code += "; assert not {'datasets', 'torchvision', 'transformers'} & set(sys.modules), 'slow to import'"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [sample_of(name, lambda indices: reversed(indices)) for name in LOAD]


def test_rows_differ_and_splits_share_none() -> None:
    for load, size in ((beans, {"image_size": 32}), (cifar10, {}), (mrpc, {})):
        for one, other in (("train", "train"), ("train", "test")):
            left = [digest([load(one, **size)[i]]) for i in range(20)]
            right = [digest([load(other, **size)[i]]) for i in range(20, 40)]
            assert len({*left, *right}) == 40
    for load, field in ((beans, "image"), (cifar10, "img"), (mrpc, "sentence1")):
        same = [load("train")[i][field] == load("test")[i][field] for i in range(20)]
        assert not any(same)


def test_a_leaf_is_the_same_leaf_at_every_size() -> None:
    large = np.asarray(beans(image_size=240)[0]["image"].resize((48, 48), Image.Resampling.BOX), float)
    small = np.asarray(beans(image_size=48)[0]["image"], float)
    assert np.abs(large - small).mean() < 8  # grain is not the same; leaves of two indices are 40 apart


def test_the_reader_is_told_which_one_it_is(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert beans().describe() == (
        "Beans: generated stand-in, 1,034 drawn leaves; the real one was not found: "
        "$DATA has no Beans, the Hugging Face cache has none and HF_HUB_OFFLINE is set."
    )
    monkeypatch.delenv("DATA")
    assert "not found: DATA is not set, the Hugging Face cache" in mrpc(size=10).describe()
    assert "10 composed sentence pairs of 3,668" in mrpc(size=10).describe()
    shapes = cifar10(kind="generated").describe()
    assert "drawn shapes under its class names; the real one was not looked for." in shapes
    with pytest.raises(FileNotFoundError, match=r"MRPC was not found: DATA is not set.*kind='generated'"):
        mrpc(kind="real")


def test_a_part_is_a_fair_one() -> None:
    parts = [list(beans(size=90, image_size=side)) for side in (8, 16)]
    assert len({row["image_file_path"] for row in parts[0]}) == 90
    assert [row["image_file_path"] for row in parts[0]] == [row["image_file_path"] for row in parts[1]]
    in_order = [{"label": i // 100} for i in range(300)]  # as real ones often lie
    part = Dataset(in_order, beans().source, LEAVES, "leaves", size=90)
    assert sorted(Counter(row["label"] for row in part)) == [0, 1, 2]


def test_what_is_not_to_be_had_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="CIFAR-10 has no split 'validation'; it has train, test"):
        cifar10("validation")
    with pytest.raises(ValueError, match="MRPC has 3668 samples, not 9999; use size=1 to 3668"):
        mrpc(size=9999)
    with pytest.raises(ValueError, match="image_size=2 is too small"):
        beans(image_size=2)
    with pytest.raises(ValueError, match="kind='fake' is none of"):
        beans(kind="fake")


# --- stand-ins can be learned ----------------------------------------------------------------------


def learned(train: Sequence[Any], test: Sequence[Any], classes: int, epochs: int) -> float:
    """Share of `test` that a small convolutional network gets right after a second of training on `train`."""
    torch.manual_seed(0)
    seen, held_out = collate_images(train), collate_images(test)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 12), (12, 24), (24, 48)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, classes))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(train)).split(32):
            loss = nn.functional.cross_entropy(model(seen["pixel_values"][rows]), seen["labels"][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    guesses = model.eval()(held_out["pixel_values"]).argmax(1)
    return float((guesses == held_out["labels"]).float().mean())


def test_leaves_can_be_told_apart() -> None:
    train, test = list(beans(size=400, image_size=40)), list(beans("validation", image_size=40))
    assert learned(train, test, 3, epochs=8) > 0.8


@cache
def drawn_shapes() -> list[Any]:
    return list(cifar10(size=1500))


@pytest.mark.slow  # leaves are, above
def test_shapes_can_be_told_apart() -> None:
    rows = drawn_shapes()
    assert learned(rows[:1000], rows[1000:1400], 10, epochs=8) > 0.7


def solved(features: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], train: int) -> float:
    """Share that a linear classifier gets right beyond the first `train` rows, on which it is fitted."""
    targets = np.eye(labels.max() + 1)[labels]
    features = np.c_[features, np.ones(len(features))]
    weights = np.linalg.lstsq(features[:train], targets[:train], rcond=None)[0]
    return float(((features[train:] @ weights).argmax(1) == labels[train:]).mean())


def test_the_colour_of_a_shape_says_nothing() -> None:
    rows = drawn_shapes()
    pixels = np.stack([np.asarray(row["img"], float).reshape(-1, 3) for row in rows]) / 255  # (1500, 1024, 3)
    colours = np.concatenate(np.quantile(pixels, (0.1, 0.9), axis=1), axis=1)  # the darkest, the brightest
    labels = np.array([row["label"] for row in rows])
    assert solved(np.c_[colours, colours**2], labels, 1000) < 0.18  # one in ten is chance


NAMES = set(" ".join((*FIRMS, *PEOPLE, *TEAMS, *PLACES, *DAYS)).split()) - {"the"}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.slow  # the generator is fixed, and leaves are told apart
def test_a_bag_of_words_learns_something_about_pairs() -> None:
    rows = [words(f"{row['sentence1']} {row['sentence2']}".lower()) for row in (*mrpc(), *mrpc("validation"))]
    known = {word: i for i, word in enumerate(sorted({w for row in rows for w in row if not w.isdigit()}))}
    bags = np.zeros((len(rows), len(known)))
    for i, row in enumerate(rows):
        for word in row:
            bags[i, known.get(word, 0)] += 1
    labels = np.array([row["label"] for row in (*mrpc(), *mrpc("validation"))])
    score, majority = solved(bags, labels, 3668), labels[3668:].mean()
    assert majority + 0.08 < score < 0.95


def test_pairs_are_told_apart_by_which_words_differ_and_not_by_how_many() -> None:
    rows = [*mrpc(size=2000), *mrpc("validation")]
    overlap, differing = [], []
    for row in rows:
        one, other = (words(row[name]) for name in ("sentence1", "sentence2"))
        low, high = {w.lower() for w in one}, {w.lower() for w in other}
        overlap.append(len(low & high) / len(low | high))
        marks = [{w for w in part[1:] if w.isdigit() or w[0].isupper()} for part in (one, other)]
        differing.append(len(marks[0] - set(other)) + len(marks[1] - set(one)))
    labels = np.array([row["label"] for row in rows])
    majority = labels[2000:].mean()
    counted = solved(np.array([overlap]).T, labels, 2000)
    compared = solved(np.array([overlap, differing]).T, labels, 2000)
    assert counted < 0.8
    assert compared > majority + 0.15


def test_an_exchange_leaves_every_word_where_it_counts() -> None:
    """Some pairs that are not equivalent have the same names and numbers: who did it to whom has changed."""
    wrong = [row for row in mrpc(size=600) if not row["label"]]
    both = [[words(row[name]) for name in ("sentence1", "sentence2")] for row in wrong]
    marks = [[sorted(w for w in part if w.isdigit() or w in NAMES) for part in pair] for pair in both]
    assert 0.08 < np.mean([one == other for one, other in marks]) < 0.3


# --- real files ------------------------------------------------------------------------------------


def picture(seed: int, size: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8))


def write_leaves(folder: Path, splits: tuple[str, ...] = ("train", "validation", "test")) -> None:
    for split in splits:
        for label, name in enumerate(LEAVES):
            (folder / split / name).mkdir(parents=True)
            for i in range(2):
                picture(label * 2 + i).save(folder / split / name / f"{name}_{split}.{i}.jpg")


@pytest.mark.parametrize("below", ["beans", "."])
def test_beans_from_the_published_folders(data: Path, below: str) -> None:
    write_leaves(data / below)
    rows = beans("validation", kind="real")
    assert [row["labels"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert rows[2]["image_file_path"].endswith("validation/bean_rust/bean_rust_validation.0.jpg")
    assert rows[2]["image"].size == (20, 20)
    assert beans("validation", image_size=16)[2]["image"].size == (16, 16)
    where = "$DATA/beans" if below == "beans" else "$DATA"
    assert rows.describe() == f"Beans: real, 6 photographs of leaves, from {where}."


def table_of_leaves(count: int = 4) -> Any:
    import datasets

    features = datasets.Features(
        {
            "image_file_path": datasets.Value("string"),
            "image": datasets.Image(),
            "labels": datasets.ClassLabel(names=list(LEAVES)),
        }
    )
    columns = {
        "image_file_path": [f"{i}.jpg" for i in range(count)],
        "image": [picture(i) for i in range(count)],
        "labels": [i % 3 for i in range(count)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


def write_parquet(table: Any, path: Path) -> None:
    import pyarrow.parquet  # type: ignore[import-untyped]

    path.parent.mkdir(parents=True, exist_ok=True)
    embedded = table.with_format("arrow")[:]
    pyarrow.parquet.write_table(embedded, path)


@pytest.mark.parametrize("place", ["beans", "AI-Lab-Makerere/beans/data"])
def test_beans_from_parquet(data: Path, place: str, capfd: pytest.CaptureFixture[str]) -> None:
    write_parquet(table_of_leaves(), data / place / "train-00000-of-00001.parquet")
    rows = beans(kind="real")
    assert [row["labels"] for row in rows] == [0, 1, 2, 0]
    assert np.array_equal(np.asarray(rows[1]["image"]), np.asarray(picture(1)))
    assert list(rows[1]) == ["image_file_path", "image", "labels"]
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match="it holds parquet files, and none for 'test'"):
        beans("test")


@pytest.mark.parametrize("whole", [True, False])
def test_beans_from_save_to_disk(data: Path, whole: bool) -> None:
    import datasets

    if whole:
        datasets.DatasetDict({"train": table_of_leaves(3)}).save_to_disk(str(data / "beans"))
    else:
        table_of_leaves(3).save_to_disk(str(data / "beans" / "train"))
    assert [row["labels"] for row in beans(kind="real")] == [0, 1, 2]


def write_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six batches of three pictures in the published layout, and their checksums in torchvision's place."""
    from torchvision.datasets import CIFAR10

    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    contents: dict[str, Any] = {
        name: {
            "batch_label": name,
            "labels": [k, (k + 1) % 10, (k + 2) % 10],
            "data": np.random.default_rng(k).integers(0, 255, (3, 3072), dtype=np.uint8),
            "filenames": [f"{name}_{i}.png" for i in range(3)],
        }
        for k, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"])
    }
    contents["batches.meta"] = {"label_names": list(cifar10(kind="generated").classes), "num_vis": 3072}
    sums = {}
    for name, content in contents.items():
        (batches / name).write_bytes(pickle.dumps(content, protocol=2))
        sums[name] = hashlib.md5((batches / name).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})


def test_cifar_from_torchvision_s_batches(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(data, monkeypatch)
    rows = cifar10(kind="real")
    assert [row["label"] for row in rows] == [0, 1, 2, 1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6]
    planes = np.random.default_rng(1).integers(0, 255, (3, 3072), dtype=np.uint8)[2].reshape(3, 32, 32)
    assert np.array_equal(np.asarray(rows[5]["img"]), planes.transpose(1, 2, 0))
    assert [row["label"] for row in cifar10("test", kind="real")] == [5, 6, 7]


def test_a_broken_or_missing_batch_is_no_stand_in(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(data, monkeypatch)
    batch = data / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-9])
    sentence = r"^CIFAR-10 in \$DATA cannot be read: data_batch_3 is missing or .*; mend or remove it$"
    with pytest.raises(ValueError, match=sentence):
        cifar10()
    batch.unlink()
    with pytest.raises(ValueError, match=sentence):
        cifar10("test")


def write_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from torchvision.datasets import CIFAR10

    write_cifar(folder, monkeypatch)
    archive = folder / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "cifar-10-batches-py", "cifar-10-batches-py")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return archive


def test_cifar_from_the_archive(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "elsewhere", monkeypatch)
    (data / archive.name).write_bytes(archive.read_bytes())
    assert len(cifar10("test", kind="real")) == 3
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / archive.name).write_bytes(archive.read_bytes()[:-5])
    monkeypatch.setenv("DATA", str(cut))
    with pytest.raises(ValueError, match=r"cifar-10-python\.tar\.gz does not have the published checksum"):
        cifar10()


def test_cifar_is_fetched_into_data_where_there_is_a_network(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torchvision.datasets import CIFAR10

    archive = write_archive(tmp_path / "elsewhere", monkeypatch)
    serve = partial(SimpleHTTPRequestHandler, directory=str(archive.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
        assert cifar10().source.kind == "generated"  # HF_HUB_OFFLINE is set
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(find_dataset, "host_answers", lambda address: "toronto" in address)
        monkeypatch.setattr(CIFAR10, "tgz_md5", "0" * 32)
        assert "fetching it failed (File not found or corrupted)" in cifar10().source.where
        monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
        assert cifar10().describe() == "CIFAR-10: real, 15 photographs, from $DATA."
        server.shutdown()
    assert sorted(path.name for path in data.iterdir()) == [".cifar-10.lock", "cifar-10-batches-py"]


HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"


def write_table(path: Path, rows: int, header: str = HEADER) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'{i % 3 and 1}\t{100 + i}\t{200 + i}\tHe said "{i} .\tAnd {i}\x85 .\r\n' for i in range(rows)]
    path.write_text(header + "".join(lines), encoding="utf-8", newline="")


def test_mrpc_from_the_published_tables(data: Path) -> None:
    write_table(data / "msr_paraphrase_train.txt", 20)
    write_table(data / "msr_paraphrase_test.txt", 5)
    assert [row["idx"] for row in mrpc(kind="real")] == list(range(18))
    assert [row["idx"] for row in mrpc("validation", kind="real")] == [18, 19]
    assert mrpc("test")[4] == {"sentence1": 'He said "4 .', "sentence2": "And 4\x85 .", "label": 1, "idx": 4}
    (data / "mrpc_dev_ids.tsv").write_text("103\t203\n117\t217\n")
    assert [row["idx"] for row in mrpc("validation")] == [3, 17]
    assert [row["idx"] for row in mrpc()] == [i for i in range(20) if i not in (3, 17)]


def test_mrpc_from_the_tables_of_glue(data: Path) -> None:
    write_table(data / "glue/MRPC/train.tsv", 4, HEADER[1:])
    write_table(data / "glue/MRPC/dev.tsv", 2, HEADER[1:])
    assert len(mrpc(kind="real")) == 4
    assert mrpc("validation").describe() == "MRPC: real, 2 sentence pairs, from $DATA/glue/MRPC."
    with pytest.raises(ValueError, match="tables of MRPC, and none for 'test'"):
        mrpc("test")


def test_a_train_tsv_of_another_dataset_is_no_mrpc(data: Path) -> None:
    (data / "train.tsv").write_text("sentence\tlabel\na nice film\t1\n")
    assert mrpc(size=3).source.kind == "generated"
    write_table(data / "msr_paraphrase_train.txt", 20)
    assert len(mrpc(kind="real")) == 18
    write_table(data / "train.tsv", 4, HEADER[1:])
    assert len(mrpc(kind="real")) == 4
    (data / "mrpc").mkdir()
    (data / "mrpc/train.tsv").write_text("sentence\tlabel\na nice film\t1\n")
    with pytest.raises(ValueError, match=r"MRPC in \$DATA/mrpc cannot be read"):
        mrpc()


def test_mrpc_from_parquet(data: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{**mrpc()[i], "extra": 1.0} for i in range(3)])
    write_parquet(table, data / "mrpc" / "validation-00000-of-00001.parquet")
    assert list(mrpc("validation", kind="real")) == [mrpc(kind="generated")[i] for i in range(3)]


mrpc_test = partial(mrpc, "test")


@pytest.mark.parametrize(
    ("path", "content", "load", "said"),
    [
        ("msr_paraphrase_test.txt", b"Quality\n1\tonly two", mrpc_test, "line 2 of msr_paraphrase_test"),
        ("mrpc/train-0.parquet", b"PAR1 no more", mrpc, "MRPC in $DATA/mrpc cannot be read"),
        ("mrpc/dataset_dict.json", b"{", mrpc, "MRPC in $DATA/mrpc cannot be read"),
        ("beans/train/angular_leaf_spot/a.txt", b"", beans, "Beans in $DATA/beans cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(
    data: Path, path: str, content: bytes, load: Callable[[], Any], said: str
) -> None:
    (data / path).parent.mkdir(parents=True, exist_ok=True)
    (data / path).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        load()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_picture_is_named_when_it_is_read(data: Path) -> None:
    write_leaves(data / "beans")
    path = data / "beans/test/bean_rust/bean_rust_test.1.jpg"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"no picture"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"sample 3 of Beans from \$DATA/beans"):
            beans("test")[3]


def test_columns_of_another_data_set_are_refused(data: Path) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": ["a"], "label": [1]})
    write_parquet(table, data / "mrpc" / "train.parquet")
    with pytest.raises(ValueError, match="should have a column sentence1, sentence2, idx and has only text"):
        mrpc()


def test_half_a_data_set_is_not_mixed_with_a_stand_in(data: Path) -> None:
    write_leaves(data / "beans", ("train",))
    assert len(beans()) == 6
    with pytest.raises(ValueError, match=r"Beans in \$DATA/beans cannot be read"):
        beans("test")


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_DATASETS_CACHE"])
def test_the_cache_of_the_hub_is_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from datasets.packaged_modules.parquet.parquet import Parquet

    cache = tmp_path / "kept" / ("datasets" if variable == "HF_HOME" else "")
    monkeypatch.setenv(variable, str(tmp_path / "kept"))
    source = tmp_path / "train.parquet"
    write_parquet(table_of_leaves(), source)
    with find_dataset.quiet_datasets():
        Parquet(
            cache_dir=str(cache),
            dataset_name="beans",
            config_id="default",
            hash="0123456789abcdef",
            data_files={"train": [str(source)]},
        ).download_and_prepare()
    (cache / "beans").rename(cache / "AI-Lab-Makerere___beans")  # as if from the hub
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(find_dataset, "host_answers", lambda address: False)  # no network, and nobody said so
    rows = beans(kind="real")
    assert [row["labels"] for row in rows] == [0, 1, 2, 0]
    assert rows.source.where == "AI-Lab-Makerere/beans on the Hugging Face hub"
    assert beans("test").source.kind == "generated"
    assert capfd.readouterr().err == ""
    (arrow,) = cache.rglob("*.arrow")
    arrow.write_bytes(b"no longer an arrow file")
    with pytest.raises(ValueError, match="Beans in the Hugging Face cache cannot be read"):
        beans()


def test_a_host_that_never_answers_costs_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(find_dataset, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.perf_counter()
        rows = beans()
        assert time.perf_counter() - start < 2
    assert "has none and 127.0.0.1 does not answer" in rows.source.where


def test_a_lost_packet_does_not_make_a_host_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_dataset, "ASK_EVERY", 0.1)
    monkeypatch.setattr(find_dataset, "PATIENCE", 10)

    def answer_second_request(listener: socket.socket) -> None:
        lost, _ = listener.accept()
        answered, _ = listener.accept()
        answered.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        answered.close()
        lost.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=answer_second_request, args=(listener,), daemon=True).start()
        assert find_dataset.host_answers(address)
    assert find_dataset.host_answers(address)  # remembered: nobody listens any more


def test_a_silent_host_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_dataset, "PATIENCE", 0.2)
    requests: list[object] = []

    def urlopen(*request: object, timeout: float) -> io.BytesIO:
        requests.append(request)
        return io.BytesIO()

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    find_dataset._silent_since["http://host"] = time.monotonic()
    assert not find_dataset.host_answers("http://host")
    assert not requests
    find_dataset._silent_since["http://host"] -= find_dataset.ASK_AGAIN_AFTER
    assert find_dataset.host_answers("http://host")
    assert requests


# --- the loader ------------------------------------------------------------------------------------


@dataclass
class At:
    """A place on an axis."""

    size: int
    rank: int


def places(dp: int) -> Iterator[At]:
    return (At(dp, rank) for rank in range(dp))


def batches_of_all_ranks(
    samples: int, batch_size: int, dp: int, epoch: int = 0, **options: Any
) -> list[list[list[int]]]:
    """[batch][rank][row]: sample numbers, as the loaders of all ranks return them."""
    loaders = [Loader(range(samples), batch_size, place, **options) for place in places(dp)]
    for loader in loaders:
        loader.set_epoch(epoch)
    found = [[batch.tolist() for batch in loader] for loader in loaders]
    assert {len(batches) for batches in found} == {len(loader) for loader in loaders}
    return [list(ranks) for ranks in zip(*found, strict=True)]


SWEEP = [(n, b, dp) for n in range(1, 14) for b in (1, 2, 3) for dp in (1, 2, 3, 4)]


def test_every_sample_comes_once_an_epoch() -> None:
    for n, b, dp in SWEEP:
        for shuffle in (True, False):
            batches = batches_of_all_ranks(n, b, dp, epoch=1, shuffle=shuffle, seed=3)
            seen = [sample for ranks in batches for rows in ranks for sample in rows]
            assert sorted(seen) == list(range(n)), (n, b, dp)


def test_batch_k_is_the_same_samples_in_every_layout() -> None:
    for n in (1, 5, 11, 12, 13, 25):
        for global_batch in (4, 12):
            layouts = [(global_batch // dp, dp) for dp in (1, 2, 3, 4) if global_batch % dp == 0]
            runs = [batches_of_all_ranks(n, b, dp, epoch=2, seed=1) for b, dp in layouts]
            flat = [[[s for rows in ranks for s in rows] for ranks in run] for run in runs]
            assert all(run == flat[0] for run in flat), (n, global_batch)


def test_shares_are_as_even_as_can_be_and_full_until_the_last_batch() -> None:
    for n, b, dp in SWEEP:
        *full, last = [[len(rows) for rows in ranks] for ranks in batches_of_all_ranks(n, b, dp)]
        assert all(sizes == [b] * dp for sizes in full)
        assert max(last) - min(last) <= 1, (n, b, dp)


def test_drop_last_leaves_out_the_ragged_batch_alone() -> None:
    for n, b, dp in SWEEP:
        if n >= b * dp:
            whole = batches_of_all_ranks(n, b, dp)
            assert batches_of_all_ranks(n, b, dp, drop_last=True) == whole[: n // (b * dp)]


def test_an_epoch_has_an_order_of_its_own_and_a_seed_has_too() -> None:
    first = batches_of_all_ranks(40, 4, 2)
    assert batches_of_all_ranks(40, 4, 2) == first
    assert batches_of_all_ranks(40, 4, 2, epoch=1) != first
    assert batches_of_all_ranks(40, 4, 2, seed=1) != first
    assert batches_of_all_ranks(40, 4, 2, shuffle=False, epoch=1)[1] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    loader = Loader(range(40), 4)
    assert [b.tolist() for b in loader] == [b.tolist() for b in loader]  # until set_epoch


def test_a_rank_without_samples_gets_a_batch_of_no_rows() -> None:
    rows = cifar10(size=5)
    last = [list(Loader(rows, 1, place, collate_fn=collate_images))[-1] for place in places(4)]
    assert [len(batch["labels"]) for batch in last] == [1, 0, 0, 0]
    for batch in last[1:]:
        assert batch["pixel_values"].shape == (0, 3, 32, 32)
        assert batch["pixel_values"].dtype == torch.float32
        assert batch["labels"].dtype == torch.int64
    mixed = ImageTransform(16, augment=True, mixup=0.2, classes=10)
    empty = list(Loader(rows, 1, At(4, 3), transform=mixed))[-1]
    assert empty["pixel_values"].shape == (0, 3, 16, 16)
    assert empty["labels"].shape == (0, 10)
    pairs = list(Loader(mrpc(size=5), 1, At(4, 3), collate_fn=collate_pairs(byte_tokenizer())))[-1]
    assert pairs["input_ids"].shape[0] == 0
    assert pairs["input_ids"].ndim == 2
    texts = list(Loader(mrpc(size=5), 1, At(4, 3)))[-1]
    assert texts["sentence1"] == []
    assert texts["label"].shape == (0,)


def joined() -> tuple[dict[str, int], list[list[int]], list[float]]:
    mesh = hpnb.Mesh(hpnb.Layout(dp=2, tp=2))
    loader = Loader(range(5), 2, mesh.dp, seed=1)
    seen, totals = [], []
    for batch in loader:
        seen.append(batch.tolist())
        totals.append(hpnb.comm.all_reduce(batch.sum().double(), mesh.dp).item())
    return mesh.coordinates, seen, totals


def test_peers_on_other_axes_see_the_same_and_an_empty_handed_rank_joins() -> None:
    found = hpnb.launch(joined, ranks=4, device="cpu", timeout=60)
    by_dp = {where["dp"]: seen for where, seen, _ in found}
    assert all(by_dp[where["dp"]] == seen for where, seen, _ in found)
    assert sorted(s for seen in by_dp.values() for rows in seen for s in rows) == list(range(5))
    assert by_dp[1][-1] == []
    assert all(sum(totals) == 10 for _, _, totals in found)


def test_a_run_resumed_in_the_middle_goes_on_as_if_uninterrupted() -> None:
    def run(loader: Any, epochs: int, stop: int | None = None) -> tuple[list[list[int]], dict[str, int]]:
        seen: list[list[int]] = []
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                seen.append(batch.tolist())
                if len(seen) == stop:
                    return seen, loader.state_dict()
        return seen, loader.state_dict()

    whole, _ = run(Loader(range(11), 2, seed=5), 3)
    assert len(whole) == 18
    for stop in range(1, 19):
        before, state = run(Loader(range(11), 2, seed=5), 3, stop)
        fresh = Loader(range(11), 2, seed=5)
        fresh.load_state_dict(state)
        after, _ = run(fresh, 3)
        assert before + after == whole, stop

    other = [Loader(range(11), 1, place, seed=5) for place in places(2)]  # the same global batch on two ranks
    for loader in other:
        loader.load_state_dict({**state, "epoch": 1, "batch": 4})
    rest = [[b.tolist() for b in loader] for loader in other]
    assert [one + two for one, two in zip(*rest, strict=True)] == whole[10:12]
    assert len(list(other[0])) == 6  # the place is used up: the next pass is a whole one


def test_a_state_of_another_run_is_refused_with_the_numbers() -> None:
    state = Loader(range(24), 4).state_dict()
    said = "global_batch=4, this loader has 8; with 2 data-parallel ranks use batch_size=2"
    with pytest.raises(ValueError, match=said):
        Loader(range(24), 4, At(2, 0)).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with samples=24, this loader has 25"):
        Loader(range(25), 4).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with seed=0, this loader has 1"):
        Loader(range(24), 4, seed=1).load_state_dict(state)


def test_workers_change_nothing() -> None:
    rows, prepared = cifar10(size=13), ImageTransform(16, augment=True)
    runs = [list(Loader(rows, 2, At(2, 1), transform=prepared, num_workers=n)) for n in (0, 2)]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["labels"], other["labels"])


def test_loading_leaves_the_generator_of_dropout_alone() -> None:
    before = torch.get_rng_state()
    np_before = np.random.get_state()[1].tolist()
    list(Loader(cifar10(size=6), 2, transform=ImageTransform(16, augment=True, mixup=1.0, classes=10)))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == np_before


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (([1, 2], 0), {}, "batch_size=0 is not a count"),
        (([1, 2], 1.5), {}, "batch_size=1.5 is not a count"),
        (([], 2), {}, "the dataset is empty"),
        ((iter([1]), 2), {}, "a list_iterator has no __len__"),
        (({1, 2}, 2), {}, "a set has no __getitem__"),
        (([1, 2], 2), {"seed": -1}, "seed=-1 is negative"),
        (([1, 2], 2, At(2, 0)), {"drop_last": True}, "fewer than the global batch of 2 x 2 = 4"),
        (([1, 2], 2, At(2, 2)), {}, "rank 2 is outside an axis of 2 ranks"),
    ],
)
def test_what_leaves_no_batch_is_refused_in_a_sentence(arguments: Any, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Loader(*arguments, **options)
    with pytest.raises(ValueError, match="epoch=-1 is negative"):
        Loader([1], 1).set_epoch(-1)


def test_a_sampler_needs_no_data_and_no_processes() -> None:
    sampler = DistributedBatchSampler(samples=10, batch_size=2, ranks=3, rank=1, shuffle=False)
    assert (sampler.global_batch_size, sampler.batches) == (6, 2)
    assert sampler.global_batch(0, 1) == [6, 7, 8, 9]
    assert sampler.batch_samples(0, 1, with_partners=False).samples == (8,)


# --- pictures and texts for a model ----------------------------------------------------------------


@pytest.mark.parametrize(("side", "size"), [(50, 24), (20, 48), (24, 24)])
def test_a_batch_of_crops_is_what_torchvision_does_one_by_one(side: int, size: int) -> None:
    from torchvision.transforms.v2.functional import horizontal_flip, resized_crop

    images = torch.from_numpy(np.stack([np.asarray(picture(i, side)) for i in range(3)])).permute(0, 3, 1, 2)
    boxes = [(0, 0, side, side, False), (3, 5, 12, 9, True), (side - 7, 1, 7, side - 1, False)]
    ours = image_batch(images, size, boxes)
    for image, (top, left, height, width, mirrored), got in zip(images, boxes, ours, strict=True):
        want = resized_crop(image / 255, top, left, height, width, [size, size], antialias=True)
        want = (horizontal_flip(want) if mirrored else want) * 2 - 1
        assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()


def test_without_chance_it_is_what_vit_s_own_processor_gives() -> None:
    from transformers import ViTImageProcessor

    pictures = [picture(i, 50) for i in range(2)]
    want = ViTImageProcessor(size={"height": 24, "width": 24})(pictures, return_tensors="pt")["pixel_values"]
    items = [{"image": p, "labels": i} for i, p in enumerate(pictures)]
    (batch,) = Loader(items, 2, shuffle=False, transform=ImageTransform(24))
    assert torch.allclose(batch["pixel_values"], want, atol=1.1 / 127.5)  # it rounds to 255 levels in between
    assert batch["pixel_values"].dtype == torch.float32
    plain = collate_images(items)["pixel_values"]
    assert plain.shape == (2, 3, 50, 50)
    assert torch.allclose(plain[1, :, 7, 3], torch.tensor(np.asarray(pictures[1])[7, 3] / 127.5 - 1).float())


def test_vit_s_own_processor_prepares_a_batch() -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=[0.4, 0.5, 0.6])
    items = [{"image": picture(i, 40 + i), "labels": i} for i in range(2)]  # of different sizes
    want = processor([item["image"] for item in items], return_tensors="pt")["pixel_values"]
    collate = partial(collate_images, processor=processor)
    (batch,) = Loader(items, 2, shuffle=False, collate_fn=collate)
    assert torch.equal(batch["pixel_values"], want)
    assert batch["labels"].tolist() == [0, 1]
    empty = list(Loader(items, 1, At(3, 2), collate_fn=collate))[-1]
    assert empty["pixel_values"].shape == (0, 3, 24, 24)


def cifar_augmentation() -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomCrop(32, padding=4), v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)])


def test_auto_augment_and_padded_crops_are_torchvision_s() -> None:
    augment = cifar_augmentation()
    items = [{"img": picture(i, 32), "label": i} for i in range(4)]
    loader = Loader(items, 4, shuffle=False, seed=3, transform=ImageTransform(32, augment=augment))
    state = torch.get_rng_state()
    (batch,) = loader
    assert torch.equal(torch.get_rng_state(), state)
    for i, item in enumerate(items):
        torch.manual_seed(int(np.random.default_rng([3, 0, i]).integers(2**63)))
        image = augment(torch.from_numpy(np.array(item["img"])).permute(2, 0, 1))
        assert torch.equal(batch["pixel_values"][i], (image / 255 - 0.5) / 0.5)


@pytest.mark.parametrize(("mixup", "augment"), [(0.0, "crop"), (0.4, "crop"), (0.4, "auto")])
def test_a_sample_is_augmented_and_mixed_alike_in_every_layout(mixup: float, augment: str) -> None:
    rows = cifar10(size=19)
    how = cifar_augmentation() if augment == "auto" else True
    prepared = ImageTransform(24, augment=how, mixup=mixup, classes=10)
    runs = []
    for dp in (1, 2, 4):
        loaders = [Loader(rows, 8 // dp, place, seed=2, transform=prepared) for place in places(dp)]
        for loader in loaders:
            loader.set_epoch(1)
        batches = [batch for ranks in zip(*loaders, strict=True) for batch in ranks]
        runs.append({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
    for run in runs[1:]:
        assert torch.allclose(run["pixel_values"], runs[0]["pixel_values"], atol=1e-6)
        assert torch.allclose(run["labels"].double(), runs[0]["labels"].double(), atol=1e-6)


def test_augmentation_differs_by_sample_epoch_and_seed() -> None:
    same = [{"img": picture(0, 32), "label": 0}] * 6

    def pixels(epoch: int, **options: Any) -> torch.Tensor:
        loader = Loader(same, 6, shuffle=False, transform=ImageTransform(32, augment=True), **options)
        loader.set_epoch(epoch)
        return next(iter(loader))["pixel_values"]

    views = [*pixels(0), *pixels(1), *pixels(0, seed=1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(views) for b in views[:i])
    assert torch.equal(pixels(0), pixels(0))


def test_mixup_mixes_labels_as_it_mixes_pictures() -> None:
    """Picture i is i times a grey, and of class i: a mixed picture must be as bright as its labels say."""
    items = [{"img": Image.new("RGB", (8, 8), (20 * i,) * 3), "label": i} for i in range(10)]
    for dp in (1, 2):
        shares = []
        for place in places(dp):
            loader = Loader(items, 4 // dp, place, transform=ImageTransform(8, mixup=1.0, classes=10))
            for batch in loader:
                bright = (batch["pixel_values"].mean((1, 2, 3)) + 1) * 127.5
                assert torch.allclose(bright, batch["labels"] @ (20 * torch.arange(10.0)), atol=1e-3)
                assert torch.allclose(batch["labels"].sum(1), torch.ones(len(bright)))
                shares += batch["labels"].amax(1).tolist()
        assert 0.5 <= min(shares) < 0.9  # it did mix
        assert len({round(s, 4) for s in shares}) > 7


def test_pictures_that_fit_no_batch_and_mixup_without_classes_are_refused() -> None:
    items = [{"img": picture(0, 8), "label": 0}, {"img": picture(0, 9), "label": 0}]
    with pytest.raises(ValueError, match="8 x 8 and 9 x 9 pixels"):
        collate_images(items)
    items[1]["img"] = picture(0, 8).convert("L")
    with pytest.raises(ValueError, match=r"shapes \(8, 8\) and \(8, 8, 3\) .*convert\('RGB'\)"):
        collate_images(items)
    with pytest.raises(ValueError, match=r"mixup=0.2 with classes=None mixes nothing"):
        ImageTransform(8, mixup=0.2)


def test_pairs_are_padded_to_the_longest_of_their_batch() -> None:
    tokenizer = byte_tokenizer()
    items = list(mrpc(size=4))
    batch = collate_pairs(tokenizer)(items)
    lengths = [len(f"{item['sentence1']}\n{item['sentence2']}".encode()) for item in items]
    assert batch["input_ids"].shape == (4, max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["labels"].tolist() == [item["label"] for item in items]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    text = tokenizer.decode(batch["input_ids"][1][: lengths[1]])
    assert text == f"{items[1]['sentence1']}\n{items[1]['sentence2']}"
    assert collate_pairs(tokenizer, max_length=20)(items)["input_ids"].shape == (4, 20)
    there_and_back = pickle.loads(pickle.dumps(collate_pairs(tokenizer)))
    assert torch.equal(there_and_back(items)["input_ids"], batch["input_ids"])


def test_pairs_become_tensors_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' conversion visits every token in Python, which took a seventh of a small training run."""
    from transformers import BatchEncoding

    convert = BatchEncoding.convert_to_tensors

    def refuse(encoding: Any, tensor_type: Any = None, *args: Any, **options: Any) -> Any:
        assert tensor_type is None
        return convert(encoding, tensor_type, *args, **options)

    monkeypatch.setattr(BatchEncoding, "convert_to_tensors", refuse)
    batch = collate_pairs(byte_tokenizer())([{"sentence1": "", "sentence2": "", "label": 1}])
    assert {name: (x.dtype, x.tolist()) for name, x in batch.items()} == {
        "input_ids": (torch.int64, [[198]]),
        "attention_mask": (torch.int64, [[1]]),
        "labels": (torch.int64, [1]),
    }


def test_bytes_have_the_numbers_that_gpt2_gives_them() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer("!Az ~\n")["input_ids"] == [0, 32, 89, 220, 93, 198]  # published ones
    assert tokenizer.decode(tokenizer("naïve 日本")["input_ids"]) == "naïve 日本"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (50256, 50256)
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="this tokenizer has no pad token"):
        collate_pairs(tokenizer)


def test_data_sets_and_what_prepares_them_travel_to_ranks() -> None:
    for thing in (beans(), mrpc(), ImageTransform(8), Loader(cifar10(size=9), 2, At(2, 1))):
        assert len(pickle.dumps(thing)) < 200_000
    stream = io.BytesIO(pickle.dumps(beans(image_size=16)))
    assert digest([pickle.load(stream)[7]]) == digest([beans(image_size=16)[7]])


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0))


@pytest.mark.parametrize("loader", [hpnb.data.Loader, hpnb.data.IterableLoader])
def test_a_transform_is_any_function_of_a_batch_and_its_samples(loader: Any) -> None:
    data: Any = Numbers() if loader is hpnb.data.IterableLoader else list(torch.arange(8.0))
    batches = list(loader(data, 4, shuffle=False, transform=lambda batch, samples: 2 * batch))
    assert torch.equal(torch.cat(batches), 2 * torch.arange(8.0))
    with pytest.raises(ValueError, match=r"two arguments.*BatchSamples.*__getitem__"):
        loader(data, 4, shuffle=False, transform=lambda sample: sample)
