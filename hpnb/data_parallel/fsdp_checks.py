"""What ZeRO-3 refuses during a forward or backward, in sentences that say what to do."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

from torch import nn

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


def explain_parts(error: BaseException, unit_names: Mapping[nn.Parameter, str]) -> None:
    """Say so if the root's forward failed in a module of a unit whose forward was not called, so that
    nothing had gathered the weights.

    Args:
        unit_names: {parameter: the name of its unit}, without those of the root.
    """
    modules = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    parameters = [p for m in modules if isinstance(m, nn.Module) for p in m._parameters.values()]
    names = [unit_names[p] for p in parameters if p is not None and p in unit_names]
    if names and type(error) is RuntimeError:
        error.args = (
            f"{error}; this is in {names[-1]}, whose modules are called without it. ZeRO 3 gathers its "
            "weights in front of its own forward: call the block, as in block(hidden), and put what it "
            "does into its forward; or give its class no forward, and ZeRO 3 gathers before each of its "
            "modules",
        )
