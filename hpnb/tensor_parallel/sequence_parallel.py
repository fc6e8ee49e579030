"""Sequence parallelism: what lies between two regions is sharded along the tokens.

A region is a column-row pair (`tp_1d_linear.py`). Norms, dropouts and residuals between the regions work on
every token by itself. So each rank needs only a t-th of the tokens there, and the all-reduce at the end of a
region splits into its two halves:

    forward     x_r (n/t tokens)  -> all-gather x ->  y_r  ->  reduce-scatter z_r -> n/t tokens of z
    backward    all-gather dz -> dy_r -> reduce-scatter dx_r -> n/t tokens of dx

(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.) The bytes stay the same as without it,
4 * 2 (t-1)/t b s h a block, while activations between the regions shrink to a t-th. Each rank keeps the
gathered x of a region for dA. Korthikanti et al. keep x_r alone and gather x again in the backward, which
takes less memory and one more all-gather.

The n = b s tokens of a batch are numbered through and split evenly, (1, n/t, h) on each rank, so that slices
travel without being rearranged. Where t does not divide n the first ranks have one token more, and messages
are padded to t ceil(n/t) tokens.

Without sequence parallelism x and z are replicated: nothing to do at the start of a region, an all-reduce
at its end, and the other way round in the backward. `SequenceSharding` does both.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from hpnb import comm
from hpnb.background import Background
from hpnb.comm import gather_slices, pad_slices, sum_slices
from hpnb.gradients import in_backward
from hpnb.mesh import Axis
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.all_reduce_in_place import all_reduce_in_place
from hpnb.tensor_parallel.async_all_reduce import (
    NO_COMMUNICATION,
    RegionEntry,
    RegionExit,
    StartedCollective,
)

TOKENS = 1  # the dim of (1, b s, h) that sequence parallelism shards
WITHOUT_IT = "use enable_sequence_parallelism=False, which is sequence_parallel=False of parallelize"
_SHAPE_KEY = "hpnb_batch_shape_of_node"  # in the metadata of the autograd node that made a block's input


class SequenceSharding:
    """How activations lie on the ranks of an axis between two regions, and what is sent at a region's ends.

    Attributes:
        enabled: whether tokens are sharded there; if not, they are replicated.
        shape: (b, s) of the batch whose forward runs; used only if `enabled`.
        overlap: whether the reduce-scatter of a gradient overlaps the computation of weight gradients.
    """

    def __init__(self, axis: Axis, enabled: bool, device: torch.device, overlap: bool = True) -> None:
        self.overlap = overlap
        self.axis, self.enabled, self.shape = axis, enabled and axis.size > 1, (0, 0)
        self._background = Background(axis, device)
        self._seen_shapes: dict[int, set[tuple[int, int]]] = defaultdict(set)  # by tokens of this rank

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceSharding:
        return self  # hooks that are functions set the shape here, and a copy of a model shares them

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return split_sizes(self.shape[0] * self.shape[1], self.axis.size)

    @property
    def tokens(self) -> int:
        """Of this rank."""
        return self.sizes[self.axis.rank]

    def holds_tokens(self, x: torch.Tensor) -> bool:
        """Whether x has the shape of this rank's tokens, (1, b s/t, any width)."""
        return x.is_floating_point() and x.dim() == 3 and tuple(x.shape[:2]) == (1, self.tokens)

    def set_batch_shape(self, batch_size: int, length: int) -> None:
        """A forward begins, on a batch of `batch_size` sequences of `length` tokens."""
        self.shape = (batch_size, length)

    def recall_batch_shape(self, x: torch.Tensor) -> torch.Tensor:
        """A hook of a block: set the (b, s) of its input x (1, b s/t, h), and return x.

        In a forward, that is the current (b, s), which is noted. A block may also run in a backward, because
        a checkpoint around it recomputes it with its hooks (other checkpoints: see `_pass_batch_shape` in
        `tp_1d.py`). By then other batches have run, and x may be a copy that was offloaded meanwhile. But
        autograd restores the node that made x, so (b, s) is noted in the metadata of that node. A reentrant
        checkpoint detaches x from its node; then all batches with so many tokens must have had one shape.
        """
        shapes = self._seen_shapes[x.size(TOKENS)]
        node: Any = x.grad_fn
        if not in_backward():
            shapes.add(self.shape)
            if node is not None:
                node.metadata[_SHAPE_KEY] = self.shape
        elif node is not None and _SHAPE_KEY in node.metadata:
            self.shape = node.metadata[_SHAPE_KEY]
        elif len(shapes) == 1:
            (self.shape,) = shapes
        elif shapes:
            raise RuntimeError(
                f"a block is recomputed on {x.size(TOKENS)} tokens of this rank, which were a batch of shape "
                f"{' or '.join(map(str, sorted(shapes)))}; checkpoint blocks with use_reentrant=False, or by "
                "model.gradient_checkpointing_enable()"
            )
        return x

    # --- into the sharded tokens, and out of them ---------------------------------------------------------

    def split_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Before the first block: (b, s, h) -> (1, b s/t, h); backward gathers."""
        self.shape = (x.size(0), x.size(1))
        return comm.split(x.flatten(0, 1).unsqueeze(0), self.axis, TOKENS)

    def gather_tokens(self, x: torch.Tensor, head_is_replicated: bool) -> torch.Tensor:
        """After the last block: (1, b s/t, h) -> (b, s, h).

        Args:
            head_is_replicated: whether all ranks compute the same head. Then each has the complete gradient,
                and the backward takes a slice of it. Otherwise the backward sums over the ranks.
        """
        batch_size, length = self.shape
        if x.size(0) == 0:  # an empty batch (`hpnb.models.accept_empty_batch`), on all ranks alike
            return x.sum() * x.new_zeros((0, length, x.size(-1)))
        gather = comm.gather if head_is_replicated else comm.all_gather
        return gather(x, self.axis, TOKENS, batch_size * length).view(batch_size, length, -1)

    # --- at the ends of a region --------------------------------------------------------------------------

    def region_entry(self) -> RegionEntry:
        """Into a region: (b, s, h), or (1, b s/t, h), -> (b, s, h); the backward sums over the ranks."""
        if self.axis.size == 1:
            return NO_COMMUNICATION
        if not self.enabled:
            return RegionEntry(lambda x: x, self._start_all_reduce)
        shape, sizes = self.shape, self.sizes
        return RegionEntry(
            lambda x: gather_slices(x, self.axis, TOKENS, sizes).view(*shape, -1),
            lambda grad: self._start_reduce_scatter(grad, sizes),
        )

    def region_exit(self) -> RegionExit | None:
        """Out of a region: a rank's summand (b, s, h), overwritten, -> (b, s, h) or (1, b s/t, h)."""
        if self.axis.size == 1:
            return None
        if not self.enabled:
            return RegionExit(self._all_reduce, lambda dz: dz, lambda y: y)
        shape, sizes = self.shape, self.sizes
        return RegionExit(
            lambda z: sum_slices(z.flatten(0, 1).unsqueeze(0), self.axis, TOKENS),
            lambda dz: gather_slices(dz, self.axis, TOKENS, sizes).view(*shape, -1),
            lambda y: y.flatten(0, 1).unsqueeze(0).split(sizes, TOKENS)[self.axis.rank].clone(),
        )

    def _start_all_reduce(self, grad: torch.Tensor) -> StartedCollective:
        grad = grad.contiguous()
        return grad, self._background.all_reduce(grad), grad

    def _start_reduce_scatter(self, grad: torch.Tensor, sizes: tuple[int, ...]) -> StartedCollective:
        """(b, s, h) -> (1, b s/t, h)."""
        flat = pad_slices(grad.reshape(-1, grad.size(-1)), sizes)  # (t ceil(b s / t), h)
        result = flat.new_empty((max(sizes), flat.size(1)))
        pending = self._background.reduce_scatter(result, flat)
        if not self.overlap:
            pending.wait()
        return result[: sizes[self.axis.rank]].unsqueeze(0), pending, flat

    def _all_reduce(self, z: torch.Tensor) -> torch.Tensor:
        z = z.contiguous()
        return all_reduce_in_place(z, self.axis)  # z is a temporary of the caller
