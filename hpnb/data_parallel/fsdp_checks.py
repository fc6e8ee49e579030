"""What ZeRO-3 refuses during a backward, in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Sequence

from hpnb.data_parallel.reducer import unused_message
from hpnb.gradients import refuse_second_derivative


def zero3_unused_message(names: Sequence[str], count: int) -> str:
    """The error for parameters `names` of `count` that got no gradient. torch.autograd.grad by inputs ends in
    it too: it gives no parameter a gradient."""
    return (
        f"{unused_message(names, count)}; torch.autograd.grad through the model, as for saliency or a "
        "gradient penalty, needs zero_stage 0, 1 or 2"
    )


def refuse_second_derivative_of_zero3() -> None:
    """Raise in the hook of a sharded model's backward if autograd makes a graph of it."""
    refuse_second_derivative(
        "ZeRO 3",
        "it frees the weights after this backward, and the next one needs them; use zero_stage 0, 1 or 2, "
        "which are DataParallel and ZeroOptimizer",
    )
