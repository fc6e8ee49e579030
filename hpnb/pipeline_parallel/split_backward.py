"""Weight gradients that are added to .grad by hand: later (`deferring`) or at once (`fused`).

Deferring splits a backward in two, the gradient of the input first, those of the weights when there is time:

    y = x A + b
    I   dx = dy A^T                     the stage before waits for it
    W   dA += x^T dy,  db += 1^T dy     only the optimizer waits, at the end of the step

W is half of a backward, and fills what would be a bubble (Qi et al. 2024, *Zero Bubble Pipeline Parallelism*,
arXiv 2401.10241, section 2). Between I and W a module holds its x and its dy.

Only matmuls and convolutions are deferred (`weight_gradient_rules.py`). Autograd computes all other gradients
in I: those of norms, embeddings and positions, of modules without a rule, of weights that are used outside of
their module's forward. That is right for every module, and computes nothing twice. It costs little: for n
tokens the gradients of a norm are O(n h) FLOPs where those of a matmul are O(n h^2), and deferring them would
keep two more activations.

Adding by hand also saves time without a split, so backwards that are not split run inside `fused`. Where
.grad has the dtype of x, the matmul itself adds to it, with no temporary and no second pass over .grad. Under
autocast x is bfloat16 and .grad float32: there the product is a temporary that is then added. This is
`DeferredGradient.add` in `weight_gradient_rules.py`.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpnb.pipeline_parallel.weight_gradient_rules import DeferredGradient, WeightGradientRule, rule_of
from hpnb.user_hooks import is_users

Ready = Callable[[nn.Parameter], None]
COMPILED = "_hpnb_compiled"  # set on a module that is compiled as a whole, and so is one node of autograd


class SplitBackward:
    """Defers the weight gradients of `modules` and of all modules inside them.

        split = SplitBackward([stage])
        with split.deferring(key):                      # I
            torch.autograd.backward(outputs, gradients)
        split.add_weight_gradients(key)                 # W

    Modules keep class, weights, names, hooks and state dict: only `forward` of the instance is replaced,
    and of deep copies. A newer SplitBackward of the same modules takes the place of this one. Outside
    `deferring` and `fused` backwards are as before, backwards of backwards included.

    A module is left to autograd if its weight or bias has a hook of `register_hook`, which may change the
    gradient, and inside `deferring` also if a user has registered one by
    `register_post_accumulate_grad_hook`: it would run during I, before W has added anything. hpnb's hooks of
    that kind do; pass `ready` to W instead. W runs on the stream of I. Before W, do not change the inputs and
    gradients of I in place.

    Args:
        min_flops: modules with fewer FLOPs in forward and backward keep autograd's backward, because the
            Python call would cost more than it saves. FLOPs are counted from shapes alone. Use 0 if any
            backward is split: a module left to autograd cannot be deferred.
    """

    def __init__(self, modules: Iterable[nn.Module], min_flops: float = 0.0) -> None:
        self.min_flops = min_flops
        self._queues: dict[Hashable, _Queue] = {}
        # The mode. It holds in all threads, because autograd runs backwards in one thread for each GPU.
        self._intercepts = False  # whether weight gradients are added by hand
        self._queue: _Queue | None = None  # where a backward puts what W needs; None: add at once
        # A compiled block is one node of autograd: patches inside are useless and make PyTorch compile again.
        distinct = _distinct(modules)
        compiled = {inner for m in distinct if hasattr(m, COMPILED) for inner in m.modules()}
        for module in distinct:
            if module in compiled:
                continue
            rule, current = rule_of(module), module.__dict__.get("forward")
            # A forward that somebody else has set here does more than that of the class: it stays.
            if rule is not None and (current is None or isinstance(current, _PatchedForward)):
                module.forward = _PatchedForward(module, rule, self)

    # --- I, or an unsplit backward ----------------------------------------------------------------

    def deferring(self, key: Hashable) -> AbstractContextManager[None]:
        """A backward in this context is I: its weight gradients are left to `add_weight_gradients(key)`."""
        return self._intercepting(self._queues.setdefault(key, _Queue()))

    def fused(self) -> AbstractContextManager[None]:
        """A backward in this context is not split, but adds weight gradients to .grad by hand."""
        return self._intercepting(None)

    @contextmanager
    def without_min_flops(self) -> Iterator[None]:
        """Forwards in this context include small modules too: a graph launches them without Python."""
        before, self.min_flops = self.min_flops, 0.0
        try:
            yield
        finally:
            self.min_flops = before

    @contextmanager
    def _intercepting(self, queue: _Queue | None) -> Iterator[None]:
        before = self._intercepts, self._queue
        self._intercepts, self._queue = True, queue
        try:
            yield
        finally:
            self._intercepts, self._queue = before

    def _defer_or_add(self, deferred: DeferredGradient) -> None:
        """Queue `deferred` for W, or add its gradients now."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True inside deferring or fused: what is added to .grad by hand has no graph; "
                "run this backward outside"
            )
        if self._queue is None:
            deferred.add()
        else:
            self._queue.deferred.append(deferred)
            self._queue.waiting.update(deferred.parameters)

    # --- W ----------------------------------------------------------------------------------------

    def add_weight_gradients(self, key: Hashable, ready: Ready | None = None) -> None:
        """Add the weight gradients that wait under `key`, in the order of I, and free x and dy after it.

        Args:
            ready: called with each parameter when the last of its gradients under this key has been added.
        """
        queue = self._queues.pop(key, None)
        if queue is None:
            raise ValueError(
                f"no weight gradients wait under {key!r}; run a backward inside deferring before"
            )
        if queue.deferred:
            self._run_queue(queue, ready)

    @torch.no_grad()
    def _run_queue(self, queue: _Queue, ready: Ready | None) -> None:
        while queue.deferred:
            deferred = queue.deferred.popleft()
            deferred.add()
            parameters = deferred.parameters
            del deferred  # and with it x and dy
            for p in parameters:
                queue.waiting[p] -= 1
                if ready is not None and not queue.waiting[p]:
                    ready(p)

    def pending(self, key: Hashable) -> set[nn.Parameter]:
        """The parameters with gradients that wait under `key`."""
        return set(self._queues[key].waiting) if key in self._queues else set()

    def drop(self) -> None:
        """Forget all that waits: the step has failed."""
        self._queues.clear()

    # A module refers to its SplitBackward through its patched forward. A deep copy of the module shares the
    # SplitBackward: it is split as the original is, with the weights of the copy. A pickled module
    # gets an empty one, which never defers.

    def __deepcopy__(self, _: dict[int, object]) -> SplitBackward:
        return self

    def __reduce__(self) -> tuple[type[SplitBackward], tuple[tuple[nn.Module, ...]]]:
        return SplitBackward, ((),)


