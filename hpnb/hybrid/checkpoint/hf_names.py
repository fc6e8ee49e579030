"""What the files of a model are called inside: transformers renames weights on their way to the disk.

    in the model     vit.layers.0.attention.q_proj.weight
    on the disk      vit.encoder.layer.0.attention.attention.query.weight

Nothing of this is written down here. A twin of the model without memory saves tags, small tensors with
contents of their own, by its own save_pretrained; whatever a tag is called in the file is what its weight is
called. It writes config.json on the way. A tag that comes back changed says that more than names differ (some
models fuse or transpose weights); those models are saved whole by save_pretrained itself.
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

from hpnb.hybrid.checkpoint.agreement import attempt, gathered


@dataclass(frozen=True)
class Description:
    """How a model of transformers looks on the disk.

    Attributes:
        names: {name on the disk: its names in the model}, several where weights are tied; None if the
            weights themselves differ.
        files: {file: contents} of all but weights: config.json and its like.
    """

    names: dict[str, tuple[str, ...]] | None
    files: dict[str, bytes]


_known: dict[tuple[type[nn.Module], torch.dtype, str], Description] = {}


def is_pretrained(kind: type[nn.Module]) -> bool:
    """Whether it is a model of transformers, with save_pretrained and from_pretrained."""
    return issubclass(kind, PreTrainedModel)


def twin(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The whole model without memory, with a config of its own."""
    with quiet(), torch.device("meta"):
        made = kind(deepcopy(config)).to(dtype)
    made.tie_weights()
    return made


def describe(kind: type[nn.Module], config: Any, dtype: torch.dtype, group: dist.ProcessGroup) -> Description:
    """How a model of this class and config looks on the disk with weights of `dtype`. All ranks call it: only
    the first can tell, where transformers saves; the others are told the names, and no files."""

    def tell() -> Description | None:
        if group.rank() != 0:
            return None
        key = kind, dtype, config.to_json_string(use_diff=False)
        if key not in _known:
            _known[key] = _describe(twin(kind, config, dtype))
        return _known[key]

    found: Description | None = attempt(tell, group)
    names = gathered(None if found is None else found.names, group)[0]
    return Description(names, {}) if found is None else found


def _describe(empty: Any) -> Description:
    tags, names = dict[str, torch.Tensor](), dict[int, list[str]]()
    made: dict[int, torch.Tensor] = {}
    for name, value in empty.state_dict(keep_vars=True).items():
        tag = made.setdefault(id(value), _tag(len(made), value.dim()))
        tags[name] = tag
        names.setdefault(id(tag), []).append(name)
    by_content = {(tuple(t.shape), *t.flatten().tolist()): tuple(names[id(t)]) for t in made.values()}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet():
                empty.save_pretrained(folder, state_dict=dict(tags), max_shard_size="1TB")
            saved = load_file(Path(folder, "model.safetensors"))
        except (RuntimeError, ValueError, KeyError, IndexError, OSError):  # it does more than rename
            empty.config.save_pretrained(folder)
            saved = {"": torch.zeros(0)}
        files = {f.name: f.read_bytes() for f in Path(folder).iterdir() if f.suffix != ".safetensors"}
    found = {name: by_content.get((tuple(t.shape), *t.flatten().tolist())) for name, t in saved.items()}
    known = {name: at for name, at in found.items() if at is not None}
    # All of them came back as they were, each once.
    whole = len(known) == len(found) == len({at[0] for at in known.values()})
    order = list(tags)  # files give no order, and all ranks need the same
    known = dict(sorted(known.items(), key=lambda one: order.index(one[1][0])))
    return Description(known if whole else None, files)


def _tag(number: int, dims: int) -> torch.Tensor:
    """Of so many dims, each of another size, and elements that differ: no change goes unnoticed."""
    shape = tuple(range(2, 2 + dims))
    count = torch.empty(shape, device="meta").numel()
    return (torch.arange(count) + number * 10**6).reshape(shape)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and warnings of transformers, which every rank would show; and what it draws to make a
    model, on some ranks alone, is not drawn from what dropout draws from."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):  # models are made on the CPU
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
