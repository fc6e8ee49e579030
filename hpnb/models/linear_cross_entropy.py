"""A language model's loss without its logits: so many tokens at a time, forward and backward.

    hidden (n, h)   -->   logits (n, V)   -->   loss           n = 8,192, V = 50,257: 1.6 GB in float32, and
                                                               as much again for their gradient
    for each c of n / chunk:
        logits_c = hidden_c W^T              (chunk, V)        forgotten before the next chunk
        loss    += sum of cross entropies of logits_c
        dlogits  = softmax(logits_c) - targets                 in their place (`in_place_cross_entropy.py`)
        dhidden_c = dlogits W                (chunk, h)
        dW      += dlogits^T hidden_c        (V, h), in float32 at least

The loss is a sum, so all that a backward brings is one number, by which dhidden and dW are multiplied. They
are therefore made in the forward, where the logits are, and nothing is computed twice (Hsu et al. 2024,
*Liger Kernel*, arXiv 2410.10989, section 3.2). What stays for the backward is dhidden and dW. Where many
microbatches stay between their forward and their backward that is a dW each: `recompute` keeps nothing but
hidden, and makes the logits again, for 8 n h V FLOPs in place of 6 n h V.

    hpnb.models.chunk_loss(model, 1024)      # model(input_ids=ids, labels=ids).loss as before, in less memory

Products of 16 bits run on tensor cores at full speed where rows are multiples of 16 bytes; 50,257 words are
odd, and take 8 times as long on an H200 (97 and 765 TFLOP/s). So on a GPU W gets rows of zeros up to a
multiple of 64, whose logits count for nothing.

The output layer computes the loss inside its own forward, so hooks, ZeRO's shares, a tied weight and the cut
of a vocabulary stand as they are: to all of them it is a layer whose output is one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.models.in_place_cross_entropy import VocabShard, loss_and_gradient

ROWS = {"cuda": 64}  # of W: a multiple of it where logits are computed
Total = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (logits (c, V), targets (c,)) -> (), their sum


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of cross entropies, in float32 at least; of no target it is 0."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    total: Total = cross_entropy_sum,
    recompute: bool = False,
    backend: Any = None,
) -> torch.Tensor:
    """(), the summed loss of logits hidden W^T, of which at most `chunk` rows exist at a time.

    Args:
        hidden: (n, h).
        weight: (V, h), or this rank's words of it.
        targets: (n,); -100 counts for nothing.
        total: the loss of one chunk. It may talk to other ranks: all of them have the same chunks. One that
            has `Words` as its attribute `words` is the cross entropy of these of them.
        recompute: compute the logits again in the backward, in place of keeping dW.
        backend: of torch.compile, such as "inductor", for cross entropies; None leaves them to eager PyTorch.

    Raises:
        ValueError: shapes that do not fit, or a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is no number of tokens; use 1 or more")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} "
            "do not fit: they need (n, h), (V, h) and (n,)"
        )
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    found: torch.Tensor = _ChunkedLoss.apply(hidden, weight, targets, chunk, total, recompute, backend)
    return found


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (n, h)
        weight: torch.Tensor,  # (V, h)
        targets: torch.Tensor,  # (n,)
        chunk: int,
        total: Total,
        recompute: bool,
        backend: Any,
    ) -> torch.Tensor:
        ctx.facts = chunk, total, recompute, backend
        wants = ctx.needs_input_grad[:2]
        now = (False, False) if recompute else wants
        loss, d_hidden, d_weight = _through(hidden, weight, targets, chunk, total, backend, now)
        if recompute:
            ctx.save_for_backward(hidden, weight, targets)
        else:
            ctx.save_for_backward(d_hidden, d_weight)
            ctx.kind = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        chunk, total, recompute, backend = ctx.facts
        if recompute:
            hidden, weight, targets = ctx.saved_tensors
            kind = weight.dtype
            _, d_hidden, d_weight = _through(
                hidden, weight, targets, chunk, total, backend, ctx.needs_input_grad[:2], grad
            )
        else:
            (d_hidden, d_weight), kind = ctx.saved_tensors, ctx.kind
            d_hidden = None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype)
            d_weight = None if d_weight is None else d_weight * grad.to(d_weight.dtype)
        return d_hidden, None if d_weight is None else d_weight.to(kind), *(None,) * 5


