"""The interface between a backward and the reduction of gradients: a backward calls a sink, which reduces.

A backward calls `ready(parameter)` when nothing more will be added to that parameter's gradient in this step,
and `finish()` after the last. Data parallelism implements the sink. A plain backward calls it through
autograd's hooks (`hook_gradients`). A pipeline calls it explicitly, because a hook does not fire if a weight
gradient is computed separately, and does not know which microbatch is the last.

    hook owner   has hooks on the parameters and calls the sink: a DataParallel, ZeroOptimizer or FSDPState. A
                 parameter has at most one (`hook_owner_of`), so that no gradient is summed twice. It has none
                 once a pipeline calls the sink.
    sink         sums the gradients: a Reducer, SplitReducer, ZeroOptimizer or FSDPState. The last two are
                 owner and sink at once if nothing else has hooks. ZeRO 1 on a DataParallel sums nothing: it
                 passes calls on to its `reducing_sink`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import dropwhile
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hpnb.mesh import Axis
from hpnb.user_hooks import is_users


class GradientSink:
    """Reduces gradients over the ranks of an axis. Base class of all sinks.

    A subclass implements `ready`, `finish` and `drop`. The other methods have a default.

    Attributes:
        axis: the ranks whose gradients are summed.
        replica_axis: the ranks that hold the same shard, over which its gradient is summed as well (HSDP).
        average: divide sums by the number of ranks.
        shards_parameters: parameters are sharded too, and gathered for each forward and backward (ZeRO 3).
        gather_axes: along which they are gathered.
        why_not_captured: why CUDA graphs cannot have these gathers; empty if they can.
    """

    axis: Axis
    replica_axis: Axis | None = None
    average: bool
    shards_parameters = False
    gather_axes: tuple[Axis, ...] = ()
    why_not_captured = ""

    def begin_backward(self) -> None:
        """The hook owner calls it before the first `ready` of a backward. A pipeline does not."""

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

    def begin_action(self, action: object, coming: object) -> None:
        """A pipeline begins an action, after which `coming` will be the next one that computes with weights.
        Equal values stand for the same blocks in the same order; None stands for no such action."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around the capture of a forward and its backward in CUDA graphs, which have its gathers too."""
        return nullcontext()

    def hand_over(self) -> GradientSink:
        """Reduce nothing by itself any more, after a backward. From now on the caller calls `ready` and
        `finish` of the sink that this returns."""
        return self


class HookOwner:
    """Passes gradients on to a sink. A subclass calls `hook_gradients` with `_on_gradient`, and implements
    `_call_begin`, `_call_ready` and `_call_finish`, which call the sink."""

    _sync = True  # False in `no_sync`
    # Whether `_call_finish` is queued for the end of the running backward. One that raised does not call it,
    # and this stays True until the subclass clears up.
    _in_backward = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backwards inside add to this rank's gradients and send nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._sync:
            return
        _refuse_later_hooks(parameter)
        if not self._in_backward:
            self._in_backward = True
            self._call_begin()
            after_backward(self._call_finish)
        self._call_ready(parameter)

    def _call_begin(self) -> None:
        raise NotImplementedError

    def _call_ready(self, parameter: torch.nn.Parameter) -> None:
        raise NotImplementedError

    def _call_finish(self) -> None:
        raise NotImplementedError


def _refuse_later_hooks(parameter: torch.nn.Parameter) -> None:
    """Raise if a user's hook would run after the gradient has gone to the other ranks, which is now."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is None or len(hooks) == 1:
        return
    after_ours = dropwhile(is_users, hooks.values())
    if any(map(is_users, after_ours)):
        raise RuntimeError(
            f"a hook of register_post_accumulate_grad_hook was registered on a parameter of shape "
            f"{tuple(parameter.shape)} after its gradients were to be summed over the ranks, and would run "
            "while that is done: register it before boost, DataParallel or ZeroOptimizer, or use "
            "parameter.register_hook, which gets the gradient before"
        )


def refuse_second_derivative(what: str, why: str) -> None:
    """Raise in a backward if autograd makes a graph of it (create_graph=True): `what` cannot differentiate
    its gradient again. `why` says why, and what to use instead."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} cannot compute a second derivative (create_graph=True, as of a gradient penalty): {why}"
        )


def differentiable_once(what: str, why: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator for the backward of an autograd function: PyTorch's `once_differentiable`, which refuses a
    second derivative where the graph for it would be made, and in a sentence."""

    def decorate(backward: Callable[..., Any]) -> Any:
        run = once_differentiable(backward)

        def checked(ctx: Any, *grads: Any) -> Any:
            refuse_second_derivative(what, why)
            return run(ctx, *grads)

        return checked

    return decorate


def axes_of(sink: GradientSink | None) -> tuple[Axis, ...]:
    """The axes over which `sink` sums gradients: together the ranks that have different samples. A sink that
    is no GradientSink has one."""
    if sink is None:
        return ()
    replica_axis: Axis | None = getattr(sink, "replica_axis", None)
    return (sink.axis,) if replica_axis is None else (sink.axis, replica_axis)


def divisor_of(sink: GradientSink | None) -> int:
    """By what `sink` divides the sums."""
    return math.prod(axis.size for axis in axes_of(sink)) if sink is not None and sink.average else 1


def hook_gradients(
    parameters: Iterable[torch.nn.Parameter],
    ready: Callable[[torch.nn.Parameter], None],
    keeps_owner_alive: bool = True,
) -> list[RemovableHandle]:
    """Call `ready(parameter)` whenever autograd has accumulated a gradient. Returns the hooks' handles.

    The garbage collector cannot see into these hooks. If one held a bound method, the method's object, and
    with it the model, would never be freed. So these hooks hold a weak reference to the object. One hook of
    another kind, which the collector sees, holds a strong one: the object lives as long as the parameters.

    Args:
        ready: a function, or a method of an object, which is called its owner here.
        keeps_owner_alive: False if something else holds a strong reference to the owner.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not isinstance(ready, MethodType):
        hook: Callable[..., None] = ready
        return [p.register_post_accumulate_grad_hook(hook) for p in trained]
    weakly: Callable[..., None] = partial(_call_back, ref(ready.__self__), ready.__func__)
    handles = [p.register_post_accumulate_grad_hook(weakly) for p in trained]
    if keeps_owner_alive and trained:
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
    """Whether a backward is running on this thread: only then can an empty callback be queued."""
    try:
        after_backward(lambda: None)
    except RuntimeError:
        return False
    return True


# A table, because a copy of a parameter has no hooks.
_hook_owners: MutableMapping[torch.Tensor, ref[object] | None] = WeakIdKeyDictionary()


def hook_owner_of(parameter: torch.Tensor) -> object | None:
    """The object whose hooks have the gradient of `parameter` reduced in backwards, if there is one."""
    owner_ref = _hook_owners.get(parameter)
    return None if owner_ref is None else owner_ref()


def set_hook_owner(parameters: Iterable[torch.Tensor], owner: object | None) -> None:
    """Note that the hooks of `owner` have the gradients of `parameters` reduced, so that no others do."""
    for p in parameters:
        _hook_owners[p] = None if owner is None else ref(owner)
