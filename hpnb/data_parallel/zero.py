"""ZeRO stages 1 and 2: optimizer state is sharded over the ranks, and in stage 2 gradients are too.

    backward   gradients  --reduce-scatter-->  this rank's 1/N of their mean     bucket by bucket
    step       the optimizer updates this rank's 1/N of the parameters           its state is 1/N too
               parameters <--all-gather--      every rank's 1/N

Bytes a parameter with 16-bit weights, Adam and float32 masters, on N ranks (`hpnb.theory.model_states`):

    ZeRO stage 0 (DataParallel)   2 + 2 + 12
    ZeRO stage 1                  2 + 2 + 12/N      full gradients stay, as the buffers of the reduce-scatter
    ZeRO stage 2                  2 + (2 + 12)/N    a bucket of full gradients lives until it is reduced

A reduce-scatter and an all-gather together move the bytes of one all-reduce, 2(N-1)/N per parameter byte.
Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_leaves

from hpnb.background import wait_all
from hpnb.data_parallel.buckets import assign_buckets_by_group, split_groups
from hpnb.data_parallel.replicas import broadcast, check_replicas
from hpnb.data_parallel.split_reducer import is_expert
from hpnb.data_parallel.zero_bucket import ZeroBucket
from hpnb.data_parallel.zero_checks import (
    check_class,
    check_parameters,
    find_ddp,
    is_elementwise,
    trained_parameter_names,
)
from hpnb.data_parallel.zero_reduce_scatter import ZeroReduceScatter
from hpnb.grad_norm import total_norm
from hpnb.mesh import Axis, Mesh, axis_of
from hpnb.optimizer_state import (
    build_state_dict,
    gather_states,
    group_numbers,
    group_options,
    local_states,
    split_state_dict,
)
from hpnb.placement import Placement
from hpnb.precision import Masters
from hpnb.precision.masters import multiply, parameters_of


class ZeroOptimizer(ZeroReduceScatter, Optimizer):
    """ZeRO around any optimizer of PyTorch. Use it as an optimizer, and the model as if there were no ranks.

    Its base `ZeroReduceScatter` reduces gradients in the backward. This class shards parameters and steps.
    Both use `buckets` and:

        reducing_sink         the sink of a DataParallel if that goes on to sum, otherwise None
        _in_backward          a backward has begun and has not been reduced
        _finished             the reducing_sink has reduced a backward since the last step
        _replace_gradients    the next gradients replace those of shards

    Args:
        params: what any optimizer takes: parameters, named parameters, or groups with options. They and
            all options are the same on all ranks. Values become those of the axis's rank 0. Each parameter
            moves into a flat tensor.
        optimizer_class, defaults: e.g. torch.optim.AdamW, and its options.
        axis: the data axis, `mesh.dp`.
        stage: 1 or 2.
        bucket_mb: at most so many MB (2^20 bytes) are reduced in one message; a larger parameter goes alone.
            ZeRO 2 has at most two such messages in flight.
        average: False sums gradients instead, for losses that are divided by the global count already.
        elementwise: whether the optimizer treats elements alike, so that a tensor may be split anywhere.
            Otherwise each belongs to one rank. None decides: True for PyTorch's optimizers except Adafactor
            and Muon, and for a class that has `elementwise = True`.
        cpu_offload: optimizer, masters and reduced gradients are on the CPU.
        communication_dtype: in which gradients are summed; by default their own.
        overlap_communication: reduce during the backward; False does it after. It must be off if several
            ZeroOptimizers share a model whose ranks run different layers.
        find_unused_parameters: allow parameters that a forward does not use, at the cost of a small
            all-reduce a backward. One that no rank uses keeps its value and state.
        expert_axis: the ranks that hold the same experts, `mesh.edp`, if experts are sharded; needs
            average=False.

    Attributes:
        shards: {parameter: this rank's elements of it, a Parameter}, for parameters of which it has some.
        optimizer: an optimizer_class over the shards, with the same param_groups and state objects as this.

    The .grad of shards are the reduced gradients. A parameter's .grad is None after a backward, except in
    stage 1 on a DataParallel. So torch's clip_grad_norm_ would see nothing, or the shards of one rank: clip
    by `clip_grad_norm_` of this optimizer, or by `hpnb.precision.step(zero, [axis], max_norm=...)`.

    If shards have gradients already, those of the next backward are added or replace them:

        before a step                they are added
        after a step                 they replace them, even without a zero_grad: `model.zero_grad()` does not
                                     reach shards
        stage 1 on a DataParallel    they are added until they are zeroed, as DataParallel's are

    A DataParallel may wrap the same parameters, before or after. Then its no_sync decides when to reduce, and
    both need the same `average`. Gradients are reduced with these options:

        DataParallel made after     those of the ZeroOptimizer
        made before, stage 1        those of the DataParallel, which goes on to reduce and keeps full
                                    gradients (but as stage 2 with cpu_offload or a communication_dtype)
        made before, stage 2        overlap_communication and find_unused_parameters of the DataParallel,
                                    and otherwise those of the ZeroOptimizer

    Raises:
        ValueError: a stage other than 1 and 2; an optimizer that needs a closure or sparse gradients; no
            parameter that is trained, or one that is on the meta device, sharded along `axis`, or reduced by
            another; experts without expert_axis or with average=True; ranks whose parameters or options
            differ.

    >>> def step():
    ...     axis = hpnb.Mesh(hpnb.Layout(dp=2)).dp
    ...     model = torch.nn.Linear(8, 8, bias=False)
    ...     optimizer = hpnb.ZeroOptimizer(model.parameters(), torch.optim.AdamW, axis, stage=2)
    ...     with hpnb.record.memory(model, optimizer) as recorder:
    ...         model(torch.ones(2, 8)).sum().backward()
    ...         optimizer.step()
    ...     return recorder.profile().peak_of("optimizer")  # two moments of 32 weights, a step count
    >>> hpnb.launch(step, ranks=2, device="cpu")
    [260, 260]
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[Optimizer],
        axis: Axis | Mesh,
        stage: int = 1,
        *,
        bucket_mb: float = 25.0,
        average: bool = True,
        elementwise: bool | None = None,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        find_unused_parameters: bool = False,
        expert_axis: Axis | None = None,
        **defaults: Any,
    ) -> None:
        axis = axis_of(axis, "dp")
        check_class(stage, optimizer_class)
        # Parses `params` as any optimizer does. Later self.param_groups are those of self.optimizer, with
        # shards, and self._full_groups keeps the groups of full parameters.
        Optimizer.__init__(self, params, {})
        self._full_groups = self.param_groups
        parameters: list[nn.Parameter] = [p for group in self._full_groups for p in group["params"]]
        self._index_of = {p: i for i, p in enumerate(parameters)}
        self.names = trained_parameter_names(self._full_groups)
        check_parameters(self.names, axis)
        if elementwise is None:
            elementwise = is_elementwise(optimizer_class)
        options = {
            "optimizer_class": optimizer_class.__name__,
            "stage": stage,
            "bucket_mb": bucket_mb,
            "average": average,
            "elementwise": elementwise,
            "cpu_offload": cpu_offload,
            "communication_dtype": communication_dtype,
            "overlap_communication": overlap_communication,
            "find_unused_parameters": find_unused_parameters,
            **group_numbers([{**defaults, **group} for group in self._full_groups]),
        }
        check_replicas({name: p for p, name in self.names.items()}, axis, options)
        # A DataParallel around the parameters, if there is one, goes on to reduce, and shards take slices.
        ddp_reduces = stage == 1 and not cpu_offload and communication_dtype is None
        ddp = find_ddp(self.names, axis, average, ddp_reduces)

        self._axes = [axis]
        if experts := [name for p, name in self.names.items() if is_expert(p)]:
            if expert_axis is None or average:
                raise ValueError(
                    f"{len(experts)} parameters, {experts[0]} first, are experts that other ranks do not "
                    "have: pass expert_axis=mesh.edp and average=False"
                )
            self._axes.append(expert_axis)
        assigned = assign_buckets_by_group(split_groups(self._full_groups, is_expert), bucket_mb)
        self._frozen = [p for p in parameters if not p.requires_grad]
        if ddp is None:
            frozen = [[p for p in self._frozen if is_expert(p) == expert] for expert in (False, True)]
            for members in (*(b.parameters for b in assigned), *frozen):
                if members:
                    broadcast(list(members), self._axis_of(members[0]))
        buckets = [
            ZeroBucket(b.parameters, [self.names[p] for p in b.parameters],
                       self._axis_of(b.parameters[0]), elementwise=elementwise,
                       keep_gradients=stage == 1, communication_dtype=communication_dtype,
                       offload=cpu_offload)
            for b in assigned
        ]  # fmt: skip
        ZeroReduceScatter.__init__(
            self, self.names, buckets, axis, stage, average=average, offload=cpu_offload,
            overlap_communication=overlap_communication, find_unused_parameters=find_unused_parameters,
        )  # fmt: skip
        self.shards = {p: shard for b in self.buckets for p, shard in zip(b.parameters, b.shards, strict=True)
                       if shard is not None}  # fmt: skip

        groups = [
            {**group_options(group), "params": [self.shards[p] for p in group["params"] if p in self.shards]}
            for group in self._full_groups
        ]
        self.optimizer = optimizer_class(groups, **defaults)
        self.defaults = self.optimizer.defaults
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        is_16_bit = any(p.dtype.itemsize == 2 for p in self.names)
        # Hooks of self.optimizer.step give float32 masters their gradients, and copy masters into shards.
        self.masters = Masters(self.optimizer) if is_16_bit else None
        self._note_versions()
        self._connect(ddp, ddp_reduces)

    _step_supports_amp_scaling = True  # so that torch.amp.GradScaler calls `step`, which refuses it

    # --- the optimizer ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update this rank's shards, and give all ranks the new parameters."""
        if closure is not None:
            raise ValueError(
                "ZeroOptimizer.step(closure) cannot evaluate a loss: run forward and backward first, then "
                "step() without a closure"
            )
        if getattr(self, "found_inf", None) is not None:
            raise ValueError(
                "torch.amp.GradScaler sees one rank's shards, so ranks would not agree on an overflow: use "
                "hpnb.precision.step(zero, [axis], scaler=hpnb.precision.LossScaler())"
            )
        if self._in_backward:
            raise RuntimeError("the last backward raised before its end: zero_grad() forgets what is left")
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "parameters that were frozen when this ZeroOptimizer was made are trained now, and would not "
                "be stepped; make a new one"
            )
        elsewhere = {p for bucket in self.buckets for p in bucket.find_moved()}
        if moved := [name for p, name in self.names.items() if p in elsewhere]:
            raise RuntimeError(
                f"{len(moved)} parameters, {moved[0]} first, have moved to other memory since this optimizer "
                "was made, and would not be stepped: move or cast the model before it, not after"
            )
        if self.reducing_sink is not None:
            if not self._finished and any(p.grad is not None for p in self.names):
                raise RuntimeError(
                    "no backward since the last step was reduced: the last one must be outside no_sync()"
                )
            self._slice_gradients()  # again: since the backward, .grad may be None or another tensor
        elif left := [n for p, n in self.names.items() if p.grad is not None]:
            raise RuntimeError(
                f"{len(left)} parameters, {left[0]} first, have a gradient that was not reduced: the last "
                "backward before a step must be outside no_sync()"
            )
        if self._versions != [p._version for p in self.names]:
            self.refresh()  # a checkpoint or a broadcast has written parameters
        self.optimizer.step()  # with masters, their hooks on the optimizer run in it
        self._gather_parameters()
        self._replace_gradients, self._finished = True, False

    def skip(self) -> None:
        """Call it instead of a `step` that is skipped. The next gradients replace those of shards, as after a
        step; with stage 1 on a DataParallel they are added until they are zeroed."""
        self._replace_gradients, self._finished = True, False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, axes: Iterable[Axis] = ()) -> torch.Tensor:
        """Clip the norm of the full gradient to `max_norm`. Returns the norm before, (). Every rank calls it.

        torch.nn.utils.clip_grad_norm_ would see this rank's shards alone.

        Args:
            axes: other axes along which parameters are sharded, as `mesh.tp`.
        """
        shards = parameters_of(self.optimizer)
        norm = total_norm(shards, [self.axis, *axes])
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        multiply([p.grad for p in shards if p.grad is not None], factor)
        return norm

    def _note_versions(self) -> None:
        """Note that parameters are as this optimizer has left them."""
        self._versions = [p._version for p in self.names]
        if self.masters is not None:
            self.masters.note()

    def _gather_parameters(self) -> None:
        pending = [bucket.gather_parameters(self._background_of(bucket)) for bucket in self.buckets]
        wait_all(pending)
        self._note_versions()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of shards, and those that no_sync() has left on parameters."""
        super().zero_grad(set_to_none)
        for p in self.names:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.detach().zero_()
        self._replace_gradients, self._finished = set_to_none, False
        self.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For `Optimizer.__init__`.

        Raises:
            ValueError: called later.
        """
        if "optimizer" in vars(self):
            raise ValueError("a ZeroOptimizer shards its parameters once; make it with all its groups")
        super().add_param_group(param_group)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the parameters as they are now. A step does so by itself if others have written them."""
        self._refresh_offloaded()
        if self.masters is not None:
            self.masters.refresh()
        self._note_versions()

    def _refresh_offloaded(self) -> None:
        for bucket in self.buckets:
            bucket.refresh_offloaded()

    # --- state ------------------------------------------------------------------------------------

    def tensors_by_category(self) -> dict[str, list[torch.Tensor]]:
        """This rank's tensors, for `hpnb.record.memory`: {"optimizer": optimizer state, masters and offloaded
        shards; "gradients": full and sharded}."""
        by_bucket = [bucket.tensors_by_category() for bucket in self.buckets]
        states = [leaf for leaf in tree_leaves(dict(self.optimizer.state)) if isinstance(leaf, torch.Tensor)]
        masters = [] if self.masters is None else self.masters.tensors_by_category()["optimizer"]
        return {
            "optimizer": [*states, *masters, *(t for tensors in by_bucket for t in tensors["optimizer"])],
            "gradients": [t for tensors in by_bucket for t in tensors["gradients"]],
        }

    @torch.no_grad()
    def full_gradients(self) -> list[torch.Tensor | None]:
        """The reduced gradients in full, in the order of the parameters; None where there is none.

        Every rank of the axis calls it and gets all of them.
        """
        grads = {self._index_of[p]: {"grad": s.grad} for p, s in self.shards.items() if s.grad is not None}
        gathered = gather_states(grads, self._shard_placements(self.names), self._axes)
        indices = self._index_of.items()
        return [gathered[i]["grad"].to(p.device) if i in gathered else None for p, i in indices]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state dict that `optimizer_class` would have on one process: full tensors, on the CPU.

        With 16-bit parameters there is a third entry, "masters", as `hpnb.precision.Masters` has. Every rank
        of the axis calls it, and gets all of it.
        """
        states = local_states(self.optimizer.state_dict(), list(self._shard_placements(self.shards)))
        groups, indices_by_group = [], self._indices_by_group
        for group, full, indices in zip(self.param_groups, self._full_groups, indices_by_group, strict=True):
            names = {"param_names": full["param_names"]} if "param_names" in full else {}
            groups.append({**group_options(group), **names, "params": indices})
        gathered = gather_states(states, self._shard_placements(self.names), self._axes)
        return build_state_dict(gathered, groups, self.masters is not None)

    def _axis_of(self, parameter: nn.Parameter) -> Axis:
        """The ranks that have a replica of it."""
        return self._axes[-1] if is_expert(parameter) else self._axes[0]

    @property
    def _indices_by_group(self) -> list[list[int]]:
        """For every group, the indices of its parameters among all parameters."""
        return [[self._index_of[p] for p in group["params"]] for group in self._full_groups]

    def _shard_placements(self, parameters: Collection[nn.Parameter]) -> dict[int, Placement]:
        """{index: which elements of the parameter this rank has}, group by group."""
        by_parameter = {p: where for bucket in self.buckets for p, where in bucket.shard_placements().items()}
        return {i: by_parameter[p] for p, i in self._index_of.items() if p in parameters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from any number of ranks, either ZeRO stage, or a plain optimizer_class.

        Load the model's state before. Masters in the state set the parameters too.

        Raises:
            ValueError: it is the state of other parameters.
        """
        local = split_state_dict(state_dict, self._indices_by_group, self._shard_placements(self.shards))
        self._refresh_offloaded()
        if self.masters is None:  # no 16-bit parameters: shards take the values of saved masters
            shards = parameters_of(self.optimizer)
            for i, master in local.pop("masters").items():
                shards[i].copy_(master)
        self.optimizer.load_state_dict(local)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._gather_parameters()
