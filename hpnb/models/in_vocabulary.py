"""An id that is no token of the vocabulary is an error, as in PyTorch: a sharded lookup would count it 0."""

from __future__ import annotations

import torch


def check_in_vocabulary(ids: torch.Tensor, is_valid: torch.Tensor, valid: str) -> None:
    """Raise ValueError if an id is not valid.

    On a GPU a device-side assertion fails instead, as in `F.embedding` and `F.cross_entropy`: the check does
    not wait for the GPU.

    Args:
        valid: what ids may be, in words.
    """
    if ids.is_cuda:
        torch._assert_async(is_valid.all(), f"an id is not in the vocabulary; use {valid}")
    elif not ids.is_meta and not is_valid.all():
        raise ValueError(f"{int(ids[~is_valid][0])} is not in the vocabulary; use {valid}")
