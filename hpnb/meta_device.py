"""A model on the meta device has no values: it gets zeros when it is parallelized, to be filled afterwards.

Whoever forgets to fill it would train from zeros, where a transformer's gradients are zero as well, and the
loss looks like that of any model at its start.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Unfilled:
    """The parameters of `model` that are on the meta device now, and have to be filled before its first step.

    Args:
        model: not parallelized yet. Its parameters stay the same objects.
    """

    def __init__(self, model: nn.Module) -> None:
        self._on_meta = {id(p) for p in model.parameters() if p.is_meta}

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Look at those of this rank's `parameters` that were on the meta device, once.

        Raises:
            ValueError: all of them are zero.
        """
        if not self._on_meta:
            return
        zeros = [p for p in parameters if id(p) in self._on_meta and p.numel()]
        if zeros and not any(bool(p.detach().any()) for p in zeros):
            raise ValueError(
                f"{len(zeros)} parameters of this rank were on the meta device, which holds no values, and "
                "are all zero: fill the model before its first step, by booster.load_model(model, folder), "
                "booster.load, hpnb.placement.load_full_state_dict or an initialiser of your own; or make it "
                "by from_pretrained or on the CPU, or layer by layer with hpnb.pipeline_parallel.Builder"
            )
        self._on_meta = set()


__all__ = ["Unfilled"]
