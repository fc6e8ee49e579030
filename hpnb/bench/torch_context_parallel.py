"""PyTorch's context parallelism of one attention: as its users call it, and its ring with the CPU's kernel.

`context_parallel` is for GPUs: torch 2.15 registers the attention kernels of CUDA alone. Its ring is a
template that takes any kernel, so on a CPU we give it the CPU's. That is private and may be gone tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hpnb

Tensors = tuple[torch.Tensor, ...]
Step = Callable[[Tensors, Callable[..., torch.Tensor]], Tensors]


def run_context_parallel(local: Tensors, step: Step) -> Tensors:
    """`step` on this rank's tokens of q, k, v and dout, which are balanced as PyTorch does: as a zigzag.

    A model's batch is sharded once for all its attentions, so that is not a part of the step. The context
    shards at least one tensor, and gets a small one.
    """
    from torch.distributed.tensor.experimental import context_parallel

    places = torch.zeros(1, 2 * hpnb.world_size(), device=local[0].device)
    with context_parallel(_mesh(), buffers=[places], buffer_seq_dims=[1], no_restore_buffers={places}):
        try:
            return step(local, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        except Exception as error:
            failure = error  # raised outside: an error that passes through it leaves F patched (torch 2.11)
    raise failure


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh(hpnb.device().type, (hpnb.world_size(),))


def ring_on_cpu(group: ProcessGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's ring for this rank's zigzag shards; keys and values are repeated for grouped queries."""
    groups = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    out: torch.Tensor = _TorchRing.apply(group, q, k, v)
    return out


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = _attention._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)[:2]
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, out, lse = ctx.saved_tensors
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        dq, dk, dv = _attention._templated_ring_attention_backward(
            ctx.group, 2, op, grads[0].contiguous(), "grad_out", q, k, v, out, lse, is_causal=True,
            dropout_p=0.0,
        )[:3]  # fmt: skip
        return None, dq, dk, dv
