"""Foreign files, two runs in one folder, files that vanish: nothing is lost, and no checkpoint runs code."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import re
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from preloaded_python import Program
from safetensors.torch import load_file, save_file
from torch import nn

import hpnb
from hpnb.hybrid.checkpoint import (
    atomic,
    checkpoint,
    gather_weights,
    manifest,
    optimizer_shards,
    run_lock,
    state_files,
)
from hpnb.hybrid.checkpoint.write_files import write_bytes, write_safetensors
from hpnb.hybrid.training import hooks, resuming
from hpnb.placement import Cut, Placement, set_placement

pytestmark = pytest.mark.usefixtures("launches_on_a_pool")


@pytest.fixture(scope="module")
def two() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(2, device="cpu", timeout=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one() -> Iterator[hpnb.Ranks]:
    with hpnb.Ranks(1, device="cpu", timeout=60) as ranks:
        yield ranks


def boosted(kind: Any = torch.optim.SGD, zero_stage: int = 0) -> tuple[hpnb.Booster, Any, Any]:
    """A small model after one step, so that its optimizer has state."""
    booster = hpnb.Booster(plugin=hpnb.HybridParallelPlugin(precision="fp32", zero_stage=zero_stage))
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model, optimizer, *_ = booster.boost(net, kind(net.parameters(), lr=0.1, **momentum))
    inputs = torch.ones(2, 4), torch.tensor([0, 1])

    def loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, inputs[1])

    booster.execute_pipeline(iter([inputs]), model, loss, optimizer)
    optimizer.step()
    return booster, model, optimizer


def error_of(work: Any, *args: Any, **kwargs: Any) -> str:
    try:
        work(*args, **kwargs)
    except (ValueError, OSError, RuntimeError) as error:
        return str(error)
    return "no error"


# --- nothing foreign is run --------------------------------------------------------------------------------


class Payload:
    """Unpickled by the plain unpickler it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path, at: Path) -> list[str]:
    """What a load says when some file in turn is a pickle with a payload, and its checksums agree."""
    booster, model, optimizer = boosted()
    booster.save(folder, model, optimizer, extra={"step": 1})
    payload = pickle.dumps(Payload(at), protocol=2)
    errors = []
    for place in ("state/.metadata", "state/index.json", "a value", "state/rank-00000.safetensors"):
        copy = folder.with_name("hostile")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        if place == "a value":
            file = copy / "state" / "rank-00000.safetensors"
            tensors = load_file(file)
            tensors["extra"] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            save_file(tensors, file)
        else:
            (copy / place).write_bytes(payload)
        files = [file for file in copy.rglob("*") if file.is_file() and file.name != manifest.MANIFEST]
        sums = {file.relative_to(copy).as_posix(): manifest.file_sum(file) for file in files}
        manifest.seal(copy, sums, {"order": 1})
        errors.append(error_of(booster.load, copy, model, optimizer))
    (folder.with_name("optimizer.bin")).write_bytes(payload)
    errors.append(error_of(booster.load_optimizer, optimizer, folder.with_name("optimizer.bin")))
    (folder.with_name("weights.bin")).write_bytes(payload)
    errors.append(error_of(booster.load_model, model, folder.with_name("weights.bin")))
    return errors