@dataclass
class _Queue:
    """What waits for one W: gradients in the order of I, and how many there are of each parameter."""

    deferred: deque[DeferredGradient] = field(default_factory=deque)
    waiting: Counter[nn.Parameter] = field(default_factory=Counter)


# --- the patch of a module's forward ------------------------------------------------------------------------


class _PatchedForward:
    """Stands in for the forward of one module."""

    def __init__(self, module: nn.Module, rule: WeightGradientRule, split: SplitBackward) -> None:
        self.module, self.rule, self.split = module, rule, split

    def __deepcopy__(self, memo: dict[int, object]) -> _PatchedForward:
        return _PatchedForward(copy.deepcopy(self.module, memo), self.rule, self.split)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        # Most calls end here: small steps wait for Python, so this comes first.
        if self.split.min_flops and self._is_small(x):
            return type(self.module).forward(self.module, x)
        weight, bias = _registered(self.module)
        if not (_is_ordinary_tensor(x) and _deferrable(weight, bias) and torch.is_grad_enabled()):
            return type(self.module).forward(self.module, *args, **kwargs)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return _Split.apply(x, weight, bias, self, dtype)

    def _is_small(self, x: Any) -> bool:
        """Whether forward and backward of `x` take fewer FLOPs than `min_flops`. Each use of an element of
        the weight takes 2 FLOPs for y, 2 for dx and 2 for dA."""
        weight = self.module._parameters.get("weight")
        if type(x) is not torch.Tensor or type(weight) is not nn.Parameter:
            return False
        return 6.0 * self.rule.count_uses(self.module, x) * weight.numel() < self.split.min_flops


