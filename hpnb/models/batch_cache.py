"""What all blocks need of a batch, such as a mask: made once, and kept as long as its tensors live.

A tensor counts its changes, so what was made of it is made again if it has changed. Tensors of the inference
mode count none. What is made of these serves one forward: it is made again as soon as a block asks twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class BatchCache:
    """The last value that was made of some arguments, as long as their tensors live and do not change."""

    def __init__(self) -> None:
        self._sources: tuple[weakref.ref[torch.Tensor], ...] = ()  # tensors, by identity
        self._key: tuple[Any, ...] | None = None  # everything else, by value
        self._value: Any = None
        self._served: set[str] = set()  # blocks that have got this value

    def get(
        self, arguments: Mapping[str, Any], hidden: torch.Tensor, make: Callable[[], Made], block: str
    ) -> Made:
        """`make()`, or what it gave for the same arguments; of `hidden` only the dtype and device count.

        Args:
            block: the name of the block that asks.
        """
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        key = _key(arguments, hidden)
        same = len(tensors) == len(self._sources) and all(
            source() is tensor for source, tensor in zip(self._sources, tensors, strict=True)
        )
        is_next_forward = block in self._served and any(t.is_inference() for t in tensors)
        if not same or key != self._key or is_next_forward:
            value = make()
            self._key, self._value, self._served = key, value, set()
            self._sources = tuple(weakref.ref(tensor, self._forget) for tensor in tensors)
        self._served.add(block)
        kept: Made = self._value
        return kept

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        if any(source is reference for source in self._sources):
            self._key, self._sources, self._value = None, (), None

    def __reduce__(self) -> tuple[type[BatchCache], tuple[()]]:
        return BatchCache, ()  # a copy starts empty


def _key(arguments: Mapping[str, Any], hidden: torch.Tensor) -> tuple[Any, ...]:
    def by_value(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return None if value.is_inference() else value._version

    values = [(name, by_value(value)) for name, value in arguments.items()]
    # What is made in inference mode cannot be used in a forward that is differentiated.
    return (torch.is_inference_mode_enabled(), hidden.dtype, hidden.device, *values)
