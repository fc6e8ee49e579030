"""Images of one's own in a run file, and what of a run is refused before a rank starts.

pytest tests/test_image_folder.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rank_pools import RankPools
from test_train import changed, tables

import hpnb
from hpnb.data import image_folder
from hpnb.hybrid.train_command import main as command
from hpnb.hybrid.train_command.run_file import parse
from hpnb.hybrid.train_command.train import train

COLOURS = {"blue": (20, 20, 220), "green": (20, 220, 20), "red": (220, 20, 20)}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=300)
    yield pools
    pools.close()


def draw(folder: Path, per_class: int = 10, classes: dict[str, Any] = COLOURS, side: int = 20) -> Path:
    rng = np.random.default_rng(per_class)
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            noise = rng.integers(-20, 20, (side + i, side, 3))
            Image.fromarray(np.uint8(np.array(colour) + noise)).save(folder / name / f"{i:02}.png")
    return folder


# --- the data -------------------------------------------------------------------------------------------


def paths(rows: Any) -> list[str]:
    return [row["image_file_path"] for row in rows]


def test_splits_are_the_folders_that_are_there(tmp_path: Path) -> None:
    draw(tmp_path / "train", 5)
    draw(tmp_path / "val", 2)
    rows = image_folder(tmp_path)
    assert rows.classes == ("blue", "green", "red")
    assert [row["labels"] for row in rows] == [0] * 5 + [1] * 5 + [2] * 5
    assert rows[6]["image_file_path"] == str(tmp_path / "train" / "green" / "01.png")
    assert rows[6]["image"].size == (20, 21)
    assert image_folder(tmp_path, image_size=16)[6]["image"].size == (16, 16)
    assert rows.source.kind == "real"
    for split in ("validation", "test"):  # one of the two stands for both
        assert paths(image_folder(tmp_path, split)) == sorted(
            str(p) for p in (tmp_path / "val").rglob("*.png")
        )
    draw(tmp_path / "test", 1)
    assert len(image_folder(tmp_path, "test")) == 3
    assert len(image_folder(tmp_path, "validation")) == 6


def test_one_image_in_ten_of_a_class_is_held_out_where_nobody_has_split_them(tmp_path: Path) -> None:
    draw(tmp_path, 20)
    draw(tmp_path, 3, {"grey": (99, 99, 99)})
    training, held_out = (paths(image_folder(tmp_path, split)) for split in ("train", "test"))
    assert held_out == paths(image_folder(tmp_path, "validation"))
    assert not set(training) & set(held_out)
    assert len(training) + len(held_out) == 63
    assert [Path(p).parent.name for p in held_out] == ["blue"] * 2 + ["green"] * 2 + ["grey"] + ["red"] * 2


def test_labels_of_a_split_with_fewer_classes_are_those_of_training(tmp_path: Path) -> None:
    draw(tmp_path / "train", 2)
    draw(tmp_path / "test", 1, {"red": COLOURS["red"]})
    assert image_folder(tmp_path, "test")[0]["labels"] == 2


def test_what_is_no_folder_of_images_is_refused_with_how_one_looks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        image_folder(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"no folder of images: .*train/CLASS/IMAGE\.jpg"):
        image_folder(tmp_path)
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"for the classes cat\. It needs a folder a class"):
        image_folder(tmp_path / "empty")
    draw(tmp_path / "train", 1)
    with pytest.raises(ValueError, match="neither validation nor test"):
        image_folder(tmp_path, "test")
    draw(tmp_path / "test", 1, {"pink": (250, 100, 100)})
    with pytest.raises(ValueError, match=r"test has the class pink, .* blue, green, red"):
        image_folder(tmp_path, "test")
    with pytest.raises(ValueError, match="no split 'all'"):
        image_folder(tmp_path, "all")


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_grey_images_of_16_bits_keep_their_brightness(mode: str, tmp_path: Path) -> None:
    """Pillow clips them at 255: an image of a sixth of the range was read as nearly white."""
    draw(tmp_path, 1)
    grey = np.linspace(0, 65535, 400).round().astype(np.uint16).reshape(20, 20)
    (tmp_path / "blue" / "00.png").unlink()
    big_endian = Image.frombytes("I;16B", (20, 20), grey.byteswap().tobytes())
    image, suffix = (Image.fromarray(grey), "png") if mode == "I;16" else (big_endian, "tiff")
    image.save(tmp_path / "blue" / f"00.{suffix}")
    read = image_folder(tmp_path)[0]["image"]
    assert read.mode == "RGB"
    assert np.abs(np.asarray(read, dtype=float) - grey[..., None] / 257).max() <= 0.5


@pytest.mark.parametrize(("values", "words"), [(np.float32, "floats"), (np.int32, "32 bits")])
def test_grey_values_without_a_scale_are_refused_with_the_name_of_the_file(
    values: Any, words: str, tmp_path: Path
) -> None:
    draw(tmp_path, 1)
    (tmp_path / "blue" / "00.png").unlink()
    file = tmp_path / "blue" / "00.tiff"
    Image.fromarray(np.full((20, 20), 7, values)).save(file)
    with pytest.raises(ValueError, match=rf"sample 0 of Images .*{file} has .*{words}"):
        image_folder(tmp_path)[0]


@pytest.mark.parametrize("splits", [("Training", "Testing"), ("val", "test"), ("test",)])
def test_splits_without_train_are_no_classes(splits: tuple[str, ...], tmp_path: Path) -> None:
    for split in splits:
        draw(tmp_path / split, 3)
    with pytest.raises(ValueError, match=r"look like splits .* rename the one to train on to .*train"):
        image_folder(tmp_path)


def test_classes_may_be_called_like_a_split(tmp_path: Path) -> None:
    draw(tmp_path, 2, {"invalid": (9, 9, 9), "valid": (0, 0, 0)})
    assert image_folder(tmp_path).classes == ("invalid", "valid")


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    """A hidden folder with thumbnails became class 0 and moved every label; one without stopped the run."""
    draw(tmp_path, 2)
    draw(tmp_path, 2, {".thumbs": (9, 9, 9)})
    draw(tmp_path / "red", 2, {".thumbs": (9, 9, 9)})
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "red" / "._00.png").write_bytes(b"of macOS")
    rows = image_folder(tmp_path)
    assert rows.classes == ("blue", "green", "red")
    assert paths(rows) == [str(tmp_path / name / "00.png") for name in rows.classes]
    assert rows.describe().endswith(f"from {tmp_path}.")
    hidden = draw(tmp_path / ".cache" / "pets", 1)
    assert len(image_folder(hidden)) == 3  # the folder itself may lie in a hidden one


def test_files_that_are_no_images_are_counted(tmp_path: Path) -> None:
    draw(tmp_path, 2)
    for name in ("a.gif", "b.GIF", "notes.txt"):
        (tmp_path / "red" / name).write_bytes(b"")
    assert "left out because they are not read as images: 2 .gif, 1 .txt" in image_folder(tmp_path).describe()


# --- run files ------------------------------------------------------------------------------------------


def of_images(folder: Path, run: Path, **changes: Any) -> dict[str, Any]:
    own = {"data__name": "images", "data__kind": "auto", "data__folder": str(folder), "data__rows": None}
    return tables(run, **(own | changes))


@pytest.mark.slow  # the loader is tested above, run files in test_train.py
def test_a_run_file_trains_on_images_of_ones_own(pools: RankPools, tmp_path: Path) -> None:
    pets = draw(tmp_path / "pets", 20)
    long = {"training__epochs": 4, "training__learning_rate": 1e-2, "layout__pp_size": 2}
    result = pools[2].run(train, parse(of_images(pets, tmp_path / "run", **long)))[0]
    assert result.final["accuracy"] == 1.0  # the colours are those of the classes
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "blue", "1": "green", "2": "red"}


def test_a_folder_without_the_named_data_is_no_reason_to_generate(pools: RankPools, tmp_path: Path) -> None:
    """It was one line among others, and the run trained on leaves that were drawn."""
    pets = draw(tmp_path / "pets" / "train", 2).parent
    file = changed(folder=tmp_path / "run", data__kind="auto", data__folder=str(pets))
    with pytest.raises(hpnb.RankError) as error:
        pools[2].run(train, file)
    assert f"[data] folder = {str(pets)!r} has no Beans" in error.value.summary
    assert "name = 'images'" in error.value.summary
    assert f"{pets}/train/CLASS/IMAGE.jpg" in error.value.summary


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("ranks were started")


def test_a_folder_that_holds_no_images_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", never)
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nfamily = "vit"\nsize = "laptop"\n'
        f'[data]\nname = "images"\nbatch_size = 2\nfolder = "{tmp_path}"\n'
        "[training]\nepochs = 1\nlearning_rate = 1e-3\n"
    )
    assert command.run(str(path), 2) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} is no folder of images" in said
    assert f"{tmp_path}/train/CLASS/IMAGE.jpg" in said


def run_toml(folder: Path, name: str, family: str, more: str = "") -> str:
    path = folder / "run.toml"
    path.write_text(
        f'[model]\nfamily = "{family}"\nsize = "laptop"\n'
        f'[data]\nname = "{name}"\nbatch_size = 2\nfolder = "{folder / "data"}"\n'
        f"[training]\nepochs = 1\nlearning_rate = 1e-3\n{more}"
    )
    return str(path)


def test_damaged_files_are_named_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", never)
    draw(tmp_path / "data", 3)
    damaged = [tmp_path / "data" / "green" / "01.png", tmp_path / "data" / "red" / "02.png"]
    for file in damaged:
        file.write_bytes(b"no image")
    assert command.run(run_toml(tmp_path, "images", "vit"), 2) == 2
    said = capsys.readouterr().err
    assert f"{damaged[0]}, {damaged[1]} are no images that can be read; replace or remove them" in said
    for name, content in (("good.txt", b"Words."), ("latin.txt", b"caf\xe9"), ("other.md", b"\xff")):
        (tmp_path / "data" / name).write_bytes(content)
    assert command.run(run_toml(tmp_path, "text", "gpt2"), 2) == 2
    said = capsys.readouterr().err
    assert "latin.txt is not UTF-8 from byte 3 on, other.md is not UTF-8 from byte 0 on; convert" in said


def test_an_image_that_ends_early_is_named(tmp_path: Path) -> None:
    file = draw(tmp_path, 1) / "blue" / "00.png"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=rf"sample 0 of Images .* cannot be read: {file}: image"):
        image_folder(tmp_path)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__folder": None}, "name = 'images' with no folder"),
        ({"data__kind": "generated"}, "name = 'images' with kind = 'generated'"),
    ],
)
def test_images_need_a_folder(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        parse(of_images(tmp_path, tmp_path, **changes))


# --- a warm-up longer than the run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": None, "steps": 5, "warmup_steps": 6}, "warmup_steps = 6 of 5 steps in all"),
        ({"epochs": 2, "warmup_epochs": 3}, "warmup_epochs = 3 of 2 epochs in all"),
        # 24 rows, 2 a rank, 2 ranks: 6 batches, 3 steps an epoch
        ({"epochs": 2, "accumulation": 2, "warmup_steps": 7}, "warmup_steps = 7 of 6 steps in all"),
    ],
)
def test_a_warmup_longer_than_the_run_is_refused_before_ranks_start(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "launch", never)
    how = {"learning_rate": 1e-3, **changes}
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nfamily = "vit"\nsize = "laptop"\n'
        '[data]\nname = "beans"\nkind = "generated"\nbatch_size = 2\nrows = 24\n[training]\n'
        + "".join(f"{key} = {value}\n" for key, value in how.items() if value is not None)
        + f'[checkpoint]\ndir = "{tmp_path / "run"}"\n'
    )
    assert command.run(str(path), 2) == 2
    assert words in capsys.readouterr().err
    how |= {key: value - 1 for key, value in changes.items() if "warmup" in key}
    data = {"name": "beans", "batch_size": 2, "rows": 24}
    parse({"model": {"family": "vit", "size": "laptop"}, "data": data, "training": how}).check_length(2)
