"""The loss of a pipeline's batch, and the gradient from which each microbatch's backward starts.

    loss = sum_m total_m / N        N = sum_m count_m over all microbatches and all replicas
    d loss / d total_m = 1 / N      where the loss function returns (total, count)
    d loss / d mean_m = n_m / N     where it returns the mean over n_m targets

In most schedules the first backward begins before the last microbatch's forward, so it needs N before the
loss function has counted everything. The `loss_reduction` of a pipeline, the same on all its ranks, says what
is done. It is None until the first training step has shown what the function returns; that step sends a
correction.

    "mean"            N is counted in the batch (`count_targets`), which is exact.
    "sum_and_count"   The loss function may count something else than targets. Backwards start from 1/N',
                      where N' is the number of targets times what each of them counted in the step before,
                      and every gradient is multiplied by N'/N once it is complete. This `correction` travels
                      to all ranks with a gradient that they wait for anyway. Means are exact here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from hpnb.background import Background
from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.mesh import Axis
from hpnb.pipeline_parallel.criterion_check import check_is_mean
from hpnb.pipeline_parallel.empty_batch_error import explaining_empty_batch
from hpnb.pipeline_parallel.halves_check import warn_if_counts_sequences, warn_if_no_mean
from hpnb.pipeline_parallel.label_shift import check_weight
from hpnb.pipeline_parallel.microbatches import TARGET_NAMES, count_targets, find_unnamed_targets
from hpnb.pipeline_parallel.microbatches_without_targets import standing_for, with_valid_labels, zeros_from

LossReduction = Literal["mean", "sum_and_count"]
LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, Any]]


class BatchLoss:
    """The loss of one step, on the rank of the last stage. All replicas construct it together, because it
    sums their targets, and call `correction` and `mean` together.

    Args:
        function: (outputs, inputs) of a microbatch -> (sum, count), or the mean over its targets.
        reduction: "mean" refuses a (sum, count); "sum_and_count" and None take both.
        observed: the reduction that the function used in the training step before.
        causal: see `count_targets`.
        replicas: the data axes over which N is summed.
        scale: the gradients are those of the loss times this.
        per_target: what a target is expected to count, 1 for a mean. A good guess keeps float16 gradients in
            range until the correction.
        checks_shift: whether `causal` is to be compared with what the function averages (`label_shift.py`);
            on a GPU only as long as the reduction is not known.
        checks_mean: whether to check that a scalar is the mean over its targets (`criterion_check.py`,
            `halves_check.py`), and under context parallelism that a count counts targets.
            Neither check is made for a single microbatch on a single replica, whose weight is 1.

    Attributes:
        shift_checked: whether the comparison of `checks_shift` was made, and they agree.
        observed_reduction: the reduction that the function used in this step; None before it was called.
        counted_per_target: what a target has counted, known with the correction.
    """

    def __init__(
        self,
        function: LossFunction,
        inputs: Sequence[Any],
        device: torch.device,
        *,
        reduction: LossReduction | None,
        observed: LossReduction | None = None,
        causal: bool,
        replicas: Sequence[Axis],
        scale: float | torch.Tensor,
        per_target: float | torch.Tensor = 1.0,
        checks_shift: bool = False,
        checks_mean: bool = False,
    ) -> None:
        self._function, self._inputs, self._replicas, self._device = function, inputs, replicas, device
        self._shards_sequences = any(axis.name == "dp_cp" for axis in replicas)
        self._reduction, self._per_target = reduction, per_target
        self._targets = self._count_targets(causal)  # (m,)
        self._lacks_targets = self._targets == 0  # (m,)
        self._copies: dict[int, Any] = {}  # of `inputs_of`
        self._observed_before = observed
        # Reading labels synchronises with a GPU, so it is done there only while the reduction is unknown.
        several = len(inputs) > 1 or any(axis.size > 1 for axis in replicas)  # one weight is always 1
        checks_labels = several and (device.type != "cuda" or reduction is None)
        unnamed = (find_unnamed_targets(microbatch) for microbatch in inputs) if checks_labels else ()
        self._unnamed_targets = next((name for name in unnamed if name is not None), None)
        # (m,) each: targets as `causal` says, and those of the other `causal`, for the check of shifts. All
        # replicas sum the same shape, so whether one of them checks shifts does not matter.
        countings = [self._targets]
        if checks_labels:
            countings.append(self._count_targets(not causal))
        totals = self._sum_over_replicas(torch.stack([counts.sum() for counts in countings]))
        self._all_targets, self._causal = totals[0], causal
        # For each of the two countings: targets of each microbatch, and of the whole batch.
        self._shift_counts: list[tuple[list[float], float]] | None = None
        if checks_labels and checks_shift:
            self._shift_counts = [
                (counts.tolist(), total) for counts, total in zip(countings, totals.tolist(), strict=True)
            ]
        self.shift_checked = False
        self._checks_mean = several and checks_mean
        # 1/N'. A batch without targets has gradients of 0.
        self._grad_of_sum = scale / (self._all_targets.clamp(min=1) * per_target)  # ()
        # Of all microbatches at once: small kernels are in the way of large ones.
        self._grads_of_means = self._grad_of_sum * self._targets  # (m,), later in the dtype of losses
        self._values: dict[int, torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor] = {}
        self.observed_reduction: LossReduction | None = None
        self.counted_per_target: torch.Tensor | None = None

    def __call__(self, microbatch: int, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(the tensor from which the backward of this microbatch starts, its gradient)."""
        inputs, true_inputs = self.inputs_of(microbatch), self._inputs[microbatch]
        with standing_for(inputs, true_inputs):
            result = call_criterion(self._function, outputs, inputs)
        if isinstance(result, tuple) and inputs is not true_inputs:  # no mean any more, as in the step before
            result = call_criterion(self._function, outputs, true_inputs)
        return self.from_result(microbatch, outputs, result)

    def inputs_of(self, microbatch: int) -> Any:
        """What the last stage and the loss function take: the microbatch, or a copy, whose labels differ if
        it has no target (`microbatches_without_targets.py`)."""
        if not (self._returns_means and torch.is_grad_enabled()):
            return self._inputs[microbatch]
        if microbatch not in self._copies:
            lacks_targets = self._lacks_targets[microbatch]
            self._copies[microbatch] = with_valid_labels(self._inputs[microbatch], lacks_targets)
        return self._copies[microbatch]

    def from_result(self, microbatch: int, outputs: Any, result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, from what the function has returned. A replayed graph may hand on no outputs (None); then
        shifts were checked in an earlier step."""
        value, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(value, torch.Tensor) or value.dim() or (result is not value and count is None):
            raise ValueError(
                f"the loss function returned {_describe(result)}; return a scalar tensor, the "
                "mean over the microbatch's targets, or (sum, count)"
            )
        has_copies = self._returns_means
        self._check_reduction("mean" if count is None else "sum_and_count")
        self._values[microbatch] = value.detach()
        if count is not None:
            self._counts[microbatch] = self._as_count(count)
            if self._checks_mean and self._shards_sequences:
                warn_if_counts_sequences(count, self._inputs[microbatch])
            self._checks_mean = False
            return value, self._grad_of_sum.to(value.dtype)
        self._check_shift(microbatch, outputs, value.detach())
        if self._checks_mean and outputs is not None:
            check_is_mean(value, self._inputs[microbatch], self._causal)
            warn_if_no_mean(self._function, outputs, self._inputs[microbatch], self._causal)
            self._checks_mean = False
        if self._grads_of_means.dtype != value.dtype:
            self._grads_of_means = self._grads_of_means.to(value.dtype)
        # Reading the number waits for a GPU, so only in the first step after one that returned no means.
        if (
            not has_copies
            and torch.is_grad_enabled()
            and bool(self._lacks_targets[microbatch])
            and not bool(value.isfinite())
        ):
            zeros = zeros_from(outputs, self._inputs[microbatch])
            value = value if zeros is None else zeros.to(value)
        return value, self._grads_of_means[microbatch]

    def correction(self) -> torch.Tensor:
        """(), float64: N'/N, once all forwards have run. All replicas call it together."""
        count = self._sum_over_replicas(self._step_counts().sum())
        self.counted_per_target, correction = _correction_of(count, self._all_targets, self._per_target)
        return correction

    def mean(self) -> torch.Tensor:
        """(), float64: the loss of the whole batch, of all replicas. All replicas call it together."""
        values = torch.stack([self._values[m] for m in range(len(self._inputs))]).double()  # (m,)
        counts = self._step_counts()  # (m,)
        # The mean of nothing is nan, and counts nothing.
        totals = values if self._counts else torch.where(counts > 0, values * counts, 0.0)
        sums = self._sum_over_replicas(torch.stack([totals.sum(), counts.sum()]))
        return sums[0] / sums[1]

    @property
    def _returns_means(self) -> bool:
        """Whether the function has returned means so far, in this step or else in the one before."""
        return (self.observed_reduction or self._observed_before) == "mean"

    def _check_reduction(self, reduction: LossReduction) -> None:
        if self.observed_reduction not in (None, reduction):
            raise ValueError("the loss function must return (sum, count) for every microbatch, or for none")
        if self._reduction == "mean" and reduction == "sum_and_count":
            raise ValueError(
                "the loss function returned (sum, count), and the loss_reduction of this pipeline is "
                "'mean', stated or from its first training step; set loss_reduction = 'sum_and_count' on the "
                "Pipeline or the boosted model, on every rank, which takes both"
            )
        if reduction == "mean" and self._unnamed_targets is not None:
            raise ValueError(
                f"the loss function returned a mean, and entry {self._unnamed_targets!r} of the batch "
                f"contains {IGNORE_INDEX}, but means are weighted by targets only under the names "
                f"{', '.join(TARGET_NAMES)}; rename it to 'labels', or return (sum, count)"
            )
        self.observed_reduction = reduction

    def _check_shift(self, microbatch: int, outputs: Any, value: torch.Tensor) -> None:
        """Once, with the first microbatch whose weight depends on whether labels are shifted."""
        if self._shift_counts is None or outputs is None:
            return
        counted, otherwise = ((int(counts[microbatch]), int(total)) for counts, total in self._shift_counts)
        if counted[0] == otherwise[0] or counted[0] * otherwise[1] == otherwise[0] * counted[1]:
            return
        inputs = self._inputs[microbatch]
        shifted = self._shards_sequences and not self._causal
        check_weight(self._function, outputs, inputs, value, self._causal, counted, otherwise, shifted)
        self._shift_counts, self.shift_checked = None, True

    def _step_counts(self) -> torch.Tensor:
        """(m,), float64: what each microbatch counts."""
        if not self._counts:
            return self._targets
        return torch.stack([self._counts[m] for m in range(len(self._inputs))])

    def _sum_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        for axis in self._replicas:
            if axis.size > 1:
                dist.all_reduce(value, group=axis.group)
        return value

    def _count_targets(self, causal: bool) -> torch.Tensor:
        """(m,), float64."""
        return torch.stack([self._as_count(count_targets(inputs, causal)) for inputs in self._inputs])

    def _as_count(self, count: torch.Tensor | float) -> torch.Tensor:
        if isinstance(count, torch.Tensor):
            return count.detach().to(self._device, torch.float64)
        return torch.full((), count, dtype=torch.float64, device=self._device)  # no copy to wait for


def _describe(result: Any) -> str:
    """What a loss function returned, in words."""
    if isinstance(result, tuple):
        return f"({', '.join(map(_describe, result))})"
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return "None" if result is None else f"a value of class {type(result).__name__}"


def call_criterion(criterion: LossFunction, outputs: Any, inputs: Any) -> Any:
    """criterion(outputs, inputs). For a loss of PyTorch, which takes targets, the error says what to pass,
    and for a batch without samples what to return."""
    try:
        with explaining_empty_batch("criterion", inputs):
            return criterion(outputs, inputs)
    except TypeError as error:
        of_torch = "torch.nn.functional", "torch.nn.modules.loss"
        kind = type(criterion) if isinstance(criterion, torch.nn.Module) else criterion
        if isinstance(inputs, torch.Tensor) or getattr(kind, "__module__", None) not in of_torch:
            raise
        name = getattr(kind, "__name__", str(kind))
        targets = "batch['labels']" if isinstance(inputs, Mapping) else f"batch[{len(inputs) - 1}]"
        raise TypeError(
            f"{name} takes a tensor of targets, and a criterion gets the whole microbatch, a "
            f"{type(inputs).__name__} of {len(inputs)}: pass a function that takes them out of it, such as "
            f"lambda outputs, batch: loss(outputs, {targets}), with loss the {name}"
        ) from error


def _correction_of(
    count: torch.Tensor, targets: torch.Tensor, per_target: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what a target counted, N'/N), for N = `count` and N' = `targets` times `per_target`."""
    counted = count / targets.clamp(min=1)
    nothing = (count == 0) & (targets == 0)  # as for means, which have gradients of 0 then
    # A step that has counted nothing, and whose mean is nan, says nothing about the next.
    return torch.where(counted > 0, counted, per_target), torch.where(nothing, 1.0, per_target / counted)


def share_reduction(loss: BatchLoss | None, axis: Axis, source: int) -> LossReduction:
    """Send all ranks of `axis` what the loss function has returned in this step on rank `source`."""
    observed = [None if loss is None else loss.observed_reduction]
    if axis.size > 1:
        dist.broadcast_object_list(observed, src=axis.ranks[source], group=axis.group)
    assert observed[0] is not None
    return observed[0]


def send_mean(
    loss: BatchLoss | None, background: Background, source: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Send the mean from rank `source` to all ranks, in the background. Returns what waits for it."""
    mean = torch.zeros((), dtype=torch.float64, device=device) if loss is None else loss.mean()
    pending = background.broadcast(mean, source)

    def wait_for_loss() -> torch.Tensor:
        pending.wait()
        return mean

    return wait_for_loss
