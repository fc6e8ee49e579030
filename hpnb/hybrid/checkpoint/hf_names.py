"""Names of weights in Hugging Face checkpoints: transformers renames weights when it saves them.

    in the model     vit.layers.0.attention.q_proj.weight
    on the disk      vit.encoder.layer.0.attention.attention.query.weight

No table of names is kept here. An empty copy of the model (on the meta device) saves tags by its own
save_pretrained: small tensors with contents that occur once. The name of a tag in the file is the name of its
weight on the disk, and config.json is written as well. If a tag comes back changed, more than names differ,
because some models fuse or transpose weights. Such models are gathered and saved by save_pretrained itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hpnb.hybrid.checkpoint.agreement import attempt, gather_objects


@dataclass(frozen=True)
class HFFormat:
    """What a checkpoint of a model of transformers contains: {name on the disk: its names in the model},
    several where weights are tied, or None if the weights themselves differ; and {file: contents} of all but
    weights."""

    names: dict[str, tuple[str, ...]] | None
    files: dict[str, bytes]


_formats: dict[tuple[type[nn.Module], torch.dtype, str], HFFormat] = {}


def is_pretrained(kind: type[nn.Module]) -> bool:
    """Whether it is a model of transformers, with save_pretrained and from_pretrained."""
    return issubclass(kind, PreTrainedModel)


def empty_model(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The full model on the meta device, with a copy of the config.

    A save in the background makes it, too, while training draws random numbers: on the meta device none are
    drawn, so no generator has to be restored, which would give training numbers a second time."""
    with silence_transformers(), torch.device("meta"):
        model = kind(deepcopy(config)).to(dtype)
    model.tie_weights()
    return model


def hf_format(kind: type[nn.Module], config: Any, dtype: torch.dtype, group: dist.ProcessGroup) -> HFFormat:
    """What a checkpoint of this class and config contains with weights of `dtype`. All ranks call it. Rank 0,
    where transformers saves, finds out; the other ranks receive the names, and no files."""

    def find_out() -> HFFormat | None:
        if group.rank() != 0:
            return None
        key = kind, dtype, config.to_json_string(use_diff=False)
        if key not in _formats:
            _formats[key] = _save_tags(empty_model(kind, config, dtype))
        return _formats[key]

    on_rank_0: HFFormat | None = attempt(find_out, group)
    names = gather_objects(None if on_rank_0 is None else on_rank_0.names, group)[0]
    return HFFormat(names, {}) if on_rank_0 is None else on_rank_0


def _save_tags(empty: Any) -> HFFormat:
    tags, names = dict[str, torch.Tensor](), dict[int, list[str]]()
    by_weight: dict[int, torch.Tensor] = {}
    for name, value in empty.state_dict(keep_vars=True).items():
        tag = by_weight.setdefault(id(value), _tag(len(by_weight), value.dim()))
        tags[name] = tag
        names.setdefault(id(tag), []).append(name)
    by_content = {_content(tag): tuple(names[id(tag)]) for tag in by_weight.values()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with silence_transformers():
                empty.save_pretrained(folder, state_dict=dict(tags), max_shard_size="1TB")
            saved = load_file(Path(folder, "model.safetensors"))
        except (RuntimeError, ValueError, KeyError, IndexError, OSError):  # it does more than rename
            empty.config.save_pretrained(folder)
            saved = {"": torch.zeros(0)}
        files = {f.name: f.read_bytes() for f in Path(folder).iterdir() if f.suffix != ".safetensors"}
    matched = {on_disk: by_content.get(_content(tag)) for on_disk, tag in saved.items()}
    known = {on_disk: in_model for on_disk, in_model in matched.items() if in_model is not None}
    # Only names differ if every tag came back unchanged, once.
    renamed_only = len(known) == len(matched) == len({in_model[0] for in_model in known.values()})
    order = list(tags)  # files give no order, and all ranks need the same
    known = dict(sorted(known.items(), key=lambda item: order.index(item[1][0])))
    return HFFormat(known if renamed_only else None, files)


def _content(tag: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tag.shape), *tag.flatten().tolist())


def _tag(number: int, dims: int) -> torch.Tensor:
    """A tensor of so many dims of different sizes, whose elements differ, so that any change is noticed."""
    shape = tuple(range(2, 2 + dims))
    count = torch.empty(shape, device="meta").numel()
    return (torch.arange(count) + number * 10**6).reshape(shape)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Without the progress bars and warnings of transformers, which every rank would show."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
