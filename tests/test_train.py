"""`python -m hpnb train`: run files, what they may say, and runs that end, stop and go on."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import importlib.util
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preloaded_python import start_program
from rank_pools import RankPools
from torchvision.transforms import v2
from torchvision.transforms.functional import pil_to_tensor
from transformers import (
    AutoImageProcessor,
    GPT2LMHeadModel,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

import hpnb
from hpnb.__main__ import main
from hpnb.data.images import image_batch
from hpnb.hybrid.train_command import main as train_main
from hpnb.hybrid.train_command.run_file import RunFile, load, parse
from hpnb.hybrid.train_command.run_task import make_task
from hpnb.hybrid.train_command.train import RunResult, train
from hpnb.hybrid.training import resuming
from hpnb.hybrid.training.events import Hook
from hpnb.hybrid.training.folder_lock import LOCK, FolderLock
from hpnb.hybrid.training.stop_hook import StopHook

ROOT = Path(__file__).parents[1]
VIT = {"hidden": 16, "layers": 2, "heads": 2, "mlp": 32, "patch": 8, "image": 16}
GPT2 = {"hidden": 16, "layers": 2, "heads": 2, "mlp": 32, "vocab_size": 300, "length": 32}
Tables = dict[str, Any]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools(timeout=300)
    yield pools
    pools.close()


@pytest.fixture
def four(pools: RankPools) -> hpnb.Ranks:
    return pools[4]


@pytest.fixture
def two(pools: RankPools) -> hpnb.Ranks:
    return pools[2]


def tables(folder: Path | None = None, **changes: Any) -> Tables:
    """24 small pictures, 8 a step; `training__steps=3` changes one key."""
    found: Tables = {
        "model": {"family": "vit", "size": dict(VIT)},
        "data": {"name": "beans", "kind": "generated", "batch_size": 2, "rows": 24},
        "layout": {},
        "training": {"epochs": 2, "learning_rate": 3e-3, "precision": "fp64"},
        "checkpoint": {} if folder is None else {"dir": str(folder)},
    }
    for name, value in changes.items():
        table, _, key = name.partition("__")
        found[table][key] = value
    return found


def changed(**changes: Any) -> RunFile:
    return parse(tables(**changes))


def figures(history: list[dict[str, Any]]) -> list[list[Any]]:
    """What is not a clock's."""
    clocks = ("seconds", "samples_per_second", "tokens_per_second")
    return [[value for name, value in row.items() if name not in clocks] for row in history]


# --- what a file may say ------------------------------------------------------------------------------------


