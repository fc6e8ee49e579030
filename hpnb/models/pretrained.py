"""Read pretrained weights into a model with a head for the task at hand.

transformers initialises at random what a checkpoint lacks, and says so in a warning among many. Here that is
right for a new head only; anything else is an error, and so is a block without a place in the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import huggingface_hub.constants
import torch
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils import logging

from hpnb.data.find_dataset import host_answers


def read_pretrained(
    kind: Any,
    source: str,
    model_type: str,
    prepare: Callable[[Any], None],
    *,
    head: Collection[str],
    is_block_weight: Callable[[str], bool],
    attention: str = "sdpa",
) -> Any:
    """The model of class `kind` in `source`, a local folder or a name on the hub, in float32 on the CPU.

    Args:
        model_type: what the config must call itself.
        prepare: looks through the config and changes it before the model is built.
        head: names of weights that may be initialised at random.
        is_block_weight: whether a weight of the checkpoint must have a place in the model.
    """
    only_local = os.path.isdir(source) or _is_hub_unreachable()
    if os.path.isdir(source) and not os.path.isfile(os.path.join(source, "config.json")):
        raise OSError(_explain_missing(source))
    with _silence_transformers():
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=only_local)
            if config.model_type != model_type:
                raise ValueError(
                    f"{source} holds a model of type {config.model_type}; what works is {model_type}"
                )
            prepare(config)
            model, loading = kind.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=only_local,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ValueError(f"the weights in {source} cannot be read ({error}); save them anew") from error
        except OSError as error:
            raise OSError(_explain_missing(source)) from error
    _check_filled(source, loading, head, is_block_weight)
    return model


def check_size(source: str, sizes: Mapping[str, int], requested: Mapping[str, int]) -> None:
    """Raise ValueError unless the checkpoint has all sizes that are requested."""
    if different := [name for name in requested if requested[name] != sizes[name]]:
        listed = " and ".join(f"{name}={sizes[name]}, not {requested[name]}" for name in different)
        raise ValueError(f"{source} has {listed}; leave size out to take it as it is")


def _check_filled(
    source: str, loading: dict[str, Any], head: Collection[str], is_block_weight: Callable[[str], bool]
) -> None:
    """Only a head may be initialised at random, and no block of the checkpoint may be left over."""
    mismatched = {key if isinstance(key, str) else key[0] for key in loading["mismatched_keys"]}
    missing = sorted((set(loading["missing_keys"]) | mismatched) - set(head))
    unused = sorted(name for name in loading["unexpected_keys"] if is_block_weight(name))
    for what, names in (("missing or of another shape", missing), ("without a place", unused)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"by the config.json of {source}, {len(names)} weights are {what}: "
                f"{', '.join(names[:3])}{more}; config and weights must be of one model"
            )


def _is_hub_unreachable() -> bool:
    """Whether to look into the hub's cache alone; asked before transformers would try for minutes."""
    hub = huggingface_hub.constants
    return hub.HF_HUB_OFFLINE or not host_answers(hub.ENDPOINT)


def _explain_missing(source: str) -> str:
    if os.path.isdir(source):
        what = "is a folder without a whole model in it"
    else:
        what = "is not a folder here, and neither the Hugging Face hub nor its cache gives such a model"
    works = "give a folder that save_pretrained wrote, or leave pretrained out and train from scratch"
    return f"{source} {what}; {works}"


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Without bars and warnings: every rank would show them, and what matters in them is checked here."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
