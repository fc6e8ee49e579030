"""Damages every file of a checkpoint in every way, and says what loading it does.

flip, truncate, remove, empty, swap    what disks and people do; the checksums stay as they were
hostile                                what somebody else may have written, with checksums that agree
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hpnb
from hpnb.hybrid.boosted_optimizer import boosted_optimizer
from hpnb.hybrid.checkpoint import manifest
from hpnb.hybrid.checkpoint.optimizer_shards import _local_states
from hpnb.hybrid.training import resuming

Outcome = tuple[str, str, float, str]  # (kind, outcome, seconds, what happened)
STEPS = (1, 2)
AnotherRank = RuntimeError  # what a rank raises if another one cannot go on


class Payload:
    """Unpickled by the plain unpickler it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


# --- a run with two checkpoints ----------------------------------------------------------------------------


class Run:
    """A model and an optimizer whose values follow from a step."""

    def __init__(self, zero_stage: int = 0, pp: int = 1, model: str = "sequential") -> None:
        torch.set_num_threads(1)
        plugin = hpnb.HybridParallelPlugin(precision="fp32", zero_stage=zero_stage, pp_size=pp)
        self.booster = hpnb.Booster(plugin=plugin)
        torch.manual_seed(0)
        net: Any
        if model == "vit":
            size = hpnb.models.ViTSize(hidden=8, layers=2, heads=2, mlp=16, patch=8, image=16)
            net = hpnb.models.vit(size, classes=3)
        else:
            net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3))
        adam = torch.optim.AdamW(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
        boosted = self.booster.boost(net, adam, None, None, schedule)
        self.model, self.optimizer, _, _, self.schedule = boosted
        self.is_vit = model == "vit"
        self.known: dict[int, list[torch.Tensor]] = {}

    def train(self) -> None:
        """One step, on other samples each time."""
        inputs: Any = torch.randn(8, 4), torch.randint(0, 3, (8,))
        if self.is_vit:
            inputs = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": inputs[1]}

        def loss(outputs: Any, inputs: Any) -> Any:
            return outputs.loss if self.is_vit else nn.functional.cross_entropy(outputs, inputs[1])

        self.booster.execute_pipeline(iter([inputs]), self.model, loss, self.optimizer)
        self.optimizer.step()
        self.schedule.step()

    def values(self) -> list[torch.Tensor]:
        """Everything that a checkpoint holds of this rank, as copies."""
        found = [*self.model.module.parameters(), *self.model.module.buffers()]
        inner, by_name = _local_states(boosted_optimizer(self.optimizer))
        states = [inner.state.get(t, {}) for t, _ in by_name.values()]
        found += [state[key] for state in states for key in sorted(state)]
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        numbers = torch.tensor([*rates, float(self.schedule.last_epoch)], dtype=torch.float64)
        copies = [torch.as_tensor(value).detach().clone() for value in found]
        return [*copies, numbers, torch.get_rng_state()]

    def is_at(self, step: int, random: bool = True) -> bool:
        """Whether all is as it was at `step`, also where random generators stand."""
        now, then = self.values(), self.known[step]
        count = len(then) - (not random)
        return len(now) == len(then) and all(map(torch.equal, now[:count], then[:count]))

    def scramble(self) -> None:
        """What no checkpoint has."""
        with torch.no_grad():
            for p in self.model.module.parameters():
                p.fill_(-7.0)
        torch.manual_seed(12345)

    def save_all(self, folder: Path) -> None:
        for step in STEPS:
            self.train()
            self.known[step] = self.values()
            self.booster.save(
                folder / f"step-{step}", self.model, self.optimizer, self.schedule, extra={"step": step},
                size_per_shard=300,
            )  # fmt: skip

    def load(self, folder: Path) -> int:
        extra = self.booster.load(folder, self.model, self.optimizer, self.schedule)
        return int(extra["step"])


# --- damage ------------------------------------------------------------------------------------------------

Damage = tuple[str, Callable[[Path], None]]  # (kind, what it does to a copy of the checkpoint)


def files_in(folder: Path) -> list[str]:
    return sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file())


