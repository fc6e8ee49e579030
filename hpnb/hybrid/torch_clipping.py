"""Where PyTorch's `clip_grad_norm_` would clip wrongly, say so instead of training differently.

That function looks for full, unscaled gradients on the parameters of one rank. It is right if all of them are
there after a backward, which takes ZeRO 0, no loss scaler, and tp_size, pp_size and ep_size of 1:

    ZeRO 1, 2           the parameters have no gradients: it clips nothing
    ZeRO 3, tp, pp, ep  a rank has shards, its stages or its experts: it divides by their norm alone
    fp16                they carry the scale of the loss: it clips thousands of times too much

Two things can be noticed. `model.parameters()` of a boosted model is a generator, so it knows who reads it:
PyTorch's function is refused. A list of parameters, or the optimizer's groups, does not know, but every
gradient counts the changes made in place (`_version`): a step warns if there were any since the backward.
With ZeRO 1 and 2 a list cannot be noticed: nothing is changed, and the norm that PyTorch returns is 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import FrameType

import torch
from torch.nn.utils import clip_grad

from hpnb.hybrid.plugins import HybridParallelPlugin
from hpnb.hybrid.sharding_options import sharding_options


def reason(plugin: HybridParallelPlugin, by_norm: bool = True) -> str | None:
    """Why PyTorch's function would clip wrongly with these options, `by_norm` or each element alone; None if
    it would not."""
    if plugin.zero_stage in (1, 2):
        return f"zero_stage={plugin.zero_stage} keeps gradients with the optimizer, not on the parameters"
    if plugin.policy.scaled:
        return f"precision={plugin.policy.name!r} has gradients that carry the scale of the loss"
    options = sharding_options(plugin, flattened=False)
    if not options or not by_norm:
        return None
    return f"with {', '.join(options)} a rank has only its part of the gradients"


def refuse_clipping(plugin: HybridParallelPlugin, reader: FrameType) -> None:
    """Raise if `reader`, the frame that reads a boosted model's parameters, would clip wrongly."""
    if reader.f_globals is not vars(clip_grad):
        return
    name = reader.f_code.co_qualname.partition(".")[0]  # the function's, also in a comprehension of it
    by_norm = name != clip_grad.clip_grad_value_.__name__
    if why := reason(plugin, by_norm):
        instead = (
            _instead(plugin)
            if by_norm
            else "leave the call out, and let the plugin clip the norm: max_norm=1.0"
        )
        raise RuntimeError(f"torch.nn.utils.{name} clips wrongly here, because {why}; {instead}")


def _instead(plugin: HybridParallelPlugin) -> str:
    if plugin.max_norm > 0:
        return f"leave the call out: the plugin's max_norm={plugin.max_norm} clips in optimizer.step()"
    return (
        f"leave the call out, and give the bound to the plugin, {type(plugin).__name__}(.., max_norm=1.0): "
        "optimizer.step() then clips by the norm over all ranks, which is optimizer.last_step.norm"
    )


class GradientVersions:
    """Notices gradients that are changed in place between a backward and a step, and warns once, if such a
    change would be wrong as PyTorch's clipping."""

    def __init__(self, plugin: HybridParallelPlugin) -> None:
        self._plugin, self._warns = plugin, reason(plugin) is not None
        self._noted: list[tuple[torch.Tensor, int, int]] = []  # (parameter, its gradient's address, version)

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """The backward has ended: note the gradients as it has left them."""
        if self._warns:
            grads = [(p, p.grad) for p in parameters]
            self._noted = [
                (p, g.data_ptr(), g._version) for p, g in grads if g is not None and not g.is_sparse
            ]

    def forget(self) -> None:
        """Gradients are zeroed, or about to be used up."""
        self._noted = []

    def check(self) -> None:
        """A step begins: warn if gradients have been changed in place since the backward."""
        noted, self._noted = self._noted, []
        changed = sum(
            (g := p.grad) is not None and g.data_ptr() == address and g._version != version
            for p, address, version in noted
        )
        if changed:
            self._warns = False
            warnings.warn(
                f"{changed} of {len(noted)} gradients were changed in place between the backward and "
                "optimizer.step(). If torch.nn.utils.clip_grad_norm_ did it, it clipped wrongly, because "
                f"{reason(self._plugin)}; {_instead(self._plugin)}",
                stacklevel=3,
            )
