"""What a checkpoint holds beside weights and optimizer: random generators and the pipeline.

    random/0 .. random/n-1                 where each rank's generators stand
    pipeline/per_target                    what a loss function counts for each target
    lr_scheduler, dataloader, extra        state dicts, as they give them (checkpoint.py)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpnb.hybrid.boosted_model import Boosted
from hpnb.hybrid.checkpoint.state_files import ShardedState
from hpnb.placement import Placement
from hpnb.ranks.current_rank import device

PER_TARGET = "pipeline/per_target"


def pipeline_state(model: Boosted, copy: Callable[[torch.Tensor], torch.Tensor]) -> ShardedState:
    """What the pipeline remembers between steps, on the ranks that compute the loss."""
    value = model.per_target
    if not isinstance(value, torch.Tensor):
        return ShardedState()
    return ShardedState({PER_TARGET: (Placement(PER_TARGET, ()), copy(value))})


def random_state() -> dict[str, Any]:
    """Where the generators of this rank stand: Python's, NumPy's, PyTorch's."""
    kind, numbers, *rest = np.random.get_state()
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": (kind, torch.from_numpy(np.asarray(numbers).astype(np.int64)), *rest)}  # fmt: skip
    if device().type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device())
    return state


def is_random_state(state: Any) -> bool:
    """Whether the generators would continue from it."""
    now = random_state()
    try:
        set_random_state(state)
    except Exception:  # each generator has its own errors
        return False
    finally:
        set_random_state(now)
    return True


def set_random_state(state: dict[str, Any]) -> None:
    """Let the generators of this rank continue from there."""
    kind, numbers, *rest = state["numpy"]
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), *rest))
    if "cuda" in state and device().type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device())
