"""Files of a training that belong to the model and not to the layout: what one layout saves, any other loads.

    booster.save("runs/step-500", model, optimizer, lr_scheduler, dataloader, extra={"step": 500})

    runs/step-500/
      model/           config.json, model.safetensors: an ordinary checkpoint, which from_pretrained opens
      state/           the optimizer by parameters' names, schedule, place in the data, random states
      manifest.json    every file with its size and checksum; written last

    gather_weights.py, save_weights.py, hf_names.py     model/ from parts on all ranks
    weight_files.py, load_weights.py                   and back, each reading what it needs
    training_state.py, dcp.py, chunks.py               state/ in pieces, gathered by nobody
    agreement.py                                       agreement, and writing beside training
    atomic.py                                          a killed save leaves the one before

Resumed on the layout that saved it a run goes on bit for bit, between two steps; on another layout sums have
another order and dropout draws other numbers. All ranks call all functions, and see the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb import placement
from hpnb.files import replace_file
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint import atomic, dcp, gather_weights, save_weights, training_state
from hpnb.hybrid.checkpoint.agreement import Copies, Saving, attempt, begin, complete, files_group, verified
from hpnb.hybrid.checkpoint.dcp import Stored, packed, unpacked
from hpnb.hybrid.checkpoint.load_weights import Filling
from hpnb.pipeline_parallel import Stages
from hpnb.pipeline_parallel import full_state_dict as over_stages
from hpnb.ranks.current_rank import device as this_device

MODEL, STATE = "model", "state"
_OPTIMIZER = (STATE, atomic.MANIFEST)  # what an optimizer's folder has
Size = int | str


# --- a model ------------------------------------------------------------------------------------------------


def save_model(model: Boosted, path: Path, shard: bool = True, size_per_shard: Size = "5GB") -> None:
    """Write the whole model as a folder `path`, in place of one that is there; its other files stay.

    Args:
        shard: into several files where it is larger than
        size_per_shard: bytes, or "500MB".

    Raises:
        ValueError: `path` is a file, or size_per_shard no size.
    """
    group = files_group()
    limit = save_weights.size_of(size_per_shard) if shard else None
    begin(path, group)
    held = gather_weights.parts_of(model, lambda tensor, _: tensor)
    save_weights.write(held, atomic.part_of(path), model.kind, model.whole_config, limit, group)

    def end() -> None:
        if group.rank() == 0:
            atomic.carry_over(path, lambda name: not save_weights.is_weights(name))
            atomic.commit(path)

    attempt(end, group)


def load_model(model: Boosted, path: Path) -> None:
    """Fill `model` from what `save_model` or save_pretrained wrote, or a file of weights by name; each rank
    reads its parts. Float32 masters of 16-bit weights are filled too.

    Raises:
        FileNotFoundError, ValueError: there are none, or they do not fit; nothing was loaded then.
    """
    with Filling(model, atomic.standing(path), files_group()) as filling:
        filling.fill()


def whole_state_dict(model: Boosted) -> dict[str, torch.Tensor]:
    """{name: tensor} of the whole model on the CPU, on every rank; all of them call it."""
    dp, pp, *tensor = model.axes
    if isinstance(model.module, Stages):
        return over_stages(model.module, pp, [dp, *tensor])
    full = placement.full_state_dict(model.module, [dp, *tensor])
    return {name: value.cpu() for name, value in full.items()}


# --- one of the others --------------------------------------------------------------------------------------


def save_optimizer(optimizer: Optimizer, path: Path) -> None:
    """Write its state, with float32 masters, and that of the loss scaler, as a folder `path`, in place of one
    that is there; its other files stay."""
    group = files_group()
    begin(path, group)
    stored = training_state.of_optimizer(optimizer, lambda tensor: tensor, True)
    dcp.write(stored, atomic.part_of(path) / STATE, group)
    complete(path, {"torch": torch.__version__}, group, carries=lambda name: name not in _OPTIMIZER)


def load_optimizer(optimizer: Optimizer, path: Path) -> None:
    """Take what `save_optimizer` wrote, or booster.save, or the state_dict of an optimizer that torch.save
    wrote; load the model before.

    Raises:
        FileNotFoundError, ValueError: there is none, it is damaged, or that of other parameters; nothing was
            loaded then.
    """
    if path.is_file():
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return
    group = files_group()
    folder, told = verified(path, group)
    training_state.Loading(optimizer, _stored(folder, told, group), group).apply()


def save_lr_scheduler(lr_scheduler: Any, path: Path) -> None:
    """Write the state of a scheduler into a file."""
    group = files_group()
    content = packed("the lr_scheduler", _state_of(lr_scheduler, "lr_scheduler"))

    def write() -> None:
        if group.rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda draft: draft.write_bytes(content))

    attempt(write, group)


def load_lr_scheduler(lr_scheduler: Any, path: Path) -> None:
    """Take it.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is that of something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give a file that save_lr_scheduler wrote")
    try:
        found = unpacked(path.read_bytes())
    except (RuntimeError, UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is not what save_lr_scheduler wrote, or was cut short") from error
    lr_scheduler.load_state_dict(_fitting(found, lr_scheduler, "lr_scheduler"))


# --- all of it ----------------------------------------------------------------------------------------------


def save(
    path: Path,
    model: Boosted,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    extra: Any = None,
    *,
    copies: Copies | None = None,
    keep: int | None = None,
    shard: bool = True,
    size_per_shard: Size = "5GB",
) -> Saving:
    """Write everything as a folder `path`, with `copies` in the background; see `Booster.save`."""
    group = files_group()
    limit = save_weights.size_of(size_per_shard) if shard else None
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would keep no checkpoint; use 1 or more")

    def copied(tensor: torch.Tensor, soon: bool = False) -> torch.Tensor:
        return tensor if copies is None else copies.of(tensor, soon)

    held = gather_weights.parts_of(model, copied)
    stored = training_state.of_pipeline(model, copied)
    stored.update(training_state.of_random())
    if optimizer is not None:
        stored.update(training_state.of_optimizer(optimizer, copied, False))
    for name, value in (("lr_scheduler", lr_scheduler), ("dataloader", dataloader)):
        if value is not None:
            stored.values[name] = packed(f"the {name}", _state_of(value, name))
    stored.values["extra"] = packed("extra", extra)
    stepper = model.stepper()
    if copies is not None:
        copies.hold(None if stepper is None else stepper.inner)
    told = {"layout": layout(model), "torch": torch.__version__}

    def work() -> None:
        if this_device().type == "cuda":
            torch.cuda.set_device(this_device())  # of this thread
        if copies is not None:
            copies.wait()
        begin(path, group, (MODEL, STATE))
        part = atomic.part_of(path)
        attempt(lambda: (part / MODEL).mkdir() if group.rank() == 0 else None, group)
        save_weights.write(held, part / MODEL, model.kind, model.whole_config, limit, group)
        dcp.write(stored, part / STATE, group)
        complete(path, told, group, keep)

    return Saving(work, background=copies is not None)


def load(
    path: Path,
    model: Boosted,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
) -> Any:
    """Take up what `save` wrote, and give its extra; see `Booster.load`."""
    group = files_group()
    folder, told = verified(path, group)
    stored = _stored(folder / STATE, told, group)
    same = told.get("layout") == layout(model)
    mine = f"random/{group.rank()}"
    asked = {"lr_scheduler": lr_scheduler, "dataloader": dataloader}
    wanted = [
        "extra",
        *(name for name, value in asked.items() if value is not None),
        *([mine] if same else []),
    ]

    def check() -> None:
        if missing := [name for name in wanted if name not in stored.values]:
            raise ValueError(f"{folder} has no state of the {missing[0]}; leave it out to load the rest")

    attempt(check, group)
    found = stored.read({}, wanted, group)
    if lr_scheduler is not None:
        rates = attempt(lambda: _fitting(found["lr_scheduler"], lr_scheduler, "lr_scheduler"), group)
    with Filling(model, folder / MODEL, group) as filling:
        loading = None if optimizer is None else training_state.Loading(optimizer, stored, group)
        if dataloader is not None:  # which refuses what does not fit
            place = attempt(lambda: _fitting(found["dataloader"], dataloader, "dataloader"), group)
            attempt(lambda: dataloader.load_state_dict(place), group)
        filling.fill()
    if loading is not None:
        loading.apply()
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(rates)
    if training_state.PER_TARGET in stored.shapes:
        value = torch.empty((), dtype=torch.float64)
        key = training_state.PER_TARGET
        stored.read({key: (placement.Placement(key, ()), value)}, [], group)
        model.per_target = value
    if same:
        training_state.set_random_state(found[mine])
    return found["extra"]


def layout(model: Boosted) -> dict[str, Any]:
    """By which random states can be told to fit."""
    plugin = model.plugin
    sizes = {f"{name}_size": getattr(plugin, f"{name}_size") for name in ("dp", "pp", "tp")}
    return {**sizes, "tp_mode": plugin.tp_mode, "tp_depth": plugin.tp_depth, "chunks": plugin.chunks}


# --- inside -------------------------------------------------------------------------------------------------


def _stored(folder: Path, told: Mapping[str, Any], group: dist.ProcessGroup) -> Stored:
    where = folder if folder.name == STATE else folder / STATE
    stored: Stored = attempt(
        lambda: Stored(where, f"PyTorch {told.get('torch', 'of another version')}"), group
    )
    return stored


def _state_of(value: Any, name: str) -> dict[str, Any]:
    """What it says of itself, and what it is."""
    if not hasattr(value, "state_dict"):
        raise ValueError(
            f"a {type(value).__name__} as {name} has no state_dict, so it cannot go on from where it is; use "
            "plugin.prepare_dataloader, or leave it out"
        )
    return {"kind": training_state.kind_of(value), "state": value.state_dict()}


def _fitting(found: Any, value: Any, name: str) -> Any:
    """What `_state_of` a thing of its kind gave."""
    own = training_state.kind_of(value)
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind != own:
        raise ValueError(
            f"the {name} that was saved is a {kind}, and this is a {own}; use a {kind}, or leave it out"
        )
    return found["state"]
