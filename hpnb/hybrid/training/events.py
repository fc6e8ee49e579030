"""What a Trainer tells its hooks, and when.

    before_fit
      before_epoch
        before_step
          around_step: on_outputs, on_loss        for every microbatch, where the outputs are
        after_step                                the optimizer has stepped
        ...
        before_evaluate, on_outputs, on_loss ..., after_evaluate
      after_epoch                                 trainer.history[-1] is of this epoch
    after_fit

Hooks are called in the order of their priority, equals as they were given, on every rank: one that talks to
other ranks may do so in every event but on_outputs and on_loss, which only the ranks of the last stage get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from hpnb.hybrid.training.run_state import TrainingState
from hpnb.ranks.current_rank import device


class Hook:
    """Override what you want to hear of. `trainer.step` counts the optimizer steps that are done. Set
    `trainer.should_stop = True` to end the fit early (`Trainer.fit`).

    >>> class PrintLoss(hpnb.Hook):
    ...     def after_step(self, trainer):
    ...         print(trainer.step, trainer.loss)
    >>> hooks = [PrintLoss()]  # hpnb.Trainer(booster, model, optimizer, hooks=hooks)
    """

    priority: ClassVar[int] = 50  # the lower, the earlier
    figures: ClassVar[tuple[str, ...]] = ()  # names that it adds to the history, if it is no metric

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep of this hook: tensors, numbers, texts, lists and dicts of them, by rank 0.
        `load_state_dict` gets it in a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def saved_averages(self) -> dict[str, Any]:
        """Copies of the boosted model that checkpoints keep too, by name, such as {"ema": average}; a resume
        fills them, in any layout."""
        return {}

    def before_fit(self, trainer: TrainingState) -> None: ...
    def after_fit(self, trainer: TrainingState) -> None: ...
    def before_epoch(self, trainer: TrainingState) -> None: ...
    def after_epoch(self, trainer: TrainingState) -> None: ...
    def before_step(self, trainer: TrainingState) -> None: ...
    def after_step(self, trainer: TrainingState) -> None: ...
    def before_evaluate(self, trainer: TrainingState) -> None: ...
    def after_evaluate(self, trainer: TrainingState) -> None: ...

    @contextmanager
    def around_step(self, trainer: TrainingState) -> Iterator[None]:
        """Forward, backward and optimizer happen inside."""
        yield

    def on_outputs(self, trainer: TrainingState, outputs: Any, inputs: Any) -> None:
        """Of one microbatch, in training and evaluation; without gradients. With context parallelism both are
        of this rank's tokens, and labels are shifted already."""

    def on_loss(self, trainer: TrainingState, total: torch.Tensor, count: torch.Tensor) -> None:
        """The sum of the losses of one microbatch, and of how many targets; both (), float64."""


def checked_hooks(hooks: Any) -> list[Hook]:
    """The hooks as a list; one alone stands for itself."""
    checked = list(hooks) if isinstance(hooks, Iterable) and not isinstance(hooks, str) else [hooks]
    for hook in checked:
        if isinstance(hook, type):
            raise TypeError(f"hooks has the class {hook.__name__}; make a hook of it: {hook.__name__}(...)")
        if not hasattr(hook, "priority"):
            raise TypeError(
                f"hooks has {hook!r}, a {type(hook).__name__}; use hooks of hpnb or of a subclass of "
                "hpnb.Hook, as in hooks=[hpnb.AccuracyHook()]"
            )
        if isinstance(hook, Metric) and not hasattr(hook, "totals"):
            kind = type(hook).__name__
            raise TypeError(f"{kind} has no name and no totals: call super().__init__(name) in its __init__")
    return checked


class Metric(Hook):
    """Sums of a rank, and what they say once those of all ranks are added up.

    A mean of the ranks' means, or of the batches', would be wrong where they are ragged; so numerators and
    denominators travel apart, and are divided at the end. Only ranks whose outputs count are summed: those of
    the last stage, of each tensor-parallel group the first.

    Args:
        name: of the number in the history; evaluated, it is called "eval_" and this.

    Attributes:
        totals: (size,), float64, of this rank.

    >>> class ErrorRate(hpnb.Metric):
    ...     def on_outputs(self, trainer, outputs, inputs):
    ...         wrong = outputs.logits.argmax(-1).ne(inputs["labels"])
    ...         self.totals = self.totals + torch.stack([wrong.sum(), torch.tensor(len(wrong))])
    >>> ErrorRate("error").value([3, 12])  # the sums over all ranks
    0.25
    """

    priority = 10
    size: ClassVar[int] = 2
    counts: ClassVar[bool] = True  # False for clocks: neither evaluated, nor kept over a resume

    def __init__(self, name: str) -> None:
        self.name = name
        self.totals = torch.zeros(self.size, dtype=torch.float64)

    def reset(self) -> None:
        """Something new is measured: an epoch, or an evaluation."""
        self.totals = torch.zeros(self.size, dtype=torch.float64, device=device())

    def sums(self) -> torch.Tensor:
        """(size,), float64: what this rank adds. Asked at the end, on every rank."""
        return self.totals

    def value(self, sums: list[float]) -> float | None:
        """What the sums over all ranks say; None if that is nothing."""
        return sums[0] / sums[1] if sums[1] else None
