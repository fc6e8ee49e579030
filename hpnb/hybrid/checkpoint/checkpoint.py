"""Checkpoints belong to the model and not to the layout: what one layout saves, any other loads.

    runs/step-500/
      model/           config.json, model.safetensors: an ordinary checkpoint, which from_pretrained opens
      state/           the optimizer by parameters' names, schedule, place in the data, random states
      averages/ema/    as model/, of each average of its weights that was given
      manifest.json    every file with its size and checksum; written last

    gather_weights.py, save_weights.py, hf_names.py    model/, from the shards of all ranks
    weight_files.py, load_weights.py                   and back: each rank reads what it holds
    optimizer_shards.py                                what state/ contains
    state_files.py, chunks.py                          state/, in chunks that nobody gathers
    agreement.py, background_save.py                   errors on one rank; writing while training continues
    write_files.py, manifest.py                        checksums from memory; what is complete, and the newest
    atomic.py, run_lock.py                             a killed save, or another run, does not touch the last
                                                       checkpoint

All ranks call all functions, and see the same files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint import atomic, save_weights
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
from hpnb.hybrid.checkpoint.state_files import ShardedState, StateReader, first_line, pack, write_state
from hpnb.hybrid.checkpoint.write_files import WrittenFiles
from hpnb.layout import TP_MODES
from hpnb.placement import Placement
from hpnb.ranks.current_rank import device as this_device

MODEL, STATE, AVERAGES = "model", "state", "averages"
PER_TARGET = "pipeline/per_target"


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
    size_per_shard: int | str = "5GB",
) -> Saving:
    """Write everything as a folder `path`, with `copies` in the background; see `Booster.save`."""
    group = files_group()
    limit = save_weights.parse_size(size_per_shard) if shard else None
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would keep no checkpoint; use 1 or more")
    # By itself, because the ranks of a stream exchange their places there.
    place = None if dataloader is None else attempt(lambda: state_of(dataloader, "dataloader"), group)

    def copy(tensor: torch.Tensor, soon: bool = False) -> torch.Tensor:
        return tensor if copies is None else copies.copy(tensor, soon)

    def collect() -> tuple[Any, dict[str, Any], ShardedState]:
        """What this rank will write."""
        shards = weight_shards(model, copy)
        # An average may change before the optimizer's next step, for which later copies wait.
        soon = lambda tensor, _: copy(tensor, True)  # noqa: E731
        of_averages = {name: weight_shards(average, soon) for name, average in (averages or {}).items()}
        state = pipeline_state(model, copy)
        state.values[f"random/{group.rank()}"] = pack("a random state", random_state())
        if optimizer is not None:
            state.update(optimizer_shards(optimizer, copy, with_masters=False))
        if lr_scheduler is not None:
            state.values["lr_scheduler"] = pack("the lr_scheduler", state_of(lr_scheduler, "lr_scheduler"))
        if place is not None:
            state.values["dataloader"] = pack("the dataloader", place)
        state.values["extra"] = pack("extra", extra)
        return shards, of_averages, state

    try:
        shards, shards_of_averages, state = attempt(collect, group)
    finally:  # also after an error, because copies may be under way
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
        part = part_of(path)
        with cleared_up(lambda: atomic.delete(part), group):
            on_first_rank((part / MODEL).mkdir, group)
            of_model = save_weights.write_weights(shards, part / MODEL, model, limit, group)
            written = in_folder(MODEL, of_model)
            for name, average in (averages or {}).items():
                below = f"{AVERAGES}/{name}"
                on_first_rank(partial((part / below).mkdir, parents=True), group)
                weights = save_weights.write_weights(
                    shards_of_averages[name], part / below, average, limit, group
                )
                written |= in_folder(below, weights)
            written |= in_folder(STATE, write_state(state, part / STATE, group))
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

    Everything is read and checked on all ranks before anything is changed on one. Only a dataloader cannot be
    checked without loading. So it is loaded first, and all ranks undo that if it refuses its state on one.
    """
    group = files_group()
    folder, manifest = verify_folder(path, group)
    stored = open_state(folder, group)
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
    if (key := PER_TARGET) in stored.shapes:
        targets[key] = (Placement(key, ()), torch.empty((), dtype=torch.float64))
    values = stored.read(targets, labels, group)
    states = {
        name: attempt(partial(check_kind, values[name], value, name, folder), group)
        for name, value in asked.items()
        if value is not None
    }
    random_states = [values[random_label]] if same_layout else []
    attempt(lambda: _check_states(folder, states, random_states), group)
    attempt(lambda: _check_layout(folder, manifest.get("layout"), saved_layout(model), stored), group)
    weights = [WeightLoader(model, folder / MODEL, group, is_verified=True)]
    for name, average in (averages or {}).items():
        weights.append(WeightLoader(average, folder / AVERAGES / name, group, is_verified=True))
    optimizer_state = None if optimizer is None else OptimizerLoader(optimizer, stored, group)
    if lr_scheduler is not None:
        _check_loads(lr_scheduler, states["lr_scheduler"], folder, group)
    if dataloader is not None:
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
        set_random_state(values[random_label])
    return values["extra"]


