"""Vocabulary-parallel cross entropy: the loss of logits sharded along the vocabulary, never gathered.

    loss = log sum_v exp(z_v) - z_y            z_v: the logit of token v, v = 1 .. V; y: the target

Each rank holds V / t logits for every position. With m the largest of all (so that exp stays finite), three
numbers per position are reduced over the ranks, and nothing else is sent:

    m = max over ranks of max_v z_v                      all-reduce (max) of n numbers
    S = sum over ranks of sum_v exp(z_v - m)             all-reduce (sum), together with
    z_y = sum over ranks of z_y or 0                     the one rank that has y adds its logit: 2 n numbers
    loss = m + log S - z_y

    backward: softmax_v - [v = y], of this rank's shard alone; no communication

for n positions, so 2 (t-1)/t * 3 n numbers leave a rank, instead of the (t-1)/t V n that gathering takes
(Shoeybi et al. 2019, arXiv 1909.08053, section 3). Label smoothing e mixes the target with the mean over the
vocabulary (Szegedy et al. 2016, arXiv 1512.00567, section 7), which needs the sum of all logits: a third row
in the second message. A z-loss adds c (m + log S)^2, which keeps log S near 0 (Chowdhery et al. 2022, arXiv
2204.02311, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.gradients import differentiable_once
from hpnb.mesh import Axis
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.models.in_vocabulary import check_in_vocabulary
from hpnb.split_sizes import split_range
from hpnb.tensor_parallel.all_reduce_in_place import all_reduce_in_place


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss summed over all positions, and how many of them count: equal on all ranks of `axis`.

    Args:
        logits: (..., V of this rank), of the tokens that `hpnb.split_sizes.split_range` gives it; computed in
            float32 at least.
        targets: (...), equal on all ranks; `ignore_index` counts for nothing.
        vocab_size: V.
        label_smoothing: e; the target keeps 1 - e, and each token of the vocabulary gets e / V.
        z_loss: c above.

    Raises:
        ValueError: logits that are not this rank's shard, targets of another shape, a smoothing outside of 0
            to 1, or a target outside of the vocabulary (on a GPU, a device-side assertion fails instead).
    """
    vocab_start, vocab_end = split_range(vocab_size, axis.size, axis.rank)
    if logits.size(-1) != vocab_end - vocab_start:
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} has logits of {logits.size(-1)} tokens; its shard of a "
            f"vocabulary of {vocab_size} has {vocab_end - vocab_start}"
        )
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}: they need "
            f"{tuple(logits.shape[:-1])}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} is not a share; use 0 to 1")
    is_token = ((targets >= 0) & (targets < vocab_size)) | (targets == ignore_index)
    check_in_vocabulary(targets, is_token, f"targets of 0 to {vocab_size - 1}, or {ignore_index} to ignore")
    losses: torch.Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2),
        targets.flatten(),
        axis,
        vocab_start,
        vocab_size,
        ignore_index,
        label_smoothing,
        z_loss,
    )
    return losses.sum(), (targets != ignore_index).sum()


def vocab_shard(axis: Axis, vocab_size: int) -> VocabShard | None:
    """What `hpnb.models.chunked_cross_entropy` needs to know of this rank: its first token, and how to
    combine partial results of the ranks. None if there are more ranks than tokens."""
    if vocab_size < axis.size:
        return None

    def combine(
        largest: torch.Tensor, total: torch.Tensor, target_logit: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        local_largest = largest.clone()
        all_reduce_in_place(largest, axis, dist.ReduceOp.MAX)
        local_sum = total * (local_largest - largest).exp()
        local_sum.masked_fill_(local_largest == -torch.inf, 0.0)  # all of this rank's tokens are masked
        sums = torch.stack([local_sum, target_logit])  # (2, n)
        all_reduce_in_place(sums, axis)
        return largest, sums[0], sums[1]

    return VocabShard(split_range(vocab_size, axis.size, axis.rank)[0], vocab_size, combine)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,  # (n, V / t)
        targets: torch.Tensor,  # (n,)
        axis: Axis,
        vocab_start: int,
        vocab_size: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        n, local_size = logits.shape
        valid = targets != ignore_index  # (n,)
        columns = targets - vocab_start
        is_local = valid & (columns >= 0) & (columns < local_size)
        columns = columns.clamp(0, max(local_size - 1, 0))
        largest = logits.amax(-1).to(dtype) if local_size else logits.new_full((n,), -torch.inf, dtype=dtype)
        all_reduce_in_place(largest, axis, dist.ReduceOp.MAX)
        softmax = (logits.to(dtype) - largest.unsqueeze(-1)).exp_()  # (n, V / t)
        sums = softmax.new_zeros((3 if smoothing else 2, n))
        sums[0] = softmax.sum(-1)
        if local_size:
            target_logit = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).to(dtype)
            sums[1] = torch.where(is_local, target_logit, 0.0)
        if smoothing:
            sums[2] = logits.sum(-1, dtype=dtype)
        all_reduce_in_place(sums, axis)
        log_sum = largest + sums[0].log()  # (n,): log sum exp
        loss = log_sum - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - sums[2] / vocab_size)
        if z_loss:
            loss = loss + z_loss * log_sum.square()
        softmax.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, columns, is_local, valid, log_sum)
        ctx.options = (logits.dtype, vocab_size, smoothing, z_loss)
        return torch.where(valid, loss, 0.0)

    @staticmethod
    @differentiable_once(
        "the loss of a vocabulary that is sharded",
        "its logits are never gathered; compute the loss of outputs.logits, or use tp_size=1",
    )
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, columns, is_local, valid, log_sum = ctx.saved_tensors
        dtype, vocab_size, smoothing, z_loss = ctx.options
        grad = torch.where(valid, grads[0], 0.0).unsqueeze(-1)  # (n, 1)
        d_logits = softmax * (grad * (1 + 2 * z_loss * log_sum.unsqueeze(-1)) if z_loss else grad)
        if smoothing:
            d_logits -= grad * (smoothing / vocab_size)
        if d_logits.size(-1):
            at_target = is_local.unsqueeze(-1) * grad * (smoothing - 1)
            d_logits.scatter_add_(-1, columns.unsqueeze(-1), at_target)
        return d_logits.to(dtype), *(None,) * 7
