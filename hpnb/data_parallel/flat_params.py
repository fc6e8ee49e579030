"""The flat parameter of ZeRO-3: full parameters while their unit computes, and this rank's shard otherwise.

    shard (P/N,)        -- all-gather ----->   flat (P,), of which the unsharded parameters are views
    shard.grad (P/N,)   <- reduce-scatter --   flat gradient (P,), after the unit's backward
                        then an all-reduce of (P/N,) over the ranks that hold the same shard, if any do

P elements, padding included, are sharded over N ranks.

Every parameter exists twice. The *sharded* one is the module's own Parameter and holds this rank's elements;
the optimizer knows only this one. The *unsharded* one has the full shape and takes its place during forward
and backward. Sharded parameters are views of one tensor, and unsharded ones of another, so the all-gather
needs no copies, except that a shard of another dtype or device is converted first. Gradients are copied once
into the flat gradient, by one kernel; where the backend does not average (gloo), they are scaled as well.

After Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), stage 3. Freeing memory by resizing a storage to
nothing is from Zhao et al. 2023, *PyTorch FSDP* (arXiv 2304.11277), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hpnb.background import Background, Pending
from hpnb.data_parallel.buckets import fill_bucket
from hpnb.data_parallel.parameter_hooks import (
    ForwardedHooks,
    has_post_accumulate_hooks,
    run_post_accumulate_hooks,
)
from hpnb.data_parallel.shard_layout import ShardLayout
from hpnb.gradients import hook_gradients
from hpnb.mesh import Axis
from hpnb.placement import FLAT, Cut, placement_of, set_placement


@dataclass(frozen=True)
class FSDPPolicy:
    """Where and in which dtypes parameters compute, and gradients are summed.

    Attributes:
        dtype: of the computation; None is the dtype of the parameters.
        communication_dtype: in which gradients are summed; None is the dtype of the computation.
        average: divide sums of gradients by the number of ranks.
        offload: shards and their gradients are in CPU memory.
        replicas: starts collectives over the ranks that hold the same shard; None if no other rank does.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    communication_dtype: torch.dtype | None = None
    average: bool = True
    offload: bool = False
    replicas: Background | None = None

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the computation, dtype of the reduction) for parameters of `dtype`."""
        compute = self.dtype if self.dtype is not None and dtype.is_floating_point else dtype
        # Complex gradients are reduced as they are: a real dtype would drop the imaginary part.
        return compute, (self.communication_dtype or compute) if compute.is_floating_point else compute


class FlatParam:
    """Parameters of a unit that one all-gather brings: of one dtype, and at first all trained or all frozen.

    Args:
        named: {name: parameter}. They become this rank's shards, with the values of the axis's rank 0.
        on_complete: called in a backward when all gradients are complete.

    Attributes:
        sharded_params, unsharded_params: in the same order.
        axes: the ranks that hold the other shards, and those that hold the same shard if there are any.
        is_unsharded: the full parameters are here, or are being gathered.
        is_gathered: they are here.
        has_gradients: there are full gradients that have not been reduced.
        missing: how many gradients the current backward has not brought yet.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        axis: Axis,
        background: Background,
        policy: FSDPPolicy,
        on_complete: Callable[[FlatParam], None],
    ) -> None:
        self._background, self._policy, self._on_complete = background, policy, on_complete
        self.axes = (axis,) if policy.replicas is None else (axis, policy.replicas.axis)
        self.names, self.sharded_params = list(named), list(named.values())
        dtype = self.sharded_params[0].dtype
        compute_dtype, self._reduce_dtype = policy.dtypes(dtype)
        itemsize = min(dtype.itemsize, compute_dtype.itemsize, self._reduce_dtype.itemsize)
        self._layout = ShardLayout(tuple(tuple(p.shape) for p in self.sharded_params), axis.size, itemsize)
        self._shard = self._shard_parameters(axis)  # (P/N,)

        flat = torch.empty(self._layout.numel, dtype=compute_dtype, device=policy.device)  # (P,)
        # view.data has its own version counter. So the next all-gather into `flat`, which brings the same
        # values back, does not look to autograd like an in-place change of what it saved.
        self.unsharded_params = [
            nn.Parameter(view.data, p.requires_grad)
            for view, p in zip(self._layout.views(flat), self.sharded_params, strict=True)
        ]
        self._flat, self._flat_bytes = flat, flat.nbytes
        # Of another dtype or device, the shard is copied to its position in `flat` before a gather.
        self._needs_copy_in = compute_dtype != dtype or policy.offload
        self._shard_in_flat = self._layout.shard(flat, axis.rank)
        self._gathering = Pending()
        _free(flat)
        self.is_unsharded = self.is_gathered = False

        copies = policy.replicas.axis.size if policy.replicas is not None else 1
        averages_here = policy.average and not background.averages
        self._scale = 1.0 / (axis.size * copies) if averages_here else 1.0
        self._flat_grad, self._grad_views = torch.empty(0), list[torch.Tensor]()
        self._reducing: tuple[Pending, torch.Tensor] | None = None  # and what becomes this rank's (P/N,)
        self._new_gradients: list[nn.Parameter] = []  # whose .grad the last reduction has made
        self.has_gradients = self._is_reduced = False
        self._hooked: set[nn.Parameter] = set()
        self._forwarded_hooks = ForwardedHooks()
        self._count_trained()

    def _shard_parameters(self, axis: Axis) -> torch.Tensor:
        """Make the parameters this rank's shards, with rank 0's values. Returns what they are views of."""
        layout, policy, params = self._layout, self._policy, self.sharded_params
        dtype, home = params[0].dtype, torch.device("cpu") if policy.offload else policy.device
        if all(p.is_meta for p in params):
            shard = torch.zeros(layout.shard_numel, dtype=dtype, device=home)
        else:
            full = torch.zeros(layout.numel, dtype=dtype, device=policy.device)
            for view, p in zip(layout.views(full), params, strict=True):
                if not p.is_meta:
                    view.copy_(p.detach())
            if axis.size > 1:
                dist.broadcast(full, src=axis.ranks[0], group=axis.group)
            shard = layout.shard(full, axis.rank)
            if policy.replicas is not None:
                replicas = policy.replicas.axis
                dist.broadcast(shard, src=replicas.ranks[0], group=replicas.group)
            shard = shard.to(home, copy=True)
        if policy.offload and policy.device.type == "cuda":
            shard = shard.pin_memory()
        values, ranges = layout.views_in_shard(shard, axis.rank), layout.ranges(axis.rank)
        for name, p, value, span in zip(self.names, params, values, ranges, strict=True):
            placement = placement_of(p, name).cut(Cut(axis.name, FLAT, (span,)))
            p.grad = None
            if p.is_meta:  # .data cannot change from meta to real; swapping keeps the object too
                torch.utils.swap_tensors(p, nn.Parameter(value, p.requires_grad))
            else:
                p.data = value
            set_placement(p, placement)
        self._addresses = [(p, p.data_ptr(), p.dtype) for p in params if p.numel()]
        return shard

    def follow_requires_grad(self) -> None:
        """Freeze or train the unsharded parameters as the sharded ones are by now."""
        changed = False
        for sharded, unsharded in zip(self.sharded_params, self.unsharded_params, strict=True):
            if sharded.requires_grad != unsharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
                changed = True
        if changed:
            self._count_trained()

    def follow_hooks(self) -> None:
        """Call the hooks that users have registered on the sharded parameters by now."""
        for sharded, unsharded in zip(self.sharded_params, self.unsharded_params, strict=True):
            self._forwarded_hooks.follow(sharded, unsharded)

    def _count_trained(self) -> None:
        trained = [p for p in self.unsharded_params if p.requires_grad]
        for p in trained:
            if p not in self._hooked:
                hook_gradients([p], self._count_gradient, keeps_owner_alive=False)  # the module's hooks do
                self._hooked.add(p)
        self.num_trained, self.has_frozen = len(trained), len(trained) < len(self.unsharded_params)
        self.missing = self.num_trained

    def find_replaced(self) -> str | None:
        """The name of a sharded parameter whose data somebody has replaced, if there is one."""
        for sharded, address, dtype in self._addresses:
            if sharded.data_ptr() != address or sharded.dtype != dtype:
                return next(n for n, p in zip(self.names, self.sharded_params, strict=True) if p is sharded)
        return None

    @property
    def has_replicas(self) -> bool:
        """Whether other ranks hold the same shard."""
        return self._policy.replicas is not None

    # --- parameters -------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start to all-gather the full parameters, unless they are here."""
        self._is_reduced = False
        if self.is_unsharded:
            return
        self.is_unsharded = True
        self._flat.untyped_storage().resize_(self._flat_bytes)
        if self._needs_copy_in:
            self._shard_in_flat.copy_(self._shard, non_blocking=True)
        shard = self._shard_in_flat if self._needs_copy_in else self._shard
        self._gathering = self._background.all_gather(self._flat, shard)

    def wait_for_unshard(self) -> None:
        """The full parameters are here, if `unshard` was called since the last `reshard`."""
        self._gathering.wait()
        self.is_gathered = self.is_unsharded

    def reshard(self) -> None:
        """Free the full parameters. What autograd saved are views of them, and it sees them come again."""
        if self.is_unsharded:
            self._gathering.wait()
            _free(self._flat)
            self.is_unsharded = self.is_gathered = False

    def forget_gather(self) -> None:
        """A capture of a CUDA graph failed: what it recorded cannot be waited for. `reshard` comes next."""
        self._gathering = Pending()

    # --- gradients --------------------------------------------------------------------------

    def _count_gradient(self, unsharded: nn.Parameter) -> None:
        """A hook of every unsharded parameter: the backward has added to its gradient."""
        if not self.is_gathered or (unsharded.grad is not None and unsharded.grad.is_sparse):
            self._refuse_gradient(unsharded)
        self.has_gradients = True
        self.missing -= 1
        if self.missing == 0:
            self._on_complete(self)

    def _refuse_gradient(self, unsharded: nn.Parameter) -> None:
        name = next(n for n, p in zip(self.names, self.unsharded_params, strict=True) if p is unsharded)
        if self.is_gathered:
            raise ValueError(f"the gradient of {name} is sparse; use nn.Embedding(sparse=False)")
        raise RuntimeError(
            f"the gradient of {name} came before its unit was gathered again, so it is wrong: a forward left "
            "a tensor elsewhere (in an attribute?) that the loss uses. Return it from the forward"
        )

    def names_without_gradient(self) -> list[str]:
        """Names of trained parameters that have no gradient, neither reduced nor to be reduced. A hook may
        have used up a reduced one and set .grad to None."""
        if self._is_reduced:
            return []
        triples = zip(self.names, self.sharded_params, self.unsharded_params, strict=True)
        return [
            n for n, p, unsharded in triples if p.requires_grad and p.grad is None and unsharded.grad is None
        ]

    def drop_new_gradients(self) -> None:
        """Forget the last reduced gradients, except where they were added to earlier ones."""
        for p in self._new_gradients:
            p.grad = None

    def drop_gradients(self) -> None:
        """Forget gradients that have not been reduced."""
        if self._reducing is not None:
            self._reducing[0].wait()
            self._reducing = None
            _free(self._flat_grad)
        for p in self.unsharded_params:
            p.grad = None
        self.has_gradients, self.missing = False, self.num_trained

    def reduce_scatter(self) -> None:
        """Start to sum the gradients over the ranks. A missing gradient counts as zero."""
        if not self._grad_views:
            numel, device = self._layout.numel, self._flat.device
            self._flat_grad = torch.empty(numel, dtype=self._reduce_dtype, device=device)
            self._grad_views = self._layout.views(self._flat_grad)
        else:
            self._flat_grad.untyped_storage().resize_(self._layout.numel * self._reduce_dtype.itemsize)
        fill_bucket(self._flat_grad, self._grad_views, [p.grad for p in self.unsharded_params], self._scale)
        for p in self.unsharded_params:
            p.grad = None
        self.has_gradients = False
        shard = self._flat_grad.new_empty(self._layout.shard_numel)
        average = self._policy.average and self._background.averages
        self._reducing = self._background.reduce_scatter(shard, self._flat_grad, average), shard

    def sum_over_replicas(self) -> None:
        """Wait for the reduce-scatter, and start to sum this rank's shard over the ranks that hold it too."""
        assert self._reducing is not None
        assert self._policy.replicas is not None
        pending, shard = self._reducing
        pending.wait()
        _free(self._flat_grad)
        average = self._policy.average and self._policy.replicas.averages
        self._reducing = self._policy.replicas.all_reduce(shard, average), shard

    def finish_reduction(self, used: Sequence[bool] | None = None) -> None:
        """Wait for the sums, and put this rank's shard of them into (or add it to) .grad.

        Args:
            used: for each parameter, whether any rank has a gradient of it. Where none has, .grad stays None.
        """
        assert self._reducing is not None
        (pending, shard), self._reducing = self._reducing, None
        pending.wait()
        _free(self._flat_grad)
        if self._policy.offload or shard.dtype != self._shard.dtype:
            pinned = self._shard.is_pinned() if self._policy.offload else False
            converted = torch.empty_like(self._shard, pin_memory=pinned)
            shard = converted.copy_(shard, non_blocking=pinned)
        accumulated, added, hooked = [], [], []
        self._new_gradients.clear()
        grads = self._layout.views_in_shard(shard, self.axes[0].rank)
        for i, (p, grad) in enumerate(zip(self.sharded_params, grads, strict=True)):
            if not p.requires_grad or (used is not None and not used[i]):
                continue
            if has_post_accumulate_hooks(p):
                hooked.append(p)
            if p.grad is None:
                p.grad = grad
                self._new_gradients.append(p)
            else:
                accumulated.append(p.grad)
                added.append(grad)
        if (accumulated or hooked) and shard.is_pinned():
            torch.cuda.current_stream().synchronize()
        if accumulated:
            torch._foreach_add_(accumulated, added)
        self._is_reduced = True
        for p in hooked:
            run_post_accumulate_hooks(p)


def _free(flat: torch.Tensor) -> None:
    flat.untyped_storage().resize_(0)
    flat.detach()  # for a memory recorder: it looks at what operators return, and learns the new size
