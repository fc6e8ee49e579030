"""The methods of a Booster that write and read files; what a whole checkpoint holds is in checkpoint.py.

All ranks call them, between steps, and see the same files.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hpnb.files import replace_file
from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint import atomic, checkpoint, save_weights
from hpnb.hybrid.checkpoint.agreement import (
    attempt,
    cleared_up,
    files_group,
    on_first_rank,
    read_back,
    verify_folder,
)
from hpnb.hybrid.checkpoint.background_save import HostCopies, Saving
from hpnb.hybrid.checkpoint.checkpoint import MODEL, STATE, check_kind, in_folder, open_state, state_of
from hpnb.hybrid.checkpoint.gather_weights import weight_shards
from hpnb.hybrid.checkpoint.load_weights import WeightLoader
from hpnb.hybrid.checkpoint.optimizer_shards import OptimizerLoader, optimizer_shards
from hpnb.hybrid.checkpoint.state_files import pack, unpack, write_state
from hpnb.hybrid.checkpoint.write_files import WrittenFiles
from hpnb.ranks.current_rank import device as this_device

_OPTIMIZER = "optimizer"


class BoosterFiles:
    """What a Booster saves and loads."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._finish_saving: Any = None  # a weakref.finalize, once there is something to finish
        self._copies: HostCopies | None = None

    def save_model(
        self, model: nn.Module, path: str | Path, shard: bool = True, size_per_shard: int | str = "5GB"
    ) -> None:
        """Write the whole model as a folder, from any layout; that of a model of transformers is one that
        from_pretrained opens. Where weights are 16 bits and have float32 masters, these are written.

        If you changed the modules of a model of transformers, such as its head, all weights are written, by
        the names that save_pretrained gives them. from_pretrained opens what its config describes, and
        `load_model` fills a model that was changed in the same way.

        A weight with two names, because it is tied or its module is used twice, is written once, under the
        first. A model of your own takes that without hpnb by
        `safetensors.torch.load_model(model, path + "/model.safetensors")`, or for each of several files
        `model.load_state_dict(safetensors.torch.load_file(file), strict=False)`.

        Args:
            shard: into several files, with an index, where it is larger than
            size_per_shard: bytes, or text like "500MB".

        Raises:
            ValueError: `path` is a file, or size_per_shard no size.
        """
        self.wait()
        boosted, group = boosted_model(model), files_group()
        limit = save_weights.parse_size(size_per_shard) if shard else None

        def write(draft: Path) -> WrittenFiles:
            shards = weight_shards(boosted, lambda tensor, _: tensor)
            return save_weights.write_weights(shards, draft, boosted, limit, group)

        _update_folder(Path(path), MODEL, write, {}, save_weights.is_weight_file, group)

    def load_model(self, model: nn.Module, path: str | Path) -> None:
        """Fill `model`, in any layout, from what `save_model` or save_pretrained wrote, or from a file of
        weights by name, .safetensors or .bin; each rank reads what it needs.

        Raises:
            FileNotFoundError, ValueError: there is nothing, or what does not fit; nothing was loaded then.
        """
        self.wait()
        boosted = boosted_model(model)
        WeightLoader(boosted, atomic.reading_folder(Path(path), MODEL), files_group()).apply()

    def save_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        """Write its whole state as a folder, in pieces, by the names of parameters."""
        self.wait()
        group, facts = files_group(), {"torch": torch.__version__}

        def write(draft: Path) -> WrittenFiles:
            state = optimizer_shards(optimizer, lambda tensor: tensor, with_masters=True)
            return in_folder(STATE, write_state(state, draft / STATE, group))

        def is_replaced(name: str) -> bool:
            return name.startswith(f"{STATE}/")

        _update_folder(Path(path), _OPTIMIZER, write, facts, is_replaced, group)

    def load_optimizer(self, optimizer: Optimizer, path: str | Path) -> None:
        """Take it, in any layout; load the model before. It may also be a file in which torch.save put the
        state_dict of a plain optimizer.

        Raises:
            FileNotFoundError, ValueError: there is nothing, or what does not fit; nothing was loaded then.
        """
        self.wait()
        path, group = Path(path), files_group()
        if path.is_file():
            optimizer.load_state_dict(attempt(lambda: _load_pickled(path), group))
            return
        folder, _ = verify_folder(atomic.reading_folder(path, _OPTIMIZER), group)
        OptimizerLoader(optimizer, open_state(folder, group), group).apply()

    def save_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Write the state of a scheduler into a file."""
        file, content = Path(path), pack("the lr_scheduler", state_of(lr_scheduler, "lr_scheduler"))

        def write() -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, lambda draft: draft.write_bytes(content))

        on_first_rank(write, files_group())

    def load_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Take it. The file may also be one in which torch.save put the state_dict of a plain scheduler.

        Raises:
            FileNotFoundError, ValueError: there is no such file, or it belongs to something else.
        """

        def read() -> Any:
            file = Path(path)
            if not file.is_file():
                raise FileNotFoundError(f"{file} is not there; give a file that save_lr_scheduler wrote")
            try:
                saved = unpack(file.read_bytes())
            except Exception as error:  # torch.load raises about anything on bytes that it did not write
                raise ValueError(f"{file} is not what save_lr_scheduler wrote, or was cut short") from error
            if isinstance(saved, dict) and "kind" not in saved:
                return _check_plain_state(saved, lr_scheduler, file)
            return check_kind(saved, lr_scheduler, "lr_scheduler", file)

        lr_scheduler.load_state_dict(attempt(read, files_group()))

    def save(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
        *,
        averages: Mapping[str, nn.Module] | None = None,
        background: bool = False,
        keep: int | None = None,
        shard: bool = True,
        size_per_shard: int | str = "5GB",
    ) -> Saving:
        """Write all that a run needs to go on as one folder, which appears when it is complete.

        Args:
            dataloader: whose place in the data is kept, as `plugin.prepare_dataloader` gives it.
            extra: what else `load` is to give back: tensors, numbers, texts, lists and dicts of them, such as
                {"step": 500}; rank 0's is kept.
            averages: {name: copy of the boosted model}, as of an average of its weights; each is written like
                the model, as averages/NAME.
            background: copy what the next step would change, and write while training goes on; the copies'
                memory, on the CPU, is kept for the next save. Other saves and loads of this process wait for
                it, and a launched function or a %%ranks cell before it returns. Elsewhere `wait` before the
                process group ends. What goes wrong is raised there, or by the next save, or is a warning when
                the Booster is dropped, which waits too.
            keep: leave so many of the folders beside `path` that differ from it in the number at the end of
                their names.
            shard, size_per_shard: see `save_model`.

        Returns:
            What to `wait()` for; without `background` it is done.

        Raises:
            ValueError: what cannot be saved; `path` is a file.
        """
        self.wait()
        how: dict[str, Any] = {"keep": keep, "shard": shard, "size_per_shard": size_per_shard}
        parts = boosted_model(model), optimizer, lr_scheduler, dataloader, extra, _check_averages(averages)
        if background:
            how["copies"] = self._copies = HostCopies(this_device(), self._copies)
        self._saving = checkpoint.save(Path(path), *parts, **how)
        if background:  # when a launched function returns without `wait`, its Booster goes
            self._finish_saving = weakref.finalize(self, self._saving.finish)
        return self._saving

    def load(
        self,
        path: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        *,
        averages: Mapping[str, nn.Module] | None = None,
    ) -> Any:
        """Go on where `save` was, on the same layout bit for bit, or on another one.

        Args:
            path: what `save` was given, or the folder around such folders: then the newest of them.
            optimizer, lr_scheduler, dataloader: what is None is left as it is. Learning rates become those of
                the save, as in PyTorch; for others set "lr" in optimizer.param_groups afterwards, and
                base_lrs of the lr_scheduler. A loader needs the same global batch.
            averages: {name: copy of the boosted model} to fill, by the names that `save` was given.

        Returns:
            The extra of that save. Random states are set if the layout is the same.

        Raises:
            FileNotFoundError, ValueError: there is nothing, it is damaged, or does not fit; nothing was
                loaded then.
        """
        self.wait()
        parts = boosted_model(model), optimizer, lr_scheduler, dataloader, _check_averages(averages)
        return checkpoint.load(Path(path), *parts)

    def wait(self) -> None:
        """Until a save in the background is on the disk.

        Raises:
            Exception: what went wrong with it, once.
        """
        if self._finish_saving is not None:
            self._finish_saving.detach()
            self._finish_saving = None
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.wait()


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
    draft = atomic.draft_in(path, name)
    with cleared_up(lambda: atomic.delete(draft), group):
        files = read_back(draft, write(draft), group)
        on_first_rank(lambda: atomic.commit_update(path, name, files, facts, is_replaced), group)


