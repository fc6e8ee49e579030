"""Whether PyTorch's cross entropy has averaged over the targets of its microbatch that are not -100.

Microbatches and ranks are weighted by their number of these targets. A cross entropy with class weights,
another ignore_index or reduction="sum" averages over something else, and the loss would depend on how the
batch is split. The autograd graph of the loss records what was averaged, so the first training step reads it
there and calls nothing. `halves_check.py` warns of other losses that are no such mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.pipeline_parallel.microbatches import count_targets

# What adds a loss to others leaves it what it is; what multiplies it may make it the mean that is wanted.
_SUMS = ("AddBackward0", "SubBackward0", "ToCopyBackward0")
_PRODUCTS = ("MulBackward0", "MulBackward1", "DivBackward0")  # the second is of label smoothing
_MEAN, _SUM = 1, 2  # of torch's Reduction


def check_is_mean(value: torch.Tensor, inputs: Any, causal: bool) -> None:
    """Refuse, or warn of, a loss whose cross entropy is no mean over the targets that are not -100.

    Args:
        value: the loss of a microbatch, with its autograd graph.
        inputs: the microbatch; `causal`: see `count_targets`.
    """
    if value.grad_fn is not None and any(True for _ in _cross_entropies(value)):
        # Whether labels are shifted is another question (`label_shift.py`).
        check_cross_entropy(value, {int(count_targets(inputs, shifted)) for shifted in (causal, not causal)})


def check_backward(value: torch.Tensor, counts: Sequence[int]) -> None:
    """The same of a loss of outputs of forwards, which have counted so many targets. It warns of targets of
    -100, too, that no forward has left out: ranks where these are many weigh too much."""
    check_cross_entropy(value, {*counts, sum(counts)})
    means = [node for node, _ in _cross_entropies(value) if node._saved_reduction == _MEAN]
    kept = [int(node._saved_target.ne(IGNORE_INDEX).sum()) for node in means]
    targets = [node._saved_target.numel() for node in means]
    if not counts or kept == targets or sum(kept) == sum(counts) or all(n in counts for n in kept):
        return
    warnings.warn(
        f"the loss is a cross entropy over {sum(kept)} targets, and {sum(targets) - sum(kept)} more are "
        f"{IGNORE_INDEX}, but the model's forward counted {sum(counts)}, by which ranks are weighted: it "
        "counts samples unless it receives the labels; pass (sum, count), as in "
        'booster.backward((F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()), '
        "optimizer)",
        stacklevel=3,
    )


def check_cross_entropy(value: torch.Tensor, counts: Collection[int]) -> None:
    """As `check_is_mean`, with numbers of targets that are right."""
    for node, is_scaled in _cross_entropies(value):
        fault = _fault_of(node, counts, is_summand=node is not value.grad_fn)
        if fault is None:
            continue
        if not is_scaled:
            raise ValueError(fault)
        warnings.warn(fault, stacklevel=3)
        return


def _cross_entropies(value: torch.Tensor) -> Iterator[tuple[Any, bool]]:
    """The nodes of cross entropies of which `value` is a sum, and whether anything has multiplied them."""
    nodes: list[tuple[Any, bool]] = [(value.grad_fn, False)]
    for _ in range(20):  # of a loss's last operations
        if not nodes:
            return
        node, is_scaled = nodes.pop()
        name = "" if node is None else node.name()
        if name in ("NllLossBackward0", "NllLoss2DBackward0"):
            yield node, is_scaled
        elif name in _SUMS + _PRODUCTS:
            nodes += [(before, is_scaled or name in _PRODUCTS) for before, _ in node.next_functions]


def _fault_of(node: Any, counts: Collection[int], is_summand: bool) -> str | None:
    """Why a cross entropy is no mean over its targets that are not -100; None if it is one.

    Args:
        counts: numbers of targets, one of which it should have averaged over: labels of -100 may have become
            an ignored index, or a class without weight.
        is_summand: whether it is a term of the loss, so that a sum may be divided later.
    """
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # PyTorch gives it as unsigned
    if node._saved_reduction == _SUM and not is_summand:
        return (
            "the loss function returned a cross entropy with reduction='sum', and a mean of these sums "
            "depends on how the batch is split; return (sum, count), with the number of targets as count"
        )
    if node._saved_reduction != _MEAN:
        return None
    weight = node._saved_weight
    is_weighted = weight is not None and bool((weight != weight[0]).any())
    if not is_weighted and ignored == IGNORE_INDEX:
        return None
    targets = node._saved_target  # read last, since that may recompute a checkpoint
    kept = targets[targets != ignored]
    if is_weighted:
        if float(weight[kept].sum()) in counts:
            return None
        return (
            f"the loss function returned a cross entropy with class weights from {float(weight.min()):g} to "
            f"{float(weight.max()):g}. It is divided by the sum of weights, and microbatches and ranks are "
            "weighted by their number of targets; return (sum, count): the cross entropy with "
            "reduction='sum', and weight[targets].sum()"
        )
    if occurs := targets.numel() - kept.numel():
        if kept.numel() in counts:
            return None
        return (
            f"the loss function returned a cross entropy with ignore_index={ignored}, which leaves out "
            f"{occurs} of {targets.numel()} targets, and microbatches and ranks are weighted by the targets "
            f"that are not {IGNORE_INDEX}; use labels of {IGNORE_INDEX} instead of {ignored}, or return "
            f"(sum, count): the cross entropy with reduction='sum', and (targets != {ignored}).sum()"
        )
    warnings.warn(
        f"the loss function is a cross entropy with ignore_index={ignored}. Once such targets occur, it is "
        f"no mean over the targets that are not {IGNORE_INDEX}, by which microbatches and ranks are weighted"
        "; use labels of -100 instead, or return (sum, count)",
        stacklevel=3,
    )
    return None