def test_a_file_says_little_and_means_much(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        '[model]\nfamily = "vit"\n[data]\nname = "beans"\nbatch_size = 4\n'
        "[training]\nlearning_rate = 1\nsteps = 3\n[layout]\ntp_size = 1\n"
    )
    file = load(path, ["layout.tp_size=2", "model.size=b16", "layout.zero_stage = 1"])
    assert (file.model.size, file.training.learning_rate, file.checkpoint.dir) == ("b16", 1.0, "small")
    assert isinstance(file.training.learning_rate, float)
    plugin = file.plugin()
    assert (plugin.tp_size, plugin.zero_stage, plugin.precision, plugin.seed) == (2, 1, "fp32", 0)
    half = load(path, ["layout.communication_dtype=bfloat16", "layout.zero_stage=2", "layout.cut=[4, 4]"])
    assert half.plugin().communication_dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"small.toml: \[layout\] has no tp; did you mean tp_size or tp_m"):
        load(path, ["layout.tp=2"])
    with pytest.raises(ValueError, match=r"says nothing; write --set table.key=value"):
        load(path, ["layout"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layout__tp_sise": 2}, "[layout] has no tp_sise; did you mean tp_size?"),
        ({"layout__tp_size": 2.0}, "[layout] tp_size = 2.0 should be a valid integer"),
        ({"layout__tp_size": True}, "[layout] tp_size = true should be a valid integer"),
        ({"layout__cut": "thirds"}, "cut = 'thirds' should be 'uniform', 'parameters', 'flops' or 'time'"),
        ({"layout__activation_checkpointing": True}, "= true should be false, 'full' or 'attention'"),
        ({"layout__tp_size": 3}, "tp_size = 3 shares the heads of the model, which has 2; use tp_size = 2"),
        ({"layout__tp_size": 99, "model__size": "b16"}, "which has 12; use tp_size = 12 or less"),
        ({"layout__precision": "bf16"}, "[layout] precision belongs into [training], as precision"),
        ({"layout__tp_mode": "2d", "layout__tp_size": 3}, "2d needs q x q ranks, and 3 is not of that form"),
        ({"training__precision": "fp8"}, "precision='fp8' is not one of fp32"),
        ({"training__learning_rate": "fast"}, "[training] learning_rate = 'fast' should be a valid number"),
        ({"training__learning_rate": 0}, "[training] learning_rate = 0 should be greater than 0"),
        ({"training__steps": 3}, "[training] has both epochs and steps; give one of the two"),
        ({"training__epochs": 0}, "[training] epochs = 0 should be greater than or equal to 1"),
        ({"training__schedule": "step"}, "schedule = 'step' should be 'cosine', 'linear' or 'constant'"),
        ({"model__family": "bert"}, "[model] family = 'bert' should be 'vit' or 'gpt2'"),
        ({"model__size": "huge"}, "[model] size = 'huge' is no size of vit; use laptop, b16, l16"),
        ({"model__size": {"hidden": 8}}, "[model] size lacks layers"),
        ({"model__size": {**VIT, "image": 9}}, "image=9 is no multiple of 8"),
        ({"model__length": 64}, "a vit takes [data] image_size"),
        ({"data__name": "text"}, "[data] name = 'text' is for a gpt2"),
        (
            {"layout__cp_size": 2, "model__family": "gpt2", "model__size": "laptop", "data__name": "mrpc"},
            "[layout] cp_size = 2 splits the tokens of a causal language model or of a ViT",
        ),
        (
            {"layout__ep_size": 2, "model__family": "gpt2", "model__size": "laptop", "data__name": "text"},
            "[layout] ep_size = 2: a GPT2LMHeadModel has no experts that transformers computes as one, which "
            "expert parallelism shards; use ep_size=1",
        ),
        ({"layout__ep_size": 2}, "ep_size = 2: a ViTForImageClassification has no experts"),
        ({"layout__selection_bias_rate": 0.001}, "equally busy; leave selection_bias_rate out"),
        ({"layout__loss_chunk": 8}, "is for a GPT2LMHeadModel, not for a ViTForImageClassification"),
        ({"layout__pp_size": 5}, "[layout] pp_size = 5: 5 stages need 5 blocks or more, and there are"),
        ({"data__batch_size": 0}, "[data] batch_size = 0 should be greater"),
        ({"checkpoint__every": 0}, "[checkpoint] every = 0 should be greater"),
        ({"data__augment": "flip"}, "= 'flip' should be false, true, 'crop' or 'autoaugment'"),
        ({"data__mixup": -0.2}, "[data] mixup = -0.2 should be greater than or equal to 0"),
        (
            {"training__warmup_steps": 3, "training__warmup_epochs": 1},
            "[training] has both warmup_steps and warmup_epochs; give one of the two",
        ),
    ],
)
def test_what_a_file_may_not_say_is_said_in_a_sentence(changes: Tables, said: str) -> None:
    with pytest.raises(ValueError) as told:
        changed(**changes)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model\n", "this is no TOML"),
        ("[trainig]\n", "there is no table [trainig]; did you mean training?"),
        ("model = 3\n", "model = 3 is not a table; write [model]"),
        ('[model]\nfamily = "vit"\n', "the table [data] is missing"),
        ("[model]\n", "[model] lacks family"),
    ],
)
def test_a_file_that_is_none(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main(["train", str(path)]) == train_main.REFUSED
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"hpnb train: {path}: ")
    assert said in sentence


def written(folder: Path, **changes: Any) -> Path:
    """The same as TOML."""
    lines = []
    for table, content in tables(folder / "run", **changes).items():
        lines.append(f"[{table}]")
        for key, value in content.items():
            inside = ", ".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, dict) else ""
            lines.append(f"{key} = {{ {inside} }}" if inside else f"{key} = {json.dumps(value)}")
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def test_every_option_of_the_layout_must_fit_the_ranks(tmp_path: Path) -> None:
    """zero_replicas and ep_size were refused by the ranks alone, after they had started."""
    file = load(written(tmp_path, layout__zero_stage=3, layout__zero_replicas=3))
    file.check_ranks(3)
    with pytest.raises(ValueError, match=r"^\[layout\] zero_replicas=3 does not divide the 4 ranks"):
        file.check_ranks(4)


def test_what_cannot_run_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, layout__tp_size=2))
    monkeypatch.setattr(train_main, "launch", None)  # calling it would raise
    assert main(["train", str(tmp_path / "none.toml")]) == train_main.REFUSED
    assert main(["train", path, "--ranks", "3"]) == train_main.REFUSED
    assert main(["train", path, "--ranks", "0"]) == train_main.REFUSED
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):  # who says it on a machine
        monkeypatch.setenv(name, value)
    assert main(["train", path, "--ranks", "2"]) == train_main.REFUSED
    missing = str(tmp_path / "missing")
    assert main(["train", path, "--set", f"data.folder={missing}", "--set", "data.kind=auto"]) == 2
    none, three, zero, both, folder = capsys.readouterr().err.splitlines()
    assert f"[data] folder = {missing!r}: there is no folder {missing}" in folder
    assert "none.toml cannot be read: No such file" in none
    assert "[layout] pp_size=1 x tp_size=2 needs a multiple of 2 ranks, and there are 3; use 2 or 4" in three
    assert "--ranks 0 trains nothing" in zero
    assert "torchrun has started them; leave --ranks out" in both