class _Split(torch.autograd.Function):
    """The forward of a module. Its backward asks the split where the weight gradients go."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        patched: _PatchedForward,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        x = _autocast(x, dtype)
        ctx.patched = patched
        # The parameters themselves, because their .grad is set: ctx.saved_tensors may return other objects.
        ctx.weight, ctx.bias = weight, bias
        # Save two (None counts) in every mode: a non-reentrant checkpoint compares how many are saved. Save
        # the parameter and not its autocast copy, which would be one more for every microbatch.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.set_materialize_grads(False)
        y = patched.rule.forward(patched.module, x, _autocast(weight, dtype), _autocast(bias, dtype))
        # A view made in here could not be changed in place. With torch 2.11 a Linear of 3-D input makes one.
        return y.data if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grads[0] is None:
            return None, None, None, None, None
        rule, module = ctx.patched.rule, ctx.patched.module
        x, weight = ctx.saved_tensors
        dy, dx, db = rule.prepare_grad_output(grads[0]), None, None
        if weight is not None:
            dx = rule.input_gradient(module, x, weight.to(x.dtype), dy)
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        split = ctx.patched.split
        parameters = (ctx.weight,) if bias is None else (ctx.weight, bias)
        edges = ctx.next_functions[1:]  # of weight and bias; the first is of x
        is_left = split._queue is not None and any(map(_has_users_post_hook, parameters))
        if split._intercepts and not is_left and all(map(_may_add_to_grad, parameters, edges)):
            versions = x._version, dy._version
            # Detached, or it would hold the graph that has made it.
            split._defer_or_add(DeferredGradient(rule, module, ctx.weight, bias, x.detach(), dy, versions))
            return dx, None, None, None, None
        if bias is not None:
            db = rule.bias_gradient(dy)
        return dx, rule.weight_gradient(module, x, ctx.weight, dy), db, None, None


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(inner for module in modules for inner in module.modules()))


_ELSEWHERE = object()


def _registered(module: nn.Module) -> tuple[Any, Any]:
    """Weight and bias as they are now: a sharded module exchanges them. _ELSEWHERE if they are computed from
    other parameters, as by a weight norm."""
    parameters = module._parameters
    return parameters.get("weight", _ELSEWHERE), parameters.get("bias", _ELSEWHERE)


def _deferrable(weight: Any, bias: Any) -> bool:
    """Whether they are what a rule is for. Anything unusual is left to autograd."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.is_floating_point()
        and (bias is None or type(bias) is nn.Parameter)
    )


def _is_ordinary_tensor(x: Any) -> bool:
    ordinary = (type(x) is torch.Tensor or type(x) is nn.Parameter) and x.layout is torch.strided
    return ordinary and not torch.compiler.is_compiling()


def _autocast(t: torch.Tensor | None, dtype: torch.dtype | None) -> Any:
    return t if t is None or dtype is None or t.dtype == torch.float64 else t.to(dtype)


def _has_users_post_hook(parameter: nn.Parameter) -> bool:
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and any(map(is_users, hooks.values()))


def _may_add_to_grad(parameter: nn.Parameter, edge: tuple[Any, int]) -> bool:
    """Whether the backward that is under way would add to .grad, with nothing in between."""
    if parameter._backward_hooks:
        return False
    try:
        return torch._C._will_engine_execute_node(edge[0])  # False if only other gradients are asked for
    except RuntimeError:  # inside of torch.autograd.grad, which returns them
        return False
