"""Names of weights in Hugging Face checkpoints: transformers renames weights when it saves them.

    in the model     vit.layers.0.attention.q_proj.weight
    on the disk      vit.encoder.layer.0.attention.attention.query.weight

No table of names is kept here. An empty copy of the model (on the meta device) saves tags by its own
save_pretrained: small tensors with contents that occur once. The name of a tag in the file is the name of its
weight on the disk, and config.json is written as well. If a tag comes back changed, more than names differ,
because some models fuse or transpose weights. Such models are gathered and saved by save_pretrained itself.

The empty copy is made from the config. A user may have changed the modules since: added adapters, replaced
the head, or untied the output layer. Such a model has other names than the copy, so its outline
(`model_outline.py`) saves a tag for each weight that it has. Where save_pretrained cannot write these tags,
the weights keep the names that they have in the model.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.agreement import attempt, gather_objects


@dataclass(frozen=True)
class HFFormat:
    """What a checkpoint of a model of transformers contains: {name on the disk: its names in the model},
    several where weights are tied, or None if the weights themselves differ; {file: contents} of all but
    weights; the names in the model of frozen weights that its class leaves out of checkpoints, because its
    __init__ computes them; and whether the model is another one than its config says."""

    names: dict[str, tuple[str, ...]] | None
    files: dict[str, bytes]
    left_out: frozenset[str] = frozenset()
    is_changed: bool = False


_OfConfig = tuple[dict[str, str], HFFormat]  # {name: the first name of the same weight} of the empty model
_formats: dict[tuple[type[nn.Module], torch.dtype, str], _OfConfig | None] = {}


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


def hf_format(
    model: Boosted, first_names: Mapping[str, str], dtype: torch.dtype, group: dist.ProcessGroup
) -> HFFormat:
    """What a checkpoint of the model contains with weights of `dtype`. All ranks call it. Rank 0, where
    transformers saves, finds out; the other ranks receive the names, and no files.

    Args:
        first_names: {name: the first name of the same weight} of the full model, the same on all ranks.
    """

    def find_out() -> HFFormat | None:
        if group.rank() != 0:
            return None
        of_config = _format_of_config(model.kind, model.full_config, dtype)
        if of_config is not None and _has_weights_of(of_config[0], first_names):
            left_out = first_names.keys() & of_config[1].left_out
            if model.outline is None or not left_out & model.outline.trained:
                return of_config[1]
        return _format_of_outline(model, first_names, dtype)

    on_rank_0: HFFormat | None = attempt(find_out, group)
    without_files = None if on_rank_0 is None else replace(on_rank_0, files={})
    for_others: HFFormat = gather_objects(without_files, group)[0]
    return for_others if on_rank_0 is None else on_rank_0


def _has_weights_of(empty: Mapping[str, str], first_names: Mapping[str, str]) -> bool:
    """Whether the model has the names of the empty one, and at least its tied weights."""
    return empty.keys() == first_names.keys() and all(
        first_names[name] == first_names[first] for name, first in empty.items()
    )


def _format_of_config(kind: Any, config: Any, dtype: torch.dtype) -> _OfConfig | None:
    """Of a fresh model of this config; None if the class makes none of it."""
    key = kind, dtype, config.to_json_string(use_diff=False)
    if key not in _formats:
        try:
            empty = empty_model(kind, config, dtype)
        except Exception:  # its __init__ is the user's
            _formats[key] = None
        else:
            first_names = dict[int, str]()
            state = empty.state_dict(keep_vars=True)
            names = {name: first_names.setdefault(id(value), name) for name, value in state.items()}
            _formats[key] = names, _save_tags_of(empty, names)
    return _formats[key]


def _save_tags_of(empty: Any, first_names: Mapping[str, str]) -> HFFormat:
    state = empty.state_dict(keep_vars=True)
    by_weight, names = dict[str, torch.Tensor](), dict[str, list[str]]()
    for name, first in first_names.items():
        by_weight.setdefault(first, _tag(len(by_weight), state[name].dim()))
        names.setdefault(first, []).append(name)
    by_content = {_content(tag): tuple(names[first]) for first, tag in by_weight.items()}
    tags = {name: by_weight[first] for name, first in first_names.items()}
    saved, files = _save_by_transformers(empty, tags)
    matched = {on_disk: by_content.get(_content(tag)) for on_disk, tag in saved.items()}
    known = {on_disk: in_model for on_disk, in_model in matched.items() if in_model is not None}
    # Only names differ if every tag came back unchanged, once.
    renamed_only = len(known) == len(matched) == len({in_model[0] for in_model in known.values()})
    order = list(tags)  # files give no order, and all ranks need the same
    known = dict(sorted(known.items(), key=lambda item: order.index(item[1][0])))
    left_out = tags.keys() - {name for names in known.values() for name in names} if renamed_only else ()
    return HFFormat(known if renamed_only else None, files, frozenset(left_out))


def _format_of_outline(model: Boosted, first_names: Mapping[str, str], dtype: torch.dtype) -> HFFormat:
    """Of the model as the user passed it. Each weight has one name on the disk, so it is written once."""
    outline, config = model.outline, model.full_config
    assert outline is not None, "it is of transformers"
    order = sorted(first_names, key=lambda name: outline.order.get(name, len(outline.order)))
    key = dtype, config.to_json_string(use_diff=False), tuple((name, first_names[name]) for name in order)
    if key not in outline.formats:
        tied = dict[str, list[str]]()
        for name in order:
            tied.setdefault(first_names[name], []).append(name)
        declared = [re.compile(pattern) for pattern in outline.declared_ties()]
        # transformers drops the names that a class declares, such as lm_head.weight, if another one is left.
        kept = {
            next((n for n in names if not any(d.search(n) for d in declared)), names[0]): tuple(names)
            for names in tied.values()
        }
        tags = {name: _tag(i, 1) for i, name in enumerate(kept)}
        saved, files = _save_by_transformers(outline.model(config, dtype), tags)
        by_content = {_content(tag): name for name, tag in tags.items()}
        on_disk = {by_content.get(_content(tag)): name for name, tag in saved.items()}
        renamed_only = None not in on_disk and len(on_disk) == len(saved)
        names = {(on_disk.get(name) or name if renamed_only else name): tied for name, tied in kept.items()}
        if len(names) < len(kept):  # a name that transformers leaves out is another one's on the disk
            names = kept
        outline.formats[key] = HFFormat(names, files, is_changed=True)
    of_outline: HFFormat = outline.formats[key]
    return of_outline


def _save_by_transformers(
    model: Any, tags: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    """({name: tag} as save_pretrained writes them, the contents of the other files)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with silence_transformers():
                model.save_pretrained(folder, state_dict=dict(tags), max_shard_size="1TB")
            saved = load_file(Path(folder, "model.safetensors"))
        except Exception:  # it does more than rename
            model.config.save_pretrained(folder)
            saved = {"": torch.zeros(0)}
        files = {f.name: f.read_bytes() for f in Path(folder).iterdir() if f.suffix != ".safetensors"}
    return saved, files


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
