"""ZeRO, stages 1 and 2: no two ranks keep the same optimizer state, or the same gradient.

    backward   gradients  --reduce-scatter-->  this rank's 1/N of their mean       bucket by bucket, meanwhile
    step       optimizer on this rank's 1/N of the parameters                      its states are 1/N too
               parameters <--all-gather--      every rank's 1/N

Bytes a parameter with 16-bit weights, Adam and float32 masters, on N ranks (`hpnb.theory.model_states`):

    stage 0 (DataParallel)   2 + 2 + 12
    stage 1                  2 + 2 + 12/N      whole gradients stay, as the buffers they are sent from
    stage 2                  2 + (2 + 12)/N    and in stage 2 a bucket of them lives until it is reduced

A reduce-scatter and an all-gather move what the all-reduce of plain data parallelism moves, 2(N-1)/N.
Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_leaves

from hpnb.background import wait_all
from hpnb.data_parallel.ddp import agree, broadcast
from hpnb.data_parallel.reducer import used_nowhere
from hpnb.data_parallel.zero_bucket import ZeroBucket
from hpnb.data_parallel.zero_checks import (
    assign_buckets_in_backward_order,
    check_class,
    check_parameters,
    names_of_parameters,
    replica_around,
    treats_elements_alike,
)
from hpnb.data_parallel.zero_reduce_scatter import ZeroReduceScatter
from hpnb.grad_norm import total_norm
from hpnb.mesh import Axis
from hpnb.optimizer_state import (
    build_state_dict,
    gather_states,
    group_options,
    local_states,
    split_state_dict,
)
from hpnb.placement import Placement
from hpnb.precision import Masters
from hpnb.precision.masters import multiply, parameters_of


class ZeroOptimizer(ZeroReduceScatter, Optimizer):
    """ZeRO around any optimizer of PyTorch; to be used as one, and the model as if there were no ranks.

    Args:
        params: what any optimizer takes: parameters, named ones, or groups with options. The same on all
            ranks; values become those of the axis's rank 0. Each parameter moves into a flat tensor.
        optimizer_class, defaults: e.g. torch.optim.AdamW, and its options.
        axis: the data axis, `mesh.dp`.
        stage: 1 or 2.
        bucket_mb: at most so many MB (2^20 bytes) travel at once.
        average: False sums gradients instead, for losses that are divided by the global count already.
        elementwise: whether elements are treated alike, so that a tensor may be cut anywhere; otherwise each
            belongs to one rank. None: so for PyTorch's own except Adafactor and Muon, and for a class that
            says `elementwise = True`.
        cpu_offload: optimizer, masters and reduced gradients live on the CPU.
        communication_dtype: of gradients on the wire; by default their own.
        overlap_communication: reduce during the backward; False does it after. It must be off where several
            ZeroOptimizers share a model whose ranks run different layers.
        find_unused_parameters: allow parameters that a forward does not use, for a small all-reduce a
            backward. One that no rank uses keeps its value and state.

    Attributes:
        optimizer: an optimizer_class over `pieces`: this rank's parts of the parameters, and what
            param_groups and state are of. Their .grad are the reduced gradients; a parameter's own is None
            after a backward. So clip by `clip_grad_norm_` of this optimizer, or `hpnb.precision.step(zero,
            [axis], max_norm=...)`: torch's own would see nothing, or one rank's pieces.

    Several backwards before a step add up. A step ends that: gradients of the next backward replace those
    that were stepped, even if nobody called zero_grad, because `model.zero_grad()` does not reach pieces.
    (With stage 1 on a DataParallel gradients are its, and add up until they are zeroed.)

    Around the same parameters there may be a DataParallel, made before or after. It then says when (its
    no_sync governs); stage 1 on top of it leaves the reduction, and whole gradients, to it.

    Raises:
        ValueError: what cannot work, in one sentence.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: type[Optimizer],
        axis: Axis,
        stage: int = 1,
        *,
        bucket_mb: float = 25.0,
        average: bool = True,
        elementwise: bool | None = None,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        find_unused_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        check_class(stage, optimizer_class)
        Optimizer.__init__(self, params, {})  # reads them as any optimizer does
        self._given = self.param_groups
        everything: list[nn.Parameter] = [p for group in self._given for p in group["params"]]
        self._numbers = {p: i for i, p in enumerate(everything)}
        self.names = names_of_parameters(self._given)
        check_parameters(self.names, axis)
        chosen = (optimizer_class.__name__, stage, bucket_mb, average, find_unused_parameters)
        wanted = dict(zip(("class", "stage", "bucket_mb", "average", "find_unused"), chosen, strict=True))
        agree({name: p for p, name in self.names.items()}, axis, wanted)
        leave = stage == 1 and not cpu_offload and communication_dtype is None
        replica = replica_around(self.names, axis, leave)

        dealt = assign_buckets_in_backward_order(self._given, bucket_mb)
        if replica is None:
            frozen = [p for p in everything if not p.requires_grad]
            for some in (*(b.parameters for b in dealt), frozen):  # one by one: each is copied to be sent
                broadcast(list(some), axis)
        alike = treats_elements_alike(optimizer_class) if elementwise is None else elementwise
        buckets = [
            ZeroBucket(b.parameters, [self.names[p] for p in b.parameters], axis, whole=not alike,
                       keep=stage == 1, wire=communication_dtype, offload=cpu_offload)
            for b in dealt
        ]  # fmt: skip
        ZeroReduceScatter.__init__(
            self, self.names, buckets, axis, stage, average=average, overlap=overlap_communication,
            find_unused=find_unused_parameters, offload=cpu_offload,
        )  # fmt: skip
        self.pieces = {p: piece for b in self.buckets for p, piece in zip(b.parameters, b.pieces, strict=True)
                       if piece is not None}  # fmt: skip

        pieces = [[self.pieces[p] for p in group["params"] if p in self.pieces] for group in self._given]
        groups = [{**group_options(g), "params": held} for g, held in zip(self._given, pieces, strict=True)]
        self.optimizer = optimizer_class(groups, **defaults)
        self.defaults = self.optimizer.defaults
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        is_16_bit = any(p.dtype.itemsize == 2 for p in self.names)
        self.masters = Masters(self.optimizer) if is_16_bit else None
        self._frozen = [p for p in everything if not p.requires_grad]
        self._note_versions()
        self._attach(replica, leave)

    _step_supports_amp_scaling = True  # by this torch.amp.GradScaler leaves it to `step`, which refuses it

    # --- the optimizer ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step this rank's pieces, and give all ranks the new parameters."""
        if closure is not None:
            raise ValueError(
                "ZeroOptimizer.step(closure) cannot evaluate a loss: run forward and backward first, then "
                "step() without a closure"
            )
        if getattr(self, "found_inf", None) is not None:
            raise ValueError(
                "torch.amp.GradScaler sees one rank's pieces, so ranks would not agree on an overflow: use "
                "hpnb.precision.step(zero, [axis], scaler=hpnb.precision.LossScaler())"
            )
        if self._queued:
            raise RuntimeError("the last backward raised before its end: zero_grad() forgets what is left")
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(
                "parameters that were frozen when this ZeroOptimizer was made are trained now, and would not "
                "be stepped; make it anew"
            )
        gone = {p for bucket in self.buckets for p in bucket.moved()}
        if moved := [n for p, n in self.names.items() if p in gone]:
            raise RuntimeError(
                f"{len(moved)} parameters, {moved[0]} first, have moved to other memory since this optimizer "
                "was made, and would not be stepped: move or cast the model before it, not after"
            )
        if self.below is not None:
            if not self._finished and any(p.grad is not None for p in self.names):
                raise RuntimeError(
                    "no backward since the last step was reduced: the last one must be outside no_sync()"
                )
            self._cut_gradients()
        elif left := [n for p, n in self.names.items() if p.grad is not None]:
            raise RuntimeError(
                f"{len(left)} parameters, {left[0]} first, have a gradient that was not reduced: the last "
                "backward before a step must be outside no_sync()"
            )
        if self._versions != [p._version for p in self.names]:
            self.refresh()  # somebody has written parameters: a checkpoint, a broadcast
        self.optimizer.step()
        self._gather()
        self._fresh, self._finished = True, False

    def skip(self) -> None:
        """In place of a `step` that is skipped: its gradients end here too, whoever zeroes them."""
        self._fresh, self._finished = True, False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the norm of the whole gradient to `max_norm`; returns what it was, (). Every rank calls it.

        torch.nn.utils.clip_grad_norm_ would see this rank's pieces alone.
        """
        pieces = parameters_of(self.optimizer)
        norm = total_norm(pieces, [self.axis])
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        multiply([p.grad for p in pieces if p.grad is not None], factor)
        return norm

    def _note_versions(self) -> None:
        """Remember that parameters are as we have left them."""
        self._versions = [p._version for p in self.names]
        if self.masters is not None:
            self.masters.note()

    def _gather(self) -> None:
        pending = [bucket.gather(self._background[bucket.flat.device]) for bucket in self.buckets]
        wait_all(pending)
        self._note_versions()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of pieces, and what backwards under no_sync() have left on parameters."""
        super().zero_grad(set_to_none)
        for p in self.names:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.detach().zero_()
        self._fresh = set_to_none
        self.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is being made.

        Raises:
            ValueError: later.
        """
        if "optimizer" in vars(self):
            raise ValueError("a ZeroOptimizer deals out its parameters once; make it with all its groups")
        super().add_param_group(param_group)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters as they are now. A step does it by itself when others have written them."""
        self._refresh_pieces()
        if self.masters is not None:
            self.masters.refresh()
        self._note_versions()

    def _refresh_pieces(self) -> None:
        for bucket in self.buckets:
            bucket.refresh()

    # --- what it holds ----------------------------------------------------------------------------

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{"optimizer": states, masters, offloaded pieces, "gradients": whole and in shares} of this rank."""
        parts = [bucket.held() for bucket in self.buckets]
        states = [leaf for leaf in tree_leaves(dict(self.optimizer.state)) if isinstance(leaf, torch.Tensor)]
        masters = [] if self.masters is None else self.masters.held()["optimizer"]
        return {
            "optimizer": [*states, *masters, *(t for part in parts for t in part["optimizer"])],
            "gradients": [t for part in parts for t in part["gradients"]],
        }

    @torch.no_grad()
    def full_gradients(self) -> list[torch.Tensor | None]:
        """The reduced gradients whole, in the order of the parameters; None where there is none.

        Every rank of the axis calls it and gets all of them.
        """
        without = [p for p in self.names if p not in self.pieces or self.pieces[p].grad is None]
        nowhere = used_nowhere(list(self.names), without, self.axis)
        found: list[torch.Tensor | None] = [None] * len(self._numbers)
        for bucket in self.buckets:
            parts = [None if piece is None else piece.grad for piece in bucket.pieces]
            wholes = bucket.gather_pieces(parts, bucket.flat.dtype, self._background[bucket.flat.device])
            for p, whole in zip(bucket.parameters, wholes, strict=True):
                found[self._numbers[p]] = None if p in nowhere else whole
        return found

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """What `optimizer_class` would give on one process, tensors whole and on the CPU, on every rank.

        With 16-bit parameters there is a third entry, "masters", as `hpnb.precision.Masters` has. Every rank
        of the axis calls it.
        """
        states = local_states(self.optimizer.state_dict(), list(self._shard_placements(self.pieces)))
        groups = []
        for group, made_with, numbers in zip(self.param_groups, self._given, self._numbering, strict=True):
            names = {"param_names": made_with["param_names"]} if "param_names" in made_with else {}
            groups.append({**group_options(group), **names, "params": numbers})
        gathered = gather_states(states, self._shard_placements(self.names), [self.axis])
        return build_state_dict(gathered, groups, self.masters is not None)

    @property
    def _numbering(self) -> list[list[int]]:
        """The numbers of all parameters, by group."""
        return [[self._numbers[p] for p in group["params"]] for group in self._given]

    def _shard_placements(self, parameters: Collection[nn.Parameter]) -> dict[int, Placement]:
        """{number: what this rank holds of the parameter}, group by group."""
        by_parameter = {p: where for bucket in self.buckets for p, where in bucket.shard_placements().items()}
        return {n: by_parameter[p] for p, n in self._numbers.items() if p in parameters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from any number of ranks, either stage, or a plain optimizer_class.

        Load the model's own state before. Masters in it set the parameters too.

        Raises:
            ValueError: it is the state of other parameters.
        """
        local = split_state_dict(state_dict, self._numbering, self._shard_placements(self.pieces))
        self._refresh_pieces()
        if self.masters is None:  # pieces are wide enough to be their own
            pieces = parameters_of(self.optimizer)
            for i, master in local.pop("masters").items():
                pieces[i].copy_(master)
        self.optimizer.load_state_dict(local)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._gather()
