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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hpnb import comm
from hpnb.background import Background, Pending
from hpnb.comm import gather_slices, shares, sum_slices
from hpnb.gradients import in_backward
from hpnb.mesh import Axis
from hpnb.record.recorder import communication
from hpnb.tensor_parallel.overlap import Flight, Later, enter, hold, matmul, product

TOKENS = 1  # the dim of (1, b s, h) that sequence parallelism cuts
_REMEMBERED = 10_000  # inputs of blocks; many more than are ever kept for a backward


class Line:
    """The ranks of one axis, one behind the other, and how activations lie on them between two pairs.

    Attributes:
        sequence: whether tokens are cut there.
        shape: (b, s) of the batch whose forward is under way; only asked for if `sequence`.
    """

    def __init__(self, axis: Axis, sequence: bool, device: torch.device) -> None:
        self.axis, self.sequence, self.shape = axis, sequence and axis.size > 1, (0, 0)
        self._background = Background(axis, device)
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return shares(self.shape[0] * self.shape[1], self.axis.size)

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

    def enter(self, x: torch.Tensor, flight: Flight) -> torch.Tensor:
        """Into a pair: (b, s, h), or (1, b s/t, h), -> (b, s, h). Backward leaves its sum in `flight`."""
        if self.axis.size == 1:
            return x
        if not self.sequence:
            return enter(x, flight, lambda whole: whole, self._sum)
        shape, sizes = self.shape, self.sizes
        return enter(
            x,
            flight,
            lambda own: gather_slices(own, self.axis, TOKENS, sizes).view(*shape, -1),
            lambda grad: self._scatter(grad, sizes),
        )

    def leave(self, z: torch.Tensor) -> torch.Tensor:
        """Out of a pair: this rank's part of a sum, (b, s, h) -> (b, s, h) or (1, b s/t, h); `z` is lost."""
        if self.axis.size == 1:
            return z
        left: torch.Tensor = _Leave.apply(z, self)
        return left

    def _sum(self, grad: torch.Tensor) -> tuple[torch.Tensor, Pending, torch.Tensor]:
        grad = grad.contiguous()
        return grad, self._background.all_reduce(grad), grad

    def _scatter(
        self, grad: torch.Tensor, sizes: tuple[int, ...]
    ) -> tuple[torch.Tensor, Pending, torch.Tensor]:
        """(b, s, h) -> (1, b s/t, h)."""
        most, flat = max(sizes), grad.reshape(-1, grad.size(-1))  # (b s, h)
        if min(sizes) < most:
            flat = torch.cat([F.pad(part, (0, 0, 0, most - len(part))) for part in flat.split(sizes)])
        mine = flat.new_empty((most, flat.size(1)))
        pending = self._background.reduce_scatter(mine, flat)
        return mine[: sizes[self.axis.rank]].unsqueeze(0), pending, flat


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.axis, ctx.shape, ctx.sizes = line.axis, z.shape, line.sizes if line.sequence else ()
        if line.sequence:
            return sum_slices(z.flatten(0, 1).unsqueeze(0), line.axis, TOKENS)
        z = z.contiguous()
        with communication("all_reduce", line.axis.name, z.nbytes, line.axis.ranks):
            dist.all_reduce(z, group=line.axis.group)  # in place: z was made a moment ago, for this alone
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.sizes:
            return dz, None
        return gather_slices(dz, ctx.axis, TOKENS, ctx.sizes).view(ctx.shape), None


# --- the layers ------------------------------------------------------------------------------------------


class _Cut(nn.Module):
    """A linear layer, of which this rank has a part. It takes the place of an nn.Linear or a Conv1D, whose
    weight it keeps: (out, in), or (in, out) if `transposed`."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, old: nn.Module, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.register_parameter("weight", old.get_parameter("weight"))
        self.register_parameter("bias", getattr(old, "bias", None))
        self.train(old.training)
        self.later: Later | None = None  # set while a region's forward is under way

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape) if self.transposed else tuple(self.weight.shape[::-1])
        return f"in={shape[0]}, out={shape[1]}, bias={self.bias is not None}"


class ColumnLinear(_Cut):
    """Columns of A: (..., in) -> (..., out of this rank), and no message; its region has sent x around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.later is not None:
            return matmul(x, self.later)
        return product(x, self.weight, self.bias, self.transposed)


class RowLinear(_Cut):
    """Rows of B: (..., in of this rank) -> (..., out), summed over the ranks."""

    def __init__(self, old: nn.Module, transposed: bool, line: Line) -> None:
        super().__init__(old, transposed)
        self.line = line

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        made = self.later or Later(self.weight, self.bias, self.transposed, self.line.axis.rank == 0)
        return self.line.leave(matmul(y, made))


class Region:
    """What lies between `enter` and the `leave` of its row layers: an attention, or an MLP.

    Attributes:
        layers: its column and row layers, in the order of their use.
    """

    def __init__(self, line: Line, layers: Iterable[ColumnLinear | RowLinear]) -> None:
        self.line, self.layers = line, tuple(layers)

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """x as the region's forward takes it."""
        if not torch.is_grad_enabled() or self.line.axis.size == 1:
            return self.line.enter(x, Flight())
        flight = Flight()
        x = hold(x, flight)
        for layer in self.layers:
            adds = isinstance(layer, ColumnLinear) or self.line.axis.rank == 0
            layer.later = Later(layer.weight, layer.bias, layer.transposed, adds)
        return self.line.enter(x, flight)

    def end(self) -> None:
        for layer in self.layers:
            layer.later = None
