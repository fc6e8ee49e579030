"""The causal mask of a batch of texts: a token attends to itself and what came before it, not to padding.

    position       0 1 2 3        the last of 4 is padding (attention_mask 1 1 1 0)
    0 sees         x . . .
    1 sees         x x . .        (B, 1, s, s), True or 0 where there is an x
    2 sees         x x x .
    3 sees         x x x .        what padding sees does not matter

`create_causal_mask` of transformers makes it, as in GPT2Model.forward. Without any padding sdpa needs no mask
and takes its faster path. Finding that out means to wait for the GPU, so it is done once per batch and not
once per block.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_causal_mask

from hpnb.models.batch_cache import BatchCache
from hpnb.models.model_anatomy import Inputs


class CausalMask:
    """Makes masks, and keeps the last one for as long as the tensor lives that it was made from."""

    def __init__(self) -> None:
        self._cache = BatchCache()
        self._needs_none: tuple[Any, ...] | None = None  # for which shapes sdpa takes no mask

    def __call__(
        self, config: Any, hidden: torch.Tensor, inputs: Inputs, block: str = ""
    ) -> torch.Tensor | None:
        """The mask of `inputs`, (B, 1, s, s) or None if none is needed, for hidden states like `hidden`.

        Of `hidden` only the device and dtype count: it may be a shard of the batch or of the hidden size.
        `block` is the name of the block that asks.
        """
        batch_size, length = inputs["input_ids"].shape
        padding, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if batch_size == 0 or hidden.device.type == "meta":
            return None  # nothing to mask
        if padding is not None and padding.dim() < 4:
            padding = padding.view(batch_size, -1)
        arguments = (config, hidden, batch_size, length, padding, positions)
        # Texts packed into one sequence do not see each other: by positions, if no attention_mask is given.
        source = positions if padding is None else inputs.get("attention_mask")
        form = (batch_size, length, hidden.dtype, hidden.device, config._attn_implementation)
        if source is None:  # each block asks, and asking transformers takes as long as a few launches
            mask = None if form == self._needs_none else _make_mask(*arguments)
            self._needs_none = form if mask is None else None
            return mask
        return self._cache.get(
            {"source": source, "form": form}, hidden, lambda: _make_mask(*arguments), block
        )


def _make_mask(
    config: Any,
    hidden: torch.Tensor,
    batch_size: int,
    length: int,
    padding: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor | None:
    shape_only = torch.empty((batch_size, length, 0), dtype=hidden.dtype, device=hidden.device)
    mask: torch.Tensor | None = create_causal_mask(
        config=config,
        inputs_embeds=shape_only,
        attention_mask=padding,
        past_key_values=None,
        position_ids=positions,
    )
    return mask
