"""The loss of a pipeline's batch, and what each microbatch's backward starts from.

    loss = sum_m total_m / N        N = sum_m count_m over all microbatches and all replicas
    d loss / d total_m = 1 / N      where the loss function gives (total, count)
    d loss / d mean_m = n_m / N     where it gives a mean, of n_m targets

A backward begins before the last microbatch has been forward, so N must be known before anything is. Targets
are counted in the batch (`count_targets`), which is exact for means. A loss function that counts for
itself may count something else: then backwards have started from 1/N', with N' the targets times what each of
them counted in the step before, and every gradient is multiplied by N'/N when it is complete. All ranks learn
this `correction` with a gradient that they wait for anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpnb.mesh import Axis
from hpnb.pipeline_parallel.microbatches import count_targets

LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, Any]]


class Loss:
    """What the rank of the last stage knows about the loss of one step.

    Args:
        function: (outputs, inputs) of a microbatch -> (sum, count), or the mean over its targets.
        inputs: of each microbatch.
        causal: see `microbatches.count_targets`.
        replicas: the data axis over which N is summed, if there is one.
        scale: the gradients are those of the loss times this.
        per_target: what a loss function that counts for itself is expected to count for each target. The
            nearer, the less gradients leave the range of 16 bits before they are corrected.
    """

    def __init__(
        self,
        function: LossFunction,
        inputs: Sequence[Any],
        device: torch.device,
        causal: bool,
        replicas: Axis | None,
        scale: float | torch.Tensor,
        per_target: float | torch.Tensor = 1.0,
    ) -> None:
        self._function, self._inputs, self._replicas, self._device = function, inputs, replicas, device
        self._counts = torch.stack([self._number(count_targets(one, causal)) for one in inputs])  # (m,)
        self._all = self._over_replicas(self._counts.sum())
        self._expected = self._all.clamp(min=1)  # a batch without targets has gradients of 0
        # Of all microbatches at once: small kernels are in the way of large ones.
        self._seeds = scale / self._expected * self._counts  # (m,), in the dtype of losses once that is known
        self._seed_of_sums = scale / (self._expected * per_target)  # ()
        self._per_target = per_target
        self._values: dict[int, torch.Tensor] = {}
        self._own_counts: list[torch.Tensor] = []
        self.counts_itself: bool | None = None  # known once it has been called
        self.counted: torch.Tensor | None = None  # for each target; known with the correction

    def __call__(self, microbatch: int, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(what to start the backward of this microbatch from, with which gradient)."""
        found: Any = self._function(outputs, self._inputs[microbatch])
        value, own = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(value, torch.Tensor) or value.dim() or (found is not value and own is None):
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"the loss function returned {type(found).__name__} of {what}; return a scalar tensor, the "
                "mean over the microbatch's targets, or (sum, count)"
            )
        if self.counts_itself not in (None, own is not None):
            raise ValueError("the loss function must return (sum, count) for every microbatch, or for none")
        self.counts_itself = own is not None
        self._values[microbatch] = value.detach()
        if own is not None:
            self._own_counts.append(self._number(own))
            return value, self._seed_of_sums.to(value.dtype)
        return value, self._seeds_of(value.dtype)[microbatch]

    def correction(self) -> torch.Tensor:
        """(), float64: N'/N, once all microbatches have been forward. All replicas call it."""
        counted = self._true_count() / self._expected
        # A step that has counted nothing, and whose mean is nan, is nothing to go by in the next.
        self.counted = torch.where(counted > 0, counted, self._per_target)
        return self._per_target / counted

    def mean(self) -> torch.Tensor:
        """(), float64: the loss of the whole batch, of all replicas. All replicas call it."""
        values = torch.stack([self._values[m] for m in range(len(self._inputs))]).double()  # (m,)
        if self.counts_itself:
            return self._over_replicas(values.sum()) / self._true_count()
        # The mean of nothing is nan; it counts nothing.
        totals = torch.where(self._counts > 0, values * self._counts, 0.0)
        return self._over_replicas(totals.sum()) / self._all

    def _seeds_of(self, dtype: torch.dtype) -> torch.Tensor:
        if self._seeds.dtype != dtype:
            self._seeds = self._seeds.to(dtype)
        return self._seeds

    def _true_count(self) -> torch.Tensor:
        return self._over_replicas(torch.stack(self._own_counts).sum())

    def _over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        if self._replicas is not None and self._replicas.size > 1:
            dist.all_reduce(value, group=self._replicas.group)
        return value

    def _number(self, count: torch.Tensor | float) -> torch.Tensor:
        if isinstance(count, torch.Tensor):
            return count.detach().to(self._device, torch.float64)
        return torch.full((), count, dtype=torch.float64, device=self._device)  # no copy to wait for
