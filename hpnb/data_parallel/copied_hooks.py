"""Hooks of a sharded module that its deep copy must not run: a copy has shards, but nothing gathers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class HookOfOriginal:
    """A hook that stays with its module. In a copy of the module, `in_a_copy` is called instead."""

    def __init__(self, call: Callable[..., Any], in_a_copy: Callable[..., Any]) -> None:
        self._call, self._in_a_copy = call, in_a_copy

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, _: dict[int, object]) -> Callable[..., Any]:
        return self._in_a_copy


def refuse_forward(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"this {type(module).__name__} is a copy of a sharded module: it has this rank's shards and cannot "
        "compute. Load what hpnb.placement.full_state_dict(copy, [axis]) gathers into another model"
    )


def do_nothing(*_: Any) -> None:
    pass