# --- runs ---------------------------------------------------------------------------------------------------


def run(ranks: hpnb.Ranks, file: RunFile, flag: Path | None = None) -> RunResult:
    """Of all ranks, which agree."""
    first, *others = ranks.run(train, file, flag)
    for other in others:
        assert figures(other.history) == figures(first.history)
        assert (other.final, other.step, other.stopped) == (first.final, first.step, first.stopped)
    return first


def test_a_run_is_the_same_in_every_layout_and_leaves_a_model(
    four: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replicas = run(four, changed(folder=tmp_path / "dp", data__augment=True))
    said = capfd.readouterr().out
    assert replicas.step == 6
    assert [row["epoch"] for row in replicas.history] == [1, 2]
    assert "Beans: generated stand-in, 24 drawn leaves of 1,034" in said
    assert "dp 4 x pp 1 x tp 1, ZeRO 0, on 4 CPU ranks" in said
    assert sum("epoch 1  step 3" in line for line in said.splitlines()) == 1
    assert f"final evaluation on 24 rows: loss {replicas.final['loss']:.4g}" in said

    how = {"pp_size": 2, "tp_size": 2, "microbatch_size": 3}
    cut = tables(tmp_path / "cut", data__augment=True, data__batch_size=8)
    both = run(four, parse({**cut, "layout": how}))
    for ours, theirs in zip(figures(both.history), figures(replicas.history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # AdamW magnifies the order of sums
    assert both.final == pytest.approx(replicas.final, rel=1e-6)
    assert both.history[-1]["loss"] != pytest.approx(both.history[0]["loss"], rel=1e-3)
    patches = tables(tmp_path / "cp", data__augment=True, data__batch_size=4, layout__cp_size=2)
    capfd.readouterr()
    context = run(four, parse(patches))
    said = capfd.readouterr().out
    assert "dp 2 x pp 1 x cp 2 x tp 1, ZeRO 0" in said
    for once in ("epoch 1  step 3", "final evaluation", "the model is in"):
        assert said.count(once) == 1
    for ours, theirs in zip(figures(context.history), figures(replicas.history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert context.final == pytest.approx(replicas.final, rel=1e-6)

    model = ViTForImageClassification.from_pretrained(tmp_path / "cut" / "model").double()
    rows = hpnb.data.beans("test", 24, image_size=16, kind="generated")
    batch = hpnb.data.collate_images([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        loss = model(batch["pixel_values"].double(), labels=batch["labels"]).loss
    assert float(loss) == pytest.approx(both.final["loss"], rel=1e-6)
    # The image processor that was saved does what the run did to its images, which were 32 pixels wide.
    processor = AutoImageProcessor.from_pretrained(tmp_path / "cut" / "model")
    large = hpnb.data.beans("test", 24, image_size=32, kind="generated")
    images = torch.stack([pil_to_tensor(large[i]["image"]) for i in range(4)])  # uint8
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (4, 3, 16, 16)
    assert torch.allclose(pixels, image_batch(images, 16), atol=0.02)  # it rounds to 8 bits
    picture = rows[0]["image"]
    (best, *_) = pipeline("image-classification", str(tmp_path / "cut" / "model"))(picture)
    assert best["label"] == f"LABEL_{int(model(batch['pixel_values'][:1].double()).logits.argmax())}"
    written = json.loads((tmp_path / "cut" / "history.json").read_text())
    assert figures(written) == figures(both.history)


def test_mixup_autoaugment_and_a_warmup_of_epochs(pools: RankPools, tmp_path: Path) -> None:
    """Three steps an epoch: the first epoch warms up. The first step's loss is that of one process."""
    recipe = {"data__mixup": 0.4, "data__augment": "autoaugment", "training__warmup_epochs": 1}
    replicas = run(pools[2], changed(folder=tmp_path / "dp", data__batch_size=4, **recipe))
    assert replicas.history[0]["lr"] == pytest.approx(3e-3)
    assert replicas.history[1]["lr"] < 3e-3
    how = {"pp_size": 2, "tp_size": 2, "microbatch_size": 3}
    cut = tables(tmp_path / "cut", data__batch_size=8, **recipe)
    both = run(pools[4], parse({**cut, "layout": how}))
    for ours, theirs in zip(figures(both.history), figures(replicas.history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert both.final == pytest.approx(replicas.final, rel=1e-6)

    for augment in ("autoaugment", "crop"):
        one_step = {"data__augment": augment, "training__steps": 1, "training__epochs": None}
        file = changed(folder=tmp_path / augment, data__mixup=0.4, data__batch_size=4, **one_step)
        first = run(pools[2], file).history[0]["loss"]
        steps: list[Any] = [v2.RandomCrop(16, padding=2), v2.RandomHorizontalFlip()]
        if augment == "autoaugment":
            steps.append(v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10))
        transform = hpnb.data.ImageTransform(16, v2.Compose(steps), 0.4, 3)
        beans = hpnb.data.beans("train", 24, image_size=16, kind="generated")
        batch = next(iter(hpnb.data.Loader(beans, 8, transform=transform)))
        model = hpnb.models.vit(hpnb.models.ViTSize(**VIT), classes=3).double()
        logits = model(batch["pixel_values"].double()).logits.detach()
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].double())
        assert first == pytest.approx(float(loss), rel=1e-9)


def test_a_pretrained_model_gets_images_as_it_has_seen_them(tmp_path: Path) -> None:
    source = tmp_path / "pretrained"
    hpnb.models.vit(hpnb.models.ViTSize(**VIT), classes=3).save_pretrained(source)
    file = changed(model__pretrained=str(source), model__size=None)
    with_default = hpnb.launch(transform_of, file, ranks=1, device="cpu")[0]
    assert with_default.mean == (0.5, 0.5, 0.5)
    ViTImageProcessor(image_mean=[0.485, 0.456, 0.406], image_std=[0.2, 0.3, 0.4]).save_pretrained(source)
    assert hpnb.launch(transform_of, file, ranks=1, device="cpu") == [
        hpnb.data.ImageTransform(16, mean=(0.485, 0.456, 0.406), std=(0.2, 0.3, 0.4))
    ]


def transform_of(file: RunFile) -> Any:
    return make_task(file).plain


def test_a_run_of_so_many_steps_ends_in_the_middle_of_an_epoch(two: hpnb.Ranks, tmp_path: Path) -> None:
    """24 rows are 3 global batches, which are 2 steps of two: the third step is in the second epoch."""
    limits = {"training__steps": 3, "training__accumulation": 2, "data__batch_size": 4}
    short = tables(tmp_path, **limits)
    del short["training"]["epochs"]
    found = run(two, parse(short))
    assert [(row["epoch"], row["step"]) for row in found.history] == [(1, 2), (2, 3)]
    assert found.history[-1]["lr"] == pytest.approx(3e-3 * (1 + torch.tensor(2 * torch.pi / 3).cos()) / 2)
    assert [folder.name for folder in resuming.saved(tmp_path)] == ["step-00000002", "step-00000003"]


def test_the_rate_grows_with_the_replicas_if_it_is_asked_to(four: hpnb.Ranks, tmp_path: Path) -> None:
    def first_rate(folder: str, **changes: Any) -> float:
        how = {"training__schedule": "constant", "training__epochs": 1, "data__rows": 8, **changes}
        rate: float = run(four, changed(folder=tmp_path / folder, **how)).history[0]["lr"]
        return rate

    scaling = {"training__learning_rate_scaling": "data-parallel"}
    assert first_rate("plain") == 3e-3
    assert first_rate("scaled", **scaling) == pytest.approx(4 * 3e-3)
    assert first_rate("halved", layout__tp_size=2, **scaling) == pytest.approx(2 * 3e-3)


def test_a_run_that_is_stopped_goes_on(
    two: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The flag is there from the start: ranks learn of it in step 1, and all of them leave after step 2, or
    after step 1 on a busy machine, where that takes more than a second."""
    dropout = {"model__dropout": 0.1, "training__epochs": 2, "data__batch_size": 4}
    whole = run(two, changed(folder=tmp_path / "whole", **dropout))
    flag = tmp_path / "stop"
    flag.touch()
    file = changed(folder=tmp_path / "parts", **dropout)
    first = run(two, file, flag)
    stopped_at = first.step
    assert (first.stopped, first.history) == (True, [])
    assert stopped_at in (1, 2)
    flag.unlink()
    capfd.readouterr()
    second = run(two, file, flag)
    assert (second.stopped, second.step, second.resumed) == (False, 6, stopped_at)
    saved = tmp_path / "parts" / f"step-0000000{stopped_at}"
    assert f"goes on from {saved}, after {stopped_at} of 6 steps" in capfd.readouterr().out
    for row, expected in zip(figures(second.history), figures(whole.history), strict=True):
        assert row == pytest.approx(expected, rel=1e-12)  # sums of a CPU can depend on where tensors begin
    assert second.final == pytest.approx(whole.final, rel=1e-12)

    again = run(two, file, flag)  # there is nothing left but to evaluate
    assert (again.step, again.final) == (6, whole.final)
    dropout["training__epochs"] = 3
    third = run(two, changed(folder=tmp_path / "parts", training__learning_rate=2e-3, **dropout))
    assert third.step == 9
    assert third.history[-1]["lr"] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 8 / 9)))  # as it says now
    with pytest.raises(hpnb.RankError, match="has step-00000009 already, and this run is at step 0"):
        two.run(train, changed(folder=tmp_path / "parts", checkpoint__resume=False))


def test_a_run_that_was_killed_in_its_first_save_says_that_it_starts_again(
    two: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only step-00000002.part was there, and the run started at step 0 without a word."""
    (tmp_path / "step-00000002.part" / "state").mkdir(parents=True)
    said = f"{tmp_path / 'step-00000002.part'} is from a save that did not finish and is not used; starts at"
    one_epoch = changed(folder=tmp_path, training__epochs=1, data__batch_size=4)
    assert run(two, one_epoch).step == 3
    assert capfd.readouterr().out.count(f"{said} step 0") == 1
    assert run(two, one_epoch).resumed == 3
    assert "did not finish" not in capfd.readouterr().out


def test_a_run_that_is_not_continued_is_refused(
    four: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """24 rows, 8 a step: an epoch is 3 steps. Other data or samples a step would be neither run."""
    run(four, changed(folder=tmp_path, training__epochs=1))
    for changes, numbers in (
        ({"training__learning_rate": 1e-2}, ("all of 3 steps", "learning_rate", "0.003", "0.01")),
        ({"training__epochs": 2, "data__batch_size": 4}, ("samples a step", "8", "16")),
        ({"training__epochs": 2, "data__rows": 16}, ("data.rows", "24", "16")),
        ({"training__epochs": 2, "training__seed": 5}, ("training.seed", "0", "5")),
        ({"training__epochs": 2, "model__classes": 7}, ("model.classes", "7")),
    ):
        with pytest.raises(hpnb.RankError) as told:
            four.run(train, changed(folder=tmp_path, **{"training__epochs": 1, **changes}))
        for number in (*numbers, "--allow-changes"):
            assert number in told.value.summary
    more = {"training__epochs": 4, "training__learning_rate": 1e-2, "layout__tp_size": 2}
    more["data__batch_size"] = 4  # times dp 2 are 8 samples a step, as before
    capfd.readouterr()
    found = run(four, changed(folder=tmp_path, **more))
    assert (found.resumed, found.step) == (3, 12)
    said = capfd.readouterr().out
    assert "changed: training.learning_rate = 0.003, now 0.01" in said
    assert "changed: layout.tp_size" in said
    assert "changed: data.rows" not in said

    # Told to, it goes on with 16 samples a step, 2 an epoch: 12 + 2 steps, and the rate falls to 0 there.
    more |= {"training__epochs": 5, "layout__tp_size": 1, "checkpoint__allow_changes": True}
    found = run(four, changed(folder=tmp_path, **more))
    assert (found.step, len(found.history)) == (14, 5)
    assert found.history[-1]["lr"] == pytest.approx(0.5e-2 * (1 + math.cos(math.pi * 13 / 14)))


@pytest.mark.slow  # a run that was stopped goes on, above
@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [None, 2, 3])
def test_more_steps_than_before_go_on_inside_the_epoch(
    two: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str], every: int | None
) -> None:
    """Step 4 is the first of the second epoch, which has 3 steps. The end is that of six steps in one go,
    wherever checkpoints were saved."""

    def steps(count: int, folder: str) -> RunResult:
        how = {"training__schedule": "constant", "data__batch_size": 4}
        wanted = tables(tmp_path / folder, training__steps=count, **how)
        wanted["checkpoint"]["every"] = every
        del wanted["training"]["epochs"]
        return run(two, parse(wanted))

    first = steps(4, "parts")
    assert [row["step"] for row in first.history] == [3, 4]
    again = steps(4, "parts")
    assert (again.resumed, again.step) == (4, 4)
    assert again.final == first.final
    assert "nothing is left to train" in capfd.readouterr().out
    more, at_once = steps(6, "parts"), steps(6, "at once")
    assert (more.resumed, more.step) == (4, 6)
    assert more.final == at_once.final
    for row, other in zip(more.history, at_once.history, strict=True):
        assert row["step"] == other["step"]
        assert row["eval_loss"] == other["eval_loss"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-13)  # a sum in two parts


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    [{"training__seed": 5}, {"data__rows": 16}, {"data__batch_size": 2, "training__accumulation": 2}],
    ids=str,
)
def test_an_epoch_that_was_cut_short_begins_anew_with_other_data(
    pools: RankPools, tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """Saved after step 2 of 3 of the only epoch; with --allow-changes a full epoch follows."""

    class Killed(Hook):
        priority = 1000

        def after_step(self, trainer: Any) -> None:
            if trainer.step == 2:
                raise KeyboardInterrupt

    def begin(file: RunFile) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            train(file, None, [Killed()])

    how = {"folder": tmp_path, "training__epochs": 1, "data__batch_size": 4, "checkpoint__every": 2}
    pools[2].run(begin, changed(**how))
    with pytest.raises(hpnb.RankError, match="--allow-changes"):
        pools[2].run(train, changed(**{**how, **changes}))
    capfd.readouterr()
    result = pools[2].run(train, changed(**{**how, **changes, "checkpoint__allow_changes": True}))[0]
    steps = 2 if "data__rows" in changes else 3
    assert (result.resumed, result.step, len(result.history)) == (2, 2 + steps, 1)
    assert result.history[0]["lr"] == pytest.approx(1.5e-3 * (1 + math.cos(math.pi * (1 - 1 / (2 + steps)))))
    said = f"after 2 of {2 + steps} steps; epoch 1 begins anew with the data as the file says now"
    assert f"goes on from {tmp_path / 'step-00000002'}, {said}" in capfd.readouterr().out


def test_the_figures_that_best_may_name_are_those_of_an_epoch(pools: RankPools, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"best = 'eval_accurcy' is no figure.*; did you mean eval_accuracy"):
        changed(checkpoint__best="eval_accurcy")
    with pytest.raises(ValueError, match=r"best = 'x' is no figure of this run; an epoch has loss, ") as said:
        changed(checkpoint__best="x")
    row = pools[2].run(train, changed(folder=tmp_path, training__epochs=2))[0].history[-1]
    assert {*str(said.value).partition("has ")[2].split(", ")} == row.keys() - {"epoch", "step"}


def test_the_first_loss_that_is_no_number_is_a_warning(
    four: hpnb.Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the last stage of two replicas, in the second of three steps."""

    class Poison(Hook):
        def before_step(self, trainer: Any) -> None:
            if trainer.step == 1:
                with torch.no_grad():
                    for p in trainer.model.parameters():
                        p.fill_(math.inf)

    def spoiled(file: RunFile, is_spoiled: bool) -> int:
        return train(file, None, [Poison()] if is_spoiled else []).step

    for is_spoiled in (False, True):
        how = {"layout__pp_size": 2, "training__epochs": 1, "data__batch_size": 4}
        file = changed(folder=tmp_path / str(is_spoiled), **how)
        assert four.run(spoiled, file, is_spoiled) == [3] * 4
        lines = [line for line in capfd.readouterr().out.splitlines() if "warning: the loss" in line]
        assert len(lines) == is_spoiled
    assert "warning: the loss of step 2 is nan; if the next ones are too, the weights are lost" in lines[0]


def test_what_cannot_be_saved_is_said_before_the_first_step(pools: RankPools, tmp_path: Path) -> None:
    class NoStep(Hook):
        def before_step(self, trainer: Any) -> None:
            raise AssertionError("it trains")

    def refused(**changes: Any) -> str:
        with pytest.raises(hpnb.RankError) as told:
            pools[4].run(train, changed(**{"folder": tmp_path, **changes}), None, [NoStep()])
        return told.value.summary

    (tmp_path / "file").touch()
    assert "is a file, and a folder is to be written" in refused(folder=tmp_path / "file")

    def on_a_full_disk(file: RunFile) -> None:
        usage, shutil.disk_usage = shutil.disk_usage, lambda _: SimpleNamespace(free=40_000)
        try:
            train(file, None, [NoStep()])
        finally:
            shutil.disk_usage = usage

    with pytest.raises(hpnb.RankError, match=r"0.0 MB of free disk, and a checkpoint takes about 0.1 MB"):
        pools[4].run(on_a_full_disk, changed(folder=tmp_path))


@pytest.mark.slow  # test_checkpoint.py fills a disk too
def test_a_disk_that_fills_up_stops_the_run_or_is_a_warning(
    pools: RankPools, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is full for history.json and for checkpoints, from the first epoch to the end of the second."""

    def on_a_full_disk(file: RunFile) -> int:
        from hpnb.hybrid.checkpoint import atomic
        from hpnb.hybrid.training import hooks

        epochs, write_text, commit = [0], hooks.write_text, atomic.commit

        def check() -> None:
            if epochs[0] < 2:
                raise OSError(28, "No space left on device")

        class Count(Hook):
            priority = 200

            def after_epoch(self, trainer: Any) -> None:
                epochs[0] += 1

        def full_text(path: Path, text: str) -> None:
            check()
            write_text(path, text)

        def full_commit(*parts: Any) -> None:
            check()
            commit(*parts)

        hooks.write_text, atomic.commit = full_text, full_commit  # type: ignore[assignment]
        try:
            return train(file, None, [Count()]).step
        finally:
            hooks.write_text, atomic.commit = write_text, commit

    def file(name: str, **changes: Any) -> RunFile:
        return changed(folder=tmp_path / name, training__epochs=3, data__batch_size=4, **changes)

    for background in (False, True):
        name = f"warn-{background}"
        steps = pools[2].run(
            on_a_full_disk, file(name, checkpoint__on_error="warn", checkpoint__background=background)
        )
        assert steps == [9, 9]
        assert len(json.loads((tmp_path / name / "history.json").read_text())) == 3
        assert (tmp_path / name / "model" / "config.json").exists()
        assert "history.json could not be written: [Errno 28] No space left" in capfd.readouterr().out
    with pytest.raises(hpnb.RankError) as stopped:
        pools[2].run(on_a_full_disk, file("stop"))
    assert stopped.value.error == "OSError"
    said = stopped.value.summary
    assert f"{tmp_path / 'stop' / 'history.json'} could not be written: [Errno 28] No space left" in said
    assert "; its disk has" in said
    with pytest.raises(hpnb.RankError) as stopped:
        pools[2].run(on_a_full_disk, file("stop", checkpoint__every=2))
    assert stopped.value.error == "OSError"  # on both ranks: `main` prints it without tracebacks
    assert f"{tmp_path / 'stop' / 'step-00000002'} could not be written: " in stopped.value.summary


def test_a_disk_that_is_full_before_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"run could not be written: .*No space left on device; its disk has"):
        FolderLock(tmp_path / "run")._acquire()


def test_two_runs_do_not_train_in_one_folder(pools: RankPools, tmp_path: Path) -> None:
    """Somebody else holds the folder of the first; the second takes it from its first line to its last."""
    (tmp_path / LOCK).write_text("node7:42:1")
    with (tmp_path / LOCK).open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(hpnb.RankError, match=r"another run trains in .* \(process 42 on node7\); give"):
            pools[4].run(train, changed(folder=tmp_path))

    def is_locked() -> bool:
        try:
            with (tmp_path / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:  # the first rank, which holds it, may have ended before this one looks
            return False
        return False

    class Look(Hook):
        def before_fit(self, trainer: Any) -> None:
            seen.append(is_locked())

        def after_evaluate(self, trainer: Any) -> None:
            seen.append(is_locked())

    seen: list[bool] = []

    def looks() -> list[bool]:
        train(changed(folder=tmp_path, training__epochs=1), None, [Look()])
        return [*seen, is_locked()]

    def slowly() -> list[bool]:
        found = looks()
        torch.distributed.barrier()
        return found

    assert pools[4].run(slowly)[0] == [True, True, True, False]


def test_hosts_that_do_not_share_the_folder_are_told(four: hpnb.Ranks, tmp_path: Path) -> None:
    quick = {"training__epochs": 1, "data__rows": 8}

    def apart(tables: Tables) -> None:
        tables["checkpoint"]["dir"] += f"/{hpnb.rank()}"
        train(parse(tables))

    run(four, changed(folder=tmp_path / "0", **quick))
    with pytest.raises(hpnb.RankError) as told:
        four.run(apart, tables(tmp_path, **quick))
    assert "rank 0 sees step-00000001 as the newest checkpoint, and rank 1 none" in told.value.summary


def texts(folder: Path) -> Path:
    path = folder / "own.txt"
    path.write_text("\n\n".join(f"Sentence {i} says that {i} and {i} are {2 * i}." for i in range(999)))
    return path


def test_texts(four: hpnb.Ranks, tmp_path: Path) -> None:
    own = texts(tmp_path)
    base = tables(tmp_path / "text", training__epochs=1, training__learning_rate=1e-2)
    base["model"] = {"family": "gpt2", "size": dict(GPT2)}
    base["data"] = {"name": "text", "folder": str(own), "batch_size": 4, "rows": 32}
    base["layout"] = {"pp_size": 2, "zero_stage": 1}
    found = run(four, parse(base))
    assert {"loss", "tokens_per_second", "eval_loss"} <= set(found.history[0])
    assert "accuracy" not in found.history[0]
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "text" / "model")
    assert model.config.vocab_size == 300
    assert (tmp_path / "text" / "model" / "tokenizer_config.json").exists()

    # What it leaves can be taken up as a pretrained model, for another task.
    pairs = copy.deepcopy(base)
    pairs["model"] = {"family": "gpt2", "pretrained": str(tmp_path / "text" / "model")}
    pairs["data"] = {"name": "mrpc", "kind": "generated", "batch_size": 4, "rows": 32}
    pairs["checkpoint"] = {"dir": str(tmp_path / "pairs")}
    found = run(four, parse(pairs))
    assert {"accuracy", "f1", "eval_f1"} <= set(found.history[0])


def test_the_examples_run(four: hpnb.Ranks, tmp_path: Path) -> None:
    quick = ["training.steps=2", "training.warmup_steps=1", "data.rows=16", "data.batch_size=2"]
    for name, layout in (
        ("vit", {"layout.tp_size": 2, "layout.pp_size": 2}),
        ("gpt2", {"layout.pp_size": 2}),
    ):
        path = ROOT / "examples" / f"{name}.toml"
        own = [f'checkpoint.dir="{tmp_path / name}"']
        own += ["data.kind=generated"] if name == "vit" else [f'data.folder="{texts(tmp_path)}"']
        own += [f"{key}={value}" for key, value in layout.items()]
        lines = [line for line in path.read_text().splitlines() if not line.startswith("epochs")]
        copied = tmp_path / path.name
        copied.write_text("\n".join(lines))
        assert run(four, load(copied, [*quick, *own])).step == 2
        load(path)


def test_a_model_of_ones_own_is_the_same_in_every_layout(four: hpnb.Ranks) -> None:
    """With its page of roles, and an nn.Sequential with none."""
    spec = importlib.util.spec_from_file_location("own_model", ROOT / "examples" / "own_model.py")
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, 12, generator=generator)
    samples = [{"x": one, "labels": one.mean(0)[:5].argmax()} for one in x]
    ways = {
        "Net": (own.Net, [{"zero_stage": 3}, {"pp_size": 4}, {"tp_size": 2, "pp_size": 2, "zero_stage": 1}]),
        "Sequential": (own.plain, [{"zero_stage": 2}, {"pp_size": 2}]),
    }
    for make, layouts in ways.values():
        first, last = four.run(own.train, make, {}, samples)[-1]
        assert last < 0.95 * first
        for layout in layouts:
            assert four.run(own.train, make, layout, samples)[-1] == pytest.approx([first, last], abs=2e-4)


# --- the command --------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_a_second_command_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    path = str(written(tmp_path, training__epochs=500))
    history = tmp_path / "run" / "history.json"
    before = signal.getsignal(number)

    def interrupt() -> None:
        while not history.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    code = main(["train", path, "--ranks", "2", "--set", "checkpoint.every=1000"])
    assert code == {signal.SIGINT: train_main.INTERRUPTED, signal.SIGTERM: train_main.TERMINATED}[number]
    assert signal.getsignal(number) is before
    said = capfd.readouterr()
    assert "the next one or this evaluation, with a checkpoint" in said.err
    (saved,) = resuming.saved(tmp_path / "run")
    step = resuming.step_of(saved)
    assert f"stopped after {step} of 3000 steps" in said.out

    epochs = -(-step // 6)
    assert main(["train", path, "--ranks", "2", "--set", f"training.epochs={epochs}"]) == 0
    said = capfd.readouterr()
    assert f"goes on from {saved}, after {step} of {6 * epochs} steps" in said.out
    assert "final evaluation" in said.out


def test_a_signal_says_whether_the_steps_have_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with train_main._stop_on_signal(tmp_path / "stop") as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert "stops after the first step, with a checkpoint" in capsys.readouterr().err
        on_a_rank = threading.Thread(
            target=StopHook(None, flag=stop.flag).before_fit, args=(SimpleNamespace(),)
        )  # in a thread a hook leaves the handlers of this process alone
        on_a_rank.start()
        on_a_rank.join()
        os.kill(os.getpid(), signal.SIGTERM)
        assert "the next one or this evaluation, with a checkpoint" in capsys.readouterr().err


def test_what_a_rank_refuses_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, model__pretrained=str(tmp_path)))
    assert main(["train", path, "--ranks", "1"]) == train_main.FAILED
    (sentence,) = capfd.readouterr().err.splitlines()
    assert sentence.startswith(f"hpnb train: {tmp_path} is a folder without a whole model in it")


def test_a_folder_without_the_data_is_called_as_the_file_calls_it(pools: RankPools, tmp_path: Path) -> None:
    file = changed(data__kind="real", data__folder=str(tmp_path), checkpoint__dir=str(tmp_path / "run"))
    with pytest.raises(hpnb.RankError) as raised:
        pools[1].run(train, file)
    assert f"[data] folder = {str(tmp_path)!r} has no Beans" in str(raised.value)


def start_torchrun_of_two(path: Path, setting: str, out: Path) -> BaseProcess:
    """`hpnb train path --set setting` under torchrun, with two ranks."""
    environ = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environ.update(CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return start_program(
        Path(__file__).with_name("forked_torchrun.py"), "--standalone", "--nproc-per-node", "2",
        str(ROOT / "hpnb" / "__main__.py"), "train", str(path), "--set", setting,
        folder=path.parent, environ=environ, out=out, errors=out,
    )  # fmt: skip


def test_under_torchrun_a_refusal_is_said_once_and_at_the_end(tmp_path: Path) -> None:
    path = written(tmp_path, training__epochs=1)
    ended = start_torchrun_of_two(path, "layout.tp_mode=5d", tmp_path / "out")
    ended.join(200)
    lines = (tmp_path / "out").read_text().splitlines()
    said = [i for i, line in enumerate(lines) if "hpnb train: " in line and "tp_mode" in line]
    assert ended.exitcode == 1
    assert sum(lines[i].startswith("hpnb train:") for i in said) == 1
    assert len(lines) - said[-1] < 8, "the last lines of the log have it too"


@pytest.mark.slow  # a refusal under torchrun is above
@pytest.mark.sampled(1)  # without torchrun both are tested above, and torchrun passes on either
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_under_torchrun_it_is_one_of_the_ranks_and_a_signal_saves(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = written(tmp_path, training__epochs=5000)
    out = tmp_path / "out"
    torchrun = start_torchrun_of_two(path, "layout.tp_size=2", out)
    assert torchrun.pid is not None
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "history.json").exists() and time.monotonic() < deadline:
            assert torchrun.exitcode is None, out.read_text()
            time.sleep(0.1)
        os.kill(torchrun.pid, number)
        torchrun.join(60)
    finally:
        torchrun.kill()
    said = out.read_text()
    newest = resuming.find(tmp_path / "run")
    assert newest is not None
    assert f"stopped after {resuming.step_of(newest)} of 60000 steps" in said