def test_no_file_of_a_checkpoint_runs_code(one: hpnb.Ranks, tmp_path: Path) -> None:
    errors = one.run(hostile, tmp_path / "run", tmp_path / "made")[0]
    assert not (tmp_path / "made").exists()
    assert errors[0] == "no error"  # nobody reads that file
    assert all("is no index" in text or "cannot be read" in text for text in errors[1:4]), errors
    assert all("no error" not in text for text in errors[1:]), errors
    pickle.loads(pickle.dumps(Payload(tmp_path / "made")))
    assert (tmp_path / "made").exists()  # the payload works


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../model/model.safetensors"}, {"file": "/etc/passwd"}, {"offsets": [0, -1]},
        {"sizes": [3, 10**9]}, {"shape": [True, 4]}, {"dtype": "load"}, {"chunks": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_index_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    chunk = {"file": "rank-00000.safetensors", "offsets": [0, 0], "sizes": [3, 4]}
    entry: dict[str, Any] = {"shape": [3, 4], "dtype": "float32", "chunks": [chunk]}
    (chunk if change.keys() & chunk.keys() else entry).update(change)
    if entry["chunks"]:
        entry["chunks"] = [list(chunk.values())]
    (tmp_path / "index.json").write_text(json.dumps({"tensors": {"w": entry}, "values": {}}))
    with pytest.raises(ValueError, match="is no index of a state"):
        state_files.StateReader(tmp_path)


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    file = "rank-00000.safetensors"
    for starts, fits in (((0, 2), True), ((0, 1), False), ((0, 0), False)):
        chunks = [[file, [start, 0], [2, 4]] for start in starts]
        entry = {"shape": [4, 4], "dtype": "float32", "chunks": chunks}
        (tmp_path / "index.json").write_text(json.dumps({"tensors": {"w": entry}, "values": {}}))
        if fits:
            assert state_files.StateReader(tmp_path).shapes == {"w": (4, 4)}
        else:  # elements that no chunk has would be whatever was in memory
            with pytest.raises(ValueError, match=r"do not fill \(4, 4\)"):
                state_files.StateReader(tmp_path)


@pytest.mark.parametrize("name", ["../../victim", "/etc/hostname", "a/../../victim", ""])
@pytest.mark.parametrize("where", ["files", "stale"])
def test_a_save_touches_nothing_outside_of_its_folder(where: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    target = tmp_path / "downloaded"
    draft = atomic.draft_in(target, "model")
    draft.mkdir(parents=True)
    (draft / "x").write_bytes(b"x")
    sums = {"x": (1, 1), **({name: (1, 1)} if where == "files" else {})}
    stale = [name] if where == "stale" else []
    manifest.seal(draft, sums, {"order": 0, "stale": stale, "keeps_manifest": False})
    with pytest.raises(ValueError, match="is not a file in its folder"):
        atomic.begin_update(target, "model")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_checkpoint_without_its_manifest_is_skipped_with_a_warning(tmp_path: Path) -> None:
    for step in (1, 2):
        sealed(tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / "state").mkdir()
    (tmp_path / "step-2" / manifest.MANIFEST).unlink()
    for find in (manifest.newest, resuming.find):
        with pytest.warns(UserWarning, match=r"step-2 is skipped, because it has no manifest.json"):
            assert find(tmp_path) == tmp_path / "step-1"


# --- what is written ---------------------------------------------------------------------------------------


def test_a_safetensors_file_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5), "number": torch.tensor(3.0, dtype=torch.float64),
        "view": torch.ones(2, 2, dtype=torch.bfloat16)[:, :1], "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]), "bytes": torch.frombuffer(bytearray(b"abc"), dtype=torch.uint8),
    }  # fmt: skip
    file = tmp_path / "ours.safetensors"
    assert write_safetensors(file, tensors, {"format": "pt"}) == manifest.file_sum(file)
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with pytest.raises(ValueError, match=r"odd has torch\.complex128, which safetensors cannot store"):
        write_safetensors(tmp_path / "odd", {"odd": torch.zeros(1, dtype=torch.complex128)})


def vanishing(folder: Path) -> tuple[list[str], list[str], Any]:
    """A file vanishes, or is replaced, after it was written and before the save ends."""
    booster, model, optimizer = boosted(zero_stage=1)
    booster.save(folder / "step-1", model, optimizer, extra={"step": 1}, keep=1)
    write, errors = checkpoint.write_state, []

    def then(change: Any) -> Any:
        def work(*args: Any) -> Any:
            written = write(*args)
            if hpnb.rank() == 0:
                change(folder / "step-2.part" / "model" / "model.safetensors")
            return written

        return work

    for change in (Path.unlink, lambda file: file.write_bytes(file.read_bytes()[::-1])):
        checkpoint.write_state = then(change)
        try:
            errors.append(error_of(booster.save, folder / "step-2", model, optimizer, extra=2, keep=1))
        finally:
            checkpoint.write_state = write
    return errors, sorted(os.listdir(folder)), booster.load(folder, model, optimizer)


