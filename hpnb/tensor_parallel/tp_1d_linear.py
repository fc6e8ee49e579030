"""Two matrices in a row, cut so that nothing is sent between them: 1D tensor parallelism.

    y = f(x A)      A = [A_1 | A_2 | ... | A_t]        rank r has y_r = f(x A_r): the columns of y
    z = y B         B = [B_1 ; B_2 ; ... ; B_t]        and z_r = y_r B_r, of which z is the sum

    forward     x replicated  ->  y_r  ->  z = all-reduce(z_r)
    backward    dz replicated ->  dy_r ->  dx = all-reduce(dx_r)

(Shoeybi et al. 2019, *Megatron-LM*, arXiv 1909.08053, section 3.) f works on columns by themselves: a GELU,
or an attention whose heads are columns. For b sequences of s tokens of width h a block has two such pairs, so

    bytes that leave a rank, a block, forward and backward:   4 * 2 (t-1)/t * b s h * element size

With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) what lies between the
pairs, norms, dropouts and residuals, is cut along the tokens. An all-reduce is a reduce-scatter and an
all-gather:

    forward     x_r (n/t tokens)  -> all-gather x ->  y_r  ->  reduce-scatter z_r -> n/t tokens of z
    backward    all-gather dz -> dy_r -> reduce-scatter dx_r -> n/t tokens of dx

so the bytes are the same, 4 * 2 (t-1)/t b s h, and norms hold a t-th. The n = b s tokens of a batch lie one
behind the other and are cut as they lie, (1, n/t, h) on each rank: nothing between the pairs looks at more
than one token, and slices that are cut so travel without being rearranged. Where t does not divide n, the
first ranks have a token more, and messages are padded to t ceil(n/t) tokens.

A row's bias is added once: by the first rank, inside its matmul, before the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpnb import comm
from hpnb.background import Background
from hpnb.comm import gather_slices, sum_slices
from hpnb.gradients import in_backward
from hpnb.mesh import Axis
from hpnb.record.recorder import communication
from hpnb.split_sizes import split_sizes
from hpnb.tensor_parallel.async_all_reduce import (
    NO_COMMUNICATION,
    ForwardWeights,
    RegionEntry,
    RegionExit,
    StartedCollective,
    begin,
    matmul,
    product,
)

TOKENS = 1  # the dim of (1, b s, h) that sequence parallelism cuts
_REMEMBERED = 10_000  # inputs of blocks; many more than are ever kept for a backward


class SequenceSharding:
    """The ranks of one axis, one behind the other, and how activations lie on them between two pairs.

    Attributes:
        sequence: whether tokens are cut there.
        shape: (b, s) of the batch whose forward is under way; only asked for if `sequence`.
    """

    def __init__(self, axis: Axis, sequence: bool, device: torch.device) -> None:
        self.axis, self.sequence, self.shape = axis, sequence and axis.size > 1, (0, 0)
        self._background = Background(axis, device)
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        self._enter = RegionEntry(lambda x: x, self._sum)
        self._leave = RegionExit(self._all_reduce, lambda dz: dz)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return split_sizes(self.shape[0] * self.shape[1], self.axis.size)

    def begin(self, rows: int, length: int) -> None:
        """A forward begins on a batch of so many rows of so many tokens."""
        self.shape = (rows, length)

    def arrive(self, x: torch.Tensor) -> torch.Tensor:
        """A block begins on x (1, b s/t, h). If it is computed again for a backward (activation
        checkpointing), other batches may have come since: x, which was kept, tells which one it is."""
        kept = (x.data_ptr(), x.size(TOKENS))
        if in_backward():
            self.shape = self._shapes.get(kept, self.shape)
        else:
            if len(self._shapes) > _REMEMBERED:
                self._shapes.clear()
            self._shapes[kept] = self.shape
        return x

    # --- into what is cut along tokens, and out of it ----------------------------------------------------

    def deal(self, x: torch.Tensor) -> torch.Tensor:
        """Before the first block: (b, s, h) -> (1, b s/t, h); backward gathers."""
        self.shape = (x.size(0), x.size(1))
        return comm.split(x.flatten(0, 1).unsqueeze(0), self.axis, TOKENS)

    def together(self, x: torch.Tensor, alike: bool) -> torch.Tensor:
        """After the last block: (1, b s/t, h) -> (b, s, h).

        Args:
            alike: whether all ranks go on to compute the same: then a gradient is complete already.
        """
        rows, length = self.shape
        if x.size(0) == 0:  # a batch of no rows (`hpnb.models.accept_no_rows`), on all ranks alike
            return x.sum() * x.new_zeros((0, length, x.size(-1)))
        whole = (comm.gather if alike else comm.all_gather)(x, self.axis, TOKENS, rows * length)
        return whole.view(rows, length, -1)

    # --- into a pair, and out of it ----------------------------------------------------------------------

    def entry(self) -> RegionEntry:
        """Into a pair: (b, s, h), or (1, b s/t, h), -> (b, s, h); backward sums."""
        if self.axis.size == 1:
            return NO_COMMUNICATION
        if not self.sequence:
            return self._enter
        shape, sizes = self.shape, self.sizes
        return RegionEntry(
            lambda own: gather_slices(own, self.axis, TOKENS, sizes).view(*shape, -1),
            lambda grad: self._scatter(grad, sizes),
        )

    def exit(self) -> RegionExit | None:
        """Out of a pair: a rank's part of a sum, (b, s, h), which is lost, -> (b, s, h) or (1, b s/t, h)."""
        if self.axis.size == 1:
            return None
        if not self.sequence:
            return self._leave
        shape, sizes = self.shape, self.sizes
        return RegionExit(
            lambda z: sum_slices(z.flatten(0, 1).unsqueeze(0), self.axis, TOKENS),
            lambda dz: gather_slices(dz, self.axis, TOKENS, sizes).view(*shape, -1),
        )

    def _sum(self, grad: torch.Tensor) -> StartedCollective:
        grad = grad.contiguous()
        return grad, self._background.all_reduce(grad), grad

    def _scatter(self, grad: torch.Tensor, sizes: tuple[int, ...]) -> StartedCollective:
        """(b, s, h) -> (1, b s/t, h)."""
        most, flat = max(sizes), grad.reshape(-1, grad.size(-1))  # (b s, h)
        if min(sizes) < most:
            flat = torch.cat([F.pad(part, (0, 0, 0, most - len(part))) for part in flat.split(sizes)])
        mine = flat.new_empty((most, flat.size(1)))
        pending = self._background.reduce_scatter(mine, flat)
        return mine[: sizes[self.axis.rank]].unsqueeze(0), pending, flat

    def _all_reduce(self, z: torch.Tensor) -> torch.Tensor:
        z = z.contiguous()
        with communication("all_reduce", self.axis.name, z.nbytes, self.axis.ranks):
            dist.all_reduce(z, group=self.axis.group)  # in place: z was made a moment ago, for this alone
        return z


