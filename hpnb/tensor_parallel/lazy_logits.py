"""Outputs whose logits are sharded: they are gathered when somebody reads them, and only then.

outputs = model(input_ids=ids, labels=ids)
outputs.loss          # from the sharded logits: nothing is gathered
outputs.logits        # (b, s, V), gathered now: all ranks of the axis have to read it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from transformers.utils import ModelOutput

Gather = Callable[[torch.Tensor], torch.Tensor]


class LazyLogits(ModelOutput):  # type: ignore[misc]
    """Mixed into a transformers output: gathers logits once, when they are read, by name, by index, by `get`,
    by unpacking or in a copy. Only `vars` and `popitem` give what is there, this rank's shard.

    Attributes:
        local_logits: this rank's, as its head gave them.
    """

    local_logits: torch.Tensor
    _gather: Gather | None = None  # None once logits are gathered, or replaced
    _compute_loss: Gather | None = None  # None once the loss is computed, or set

    @property
    def is_lazy(self) -> bool:
        return self._gather is not None

    @property
    def logits(self) -> torch.Tensor:
        if self._gather is not None:
            self.logits = self._gather(self.local_logits)
        logits: torch.Tensor = self.__dict__["logits"]
        return logits

    @logits.setter
    def logits(self, logits: torch.Tensor) -> None:
        self.__dict__.update(_gather=None, logits=logits)
        OrderedDict.__setitem__(self, "logits", logits)

    @property
    def loss(self) -> torch.Tensor | None:
        if self._compute_loss is not None:
            self.loss = self._compute_loss(self.local_logits)
        loss: torch.Tensor | None = self.__dict__.get("loss")
        return loss

    @loss.setter
    def loss(self, loss: torch.Tensor | None) -> None:
        self.__dict__.update(_compute_loss=None, loss=loss)
        if loss is not None:
            OrderedDict.__setitem__(self, "loss", loss)

    def add_to_loss(self, term: torch.Tensor) -> None:
        """Add `term` to the loss that will be computed, if labels give one."""
        if (compute_loss := self._compute_loss) is not None:
            self.__dict__["_compute_loss"] = lambda logits: compute_loss(logits) + term

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self:
                raise KeyError(key)
            return getattr(self, key)  # gathers logits
        names = list(self.keys())[key]
        return getattr(self, names) if isinstance(names, str) else tuple(self[name] for name in names)

    def get(self, key: Any, default: Any = None) -> Any:
        with suppress(KeyError):
            return self[key]
        return default

    def values(self) -> Any:
        return [self[name] for name in self.keys()]

    def items(self) -> Any:
        return [(name, self[name]) for name in self.keys()]

    def __reduce__(self) -> Any:
        """A copy, as of pickle, is an output of transformers' class, with gathered logits."""
        output_class: Any = type(self).__bases__[1]
        return output_class, tuple(getattr(self, field.name) for field in fields(self))


def with_lazy_logits(outputs: Any, gather: Gather, compute_loss: Gather | None = None) -> Any:
    """`outputs` of a transformers model with `gather` applied to its logits when they are read.

    Args:
        compute_loss: gives the loss from this rank's logits, if it has not been computed.

    Returns:
        An output of a subclass of the outputs' class; of a tuple (return_dict=False) a tuple whose logits are
        gathered already, since it has no later moment.
    """
    if isinstance(outputs, tuple):
        at = next((i for i, v in enumerate(outputs) if v is not None and v.dim() == 3), None)
        return outputs if at is None else (*outputs[:at], gather(outputs[at]), *outputs[at + 1 :])
    output_class: Any = type(outputs)
    lazy = _lazy_class(output_class)(
        **{field.name: getattr(outputs, field.name) for field in fields(outputs)}
    )
    vars(lazy).update(local_logits=outputs.logits, _gather=gather, _compute_loss=compute_loss)
    if compute_loss is not None:  # its key, which comes first
        OrderedDict.__setitem__(lazy, "loss", None)
        lazy.move_to_end("loss", last=False)
    return lazy


@cache
def _lazy_class(output_class: Any) -> Any:
    return type(output_class.__name__, (LazyLogits, output_class), {})
