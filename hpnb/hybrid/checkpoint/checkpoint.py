"""Checkpoints belong to the model and not to the layout: what one layout saves, any other loads.

    booster.save("runs/step-500", model, optimizer, lr_scheduler, dataloader, extra={"step": 500})

    runs/step-500/
      model/           config.json, model.safetensors: an ordinary checkpoint, which from_pretrained opens
      state/           the optimizer by parameters' names, schedule, place in the data, random states
      averages/ema/    as model/, of each average of its weights that was given
      manifest.json    every file with its size and checksum; written last

    gather_weights.py, save_weights.py, hf_names.py    model/, from the shards of all ranks
    weight_files.py, load_weights.py                   and back: each rank reads what it holds
    optimizer_shards.py, training_state.py             what state/ contains
    state_files.py, chunks.py                          state/, in chunks that nobody gathers
    agreement.py, background_save.py                   errors on one rank; writing while training continues
    write_files.py, manifest.py                        checksums from memory; what is complete, and the newest
    atomic.py, run_lock.py                             a killed save leaves the last one; so does another run

On the layout that saved it, a run resumes bit for bit, between two steps. On another layout sums are in
another order, and dropout draws other numbers. All ranks call all functions, and see the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb import placement
from hpnb.files import replace_file
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint import atomic, save_weights, training_state
from hpnb.hybrid.checkpoint.agreement import (
    attempt,
    cleared_up,
    files_group,
    on_first_rank,
    read_back,
    verify_folder,
)
from hpnb.hybrid.checkpoint.background_save import HostCopies, Saving
from hpnb.hybrid.checkpoint.gather_weights import weight_shards
from hpnb.hybrid.checkpoint.load_weights import WeightLoader
from hpnb.hybrid.checkpoint.manifest import part_of
from hpnb.hybrid.checkpoint.optimizer_shards import OptimizerLoader, optimizer_shards
from hpnb.hybrid.checkpoint.state_files import StateReader, pack, unpack, write_state
from hpnb.hybrid.checkpoint.write_files import WrittenFiles
from hpnb.layout import TP_MODES
from hpnb.ranks.current_rank import device as this_device

MODEL, STATE, OPTIMIZER, AVERAGES = "model", "state", "optimizer", "averages"
Size = int | str


# --- a model, an optimizer, or a schedule ------------------------------------------------------------------


def save_model(model: Boosted, path: Path, shard: bool = True, size_per_shard: Size = "5GB") -> None:
    """See `Booster.save_model`."""
    group = files_group()
    limit = save_weights.parse_size(size_per_shard) if shard else None

    def write(draft: Path) -> WrittenFiles:
        shards = weight_shards(model, lambda tensor, _: tensor)
        return save_weights.write_weights(shards, draft, model, limit, group)

    _update_folder(path, MODEL, write, {}, save_weights.is_weight_file, group)


def load_model(model: Boosted, path: Path) -> None:
    """See `Booster.load_model`; float32 masters of 16-bit weights are filled too."""
    WeightLoader(model, atomic.reading_folder(path, MODEL), files_group()).apply()


def save_optimizer(optimizer: Optimizer, path: Path) -> None:
    """See `Booster.save_optimizer`; with float32 masters and the loss scaler."""
    group = files_group()

    def write(draft: Path) -> WrittenFiles:
        state = optimizer_shards(optimizer, lambda tensor: tensor, with_masters=True)
        return _below(STATE, write_state(state, draft / STATE, group))

    def is_replaced(name: str) -> bool:
        return name.startswith(f"{STATE}/")

    _update_folder(path, OPTIMIZER, write, {"torch": torch.__version__}, is_replaced, group)


def load_optimizer(optimizer: Optimizer, path: Path) -> None:
    """See `Booster.load_optimizer`."""
    group = files_group()
    if path.is_file():
        optimizer.load_state_dict(attempt(lambda: _load_pickled(path), group))
        return
    folder, _ = verify_folder(atomic.reading_folder(path, OPTIMIZER), group)
    OptimizerLoader(optimizer, _open_state(folder, group), group).apply()


def _update_folder(
    path: Path,
    name: str,
    write: Callable[[Path], WrittenFiles],
    facts: Mapping[str, Any],
    is_replaced: Callable[[str], bool],
    group: dist.ProcessGroup,
) -> None:
    """Put what all ranks `write` in place of the files in `path` that were saved under `name` before."""
    on_first_rank(lambda: atomic.begin_update(path, name), group)
    with cleared_up(lambda: atomic.abandon_update(path, name), group):
        draft = atomic.draft_in(path, name)
        files = read_back(draft, write(draft), group)
        on_first_rank(lambda: atomic.commit_update(path, name, files, facts, is_replaced), group)


def save_lr_scheduler(lr_scheduler: Any, path: Path) -> None:
    """See `Booster.save_lr_scheduler`."""
    group = files_group()
    content = pack("the lr_scheduler", _state_of(lr_scheduler, "lr_scheduler"))

    def write() -> None:
        if group.rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda draft: draft.write_bytes(content))

    attempt(write, group)


def load_lr_scheduler(lr_scheduler: Any, path: Path) -> None:
    """See `Booster.load_lr_scheduler`."""

    def read() -> Any:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; give a file that save_lr_scheduler wrote")
        try:
            saved = unpack(path.read_bytes())
        except Exception as error:  # torch.load raises about anything on bytes that it did not write
            raise ValueError(f"{path} is not what save_lr_scheduler wrote, or was cut short") from error
        return _check_kind(saved, lr_scheduler, "lr_scheduler", path)

    lr_scheduler.load_state_dict(attempt(read, files_group()))


# --- all of it ----------------------------------------------------------------------------------------------


def save(
    path: Path,
    model: Boosted,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    extra: Any = None,
    averages: Mapping[str, Boosted] | None = None,
    *,
    copies: HostCopies | None = None,
    keep: int | None = None,
    shard: bool = True,
    size_per_shard: Size = "5GB",
) -> Saving:
    """Write everything as a folder `path`, with `copies` in the background; see `Booster.save`."""
    group = files_group()
    limit = save_weights.parse_size(size_per_shard) if shard else None
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would keep no checkpoint; use 1 or more")

    def copy(tensor: torch.Tensor, soon: bool = False) -> torch.Tensor:
        return tensor if copies is None else copies.copy(tensor, soon)

    shards = weight_shards(model, copy)
    shards_of_averages = {name: weight_shards(average, copy) for name, average in (averages or {}).items()}
    state = training_state.pipeline_state(model, copy)
    state.values[f"random/{group.rank()}"] = pack("a random state", training_state.random_state())
    if optimizer is not None:
        state.update(optimizer_shards(optimizer, copy, with_masters=False))
    for name, value in (("lr_scheduler", lr_scheduler), ("dataloader", dataloader)):
        if value is not None:
            state.values[name] = pack(f"the {name}", _state_of(value, name))
    state.values["extra"] = pack("extra", extra)
    boosted = model.optimizer_ref()
    if copies is not None:
        copies.finish_before_step_of(None if boosted is None else boosted.inner)
    facts = {"layout": saved_layout(model), "torch": torch.__version__}

    def work() -> None:
        if this_device().type == "cuda":
            torch.cuda.set_device(this_device())  # of this thread
        if copies is not None:
            copies.wait()
        on_first_rank(lambda: atomic.begin(path, (MODEL, STATE, AVERAGES)), group)
        with cleared_up(lambda: atomic.abandon(path), group):
            part = part_of(path)
            on_first_rank((part / MODEL).mkdir, group)
            of_model = save_weights.write_weights(shards, part / MODEL, model, limit, group)
            written = _below(MODEL, of_model)
            for name, average in (averages or {}).items():
                below = f"{AVERAGES}/{name}"
                on_first_rank(partial((part / below).mkdir, parents=True), group)
                weights = save_weights.write_weights(
                    shards_of_averages[name], part / below, average, limit, group
                )
                written |= _below(below, weights)
            written |= _below(STATE, write_state(state, part / STATE, group))
            files = read_back(part, written, group)
            on_first_rank(lambda: atomic.commit(path, files, facts, keep), group)

    return Saving(work, copies is not None, path)


def load(
    path: Path,
    model: Boosted,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    averages: Mapping[str, Boosted] | None = None,
) -> Any:
    """Load what `save` wrote, and return its extra; see `Booster.load`.

    Everything is read and checked on all ranks before anything is changed on one.
    """
    group = files_group()
    folder, manifest = verify_folder(path, group)
    stored = _open_state(folder, group)
    same_layout = manifest.get("layout") == saved_layout(model)
    random_label = f"random/{group.rank()}"
    asked = {"lr_scheduler": lr_scheduler, "dataloader": dataloader}
    labels = [
        "extra",
        *(name for name, value in asked.items() if value is not None),
        *([random_label] if same_layout else []),
    ]

    def check() -> None:
        if missing := [name for name in labels if name not in stored.values]:
            raise ValueError(f"{folder} has no state of the {missing[0]}; leave it out to load the rest")
        if lacks := [name for name in averages or {} if not (folder / AVERAGES / name).is_dir()]:
            raise ValueError(f"{folder} has no average called {lacks[0]!r}; leave it out to load the rest")

    attempt(check, group)
    targets = {}
    if (key := training_state.PER_TARGET) in stored.shapes:
        targets[key] = (placement.Placement(key, ()), torch.empty((), dtype=torch.float64))
    values = stored.read(targets, labels, group)
    states = {
        name: attempt(partial(_check_kind, values[name], value, name, folder), group)
        for name, value in asked.items()
        if value is not None
    }
    random = [values[random_label]] if same_layout else []
    attempt(lambda: _check_states(folder, states, random), group)
    attempt(lambda: _check_layout(folder, manifest.get("layout"), saved_layout(model), stored), group)
    weights = [WeightLoader(model, folder / MODEL, group)]
    for name, average in (averages or {}).items():
        weights.append(WeightLoader(average, folder / AVERAGES / name, group))
    optimizer_state = None if optimizer is None else OptimizerLoader(optimizer, stored, group)
    if dataloader is not None:  # the first to change, because only it may still refuse what it is given
        _load_or_restore(dataloader, states["dataloader"], group)
    for loader in weights:
        loader.apply()
    if optimizer_state is not None:
        optimizer_state.apply()
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(states["lr_scheduler"])
    if targets:
        model.per_target = targets[key][1]
    if same_layout:
        training_state.set_random_state(values[random_label])
    return values["extra"]


_OPTIONAL_SIZES = ("cp_size", "ep_size")  # in the manifest only where they are above 1


def saved_layout(model: Boosted) -> dict[str, Any]:
    """What must be the same for saved random states to fit."""
    plugin = model.plugin
    sizes = {f"{name}_size": getattr(plugin, f"{name}_size") for name in ("dp", "pp", "tp")}
    sizes.update({name: size for name in _OPTIONAL_SIZES if (size := getattr(plugin, name)) > 1})
    return {**sizes, "tp_mode": plugin.tp_mode, "tp_depth": plugin.tp_depth, "chunks": plugin.chunks}


# --- inside -------------------------------------------------------------------------------------------------


def _below(folder: str, written: WrittenFiles) -> WrittenFiles:
    return {f"{folder}/{name}": file_sum for name, file_sum in written.items()}


def _open_state(folder: Path, group: dist.ProcessGroup) -> StateReader:
    stored: StateReader = attempt(lambda: StateReader(folder / STATE), group)
    return stored


def _load_pickled(path: Path) -> Any:
    """What torch.save wrote, if it is tensors and plain containers; nothing else is unpickled."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # as above
        raise ValueError(
            f"{path} cannot be read: it was cut short, or holds other things than tensors, numbers, texts "
            "and containers of them"
        ) from error