def damages(folder: Path, other: Path, draw: Random, flips: int) -> Iterator[Damage]:
    """What happens to files by accident."""
    for name in files_in(folder):
        size = (folder / name).stat().st_size
        for _ in range(flips):
            at, bit = draw.randrange(size), draw.randrange(8)
            yield "a flipped bit", _on(name, lambda old, at=at, bit=bit: _flip(old, at, bit))
        for end in {0, 1, size // 2, size - 1}:
            yield "truncated", _on(name, lambda old, end=end: old[:end])
        yield "longer", _on(name, lambda old: old + b"\0" * 8)
        yield "zeroed", _on(name, lambda old: bytes(len(old)))
        yield "removed", lambda at, name=name: (at / name).unlink()  # type: ignore[misc]
        yield "a folder instead", lambda at, name=name: _folder_at(at / name)  # type: ignore[misc]
        if (other / name).is_file():
            content = (other / name).read_bytes()
            yield "of another step", _on(name, lambda old, content=content: content)


def hostile(folder: Path, flag: Path, draw: Random, count: int) -> Iterator[Damage]:
    """What an attacker writes; the manifest is made to agree."""
    for name in files_in(folder):
        for protocol in (0, 2, 4):
            payload = pickle.dumps(Payload(flag), protocol=protocol)
            yield "a pickle with a payload", _sealed(name, lambda old, new=payload: new)
        zipped = _saved(Payload(flag))
        yield "a pickle with a payload", _sealed(name, lambda old, new=zipped: new)
        if name.endswith(".safetensors"):
            for length in (2**63, 2**64 - 1, 10**8 + 1, 2**20, 0):
                header = length.to_bytes(8, "little")
                yield "a huge header", _sealed(name, lambda old, header=header: header + old[8:])
            for change in _headers(draw, count):
                yield "a hostile header", _sealed(name, lambda old, change=change: _with_header(old, change))
            if name.startswith("state/"):
                for change in _entries(flag):
                    yield "a value with a payload", _in_state(name, change)
        if name.endswith(".json"):
            for text in _WRONG_JSON:
                yield "JSON of a wrong type", _sealed(name, lambda old, text=text: text)
            places = list(_places(json.loads((folder / name).read_text())))
            for place in draw.sample(places, min(count, len(places))):
                for value in draw.sample(_WRONG_VALUES, 6):
                    yield (
                        "a wrong value in JSON",
                        _sealed(name, lambda old, place=place, value=value: _changed(old, place, value)),
                    )
    for path in _PATHS:
        for name in [n for n in files_in(folder) if n.endswith("index.json")]:
            yield "a path out of the folder", _sealed(name, lambda old, path=path: _renamed(old, path))
        yield "a path out of the folder", lambda at, path=path: _listed(at, path)  # type: ignore[misc]


_PATHS = ("../../outside", "/etc/hostname", "..", "model/../../step-1/manifest.json", "a\0b", "x" * 5000)
_DEEP = b"[" * 100_000
_WRONG_JSON = [b"[]", b"{}", b"null", b"3", b'"text"', b"true", b"[1, 2]", b'{"a": ', b"\xff\xfe", _DEEP,
               b'{"a":' * 50_000, b"1" * 10_000, b"NaN", b""]  # fmt: skip
_WRONG_VALUES: list[Any] = [None, True, -1, 3.5, 10**30, "text", "", [], {}, [[]], [None], [-1],
                            ["x", 1, 2, 3], {"x": None}, "../../x", float("nan")]  # fmt: skip


def _on(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def work(at: Path) -> None:
        (at / name).write_bytes(change((at / name).read_bytes()))

    return work


def _sealed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change a file, and let the manifest agree; the manifest itself gets a right checksum if it can."""

    def work(at: Path) -> None:
        file = at / name
        new = change(file.read_bytes())
        if name == manifest.MANIFEST:
            try:
                content = json.loads(new)
                rest = {key: value for key, value in content.items() if key != "checksum"}
                content["checksum"] = manifest._checksum(rest)
                new = json.dumps(content).encode()
            except (ValueError, TypeError, AttributeError, RecursionError):
                pass
            file.write_bytes(new)
        else:
            file.write_bytes(new)
            reseal(at)

    return work


def reseal(at: Path, more: dict[str, Any] | None = None) -> None:
    content = manifest.manifest(at)
    facts = {key: value for key, value in content.items() if key not in ("kind", "version", "files")}
    names = [name for name in files_in(at) if name != manifest.MANIFEST]
    sums = {name: manifest.file_sum(at / name) for name in names}
    manifest.seal(at, {**sums, **(more or {})}, facts)


def _flip(old: bytes, at: int, bit: int) -> bytes:
    new = bytearray(old)
    new[at] ^= 1 << bit
    return bytes(new)


def _folder_at(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is something in JSON."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from _places(below, (*at, key))


def _changed(old: bytes, place: tuple[Any, ...], value: Any) -> bytes:
    content = json.loads(old)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(content).encode()


def _renamed(old: bytes, path: str) -> bytes:
    """An index whose first file is elsewhere."""
    content = json.loads(old)
    if "weight_map" in content:
        content["weight_map"][next(iter(content["weight_map"]))] = path
    else:
        entry = next(iter(content["tensors"].values()))
        entry["chunks"][0][0] = path
        content["values"][next(iter(content["values"]))] = path
    return json.dumps(content).encode()


def _listed(at: Path, path: str) -> None:
    """A manifest that lists a file elsewhere."""
    reseal(at, {path: (1, 1)})


def _headers(draw: Random, count: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    def at(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
        def change(header: dict[str, Any]) -> None:
            name = next(name for name in header if name != "__metadata__")
            header[name][key] = value

        return change

    for value in ([0, 2**62], [2**62, 2**63], [-8, 0], [8, 0], "x", None, [0]):
        yield at("data_offsets", value)
    for value in ([2**62], [2**32, 2**32], [-1], "x", None, [0] * 5):
        yield at("shape", value)
    for value in ("F99", None, 3, "F64"):
        yield at("dtype", value)
    yield lambda header: header.clear()
    yield lambda header: header.update({"__metadata__": {"hpnb.crc32": "[1, 2]"}})
    yield lambda header: header.update({"__metadata__": {"hpnb.crc32": "[" * 100_000}})
    yield lambda header: header.update({"__metadata__": {"hpnb.crc32": "no JSON"}})
    yield lambda header: header.update({"__metadata__": 3})


def _with_header(old: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(old[:8], "little")
    header = json.loads(old[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + old[8 + length :]


def _entries(flag: Path) -> Iterator[Any]:
    """What a value of a state may be instead of what was packed."""
    yield pickle.dumps(Payload(flag), protocol=2)
    yield _saved({"step": Payload(flag)})
    for value in (None, 3, "text", [], {}, {"rule": 3}, {"groups": None}, [None] * 4, torch.zeros(3),
                  {"kind": "ExponentialLR", "state": 3}, {"python": 1, "numpy": 2, "torch": 3}):  # fmt: skip
        yield _saved(value)


def _saved(value: Any) -> bytes:
    """By torch.save."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _in_state(name: str, content: bytes) -> Callable[[Path], None]:
    """Every value in turn would take long: all values of the file but `extra` become `content`."""

    def work(at: Path) -> None:
        tensors = load_file(at / name)
        values = json.loads((at / "state" / "index.json").read_text())["values"]
        inside = [key for key, file in values.items() if f"state/{file}" == name and key != "extra"]
        if not inside:
            return
        tensors[inside[sum(content) % len(inside)]] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        save_file(tensors, at / name)
        reseal(at)

    return work


# --- what loading does -------------------------------------------------------------------------------------


def outcome_of(run: Run, load: Callable[[], int], root: Path, flag: Path) -> tuple[str, float, str]:
    run.scramble()
    before = run.values()
    began = time.perf_counter()
    try:
        step = load()
    except (ValueError, OSError, AnotherRank) as error:
        seconds, text = time.perf_counter() - began, f"{type(error).__name__}: {error}"
        if flag.exists():
            return "wrong", seconds, f"foreign code was run; {text[:300]}"
        if not all(map(torch.equal, before, run.values())):
            return "wrong", seconds, f"something was loaded before the error: {text[:300]}"
        if str(root / "copy") not in text or (text.startswith("RuntimeError") and ": rank" not in text):
            return "wrong", seconds, f"names no file: {text[:300]}"
        return "named", seconds, text[:300]
    except BaseException as error:
        return "wrong", time.perf_counter() - began, f"{type(error).__name__}: {str(error)[:300]}"
    seconds = time.perf_counter() - began
    if flag.exists():
        return "wrong", seconds, "foreign code was run"
    places = root / "run" / "step-1", root / "copy" / f"step-{step}"
    layouts = [manifest.manifest(place)["layout"] for place in places]
    if not run.is_at(step, random=layouts[0] == layouts[1]):  # on another layout, random numbers are others
        return "wrong", seconds, f"step {step} was loaded with other numbers"
    return "unharmed", seconds, f"step {step}"


def try_all(
    root: Path, seed: int, options: dict[str, Any], flips: int, count: int, only: int | None
) -> list[Outcome]:
    """Try everything on a run in `root`, a part drawn by `seed` if `only` so many are wanted."""
    torch.manual_seed(1)
    run = Run(**options)
    run.save_all(root / "run")
    first = hpnb.rank() == 0
    flag, draw = root / "made", Random(seed)
    sound, other, copied = root / "run" / "step-2", root / "run" / "step-1", root / "copy"
    todo = list(damages(sound, other, draw, flips)) + list(hostile(sound, flag, draw, count))
    if only is not None:
        todo = draw.sample(todo, only)
    found: list[Outcome] = []
    barrier = torch.distributed.barrier
    for number, (kind, damage) in enumerate(todo):
        if first:
            shutil.rmtree(copied, ignore_errors=True)
            copied.mkdir()
            shutil.copytree(other, copied / "step-1")
            shutil.copytree(sound, copied / "step-2")
            damage(copied / "step-2")
            if flag.exists():
                flag.rmdir()
        barrier()

        def load(number: int = number) -> int:
            """From the folder, from the checkpoint itself, and as a run that resumes."""
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                folder = copied / "step-2" if number % 3 == 1 else copied
                if number % 3 == 2 and (found := resuming.find(copied)) is not None:
                    folder = found
                step = run.load(folder)
            if step == 1:
                assert any("step-2" in str(warning.message) for warning in said), "step 1 without a warning"
            return step

        outcome, seconds, text = outcome_of(run, load, root, flag)
        found.append((kind, outcome, seconds, f"[{number}] {text}"))
        barrier()
    return found