def _load_pickled(path: Path) -> Any:
    """What torch.save wrote, if it is tensors and plain containers; nothing else is unpickled."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises about anything on bytes that it did not write
        raise ValueError(
            f"{path} cannot be read: it was cut short, or holds other things than tensors, numbers, texts "
            "and containers of them"
        ) from error


def _check_plain_state(saved: dict[str, Any], lr_scheduler: Any, file: Path) -> dict[str, Any]:
    """The state_dict of a plain scheduler, if it has the entries of this one's. Those with an underscore may
    differ, as between versions of PyTorch."""
    expected = state_of(lr_scheduler, "lr_scheduler")["state"]
    if differ := sorted(str(k) for k in saved.keys() ^ expected.keys() if not str(k).startswith("_")):
        name = type(lr_scheduler).__name__
        raise ValueError(
            f"{file} has the plain state_dict of another lr_scheduler than this {name}: one of the two has "
            f"{differ[0]!r}, and the other has not; use the class that was saved"
        )
    return saved


def _check_averages(averages: Mapping[str, nn.Module] | None) -> dict[str, Boosted]:
    """The averages, if all are boosted and have names that can be folders."""
    if wrong := next((name for name in averages or {} if not re.fullmatch(r"\w[\w.-]*", name)), None):
        raise ValueError(f"an average called {wrong!r} makes no folder; use letters, digits, - and _")
    return {name: boosted_model(average) for name, average in (averages or {}).items()}


def boosted_model(model: Any) -> Boosted:
    """`model`, which must be boosted."""
    if not isinstance(model, Boosted):
        raise ValueError(f"this {type(model).__name__} is not boosted; pass what booster.boost returned")
    return model
