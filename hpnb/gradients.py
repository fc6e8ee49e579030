"""The seam between a backward and a reduction of gradients: a backward calls a sink, and the sink reduces.

A backward calls `ready(parameter)` when nothing more will be added to that parameter's gradient in this step,
and `finish()` after the last. Data parallelism implements the sink. A plain backward calls it through
autograd's hooks (`attach`). A pipeline calls it explicitly, because a hook does not fire if a weight gradient
is computed separately, and does not know which microbatch is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from types import MethodType
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hpnb.mesh import Axis


class GradientSink:
    """Reduces gradients over the ranks of an axis. Base class of DDP's, ZeRO's and ZeRO-3's reducers.

    A subclass implements `ready`, `finish` and `drop`. The other methods have a default.

    Attributes:
        axis: the ranks whose gradients are summed.
        average: divide sums by the number of ranks.
        shards_parameters: parameters are sharded too, and gathered for each forward and backward (ZeRO 3).
    """

    axis: Axis
    average: bool
    shards_parameters = False

    def ready(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of `parameter` is complete on this rank."""
        raise NotImplementedError

    def finish(self) -> None:
        """All gradients are complete. Return once they are reduced, as far as the CPU is concerned."""
        raise NotImplementedError

    def drop(self) -> None:
        """The backward failed: forget the gradients that it has left behind."""
        raise NotImplementedError

    def before_accumulation(self, parameter: torch.nn.Parameter) -> None:
        """A backward is about to add to the gradient of `parameter`, which may be reduced already."""

    def gradient_holder(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """The parameter whose .grad grows during a backward: with ZeRO 3 the unsharded one."""
        return parameter

    def hand_over(self) -> GradientSink:
        """Reduce nothing by itself any more, after a backward. From now on the caller calls `ready` and
        `finish` of the sink that this returns."""
        return self


def attach(
    parameters: Iterable[torch.nn.Parameter],
    ready: Callable[[torch.nn.Parameter], None],
    keep: bool = True,
) -> list[RemovableHandle]:
    """Call `ready(parameter)` whenever autograd has accumulated a gradient. Returns the hooks' handles.

    The garbage collector does not look into these hooks, so parameters whose hook refers back to them would
    never be freed. Therefore a method's object is referenced weakly by them, and strongly by a hook of
    another kind on one parameter, which the collector does see: the object lives as long as the parameters.

    Args:
        keep: False if something else keeps the object.
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


def _call_back(owner_ref: ref[object], ready: Callable[..., None], parameter: torch.nn.Parameter) -> None:
    """A faster WeakMethod: this runs for every parameter of a backward."""
    if (owner := owner_ref()) is not None:
        ready(owner, parameter)


def _keep(_: object, gradient: torch.Tensor) -> None:
    """A hook that leaves the gradient as it is."""


def after_backward(call: Callable[[], None]) -> None:
    """Run `call` when the current backward has ended. Use it inside one of the backward's hooks."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Whether a backward is running on this thread."""
    try:
        after_backward(lambda: None)
    except RuntimeError:  # autograd raises it outside of a backward
        return False
    return True


# What reduces which parameter's gradient. A table, because a copy of the parameter is not reduced.
_claims: MutableMapping[torch.Tensor, ref[object] | None] = WeakIdKeyDictionary()


def reduced_by(parameter: torch.Tensor) -> object | None:
    """The object that reduces the gradient of `parameter` during backwards, if there is one."""
    reducer_ref = _claims.get(parameter)
    return None if reducer_ref is None else reducer_ref()


def claim(parameters: Iterable[torch.Tensor], reducer: object | None) -> None:
    """Note that `reducer` reduces the gradients of `parameters`, so that nothing else does as well."""
    for p in parameters:
        _claims[p] = None if reducer is None else ref(reducer)
