"""A unit: parameters that are gathered and freed as one, and the places in the module where they stand.

A module computes with what is registered under its parameters' names. For a forward or a backward that is the
whole parameters, at all other times the shares. A backward needs them registered too: a checkpoint inside the
unit computes its forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from hpnb.data_parallel.flat import Flat


class Unit:
    """What is gathered and freed as one.

    Args:
        parameters: {name: parameter}, to be split into flats: one a dtype, trained and frozen apart.
        modules: all that may hold one of them under some name, its own and others.
        make: makes a flat, given its parameters and what to call when they all have gradients.
        complete: called in a backward when all gradients of one of the flats have come.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence[nn.Module],
        make: Callable[[Mapping[str, nn.Parameter], Callable[[Flat], None]], Flat],
        complete: Callable[[Unit, Flat], None],
    ) -> None:
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name, p in parameters.items():
            kinds.setdefault((p.dtype, p.requires_grad), {})[name] = p
        self.flats = tuple(make(kind, partial(complete, self)) for kind in kinds.values())
        whole_of = {s: w for flat in self.flats for s, w in zip(flat.shares, flat.wholes, strict=True)}
        self._places = [
            (module._parameters, key, p, whole_of[p])
            for module in modules
            for key, p in module._parameters.items()
            if p in whole_of
        ]
        self.inside = False  # whether the module has its whole parameters
        self.uses = 0  # forwards whose backward has not gone through it

    @property
    def has_frozen(self) -> bool:
        return any(flat.has_frozen for flat in self.flats)

    @property
    def missing(self) -> int:
        """How many gradients this backward has not brought yet."""
        return sum(flat.missing for flat in self.flats)

    def start(self) -> None:
        """Start to gather."""
        for flat in self.flats:
            flat.start()

    def enter(self) -> None:
        """From here on the module has its whole parameters. `start` was called before."""
        for flat in self.flats:
            flat.wait()
        if not self.inside:
            self.inside = True
            for flat in self.flats:
                flat.refresh()
            for parameters, key, _, whole in self._places:
                parameters[key] = whole

    def leave(self) -> None:
        """From here on the module has its shares."""
        if self.inside:
            self.inside = False
            for parameters, key, share, _ in self._places:
                parameters[key] = share

    def free(self) -> None:
        for flat in self.flats:
            flat.free()
