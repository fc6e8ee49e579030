"""Cross entropy of logits that are cut along the vocabulary, without ever putting them together.

    loss = log sum_v exp(z_v) - z_target            z_v: the logit of word v, v = 1 .. V

Each rank holds V / t of the logits of every token. With m the largest of all (so that exp stays finite),
three numbers a token are reduced over the ranks, and nothing else is sent:

    m = max over ranks of max_v z_v                      all-reduce (max) of n numbers
    S = sum over ranks of sum_v exp(z_v - m)             all-reduce (sum), together with
    z = sum over ranks of z_target, where it lies        the logit of the target: 2 n numbers
    loss = m + log S - z

    backward: (softmax_v - [v = target]) / count, of this rank's words alone; nothing is sent

for n tokens, so 2 (t-1)/t * 3 n numbers leave a rank, in place of (t-1)/t V n to gather (Shoeybi et al. 2019,
arXiv 1909.08053, section 3). Label smoothing e mixes the target with the mean over all words (Szegedy et al.
2016, arXiv 1512.00567, section 7), which needs the sum of all logits: a third row in the second message.
A z-loss adds c (m + log S)^2, which keeps log S near 0 (Chowdhery et al. 2022, arXiv 2204.02311, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.mesh import Axis
from hpnb.models.in_place_cross_entropy import VocabShard
from hpnb.record.recorder import communication
from hpnb.split_sizes import split_sizes


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    vocabulary: int,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of all tokens, and how many of them count: two numbers, equal on all ranks of `axis`.

    Args:
        logits: (..., V of this rank), of the words that `split_sizes(vocabulary, ranks)` gives it; at
            least float32 is computed in.
        targets: (...), equal on all ranks; `ignore_index` counts for nothing.
        label_smoothing: share of the target's weight that is spread over all words, 0 to 1.
        z_loss: c above.

    Raises:
        ValueError: logits that are not this rank's share, targets of another shape, or a smoothing outside
            of 0 to 1.
    """
    share = split_sizes(vocabulary, axis.size)
    if logits.size(-1) != share[axis.rank]:
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} has the logits of {logits.size(-1)} words; its share of "
            f"{vocabulary} is {share[axis.rank]}"
        )
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit logits {tuple(logits.shape)}: they need "
            f"{tuple(logits.shape[:-1])}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} is no share; use 0 to 1")
    first = sum(share[: axis.rank])
    losses: torch.Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2),
        targets.flatten(),
        axis,
        first,
        vocabulary,
        ignore_index,
        label_smoothing,
        z_loss,
    )
    return losses.sum(), (targets != ignore_index).sum()


def vocab_shard(axis: Axis, vocabulary: int) -> VocabShard | None:
    """Of this rank, for passes over logits in place (`hpnb.models.chunked_loss`); None if ranks have none."""
    if vocabulary < axis.size:
        return None

    def combine(
        most: torch.Tensor, total: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = most.clone()
        _reduce(most, axis, dist.ReduceOp.MAX)
        sums = torch.stack([total * (own - most).exp(), at])  # (2, n)
        _reduce(sums, axis, dist.ReduceOp.SUM)
        return most, sums[0], sums[1]

    return VocabShard(sum(split_sizes(vocabulary, axis.size)[: axis.rank]), combine)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,  # (n, V / t)
        targets: torch.Tensor,  # (n,)
        axis: Axis,
        first: int,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        n, words = logits.shape
        counted = targets != ignore_index  # (n,)
        own = targets - first
        here = counted & (own >= 0) & (own < words)
        own = own.clamp(0, max(words - 1, 0))
        nothing = logits.new_full((n,), -torch.inf, dtype=wide)
        most = logits.amax(-1).to(wide) if words else nothing  # (n,)
        _reduce(most, axis, dist.ReduceOp.MAX)
        softmax = (logits.to(wide) - most.unsqueeze(-1)).exp_()  # (n, V / t)
        sums = softmax.new_zeros((3 if smoothing else 2, n))
        sums[0] = softmax.sum(-1)
        if words:
            target = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).to(wide)
            sums[1] = torch.where(here, target, 0.0)
        if smoothing:
            sums[2] = logits.sum(-1, dtype=wide)
        _reduce(sums, axis, dist.ReduceOp.SUM)
        total = most + sums[0].log()  # (n,): log sum exp
        loss = total - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (total - sums[2] / vocabulary)
        if z_loss:
            loss = loss + z_loss * total.square()
        softmax.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, own, here, counted, total)
        ctx.facts = (logits.dtype, vocabulary, smoothing, z_loss)
        return torch.where(counted, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, own, here, counted, total = ctx.saved_tensors
        dtype, vocabulary, smoothing, z_loss = ctx.facts
        (grad,) = grads  # (n,)
        factor = 1 + 2 * z_loss * total if z_loss else torch.ones_like(total)
        d_logits = softmax * factor.unsqueeze(-1)
        if smoothing:
            d_logits -= smoothing / vocabulary
        if d_logits.size(-1):
            target = here.to(d_logits.dtype) * (smoothing - 1)
            d_logits.scatter_add_(-1, own.unsqueeze(-1), target.unsqueeze(-1))
        d_logits *= torch.where(counted, grad, 0.0).unsqueeze(-1)
        return d_logits.to(dtype), *(None,) * 7


def _reduce(x: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> None:
    if axis.size > 1:
        with communication("all_reduce", axis.name, x.nbytes, axis.ranks):
            dist.all_reduce(x, op, group=axis.group)
