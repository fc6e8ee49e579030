"""Packed texts: several documents in one sequence, whose `position_ids` restart where one begins.

    tokens          a b c d | e f g            position_ids    0 1 2 3 0 1 2

transformers lets no document attend to another one if the batch has no attention_mask and the model makes no
key-value cache. But most configs say use_cache=True, and `model(**batch)` then makes a cache, in which all
tokens of a sequence see each other. In training a cache has no use. So a boosted model makes none, and in
every layout the documents stay separated.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hpnb.caller_frame import warn_caller

_SEPARATES = (
    "this batch packs texts by position_ids, and hpnb separates them in every layout. A plain model(**batch) "
    "does so only with use_cache=False: with a cache, which config.use_cache=True makes, transformers lets "
    "the texts of a sequence attend to each other"
)


class CacheSwitch:
    """Keeps `module` from making a key-value cache; a model that takes no use_cache stays as it is."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[str] = []  # the arguments of its forward, if one of them is use_cache
        self.applies = False
        if not isinstance(module, PreTrainedModel):
            return
        parameters = inspect.signature(module.forward).parameters
        if "use_cache" in parameters:
            self._places, self.applies = list(parameters), True
        elif any(p.kind is p.VAR_KEYWORD for p in parameters.values()):  # which go to the models inside
            inner = (m for m in module.modules() if m is not module and isinstance(m, PreTrainedModel))
            self.applies = any("use_cache" in inspect.signature(m.forward).parameters for m in inner)

    def arguments(self, kwargs: Mapping[str, Any], training: bool, positional: int = 0) -> dict[str, Any]:
        """What the forward gets besides `kwargs` and so many positional arguments, or in place of them: in
        training use_cache=False. Otherwise a caller may ask for a cache, or pass one."""
        if not self.applies or "use_cache" in self._places[:positional]:
            return {}
        asks = kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
        return {} if asks and not training else {"use_cache": False}


class PackingWarning:
    """Warns once, if it is enabled, where a plain model would not separate packed texts: the boosted model
    does. The first batch with position_ids decides, because to look at them waits for the device."""

    def __init__(self, causal: bool, config: Any) -> None:
        self.enabled = False
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._waits = causal and bool(getattr(text_config, "use_cache", False))

    def look_at(self, batch: Any) -> None:
        if (
            not (self.enabled and self._waits)
            or not isinstance(batch, Mapping)
            or batch.get("attention_mask") is not None
        ):
            return
        positions = batch.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions.dim() <= 2:  # three dims are those of images
            self._waits = False
            if (positions.diff(dim=-1) != 1).any():
                warn_caller(_SEPARATES)