def test_a_file_that_vanishes_during_a_save_fails_the_save(two: hpnb.Ranks, tmp_path: Path) -> None:
    for errors, left, extra in two.run(vanishing, tmp_path):
        assert "lacks model/model.safetensors, which was written there; the save is given up" in errors[0]
        assert "has other contents than were written" in errors[1]
        assert "step-1" in left
        assert extra == {"step": 1}
    assert os.listdir(tmp_path) == ["step-1"]


def fails_on_one_rank(folder: Path, place: str) -> tuple[list[str], list[str]]:
    """What a save says on this rank where one rank fails, and another save after it; and what is there."""
    booster, model, optimizer = boosted(torch.optim.Adam, zero_stage=3)
    rank = hpnb.rank()

    class State:
        def state_dict(self) -> dict[str, Any]:
            if place == "scheduler" and rank == 1:
                raise RuntimeError("no state")
            return {"value": object() if place == "value" and rank == 1 else 1}

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("no memory")

    def first_is_too_large(*shape: Any, **how: Any) -> torch.Tensor:
        gather_weights.torch = torch
        return no_memory()

    weight_shards, errors = checkpoint.weight_shards, []
    if place == "weights" and rank == 1:
        checkpoint.weight_shards = no_memory  # type: ignore[assignment]
    if place == "memory" and rank == 0:
        gather_weights.torch = SimpleNamespace(**{**vars(torch), "empty": first_is_too_large})
    try:
        errors.append(error_of(booster.save, folder / "step-1", model, optimizer, State()))
    finally:
        checkpoint.weight_shards, gather_weights.torch = weight_shards, torch
    place = ""
    errors.append(error_of(booster.save, folder / "step-2", model, optimizer, State()))
    return errors, sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("place", "said"),
    [("weights", "no memory"), ("memory", "no memory"), ("scheduler", "no state"), ("value", "holds a ob")],
)
def test_an_error_on_one_rank_fails_the_save_on_all(
    two: hpnb.Ranks, tmp_path: Path, place: str, said: str
) -> None:
    """None of them waits for the rank that failed, and the next save is sound."""
    for errors, there in two.run(fails_on_one_rank, tmp_path, place):
        assert said in errors[0]
        assert (errors[1], there) == ("no error", ["step-2"])


# --- which checkpoint is the newest ------------------------------------------------------------------------


def sealed(folder: Path, keep: int | None = None) -> None:
    """A checkpoint of one file."""
    part = atomic.begin(folder)
    files = {"x": write_bytes(part / "x", folder.name.encode())}
    atomic.commit(folder, files, {}, keep)


def test_the_newest_follows_from_the_order_of_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = __import__("time").time
    for step in range(1, 7):
        if step == 4:
            monkeypatch.setattr("time.time", lambda: now() - 3600)
            monkeypatch.setattr("time.time_ns", lambda: int((now() - 3600) * 1e9))
        sealed(tmp_path / f"step-{step}", keep=2)
        newest = manifest.newest(tmp_path)
        assert newest is not None
        assert newest.name == f"step-{step}"
    assert sorted(os.listdir(tmp_path)) == ["step-5", "step-6"]


def test_a_flipped_bit_in_a_manifest_is_noticed(tmp_path: Path) -> None:
    for step in (1, 2):
        sealed(tmp_path / f"step-{step}")
    file = tmp_path / "step-2" / manifest.MANIFEST
    sound, content = file.read_bytes(), manifest.manifest(tmp_path / "step-2")
    draw, refused = random.Random(0), 0
    for _ in range(400):
        damaged = bytearray(sound)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        try:
            assert manifest.manifest(tmp_path / "step-2") == content  # a space that became another one
        except ValueError as error:
            refused += 1
            assert "step-2" in str(error)  # noqa: PT017
            with pytest.raises(ValueError, match=r"cannot be said: .*step-2.*step-1 is another one"):
                manifest.find(tmp_path)
    assert refused > 350


