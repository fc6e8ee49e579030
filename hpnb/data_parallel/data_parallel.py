"""Data parallelism: every rank has the whole model, and its own share of the batch.

    loss = (1/N) sum over ranks r of loss_r            N ranks with equally many samples
    grad = (1/N) sum over ranks r of grad_r            one all-reduce, bucket by bucket, during the backward

Replicas that start equal and apply equal gradients stay equal, so nothing else is ever sent: parameters and
buffers once at the start, and buffers (batch statistics) before a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpnb.data_parallel.reducer import Reducer
from hpnb.gradients import after_backward, attach
from hpnb.mesh import Axis


class DataParallel(nn.Module):
    """Wraps `module` so that after a backward .grad is the mean over the ranks of `axis`.

    Args:
        module: on its device already; its parameters and buffers take the values of the axis's rank 0.
        axis: the data axis, `mesh.dp`.
        bucket_mb: at most so many MB (2^20 bytes) of gradients travel at once.
        broadcast_buffers: send rank 0's buffers before every forward in training mode.
        find_unused_parameters: allow parameters that a forward does not use. One that no rank uses keeps
            the gradient None.
        check_reduction: compare the reduced gradients of all ranks after every backward, at its cost.
        average: False sums instead, for losses that are divided by the global count already.

    Gradients lie in the buckets themselves: .grad of a parameter is a view of its bucket. Do not keep it
    over the next backward.

    Raises:
        RuntimeError: in the backward, if parameters got no gradient and find_unused_parameters is off.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        bucket_mb: float = 25.0,
        *,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        average: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.axis, self.broadcast_buffers = module, axis, broadcast_buffers
        self._sync = True
        self._queued = False  # whether this backward's end is being waited for
        broadcast([*module.parameters(), *module.buffers()], axis)
        self.reducer = Reducer(
            dict(module.named_parameters()),
            axis,
            bucket_mb,
            average=average,
            find_unused=find_unused_parameters,
            check=check_reduction,
        )
        self._hooks = attach(module.parameters(), self._grown)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.training and self._sync:
            broadcast(list(self.module.buffers()), self.axis)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backwards inside add to this rank's gradients and send nothing."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _grown(self, parameter: torch.nn.Parameter) -> None:
        if not self._sync:
            return
        if not self._queued:
            self._queued = True
            after_backward(self._finish)
        self.reducer.ready(parameter)

    def _finish(self) -> None:
        self._queued = False
        self.reducer.finish()


def broadcast(tensors: list[torch.Tensor], axis: Axis) -> None:
    """Give all ranks of `axis` the values that its rank 0 has; one message a dtype and device."""
    if axis.size == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in alike.values():
        message = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(message, src=axis.ranks[0], group=axis.group)
        for tensor, values in zip(group, message.split([t.numel() for t in group]), strict=True):
            tensor.copy_(values.view(tensor.shape))