# --- the layers ------------------------------------------------------------------------------------------


class _Cut(nn.Module):
    """A linear layer, of which this rank has a part. It takes the place of an nn.Linear or a Conv1D, whose
    weight it keeps: (out, in), or (in, out) if `transposed`."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, old: nn.Module, transposed: bool, adds: bool = True) -> None:
        super().__init__()
        self.transposed, self.adds = transposed, adds
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)
        self.lent: ForwardWeights | None = None  # while a region's forward is under way

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape) if self.transposed else tuple(self.weight.shape[::-1])
        return f"in={shape[0]}, out={shape[1]}, bias={self.bias is not None}"


class ColumnParallelLinear(_Cut):
    """Columns of A: (..., in) -> (..., out of this rank), and no message; its region has sent x around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.lent is not None:
            return matmul(x, self.lent)
        return product(x, self.weight, self.bias, self.transposed)


class RowParallelLinear(_Cut):
    """Rows of B: (..., in of this rank) -> (..., out), summed over the ranks."""

    def __init__(self, old: nn.Module, transposed: bool, line: SequenceSharding) -> None:
        super().__init__(old, transposed, adds=line.axis.rank == 0)
        self.line = line

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        lent = self.lent
        if lent is None:
            y, (lent,) = begin(y, [self], NO_COMMUNICATION)
        return matmul(y, lent, self.line.exit())


class ParallelRegion:
    """What lies between the entry and the exit of a pair: an attention, or an MLP.

    Attributes:
        layers: its column and row layers, in the order of their use.
    """

    def __init__(
        self, line: SequenceSharding, layers: Iterable[ColumnParallelLinear | RowParallelLinear]
    ) -> None:
        self.line, self.layers = line, tuple(layers)

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """x as the region's forward takes it."""
        entered, lent = begin(x, self.layers, self.line.entry())
        for layer, each in zip(self.layers, lent, strict=True):
            layer.lent = each
        return entered

    def end(self) -> None:
        for layer in self.layers:
            layer.lent = None
