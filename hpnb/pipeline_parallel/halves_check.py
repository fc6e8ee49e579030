"""Whether a scalar criterion is the mean that its weight says: of a few samples, and of two groups of them.

    together = criterion(8 samples)
    weighted = (n_1 criterion(the first 4) + n_2 criterion(the last 4)) / (n_1 + n_2)    n: targets, not -100

For a mean over the targets both are the same, and so is the loss in every layout. They differ for a mean that
is divided by weights or a mask, for a term over samples beside one over targets, for a median, a root or a
variance: then the loss depends on how the batch is split into microbatches and over ranks.

The criterion is called on copies without gradients, once, in the first training step. It can send nothing and
change no tensor and no random state meanwhile: a criterion that would is stopped before it does, and nothing
is said of it, as of one that draws random numbers, fails with fewer samples, or gets outputs that are not
split along their samples.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers.utils import ModelOutput

from hpnb.caller_frame import warn_caller
from hpnb.pipeline_parallel.label_shift import ChangedMapping, ChangedTuple
from hpnb.pipeline_parallel.microbatches import count_samples, count_targets, find_labels
from hpnb.ranks import shared_gpu_group

_MOST_SAMPLES = 8
_MOST_ELEMENTS = 1 << 24  # of the outputs that are copied, above two samples
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; a criterion may use TF32 inside
_TOLERANCE_OF_16_BITS = 3e-2
_SENDING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")

Function = Callable[[Any, Any], Any]


def warn_if_no_mean(function: Function, outputs: Any, inputs: Any, causal: bool) -> None:
    """Warn of a `function` (outputs, inputs) -> scalar that is no mean over the targets that are not -100.

    Args:
        outputs, inputs: of a microbatch, which stay as they are.
        causal: see `count_targets`.
    """
    try:
        difference = _compare(function, outputs, inputs, causal)
    except Exception:  # what the criterion needs and does not get here, it says itself
        return
    if difference is not None:
        warn_caller(
            f"the criterion returned a scalar that is no mean over targets: {difference}. Microbatches and "
            "ranks are weighted by their number of targets that are not -100 (samples, if there are none), "
            "so this loss depends on the layout; return (sum, count), such as ((w * losses).sum(), w.sum()). "
            "A loss that compares samples, as a variance does, depends on the layout in any case"
        )


def warn_if_counts_sequences(count: Any, inputs: Any) -> None:
    """Warn of a criterion under context parallelism whose count is the number of sequences: every rank has
    some tokens of each of them, and would count it."""
    labels = find_labels(inputs)
    if labels is None or labels.dim() < 2 or type(count) is not int or count != count_samples(inputs):
        return
    warn_caller(
        f"the criterion returned (sum, count) with its {count} sequences as count, but under context "
        "parallelism a rank has only some tokens of each sequence, and all ranks count it; count targets. "
        "For a mean over sequences, let the batch have a weight w for each label, 1 over the number of "
        "targets in its sequence, shifted as labels are, and return ((w * losses).sum(), w.sum())"
    )


def _compare(function: Function, outputs: Any, inputs: Any, causal: bool) -> str | None:
    """How the values differ; None if they do not, or say nothing."""
    if not isinstance(inputs, Mapping | tuple | list):
        return None
    samples = count_samples(inputs)
    of_outputs = [x for x in tree_flatten(_plain(outputs))[0] if isinstance(x, torch.Tensor)]
    per_sample = sum(x.numel() for x in of_outputs) // max(1, samples)
    size = min(samples, _MOST_SAMPLES, max(2, _MOST_ELEMENTS // max(1, per_sample)))
    if size < 2 or not of_outputs:
        return None

    def call(start: int, stop: int) -> float:
        with _Untouched():
            copied = _slice(outputs, samples, start, stop)
            result = function(copied, _marked(_slice(batch, samples, start, stop)))
        if not isinstance(result, torch.Tensor) or result.dim():
            raise _NothingToSay
        dtypes.add(result.dtype)
        return float(result)

    def count(start: int, stop: int) -> tuple[int, int]:
        samples_there = _slice(batch, samples, start, stop)
        return int(count_targets(samples_there, causal)), int(count_targets(samples_there, not causal))

    batch = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    dtypes: set[torch.dtype] = set()
    with (
        _same_random_numbers(of_outputs),
        _no_shared_gpu_group(),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        together = call(0, size)
        if not math.isfinite(together) or call(0, size) != together:  # of other random numbers
            return None
        tolerance = max(_TOLERANCES.get(dtype, _TOLERANCE_OF_16_BITS) for dtype in dtypes)
        for at in dict.fromkeys((size // 2, 1)):  # halves may have equally many by chance
            values, counts = (call(0, at), call(at, size)), (count(0, at), count(at, size))
            # Whether labels are shifted is another question (`label_shift.py`).
            means = [_weighted(values, n) for n in zip(*counts, strict=True)]
            scale = max(map(abs, (together, *values)))
            if not all(map(math.isfinite, (*means, scale))):
                continue
            if all(abs(together - mean) > tolerance * scale for mean in means):
                (first, second), (n, m) = values, (counts[0][0], counts[1][0])
                return (
                    f"of {size} samples it is {together:.6g}, and of their first {at} and last {size - at}, "
                    f"with {n} and {m} targets, {first:.6g} and {second:.6g}, with the mean {means[0]:.6g}"
                )
    return None


def _weighted(values: tuple[float, float], counts: tuple[int, ...]) -> float:
    """The mean of two means; the one over no targets may be nan, and counts nothing."""
    totals = [value * n for value, n in zip(values, counts, strict=True) if n]
    return sum(totals) / sum(counts) if totals else math.nan


# --- a few samples ----------------------------------------------------------------------------------------


class _NothingToSay(Exception):
    """The criterion cannot be compared."""


def _plain(outputs: Any) -> Any:
    """Outputs as containers that can be flattened, in which nothing is gathered."""
    if isinstance(outputs, ModelOutput):
        return {name: dict.__getitem__(outputs, name) for name in dict.keys(outputs)}
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return outputs


def _slice(value: Any, samples: int, start: int, stop: int) -> Any:
    """Copies of these samples of all tensors in `value`; scalars, and what is no tensor, as they are."""
    if getattr(value, "is_lazy", False):  # logits that are still sharded (`hpnb.tensor_parallel`)
        raise _NothingToSay  # logits that nobody has gathered
    if isinstance(value, ModelOutput) or (is_dataclass(value) and not isinstance(value, type)):
        parts = _plain(value).items()
        kind: Any = type(value)
        return kind(**{name: _slice(x, samples, start, stop) for name, x in parts})

    def slice_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() and leaf.size(0) != samples:
                raise _NothingToSay
            return (leaf[start:stop] if leaf.dim() else leaf).detach().clone()
        if leaf is None or isinstance(leaf, str | int | float):
            return leaf
        raise _NothingToSay

    return tree_map(slice_leaf, value)


def _marked(inputs: Any) -> Any:
    """`inputs` that nobody may count as a microbatch."""
    return ChangedMapping(inputs) if isinstance(inputs, Mapping) else ChangedTuple(inputs)


# --- leave everything as it is ----------------------------------------------------------------------------


class _Untouched(TorchDispatchMode):
    """Stops what sends, what writes into a tensor that was not made inside, and what passes a generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, torch.UntypedStorage] = {}  # kept, so that no number stands for two

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace in _SENDING:
            raise _NothingToSay
        for i, argument in enumerate(op._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Generator):
                raise _NothingToSay
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_flatten(value)[0]:
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._made:
                        raise _NothingToSay
        if op.namespace == "aten" and "batch_norm" in op.__name__ and True in args[5:6]:
            raise _NothingToSay  # writes its statistics, which its schema does not say
        before = {
            x.untyped_storage()._cdata
            for x in tree_flatten((args, kwargs))[0]
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._made
        }
        result = op(*args, **kwargs)
        for x in tree_flatten(result)[0]:
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in before:
                self._made[storage._cdata] = storage
        return result


@contextlib.contextmanager
def _no_shared_gpu_group() -> Iterator[None]:
    """Stops what ranks on one GPU would send, which PyTorch does not dispatch."""
    thread = threading.get_ident()

    def stop(*_: Any) -> None:
        if threading.get_ident() == thread:
            raise _NothingToSay

    shared_gpu_group.observers.append(stop)
    try:
        yield
    finally:
        shared_gpu_group.observers.remove(stop)


@contextlib.contextmanager
def _same_random_numbers(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Afterwards, everybody draws what they would have drawn."""
    gpus = sorted({x.device.index for x in tensors if x.device.type == "cuda"})
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
