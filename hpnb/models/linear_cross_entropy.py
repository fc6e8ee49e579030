"""A language model's loss without its logits: the output layer and the cross entropy, some tokens at a time.

    hidden (n, h)   -->   logits (n, V)   -->   loss           n = 8,192, V = 50,257: 1.6 GB in float32, and
                                                               as much again for their gradient
    for each c of n / chunk:
        logits_c = hidden_c W^T              (chunk, V)        freed before the next chunk
        loss    += sum of cross entropies of logits_c
        dlogits  = softmax(logits_c) - targets                 in their place (`in_place_cross_entropy.py`)
        dhidden_c = dlogits W                (chunk, h)
        dW      += dlogits^T hidden_c        (V, h), in float32 at least

The loss is a sum, so all that a backward brings is one number, by which dhidden and dW are multiplied. So
they are computed in the forward, where the logits are, and nothing is computed twice (Hsu et al. 2024, *Liger
Kernel*, arXiv 2410.10989, section 3.2). dhidden and dW stay for the backward. A pipeline with many in-flight
microbatches would keep one dW for each: `recompute` keeps only hidden, and computes the logits once more, for
8 n h V FLOPs instead of 6 n h V.

Products in 16 bits run on tensor cores at full speed where rows are multiples of 16 bytes. A vocabulary of
50,257 is odd, and takes 8 times as long on an H200 (97 and 765 TFLOP/s). So on a GPU W is padded with zeros
to a multiple of 64 rows, whose logits count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.gradients import differentiable_once
from hpnb.models.in_place_cross_entropy import VocabShard, loss_and_gradient
from hpnb.models.in_vocabulary import check_in_vocabulary

ROWS = {"cuda": 64}  # W is padded to a multiple of so many rows, by the type of device
LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits (c, V), targets (c,)) -> (), the summed loss."""


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of cross entropies, in float32 at least; without any target it is 0."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True)
class _Chunking:
    chunk: int
    loss_sum: LossSum
    recompute: bool
    backend: Any

    @property
    def vocab_shard(self) -> VocabShard | None:
        return _vocab_shard_of(self.loss_sum)


def _vocab_shard_of(loss_sum: LossSum) -> VocabShard | None:
    shard: VocabShard | None = getattr(loss_sum, "vocab_shard", None)
    return shard


