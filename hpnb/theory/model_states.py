"""How many bytes the model states take on a rank: weights, gradients and optimizer state, by ZeRO stage.

Mixed-precision Adam takes 2 + 2 + 12 = 16 bytes a parameter: 16-bit weights and gradients, and in float32 the
master weights and two moments. On N ranks,

    stage 0   2 + 2 + 12             replicated
    stage 1   2 + 2 + 12/N           optimizer state sharded
    stage 2   2 + (2 + 12)/N         gradients sharded too
    stage 3   (2 + 2 + 12)/N         weights sharded too

Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), section 5 and table 1. Activations are not included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def model_states(
    parameters: float,
    ranks: int = 1,
    stage: int = 0,
    *,
    weight_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> ModelStates:
    """Bytes of the states of a model with `parameters` parameters on one of `ranks` ranks.

    Args:
        stage: of ZeRO, 0 (all replicated) to 3 (all sharded).
        weight_bytes, gradient_bytes, optimizer_bytes: a parameter. Adam in float32 is 4, 4 and 8; SGD with
            momentum 4, 4 and 4.

    Raises:
        ValueError: no such stage, or ranks below 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r} is not one of 0, 1, 2, 3")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is not a count; use 1 or more")
    return ModelStates(
        parameters * weight_bytes / (ranks if stage >= 3 else 1),
        parameters * gradient_bytes / (ranks if stage >= 2 else 1),
        parameters * optimizer_bytes / (ranks if stage >= 1 else 1),
    )