_OPTIONAL_SIZES = ("cp_size", "ep_size")  # in the manifest only where they are above 1


def saved_layout(model: Boosted) -> dict[str, Any]:
    """What must be the same for saved random states to fit."""
    plugin = model.plugin
    sizes = {f"{name}_size": getattr(plugin, f"{name}_size") for name in ("dp", "pp", "tp")}
    sizes.update({name: size for name in _OPTIONAL_SIZES if (size := getattr(plugin, name)) > 1})
    return {**sizes, "tp_mode": plugin.tp_mode, "tp_depth": plugin.tp_depth, "chunks": plugin.chunks}


# --- random generators and the pipeline ---------------------------------------------------------------------


def pipeline_state(model: Boosted, copy: Callable[[torch.Tensor], torch.Tensor]) -> ShardedState:
    """What the pipeline remembers between steps, on the ranks that compute the loss."""
    value = model.per_target
    if not isinstance(value, torch.Tensor):
        return ShardedState()
    return ShardedState({PER_TARGET: (Placement(PER_TARGET, ()), copy(value))})


def random_state() -> dict[str, Any]:
    """Where the generators of this rank stand: Python's, NumPy's, PyTorch's."""
    kind, numbers, *rest = np.random.get_state()
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": (kind, torch.from_numpy(np.asarray(numbers).astype(np.int64)), *rest)}  # fmt: skip
    if this_device().type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(this_device())
    return state


def is_random_state(state: Any) -> bool:
    """Whether the generators would continue from it."""
    now = random_state()
    try:
        set_random_state(state)
    except Exception:  # each generator has its own errors
        return False
    finally:
        set_random_state(now)
    return True


def set_random_state(state: dict[str, Any]) -> None:
    """Let the generators of this rank continue from there."""
    kind, numbers, *rest = state["numpy"]
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), *rest))
    if "cuda" in state and this_device().type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], this_device())


# --- inside -------------------------------------------------------------------------------------------------


def in_folder(folder: str, written: WrittenFiles) -> WrittenFiles:
    return {f"{folder}/{name}": file_sum for name, file_sum in written.items()}


def open_state(folder: Path, group: dist.ProcessGroup) -> StateReader:
    stored: StateReader = attempt(lambda: StateReader(folder / STATE), group)
    return stored


def _check_states(folder: Path, states: dict[str, Any], random_states: list[Any]) -> None:
    """Raise ValueError if a state that was read is not one, before anything is loaded."""
    if wrong := [name for name, state in states.items() if not isinstance(state, dict)]:
        raise ValueError(f"{folder} has no readable state of the {wrong[0]}; load another checkpoint")
    if not all(map(is_random_state, random_states)):
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


def _check_loads(lr_scheduler: Any, state: Any, folder: Path, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if a scheduler does not load the state on one; in any case it is as before then."""
    before = lr_scheduler.state_dict()

    def load() -> None:
        try:
            lr_scheduler.load_state_dict(state)
        except Exception as error:  # each class raises other errors
            raise ValueError(
                f"{folder}: this {type(lr_scheduler).__name__} does not take the state that was saved "
                f"({first_line(error)}); make it as it was, or leave it out"
            ) from error

    try:
        attempt(load, group)
    finally:
        lr_scheduler.load_state_dict(before)


def _load_or_restore(dataloader: Any, state: Any, group: dist.ProcessGroup) -> None:
    """Load the state on all ranks, or on none."""
    before = dataloader.state_dict()
    try:
        attempt(lambda: dataloader.load_state_dict(state), group)
    except BaseException:
        dataloader.load_state_dict(before)
        raise


def state_of(value: Any, name: str) -> dict[str, Any]:
    """Its state dict, and its class."""
    if not hasattr(value, "state_dict"):
        raise ValueError(
            f"a {type(value).__name__} as {name} has no state_dict, so it cannot go on from where it is; use "
            "plugin.prepare_dataloader, or leave it out"
        )
    return {"kind": type(value).__name__, "state": value.state_dict()}


def check_kind(saved: Any, value: Any, name: str, path: Path) -> Any:
    """The state dict that `state_of` saved, if `value` is of the same class."""
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if kind != type(value).__name__:
        raise ValueError(
            f"{path}: the {name} that was saved is a {kind}, and this is a {type(value).__name__}; use a "
            f"{kind}, or leave it out"
        )
    return saved["state"]
