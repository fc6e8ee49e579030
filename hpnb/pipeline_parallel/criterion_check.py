"""Whether a scalar loss is the mean over the targets of its microbatch that are not -100, as its weight says.

    whole  = criterion(8 samples)
    halves = (n_1 criterion(the first 4) + n_2 criterion(the last 4)) / (n_1 + n_2)      n: targets, not -100

For a mean over these targets, both are the same. With class weights, another ignore_index, weights of samples
or reduction="sum" they differ, and the loss would depend on how the batch is split. The first training step
compares them, with 8 samples at most and without gradients. The autograd graph also records what PyTorch's
cross entropy has averaged over, which helps where a microbatch has one sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.pipeline_parallel.label_shift import ChangedMapping, ChangedTuple
from hpnb.pipeline_parallel.microbatches import count_samples, count_targets

MOST_SAMPLES = 8  # that the halves have together
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; a loss may use TF32 inside
_TOLERANCE_OF_16_BITS = 3e-2
# What adds a loss to others leaves it what it is; what multiplies it may make it the mean that is wanted.
_SUMS = ("AddBackward0", "SubBackward0", "ToCopyBackward0")
_PRODUCTS = ("MulBackward0", "DivBackward0")
_MEAN, _SUM = 1, 2  # of torch's Reduction


def check_is_mean(
    function: Callable[[Any, Any], Any], outputs: Any, inputs: Any, value: torch.Tensor, causal: bool
) -> None:
    """Refuse, or warn of, a loss function whose value is no mean over its targets that are not -100.

    Args:
        function: (outputs, inputs) of a microbatch -> a scalar. It is called up to four times.
        value: what it returned for them, with its autograd graph.
        causal: see `count_targets`.

    Raises:
        ValueError: it is a sum, or a cross entropy with class weights or an ignore_index that occurs.
    """
    halves = _compare_halves(function, outputs, inputs, causal)
    check_cross_entropy(value, None if halves is None else halves.is_mean)
    if halves is None or halves.is_mean:
        return
    if halves.is_sum:
        raise ValueError(
            f"the loss function returned the sum over its samples, not the mean: {halves}. A mean of these "
            "sums depends on how the batch is split; return (sum, count)"
        )
    warnings.warn(
        "the loss function's value is not the mean over its targets that are not -100, so it depends on how "
        f"the batch is split into microbatches and over ranks: {halves}. For a mean over anything else, "
        "return (sum, count); a loss that compares samples with each other depends on the split in any case",
        stacklevel=2,
    )


def check_cross_entropy(value: torch.Tensor, is_mean: bool | None = None) -> None:
    """Refuse, or warn of, a cross entropy of PyTorch's that is no mean over its targets that are not -100.

    Args:
        value: the loss, with its autograd graph.
        is_mean: whether it was seen to be the mean that is wanted, in spite of that; None if nobody looked. A
            cross entropy that something has multiplied may be one, so it is then a warning.

    Raises:
        ValueError: as in `check_is_mean`.
    """
    for node, is_scaled in _cross_entropies(value):
        fault = _fault_of(node, is_summand=node is not value.grad_fn)
        if fault is None or (is_scaled and is_mean):
            continue
        if is_scaled and is_mean is None:
            warnings.warn(fault, stacklevel=3)
            return
        raise ValueError(fault)


# --- the value of a microbatch, and of its two halves -----------------------------------------------------


@dataclass(frozen=True)
class _Halves:
    """The values and counts of the two halves, and the value of both together."""

    samples: int
    value: float
    values: tuple[float, float]
    counts: tuple[int, int]
    tolerance: float

    @property
    def mean(self) -> float:
        totals = [value * count for value, count in zip(self.values, self.counts, strict=True) if count]
        return sum(totals) / sum(self.counts)

    @property
    def is_mean(self) -> bool:
        return self._is_close(self.mean)

    @property
    def is_sum(self) -> bool:
        return all(self.values) and self._is_close(sum(self.values))

    def _is_close(self, other: float) -> bool:
        scale = max(abs(x) for x in (self.value, *self.values) if math.isfinite(x))
        return abs(self.value - other) <= self.tolerance * scale

    def __str__(self) -> str:
        (first, second), (n, m) = self.values, self.counts
        return (
            f"of {self.samples} samples it is {self.value:.6g}, and of their two halves, with {n} and {m} "
            f"targets, {first:.6g} and {second:.6g}"
        )


def _compare_halves(
    function: Callable[[Any, Any], Any], outputs: Any, inputs: Any, causal: bool
) -> _Halves | None:
    """None if that says nothing: a single sample, outputs that are not split along their samples, a function
    that fails with fewer samples or returns another value for the same."""
    try:
        samples = count_samples(inputs)
        size = min(samples, MOST_SAMPLES)
        if size < 2:
            return None
        spans = slice(0, size), slice(0, size // 2), slice(size // 2, size)
        parts = [(_slice(outputs, samples, s), _slice(inputs, samples, s)) for s in spans]
        counts = [
            [int(count_targets(part[1], shifted)) for part in parts[1:]] for shifted in (causal, not causal)
        ]
        devices = {t.device for t in _tensors(outputs) if t.device.type == "cuda"}
        with torch.no_grad(), torch.random.fork_rng(sorted(devices, key=str)):
            results = [function(part, _changed(its)) for part, its in (*parts, parts[1])]
    except Exception:  # what it needs and does not get, it says in its own way, and nobody has asked for this
        return None
    if not all(isinstance(result, torch.Tensor) and not result.dim() for result in results):
        return None
    value, first, second, again = (float(result) for result in results)
    # The mean over no targets is nan, and counts nothing.
    known = [v for v, n in zip((first, second), counts[0], strict=True) if n]
    if not known or not all(map(math.isfinite, (value, *known))) or (counts[0][0] and first != again):
        return None
    tolerance = _TOLERANCES.get(results[0].dtype, _TOLERANCE_OF_16_BITS)
    as_asked, otherwise = (_Halves(size, value, (first, second), (n, m), tolerance) for n, m in counts)
    # Whether labels are shifted is another question (`label_shift.py`).
    return otherwise if all(counts[1]) and otherwise.is_mean else as_asked


class _NotSplit(Exception):
    """Something is not split along its samples."""


def _slice(value: Any, samples: int, span: slice) -> Any:
    """The samples in `span` of all tensors in `value`; scalars, and what is no tensor, as they are."""
    if isinstance(value, torch.Tensor):
        if value.dim() and value.size(0) != samples:
            raise _NotSplit
        return value[span] if value.dim() else value
    if getattr(value, "is_lazy", False):  # logits that nobody has gathered
        raise _NotSplit
    if is_dataclass(value) and not isinstance(value, type):
        kept = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value)(**{name: _slice(x, samples, span) for name, x in kept.items()})
    if isinstance(value, Mapping):
        return {name: _slice(x, samples, span) for name, x in value.items()}
    if isinstance(value, tuple | list):
        items = [_slice(x, samples, span) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if value is None or isinstance(value, str | int | float):
        return value
    raise _NotSplit


def _changed(inputs: Any) -> Any:
    """`inputs` marked as no microbatch, so that nobody counts them."""
    if isinstance(inputs, Mapping):
        return ChangedMapping(inputs)
    return ChangedTuple(inputs) if isinstance(inputs, tuple | list) else inputs


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# --- what PyTorch's cross entropy has averaged over ---------------------------------------------------------


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


def _fault_of(node: Any, is_summand: bool) -> str | None:
    """Why a cross entropy is no mean over its targets that are not -100; None if it is one.

    Args:
        is_summand: whether it is a term of the loss, so that a sum may be divided later.
    """
    weight, targets = node._saved_weight, node._saved_target
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # PyTorch gives it as unsigned
    if node._saved_reduction == _SUM and not is_summand:
        return (
            "the loss function returned a cross entropy with reduction='sum', and a mean of these sums "
            "depends on how the batch is split; return (sum, count), with the number of targets as count"
        )
    if node._saved_reduction != _MEAN:
        return None
    if weight is not None and bool((weight != weight[0]).any()):
        return (
            f"the loss function returned a cross entropy with class weights from {float(weight.min()):g} to "
            f"{float(weight.max()):g}. It is divided by the sum of weights, and microbatches and ranks are "
            "weighted by their number of targets; return (sum, count): the cross entropy with "
            "reduction='sum', and weight[targets].sum()"
        )
    if ignored == IGNORE_INDEX:
        return None
    if occurs := int((targets == ignored).sum()):
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
