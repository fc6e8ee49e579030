"""The seam between a backward and a reduction: who computes gradients tells a sink, and the sink reduces.

A backward says `ready(parameter)` when nothing more will be added to that parameter's gradient in this
step, and `finish()` when all is said. Data parallelism implements the sink; a plain backward reaches it
through autograd's hooks (`attach`), a pipeline calls it by hand, because a hook does not fire where a weight
gradient is computed on its own, nor knows which microbatch is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from types import MethodType
from typing import Protocol
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hpnb.mesh import Axis


class GradientSink(Protocol):
    """Whoever reduces gradients."""

    @property
    def axis(self) -> Axis:
        """Over whose ranks."""

    @property
    def average(self) -> bool:
        """Whether it divides by their number; if not, it sums."""

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of `parameter` is complete on this rank."""

    def finish(self) -> None:
        """All gradients are; return once they are reduced, as far as the host is concerned."""

    def drop(self) -> None:
        """The backward failed: forget what it has left behind."""


def attach(
    parameters: Iterable[torch.nn.Parameter],
    ready: Callable[[torch.nn.Parameter], None],
    keep: bool = True,
) -> list[RemovableHandle]:
    """Call `ready(parameter)` whenever autograd has accumulated a gradient; returns the hooks' handles.

    The garbage collector does not look into these hooks: parameters whose hook leads back to them would never
    be freed. So a method is held weakly here, and its object by a hook of another kind, on one parameter,
    into which the collector does look: both stay for as long as the parameters do, and go together.

    Args:
        keep: False where something else keeps the object.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not isinstance(ready, MethodType):
        hook: Callable[..., None] = ready
        return [p.register_post_accumulate_grad_hook(hook) for p in trained]
    weakly: Callable[..., None] = partial(_call_back, ref(ready.__self__), ready.__func__)
    handles = [p.register_post_accumulate_grad_hook(weakly) for p in trained]
    if keep and trained:
        handles.append(trained[0].register_hook(partial(_keep, ready.__self__)))
    return handles


def _call_back(held: ref[object], ready: Callable[..., None], parameter: torch.nn.Parameter) -> None:
    """What a WeakMethod would do, which is written in Python: this runs for every parameter of a backward."""
    if (owner := held()) is not None:
        ready(owner, parameter)


def _keep(_: object, gradient: torch.Tensor) -> None:
    """A hook that leaves the gradient as it is."""


def after_backward(call: Callable[[], None]) -> None:
    """Run `call` when the backward that is under way has ended. To be used inside one of its hooks."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Whether a backward is under way, on this thread."""
    try:
        after_backward(lambda: None)
    except RuntimeError:  # which is what autograd says outside of one
        return False
    return True


# Who reduces which parameter. Not noted on the parameter itself: a copy or a saved one is nobody's.
_claims: MutableMapping[torch.Tensor, ref[object] | None] = WeakIdKeyDictionary()


def reduced_by(parameter: torch.Tensor) -> object | None:
    """Who reduces the gradient of `parameter` during backwards, if somebody does."""
    found = _claims.get(parameter)
    return None if found is None else found()


def claim(parameters: Iterable[torch.Tensor], reducer: object | None) -> None:
    """Say that `reducer` reduces the gradients of `parameters`, so that nobody else does as well."""
    for p in parameters:
        _claims[p] = None if reducer is None else ref(reducer)
