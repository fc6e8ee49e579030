"""Pretrained weights into a ViT with a classifier for the task at hand.

transformers fills in at random what a checkpoint lacks, and says so in a warning among many. Here that is
right for the classifier alone; anything else is an error. Positions are interpolated where images have
another size: an image of n patches a side meets an m x m map of positions, enlarged or shrunk as a picture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import huggingface_hub.constants
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, ViTForImageClassification
from transformers.utils import logging

from hpnb.data import find
from hpnb.models.vit_size import ViTSize

HEAD = {"classifier.weight", "classifier.bias"}
POSITIONS = "vit.embeddings.position_embeddings"


def load(
    source: str, classes: int, image_size: int | None, dropout: float, wanted: ViTSize | None
) -> ViTForImageClassification:
    """The ViT in `source`, a local folder or a name on the hub, in float32 on the CPU.

    Args:
        wanted: the size that it must have, its images aside; None takes any.

    Raises:
        OSError: neither a folder nor to be had from the hub.
        ValueError: not a ViT, of another size, or weights that do not fill it.
    """
    only_local = os.path.isdir(source) or _no_hub()
    if os.path.isdir(source) and not os.path.isfile(os.path.join(source, "config.json")):
        raise OSError(_about(source))
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=only_local)
            _check(source, config, wanted)
            config.hidden_dropout_prob, config.attention_probs_dropout_prob = dropout, 0.0
            config.problem_type = None  # the labels to come say which loss it is
            if config.num_labels != classes:
                config.num_labels = classes
            model, found = ViTForImageClassification.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                attn_implementation="sdpa",
                local_files_only=only_local,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ValueError(f"the weights in {source} cannot be read ({error}); save them anew") from error
        except OSError as error:
            raise OSError(_about(source)) from error
    _check_filled(source, found)
    return model if image_size is None or image_size == config.image_size else _resized(model, image_size)


def _check(source: str, config: Any, wanted: ViTSize | None) -> None:
    if config.model_type != "vit":
        raise ValueError(f"{source} holds a model of type {config.model_type}; what works is vit")
    if wanted is not None:
        there, asked = vars(ViTSize.of(config)), vars(wanted)
        if off := [name for name in asked if name != "image" and asked[name] != there[name]]:
            told = " and ".join(f"{name}={there[name]}, not {asked[name]}" for name in off)
            raise ValueError(f"{source} has {told}; leave size out to take it as it is")


def _check_filled(source: str, found: dict[str, Any]) -> None:
    """Only a classifier may be drawn anew, and no block of the checkpoint may be left over."""
    mismatched = {key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]}
    drawn = sorted((set(found["missing_keys"]) | mismatched) - HEAD)
    left = sorted(name for name in found["unexpected_keys"] if ".layer" in name)
    for what, names in (("missing or of another shape", drawn), ("without a place", left)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"by the config.json of {source}, {len(names)} weights are {what}: "
                f"{', '.join(names[:3])}{more}; config and weights must be of one model"
            )


def _resized(model: ViTForImageClassification, image: int) -> ViTForImageClassification:
    """The same ViT for images of another size: a new map of positions, everything else as it is."""
    state, config = model.state_dict(), model.config
    before, after = ViTSize.of(config), replace(ViTSize.of(config), image=image)
    config.image_size = image
    state[POSITIONS] = _positions(state[POSITIONS], before.image // before.patch, after.image // after.patch)
    with torch.device("meta"):
        resized = ViTForImageClassification(config)
    resized.load_state_dict(state, assign=True)
    return resized


def _positions(old: torch.Tensor, side: int, new: int) -> torch.Tensor:
    """(1, 1 + side^2, h) -> (1, 1 + new^2, h); the class token's stays."""
    grid = old[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)  # (1, h, side, side)
    grid = torch.nn.functional.interpolate(grid, size=(new, new), mode="bicubic")
    return torch.cat([old[:, :1], grid.flatten(2).mT], dim=1)


def _no_hub() -> bool:
    """Whether to look into the hub's cache alone; asked before transformers would try for minutes."""
    return huggingface_hub.constants.HF_HUB_OFFLINE or not find.answers(huggingface_hub.constants.ENDPOINT)


def _about(source: str) -> str:
    if os.path.isdir(source):
        what = "is a folder without a whole model in it"
    else:
        what = "is not a folder here, and neither the Hugging Face hub nor its cache gives such a model"
    works = "give a folder that save_pretrained wrote, or leave pretrained out and train from scratch"
    return f"{source} {what}; {works}"


@contextmanager
def _quiet() -> Iterator[None]:
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