def _check_states(folder: Path, states: dict[str, Any], random: list[Any]) -> None:
    """Raise ValueError if a state that was read is not one, before anything is loaded."""
    if wrong := [name for name, state in states.items() if not isinstance(state, dict)]:
        raise ValueError(f"{folder} has no readable state of the {wrong[0]}; load another checkpoint")
    if not all(map(training_state.is_random_state, random)):
        raise ValueError(f"{folder} has no readable random state; load another checkpoint")


def _check_layout(folder: Path, saved: Any, now: dict[str, Any], stored: StateReader) -> None:
    """Raise ValueError if the layout in the manifest cannot be that of the ranks that saved."""
    if saved is None:  # which no random states belong to
        return
    optional = dict.fromkeys(_OPTIONAL_SIZES, 1)
    if isinstance(saved, dict):
        saved, now = {**optional, **saved}, {**optional, **now}
        is_layout = {k: type(v) for k, v in saved.items()} == {k: type(v) for k, v in now.items()}
        if is_layout and saved["tp_mode"] in TP_MODES:
            ranks = sum(key.startswith("random/") for key in stored.values)
            if saved["dp_size"] * saved["pp_size"] * saved["tp_size"] * saved["cp_size"] == ranks:
                return
    raise ValueError(f"the manifest of {folder} has the layout {str(saved)[:200]}; load another checkpoint")


def _load_or_restore(dataloader: Any, state: Any, group: dist.ProcessGroup) -> None:
    """Load the state on all ranks, or on none."""
    before = dataloader.state_dict()
    try:
        attempt(lambda: dataloader.load_state_dict(state), group)
    except BaseException:
        dataloader.load_state_dict(before)
        raise


def _state_of(value: Any, name: str) -> dict[str, Any]:
    """Its state dict, and its class."""
    if not hasattr(value, "state_dict"):
        raise ValueError(
            f"a {type(value).__name__} as {name} has no state_dict, so it cannot go on from where it is; use "
            "plugin.prepare_dataloader, or leave it out"
        )
    return {"kind": type(value).__name__, "state": value.state_dict()}


def _check_kind(saved: Any, value: Any, name: str, path: Path) -> Any:
    """The state dict that `_state_of` saved, if `value` is of the same class."""
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if kind != type(value).__name__:
        raise ValueError(
            f"{path}: the {name} that was saved is a {kind}, and this is a {type(value).__name__}; use a "
            f"{kind}, or leave it out"
        )
    return saved["state"]