def mean_over_targets(total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """`total` (), a sum over `count` targets, as their mean; over no target it is 0, not nan."""
    return total / (count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1))


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    loss_sum: LossSum = cross_entropy_sum,
    recompute: bool = False,
    backend: Any = None,
) -> torch.Tensor:
    """(), the summed loss of logits hidden W^T, of which at most `chunk` rows exist at a time.

    Args:
        hidden: (n, h).
        weight: (V, h), or this rank's shard of the vocabulary.
        targets: (n,); -100 counts for nothing.
        loss_sum: the loss of one chunk. It may communicate: all ranks have the same chunks. If it has an
            attribute `vocab_shard`, it is the cross entropy of that shard's logits.
        recompute: compute the logits once more in the backward, instead of keeping dW.
        backend: of torch.compile, such as "inductor", for cross entropies; None leaves them to eager PyTorch.

    Raises:
        ValueError: shapes that do not fit, a chunk below 1, or a target that is not in the vocabulary (on a
            GPU, a device-side assertion fails instead).
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is no number of tokens; use 1 or more")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit: they need (n, h), (V, h) and (n,)"
        )
    shard = _vocab_shard_of(loss_sum)
    if shard is not None or loss_sum is cross_entropy_sum:
        vocab_size = len(weight) if shard is None else shard.vocab_size
        is_token = (targets >= 0) & (targets < vocab_size) | (targets == IGNORE_INDEX)
        valid = f"targets of 0 to {vocab_size - 1}, or {IGNORE_INDEX} to ignore"
        check_in_vocabulary(targets, is_token, valid)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(
        hidden, weight, targets, _Chunking(chunk, loss_sum, recompute, backend)
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (n, h)
        weight: torch.Tensor,  # (V, h)
        targets: torch.Tensor,  # (n,)
        chunking: _Chunking,
    ) -> torch.Tensor:
        ctx.chunking, ctx.dtype = chunking, weight.dtype
        needs = (False, False) if chunking.recompute else ctx.needs_input_grad[:2]
        loss, d_hidden, d_weight = _loss_and_grads(hidden, weight, targets, chunking, needs)
        if chunking.recompute:
            ctx.save_for_backward(hidden, weight, targets)
        else:
            ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    @differentiable_once(
        "a chunked loss",
        "it keeps no logits; use loss_chunk=0",
    )
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if ctx.chunking.recompute:
            needs = ctx.needs_input_grad[:2]
            hidden, weight, targets = ctx.saved_tensors
            _, d_hidden, d_weight = _loss_and_grads(hidden, weight, targets, ctx.chunking, needs)
        else:
            d_hidden, d_weight = ctx.saved_tensors
        d_hidden = None if d_hidden is None else _scale(d_hidden, grad)
        d_weight = None if d_weight is None else (d_weight * grad).to(ctx.dtype)
        return d_hidden, d_weight, None, None


def _loss_and_grads(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunking: _Chunking,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(loss, dhidden, dW), None for a gradient that is not needed."""
    dtype, vocab_size = torch.promote_types(hidden.dtype, torch.float32), len(weight)
    padded = weight.to(hidden.dtype)  # under autocast, once for all chunks
    if padding := -vocab_size % ROWS.get(hidden.device.type, 1):
        padded = F.pad(padded, (0, 0, 0, padding))  # (V', h)
    d_hidden = torch.empty_like(hidden) if needs[0] else None
    d_weight = torch.zeros_like(padded, dtype=dtype) if needs[1] else None
    loss = hidden.new_zeros((), dtype=dtype)
    for start in range(0, len(hidden), chunking.chunk):
        chunk = slice(start, start + chunking.chunk)
        with torch.autocast(hidden.device.type, enabled=False):
            chunk_loss, d_logits = _chunk_loss_and_grad(
                hidden[chunk] @ padded.t(), vocab_size, targets[chunk], chunking, any(needs)
            )  # (), (c, V')
        loss += chunk_loss.to(dtype)
        if d_logits is None:
            continue
        if d_hidden is not None:
            torch.mm(d_logits, padded, out=d_hidden[chunk])
        if d_weight is not None:
            _add_product(d_weight, d_logits.t(), hidden[chunk])
    return loss, d_hidden, None if d_weight is None else d_weight[:vocab_size]


def _chunk_loss_and_grad(
    logits: torch.Tensor, vocab_size: int, targets: torch.Tensor, chunking: _Chunking, for_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(loss, dlogits) of one chunk (c, V'), whose first V columns count. The logits are overwritten."""
    shard, is_plain = chunking.vocab_shard, chunking.loss_sum is cross_entropy_sum
    if chunking.backend is not None and (shard is not None or is_plain):
        with torch.no_grad():
            loss = loss_and_gradient(logits, vocab_size, targets, shard, chunking.backend, for_grad)
        return loss, logits if for_grad else None
    if not for_grad:
        with torch.no_grad():
            return chunking.loss_sum(logits[:, :vocab_size], targets), None
    padding, dtype = logits.size(1) - vocab_size, logits.dtype
    if is_plain:
        with torch.no_grad():  # in place, where autograd would keep four such tensors
            logs = F.log_softmax(logits[:, :vocab_size].to(torch.promote_types(dtype, torch.float32)), -1)
            del logits
            loss = F.nll_loss(logs, targets, ignore_index=IGNORE_INDEX, reduction="sum")
            counted = targets != IGNORE_INDEX
            d_logits = logs.exp_()
            columns = targets.masked_fill(~counted, 0).unsqueeze(1)
            d_logits.scatter_add_(1, columns, d_logits.new_full((1, 1), -1.0).expand_as(columns))
            d_logits = d_logits.mul_(counted.unsqueeze(1)).to(dtype)
    else:
        leaf = logits[:, :vocab_size].detach().requires_grad_()
        with torch.enable_grad():
            loss = chunking.loss_sum(leaf, targets)
        loss, d_logits = loss.detach(), torch.autograd.grad(loss, leaf)[0]
    return loss, F.pad(d_logits, (0, padding)) if padding else d_logits


def _scale(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """values * factor, in the dtype of `values`. The factor is a tensor () in float32 at least, and a GPU
    would round a tensor without dims to the dtype of `values` first."""
    return torch.mul(values, factor.view((1,) * values.dim()), out=torch.empty_like(values))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b, summed in the dtype of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # PyTorch has no such product on a CPU
        total += a @ b