def _through(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    total: Total,
    backend: Any,
    wants: tuple[bool, bool],
    grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(loss, dhidden, dW), of which those are None that nobody wants; times `grad` if it is given."""
    wide, words = torch.promote_types(hidden.dtype, torch.float32), len(weight)
    used = weight.to(hidden.dtype)  # under autocast, once for all chunks
    if more := -words % ROWS.get(hidden.device.type, 1):
        used = F.pad(used, (0, 0, 0, more))  # (V', h)
    d_hidden = torch.empty_like(hidden) if wants[0] else None
    d_weight = torch.zeros_like(used, dtype=wide) if wants[1] else None
    loss = hidden.new_zeros((), dtype=wide)
    for start in range(0, len(hidden), chunk):
        part = hidden[start : start + chunk]
        with torch.autocast(hidden.device.type, enabled=False):
            of = targets[start : start + chunk]
            value, d_logits = _one(part @ used.t(), words, of, total, backend, any(wants))  # (c, V')
        loss += value.to(wide)
        if d_logits is None:
            continue
        if grad is not None:
            d_logits *= grad
        if d_hidden is not None:
            torch.mm(d_logits, used, out=d_hidden[start : start + chunk])
        if d_weight is not None:
            _add_product(d_weight, d_logits.t(), part)
    return loss, d_hidden, None if d_weight is None else d_weight[:words]


def _one(
    logits: torch.Tensor, words: int, targets: torch.Tensor, total: Total, backend: Any, trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(loss, dlogits) of one chunk (c, V'), of which V are words; the logits are lost."""
    here: VocabShard | None = getattr(total, "words", None)
    if backend is not None and (here is not None or total is cross_entropy_sum):
        with torch.no_grad():
            value = loss_and_gradient(logits, words, targets, here, backend, trains)
        return value, logits if trains else None
    if not trains:
        with torch.no_grad():
            return total(logits[:, :words], targets), None
    more, dtype = logits.size(1) - words, logits.dtype
    if total is cross_entropy_sum:
        with torch.no_grad():  # in place, where autograd would keep four such tensors
            logs = F.log_softmax(logits[:, :words].to(torch.promote_types(dtype, torch.float32)), -1)
            del logits
            value = F.nll_loss(logs, targets, ignore_index=IGNORE_INDEX, reduction="sum")
            counted = targets != IGNORE_INDEX
            d_logits = logs.exp_()
            at = targets.masked_fill(~counted, 0).unsqueeze(1)
            d_logits.scatter_add_(1, at, d_logits.new_full((1, 1), -1.0).expand_as(at))
            d_logits = d_logits.mul_(counted.unsqueeze(1)).to(dtype)
    else:
        given = logits[:, :words].detach().requires_grad_()
        with torch.enable_grad():
            value = total(given, targets)
        value, d_logits = value.detach(), torch.autograd.grad(value, given)[0]
    return value, F.pad(d_logits, (0, more)) if more else d_logits


def _add_product(to: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """to += a b, summed in the dtype of `to`."""
    if to.dtype == a.dtype:
        to.addmm_(a, b)
    elif to.is_cuda:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)
    else:  # PyTorch has no such product on a CPU
        to += a @ b


# --- in a model ----------------------------------------------------------------------------------------


class ChunkedHead:
    """Stands in for the forward of an output layer: given targets it returns the summed loss, and no logits.

    Args:
        head: without a bias; its weight is (V, h).
        chunk: tokens at a time.
        total, recompute, backend: see `chunked_cross_entropy`.
    """

    def __init__(
        self,
        head: nn.Module,
        chunk: int,
        total: Total = cross_entropy_sum,
        recompute: bool = False,
        backend: Any = None,
    ) -> None:
        self.head, self.chunk, self.total = head, chunk, total
        self.recompute, self.backend = recompute, backend
        self.targets: torch.Tensor | None = None

    def tell(self, labels: torch.Tensor | None) -> None:
        """The next forwards are of these labels (B, s), position i asked for label i + 1; or of none."""
        self.targets = None if labels is None else F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]

    @property
    def gives_loss(self) -> bool:
        """Whether a forward gives the loss: it has targets, and is to be trained."""
        return self.targets is not None and torch.is_grad_enabled()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.targets is None or not self.gives_loss:
            found: torch.Tensor = type(self.head).forward(self.head, hidden)  # (B, s, V)
            return found
        if self.targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels {tuple(self.targets.shape)} do not fit hidden states {tuple(hidden.shape)}: a loss "
                "in chunks needs a label for each token"
            )
        weight: Any = self.head.weight
        targets = self.targets.to(hidden.device).flatten()
        return chunked_cross_entropy(
            hidden.flatten(0, 1), weight, targets, self.chunk, self.total, self.recompute, self.backend
        )
