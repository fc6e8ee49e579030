"""Data parallelism (DDP): every rank has a replica of the model, and a shard of the batch.

    loss = (1/N) sum over ranks r of loss_r            N ranks with equally many samples
    grad = (1/N) sum over ranks r of grad_r            one all-reduce, bucket by bucket, during the backward

Replicas that start equal and apply equal gradients stay equal. So parameters and buffers are sent once, at
the start, and only buffers (batch statistics) again before each forward in training mode, outside of
no_sync, unless broadcast_buffers is off.

DataParallel is the hook owner of the parameters (`hpnb.gradients`), and calls a sink when a gradient is
ready. The sink sums: a `Reducer`, a `SplitReducer` with experts, or a `ZeroOptimizer`.

A mean of means is not the mean if ranks have different numbers of samples. `global_mean` multiplies each
rank's sum by N / (count over all ranks), and the mean over N ranks is then the mean over all samples.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hpnb.data_parallel.reducer import Reducer, thawed_message
from hpnb.data_parallel.replicas import broadcast, check_replicas
from hpnb.data_parallel.split_reducer import SplitReducer, is_expert
from hpnb.gradients import (
    GradientSink,
    HookOwner,
    hook_gradients,
    hook_owner_of,
    in_backward,
    set_hook_owner,
)
from hpnb.mesh import Axis, Mesh, axis_of


class DataParallel(HookOwner, nn.Module):
    """Wraps `module` so that after a backward .grad is the mean over the ranks of `axis`.

    Args:
        module: on its device already. Its parameters and buffers take the values of the axis's rank 0.
        axis: the data axis, `mesh.dp`.
        bucket_mb: at most so many MB (2^20 bytes) of gradients are reduced in one message; a larger parameter
            goes alone.
        broadcast_buffers: send rank 0's buffers before every forward in training mode, except in no_sync.
        find_unused_parameters: allow parameters that a forward does not use, at the cost of a small
            all-reduce a step, by which the ranks agree on them. The gradient of one that no rank uses stays
            None.
        check_reduction: compare the reduced gradients of all ranks after every backward, which takes time.
        gradient_as_bucket_view: .grad is a view of its bucket. Do not keep one over the next backward. With
            `zero_grad(set_to_none=False)` gradients exist once. After PyTorch's default, which sets them to
            None, a backward makes new ones beside the buckets, and each stays until its bucket is sent. That
            is about one more bucket, or several while an earlier one waits for a gradient. It is all of them
            where nothing is sent before the end: in a pipeline, after `no_sync`, and without
            overlap_communication. False copies.
        static_graph: every step uses the same parameters in the same order, which is learned from the first.
        overlap_communication: reduce during the backward; False does it after.
        copy_engines: on GPUs of one node, reduce by their copy engines instead of kernels, which take
            multiprocessors from the matmuls of the backward (`hpnb.symmetric_all_reduce`).
        average: False sums instead, for losses that are divided by the global count already. The mean of the
            ranks' means is right if all have equally many samples.
        expert_axis: the ranks that hold the same experts, `mesh.edp`, if experts are sharded
            (`hpnb.expert_parallel`). An expert sees the tokens that all ranks of `mesh.ep` have sent to it,
            so its gradient is a sum over them already.

    All ranks wrap the same model with the same options, and run several wrapped models in one order. To train
    a parameter later, wrap it trainable, and freeze it after wrapping. A post-accumulate hook that changes
    gradients must be registered before wrapping; `register_hook` may come at any time. Save or copy
    `.module`, not the wrapper.

    A `ZeroOptimizer` on the same parameters, made before or after, becomes the `sink`, with the same
    `average`. Its docstring says which options then apply.

    Raises:
        ValueError: a model without trained parameters, on the meta device, wrapped before, or not the same on
            all ranks; options that differ between ranks.
        RuntimeError: in the backward, if parameters got no gradient and find_unused_parameters is off.

    >>> def step(x):
    ...     model = hpnb.DataParallel(torch.nn.Linear(2, 1), hpnb.Mesh(hpnb.Layout(dp=2)).dp)
    ...     model(x[hpnb.rank()]).sum().backward()
    ...     return model.module.weight.grad.tolist()
    >>> hpnb.launch(step, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), ranks=2, device="cpu")
    [[[2.0, 3.0]], [[2.0, 3.0]]]
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis | Mesh,
        bucket_mb: float = 25.0,
        *,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        overlap_communication: bool = True,
        copy_engines: bool = False,
        average: bool = True,
        expert_axis: Axis | None = None,
    ) -> None:
        super().__init__()
        axis = axis_of(axis, "dp")
        self.module, self.axis, self.broadcast_buffers = module, axis, broadcast_buffers
        _check(module)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        options: dict[str, Any] = {
            "bucket_mb": bucket_mb,
            "find_unused_parameters": find_unused_parameters,
            "check_reduction": check_reduction,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "overlap_communication": overlap_communication,
            "copy_engines": copy_engines,
            "average": average,
        }
        check_replicas(named, axis, {**options, "broadcast_buffers": broadcast_buffers})
        experts = [tensor for tensor in named.values() if is_expert(tensor)]
        earlier_sink = self._find_sink(average)
        broadcast([tensor for tensor in named.values() if not is_expert(tensor)], axis)
        if experts:
            expert_axis = _check_expert_axis(expert_axis, axis)
            broadcast(experts, expert_axis)
        # The table and the key of every buffer, because a forward may put another tensor there.
        self._buffers_to_send: dict[Axis, list[tuple[dict[str, torch.Tensor | None], str]]] = {}
        for m in module.modules():
            for key, buffer in m._buffers.items():
                is_of_expert = buffer is not None and is_expert(buffer)
                along = expert_axis if is_of_expert and expert_axis is not None else axis
                self._buffers_to_send.setdefault(along, []).append((m._buffers, key))
        parameters = dict(module.named_parameters())
        self.sink: GradientSink
        if earlier_sink is not None:
            self.sink = earlier_sink.hand_over()
        elif experts and expert_axis is not None:
            self.sink = SplitReducer(parameters, axis, expert_axis, **options)
        else:
            self.sink = Reducer(parameters, axis, **options)
        set_hook_owner(module.parameters(), self)
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._hooks = hook_gradients(module.parameters(), self._on_gradient)
        if average and experts and expert_axis is not None:
            # An expert's gradient is a sum over the tokens of all ranks of ep already, and the reducer
            # divides by edp.size. To divide by dp.size instead, it is multiplied by their ratio first.
            ratio = expert_axis.size / axis.size
            for p in experts:
                if p.requires_grad:
                    self._hooks.append(p.register_hook(lambda grad: grad * ratio))
        if not average and earlier_sink is None:
            # If a second backward added to a sum that is reduced already, every rank would send that sum
            # again (`Reducer.before_accumulation`). Means need no hook: the mean of N equal ones is itself.
            for p in module.parameters():
                if p.requires_grad:
                    self._hooks.append(p.register_hook(partial(self._before_accumulation, p)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward and not in_backward():  # an exception ended it before `_call_finish`
            self._in_backward = False
            self.sink.drop()
        if self.broadcast_buffers and self.training and self._sync:
            for axis, tables in self._buffers_to_send.items():
                buffers = [b for table, key in tables if (b := table[key]) is not None]
                broadcast(list({id(b): b for b in buffers}.values()), axis)
        return self.module(*args, **kwargs)

    def detach(self) -> nn.Module:
        """Stop reducing and return the module, which may be wrapped again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        set_hook_owner(self.module.parameters(), None)
        return self.module

    def hand_over(self) -> GradientSink:
        """Remove the hooks and return the sink, for a pipeline, which calls `ready` and `finish` itself."""
        self.detach()
        return self.sink

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """A copy with the weights of this one, for an average of weights (EMA) say. It computes and is saved,
        and a backward raises, because nothing would reduce its gradients."""
        copied = DataParallel.__new__(DataParallel)
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        copied.module, copied.axis = deepcopy(self.module, memo), self.axis
        copied.broadcast_buffers = False
        copied._hooks = hook_gradients(copied.module.parameters(), _refuse_gradient)
        return copied.train(self.training)

    @property
    def reducer(self) -> Reducer:
        """The sink, if it is a Reducer: a ZeroOptimizer may have taken over, and a copy has none."""
        sink = getattr(self, "sink", None)
        if not isinstance(sink, Reducer):
            # No AttributeError, because nn.Module would replace its message.
            who = "nothing" if sink is None else f"a {type(sink).__name__}"
            raise RuntimeError(f"{who} reduces these gradients")
        return sink

    def _find_sink(self, average: bool) -> GradientSink | None:
        """The `ZeroOptimizer` that reduces these gradients already, if there is one."""
        owners = {id(o): o for p in self.module.parameters() if (o := hook_owner_of(p)) is not None}
        if not owners:
            return None
        other = next(iter(owners.values()))
        if len(owners) > 1 or not isinstance(other, GradientSink) or other.shards_parameters:
            names = ", ".join(type(owner).__name__ for owner in owners.values())
            raise ValueError(
                f"the gradients of this module are reduced by {names} already; wrap it once, or unwrap it by "
                "detach() first"
            )
        if other.average != average:
            raise ValueError(
                f"average={average} here, and average={other.average} in the {type(other).__name__} of the "
                "same parameters; give both the same"
            )
        return other

    def _before_accumulation(self, parameter: torch.nn.Parameter, _: torch.Tensor) -> None:
        self.sink.before_accumulation(parameter)

    def _call_begin(self) -> None:
        self.sink.begin_backward()

    def _call_ready(self, parameter: torch.nn.Parameter) -> None:
        self.sink.ready(parameter)

    def _call_finish(self) -> None:
        self._in_backward = False
        if thawed := [name for name, p in self._frozen.items() if p.requires_grad]:
            self.sink.drop()
            raise RuntimeError(thawed_message(thawed))
        self.sink.finish()


def _refuse_gradient(_: torch.nn.Parameter) -> NoReturn:
    raise RuntimeError(
        "this is a copy of a DataParallel, and nothing reduces its gradients: to train it, wrap what its "
        "detach() returns"
    )


def _check_expert_axis(expert_axis: Axis | None, axis: Axis) -> Axis:
    if expert_axis is None:
        raise ValueError(
            f"the experts of this module are sharded, so the {axis.size} ranks of axis {axis.name} hold "
            "different ones: pass expert_axis=mesh.edp, the ranks that hold the same"
        )
    return expert_axis


def _check(module: nn.Module) -> None:
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"no parameter of this {type(module).__name__} requires a gradient")
    if meta := [name for name, p in module.named_parameters() if p.is_meta]:
        raise ValueError(f"{meta[0]} is on the meta device; give the model memory and values before")


def global_mean(total: torch.Tensor, count: int | torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's term of the mean over the samples (or tokens) of all ranks: N total / sum of counts.

    The mean of the terms over the ranks is the mean over all samples, however unequal the counts, and
    averaged gradients are its gradients. With equal counts the term is total / count. A rank without samples
    takes part with a total of 0 that depends on the parameters (the sum over an empty batch).

    Args:
        total: (), the sum of this rank's losses.
        count: how many there are, 0 or more.

    Raises:
        ValueError: no rank has any.

    >>> def loss(losses):
    ...     local = losses[:3] if hpnb.rank() == 0 else losses[3:]  # three samples and one
    ...     axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
    ...     return hpnb.data_parallel.global_mean(local.sum(), len(local), axis).item()
    >>> hpnb.launch(loss, torch.tensor([1.0, 2.0, 3.0, 10.0]), ranks=2, device="cpu")  # their mean is 4
    [3.0, 5.0]
    """
    counts = torch.as_tensor(count, dtype=torch.float64).to(total.device, copy=True)
    if axis.size > 1:
        dist.all_reduce(counts, group=axis.group)
    global_count = counts.item()
    if global_count <= 0:
        raise ValueError(f"no rank of axis {axis.name} has a sample to take the mean over")
    return total * (axis.size / global_count)
