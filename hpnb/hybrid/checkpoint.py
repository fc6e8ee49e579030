"""Files of a training that belong to the model and not to the layout: what one layout saves, any other loads.

    booster.save("runs/step-500", model, optimizer, lr_scheduler, dataloader, extra={"step": 500})

    runs/step-500/
      model/           config.json, model.safetensors: an ordinary checkpoint, which from_pretrained opens
      state/           the optimizer by parameters' names, schedule, place in the data, random states
      manifest.json    every file with its size and checksum; written last

    checkpoint_parts.py, checkpoint_weights.py, checkpoint_names.py     model/ from parts on all ranks
    checkpoint_source.py, checkpoint_fill.py                            and back, each reading what it needs
    checkpoint_state.py, checkpoint_pieces.py, checkpoint_boxes.py      state/ in pieces, gathered by nobody
    checkpoint_ranks.py                                                 agreement, and writing beside training
    atomic.py                                                           a killed save leaves the one before

Resumed on the layout that saved it a run goes on bit for bit, between two steps; on another layout sums have
another order and dropout draws other numbers. All ranks call all functions, and see the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpnb import placement
from hpnb.hybrid import atomic, checkpoint_parts, checkpoint_pieces, checkpoint_state, checkpoint_weights
from hpnb.hybrid.boosted import Boosted
from hpnb.hybrid.checkpoint_fill import Filling
from hpnb.hybrid.checkpoint_pieces import Stored, packed, unpacked
from hpnb.hybrid.checkpoint_ranks import Copies, Saving, attempt, files_group, gathered
from hpnb.pipeline_parallel import Stages
from hpnb.pipeline_parallel import full_state_dict as over_stages
from hpnb.ranks.here import device as this_device

MODEL, STATE = "model", "state"
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
    limit = checkpoint_weights.size_of(size_per_shard) if shard else None
    attempt(lambda: atomic.begin(path) if group.rank() == 0 else None, group)
    parts = checkpoint_parts.parts_of(model, lambda tensor, _: tensor)
    checkpoint_weights.write(parts, atomic.part_of(path), model.kind, model.whole_config, limit, group)

    def end() -> None:
        if group.rank() == 0:
            atomic.carry_over(path, checkpoint_weights.is_weights)
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
    """Write its state, with float32 masters, and that of the loss scaler, as a folder `path`."""
    group = files_group()
    attempt(lambda: atomic.begin(path) if group.rank() == 0 else None, group)
    pieces = checkpoint_state.of_optimizer(optimizer, lambda tensor: tensor, True)
    checkpoint_pieces.write(pieces, atomic.part_of(path) / STATE, group)
    _complete(path, {}, group)


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
    folder, told = _verified(path, group)
    checkpoint_state.Loading(optimizer, _stored(folder, told, group), group).apply()


def save_lr_scheduler(lr_scheduler: Any, path: Path) -> None:
    """Write the state of a scheduler into a file."""
    group = files_group()
    content = packed("the lr_scheduler", lr_scheduler.state_dict())

    def write() -> None:
        if group.rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_file(path, lambda part: part.write_bytes(content))

    attempt(write, group)


def load_lr_scheduler(lr_scheduler: Any, path: Path) -> None:
    """Take it."""
    lr_scheduler.load_state_dict(unpacked(path.read_bytes()))


# --- all of it ----------------------------------------------------------------------------------------------


def save(
    path: Path,
    model: Boosted,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    extra: Any = None,
    *,
    background: bool = False,
    keep: int | None = None,
    shard: bool = True,
    size_per_shard: Size = "5GB",
) -> Saving:
    """Write everything as a folder `path`; see `Booster.save`."""
    group = files_group()
    limit = checkpoint_weights.size_of(size_per_shard) if shard else None
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would keep no checkpoint; use 1 or more")
    copies = Copies(this_device())

    def copied(tensor: torch.Tensor, soon: bool = False) -> torch.Tensor:
        return copies.of(tensor, soon) if background else tensor

    parts = checkpoint_parts.parts_of(model, copied)
    pieces = checkpoint_state.of_pipeline(model, copied)
    pieces.update(checkpoint_state.of_random())
    if optimizer is not None:
        pieces.update(checkpoint_state.of_optimizer(optimizer, copied, False))
    for name, value in (("lr_scheduler", lr_scheduler), ("dataloader", dataloader)):
        if value is not None:
            pieces.values[name] = packed(f"the {name}", _state_of(value, name))
    pieces.values["extra"] = packed("extra", extra)
    stepper = model.stepper()
    copies.hold(None if stepper is None else stepper.inner)
    told = {"layout": layout(model), "torch": torch.__version__}

    def work() -> None:
        if this_device().type == "cuda":
            torch.cuda.set_device(this_device())  # of this thread
        copies.wait()
        attempt(lambda: atomic.begin(path) if group.rank() == 0 else None, group)
        part = atomic.part_of(path)
        attempt(lambda: (part / MODEL).mkdir() if group.rank() == 0 else None, group)
        checkpoint_weights.write(parts, part / MODEL, model.kind, model.whole_config, limit, group)
        checkpoint_pieces.write(pieces, part / STATE, group)
        _complete(path, told, group, keep)

    return Saving(work, background)


def load(
    path: Path,
    model: Boosted,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
) -> Any:
    """Take up what `save` wrote, and give its extra; see `Booster.load`."""
    group = files_group()
    folder, told = _verified(path, group)
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
    with Filling(model, folder / MODEL, group) as filling:
        loading = None if optimizer is None else checkpoint_state.Loading(optimizer, stored, group)
        if dataloader is not None:  # which refuses what does not fit
            attempt(lambda: dataloader.load_state_dict(found["dataloader"]), group)
        filling.fill()
    if loading is not None:
        loading.apply()
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(found["lr_scheduler"])
    if checkpoint_state.PER_TARGET in stored.shapes:
        value = torch.empty((), dtype=torch.float64)
        key = checkpoint_state.PER_TARGET
        stored.read({key: (placement.Placement(key, ()), value)}, [], group)
        model.per_target = value
    if same:
        checkpoint_state.set_random_state(found[mine])
    return found["extra"]


def layout(model: Boosted) -> dict[str, Any]:
    """By which random states can be told to fit."""
    plugin = model.plugin
    sizes = {f"{name}_size": getattr(plugin, f"{name}_size") for name in ("dp", "pp", "tp")}
    return {**sizes, "tp_mode": plugin.tp_mode, "tp_depth": plugin.tp_depth, "chunks": plugin.chunks}


# --- inside -------------------------------------------------------------------------------------------------


def _complete(path: Path, told: Mapping[str, Any], group: dist.ProcessGroup, keep: int | None = None) -> None:
    """All files are written: seal what is in the part, and give it its name."""
    part, me, size = atomic.part_of(path), group.rank(), group.size()
    names = gathered(atomic.listing(part) if me == 0 else None, group)[0]
    sums = attempt(lambda: {name: atomic.checksum(part / name) for name in names[me::size]}, group)
    everyone = gathered(sums, group)

    def seal() -> None:
        if me == 0:
            atomic.seal(part, {name: one for theirs in everyone for name, one in theirs.items()}, told)
            atomic.commit(path)
            if keep is not None:
                atomic.keep_newest(path, keep)

    attempt(seal, group)


def _verified(path: Path, group: dist.ProcessGroup) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest in it, and its manifest; its files are as they were written."""
    folder: Path = attempt(lambda: atomic.find(path), group)
    attempt(lambda: atomic.verify(folder, group.rank(), group.size()), group)
    return folder, atomic.manifest(folder)


def _stored(folder: Path, told: Mapping[str, Any], group: dist.ProcessGroup) -> Stored:
    where = folder if folder.name == STATE else folder / STATE
    stored: Stored = attempt(
        lambda: Stored(where, f"PyTorch {told.get('torch', 'of another version')}"), group
    )
    return stored


def _state_of(value: Any, name: str) -> Any:
    if not hasattr(value, "state_dict"):
        raise ValueError(
            f"a {type(value).__name__} as {name} has no state_dict, so it cannot go on from where it is; use "
            "plugin.prepare_dataloader, or leave it out"
        )
    return value.state_dict()
