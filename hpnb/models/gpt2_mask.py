"""Who sees whom in a batch of texts: itself and what came before it, but no padding.

    position       0 1 2 3        the last of 4 is padding (attention_mask 1 1 1 0)
    0 sees         x . . .
    1 sees         x x . .        (B, 1, s, s), True or 0 where there is an x
    2 sees         x x x .
    3 sees         x x x .        what padding sees matters to nobody

`create_causal_mask` of transformers makes it, as in GPT2Model.forward. Where nothing is padding, sdpa needs
none and takes its faster way. To find out, a GPU is asked and waited for, so it is asked once a batch and not
once a block.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

from hpnb.models.model_anatomy import Inputs


class CausalMask:
    """Makes masks, and keeps the last one for as long as the tensor lives that it was made from."""

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[torch.Tensor], tuple[Any, ...], torch.Tensor | None] | None = None

    def __call__(self, config: Any, hidden: torch.Tensor, inputs: Inputs) -> torch.Tensor | None:
        """The mask of `inputs`, (B, 1, s, s) or None if none is needed, for hidden states like `hidden`.

        Of `hidden` the device and dtype count and nothing else: it may be a shard of the rows or of the
        width.
        """
        rows, length = inputs["input_ids"].shape
        padding, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if rows == 0 or hidden.device.type == "meta":
            return None  # nothing to hide
        if padding is not None and padding.dim() < 4:
            padding = padding.view(rows, -1)
        # Texts packed into one row do not see each other: by positions, if no attention_mask is given.
        decisive = inputs.get("attention_mask") if padding is not None else positions
        of = (rows, length, hidden.dtype, hidden.device, config._attn_implementation)
        if decisive is None or decisive.is_inference():  # whose values may change unseen
            return _made(config, hidden, rows, length, padding, positions)
        key = (decisive._version, *of)
        kept = self._kept
        if kept is not None and kept[0]() is decisive and kept[1] == key:
            return kept[2]
        mask = _made(config, hidden, rows, length, padding, positions)
        self._kept = (weakref.ref(decisive, self._forget), key, mask)
        return mask

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        self._kept = None

    def __reduce__(self) -> tuple[type[CausalMask], tuple[()]]:
        return CausalMask, ()  # a copy starts with nothing kept


def _made(
    config: Any,
    hidden: torch.Tensor,
    rows: int,
    length: int,
    padding: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor | None:
    like = torch.empty((rows, length, 0), dtype=hidden.dtype, device=hidden.device)  # no values, a shape
    mask: torch.Tensor | None = create_causal_mask(
        config=config,
        inputs_embeds=like,
        attention_mask=padding,
        past_key_values=None,
        position_ids=positions,
    )
    return mask
