"""Whether a loss function shifts labels itself, or gets labels that are shifted already.

    labels as they are    cross_entropy(logits[:, :-1], labels[:, 1:])   the first label is no target
    shifted already       cross_entropy(logits, labels)                  the first label is one

The mean of a microbatch is weighted by its targets, so what counts them must agree with what averages them.
Where the two countings give different weights, the loss function is asked: does its value change when the
first label of each sequence is ignored?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.pipeline_parallel.microbatches import find_labels, replace_labels


@torch.no_grad()
def includes_first_label(
    function: Callable[[Any, Any], Any], outputs: Any, inputs: Any, value: torch.Tensor
) -> bool | None:
    """Whether the first label of each sequence is a target of `function`, which is called twice.

    Only the first labels are left, then none; a function that shifts returns the same for both.

    Args:
        function: (outputs, inputs) of a microbatch -> the mean over its targets.
        outputs: what they compute when they are read has been computed, since no gradient is recorded here.
        inputs: with labels (B, s), of which some first ones are not -100.
        value: what it returned for them.

    Returns:
        None if it does not look at the labels in `inputs`, or fails without targets.
    """
    labels = find_labels(inputs)
    if labels is None or labels.dim() < 2:
        return None
    none = torch.full_like(labels, IGNORE_INDEX)
    only_first = torch.cat([labels[:, :1], none[:, 1:]], 1)
    try:
        without, with_first = (
            function(outputs, _with_labels(inputs, changed)) for changed in (none, only_first)
        )
    except Exception:  # a loss function that wants a target says so in its own way
        return None
    return None if _equal(value, without) else not _equal(without, with_first)


def check_weight(
    function: Callable[[Any, Any], Any],
    outputs: Any,
    inputs: Any,
    value: torch.Tensor,
    causal: bool,
    counted: tuple[int, int],
    otherwise: tuple[int, int],
    shifted_before: bool = False,
) -> None:
    """Refuse a mean whose weight was counted with labels shifted, if the function does not shift them; or the
    other way round.

    Args:
        function, outputs, inputs, value: see `includes_first_label`.
        causal: whether labels were counted as shifted.
        counted, otherwise: the targets of this microbatch and of the batch, counted so and the other way.
        shifted_before: context parallelism has shifted the labels, so no loss function may shift them again.
    """
    includes = includes_first_label(function, outputs, inputs, value)
    if includes is None or includes != causal:
        return
    means = (
        "the loss function's mean includes the first label of each sequence, as of labels shifted already"
        if causal
        else "the loss function's mean leaves out the first label of each sequence, because it shifts labels"
    )
    if shifted_before:
        raise ValueError(
            "the loss function shifts labels (its mean leaves out the first of each sequence), and context "
            "parallelism has shifted them already, before it split the sequence: pass a loss function that "
            "compares logits and labels at the same position; without cp_size it needs causal=False then"
        )
    raise ValueError(
        f"{means}, and the weight of this microbatch, {counted[0]} of {counted[1]} targets, would have to be "
        f"{otherwise[0]} of {otherwise[1]}: pass causal={not causal} to execute_pipeline or Pipeline, or "
        "return (sum, count)"
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of two means of nothing, which are nan."""
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


class ChangedMapping(dict[str, Any]):
    """Inputs with other labels, by which a function is asked: no microbatch, so nobody may count them."""


class ChangedTuple(tuple[Any, ...]):
    """The same of a batch without names."""


def _with_labels(inputs: Any, labels: torch.Tensor) -> Any:
    replaced = replace_labels(inputs, labels)
    return ChangedMapping(replaced) if isinstance(inputs, Mapping) else ChangedTuple(replaced)
