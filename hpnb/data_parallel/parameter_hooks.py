"""Hooks that a user has registered on a sharded parameter. Autograd does not see them: under ZeRO 3 it gives
gradients to the unsharded parameter.

    register_hook                         called in each backward with this rank's full gradient, before the
                                          ranks' are summed; what it returns takes the gradient's place
    register_post_accumulate_grad_hook    called when this rank's shard of the sum is in .grad

A hook of the first kind gets what it gets under ZeRO 1 and 2. One of the second kind cannot: a parameter's
.grad has the shape of its shard.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class ForwardedHooks:
    """Lets the hooks of sharded parameters run on gradients of unsharded ones."""

    def __init__(self) -> None:
        self._handles: dict[nn.Parameter, RemovableHandle] = {}

    def follow(self, sharded: nn.Parameter, unsharded: nn.Parameter) -> None:
        """Hook `unsharded` if `sharded` has hooks by now. Without any it has none: a backward that is split
        leaves parameters with hooks to autograd."""
        has_hooks = bool(sharded._backward_hooks) and unsharded.requires_grad
        if has_hooks == (unsharded in self._handles):
            return
        if has_hooks:
            self._handles[unsharded] = unsharded.register_hook(partial(_run_gradient_hooks, sharded))
        else:
            self._handles.pop(unsharded).remove()


def _run_gradient_hooks(sharded: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    for hook in tuple((sharded._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def has_post_accumulate_hooks(sharded: nn.Parameter) -> bool:
    return bool(sharded._post_accumulate_grad_hooks)


@torch.no_grad()
def run_post_accumulate_hooks(sharded: nn.Parameter) -> None:
    for hook in tuple(sharded._post_accumulate_grad_hooks.values()):
        if hook(sharded) is not None:
            raise RuntimeError("a hook of register_post_accumulate_grad_hook must return None")
