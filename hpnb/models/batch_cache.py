"""What all blocks need of a batch, such as a mask: made once, and kept as long as its tensors live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class BatchCache:
    """The last value that was made of some arguments, as long as their tensors live and do not change."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._sources: tuple[weakref.ref[torch.Tensor], ...] = ()
        self._value: Any = None

    def get(self, arguments: Mapping[str, Any], hidden: torch.Tensor, make: Callable[[], Made]) -> Made:
        """`make()`, or what it gave for the same arguments; of `hidden` only the dtype and device count."""
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        if any(t.is_inference() for t in tensors):  # whose values may change unnoticed
            return make()
        key = _key(arguments, hidden)
        same = len(tensors) == len(self._sources) and all(
            source() is tensor for source, tensor in zip(self._sources, tensors, strict=True)
        )
        if not same or key != self._key:
            value = make()
            self._key, self._value = key, value
            self._sources = tuple(weakref.ref(tensor, self._forget) for tensor in tensors)
        kept: Made = self._value
        return kept

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        if any(source is reference for source in self._sources):
            self._key, self._sources, self._value = None, (), None

    def __reduce__(self) -> tuple[type[BatchCache], tuple[()]]:
        return BatchCache, ()  # a copy starts empty


def _key(arguments: Mapping[str, Any], hidden: torch.Tensor) -> tuple[Any, ...]:
    values = [
        (name, value._version if isinstance(value, torch.Tensor) else value)
        for name, value in arguments.items()
    ]
    # What is made in inference mode cannot be used in a forward that is differentiated.
    return (torch.is_inference_mode_enabled(), hidden.dtype, hidden.device, *values)
