"""Attention to one block of keys by PyTorch's fused kernels, which also give the log-sum-exp for the merge.

`blockwise.py` says what is computed, and stores the scores (B, H, s_q, s_k) to do so. A fused kernel keeps
them in fast memory, piece by piece. It knows two kinds of blocks: all queries see all keys, or query i sees
the keys up to i ("causal", s_q = s_k).

    kernel       device, dtype                            used
    cpu          CPU, 16 bits to float64
    cudnn        GPU, 16 bits                             where PyTorch's attention prefers it, as on an H100
    flash        GPU from compute capability 8, 16 bits   for heads of up to 192 values
    efficient    GPU, 16 bits and float32                 otherwise

The backward of a block is exact with the log-sum-exp and the output of all blocks: the kernels compute
P = exp(S - lse) and sum(dout * out) from what they are given (Dao 2023, "FlashAttention-2", arXiv 2307.08691,
algorithm 2). These operators are ATen's, which PyTorch's own ring calls as well.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from hpnb.context_parallel.blockwise import block_backward, block_forward
from hpnb.context_parallel.visibility import Pair

Kernel = Literal["cpu", "cudnn", "flash", "efficient"]
Tensors = tuple[torch.Tensor, ...]
_HALF = (torch.float16, torch.bfloat16)
_CUDNN = int(SDPBackend.CUDNN_ATTENTION.value)
_FLASH_HEAD_DIM = 192  # the backward of longer heads is not built for every GPU
_ROW_PADDING = 32  # the efficient kernel stores log-sum-exp in rows of a multiple of this


class BlockAttention:
    """Attention to one block of keys: by a fused kernel where one computes it, else by matrix products.

    Args:
        q, k, v: what it will get, or tensors like these.
        scale, softcap: of the scores.
        fused: False never uses such a kernel.

    Attributes:
        kernel: which is used where there is no mask; None uses none.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None = None,
        fused: bool = True,
    ) -> None:  # fmt: skip
        self.scale, self.softcap = scale, softcap
        self.kernel = choose_kernel(q, k, v) if fused and softcap is None else None
        self._state: Tensors = ()

    def forward(
        self, pair: Pair, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, H, s_q, d) and lse (B, H, s_q) of the queries and keys of `pair`."""
        if self.kernel is None or pair.mask is not None:
            return block_forward(q, k, v, self.scale, pair.mask, self.softcap)
        out, lse, self._state = fused_forward(self.kernel, q, k, v, self.scale, pair.is_triangle)
        return out, lse

    def backward(
        self, pair: Pair, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Gradients (dq, dk, dv), given the out and lse over all keys. A forward came before."""
        if self.kernel is None or pair.mask is not None:
            wide = dout.to(lse.dtype)
            delta = (wide * out).sum(-1)  # (B, H, s_q)
            return block_backward(wide, q, k, v, lse, delta, self.scale, pair.mask, self.softcap)
        return fused_backward(self.kernel, dout, q, k, v, out, lse, self._state, self.scale, pair.is_triangle)


def choose_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel | None:
    """The kernel for q (B, H, s_q, d) and k, v (B, H_kv, s_k, d), or None if none computes them."""
    if not (q.dtype == k.dtype == v.dtype) or q.size(-1) != v.size(-1) or not (q.numel() and k.numel()):
        return None
    if q.device.type == "cpu":
        return "cpu" if q.dtype in (*_HALF, torch.float32, torch.float64) else None
    if q.device.type != "cuda" or torch.version.hip is not None:
        return None
    if q.dtype in _HALF and torch._fused_sdp_choice(q, k, v, enable_gqa=q.size(1) != k.size(1)) == _CUDNN:
        return "cudnn"
    is_recent = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if q.dtype in _HALF and is_recent and q.size(-1) <= _FLASH_HEAD_DIM:
        return "flash"
    works = q.dtype in (torch.float32, torch.float16) or (q.dtype == torch.bfloat16 and is_recent)
    return "efficient" if works else None


def fused_forward(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Attention to one block of keys.

    Args:
        q: (B, H, s_q, d); k, v: (B, H_kv, s_k, d).
        causal: query i sees the keys up to i, for s_q = s_k. Otherwise all see all.

    Returns:
        out (B, H, s_q, d), lse (B, H, s_q), and the state of the generator for dropout, which is not used:
        backwards on GPUs ask for it.
    """
    (q, k, v), d = _prepare(kernel, q, k, v), q.size(-1)
    rest: Any
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return out, lse, ()
    if kernel == "cudnn":
        out, lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out[..., :d], lse.squeeze(-1), (rest[4], rest[5])
    if kernel == "flash":
        out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out[..., :d], lse, (rest[4], rest[5])
    out, lse, *rest = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out[..., :d], lse[..., : q.size(2)], (rest[0], rest[1])


def fused_backward(
    kernel: Kernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: Tensors,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients (dq, dk, dv) of one block of keys, in the dtype of q.

    Args:
        dout, out: (B, H, s_q, d), the output over all keys and its gradient, in the dtype of q.
        lse: (B, H, s_q), over all keys.
        state: from `fused_forward`.
    """
    d, kv_heads = q.size(-1), k.size(1)
    q, k, v = _prepare(kernel, q, k, v)
    padding = q.size(-1) - d
    dout, out = (F.pad(x, (0, padding)).contiguous() for x in (dout, out))
    lse = lse.contiguous()
    if kernel == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    elif kernel == "cudnn":
        lengths = None, None, None, q.size(2), k.size(2)  # no bias, no packed sequences
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), *state, *lengths, 0.0, causal, scale=scale
        )
    elif kernel == "flash":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, causal, *state, scale=scale
        )
    else:
        lse = F.pad(lse, (0, -lse.size(-1) % _ROW_PADDING), value=torch.inf)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, *state, 0.0, [True, True, True, False], causal, scale=scale
        )
    dq, dk, dv = (grad[..., :d] for grad in grads[:3])
    if dk.size(1) != kv_heads:  # heads that were repeated
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _prepare(kernel: Kernel, *tensors: torch.Tensor) -> Tensors:
    """q, k and v as the kernel wants them: heads of k and v repeated, heads padded to 16 bytes."""
    q, k, v = tensors
    if kernel not in ("cudnn", "flash") and q.size(1) != k.size(1):  # these two group queries themselves
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    if kernel == "cpu":
        return q, k, v
    padding = -q.size(-1) % 8
    return tuple(F.pad(x, (0, padding)) if padding else x for x in (q, k, v))
