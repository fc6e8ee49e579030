"""Outputs whose logits are cut: put together when somebody reads them, and only then.

outputs = model(input_ids=ids, labels=ids)
outputs.loss          # from the logits as they are: nothing is gathered
outputs.logits        # (b, s, V), gathered now: all ranks of the axis have to read it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import ModelOutput

Whole = Callable[[torch.Tensor], torch.Tensor]


def lazily(outputs: Any, whole: Whole, loss: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """`outputs` of a transformers model, which puts its logits together with `whole` when they are read.

    Args:
        loss: what gives the loss of this rank's logits, if it has not been computed.
    """
    if isinstance(outputs, tuple):  # return_dict=False: there is no later moment
        first = next(i for i, v in enumerate(outputs) if v is not None and v.dim() == 3)
        return (*outputs[:first], whole(outputs[first]), *outputs[first + 1 :])
    local = outputs.logits
    outputs.__class__ = _lazy(type(outputs))
    outputs.__dict__.update(_local_logits=local, _whole=whole, _loss=loss)
    return outputs


def local_logits(outputs: Any) -> torch.Tensor:
    """The logits of this rank, as its head gave them."""
    found: torch.Tensor | None = getattr(outputs, "_local_logits", None)
    return outputs.logits if found is None else found


class _Lazy(ModelOutput):  # type: ignore[misc]
    """Gathers logits once, in whatever way they are read."""

    @property
    def logits(self) -> torch.Tensor:
        if (whole := self.__dict__.get("_whole")) is not None:
            self.logits = whole(self._local_logits)
        found: torch.Tensor = self.__dict__["logits"]
        return found

    @logits.setter
    def logits(self, value: torch.Tensor) -> None:
        self.__dict__.update(_whole=None, logits=value)
        dict.__setitem__(self, "logits", value)

    @property
    def loss(self) -> torch.Tensor | None:
        if (of := self.__dict__.get("_loss")) is not None:
            self.loss = of(self._local_logits)
        found: torch.Tensor | None = self.__dict__.get("loss")
        return found

    @loss.setter
    def loss(self, value: torch.Tensor | None) -> None:
        self.__dict__.update(_loss=None, loss=value)
        if value is not None:
            dict.__setitem__(self, "loss", value)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self:
                raise KeyError(key)
            return getattr(self, key)  # of logits the whole ones
        names = list(self.keys())[key]
        return getattr(self, names) if isinstance(names, str) else tuple(self[name] for name in names)

    def values(self) -> Any:
        return [self[name] for name in self.keys()]

    def items(self) -> Any:
        return [(name, self[name]) for name in self.keys()]


_made: dict[type, type] = {}


def _lazy(kind: type) -> type:
    """A subclass of a transformers output."""
    if kind not in _made:
        _made[kind] = type(kind.__name__, (_Lazy, kind), {})
    return _made[kind]
