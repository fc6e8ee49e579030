"""What a model's forward calls its layers with, and what stands in for modules that are on another stage.

layer(hidden, mask, position_embeddings=..)      hidden is exchanged, the rest stays the same for a batch
"""

from __future__ import annotations

from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    """The hidden states that a layer is called with, and the name by which they are passed, if any."""
    if args:
        return args[0], None
    return kwargs["hidden_states"], "hidden_states"


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> Arguments:
    if args:
        return (hidden, *args[1:]), kwargs
    return (), {**kwargs, "hidden_states": hidden}


# --- in place of parts -----------------------------------------------------------------------------------


def first_argument(x: Any, *_: Any, **__: Any) -> Any:
    return x


def first_floats(*args: Any, **kwargs: Any) -> Any:
    """Of a module before the layers, which may take tokens and hidden states: the hidden states."""
    values = [*args, *kwargs.values()]
    floats = (x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point())
    return next(floats, values[0])


def empty_hidden(hidden_size: int, like: torch.Tensor, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """(B, s) -> (B, s, h) of zeros, which take no memory."""
    return like.new_zeros(()).expand(*ids.shape, hidden_size)
