"""What is measured of a training: loss, accuracy, F1, and how fast it goes.

    loss       sum of losses / number of targets
    accuracy   right / number of targets
    F1         2 tp / (2 tp + fp + fn)
    speed      samples / mean seconds of the ranks

All are over all ranks, microbatches and batches of an epoch, and exact where these are ragged (see `Metric`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch

from hpnb.data.tokenizer import IGNORE_INDEX
from hpnb.hybrid.training.events import Metric
from hpnb.hybrid.training.run_state import TrainingState
from hpnb.pipeline_parallel.microbatches import TARGET_NAMES, count_samples
from hpnb.ranks.current_rank import device


class LossHook(Metric):
    """The mean loss per target. A Trainer has one anyway; give it one to read its curve.

    Attributes:
        curve: the loss of every step, over all ranks; complete after each epoch, on every rank.

    >>> hpnb.LossHook().value([6.0, 4])  # the sum over all targets, and how many there are
    1.5
    """

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)
        self.curve: list[float] = []
        self._step = self.totals
        self._steps: list[torch.Tensor] = []  # of the epoch

    def before_epoch(self, trainer: TrainingState) -> None:
        self._steps = []

    @contextmanager
    def around_step(self, trainer: TrainingState) -> Iterator[None]:
        self._step = torch.zeros(2, dtype=torch.float64, device=device())
        yield
        self._steps.append(self._step)

    def on_loss(self, trainer: TrainingState, total: torch.Tensor, count: torch.Tensor) -> None:
        both = torch.stack([total, count])
        self.totals, self._step = self.totals + both, self._step + both

    def after_epoch(self, trainer: TrainingState) -> None:
        if self._steps:
            sums = trainer.role.add_up(torch.stack(self._steps))  # (steps, 2)
            self.curve += [total / count if count else math.nan for total, count in sums.tolist()]


class AccuracyHook(Metric):
    """The share of targets that have the largest logit. Targets of -100 do not count.

    In a causal language model a position is held to the next one. Of soft labels (mixup) the largest is
    right.

    >>> hpnb.AccuracyHook().value([3, 4])  # 3 of the 4 targets of all ranks are right
    0.75
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    def on_outputs(self, trainer: TrainingState, outputs: Any, inputs: Any) -> None:
        predicted, targets = predictions(outputs, inputs, trainer.causal)
        counts = targets.ne(IGNORE_INDEX)
        right = (predicted.eq(targets) & counts).sum()
        self.totals = self.totals + torch.stack([right, counts.sum()])


class F1Hook(Metric):
    """F1 of one class against the others, as MRPC is judged by.

    Args:
        positive: the class.

    >>> hpnb.F1Hook(positive=1).value([6, 2, 2])  # 6 found, 2 wrongly, 2 missed
    0.75
    """

    size: ClassVar[int] = 3

    def __init__(self, positive: int = 1, name: str = "f1") -> None:
        super().__init__(name)
        self.positive = positive

    def on_outputs(self, trainer: TrainingState, outputs: Any, inputs: Any) -> None:
        predicted, targets = predictions(outputs, inputs, trainer.causal)
        counts = targets.ne(IGNORE_INDEX)
        predicted, actual = predicted.eq(self.positive) & counts, targets.eq(self.positive)
        both = (predicted & actual).sum()
        self.totals = self.totals + torch.stack([both, predicted.sum() - both, actual.sum() - both])

    def value(self, sums: list[float]) -> float | None:
        both, wrong, missed = sums
        return 2 * both / (2 * both + wrong + missed) if both + wrong + missed else None


class ThroughputHook(Metric):
    """Samples, or tokens, that all ranks together train on in a second; what is padding is no token.

    From the first step after the warm-up to the end of the epoch, loading of data and hooks included and
    evaluations not. An epoch that is all warm-up has no figure.

    Args:
        unit: "samples" or "tokens".
        warmup: so many steps of each fit are not measured.

    >>> hpnb.ThroughputHook("tokens", warmup=5).name
    'tokens_per_second'
    """

    size: ClassVar[int] = 3
    counts = False

    def __init__(self, unit: Literal["samples", "tokens"] = "samples", warmup: int = 3) -> None:
        if unit not in ("samples", "tokens"):
            raise ValueError(f"unit={unit!r} is not counted; use 'samples' or 'tokens'")
        if warmup < 0:
            raise ValueError(f"warmup={warmup} steps is negative; use 0 or more")
        super().__init__(f"{unit}_per_second")
        self.unit, self.warmup = unit, warmup
        self._left = warmup
        self._began: float | None = None
        self._amount = 0.0

    def before_fit(self, trainer: TrainingState) -> None:
        self._left = self.warmup

    def before_epoch(self, trainer: TrainingState) -> None:
        self._amount, self._began = 0.0, None if self._left else _now()

    def after_step(self, trainer: TrainingState) -> None:
        if self._began is not None:
            # The ranks of one context-parallel group have the same batch, and all of them report it.
            self._amount += sum(map(self._in, trainer.batches)) / trainer.booster.plugin.cp_size
            return
        self._left -= 1
        if self._left == 0:
            self._began = _now()

    def sums(self) -> torch.Tensor:
        seconds = 0.0 if self._began is None or not self._amount else _now() - self._began
        return torch.tensor([self._amount, seconds, 1.0], dtype=torch.float64, device=device())

    def value(self, sums: list[float]) -> float | None:
        amount, seconds, ranks = sums
        return amount / (seconds / ranks) if seconds else None

    def _in(self, batch: Any) -> int:
        if self.unit == "samples":
            return count_samples(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is not None:
            return int(mask.sum())
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if ids is None:
            raise ValueError("unit='tokens' needs batches with input_ids; use unit='samples'")
        return int(ids.numel())


def predictions(outputs: Any, inputs: Any, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(the class with the largest logit, the target), whole numbers of the same shape."""
    logits = outputs
    if not isinstance(outputs, torch.Tensor):
        logits = outputs["logits"] if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    targets = inputs[-1] if isinstance(inputs, tuple | list) and len(inputs) > 1 else None
    if isinstance(inputs, Mapping):
        targets = next((inputs[name] for name in TARGET_NAMES if name in inputs), None)
    if logits is None or targets is None:
        lacks = f"{type(outputs).__name__} has no logits" if logits is None else "the batch has no labels"
        raise ValueError(f"{lacks}: accuracy and F1 compare the two")
    if targets.is_floating_point():
        targets = targets.argmax(-1)
    predicted = logits.argmax(-1)
    if causal and targets.dim() > 1:
        predicted, targets = predicted[:, :-1], targets[:, 1:]
    if predicted.shape != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(targets.shape)}: they "
            "need one more dim, the classes"
        )
    return predicted, targets


def _now() -> float:
    """Seconds, once the device has done what it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