def test_a_run_resumes_from_an_older_checkpoint_with_a_warning_only(tmp_path: Path) -> None:
    for step in (8, 16):
        sealed(tmp_path / f"step-{step}")
    (tmp_path / "step-16" / manifest.MANIFEST).write_text("{}")
    with pytest.warns(UserWarning, match="does not resume from step-16"):
        assert resuming.find(tmp_path) == tmp_path / "step-8"


def test_folders_of_other_names_are_skipped_when_a_run_resumes(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        sealed(tmp_path / f"step-{step}")
    for name in ("step-12-copy", "step-backup", "step-", "step-99.bak"):
        shutil.copytree(tmp_path / "step-4", tmp_path / name)
    os.rename(tmp_path / "step-12", tmp_path / "step-12.part")  # killed between two renames
    shutil.copytree(tmp_path / "step-8", tmp_path / "step-12.old")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [folder.name for folder in resuming.saved(tmp_path)] == ["step-4", "step-8", "step-12.part"]
        assert resuming.step_of(resuming.saved(tmp_path)[-1]) == 12
        assert resuming.find(tmp_path) == tmp_path / "step-12.part"


def test_a_save_that_was_killed_before_it_got_its_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a manifest and is complete; what follows gives it its name."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            sealed(tmp_path / "step-4")
    assert os.listdir(tmp_path) == ["step-4.part"]
    assert resuming.unfinished(tmp_path) is None
    for found in (resuming.find(tmp_path), manifest.find(tmp_path), manifest.find(tmp_path / "step-4")):
        assert found == tmp_path / "step-4.part"
    sealed(tmp_path / "step-8", keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-8"]
    assert manifest.newest(tmp_path) == tmp_path / "step-8"


class Killed(BaseException):
    """In place of SIGKILL: no handler of the code takes it."""


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Raise before that step of those that change folders, counted from 0."""
    steps = itertools.count()

    def dies(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if next(steps) == step:
                raise Killed
            return act(*args, **options)

        return run

    for module, name in ((os, "rename"), (shutil, "rmtree"), (atomic, "seal"), (atomic, "sync")):
        patch.setattr(module, name, dies(getattr(module, name)))


def test_a_save_that_is_killed_at_any_step_leaves_the_one_before_or_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the save that follows it, killed at the same or at any other step."""

    def save(path: Path, text: str, step: int) -> bool:
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            try:
                part = atomic.begin(path)
                atomic.commit(path, {"x": write_bytes(part / "x", text.encode())}, {})
            except Killed:
                return False
        return True

    ended = set()
    for first, second in itertools.product(range(9), repeat=2):
        path = tmp_path / f"{first}-{second}" / "last"
        assert save(path, "old", -1)
        for step, texts in ((first, {"old", "new"}), (second, {"old", "new", "newer"})):
            text = "new" if step == first and len(texts) == 2 else "newer"
            if save(path, text, step):
                ended.add(step)
                texts = {text}
            found = manifest.standing(path)
            assert manifest.is_complete(found), (first, second, step)
            assert (found / "x").read_text() in texts
        assert save(path, "last", -1)
        assert os.listdir(path.parent) == ["last"]
        assert (path / "x").read_text() == "last"
    assert {8} <= ended  # all steps of a save were among them
    assert 0 not in ended


# --- two runs in one folder --------------------------------------------------------------------------------

OTHER_RUN = """
    import sys, time
    from pathlib import Path
    from hpnb.hybrid.checkpoint import atomic
    from hpnb.hybrid.checkpoint.write_files import write_bytes
    folder = Path(sys.argv[1])
    for name in ("step-1", "step-2"):
        part = atomic.begin(folder / name)
        atomic.commit(folder / name, {"x": write_bytes(part / "x", b"other")}, {})
    atomic.begin(folder / "step-3")
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Another process, which has saved step-1 and step-2 and is writing step-3."""
    script = tmp_path_factory.mktemp("other") / "program.py"
    script.write_text(textwrap.dedent(OTHER_RUN))
    other = Program(script, str(tmp_path))
    assert other.stdout.readline() == "ready\n"
    yield other
    other.kill()
    other.wait()


def test_a_living_run_keeps_its_checkpoints(other_run: Program, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step-2 was saved by another run that is still alive"):
        atomic.begin(tmp_path / "step-2")
    with pytest.raises(ValueError, match=r"another process is writing .*step-3.part"):
        atomic.begin(tmp_path / "step-3")
    sealed(tmp_path / "step-4", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3.part", "step-4"]


def test_what_a_dead_run_has_left_is_taken_over(other_run: Program, tmp_path: Path) -> None:
    other_run.kill()
    other_run.wait()
    sealed(tmp_path / "step-2")
    sealed(tmp_path / "step-3", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step-3"]
    assert (tmp_path / "step-3" / "x").read_text() == "step-3"


# --- a folder with other files -----------------------------------------------------------------------------


def among_others(folder: Path) -> list[str]:
    """Somebody else writes a log while a model is put in place."""
    booster, model, optimizer = boosted()
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("mine")
    link = os.link

    def and_a_log(source: Any, target: Any, **how: Any) -> None:
        (folder / f"log-{len(os.listdir(folder))}").write_text("written meanwhile")
        link(source, target, **how)

    os.link = and_a_log
    try:
        booster.save_model(model, folder)
        booster.save_optimizer(optimizer, folder)
    finally:
        os.link = link
    return sorted(os.listdir(folder))


def test_a_save_into_a_folder_replaces_its_own_files_alone(one: hpnb.Ranks, tmp_path: Path) -> None:
    left = one.run(among_others, tmp_path / "out")[0]
    logs = [name for name in left if name.startswith("log-")]
    assert len(logs) >= 2
    assert sorted(set(left) - set(logs)) == ["manifest.json", "model.safetensors", "notes.txt", "state"]


# --- optimizers --------------------------------------------------------------------------------------------


def other_kind(folder: Path, saved: Any, loaded: Any) -> str:
    booster, model, optimizer = boosted(saved)
    booster.save(folder, model, optimizer)
    booster, model, optimizer = boosted(loaded)
    return error_of(booster.load, folder, model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded", "fits"),
    [
        ("AdamW", "AdamW", True), ("HybridAdam", "AdamW", True), ("AdamW", "HybridAdam", True),
        ("AdamW", "Adam", False), ("Adam", "Adamax", False), ("NAdam", "AdamW", False),
        ("SGD", "AdamW", False),
    ],
)  # fmt: skip
def test_the_state_of_another_optimizer_is_refused(
    one: hpnb.Ranks, saved: str, loaded: str, fits: bool, tmp_path: Path
) -> None:
    kinds = {"HybridAdam": hpnb.HybridAdam}
    made = [kinds.get(name) or getattr(torch.optim, name) for name in (saved, loaded)]
    error = one.run(other_kind, tmp_path / "run", *made)[0]
    assert (error == "no error") is fits, error
    if not fits:
        assert saved in error
        assert loaded in error


# --- known before the first step ---------------------------------------------------------------------------


def other_schedule(folder: Path) -> tuple[str, bool]:
    """What a load into a schedule of two parts says of one that was saved with three, and whether model,
    optimizer and schedule are as before then."""
    schedulers = torch.optim.lr_scheduler

    def schedule(optimizer: Any, parts: int) -> Any:
        every = [schedulers.ConstantLR(optimizer, 1 / (2 + part)) for part in range(parts)]
        return schedulers.SequentialLR(optimizer, every, milestones=[*range(1, parts)])

    booster, model, optimizer = boosted()
    booster.save(folder, model, optimizer, schedule(optimizer, 3))
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(1)
    two = schedule(optimizer, 2)

    def state() -> str:
        return str((model.state_dict(), optimizer.state_dict(), two.state_dict()))

    before = state()
    return error_of(booster.load, folder, model, optimizer, two), state() == before


def test_a_schedule_that_does_not_fit_is_refused_before_anything_is_loaded(
    one: hpnb.Ranks, tmp_path: Path
) -> None:
    ((said, as_before),) = one.run(other_schedule, tmp_path / "run")
    assert "this SequentialLR does not take the state that was saved (IndexError: " in said
    assert as_before


def test_parameters_and_shards_are_compared_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 parameters in one group, and of a weight in the shards of 300 ranks."""
    count, looks = 300, [0]

    class Numbers(list[int]):
        def __iter__(self) -> Iterator[int]:
            looks[0] += 1
            return super().__iter__()

        def __contains__(self, number: object) -> bool:
            looks[0] += 1
            return super().__contains__(number)

    parameters = {number: nn.Parameter(torch.zeros(1)) for number in range(count)}
    names = {number: (f"{number}.weight", (1,)) for number in range(count)}
    for number, p in parameters.items():
        set_placement(p, Placement(*names[number]))
    optimizer = torch.optim.SGD(parameters.values())
    loader = optimizer_shards.OptimizerLoader.__new__(optimizer_shards.OptimizerLoader)
    loader._boosted = SimpleNamespace(  # type: ignore[assignment]
        numbering=[Numbers(range(count))], parameters=parameters, user_optimizer=optimizer, inner=optimizer
    )
    group = {"options": {}, "numbers": Numbers(range(count))}
    saved = {"kind": "SGD", "rule": "SGD", "groups": [group], "scaler": None}
    assert loader._check({"optimizer": saved, "names/0": names}) is saved
    assert looks[0] < 10

    def shards(rank: int) -> dict[str, Any]:
        placement = Placement("w", (count,), (Cut("dp", 0, ((rank, rank + 1),)),))
        return {"w": gather_weights.WeightShard(placement, "w", torch.float32, False, None)}

    def equal(a: Cut, b: object) -> bool:
        looks[0] += 1
        return isinstance(b, Cut) and a.ranges == b.ranges

    of_ranks = [shards(rank) for rank in range(count)] * 2  # each twice
    monkeypatch.setattr(gather_weights, "gather_objects", lambda *_: of_ranks)
    monkeypatch.setattr(Cut, "__eq__", equal)
    weights = gather_weights.exchange_shards({}, None)  # type: ignore[arg-type]
    assert [rank for rank, _ in weights["w"].shards] == [*range(count)]
    assert looks[0] < 3 * count


def fit_into(folder: Path) -> tuple[str, int]:
    """What a fit says whose checkpoints cannot be written, and after how many steps."""
    booster, model, optimizer = boosted()
    inputs = torch.ones(2, 4), torch.tensor([0, 1])

    def loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, inputs[1])

    trainer = hpnb.Trainer(booster, model, optimizer, loss, hooks=[hooks.CheckpointHook(folder)])
    return error_of(trainer.fit, [inputs, inputs], 1), trainer.step


def test_a_folder_that_cannot_be_written_is_known_before_the_first_step(
    two: hpnb.Ranks, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    for error, steps in two.run(fit_into, tmp_path / "file" / "run"):
        assert "file is a file, and a folder is to be written" in error
        assert steps == 0


def run_name() -> str:
    return run_lock.run_name()


def test_pools_of_one_program_are_one_run(one: hpnb.Ranks, two: hpnb.Ranks) -> None:
    assert {*one.run(run_name), *two.run(run_name)} == {run_lock.run_name()}


@pytest.mark.parametrize("updates", [False, True])
def test_a_folder_whose_removal_is_killed_does_not_look_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: bool
) -> None:
    """What is removed at the end of a save still has its manifest; the kernel may take any file first."""

    def killed_in_the_middle(folder: Path, **_: object) -> None:
        (Path(folder) / "x").unlink()

    target = tmp_path / "model"
    draft = atomic.begin_update(target, "model") if updates else atomic.begin(target)
    files = {"x": write_bytes(draft / "x", b"weights")}
    if updates:
        with monkeypatch.context() as patch:
            patch.setattr(atomic.shutil, "rmtree", killed_in_the_middle)
            atomic.commit_update(target, "model", files, {}, lambda name: False)
        assert atomic.reading_folder(target, "model") == target
    else:
        atomic.commit(target, files, {})
        with monkeypatch.context() as patch:
            patch.setattr(atomic.shutil, "rmtree", killed_in_the_middle)
            atomic.remove(target)
        assert manifest.complete_in(tmp_path) == []


# --- saves in the background, of several Boosters ----------------------------------------------------------


def two_boosters(folder: Path) -> tuple[list[str], bool]:
    """One saves in the background while another one saves and loads: their messages must not meet."""
    (b, m, o), (c, m2, o2) = boosted(), boosted()
    for i in range(3):
        b.save(folder / f"a-{i}", m, o, extra=i, background=True)
        c.save(folder / f"b-{i}", m2, o2, background=True)
        b.save_model(m, folder / "model")
        b.save(folder / f"c-{i}", m, o, background=True)
        c.save_lr_scheduler(torch.optim.lr_scheduler.ExponentialLR(o2, 0.9), folder / "schedule")
        b.save(folder / f"d-{i}", m, o, background=True)
        c.load(folder / f"a-{i}", m2, o2)
    b.wait()
    c.wait()
    return sorted(path.name for path in folder.iterdir()), c.load(folder / "a-1", m2) == 1


def test_a_save_in_the_background_does_not_meet_those_of_another_booster(tmp_path: Path) -> None:
    for names, same in hpnb.launch(two_boosters, tmp_path, ranks=2, device="cpu", timeout=60):
        assert same
        assert names == sorted(["model", "schedule", *(f"{kind}-{i}" for kind in "abcd" for i in range(3))])


def save_and_leave(folder: Path, fails: bool) -> None:
    booster, model, optimizer = boosted()
    if fails:
        atomic.seal = None  # type: ignore[assignment]
    booster.save(folder, model, optimizer, extra="all of it", background=True)


def test_a_save_that_nobody_waits_for_is_finished_or_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hpnb.launch(save_and_leave, tmp_path / "only-1", False, ranks=2, device="cpu", timeout=60)
    assert os.listdir(tmp_path) == ["only-1"]
    assert manifest.is_complete(tmp_path / "only-1")
    hpnb.launch(save_and_leave, tmp_path / "other-1", True, ranks=2, device="cpu", timeout=60)
    assert f"the save of {tmp_path / 'other-1'} in the background failed" in "".join(capfd.readouterr())


def test_what_an_unfinished_save_has_left_is_named(tmp_path: Path) -> None:
    atomic.begin(tmp_path / "run" / "step-1")
    for path in (tmp_path / "run" / "step-1", tmp_path / "run"):
        with pytest.raises(FileNotFoundError, match=r"step-1\.part is from a save that did not finish"):
            manifest.find(path)


def test_a_folder_without_a_number_is_of_no_series(tmp_path: Path) -> None:
    for name in ("vit", "vit1", "vit2"):
        sealed(tmp_path / name, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["vit", "vit2"]
    sealed(tmp_path / "vit", keep=1)
    assert sorted(os.listdir(tmp_path)) == ["vit", "vit2"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"f": lambda: 1}, "extra holds a function, <lambda> at ['f'], which is not safe"),
        ({"x": [np.zeros((2, 3))]}, "a numpy array (2, 3) at ['x'][0], which"),
        ({"x": np.float64(2.0)}, "a number of numpy at ['x'], which"),
        (Path("x"), "extra holds a PosixPath, which"),
    ],
)
def test_what_cannot_be_packed_is_named_with_its_place(extra: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        state_files.pack("extra", extra)
