"""All of it: data, pipeline and tensor parallelism composed, and what a training program needs around them.

plugins.py         HybridParallelPlugin: what to parallelise; presets.py has it with fewer knobs
refused.py         what cannot compose, and why
booster.py         Booster: boost, execute_pipeline, backward, files
compose.py         in which order a model is parallelised
boosted.py         the model on one rank; outputs.py and losses.py: the loss of all ranks
stepping.py        the optimizer on one rank; optimizer_state.py: its state as one process would have it
recompute.py       activation checkpointing

checkpoint/        weights as Hugging Face writes them, all other state in pieces; atomic, of any layout
training/          Trainer and its hooks, metrics, progress; HybridAdam, schedules of learning rates
hosts/             torchrun: launch_from_torch, DistCoordinator, restarts, several hosts
command/           python -m hpnb train: a TOML file, and the run that it asks for
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpnb.hybrid.boosted import Boosted
    from hpnb.hybrid.booster import Booster
    from hpnb.hybrid.hosts.coordinator import DistCoordinator
    from hpnb.hybrid.hosts.launch import launch_from_torch
    from hpnb.hybrid.plugins import HybridParallelPlugin
    from hpnb.hybrid.presets import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
    from hpnb.hybrid.refused import REFUSED
    from hpnb.hybrid.stage_manager import StageManager
    from hpnb.hybrid.training.adam import HybridAdam
    from hpnb.hybrid.training.trainer import Trainer
    from hpnb.hybrid.training.warmup import CosineAnnealingWarmupLR, LinearWarmupLR

__all__ = [
    "REFUSED",
    "Boosted",
    "Booster",
    "CosineAnnealingWarmupLR",
    "DistCoordinator",
    "GeminiPlugin",
    "HybridAdam",
    "HybridParallelPlugin",
    "LinearWarmupLR",
    "LowLevelZeroPlugin",
    "StageManager",
    "TorchDDPPlugin",
    "Trainer",
    "launch_from_torch",
]

# Each file is read when a name of it is asked for: to launch takes no transformers.
_FROM = {
    "REFUSED": "refused",
    "Boosted": "boosted",
    "Booster": "booster",
    "CosineAnnealingWarmupLR": "training.warmup",
    "DistCoordinator": "hosts.coordinator",
    "GeminiPlugin": "presets",
    "HybridAdam": "training.adam",
    "HybridParallelPlugin": "plugins",
    "LinearWarmupLR": "training.warmup",
    "LowLevelZeroPlugin": "presets",
    "StageManager": "stage_manager",
    "TorchDDPPlugin": "presets",
    "Trainer": "training.trainer",
    "launch_from_torch": "hosts.launch",
}


def __getattr__(name: str) -> object:
    if name in _FROM:
        return getattr(importlib.import_module(f"{__name__}.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
