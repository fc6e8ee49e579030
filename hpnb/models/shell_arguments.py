"""What a model's forward calls its layers with, kept as long as the batch's tensors live; and what stands in
for modules that are on another stage.

layer(hidden, mask, position_embeddings=..)      hidden is exchanged, the rest stays the same for a batch
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class PreparedArguments:
    """What was prepared last, for as long as the tensors live that it was prepared from."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._sources: tuple[weakref.ref[torch.Tensor], ...] = ()
        self._made: dict[int, Arguments] | None = None

    def get(self, arguments: Mapping[str, Any], hidden: torch.Tensor) -> dict[int, Arguments] | None:
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        if self._key is None or any(t.is_inference() for t in tensors):
            return None
        same = len(tensors) == len(self._sources) and all(
            source() is tensor for source, tensor in zip(self._sources, tensors, strict=True)
        )
        return self._made if same and self._key == _key(arguments, hidden) else None

    def put(self, arguments: Mapping[str, Any], hidden: torch.Tensor, made: dict[int, Arguments]) -> None:
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        if any(t.is_inference() for t in tensors):  # whose values may change unnoticed
            return
        self._key, self._made = _key(arguments, hidden), made
        self._sources = tuple(weakref.ref(tensor, self._forget) for tensor in tensors)

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        if any(source is reference for source in self._sources):
            self._key, self._sources, self._made = None, (), None

    def __reduce__(self) -> tuple[type[PreparedArguments], tuple[()]]:
        return PreparedArguments, ()  # a copy starts empty


def _key(arguments: Mapping[str, Any], hidden: torch.Tensor) -> tuple[Any, ...]:
    values = [
        (name, value._version if isinstance(value, torch.Tensor) else value)
        for name, value in arguments.items()
    ]
    return (hidden.dtype, hidden.device, *values)


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
